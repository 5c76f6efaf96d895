"""The watcher: runs a command once for each committed snapshot of a run, even if watchers die.

    look     find out which snapshots are committed and settled, and whether the run has ended
    hold     protect waiting snapshots from pruning (a few, oldest first)
    claim    reserve a snapshot, so that no other watcher works on it
    do       run the command, with a time limit, and retry it if it fails
    record   write its metrics: beside the snapshot (for `keep_best`), as a fact, in the outcome

A watcher may die anywhere: finished work is recorded in the bucket, and a claim whose heartbeats
have stopped is taken over. The outcome is written last, so metrics may be recorded twice if a
watcher dies in between; readers count those of one watch and snapshot once (`core/facts.py`,
Validated).

Knows a store and commands as processes; knows nothing about torch or the trainers.
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
from harness.core.facts import Validated, Warned
from harness.core.world import DRAINED, BadInput
from harness.look.watch.due_snapshots import DueRule, DueSnapshotScan, RunScan, beating
from harness.look.watch.side_command import SideCommand, metrics_in
from harness.look.watch.side_jobs import SideJobs, SideOutcome
from storage.canonical_json import canonical
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.export.safetensors import export
from storage.snapshots import retention
from storage.snapshots.manifest import Ref, SnapshotCorrupt
from storage.snapshots.retention import Keep
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

# The progress of a watch as a run of its own, so that `harness launch` can manage it: progress is
# committed there in a form that a controller understands.


class WatchProgress:
    """The run that a controller manages. Any number of watchers may report to it. `of`: the URL of
    the watched run."""

    def __init__(self, store: ObjectStore, of: str):
        self._snapshots, self._of = Snapshots(store), of

    def settled(self, count: int) -> Ref:
        """Commit that `count` snapshots are done or given up; return the ref. Raises StoreError."""
        ref = Ref(1, max(1, count))
        data = {"watched": self._of, "by": "harness snapshots watch"}
        content = {"settled": canonical({"settled": count})}
        self._snapshots.write(ref, 0, 1, content, {}, data, "watch")
        self._snapshots.commit(ref, 1)
        self._snapshots.prune(Keep(2))
        return ref

    def ended(self, count: int) -> None:
        """Mark the run as done. Raises StoreError."""
        self._snapshots.end(self.settled(count), "all snapshots are done")


DONE, FAILED, ENDED_EARLY = 0, 1, 3  # exit statuses, the same for all commands
MOST_DEATHS = 3  # of watchers working on one snapshot; then it is given up
OUTAGE_S = 900.0  # the longest time without an answer from the bucket
LOOK_S = 0.25  # between two checks of the command and of a request to leave
MOST_PAUSE_S = 60.0  # the longest pause between two tries


@dataclass(frozen=True)
class WatchConfig:
    """The configuration of a watcher. `weights`: "saved", "bf16", "fp16" or "fp32" exports the
    weights for the command; "": they are not exported."""

    url: str
    name: str
    argv: tuple[str, ...]
    rule: DueRule = field(default_factory=DueRule)
    hold: int = 4  # waiting snapshots to protect from pruning
    tries: int = 3  # of the command for one snapshot
    most_failures: int = 3  # failed snapshots in a row, at which the watcher ends
    limit_s: float = 6 * 3600.0  # time limit of one try
    idle_s: float = 24 * 3600.0  # time without a new snapshot, after which the watcher ends
    poll_s: float = 10.0
    pause_s: float = 5.0  # before the second try; four times as long before each further one
    lease_s: float = 60.0
    weights: str = ""
    again: bool = False  # do snapshots again that failed before


class AskedToLeave(Exception):
    """This watcher was requested to leave."""


@dataclass
class SnapshotWatcher:
    """One process of a watch. `environ`: the environment of its command. `leave`: an event that
    is set to make it leave."""

    config: WatchConfig
    store: ObjectStore
    holder: str  # unique
    environ: Mapping[str, str]
    leave: threading.Event
    say: Callable[[str], None] = print
    progress: WatchProgress | None = None  # the watch's own run, if a controller manages it

    def __post_init__(self) -> None:
        c = self.config
        self.jobs = SideJobs(self.store, c.name, self.holder, c.lease_s, now=time.monotonic)
        if c.again and (count := self.jobs.forget_failed()):
            self.say(
                f"harness snapshots watch {c.name}: {count} snapshots that failed are done again"
            )
        self._journal = Journal(self.store, f"watch-{self.holder}", time.time)
        self._lookout = DueSnapshotScan(self.store, self.jobs, c.rule, c.hold, self.say)
        self._failures = 0  # failed snapshots in a row

    # ---- the loop --------------------------------------------------------------------------------
    def run(self) -> int:
        """Watch until the run has ended and everything is done, or going on is pointless. Return
        the exit status. Raises StoreError."""
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
                    self.say(f"harness snapshots watch: the bucket is silent: {e}")
                    self._pause(self.config.poll_s)
                    continue
                if self._failures >= self.config.most_failures:
                    self.say(
                        f"harness snapshots watch: {self._failures} snapshots in a row failed; "
                        "mend the command, then `harness snapshots watch --again` does them again"
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
            with contextlib.suppress(StoreError):  # the leases expire anyway
                self._lookout.close()

    def _pause(self, seconds: float) -> None:
        if self.leave.wait(seconds):
            raise AskedToLeave

    def _end(self, seen: RunScan) -> int | None:
        """Return the exit status if nothing is left to do; None: continue."""
        if seen.due:  # another watcher works on them, and may die
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
        self.say(f"harness snapshots watch {self.config.name}: {said}")
        if self.progress is not None and code == DONE:
            self.progress.ended(len(outcomes))
        return FAILED if code == DONE and failed else code

    # ---- doing -----------------------------------------------------------------------------------
    def _do_one(self, seen: RunScan) -> bool:
        """Claim and do the first due snapshot that is free. Return False if there is none. Raises
        AskedToLeave, StoreError."""
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
            with contextlib.suppress(StoreError):  # the claim expires anyway
                self.jobs.give_back(ref, number)
            raise
        if outcome is not None and ours:
            self.jobs.settle(ref, outcome)
            self._lookout.settled.add(ref)
            if self.progress is not None:
                self.progress.settled(len(self.jobs.settled()))
        elif outcome is not None or lost.is_set():
            self.say(f"harness snapshots watch: another watcher has taken over step {ref.step}")
        else:
            self.jobs.give_back(ref, number)

    def _record(self, ref: Ref, outcome: SideOutcome) -> None:
        """Record an outcome. Metrics are written first, since pruning needs them before the
        snapshot's hold is released."""
        c = self.config
        if outcome.state == "done":
            self._failures = 0
            if outcome.metrics:
                retention.measure(self.store, ref, c.name, outcome.metrics)
            told = dict(outcome.metrics)
            self._journal.record(Validated(ref.step, ref.epoch, told, c.name, outcome.seconds))
        else:
            self._failures += 1
            what = f"watch {c.name}: the side job of step {ref.step} failed: {outcome.why}"
            self._journal.record(Warned(ref.step, ref.epoch, what))
        self._journal.flush()

    def _do(self, ref: Ref, number: int, final: bool, lost: threading.Event) -> SideOutcome | None:
        """Run the command for a snapshot, with retries, and return the outcome; None: the snapshot
        was pruned or another watcher has it. Raises AskedToLeave, StoreError."""
        c, began_s, why = self.config, time.monotonic(), ""
        if (deaths := self.jobs.deaths(ref, number)) >= MOST_DEATHS:
            why = f"{deaths} watchers died while they did it"
            return SideOutcome("failed", {}, deaths, 0.0, self.holder, why)
        if not self._lookout.hold(ref):
            return None
        for tried in range(1, c.tries + 1):
            self.say(f"harness snapshots watch {c.name}: step {ref.step}, try {tried}")
            metrics, why = self._try(ref, tried, final, lost)
            if lost.is_set():
                return None
            seconds = time.monotonic() - began_s
            if not why:
                return SideOutcome("done", metrics, tried, seconds, self.holder)
            if not self._lookout.is_there(ref):  # that explains the failure
                return None
            self.say(
                f"harness snapshots watch {c.name}: step {ref.step} failed: {why.splitlines()[-1]}"
            )
            if tried < c.tries:
                self._pause(min(c.pause_s * 4 ** (tried - 1), MOST_PAUSE_S))
        return SideOutcome("failed", {}, c.tries, seconds, self.holder, why[:4000])

    def _try(
        self, ref: Ref, tried: int, final: bool, lost: threading.Event
    ) -> tuple[dict[str, float], str]:
        """Run one try. Return its metrics by full name, and why it failed ("": it did not). Raises
        AskedToLeave, StoreError."""
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
        # so that harness.attach() in the command does not take it for one of the run's workers
        inherited = {k: v for k, v in self.environ.items() if k != "HARNESS_RUN"}
        return inherited | {f"HARNESS_WATCH_{name}": value for name, value in own.items()}

    def _execute(self, environ: dict[str, str], lost: threading.Event) -> str:
        """Run the command and return why it failed; "": it did not. Newer snapshots are held
        meanwhile. Raises AskedToLeave, StoreError."""
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
                    with contextlib.suppress(StoreUnavailable):  # the next look may succeed
                        self._lookout.look()  # holds newer snapshots
                    looked_s = now_s
        finally:
            command.end()
        if code == 0:
            return ""
        what = f"exit status {code}" if code > 0 else f"killed by signal {-code}"
        return f"{what}: {command.last_words() or 'it wrote nothing'}"
