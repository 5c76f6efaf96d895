"""`harness launch`: lead a run until it is done."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenacity import (
    retry,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from harness.bucket.heads import sign_off
from harness.bucket.orders import STOP_KEY, stop_order
from harness.cli.alerts import alerting_beside, alerts_for_nodes, receivers
from harness.cli.common import (
    FAILED,
    PREFLIGHT_S,
    PROMETHEUS,
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
from harness.cli.deadline import deadline_text, wanted, work_text
from harness.cli.dry_run import show_plan
from harness.cli.interrupts import act_on, answer, by, heed_signals
from harness.cli.launch_ends import give_up, say_how_it_ended
from harness.cli.look import show_report
from harness.cli.market import Histories, known_before, remembering
from harness.cli.record import RecordFlags, about_launch, keep_launch, with_names
from harness.cli.track import publisher_beside
from harness.core.config import flag, positional
from harness.core.given_files import output_file
from harness.core.world import BadInput, Fenced, HarnessError
from storage.errors import StoreError, StoreUnavailable
from storage.objects import ObjectStore
from storage.opening import normalize, open_store
from storage.text import Console

if TYPE_CHECKING:
    from harness.clouds.local import LocalCloud
    from harness.clouds.skypilot import SkyPilotCloud
    from harness.clouds.tasks import Task
    from harness.controller.book import Book
    from harness.controller.learning import RunGoals
    from harness.controller.recovery import RunOutcome, RunSpec
    from harness.core.world import Policy
    from harness.views.alert_rules import AlertRule


@dataclass(frozen=True)
class LaunchFlags(RecordFlags):
    task: str = positional("the SkyPilot task YAML")
    run: str = flag(
        "",
        "URL of the run (s3://, gs://, az://, file:// or a path); default: a new folder in runs/",
    )
    cloud: str = flag(
        "local",
        "where nodes come from: local (this computer), sky (SkyPilot: costs money)",
        choices=["local", "sky"],
    )
    nodes: str = flag("1:1", "how many nodes, LOW:HIGH or N", check=node_range)
    market: str = flag("demo", "local cloud only: demo, calm, seed:N, or the path of a trace")
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
        "nodes drain when nobody has led the run for so long; default: what each was told by "
        "harness run --leaderless-hours (24)",
        above=0,
    )
    deadline: str = flag(
        "",
        "when the run must be done: a time from its launch on, such as 36h, or a date (UTC), such "
        "as 2026-11-25T18:00; the policy is `deadline` then, unless --policy names another",
        check=deadline_text,
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
    alert: tuple[str, ...] = flag(
        (),
        "tell alerts to https://..., slack:https://... or command:'PROGRAM ARGUMENTS'; repeat for "
        "more; also HARNESS_ALERTS. Nodes get all but commands",
        metavar="RECEIVER",
    )
    alert_rules: str = flag(
        "",
        "rules of alerts besides those that ship: files, package.module:function, "
        "comma-separated; default: HARNESS_ALERT_RULES",
    )
    prometheus: str = flag("", PROMETHEUS, check=prometheus_address)
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


def _secrets(flags: LaunchFlags) -> dict[str, str]:
    """What nodes are given and nobody is told. Raises BadInput."""
    from harness.clouds.tasks import pairs

    key = key_for_nodes(flags.sign_key, os.environ)
    os.environ.update(key)  # the controller signs as well
    kept = pairs(flags.secret, os.environ, "--secret")
    return {**alerts_for_nodes(flags.alert), **key, **kept}


def launch(flags: LaunchFlags) -> int:
    """Lead a run until it is done: launch nodes, replace lost ones, show what happens."""
    from harness.clouds import tasks
    from harness.controller import policies

    console = Console()
    nodes = node_range(flags.nodes)
    url = normalize(flags.run or _new_run(flags.task))
    given = tasks.pairs(flags.env, os.environ)
    envs = {**about_launch(flags, os.environ), **given, "RUN": url}
    told = receivers(flags.alert, flags.alert_rules)
    _check_prometheus(flags)
    task = with_names(tasks.load(flags.task, envs, _secrets(flags)))
    policy = policies.resolve(_policy_name(flags))
    if flags.cloud == "sky":
        policy = policies.together(policy, saving=flags.move_saving, stay_s=flags.move_stay_s)
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
    # what is wrong with the input is told before anything is written anywhere
    local = _cloud(flags, task, url, nodes) if flags.cloud == "local" else None
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
        f"run     {url}\nwatch   harness status {url}\nstop    harness stop {url}",
        highlight=False,
        soft_wrap=True,
    )
    keep_launch(store, flags, task)
    cloud = local or _cloud(flags, task, url, nodes)
    log = state_dir(url, "controller") / "publisher.log"
    beside: list[AbstractContextManager[Any]] = [
        publisher_beside(url, task, log, flags.alert_rules),
        alerting_beside(store, *told, console),
    ]
    if flags.prometheus:
        beside.append(_gauges(flags.prometheus, store, told[1], console))
    if flags.cloud == "sky":  # the market of a local cloud is made up
        beside.append(remembering(url, store, Histories.of(os.environ)))
    ended = _lead(flags, nodes, policy, asked_for, url, store, cloud, console, beside)
    sign_off(store)
    if isinstance(ended, int):
        return ended
    show_report(store, console, flags.html or html_path(url), flags.brief)
    return say_how_it_ended(ended, store, console, url)


def _check_prometheus(flags: LaunchFlags) -> None:
    """Raises BadInput."""
    if flags.prometheus:
        from harness.cli.prometheus import check_address

        check_address(flags.prometheus)


@contextlib.contextmanager
def _gauges(
    at: str, store: ObjectStore, rules: Sequence[AlertRule], console: Console
) -> Iterator[None]:
    from harness.cli.prometheus import exposing
    from harness.views.alerts import AlertWatch
    from harness.views.gauges import RunGauges

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
    """Lead the run to its end, through every interruption, with `beside` entered. An exit status
    if it ends before."""
    from harness.bucket.journal import Journal
    from harness.controller.keeping import KeptLease
    from harness.controller.learning import RunLearner
    from harness.controller.recovery import recover
    from harness.core.facts import RunAsked
    from harness.core.world import World

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
    learner = RunLearner(store, goals, journal.record, *before)
    lease = KeptLease(store, clock, holder, ttl_s=20.0 if sky else 5.0)
    view = _View(store, console)
    asked: KeyboardInterrupt | None = None  # an interruption that is not answered yet
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
                # also a fault of our own: whatever it is, the nodes are none the worse, and
                # somebody must know
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
def _how_it_stands(store: ObjectStore) -> tuple[Book, bool]:
    """The book of the run, and is it over? A store that contradicts itself (lists what it does
    not find) is asked again for a while. Raises StoreError."""
    book = book_of(store)
    # A controller killed after the last step may have left nodes: those are ended first.
    return book, is_final(store) and not book.open


def _run_spec(flags: LaunchFlags, nodes: tuple[int, int]) -> RunSpec:
    from harness.controller.recovery import RunSpec

    minutes = flags.leaderless_minutes
    wanted = RunSpec(
        *nodes,
        budget_usd=flags.budget_usd,
        max_hours=flags.max_hours,
        leaderless_s=None if minutes is None else minutes * 60,
    )
    if flags.cloud == "sky":
        from harness.clouds.sky_client import IDLE_MINUTES

        return replace(
            wanted,
            alone_s=IDLE_MINUTES * 60.0,
            poll_s=1.0,
            lost_after_s=90.0,
            block_limit_s=600.0,
            exit_grace_s=180.0,
            terminate_timeout_s=900.0,
        )
    # The local cloud answers at once, so everything that waits for a cloud is short.
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
        from harness.clouds.local import LocalCloud

        return LocalCloud(
            state_dir(url), task, flags.market, url, wanted=nodes, notices=flags.local_notices
        )
    from harness.clouds.skypilot import SkyPilotCloud
    from harness.controller.policies import uses_on_demand

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
        log_dir=state_dir(url, "sky-logs"),
    )


class _View:
    """The live view, in a thread of its own."""

    def __init__(self, store: ObjectStore, console: Console):
        self._store, self._console = store, console
        self._done: threading.Event | None = None

    def show(self) -> None:
        from harness.views.monitor import follow

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
