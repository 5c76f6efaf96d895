"""The watcher: a command for each committed snapshot of a run, each once, whoever dies.

    look     which snapshots are committed, which are settled, has the run ended
    hold     those that wait are not pruned (a few, oldest first)
    claim    so that no other watcher does the same
    do       the command, bounded in time, again if it fails
    record   numbers: beside the snapshot (for `keep_best`), as a fact, in the outcome

It may die anywhere: what was done lies in the bucket, and a claim whose beat stands still is taken
over. An outcome is written last, so numbers may be told twice by a watcher that died in between;
readers count one of a watch and a snapshot once (`core/facts.py`, Validated).

Knows a store, and commands as processes; knows no torch, and nothing of who trains.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.bucket.journal import Journal
from harness.bucket.side_jobs import SideJobs, SideOutcome
from harness.core.facts import Validated, Warned
from harness.core.world import DRAINED, BadInput
from harness.watch.command import SideCommand, metrics_in
from harness.watch.due import DueRule
from harness.watch.holds import beating
from harness.watch.lookout import Lookout, RunSeen
from harness.watch.progress import WatchProgress
from storage import measured
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.export import export
from storage.manifest import Ref, SnapshotCorrupt
from storage.objects import ObjectStore

DONE, FAILED, ENDED_EARLY = 0, 1, 3  # exit statuses, as of all commands
MOST_DEATHS = 3  # of watchers at one snapshot; then it is given up
OUTAGE_S = 900.0  # how long the bucket may be silent
LOOK_S = 0.25  # between two looks at the command, at a stop
MOST_PAUSE_S = 60.0  # between two tries


@dataclass(frozen=True)
class WatchConfig:
    """What a watcher does. `weights`: "": none are exported; "saved", "bf16", "fp16", "fp32"."""

    url: str
    name: str
    argv: tuple[str, ...]
    rule: DueRule = field(default_factory=DueRule)
    hold: int = 4  # snapshots that wait
    tries: int = 3  # for one snapshot
    most_failures: int = 3  # snapshots in a row
    limit_s: float = 6 * 3600.0  # of one try
    idle_s: float = 24 * 3600.0  # without a new snapshot
    poll_s: float = 10.0
    pause_s: float = 5.0  # before the second try; then ever longer
    lease_s: float = 60.0
    weights: str = ""
    again: bool = False  # what failed before


class AskedToLeave(Exception):
    """Somebody asked this watcher to go."""


@dataclass
class SnapshotWatcher:
    """One process of a watch. `environ`: for its command. `leave`: is set to make it go."""

    config: WatchConfig
    store: ObjectStore
    holder: str  # unique
    environ: Mapping[str, str]
    leave: threading.Event
    say: Callable[[str], None] = print
    progress: WatchProgress | None = None  # of a run of its own, which a controller leads

    def __post_init__(self) -> None:
        c = self.config
        self.jobs = SideJobs(self.store, c.name, self.holder, c.lease_s, now=time.monotonic)
        if c.again and (count := self.jobs.forget_failed()):
            self.say(f"harness watch {c.name}: {count} snapshots that failed are done again")
        self._journal = Journal(self.store, f"watch-{self.holder}", time.time)
        self._lookout = Lookout(self.store, self.jobs, c.rule, c.hold, self.say)
        self._failures = 0  # snapshots in a row

    # ---- the loop --------------------------------------------------------------------------------
    def run(self) -> int:
        """Until the run has ended and all is done, or there is no sense in going on. The exit
        status. Raises StoreError."""
        silent_s = time.monotonic()
        try:
            while True:
                self._pause(0.0)
                try:
                    seen = self._lookout.look()
                    did = self._do_one(seen)
                    silent_s = time.monotonic()
                except StoreUnavailable as e:
                    if time.monotonic() - silent_s > OUTAGE_S:
                        raise
                    self.say(f"harness watch: the bucket is silent: {e}")
                    self._pause(self.config.poll_s)
                    continue
                if self._failures >= self.config.most_failures:
                    self.say(
                        f"harness watch: {self._failures} snapshots in a row failed; mend the "
                        "command, then `harness watch --again` does them again"
                    )
                    return FAILED
                if not did:
                    code = self._end(seen)
                    if code is not None:
                        return code
                    self._pause(self.config.poll_s)
        except AskedToLeave:
            return DRAINED
        finally:
            with contextlib.suppress(StoreError):  # then their leases run out
                self._lookout.close()

    def _pause(self, seconds: float) -> None:
        if self.leave.wait(seconds):
            raise AskedToLeave

    def _end(self, seen: RunSeen) -> int | None:
        """The exit status, if nothing is left to be done; None: go on."""
        if seen.due:  # somebody else does them, and may die
            return None
        if seen.final is not None:
            return self._sum_up(DONE, f"the run has ended with step {seen.final.step}")
        if seen.stopped:
            return self._sum_up(ENDED_EARLY, f"the run was stopped: {seen.stopped}")
        if seen.idle_s > self.config.idle_s:
            hours = self.config.idle_s / 3600
            return self._sum_up(ENDED_EARLY, f"no new snapshot for {hours:g} hours")
        return None

    def _sum_up(self, code: int, why: str) -> int:
        outcomes = self.jobs.outcomes()
        failed = sorted(ref.step for ref, one in outcomes.items() if one.state != "done")
        said = f"{why}; {len(outcomes) - len(failed)} snapshots are done"
        if failed:
            said += f", {len(failed)} failed (steps {', '.join(map(str, failed[:20]))})"
        if pruned := self._lookout.pruned:
            steps = ", ".join(str(ref.step) for ref in sorted(pruned)[:20])
            said += (
                f", {len(pruned)} were pruned before anybody came (steps {steps}): a greater "
                "--hold or attach(keep_snapshots=) keeps them, --every does fewer"
            )
        self.say(f"harness watch {self.config.name}: {said}")
        if self.progress is not None and code == DONE:
            self.progress.ended(len(outcomes))
        return FAILED if code == DONE and failed else code

    # ---- doing -----------------------------------------------------------------------------------
    def _do_one(self, seen: RunSeen) -> bool:
        """The first that is ours to do. False: there is none. Raises AskedToLeave, StoreError."""
        for ref in seen.due:
            if self.jobs.outcome(ref) is not None:
                self._lookout.settled.add(ref)
                continue
            number = self.jobs.claim(ref)
            if number:
                self._lookout.current = ref
                try:
                    self._claimed(ref, number, ref == seen.final)
                finally:
                    self._lookout.current = None
                return True
        return False

    def _claimed(self, ref: Ref, number: int, final: bool) -> None:
        try:
            with beating(self.jobs, ref, number, self.config.lease_s / 4) as lost:
                outcome = self._do(ref, number, final, lost)
                ours = outcome is not None and self.jobs.is_ours(ref, number)
                if outcome is not None and ours:
                    self._record(ref, outcome)
        except BaseException:
            with contextlib.suppress(StoreError):  # then it runs out
                self.jobs.give_back(ref, number)
            raise
        if outcome is not None and ours:
            self.jobs.settle(ref, outcome)
            self._lookout.settled.add(ref)
            if self.progress is not None:
                self.progress.settled(len(self.jobs.settled()))
        elif outcome is not None or lost.is_set():
            self.say(f"harness watch: another watcher has taken over step {ref.step}")
        else:
            self.jobs.give_back(ref, number)

    def _record(self, ref: Ref, outcome: SideOutcome) -> None:
        """Numbers first: whoever prunes must know them before the snapshot is let go."""
        c = self.config
        if outcome.state == "done":
            self._failures = 0
            if outcome.metrics:
                measured.measure(self.store, ref, c.name, outcome.metrics)
            told = dict(outcome.metrics)
            self._journal.record(Validated(ref.step, ref.epoch, told, c.name, outcome.seconds))
        else:
            self._failures += 1
            what = f"watch {c.name}: the side job of step {ref.step} failed: {outcome.why}"
            self._journal.record(Warned(ref.step, ref.epoch, what))
        self._journal.flush()

    def _do(self, ref: Ref, number: int, final: bool, lost: threading.Event) -> SideOutcome | None:
        """What came of it; None: nobody's matter any more, or another's. Raises AskedToLeave,
        StoreError."""
        c, began_s, why = self.config, time.monotonic(), ""
        if (deaths := self.jobs.deaths(ref, number)) >= MOST_DEATHS:
            why = f"{deaths} watchers died while they did it"
            return SideOutcome("failed", {}, deaths, 0.0, self.holder, why)
        if not self._lookout.hold(ref):
            return None
        for tried in range(1, c.tries + 1):
            self.say(f"harness watch {c.name}: step {ref.step}, try {tried}")
            metrics, why = self._try(ref, tried, final, lost)
            if lost.is_set():
                return None
            seconds = time.monotonic() - began_s
            if not why:
                return SideOutcome("done", metrics, tried, seconds, self.holder)
            if not self._lookout.is_there(ref):  # no wonder
                return None
            self.say(f"harness watch {c.name}: step {ref.step} failed: {why.splitlines()[-1]}")
            if tried < c.tries:
                self._pause(min(c.pause_s * 4 ** (tried - 1), MOST_PAUSE_S))
        return SideOutcome("failed", {}, c.tries, seconds, self.holder, why[:4000])

    def _try(
        self, ref: Ref, tried: int, final: bool, lost: threading.Event
    ) -> tuple[dict[str, float], str]:
        """Its numbers by their full names, and why it failed. Raises AskedToLeave, StoreError."""
        folder = Path(tempfile.mkdtemp(prefix="harness-watch-"))
        try:
            environ = self._environ(ref, tried, final, folder)
            if self.config.weights:
                dtype = "" if self.config.weights == "saved" else self.config.weights
                try:
                    snapshots = self._lookout.snapshots
                    export(snapshots, snapshots.load(ref), folder / "weights", dtype=dtype)
                except (NotFound, SnapshotCorrupt, ValueError) as e:
                    return {}, f"its weights could not be exported: {e}"
            why = self._execute(environ, lost)
            if why or lost.is_set():
                return {}, why
            try:
                told = metrics_in(folder / "metrics.jsonl")
            except BadInput as e:
                return {}, str(e)
            return {f"{self.config.name}/{name}": value for name, value in told.items()}, ""
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _environ(self, ref: Ref, tried: int, final: bool, folder: Path) -> dict[str, str]:
        own = {
            "RUN": self.config.url,
            "NAME": self.config.name,
            "STEP": str(ref.step),
            "EPOCH": str(ref.epoch),
            "TRY": str(tried),
            "FINAL": "1" if final else "",
            "FOLDER": str(folder),
            "METRICS": str(folder / "metrics.jsonl"),
            "WEIGHTS": str(folder / "weights") if self.config.weights else "",
        }
        # harness.attach() there must not take the command for one of the run's workers
        inherited = {k: v for k, v in self.environ.items() if k != "HARNESS_RUN"}
        return inherited | {f"HARNESS_WATCH_{name}": value for name, value in own.items()}

    def _execute(self, environ: dict[str, str], lost: threading.Event) -> str:
        """Why the command failed; "": it has not. Meanwhile newer snapshots are held. Raises
        AskedToLeave, StoreError."""
        command = SideCommand(self.config.argv, environ)
        began_s = looked_s = time.monotonic()
        try:
            while (code := command.wait(LOOK_S)) is None:
                now_s = time.monotonic()
                if self.leave.is_set():
                    raise AskedToLeave
                if lost.is_set():
                    return "another watcher has taken it over"
                if now_s - began_s > self.config.limit_s:
                    return f"it took longer than {self.config.limit_s:g} s (--limit-h)"
                if now_s - looked_s >= self.config.poll_s:
                    with contextlib.suppress(StoreUnavailable):  # the next look may get through
                        self._lookout.look()  # so that newer ones are held
                    looked_s = now_s
        finally:
            command.end()
        if code == 0:
            return ""
        what = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
        return f"{what}: {command.last_words() or 'it wrote nothing'}"
