"""The `harness` command: the only place that builds the real world (clock, cloud, randomness, store).

Each sub-command is one frozen dataclass (its flags) and one function. Exit status: 0 it is done, 1 it failed, 2 the input was
wrong, 3 it was stopped before its end, 4 (`launch`) the controller cannot go on and has left the nodes training, 130 interrupted.
A supervisor starts `launch` again on 1 and 4.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from harness.bucket.orders import SNAPSHOT, STOP_KEY, StopOrder, ask_to_stop, stop_order
from harness.cli.init import InitFlags, init
from harness.core.config import Bounds, Parser, add_flags, build, flag, positional
from harness.core.world import BadInput, CloudUnavailable, Fenced, HarnessError
from harness.node.progress import FACTOR, Limits
from storage.objects import RETRY_WITHIN_S, NotFound, ObjectStore, StoreError, normalize, open_store
from storage.text import Console, plain

if TYPE_CHECKING:
    from harness.bucket.beats import Beat
    from harness.clouds.local import LocalCloud
    from harness.clouds.skypilot import Broker, SkyPilotCloud
    from harness.clouds.tasks import Task
    from harness.controller.book import Book
    from harness.controller.recovery import RunSpec
    from harness.core.world import Policy
    from storage.command import Notes

DONE, FAILED, WRONG_INPUT, ENDED_EARLY, LEFT, INTERRUPTED = 0, 1, 2, 3, 4, 130
SAME_S = 3.0  # a terminal that closes and a service manager that stops us send several signals: within this they are one
PREFLIGHT_S = 10.0  # how long a bucket may be silent before a launch is refused


class RealClock:
    def now(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


# ---- what flags may say -----------------------------------------------------------------------------------------
def _nodes(text: str) -> tuple[int, int]:
    """LOW:HIGH or N. Raises ValueError that says what is wanted."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise ValueError(f"wanted LOW:HIGH or N with 1 <= LOW <= HIGH, for example 1:4; found {text!r}")
    return int(low), int(high or low)


def _workers(text: str) -> None:
    """A number of workers, or auto. Raises ValueError that says what is wanted."""
    if text != "auto" and not (text.isdecimal() and int(text) >= 1):
        raise ValueError(f"wanted a number or auto, at least 1; found {text!r}")


def _moment(text: str) -> None:
    _of_sources("moment", text)


def _duration(text: str) -> None:
    _of_sources("duration", text)


def _of_sources(parser: str, text: str) -> None:
    """Raises ValueError that says what is wanted."""
    from harness.agent import sources

    try:
        if text:
            getattr(sources, parser)(text)
    except BadInput as e:
        raise ValueError(str(e)) from None


# ---- launch -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LaunchFlags:
    task: str = positional("the SkyPilot task YAML")
    run: str = flag("", "URL of the run (s3://, gs://, az://, file:// or a path); default: a new folder under runs/")
    cloud: str = flag("local", "where nodes come from: local (this computer), sky (SkyPilot: costs money)", choices=["local", "sky"])
    nodes: str = flag("1:1", "how many nodes, LOW:HIGH or N", check=_nodes)
    market: str = flag("demo", "local cloud only: demo, calm, seed:N, or the path of a trace")
    local_notices: str = flag("aws", "local cloud only: whose metadata service its nodes have", choices=["aws", "gcp", "azure"])
    policy: str = flag("", "how to choose: a name, or package.module:function; default: cheapest (sky: best_value)")
    dry_run: bool = flag(False, "print the plan (ranked offers, world, first choice and why), and launch nothing")
    clouds: str = flag("", "with --cloud sky --dry-run: plan for these (aws,gcp,...) without asking which ones are enabled")
    move_saving: float = flag(0.15, "sky: move all nodes to another place when work is cheaper there by this share; 0: never", at_most=1)
    move_stay_s: float = flag(1800.0, "sky: and when they have been where they are for so long")
    on_demand: bool = flag(False, "sky: offer on-demand nodes too (implied by policies that use them)")
    json: bool = flag(False, "with --dry-run: the plan as JSON")
    budget_usd: float | None = flag(None, "stop before more than this is spent", above=0)
    max_hours: float | None = flag(None, "stop after this many hours", above=0)
    env: tuple[str, ...] = flag((), "NAME=value for the task; repeat for more", metavar="NAME=value")
    secret: tuple[str, ...] = flag((), "NAME or NAME=value, kept out of logs; repeat for more", metavar="NAME=value")
    on_interrupt: str = flag(
        "ask", "what Ctrl-C does: ask, drain, leave or kill; so do SIGTERM and SIGHUP, which drain instead of asking",
        choices=["ask", "drain", "leave", "kill"],
    )  # fmt: skip
    html: str = flag("", "also write the report as this HTML file (default: report.html in the run's folder, if it has one)")
    brief: bool = flag(False, "end without the report in the terminal")


def launch(flags: LaunchFlags) -> int:
    """Lead a run until it is done: launch nodes, replace lost ones, show what happens."""
    from harness.bucket.journal import Journal
    from harness.bucket.lease import Lease
    from harness.clouds import tasks
    from harness.controller import policies
    from harness.controller.recovery import recover
    from harness.core.facts import RunAsked
    from harness.core.world import World

    console = Console()
    nodes = _nodes(flags.nodes)
    url = normalize(flags.run or _new_run(flags.task))
    envs = {**tasks.pairs(flags.env, os.environ), "RUN": url}
    task = tasks.load(flags.task, envs, tasks.pairs(flags.secret, os.environ, "--secret"))
    sky = flags.cloud == "sky"
    named = flags.policy or ("best_value" if sky else "cheapest")
    policy = policies.resolve(named)
    if sky:
        policy = policies.together(policy, saving=flags.move_saving, stay_s=flags.move_stay_s)
    if flags.dry_run:
        return _plan(flags, task, policy, url, nodes, console)
    store = _checked_store(url)
    try:
        final = _is_final(store)
    except StoreError as e:
        return _give_up(e, store, None, console, url)
    if final:
        console.print(f"The run at {url} is finished already; this is its report. For another training, name another run URL.")
        return _report(store, console, flags.html or _html_path(url))
    if before := stop_order(store):
        console.print(f"This run was stopped earlier ({before.reason}); going on.")
        store.delete(STOP_KEY)
    console.print(f"run     {url}\nwatch   harness status {url}\nstop    harness stop {url}", highlight=False, soft_wrap=True)

    clock = RealClock()
    run = _run_spec(flags, nodes)
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
    journal = Journal(store, f"controller-{secrets.token_hex(6)}", clock.now)
    cloud = _cloud(flags, task, url, nodes)
    world = World(clock, cloud, store, random.Random())
    journal.record(RunAsked(flags.task, *nodes, named, "" if sky else flags.market, flags.budget_usd))
    lease = Lease(store, clock, holder, ttl_s=20.0 if sky else 5.0)
    view = _View(store, console)
    asked: KeyboardInterrupt | None = None  # an interruption that is not answered yet
    draining = False
    with _heed_signals(_state_dir(url, "controller") / "log"):
        while True:
            try:
                if asked is not None:
                    view.end()
                    what = _answer(asked, draining, flags.on_interrupt, console)
                    draining = what in ("drain", "kill")
                    by = f"told to end by {asked}" if isinstance(asked, Told) else "interrupted with Ctrl-C"
                    if (code := _interrupted(what, by, store, cloud, console, url)) is not None:
                        return code
                    asked = None
                view.show()
                outcome = recover(run, policy, world, journal, lease)
                view.end()
                break
            except KeyboardInterrupt as e:
                asked = e
            except Fenced as e:
                view.end()
                console.print(str(e), style="red")
                console.print(f"Nothing was touched. Watch it with: harness status {url}")
                return FAILED
            except Exception as e:  # also a fault of our own: whatever it is, the nodes are none the worse, and somebody must know
                view.end()
                if not isinstance(e, (StoreError, HarnessError)):
                    traceback.print_exc()
                return _give_up(e, store, cloud, console, url)
        cloud.shutdown()
    _report(store, console, flags.html or _html_path(url), flags.brief)
    if outcome.unproven:
        names = _attempts(outcome.unproven)
        words = f"{names}: this cloud never showed their machines. Look whether they are gone: harness down {url}"
        console.print(f"\n{words}", style="bold red", highlight=False, soft_wrap=True)
    if outcome.outcome == "done":
        return DONE
    console.print(Text.assemble("\n", (outcome.outcome, "bold red"), f": {outcome.reason}"), soft_wrap=True)
    _print_tail(store, console)
    console.print(f"The run stands at step {outcome.committed_step}; the same command resumes it from there.", highlight=False)
    return FAILED if outcome.outcome == "failed" else ENDED_EARLY


def _give_up(error: Exception, store: ObjectStore, cloud: LocalCloud | SkyPilotCloud | None, console: Console, url: str) -> int:
    """This controller cannot lead on. Nodes need none in order to train, so they are left as they are. A mistake in the input that is
    found before there are any ends everything: then it raises `error`."""
    if cloud is not None:
        if isinstance(error, BadInput) and _nothing_runs(store, cloud):
            cloud.shutdown()
            raise error
        cloud.close()
    said = f"""harness launch: {error}
This controller cannot lead the run on. It has touched no node: nodes go on training and commit snapshots without it.
  lead them again   the same command, once the cause is mended (exit status {LEFT}: a supervisor may try again)
  watch them        harness status {url}
  end them          harness down {url}
Until then no lost node is replaced, and neither --budget-usd nor --max-hours is kept.
Without a controller for longer than `harness run --leaderless-hours` (24) nodes drain."""
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return LEFT


def _nothing_runs(store: ObjectStore, cloud: LocalCloud | SkyPilotCloud) -> bool:
    """Is it sure that no node of this run is there? Then a mistake in the input has cost nothing yet."""
    from harness.bucket.beats import Beats

    try:
        book = _book(store)
        if book.unread or any(n.alive for n in cloud.nodes()) or any(n.up_s is not None for n in book.open.values()):
            return False
        return not any(b.attempt in book.open and not b.gone for b in Beats(store, time.monotonic).look())
    except (HarnessError, StoreError):
        return False


def _attempts(numbers: Collection[int]) -> str:
    return f"attempt{'s' if len(numbers) > 1 else ''} {', '.join(map(str, sorted(numbers)))}"


def _cluster(url: str, attempt: int) -> str:
    from harness.clouds.skypilot import cluster

    return cluster(url, attempt)


def _book(store: ObjectStore) -> Book:
    """What the controllers of a run have written down."""
    from harness.bucket.journal import read_facts
    from harness.controller.book import Book

    return Book.of(read_facts(store, "controller-"), random.Random(0))


class Told(KeyboardInterrupt):
    """A signal asks the controller to end; like Ctrl-C where nobody can be asked."""


@contextlib.contextmanager
def _heed_signals(log: Path) -> Iterator[None]:
    """SIGTERM and SIGHUP raise Told meanwhile. What a closed terminal would have shown goes to `log`."""
    terminal = sys.stdout.isatty() or sys.stderr.isatty()  # a terminal that has gone does not say any more that it was one
    heard_s = -SAME_S

    def told(number: int, _: object) -> None:
        nonlocal heard_s
        if number == signal.SIGHUP and terminal:
            _write_to(log)
        before_s, heard_s = heard_s, time.monotonic()
        if heard_s - before_s >= SAME_S:
            raise Told(signal.Signals(number).name)

    # One that is ignored stays so (`nohup harness launch`).
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, told) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_to(log: Path) -> None:
    """The terminal has gone: from here on we write to a file. To write to where it was is an error."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out, null = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), os.open(os.devnull, os.O_RDONLY)
    for standard, target in ((0, null), (1, out), (2, out)):
        os.dup2(target, standard)
    os.close(out)
    os.close(null)


def _run_spec(flags: LaunchFlags, nodes: tuple[int, int]) -> RunSpec:
    from harness.controller.recovery import RunSpec

    wanted = RunSpec(*nodes, budget_usd=flags.budget_usd, max_hours=flags.max_hours)
    if flags.cloud == "sky":
        return replace(wanted, poll_s=1.0, lost_after_s=90.0, block_limit_s=600.0, exit_grace_s=180.0, terminate_timeout_s=900.0)
    # The local cloud answers at once, so everything that waits for a cloud is short.
    local = replace(wanted, poll_s=0.5, lost_after_s=10.0, block_limit_s=6.0, exit_grace_s=90.0, max_refused_s=10.0)
    return replace(local, launch_s=5.0, terminate_s=5.0)


def _cloud(flags: LaunchFlags, task: Task, url: str, nodes: tuple[int, int]) -> LocalCloud | SkyPilotCloud:
    if flags.cloud == "local":
        from harness.clouds.local import LocalCloud

        return LocalCloud(_state_dir(url), task, flags.market, url, wanted=nodes, notices=flags.local_notices)
    from harness.clouds.skypilot import SkyPilotCloud

    clouds = [c.strip() for c in flags.clouds.split(",") if c.strip()] or None
    if clouds and not flags.dry_run:
        raise BadInput("--clouds is for --dry-run; to launch, SkyPilot must have the clouds enabled (`sky check`)")
    on_demand = flags.on_demand or flags.policy.partition("?")[0] in ("on_demand_fallback", "uniform_progress")
    return SkyPilotCloud(task, url, _sky(url), clouds=clouds, on_demand=on_demand, log_dir=_state_dir(url, "sky-logs"))


def _sky(url: str) -> Broker:
    from harness.clouds.skypilot import Broker

    return Broker(os.environ, _state_dir(url, "sky-logs") / "broker.log")


def _plan(flags: LaunchFlags, task: Task, policy: Policy, url: str, nodes: tuple[int, int], console: Console) -> int:
    """What would be launched. Touches neither bucket nor cloud, beyond reading."""
    from harness.bucket.journal import read_facts
    from harness.controller import plan as plans
    from harness.core.facts import AttemptIntended, amount, loaded

    identity, timed = None, None
    store = open_store(url)
    with contextlib.suppress(NotFound):
        try:
            identity = dict(loaded(store.get("run.json")))
        except (ValueError, TypeError) as e:
            raise BadInput(f"{url}/run.json: wanted the run's identity as JSON, found something else ({e})") from e
        made = _newest_steps(store)
        offers = [s.fact.offer for s in read_facts(store) if isinstance(s.fact, AttemptIntended)]
        timed = plans.measured(made, amount(offers[-1].get("speed", 1.0)) if offers else 1.0)
    cloud = _cloud(flags, task, url, nodes)
    try:
        found = plans.make(
            cloud.offers(),
            policy,
            nodes,
            no_market=getattr(cloud, "no_market", ()),
            micro_batches=plans.micro_batches(identity, task.envs),
            measured=timed,
            budget_usd=flags.budget_usd,
        )
    finally:
        cloud.close()
    if flags.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        plans.show(found, console)
    return DONE


def _newest_steps(store: ObjectStore) -> list[tuple[float, int]]:
    """(seconds, ranks) of the newest steps; none if their records are damaged (`harness verify` says so)."""
    from harness.core import records as rec

    keys = sorted(rec.heads(store.list("samples/")).values())
    with contextlib.suppress(rec.BrokenRecords):
        return [(r.dt, len(r.shares)) for r in (rec.decode(store.get(keys[-1]), keys[-1]) if keys else ()) if r.dt > 0]
    return []


def _answer(asked: KeyboardInterrupt, draining: bool, what: str, console: Console) -> str:
    """What an interruption shall do: "drain", "leave", "kill" or "carry on". The second one, while nodes drain, kills."""
    told = isinstance(asked, Told)
    if draining:
        return "kill"
    if what != "ask":
        return what
    if told or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return "drain"
    console.print("\nInterrupted.", style="bold")
    console.print("d = drain: snapshot, then stop   l = leave it running   k = kill now   c = carry on")
    try:
        return {"l": "leave", "k": "kill", "c": "carry on"}.get(console.input("> ").strip().lower()[:1], "drain")
    except (Told, EOFError):
        return "drain"
    except KeyboardInterrupt:
        return "kill"


def _interrupted(what: str, by: str, store: ObjectStore, cloud: LocalCloud | SkyPilotCloud, console: Console, url: str) -> int | None:
    """Do what was answered to what happened (`by`). None: go on leading (until the drain is over)."""
    if what == "carry on":
        return None
    if what == "leave":
        console.print(f"Left running. Lead it again with the same command; watch: harness status {url}; end it: harness stop {url}")
        return INTERRUPTED
    if what == "drain":
        console.print(f"{by[0].upper()}{by[1:]}. Draining: a snapshot is made, then everything is ended. The same again kills at once.")
        _ask_stop(store, f"the controller was {by}")
        return None
    console.print("Ending all nodes ...")
    with contextlib.suppress(HarnessError):
        for node in cloud.nodes():
            cloud.terminate(node.attempt)
    cloud.shutdown()
    console.print("Killed. What was committed is safe; the same command resumes from it.")
    return INTERRUPTED


class _View:
    """The live view, in a thread of its own."""

    def __init__(self, store: ObjectStore, console: Console):
        self._store, self._console = store, console
        self._done: threading.Event | None = None

    def show(self) -> None:
        from harness.views.monitor import follow

        done = self._done = threading.Event()
        about = {"until_ended": False}
        self._thread = threading.Thread(target=follow, args=(self._store, done.is_set, self._console), kwargs=about, daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._done is not None:
            self._done.set()
            self._thread.join(10.0)
            self._done = None


def _new_run(task: str) -> str:
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{Path(task).stem}"


def _state_dir(url: str, what: str = "local-cloud") -> Path:
    """Where the controller keeps state and logs of its own: beside a run in a folder, else under ~/.cache, by the run's URL."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://")) / what
    import hashlib

    return Path.home() / ".cache" / "spotharness" / what / hashlib.sha256(url.encode()).hexdigest()[:16]


def _html_path(url: str) -> str:
    return str(Path(url.removeprefix("file://")) / "report.html") if url.startswith("file://") else ""


def _checked_store(url: str, retry_within_s: float = RETRY_WITHIN_S) -> ObjectStore:
    """The run's bucket, proven to be there, writable and fit before anything is launched. Raises StoreError.

    A person waits for this answer, so silence counts as a refusal sooner than it does once the run is under way.
    """
    from storage.probe import record, require

    store = open_store(url, retry_within_s=PREFLIGHT_S)
    record(store, require(store))
    return open_store(url, retry_within_s=retry_within_s, answered=True)


def _existing_store(url: str) -> ObjectStore:
    """The bucket of a run that must be there already. Raises BadInput."""
    store = open_store(url)
    if not store.list("facts/") and not store.list("run.json"):
        raise BadInput(f"{url}: there is no run here (no facts/ and no run.json); check the URL")
    return store


def _is_final(store: ObjectStore) -> bool:
    from storage.snapshots import Snapshots

    snapshots = Snapshots(store)
    manifest = snapshots.latest()
    return bool(manifest and snapshots.ended(manifest))


def _print_tail(store: ObjectStore, console: Console) -> None:
    """The last words of the script that failed."""
    from harness.bucket.journal import read_facts
    from harness.core.facts import WorkerFailed

    failures = [s.fact for s in read_facts(store) if isinstance(s.fact, WorkerFailed)]
    if failures:
        last = failures[-1]
        console.print(f"\nLast words of rank {last.rank} on {last.member} ({last.error}):", style="bold", highlight=False)
        console.print(last.log_tail, markup=False, highlight=False, soft_wrap=True)


# ---- run (the agent) --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pace:
    """How often an agent speaks to its store, and how long another one may be silent."""

    beat_s: float
    dead_s: float
    control_s: float


FOLDER, BUCKET = Pace(1.0, 5.0, 0.3), Pace(2.0, 10.0, 5.0)
USUAL = Limits()


@dataclass(frozen=True)
class RunFlags:
    script: tuple[str, ...] = positional("-- script.py and its arguments, or -- -m module", nargs="*")
    run: str = flag("", "URL of the run; default: HARNESS_RUN")
    nproc: str = flag("auto", "workers on this node: a number, or auto (one per GPU, else one)", check=_workers)
    speed: float = flag(1.0, "relative speed of this node's workers, for uneven shares on mixed hardware", above=0)
    min_nodes: int = flag(1, "do not train with fewer nodes than this", at_least=1)
    grace_s: float = flag(0.0, "how long a SIGTERM leaves us before the end; 0: what this cloud promises, 30 s where it promises nothing")
    notices: str = flag("", "where to listen for notices, such as aws,kubernetes, or none; default: what this machine says of itself")
    notice_ack: str = flag("own", "tell Azure that this node has gone: own, all (every machine that an event names is ours), never",
                           choices=["own", "all", "never"])  # fmt: skip
    leave_at: str = flag("", "when this node ends, such as the end of a capacity block: 2026-11-21T08:00:00Z, or seconds since 1970",
                         check=_moment)  # fmt: skip
    leave_after: str = flag("", "this node ends so long after its start: 12h, 90m, seconds", check=_duration)
    drain_lead_s: float = flag(120.0, "how long before an end that is known long before the node drains")
    notify_signal: str = flag("", "for scripts without harness.attach(): send them this signal (USR1, TERM...) on a notice")
    trackers: str = flag("", "where to publish committed steps: wandb, tensorboard, jsonl, or package.module:function, comma-separated")
    replica: str = flag("", "URL of a second bucket: committed snapshots are copied there; default: HARNESS_REPLICA")
    replica_cap_usd: float | None = flag(None, "copy nothing that would make it cost more; default: HARNESS_REPLICA_CAP_USD, else no limit")
    stage_gib: float = flag(0.0, "host memory for staged snapshots, in GiB; 0: half of what is free")
    stage_dir: str = flag("", "RAM disk for staged snapshots; default: /dev/shm")
    disk_tier_gib: float = flag(0.0, "keep the last snapshots on this much of the node's disk, too; 0: do not")
    disk_tier_dir: str = flag("", "where; default: the node's scratch folder")
    peer_tier: str = flag("off", "memory, disk: nodes keep a copy of a neighbour's share there, and read from each other before the bucket",
                          choices=["off", "memory", "disk"])  # fmt: skip
    hang_after_s: float = flag(
        0.0, f"a worker without a sign of life for so long is hung; 0: {FACTOR:g} times its slowest step, at least {USUAL.floor_s:g} s"
    )
    stuck_after_s: float = flag(0.0, f"the same for start-up and resuming, and for saving; 0: {USUAL.start_s:g} s and {USUAL.save_s:g} s")
    gpu_health: str = flag("auto", "auto (NVML, where there is a driver), off, or the file that drives a fake one")
    beat_s: float = flag(0.0, f"how often this node says that it lives; 0: {FOLDER.beat_s:g} s (folder), {BUCKET.beat_s:g} s (bucket)")
    dead_s: float = flag(0.0, f"silence of a node that means its death; 0: {FOLDER.dead_s:g} s (folder), {BUCKET.dead_s:g} s (bucket)")
    allow_rewind: bool = flag(False, "go on though committed steps must be done again (HARNESS_ALLOW_REWIND)")
    leaderless_hours: float = flag(24.0, "a controller that led this run has been silent for so long: drain; 0: train on")
    addr: str = flag("", "this node's address as the other nodes see it; default: from SkyPilot, else loopback")


def run(flags: RunFlags) -> int:
    """Be this node's agent: join the run, start the script's workers, heed notices."""
    from harness.agent.agent import Agent, AgentConfig
    from harness.agent.leaderless import LOOK_EVERY_S
    from harness.agent.sources import LimitSource, detect, duration, moment, sigterm_s
    from harness.node.processes import die_with_parent
    from harness.uploader.nearby import NearbyConfig

    env = os.environ
    url = flags.run or env.get("HARNESS_RUN", "")
    if not url:
        raise BadInput("no run URL: give --run URL (or HARNESS_RUN), for example --run s3://my-bucket/runs/x")
    argv = list(flags.script)
    if not argv:
        raise BadInput("no script: write `harness run --run URL -- train.py --its-flags`")
    if argv[0] != "-m" and not Path(argv[0]).is_file():
        raise BadInput(f"{argv[0]}: no such file (working directory: {Path.cwd()})")
    if flags.allow_rewind:
        env["HARNESS_ALLOW_REWIND"] = "1"  # for its workers
    if env.get("HARNESS_NODE_DIR"):  # a node of the local cloud dies as a whole, like a machine
        die_with_parent()
    store = _checked_store(normalize(url), retry_within_s=10.0)  # an agent must hear notices while the bucket is silent
    os.environ["STORAGE_ANSWERED"] = normalize(url)  # for whom we start: to them a refusal is an outage as well
    trackers = flags.trackers or env.get("HARNESS_TRACKERS", "")
    replica = flags.replica or env.get("HARNESS_REPLICA", "")
    if replica:
        _checked_store(normalize(replica), retry_within_s=10.0)
    cap_usd = flags.replica_cap_usd
    if cap_usd is None and (said := env.get("HARNESS_REPLICA_CAP_USD", "")):
        try:
            cap_usd = Bounds().of(said, float)
        except ValueError as e:
            raise BadInput(f"HARNESS_REPLICA_CAP_USD: {e}") from None
    node_dir = Path(env.get("HARNESS_NODE_DIR") or f"/tmp/harness-{os.getpid()}")
    pace = FOLDER if normalize(url).startswith("file://") else BUCKET
    sources = detect(dict(env), asked=flags.notices, speaks_for_all=flags.notice_ack == "all")
    sources += [LimitSource("limit", moment(flags.leave_at))] if flags.leave_at else []
    sources += [LimitSource("limit", time.time() + duration(flags.leave_after))] if flags.leave_after else []
    config = AgentConfig(
        run=normalize(url),
        argv=argv,
        nproc=_nproc(flags.nproc, env),
        attempt=int(env.get("HARNESS_ATTEMPT", 0)),
        addr=flags.addr or _address(env),
        node_dir=node_dir,
        accelerator=env.get("HARNESS_OFFER", ""),
        speed=flags.speed,
        place=_place(env),
        min_members=flags.min_nodes,
        grace_s=flags.grace_s or sigterm_s(env, asked=flags.notices),
        drain_lead_s=flags.drain_lead_s,
        acknowledge=flags.notice_ack != "never",
        notify_signal=flags.notify_signal,
        trackers=trackers,
        replica=replica,
        replica_cap_usd=cap_usd,
        stage_dir=Path(flags.stage_dir) if flags.stage_dir else None,
        stage_nbytes=int(flags.stage_gib * 2**30) or None,
        nearby=NearbyConfig(
            disk_nbytes=int(flags.disk_tier_gib * 2**30), disk_root=flags.disk_tier_dir or str(node_dir / "disk-tier"), peer=flags.peer_tier
        ).checked(),
        beat_s=flags.beat_s or pace.beat_s,
        dead_s=flags.dead_s or pace.dead_s,
        control_s=pace.control_s,
        hang=_hang_limits(flags.hang_after_s, flags.stuck_after_s),
        gpu_health=flags.gpu_health,
        leaderless_s=flags.leaderless_hours * 3600,
        lease_s=min(LOOK_EVERY_S, flags.leaderless_hours * 900),
    )
    return Agent(config, store, sources).execute()


def _hang_limits(hang_after_s: float, stuck_after_s: float) -> Limits:
    usual = Limits(hang_after_s or None)
    return replace(usual, start_s=stuck_after_s, save_s=stuck_after_s) if stuck_after_s else usual


def _nproc(text: str, env: Any) -> int:
    if text != "auto":
        return int(text)
    if "CUDA_VISIBLE_DEVICES" in env:
        return max(1, len([d for d in env["CUDA_VISIBLE_DEVICES"].split(",") if d.strip() not in ("", "-1")]))
    found = [p for p in Path("/dev").glob("nvidia[0-9]*") if p.name.removeprefix("nvidia").isdigit()]
    return max(1, len(found))


def _address(env: Any) -> str:
    addresses = env.get("SKYPILOT_NODE_IPS", "").split()
    rank = int(env.get("SKYPILOT_NODE_RANK", 0))
    return addresses[rank] if rank < len(addresses) else "127.0.0.1"


def _place(env: Any) -> str:
    """Cloud and region of this node, from SkyPilot: nodes of others are not reached. Empty: unknown, or the local cloud."""
    about = json.loads(env.get("SKYPILOT_CLUSTER_INFO") or "{}")
    if about.get("cloud") == "local":
        return ""
    return "/".join(str(about[k]).lower() for k in ("cloud", "region") if about.get(k))


# ---- looking at a run -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StatusFlags:
    url: str = positional("URL of the run")
    once: bool = flag(False, "print where it stands, and end")
    json: bool = flag(False, "the same as JSON")


def status(flags: StatusFlags) -> int:
    """Show a run as it goes on."""
    from harness.views import monitor

    store, console = _existing_store(flags.url), Console()
    if flags.json:
        print(json.dumps(monitor.status(store), indent=2))
        return DONE
    monitor.follow(store, lambda: flags.once, console)
    return DONE


@dataclass(frozen=True)
class ReportFlags:
    url: str = positional("URL of the run")
    html: str = flag("", "write the page to this file (default: report.html in the run's folder, if it has one)")
    json: bool = flag(False, "print the numbers as JSON instead")


def report(flags: ReportFlags) -> int:
    """What happened in a run: attempts, worlds, goodput, money, losses."""
    store = _existing_store(flags.url)
    if flags.json:
        from harness.views.report import to_json
        from harness.views.summary import summarize

        print(json.dumps(to_json(summarize(store)), indent=2))
        return DONE
    return _report(store, Console(), flags.html or _html_path(normalize(flags.url)))


def _report(store: ObjectStore, console: Console, html: str, brief: bool = False) -> int:
    from harness.views.report import print_report, write_html
    from harness.views.summary import summarize

    summary = summarize(store)
    if not brief:
        print_report(summary, console)
    if html:
        write_html(summary, Path(html))
        console.print(f"\nreport  {html}", highlight=False, soft_wrap=True)
    return DONE


@dataclass(frozen=True)
class VerifyFlags:
    url: str = positional("URL of the run")


def verify(flags: VerifyFlags) -> int:
    """Prove from the bucket alone that the run is what it should be. Exit status 1 names the first violation."""
    from harness.views.audit import audit, print_audit

    found = audit(_existing_store(flags.url))
    print_audit(found, Console())
    return DONE if found.ok else FAILED


@dataclass(frozen=True)
class CompareFlags:
    a: str = positional("URL of a run")
    b: str = positional("URL of another one")
    rtol: float = flag(1e-3, "largest relative difference of a step's loss that counts as the same")


def compare(flags: CompareFlags) -> int:
    """Are two runs the same training? Exit status 1 if not."""
    from harness.views.compare import compare as compare_stores
    from harness.views.compare import print_comparison

    found = compare_stores(_existing_store(flags.a), _existing_store(flags.b))
    return print_comparison(found, Console(), flags.rtol)


@dataclass(frozen=True)
class ReplayFlags:
    url: str = positional("URL of the run")
    script: tuple[str, ...] = positional("-- script.py and its arguments, as the run was trained", nargs="*")
    start: int = flag(0, "the snapshot to begin from, by its step (see `harness report`)", metavar="STEP")
    steps: int = flag(10, "how many steps", at_least=1)
    nodes: int = flag(1, "how many workers", at_least=1)
    into: str = flag("", "an empty folder for the copy; default: a temporary one that is removed")
    timeout_s: float = flag(3600.0, "the longest that it may take", above=0)


def replay(flags: ReplayFlags) -> int:
    """Execute a part of a run again from one of its snapshots, on any number of workers, and compare to the bit."""
    import tempfile

    from harness.proof.replay import print_replay
    from harness.proof.replay import replay as execute

    if not flags.script:
        raise BadInput("no script: write `harness replay URL --start STEP -- train.py --its-flags`, as the run was trained")
    store = _existing_store(flags.url)
    with tempfile.TemporaryDirectory(prefix="harness-replay-") as temporary:
        scratch = Path(flags.into or temporary)
        if scratch.exists() and any(scratch.iterdir()):
            raise BadInput(f"--into {scratch}: wanted an empty folder")
        scratch.mkdir(parents=True, exist_ok=True)
        return print_replay(execute(store, scratch, flags.start, flags.steps, flags.nodes, flags.script, flags.timeout_s), Console())


# ---- asking something of a run ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class StopFlags:
    url: str = positional("URL of the run")
    reason: str = flag("asked to stop", "why; it is written into the record")
    wait_s: float = flag(120.0, "how long to wait until it has stopped; 0: do not wait")


def stop(flags: StopFlags) -> int:
    """Drain the whole run: all ranks snapshot at the same step boundary and leave; nobody comes back by itself."""
    store, console = _existing_store(flags.url), Console()
    _ask_stop(store, flags.reason)
    url = normalize(flags.url)
    left = _Ending(store, _local_cloud(url).gone if _is_local(url) else set).wait(flags.wait_s)
    if not left:
        from storage.snapshots import Snapshots

        newest = Snapshots(store).latest()
        console.print(f"Stopped at step {newest.step if newest else 0}. `harness launch` with the same --run resumes it.")
        return DONE
    console.print("Asked; nodes will snapshot and leave at their next step boundary.")
    if flags.wait_s == 0:
        return DONE
    names = ", ".join(sorted(b.member for b in left))
    console.print(f"After {flags.wait_s:g} s these still beat: {names}", highlight=False, soft_wrap=True)
    return FAILED


LED_S = 25.0  # a controller that has not beaten for so long does not end anything any more


class _Ending:
    """What the bucket tells of a run that is coming to its end: whose members beat, which attempts are open, whether somebody leads."""

    def __init__(self, store: ObjectStore, gone: Callable[[], Collection[int]] = set):
        """`gone`: attempts of which a cloud at hand knows that they are over."""
        from harness.bucket.beats import Beats
        from harness.bucket.journal import Follower
        from harness.controller.book import Book

        self._store, self._beats, self._facts = store, Beats(store, time.monotonic), Follower(store, "facts/controller-")
        self._sign, self._led_s = (0, b""), time.monotonic()
        self.book, self.damage, self._gone = Book(random.Random(0)), "", gone

    def look(self) -> list[Beat]:
        """Members that are not known to have ended. One that died never says goodbye: that a cloud has proven its attempt to be gone
        (a fact of the controller) tells, or its silence."""
        from harness.bucket.lease import RELEASED, sign_of_life

        try:
            for stamped in self._facts.poll():
                self.book.add(stamped.t, stamped.fact)
        except (ValueError, KeyError, TypeError) as e:
            self.damage = f"{type(e).__name__}: {e}"
        if (sign := sign_of_life(self._store, self._sign[0])) != self._sign:
            self._sign, self._led_s = sign, time.monotonic()
        if not sign[0] or sign[1] == RELEASED:
            self._led_s = -LED_S
        ended = {n for n, e in self.book.ended.items() if e.end != "lost"}.union(self._gone())
        return [b for b in self._beats.look() if not b.silent() and b.attempt not in ended]

    @property
    def led(self) -> bool:
        """May a controller be at work?"""
        return time.monotonic() - self._led_s < LED_S

    def wait(self, within_s: float, over: Callable[[list[Beat]], bool] = lambda beating: not beating) -> list[Beat]:
        """Until it is over, or for so long; who beats then."""
        give_up_s = time.monotonic() + within_s
        while not over(beating := self.look()) and time.monotonic() < give_up_s:
            time.sleep(0.5)
        return beating


def _ask_stop(store: ObjectStore, reason: str) -> None:
    ask_to_stop(store, StopOrder(reason, "user"))


@dataclass(frozen=True)
class DownFlags:
    url: str = positional("URL of the run")
    reason: str = flag("taken down", "why; it is written into the record")
    grace_s: float = flag(60.0, "how long nodes may take to snapshot and leave by themselves; 0: none")
    timeout_s: float = flag(900.0, "how long to wait until the cloud has proven that nothing is left")


def down(flags: DownFlags) -> int:
    """Stop a run and end every node of it, wherever it came from; what is left running, or cannot be proven to be gone, is named."""
    store, console, url = _existing_store(flags.url), Console(), normalize(flags.url)
    _ask_stop(store, flags.reason)
    local = _local_cloud(url) if _is_local(url) else None
    ending = _Ending(store, local.gone if local else set)
    ending.wait(flags.grace_s)
    if local:
        local.shutdown()
        gone, where = local.gone(), "this computer"
        console.print("This computer runs no node of this run.")
    else:
        gone, where = _down_sky(url, flags.timeout_s, console), "SkyPilot's API server"
    return _prove(ending, gone, where, url, flags.timeout_s, console)


def _down_sky(url: str, timeout_s: float, console: Console) -> set[int]:
    """End every cluster that SkyPilot knows of. Returns the attempts that it has, or had, and that are gone."""
    from harness.clouds.skypilot import SkyError, bring_down, known_once

    sky = _sky(url)
    try:
        ended = bring_down(sky, url, timeout_s)
        console.print(f"SkyPilot brought down {', '.join(ended)}." if ended else "SkyPilot knows of no cluster of this run.")
        gone = {int(number) for _, _, number in (name.rpartition("-") for name in ended) if number.isdecimal()}
        with contextlib.suppress(SkyError, CloudUnavailable):  # then it proves nothing about the others
            gone |= known_once(sky, url)
        return gone
    finally:
        sky.close()


def _prove(ending: _Ending, gone: Collection[int], where: str, url: str, timeout_s: float, console: Console) -> int:
    """Is nothing left, of all that the bucket knows of? What `where` does not know may have been launched from elsewhere: such nodes are
    asked to stop through the bucket, and waited for; that their machines are gone cannot be proven from here."""

    def unknown() -> set[int]:
        return {*ending.book.open, *ending.book.unproven}.difference(gone)

    def strangers(beating: list[Beat]) -> list[Beat]:
        return [b for b in beating if b.attempt not in gone]

    # A controller elsewhere may be bringing down what it launched, and then says so.
    beating = strangers(ending.wait(timeout_s, lambda seen: not strangers(seen) and not (unknown() and ending.led)))
    doubts = [f"The controller's facts cannot be read ({ending.damage}): they do not tell what was launched."] if ending.damage else []
    if beating:
        names = ", ".join(sorted(b.member for b in beating))
        doubts.append(f"STILL RUNNING AND BILLED: {names} beat in the bucket, and {where} does not show them. They are asked to stop.")
    if quiet := sorted(unknown() - {b.attempt for b in beating}):
        names = f"{_attempts(quiet)} ({', '.join(_cluster(url, n) for n in quiet)})"
        doubts.append(f"NOT PROVEN TO BE GONE: {names}: open in the facts, silent in the bucket, and {where} knows nothing of them.")
    if not doubts:
        console.print("Nothing of this run is left.")
        return DONE
    doubts.append(
        "They were launched through another API server, another computer or another user, or that server has lost its memory. Run "
        f"`harness down {url}` where they were launched from, or look for these names in `sky status -r` and in the cloud's console."
    )
    for doubt in doubts:
        console.print(doubt, markup=False, highlight=False, soft_wrap=True)
    return FAILED


def _local_cloud(url: str) -> LocalCloud:
    """The one of this computer that led the run: to look, and to end it."""
    from harness.clouds.local import LocalCloud
    from harness.clouds.tasks import Task

    return LocalCloud(_state_dir(url), Task(Path("-"), "down", "true"), run_url=url)


def _is_local(url: str) -> bool:
    return (_state_dir(url) / "config.json").exists()


@dataclass(frozen=True)
class LogsFlags:
    url: str = positional("URL of the run")
    attempt: int | None = flag(None, "of this attempt only (see `harness report`); default: all that are there", at_least=1)
    lines: int = flag(50, "how many lines of each")


def logs(flags: LogsFlags) -> int:
    """What the run's nodes have written."""
    _existing_store(flags.url)
    console, url = Console(), normalize(flags.url)
    found = _local_logs(url, flags.lines) if _is_local(url) else _sky_logs(url, flags.lines)
    wanted = {n: text for n, text in found.items() if flags.attempt in (None, n)}
    if not wanted:
        raise BadInput(f"{flags.url}: no log of {'any attempt' if flags.attempt is None else f'attempt {flags.attempt}'} is there")
    for number, text in sorted(wanted.items()):
        console.print(f"== attempt {number}", style="bold")
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return DONE


def _local_logs(url: str, lines: int) -> dict[int, str]:
    paths = (_state_dir(url) / "nodes").glob("*/log")
    return {int(p.parent.name): "\n".join(p.read_text(errors="replace").splitlines()[-lines:]) for p in paths}


def _sky_logs(url: str, lines: int) -> dict[int, str]:
    """Of clusters that are there, from SkyPilot; of failed ones that are gone, what was kept."""
    from harness.clouds.skypilot import tails

    kept = {p.stem: p.read_text(errors="replace") for p in _state_dir(url, "sky-logs").glob("sh-*.log")}
    sky = _sky(url)
    try:
        found = {**kept, **tails(sky, url, lines)}
    finally:
        sky.close()
    return {int(name.rpartition("-")[2]): "\n".join(text.splitlines()[-lines:]) for name, text in found.items()}


@dataclass(frozen=True)
class SnapshotFlags:
    url: str = positional("URL of the run")


def snapshot(flags: SnapshotFlags) -> int:
    """Ask a running training for a snapshot at its next step boundary."""
    _existing_store(flags.url).create(f"{SNAPSHOT}{secrets.token_hex(6)}.json", b"{}")
    Console().print("Asked.")
    return DONE


@dataclass(frozen=True)
class SnapshotsFlags:
    words: tuple[str, ...] = positional("list|verify|show|prune|export|copy URL ...; `harness snapshots list --help`", nargs="...")


def snapshots(flags: SnapshotsFlags) -> int:
    """List, verify, show, prune, export (safetensors) or copy a run's snapshots."""
    from storage.command import main as command

    return command(flags.words or ("--help",), "harness snapshots", _notes)


def _notes(store: ObjectStore) -> Notes:
    """What the record knows of snapshots, and what a copy of them needs to be resumed and audited."""
    from harness.bucket.journal import Journal, read_facts
    from harness.core.facts import SessionStarted, SnapshotCommitted, SnapshotReplicated, Warned
    from harness.uploader.server import seen_here
    from storage.command import Note, Notes
    from storage.manifest import Ref

    of: defaultdict[Ref, Note] = defaultdict(Note)
    for stamped in read_facts(store):
        match stamped.fact:
            case SnapshotCommitted() as f:
                ref = Ref(f.epoch, f.step)
                of[ref] = replace(of[ref], committed_at=stamped.t, commit_s=f.commit_s, why=f.why)
            case SnapshotReplicated() as f:
                ref = Ref(f.epoch, f.step)
                of[ref] = replace(of[ref], copies=(*of[ref].copies, f.url))
            case SessionStarted() as f if f.resumed_epoch and f.tier != "bucket":
                ref = Ref(f.resumed_epoch, f.resumed_step)
                of[ref] = replace(of[ref], restored=f.tier)

    def pardoned(ref: Ref, what: str) -> None:
        journal = Journal(store, f"person-{secrets.token_hex(6)}", time.time)
        journal.record(Warned(ref.step, ref.epoch, f"snapshot {ref}: {what}"))
        journal.flush()

    return Notes(of, [*store.list("run.json"), *store.list("samples/")], seen_here(), pardoned)


# ---- simulation -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FakeMetadataFlags:
    cloud: str = flag("aws", "whose metadata service: aws, gcp or azure", choices=["aws", "gcp", "azure"])
    port: int = flag(1338, "where to listen, on loopback; 0: a free port", at_most=65535)
    name: str = flag("fake-0", "name of the machine")
    clock_ahead_s: float = flag(0.0, "how far the cloud's clock is ahead of ours", at_least=None)


def fake_metadata(flags: FakeMetadataFlags) -> int:
    """Be a cloud's metadata service on loopback, and announce what you are told to: notices, cancellations, outages."""
    from harness.clouds.metadata import MetadataServer, environment_of, protocol_of
    from harness.clouds.metadata_protocol import CONTROL_PATH

    try:
        server = MetadataServer(protocol_of(flags.cloud, flags.name), flags.port, control=True, clock_ahead_s=flags.clock_ahead_s)
    except OSError as e:
        raise BadInput(f"--port {flags.port}: {e.strerror}; name another port, or 0 for a free one") from e
    for name, value in environment_of(flags.cloud, server.endpoint).items():
        print(f"export {name}={value}")
    print(f"""# curl -d '{{"do": "notice", "kind": "kill", "in_s": 120}}' {server.endpoint.rstrip("/")}{CONTROL_PATH}""")
    print("# or one such line here; ends with Ctrl-C", flush=True)
    try:
        for line in sys.stdin:
            try:
                print(json.dumps(server.order(json.loads(line))) if line.strip() else "", flush=True)
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
        threading.Event().wait()  # standard input is closed: the port still listens
    finally:
        server.close()
    return DONE


@dataclass(frozen=True)
class SimulateFlags:
    seeds: int = flag(200, "how many seeded worlds", at_least=1)
    seed: int | None = flag(None, "one world only, with the log of its facts")
    first: int = flag(0, "the first seed")
    policy: str = flag("cheapest", "a name, or package.module:function")


def simulate(flags: SimulateFlags) -> int:
    """The very recovery loop and commit protocol, on a virtual clock in a hostile world, with invariants checked all along."""
    from harness.proof import sim

    return sim.command(flags.seeds, flags.seed, flags.first, flags.policy)


# ---- drill ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DrillFlags:
    only: tuple[str, ...] = flag((), "FAULT:PHASE, either may be *; repeat for more (default: the whole matrix)", metavar="FAULT:PHASE")
    seed: int = flag(0, "which node, which moment")
    jobs: int = flag(1, "cells at the same time; about one per core", at_least=1)
    json: bool = flag(False, "print the results as JSON")
    soak: int = flag(0, "instead of the matrix: one long run with so many kills", metavar="KILLS")
    keep: str = flag("", "keep runs and logs in this empty folder")


def drill(flags: DrillFlags) -> int:
    """Every fault in every phase, on real processes of this machine; passed is what ends with the weights of a calm run."""
    from harness.proof import drill as drills

    return drills.command(flags.only, flags.seed, flags.jobs, flags.json, flags.keep, flags.soak, Console())


# ---- doctor -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class DoctorFlags:
    task: str = positional("the SkyPilot task YAML that is to be launched; may be left out", nargs="?")
    run: str = flag("", "URL of the run: its bucket is tried out")
    env: tuple[str, ...] = flag((), "NAME=value for the task; repeat for more", metavar="NAME=value")
    secret: tuple[str, ...] = flag((), "NAME or NAME=value; repeat for more", metavar="NAME=value")
    json: bool = flag(False, "print the findings as JSON")


def doctor(flags: DoctorFlags) -> int:
    """Is everything in place for a launch? Costs nothing; says what to do about what is missing. Exit status 1 if a launch cannot work."""
    from harness.clouds import tasks
    from harness.controller import doctor as doctors

    url = normalize(flags.run) if flags.run else ""
    task = None
    if flags.task:
        envs = {**tasks.pairs(flags.env, os.environ), "RUN": url or "none"}
        task = tasks.load(flags.task, envs, tasks.pairs(flags.secret, os.environ, "--secret"))
    sky = _sky(url or "doctor")

    def opened(at: str) -> ObjectStore:
        return open_store(at, retry_within_s=PREFLIGHT_S)

    try:
        found = doctors.examine(task, url, sky, opened, os.environ, Path.home(), secrets.token_hex(4))
    finally:
        sky.close()
    if flags.json:
        print(doctors.to_json(found))
    else:
        doctors.show(found, Console())
    return FAILED if any(f.state == doctors.FAIL for f in found) else DONE


# ---- main -------------------------------------------------------------------------------------------------------
COMMANDS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "init": (InitFlags, init),
    "launch": (LaunchFlags, launch),
    "run": (RunFlags, run),
    "status": (StatusFlags, status),
    "report": (ReportFlags, report),
    "verify": (VerifyFlags, verify),
    "compare": (CompareFlags, compare),
    "replay": (ReplayFlags, replay),
    "stop": (StopFlags, stop),
    "drain": (StopFlags, stop),
    "down": (DownFlags, down),
    "logs": (LogsFlags, logs),
    "snapshot": (SnapshotFlags, snapshot),
    "snapshots": (SnapshotsFlags, snapshots),
    "simulate": (SimulateFlags, simulate),
    "fake-metadata": (FakeMetadataFlags, fake_metadata),
    "drill": (DrillFlags, drill),
    "doctor": (DoctorFlags, doctor),
}


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command, and the parser of each sub-command."""
    root = Parser(prog="harness", description="Train on spot machines; runs that outlive them.")
    commands = root.add_subparsers(dest="subcommand", required=True, parser_class=Parser, metavar="COMMAND")
    subs: dict[str, Parser] = {}
    for name, (cls, function) in COMMANDS.items():
        help_text = (function.__doc__ or "").split("\n")[0]
        subs[name] = commands.add_parser(name, help=help_text, description=help_text)
        add_flags(subs[name], cls)
    return root, subs


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `harness` command."""
    given = list(sys.argv[1:] if argv is None else argv)
    after: list[str] = []
    if "--" in given and given[0] in ("run", "replay"):  # everything behind it is the script's own
        at = given.index("--")
        given, after = given[:at], given[at + 1 :]
    root, subs = parser()
    namespace, unknown = root.parse_known_args(given)
    if unknown:
        subs[namespace.subcommand].error(f"unrecognized arguments: {' '.join(unknown)}")
    cls, function = COMMANDS[namespace.subcommand]
    if after:
        namespace.script = after
    try:
        sys.exit(function(build(cls, namespace)))
    except BadInput as e:
        print(plain(f"harness {given[0]}: {e}", keep="\n"), file=sys.stderr)
        sys.exit(WRONG_INPUT)
    except (HarnessError, StoreError) as e:
        print(plain(f"harness {given[0]}: {e}", keep="\n"), file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `harness report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
