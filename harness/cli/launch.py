"""`harness launch`: lead a run until it is done."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_random_exponential

from harness.bucket.archive import read_facts
from harness.bucket.controller_lease import KeptLease
from harness.bucket.journal import Journal
from harness.bucket.layout import STOP_KEY
from harness.bucket.member_heartbeats import HeartbeatReader
from harness.bucket.orders import stop_order
from harness.bucket.signed_heads import sign_off
from harness.check.output_folders import lost_with_node
from harness.cli import doctor
from harness.cli.alerts_command import alerting_beside, alerts_for_nodes, receivers
from harness.cli.common import (
    DONE,
    ENDED_EARLY,
    FAILED,
    INTERRUPTED,
    LEFT,
    PREFLIGHT_S,
    PROMETHEUS,
    AlertFlags,
    RealClock,
    book_of,
    checked_store,
    html_path,
    is_final,
    is_local,
    key_for_nodes,
    local_cloud,
    names_of,
    node_range,
    prometheus_address,
    sky_broker,
    state_dir,
)
from harness.cli.dry_run import deadline_text, show_plan, wanted, work_text
from harness.cli.market_command import Histories, known_before, remembering
from harness.cli.node_logs import logs_beside
from harness.cli.publish import publisher_beside
from harness.cli.run_record import RecordFlags, about_launch, keep_launch, with_names
from harness.cli.status import show_report
from harness.cli.stop import ask_stop
from harness.clouds import sky_task
from harness.clouds.own_wheel import WHEEL_ENV, keep_wheel
from harness.clouds.sky_broker import IDLE_MINUTES
from harness.clouds.sky_task import pairs
from harness.clouds.skypilot import SkyPilotCloud
from harness.controller import policies
from harness.controller.learning import RunEstimator
from harness.controller.policies import uses_on_demand
from harness.controller.recovery import recover
from harness.controller.run_limits import RunSpec
from harness.core.facts import AttemptEnded, RunAsked, WorkerFailed
from harness.core.flags import flag, positional
from harness.core.input_files import output_file
from harness.core.world import BadInput, Fenced, HarnessError, World
from harness.look.alerts.alert_evaluator import AlertWatch
from harness.look.reports.live_view import follow
from harness.look.trackers.prometheus import RunGauges, check_address, exposing
from harness.node.heartbeat import tolerate_full_logs
from storage.errors import StoreError, StoreUnavailable
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize, open_store
from storage.terminal_text import Console, plain

if TYPE_CHECKING:
    from harness.clouds.sky_task import Task
    from harness.controller.learning import RunGoals
    from harness.controller.recovery import RunOutcome
    from harness.core.world import Policy
    from harness.ledger.attempts import AttemptHistory
    from harness.local.local_cloud import LocalCloud
    from harness.look.alerts.alert_rules import AlertRule

# Ctrl-C and signals while `harness launch` leads a run: what they request, and how to act.

# closing terminals and service managers send several signals: within this time they count as one
SAME_S = 3.0


CLOUDS = ("aws", "azure", "gcp", "kubernetes", "lambda", "nebius", "oci", "runpod", "slurm")


class TerminationRequest(KeyboardInterrupt):
    """A signal that ends the controller. It is handled like Ctrl-C without a terminal."""


@contextlib.contextmanager
def heed_signals(log: Path) -> Iterator[None]:
    """Raise Told for SIGTERM and SIGHUP while entered. When the terminal closes, output goes to
    `log`."""
    # read now: a closed terminal is no longer recognized as one
    terminal = sys.stdout.isatty() or sys.stderr.isatty()
    heard_s = -SAME_S

    def told(number: int, _: object) -> None:
        nonlocal heard_s
        if number == signal.SIGHUP and terminal:
            _write_to(log)
        before_s, heard_s = heard_s, time.monotonic()
        if heard_s - before_s >= SAME_S:
            raise TerminationRequest(signal.Signals(number).name)

    # ignored signals stay ignored (`nohup harness launch`)
    heeded = [
        n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, told) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_to(log: Path) -> None:
    """Redirect our output to a file. Writing to a closed terminal would be an error."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out, null = (
        os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600),
        os.open(os.devnull, os.O_RDONLY),
    )
    for standard, target in ((0, null), (1, out), (2, out)):
        os.dup2(target, standard)
    os.close(out)
    os.close(null)


def answer(asked: KeyboardInterrupt, draining: bool, what: str, console: Console) -> str:
    """Return what an interruption requests: "drain", "leave", "kill" or "carry on". A second one
    while nodes drain means "kill". `what`: the setting --on-interrupt."""
    told = isinstance(asked, TerminationRequest)
    if draining:
        return "kill"
    if what != "ask":
        return what
    if told or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "drain"
    console.print("\nInterrupted.", style="bold")
    console.print(
        "d = drain: snapshot, then stop   l = leave it running   k = kill now   c = carry on"
    )
    try:
        return {"l": "leave", "k": "kill", "c": "carry on"}.get(
            console.input("> ").strip().lower()[:1], "drain"
        )
    except (TerminationRequest, EOFError):
        return "drain"
    except KeyboardInterrupt:
        return "kill"


def act_on(
    what: str,
    by: str,
    store: ObjectStore,
    cloud: LocalCloud | SkyPilotCloud,
    console: Console,
    url: str,
) -> int | None:
    """Carry out `what`. `by`: the interruption in words. Return the exit status, or `None` to go on
    leading (until the drain is over)."""
    if what == "carry on":
        return None
    if what == "leave":
        console.print(
            f"Left running. Lead it again with the same command; watch: harness status {url}; end "
            f"it: harness stop {url}"
        )
        return INTERRUPTED
    if what == "drain":
        console.print(
            f"{by[0].upper()}{by[1:]}. Draining: a snapshot is made, then everything is ended. The "
            "same again kills at once."
        )
        ask_stop(store, f"the controller was {by}")
        return None
    console.print("Ending all nodes ...")
    with contextlib.suppress(HarnessError):
        for node in cloud.nodes():
            cloud.terminate(node.attempt)
    cloud.shutdown()
    console.print("Killed. What was committed is safe; the same command resumes from it.")
    return INTERRUPTED


def by(asked: KeyboardInterrupt) -> str:
    """Return a description of the interruption."""
    return (
        f"told to end by {asked}"
        if isinstance(asked, TerminationRequest)
        else "interrupted with Ctrl-C"
    )


# The end of `harness launch`: its messages and exit status when a run has ended, or when the
# controller cannot go on.


def say_how_it_ended(outcome: RunOutcome, store: ObjectStore, console: Console, url: str) -> int:
    """Print how the run ended, and return the exit status."""
    if outcome.unproven:
        words = (
            f"{outcome.reason}. This cloud never showed their machines. Look whether they are "
            f"gone, from where they were launched: harness down {url}"
        )
        console.print(f"\n{words}", style="bold red", highlight=False, soft_wrap=True)
    if outcome.outcome == "done":
        return FAILED if outcome.unproven else DONE
    console.print(
        Text.assemble("\n", (outcome.outcome, "bold red"), f": {outcome.reason}"), soft_wrap=True
    )
    _print_tail(store, console)
    console.print(
        f"The run stands at step {outcome.committed_step}; the same command resumes it from there.",
        highlight=False,
    )
    return FAILED if outcome.outcome == "failed" else ENDED_EARLY


def give_up(
    error: Exception,
    store: ObjectStore,
    cloud: LocalCloud | SkyPilotCloud | None,
    console: Console,
    url: str,
) -> int:
    """End a controller that cannot go on, and return the exit status. Nodes train without one, so
    they are left as they are. If `error` is a mistake in the input and no node exists, end
    everything and raise it."""
    if cloud is not None:
        if isinstance(error, BadInput) and _nothing_runs(store, cloud):
            cloud.shutdown()
            raise error
        cloud.close()
    said = f"""harness launch: {error}
This controller cannot lead the run on. It has touched no node: nodes go on training and commit
snapshots without it.
  lead them again   the same command, once the cause is mended (exit status {LEFT}: a supervisor may
                    try again)
  watch them        harness status {url}
  end them          harness down {url}
Until then no lost node is replaced. Nodes keep --budget-usd and --max-hours by themselves: they
drain when these are reached, or without a controller for longer than --leaderless-minutes, or
`leaderless_hours` of `harness run` (24)."""
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return LEFT


def _nothing_runs(store: ObjectStore, cloud: LocalCloud | SkyPilotCloud) -> bool:
    """Return whether surely no node of this run exists, so that a mistake in the input has cost
    nothing yet."""
    try:
        book = book_of(store)
        if (
            book.unread
            or any(n.alive for n in cloud.nodes())
            or any(n.up_s is not None for n in book.open.values())
        ):
            return False
        return not any(
            b.attempt in book.open and not b.gone
            for b in HeartbeatReader(store, time.monotonic).look()
        )
    except (HarnessError, StoreError):
        return False


def _print_tail(store: ObjectStore, console: Console) -> None:
    """Print the last log lines of the newest worker that failed, if there is one."""
    failures = [s.fact for s in read_facts(store, steps=False) if isinstance(s.fact, WorkerFailed)]
    if failures:
        last = failures[-1]
        console.print(
            f"\nLast words of rank {last.rank} on {last.member} ({last.error}):",
            style="bold",
            highlight=False,
        )
        console.print(last.log_tail, markup=False, highlight=False, soft_wrap=True)


def _cloud_name(text: str) -> None:
    """Refuse the name of a cloud, which belongs into the task. Raises ValueError."""
    if text.lower() in CLOUDS:
        raise ValueError(
            f"wanted local or sky, found {text!r}; SkyPilot launches there: --cloud sky, with "
            f"`resources: {{infra: {text.lower()}}}` in the task"
        )


@dataclass(frozen=True)
class LaunchFlags(RecordFlags, AlertFlags):
    TITLES: ClassVar = {
        "limits": (
            *("budget_usd", "max_hours", "leaderless_minutes"),
            *("deadline", "work", "usd_per_hour_late"),
        ),
        "choice of nodes": ("policy", "move_saving", "move_stay_s", "on_demand"),
        "dry run": ("dry_run", "clouds", "json"),
        "local cloud": ("market", "local_notices"),
        "the task's environment": ("env", "secret", "sign_key"),
        "observability": ("prometheus", "alert", "alert_rules", "html", "brief", "follow_logs"),
        "provenance": ("on_change", "diff", "owner", "project", "experiment", "purpose"),
    }

    task: str = positional("the SkyPilot task YAML")
    run: str = flag(
        "",
        "URL of the run (s3://, gs://, az://, file:// or a path); default: a new folder in runs/",
    )
    cloud: str = flag(
        "local",
        "where nodes come from: local (this computer), sky (SkyPilot: costs money)",
        choices=["local", "sky"],
        check=_cloud_name,
    )
    nodes: str = flag("1:1", "how many nodes, LOW:HIGH or N", check=node_range)
    market: str = flag("demo", "local cloud only: demo, calm, once, seed:N, or the path of a trace")
    local_notices: str = flag(
        "aws",
        "local cloud only: whose metadata service its nodes have",
        choices=["aws", "gcp", "azure"],
    )
    policy: str = flag(
        "",
        "how to choose: a name, package.module:function, or one around another, "
        "'at_most(best_value, usd_per_h=2)' (docs/POLICIES.md); default: cheapest (sky: "
        "best_value; with --deadline: deadline)",
    )
    dry_run: bool = flag(
        False, "print the plan (ranked offers, world, first choice and why), and launch nothing"
    )
    clouds: str = flag(
        "",
        "with --cloud sky --dry-run: plan for these (aws,gcp,...) without asking which ones are "
        "enabled",
    )
    move_saving: float = flag(
        0.15,
        "sky: move all nodes to another place when work is cheaper there by this share; 0: never",
        at_most=1,
    )
    move_stay_s: float = flag(1800.0, "sky: and when they have been where they are for so long")
    on_demand: bool = flag(
        False, "sky: offer on-demand nodes too (implied by policies that use them)"
    )
    json: bool = flag(False, "with --dry-run: the plan as JSON")
    budget_usd: float | None = flag(None, "stop before more than this is spent", above=0)
    max_hours: float | None = flag(None, "stop after this many hours", above=0)
    leaderless_minutes: float | None = flag(
        None,
        "nodes drain when nobody has led the run for so long; default: the setting "
        "leaderless_hours of `harness run` (24)",
        above=0,
    )
    deadline: str = flag(
        "",
        "when the run must be done: a time from its launch on, such as 36h, or a date (UTC), such "
        "as 2026-11-25T18:00; the policy is `deadline` then, unless --policy names another",
        check=deadline_text,
    )
    usd_per_hour_late: float | None = flag(
        None,
        "what each hour after --deadline costs, for a policy by_deadline(...), which then buys on "
        "demand only where that costs less",
        above=0,
    )
    work: str = flag(
        "",
        "how long all of it takes, undisturbed, on the most --nodes of the fastest offer, such as "
        "48h; needed until steps were timed only",
        check=work_text,
    )
    env: tuple[str, ...] = flag(
        (), "NAME=value for the task; repeat for more", metavar="NAME=value"
    )
    secret: tuple[str, ...] = flag(
        (), "NAME or NAME=value, kept out of logs; repeat for more", metavar="NAME=value"
    )
    sign_key: str = flag(
        "",
        "a file with the key that signs what the run writes (docs/PROOF.md); it goes to the nodes "
        "as a secret, never to the bucket; default: HARNESS_SIGNING_KEY",
        metavar="FILE",
    )
    prometheus: str = flag("", PROMETHEUS, check=prometheus_address)
    unmanaged: bool = flag(
        False,
        "also run a script without a session (neither harness.attach() nor a trainer that is "
        "adapted), of which nothing is saved; without this, such a run fails",
    )
    on_interrupt: str = flag(
        "ask",
        "what Ctrl-C does: ask, drain, leave or kill; so do SIGTERM and SIGHUP, which drain "
        "instead of asking",
        choices=["ask", "drain", "leave", "kill"],
    )
    html: str = flag(
        "",
        "also write the report as this HTML file (default: report.html in the run's folder, if it "
        "has one)",
        check=output_file,
    )
    brief: bool = flag(False, "end without the report in the terminal")
    follow_logs: bool = flag(
        False, "also show what the script prints on each node, behind the node's number"
    )


def _secrets(flags: LaunchFlags) -> dict[str, str]:
    """Return the secrets of the nodes: receivers of alerts, signing key, and --secret. Raises
    BadInput."""
    key = key_for_nodes(flags.sign_key, os.environ)
    os.environ.update(key)  # the controller signs as well
    kept = pairs(flags.secret, os.environ, "--secret")
    return {**alerts_for_nodes(flags.alert), **key, **kept}


def _unmanaged(flags: LaunchFlags) -> dict[str, str]:
    """Return the variable that tells agents whether a script that nothing adopts ends the run."""
    return {"HARNESS_MUST_ADOPT": "" if flags.unmanaged else "1"}


def policy_of(flags: LaunchFlags) -> Policy:
    """Return the policy that decides. Raises BadInput."""
    name = _policy_name(flags)
    if flags.usd_per_hour_late and not (flags.deadline and "by_deadline" in name):
        raise BadInput(
            "--usd-per-hour-late: wanted --deadline, and a --policy such as "
            f"'by_deadline(best_value)'; found {name!r}, which asks for no price of lateness"
        )
    if flags.cloud != "sky":
        return policies.resolve(name)
    return policies.launched(name, saving=flags.move_saving, stay_s=flags.move_stay_s)


def launch(flags: LaunchFlags) -> int:
    """Lead a run until it is done: launch nodes, and replace lost ones."""
    tolerate_full_logs()
    console = Console()
    _check_skypilot(flags.cloud)
    nodes, url = node_range(flags.nodes), normalize(flags.run or _new_run(flags.task))
    given = sky_task.pairs(flags.env, os.environ)
    envs = {**about_launch(flags, os.environ), **given, "RUN": url, **_unmanaged(flags)}
    told = receivers(flags.alert, flags.alert_rules)
    _check_prometheus(flags)
    task = with_names(sky_task.load(flags.task, envs, _secrets(flags)))
    policy = policy_of(flags)
    if flags.cloud == "sky":
        _warn_of_lost_output(task)
    if flags.dry_run:
        return show_plan(
            flags,
            task,
            policy,
            url,
            _run_spec(flags, nodes),
            lambda: _cloud(flags, task, url, nodes),
            console,
        )
    # wrong input is reported before anything is written anywhere
    cloud = _cloud(flags, task, url, nodes)
    _check_ready(flags.run, cloud)
    task = cloud.task = _with_wheel(task, given)
    if flags.deadline:
        wanted(flags, nodes, book_of(open_store(url, retry_within_s=PREFLIGHT_S)), time.time())
    store = checked_store(url)
    try:
        book, over = _how_it_stands(store)
    except StoreError as e:
        return give_up(e, store, None, console, url)
    if over:
        if is_local(url):
            local_cloud(url).shutdown()
        console.print(
            f"The run at {url} is finished already; this is its report. For another training, name "
            "another run URL."
        )
        return show_report(store, console, flags.html or html_path(url))
    asked_for = wanted(flags, nodes, book, RealClock().now())
    if before := stop_order(store):
        console.print(f"This run was stopped earlier ({before.reason}); going on.")
        store.delete(STOP_KEY)
    console.print(
        f"run     {url}\nwatch   harness status {url}\nlogs    harness logs {url}\n"
        f"stop    harness stop {url}",
        highlight=False,
        soft_wrap=True,
    )
    keep_launch(store, flags, task)
    log = state_dir(url, "controller") / "publisher.log"
    beside: list[AbstractContextManager[Any]] = [
        publisher_beside(url, task, log, flags.alert_rules),
        alerting_beside(store, *told, console),
        *_asked_beside(flags, url, store, told[1], console),
    ]
    if flags.cloud == "sky":  # the market of a local cloud is invented
        beside.append(remembering(url, store, Histories.of(os.environ)))
    ended = _lead(flags, nodes, policy, asked_for, url, store, cloud, console, beside)
    sign_off(store)
    if isinstance(ended, int):
        return ended
    show_report(store, console, flags.html or html_path(url), flags.brief)
    _say_if_undisturbed(flags, ended, store, console)
    return say_how_it_ended(ended, store, console, url)


def _say_if_undisturbed(
    flags: LaunchFlags, outcome: RunOutcome, store: ObjectStore, console: Console
) -> None:
    """Print that a run of the local cloud was done before its market took a node, if so."""
    if flags.cloud != "local" or flags.market == "calm" or outcome.outcome != "done":
        return
    ends = [s.fact.end for s in read_facts(store) if isinstance(s.fact, AttemptEnded)]
    if not {"drained", "preempted"} & {*ends}:
        console.print(
            "\nNo node was taken: the run was over before its market did so. Give it more steps to "
            "see it survive one.",
            highlight=False,
            soft_wrap=True,
        )


def _warn_of_lost_output(task: Task) -> None:
    """Print which folder of the script goes with its node, if one does."""
    if warning := lost_with_node(task):
        said = Text.assemble(("warning ", "yellow"), plain(warning))
        Console(stderr=True).print(said, soft_wrap=True)


def _check_skypilot(cloud: str) -> None:
    """Check that the package of --cloud sky is installed. Raises BadInput."""
    if cloud == "sky":
        doctor.refuse(doctor.skypilot())


def _check_ready(run: str, cloud: LocalCloud | SkyPilotCloud) -> None:
    """Check that SkyPilot, its clouds and the bucket would work, as `harness prove doctor` does; of
    the local cloud, nothing. Nothing is left behind. Raises BadInput."""
    if not isinstance(cloud, SkyPilotCloud):
        return
    if not run:
        raise BadInput(
            "--cloud sky: wanted --run with the URL of a bucket that all nodes reach (s3://, "
            "gs://, az://), found none; its default is a folder of this computer"
        )

    def opened(url: str) -> ObjectStore:
        return open_store(url, retry_within_s=PREFLIGHT_S)

    try:
        doctor.refuse(doctor.server(cloud.sky))
        doctor.refuse(doctor.clouds(cloud.sky))
        doctor.refuse(doctor.bucket(cloud.run_url, opened, secrets.token_hex(4)))
    except BadInput:
        cloud.close()
        raise


def _with_wheel(task: Task, given: Mapping[str, str]) -> Task:
    """Return the task with the wheel of this very package, if it installs one and --env does not
    name another. Raises BadInput."""
    if WHEEL_ENV not in task.envs or WHEEL_ENV in given:
        return task
    return replace(task, envs={**task.envs, WHEEL_ENV: keep_wheel(Path.home())})


def _check_prometheus(flags: LaunchFlags) -> None:
    """Check that the address of --prometheus is available. Raises BadInput."""
    if flags.prometheus:

        check_address(flags.prometheus)


def _asked_beside(
    flags: LaunchFlags, url: str, store: ObjectStore, rules: Sequence[AlertRule], console: Console
) -> Iterator[AbstractContextManager[Any]]:
    """Yield what runs beside the recovery loop only if it was asked for."""
    if flags.follow_logs:
        yield logs_beside(url, flags.cloud == "sky", console)
    if flags.prometheus:
        yield _gauges(flags.prometheus, store, rules, console)


@contextlib.contextmanager
def _gauges(
    at: str, store: ObjectStore, rules: Sequence[AlertRule], console: Console
) -> Iterator[None]:
    with exposing(at, RunGauges(store, watch=AlertWatch(rules)).text) as url:
        console.print(f"numbers {url}", highlight=False, soft_wrap=True)
        yield


def _policy_name(flags: LaunchFlags) -> str:
    usual = "best_value" if flags.cloud == "sky" else "cheapest"
    return flags.policy or ("deadline" if flags.deadline else usual)


def _lead(
    flags: LaunchFlags,
    nodes: tuple[int, int],
    policy: Policy,
    asked_for: RunGoals,
    url: str,
    store: ObjectStore,
    cloud: LocalCloud | SkyPilotCloud,
    console: Console,
    beside: Sequence[AbstractContextManager[Any]],
) -> RunOutcome | int:
    """Lead the run to its end, through every interruption, with `beside` entered. Return its
    outcome, or an exit status if the controller ends first."""
    clock, sky, run = RealClock(), flags.cloud == "sky", _run_spec(flags, nodes)
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
    journal = Journal(store, f"controller-{secrets.token_hex(6)}", clock.now)
    world = World(clock, cloud, store, random.Random())
    market = "" if sky else flags.market
    limits = (flags.budget_usd, flags.max_hours)
    wants = (asked_for.deadline_s, asked_for.work_s / 3600 or None)
    journal.record(RunAsked(flags.task, *nodes, _policy_name(flags), market, *limits, *wants))
    goals = replace(asked_for, look_s=run.poll_s)
    histories = Histories.of(os.environ)
    before = known_before(url, histories, clock.now(), console) if sky else ({}, {})
    learner = RunEstimator(store, goals, journal.record, *before)
    lease = KeptLease(store, clock, holder, ttl_s=20.0 if sky else 5.0)
    view = _View(store, console)
    asked: KeyboardInterrupt | None = None  # an interruption that is not handled yet
    draining = False
    with heed_signals(state_dir(url, "controller") / "log"), contextlib.ExitStack() as stack:
        stack.callback(lease.close)
        for each in beside:
            stack.enter_context(each)
        while True:
            try:
                if asked is not None:
                    view.end()
                    what = answer(asked, draining, flags.on_interrupt, console)
                    draining = what in ("drain", "kill")
                    if (code := act_on(what, by(asked), store, cloud, console, url)) is not None:
                        return code
                    asked = None
                view.show()
                outcome = recover(run, policy, world, journal, lease, learner)
                view.end()
                break
            except KeyboardInterrupt as e:
                asked = e
            except Fenced as e:
                view.end()
                console.print(str(e), style="red")
                console.print(f"Nothing was touched. Watch it with: harness status {url}")
                return FAILED
            except Exception as e:
                # also a bug of ours: the nodes are unaffected, and the user must see it
                view.end()
                if not isinstance(e, (StoreError, HarnessError)):
                    sys.excepthook(type(e), e, e.__traceback__)
                return give_up(e, store, cloud, console, url)
        cloud.shutdown()
    return outcome


@retry(
    retry=retry_if_exception_type(StoreUnavailable),
    stop=stop_after_delay(PREFLIGHT_S),
    wait=wait_random_exponential(multiplier=0.2, max=2.0),
    reraise=True,
)
def _how_it_stands(store: ObjectStore) -> tuple[AttemptHistory, bool]:
    """Return the book of the run, and whether the run is over. A store that contradicts itself
    (lists what it does not find) is retried for a while. Raises StoreError."""
    book = book_of(store)
    # a controller that was killed after the last step may have left nodes, which must end first
    return book, is_final(store) and not book.open


def _run_spec(flags: LaunchFlags, nodes: tuple[int, int]) -> RunSpec:
    minutes = flags.leaderless_minutes
    wanted = RunSpec(
        *nodes,
        budget_usd=flags.budget_usd,
        max_hours=flags.max_hours,
        leaderless_s=None if minutes is None else minutes * 60,
    )
    if flags.cloud == "sky":

        return replace(
            wanted,
            alone_s=IDLE_MINUTES * 60.0,
            poll_s=1.0,
            lost_after_s=90.0,
            block_limit_s=600.0,
            exit_grace_s=180.0,
            terminate_timeout_s=900.0,
        )
    # the local cloud answers immediately, so all timeouts for a cloud are short
    local = replace(
        wanted,
        poll_s=0.5,
        lost_after_s=10.0,
        block_limit_s=6.0,
        exit_grace_s=90.0,
        max_refused_s=10.0,
    )
    return replace(local, launch_s=5.0, terminate_s=5.0)


def _cloud(
    flags: LaunchFlags, task: Task, url: str, nodes: tuple[int, int]
) -> LocalCloud | SkyPilotCloud:
    if flags.cloud == "local":
        from harness.local.local_cloud import LocalCloud

        return LocalCloud(
            state_dir(url), task, flags.market, url, wanted=nodes, notices=flags.local_notices
        )

    clouds = names_of(flags.clouds) or None
    if clouds and not flags.dry_run:
        raise BadInput(
            "--clouds is for --dry-run; to launch, SkyPilot must have the clouds enabled (`sky "
            "check`)"
        )
    on_demand = flags.on_demand or uses_on_demand(_policy_name(flags))
    return SkyPilotCloud(
        task,
        url,
        sky_broker(url),
        clouds=clouds,
        on_demand=on_demand,
        fleet=nodes[1] > 1,
        log_dir=state_dir(url, "sky-logs"),
    )


class _View:
    """The live view of the run, in a thread of its own."""

    def __init__(self, store: ObjectStore, console: Console):
        self._store, self._console = store, console
        self._done: threading.Event | None = None

    def show(self) -> None:
        done = self._done = threading.Event()
        about = {"until_ended": False}
        self._thread = threading.Thread(
            target=follow, args=(self._store, done.is_set, self._console), kwargs=about, daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        if self._done is not None:
            self._done.set()
            self._thread.join(10.0)
            self._done = None


def _new_run(task: str) -> str:
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{Path(task).stem}"
