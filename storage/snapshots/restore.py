"""Choice of the snapshot to resume from, and judgement of what is bad when it cannot be read: the
snapshot or its reader. No torch, no clock.

    restore = Restore(snapshots, host, looks)
    while (ref := restore.choose()) is not None:                 # one of the world; raises Rewind
        found, why = restore.read(ref, load)          # every rank; raises StoreUnavailable
        bad = bad_hosts(everybody's (host, why, silent))
        if not bad: break
        if unfit := restore.judge(ref, ...):          # every rank; one of them calls `blame`
            ...                                       # these hosts end; the snapshot stays

One failed read is no proof: bytes are damaged in transit, in a cache, in the reader's own memory,
and a store may answer 404 for a while. So damaged data is read again, seconds apart, over new
connections and bypassing all caches. If it stays bad, the snapshot is at fault only if no other
host can check it, or another host reports the same. A host that another one refutes, or that finds
several snapshots bad and is alone in saying so of one of them, is at fault itself. A mark
(`Snapshots.quarantine`) is taken back by whoever reads the whole snapshot. Without a person's
permission a restore passes over one snapshot at most (`Rewind`).

Errors:
    Rewind             continuing would repeat committed steps; a person must allow it
    StoreUnavailable   the store contradicts itself or does not answer; nothing was proved
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from storage.canonical_json import BadObject, canonical, parsed, whole
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.snapshots.manifest import Ref, SnapshotCorrupt
from storage.snapshots.snapshot_keys import host_word, manifest_key
from storage.snapshots.snapshots import MOST_NBYTES, Snapshots
from storage.stores.objects import ObjectStore

T = TypeVar("T")

PAUSES_S = (1.0, 3.0, 8.0)  # seconds between the attempts to read what seems damaged, or lost
WITNESSES = 2  # hosts that must agree to prove that a snapshot is damaged
FALLBACKS = 1  # snapshots that a restore passes over without a person's permission
# so many snapshots of older generations with greater steps cannot be leftovers of their writers
# (two may be under way)
OUTRANKED = 3
NOTHING = Ref(-1, -1)  # less than any ref
# + generation: from this one on a person allowed to leave the snapshots of older ones behind, or
# guards have left some behind (`RewindOrder`)
ALLOWED = "control/rewind-"
ALLOW = (
    "allow it: HARNESS_ALLOW_REWIND=1 (harness run --set allow_rewind=true; harness launch --env "
    "HARNESS_ALLOW_REWIND=1)"
)
# {first}-{last}-{hash}.jsonl: a run's step records; those from step k+1 on are written once k is
# committed
RECORDS = "samples/"

OnMark = Callable[[Ref, str], None]


# report of one rank: its host, why it could not read the whole snapshot, and why the store
# prevented an answer
Said = tuple[str, str, str]


class Rewind(StoreError):
    """Continuing would repeat more committed work than one damaged snapshot explains."""


@dataclass(frozen=True)
class ReadRetries:
    """Settings for repeated reads. `reopen`: returns a new handle on the same store, with its own
    connections; `sleep`: waits (in tests it does not)."""

    reopen: Callable[[], ObjectStore]
    sleep: Callable[[float], None]
    pauses_s: tuple[float, ...] = PAUSES_S


class Restore:
    """One restore of one world. `host` names the machine of this process; `seen` is the newest
    snapshot that anybody in the world saw committed earlier; `epoch` is the world's own generation;
    `ends_at`: a snapshot of this step is wanted, however many are newer; `tell(ref, what)` records
    an event.

    `choose` and `blame` keep state in this process, so the same process must call them each time.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        host: str,
        looks: ReadRetries,
        *,
        epoch: int = 0,
        seen: Ref | None = None,
        must_list: str = "",
        allow_rewind: bool = False,
        ends_at: int | None = None,
        tell: OnMark = lambda ref, what: None,
        on_bad: OnMark = lambda ref, what: None,
    ):
        self.snapshots, self.host, self.looks, self.epoch, self.seen = (
            snapshots,
            host_word(host),
            looks,
            epoch,
            seen,
        )
        self.must_list, self.allow_rewind = must_list, allow_rewind
        self.ends_at, self._tell, self._on_bad = ends_at, tell, on_bad
        self.orders: list[RewindOrder] = []  # as of the last `choose`
        self._passed: dict[Ref, str] = {}  # snapshots that this restore judged bad, and why
        # bad by this host's report alone; marks carry it over to the next restore
        self._alone: list[Ref] = []

    # ---- reading ---------------------------------------------------------------------------------
    def read(self, ref: Ref, do: Callable[[Snapshots, int], T]) -> tuple[T | None, str]:
        """Call `do(snapshots, look)`, repeatedly if it finds damage. Returns its result and "", or
        None and why the snapshot is bad.

        The first attempt (0) uses our own handle; later ones use new handles, and `do` must then
        bypass caches and near tiers. Raises StoreUnavailable if missing objects are not surely
        missing: they are listed, or nothing else was found either.
        """
        why = unsure = ""
        snapshots = self.snapshots
        for look, pause_s in enumerate((0.0, *self.looks.pauses_s)):
            if look:
                self.looks.sleep(pause_s)
                snapshots = Snapshots(self.looks.reopen(), self.snapshots.chunk_nbytes)
            try:
                found = do(snapshots, look)
            except (SnapshotCorrupt, NotFound) as e:
                why, unsure = str(e), _contradiction(snapshots, ref)
                continue
            if why:
                self._tell(
                    ref,
                    f"snapshot {ref} is whole; a read of it was damaged and right at look "
                    f"{look + 1}: {why}",
                )
            return found, ""
        if unsure:
            raise StoreUnavailable(
                f"snapshot {ref}: {why}; but {unsure}, so nothing is proved; the store is to be "
                "asked again later"
            )
        return None, why

    def verify(self, ref: Ref, progress: Callable[[int, int], None] | None = None) -> str:
        """Read every byte, bypassing near tiers; return why the snapshot is bad, or "" if it is
        whole. Raises StoreUnavailable."""
        return self.read(
            ref, lambda snapshots, look: snapshots.verify(snapshots.load(ref), progress)
        )[1]

    # ---- choosing --------------------------------------------------------------------------------
    def choose(self, progress: Callable[[int, int], None] | None = None) -> Ref | None:
        """Return the snapshot to resume from; None for a fresh start. The mark of a newer one is
        taken back if that turns out to be whole.

        Raises Rewind, StoreUnavailable.
        """
        committed, doomed, since = self._committed()
        committed -= left_behind(committed, self.orders)
        marked = self.snapshots.quarantined() | self._passed.keys()
        usable = committed - marked
        if ends := self.newest_of([ref for ref in usable if ref.step == self.ends_at]):
            return ends
        newest = self.newest_of(usable)
        held = max(committed & marked, default=None)
        if held is not None and held not in self._passed and (newest is None or held > newest):
            said, passed = (
                self.snapshots.doubters(held),
                sum(newest is None or ref > newest for ref in committed),
            )
            # check it ourselves before a person has to decide
            doubtful = len(said) < WITNESSES or passed > FALLBACKS
            if self.host not in said and doubtful and self._is_pardoned(held, progress):
                newest = held
            elif said <= {self.host} and held not in self._alone:
                self._alone.append(held)
        self._guard(newest, {ref for ref in committed if ref.epoch >= since}, doomed, since)
        return newest

    def newest_of(self, refs: Collection[Ref]) -> Ref | None:
        return max(refs, default=None)

    def _committed(self) -> tuple[set[Ref], set[Ref], int]:
        """Return the snapshots that are committed and not doomed, the doomed, and the generation
        since which older ones may all be left behind (0: none): a person's leave allows that, and
        guards that found no snapshot to go back to.

        The listing is requested again if it is empty or lacks what was seen. Raises
        StoreUnavailable.
        """
        snapshots, lacking = self.snapshots, ""
        for look, pause_s in enumerate((0.0, *self.looks.pauses_s)):
            if look:
                self.looks.sleep(pause_s)
                snapshots = Snapshots(self.looks.reopen(), self.snapshots.chunk_nbytes)
            committed, doomed = snapshots.manifests()
            self.orders, lacking = rewinds(snapshots.store), ""
            anew = [one.epoch for one in self.orders if not (one.why and one.step)]
            since = max(anew, default=0)
            recorded = 0 if committed else _recorded(snapshots.store)
            if not committed and self.must_list and not snapshots.store.list(self.must_list):
                lacking = f"{self.must_list}, which is there"
            elif (
                not committed and not since and (doomed or recorded > 0 or snapshots.quarantined())
            ):
                lacking = (
                    "all snapshots, though there were "
                    f"some{f', the last of step {recorded} or later' if recorded > 0 else ''}"
                )
            elif (
                self.seen is not None
                and self.seen.epoch >= since
                and max(committed, default=NOTHING) < self.seen
            ):
                lacking = f"the snapshot {self.seen}, which was committed, and anything newer"
            if not lacking and (committed or recorded < 0):
                break
        if lacking and not self.allow_rewind:
            raise StoreUnavailable(
                f"{self.snapshots.store.url}: its listing lacks {lacking}: the store is to be "
                f"asked again later. If they were deleted on purpose, {ALLOW}"
            )
        return committed - doomed, doomed, since

    def _is_pardoned(self, ref: Ref, progress: Callable[[int, int], None] | None) -> bool:
        with contextlib.suppress(StoreUnavailable):
            why = self.verify(ref, progress)
            if not why:
                self.pardon(ref)
                return True
            self._passed[ref] = why
            # without write permission the finding is still returned
            with contextlib.suppress(StoreError):
                self.snapshots.doubt(ref, self.host, why)
        return False

    def pardon(self, ref: Ref) -> None:
        """Take back the mark and all doubts of a quarantined snapshot that was read whole."""
        self.snapshots.pardon(ref)
        self._tell(
            ref,
            f"snapshot {ref} was quarantined, and {self.host} has read it whole: its mark was "
            "taken back",
        )

    def done(self, ref: Ref) -> None:
        """Record that all ranks have loaded a snapshot, which refutes the hosts that doubted it."""
        # it matters only if other hosts report the same later
        with contextlib.suppress(StoreError):
            if self.snapshots.doubters(ref):
                self.snapshots.pardon(ref)

    def _guard(self, newest: Ref | None, committed: set[Ref], doomed: set[Ref], since: int) -> None:
        """Raise Rewind if resuming from `newest` would lose more than a person's permission or one
        bad snapshot allows."""
        passed = sorted((ref for ref in committed if newest is None or ref > newest), reverse=True)
        outranked = sorted(
            (
                ref
                for ref in committed
                if newest is not None and ref < newest and ref.step > newest.step
            ),
            reverse=True,
        )
        problem = ""
        if newest is None and not since:
            recorded = _recorded(self.snapshots.store)
            reached = max([*(ref.step for ref in committed | doomed), recorded], default=0)
            if (
                doomed
                or recorded > max((ref.step for ref in committed), default=0)
                or len(committed) > FALLBACKS
            ):
                problem = (
                    "none of its snapshots can be used"
                    if committed
                    else "it lists none of its snapshots"
                )
        elif len(passed) > FALLBACKS:
            # a bad first snapshot is passed over like any other: only step 0 came before it
            reached, problem = (
                max(ref.step for ref in passed),
                f"its newest {len(passed)} snapshots cannot be used",
            )
        elif newest is not None and len(outranked) >= OUTRANKED and not self._is_guarded(newest):
            reached, problem = (
                outranked[0].step,
                f"a newer generation began anew and stands at step {newest.step}",
            )
        if not problem:
            return
        if self.allow_rewind:
            step = newest.step if newest else 0
            order_rewind(self.snapshots.store, RewindOrder(self.epoch, step, reached))
            self._tell(
                newest or Ref(self.epoch, 0),
                f"a person allowed to go on from step {step}, behind {reached}: {problem}",
            )
            return
        raise Rewind(self._refusal(newest, reached, problem, passed or outranked))

    def _refusal(self, newest: Ref | None, reached: int, problem: str, bad: list[Ref]) -> str:
        url = self.snapshots.store.url
        whys = []
        for ref in bad[:3]:
            with contextlib.suppress(StoreError):
                whys.append(f"{ref}: {self._passed.get(ref) or self.snapshots.why(ref)}")
        step = newest.step if newest else 0
        return (
            f"{url} has committed step {reached}, and would go on from step {step}: "
            f"{problem}{' (' + '; '.join(whys) + ')' if whys else ''}. Nothing was deleted. Look "
            f"at them from another machine: harness snapshots verify {url} takes back the marks of "
            f"those that are whole. To do the steps from {step} on again, {ALLOW}"
        )

    def _is_guarded(self, ref: Ref) -> bool:
        """Return whether the line of training that ends here began under this guard. Then writers
        of an older generation made the snapshots ahead of it."""
        try:
            return "resumed" in self.snapshots.load(ref).data
        except (NotFound, SnapshotCorrupt):  # the next reader finds that out
            return True

    # ---- judging ---------------------------------------------------------------------------------
    def judge(
        self,
        ref: Ref,
        said: Sequence[Said],
        rank: int,
        gather: Callable[[Any], list[Any]],
        first: Callable[[Callable[[], Any]], Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, str]:
        """Return what `blame` finds, after some hosts could not read a snapshot. `said`: the
        reports by rank. All ranks call it together.

        `gather` returns the values of all ranks, in order; `first` runs a function on rank 0 and
        returns its result on all. If some host has read its share of the snapshot, that host reads
        all of it.
        """
        bad, refuted = bad_hosts(said), False
        second = next((i for i, one in enumerate(said) if one[0] not in bad), None)
        if second is not None:
            answer = gather(self._second_look(ref, progress) if rank == second else None)[second]
            refuted = answer == ""
            if answer:
                bad[said[second][0]] = answer
        found: dict[str, str] = first(lambda: self.blame(ref, bad, refuted))
        return found

    def _second_look(self, ref: Ref, progress: Callable[[int, int], None] | None) -> str | None:
        """Read the whole snapshot on a second host; return why it is bad too, "" if it is whole, or
        None if the store did not answer, since the other ranks wait for a result."""
        try:
            return self.verify(ref, progress)
        except StoreUnavailable:
            return None

    def blame(self, ref: Ref, bad: Mapping[str, str], refuted: bool = False) -> dict[str, str]:
        """Return the hosts that are at fault themselves, with a message for each; empty if the
        snapshot is: it is marked, and `choose` passes over it.

        `bad`: hosts that could not read the whole snapshot, and why. `refuted`: another host has
        read all of it.
        """
        first = next(iter(bad.values()))
        if refuted:
            return {
                host: f"it cannot read snapshot {ref}, which another host reads whole: {why}"
                for host, why in bad.items()
            }
        # without write permission an older one can still be used
        with contextlib.suppress(StoreError):
            for host, why in bad.items():
                self.snapshots.doubt(ref, host, why)
        said = self.snapshots.doubters(ref) | {host_word(host) for host in bad}
        if len(said) < WITNESSES:
            self._alone.append(ref)
        several = list(dict.fromkeys([*self._passed, *self._alone, ref]))
        if self._alone and len(several) > 1:
            for each in self._alone:
                if each != ref:
                    with contextlib.suppress(StoreError):
                        self._unmark(each)
            names = " nor ".join(each.name for each in several)
            return {
                host: f"it can read neither {names}, and no other host says that "
                f"{self._alone[0].name} is bad: {why}"
                for host, why in bad.items()
            }
        why = f"{first} (says {', '.join(sorted(said))})"
        try:
            self.snapshots.quarantine(ref, why)
        except StoreUnavailable:
            raise
        except StoreError as e:
            why = f"{why} (and it could not be marked: {e})"
        self._passed[ref] = why
        self._on_bad(ref, why)
        return {}

    def _unmark(self, ref: Ref) -> None:
        """Remove our own mark but not our doubt: if another host agrees, that proves it."""
        self.snapshots.unmark(ref)
        self._passed.pop(ref, None)
        self._tell(
            ref,
            f"snapshot {ref}: its mark was taken back: {self.host}, who made it, finds others bad "
            "as well",
        )


def bad_hosts(said: Sequence[Said]) -> dict[str, str]:
    """Return the hosts that could not read the whole snapshot, and why. Raises StoreUnavailable if
    the store did not answer one of the ranks: then nothing is proved."""
    for _, _, silent in said:
        if silent:
            raise StoreUnavailable(silent)
    return {host: why for host, why, _ in said if why}


def this_machine() -> str:
    """Return an identifier of this machine that all its processes share: the boot id of its kernel,
    else its name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


@dataclass(frozen=True)
class RewindOrder:
    """Leave for generations from `epoch` on to do again what comes after `step`, though `was` was
    committed. `why`: why guards ordered it; then snapshots of older generations beyond `step` are
    passed over, and the updates of steps `first` to `last` are left out. "": a person allowed it.
    """

    epoch: int
    step: int
    was: int
    why: str = ""
    first: int = 0
    last: int = 0

    def leaves(self, ref: Ref) -> bool:
        """Return whether this snapshot is one that is passed over."""
        return bool(self.why) and ref.epoch < self.epoch and ref.step > self.step


def order_rewind(store: ObjectStore, order: RewindOrder) -> bool:
    """Give this leave; False: another was given for this generation. Raises StoreError."""
    body = asdict(order)
    del body["epoch"]
    return store.create(f"{ALLOWED}{order.epoch:06d}.json", canonical(body))


def rewinds(store: ObjectStore) -> list[RewindOrder]:
    """Return every leave that was given, oldest first. Raises Rewind for one that cannot be read,
    StoreError."""
    found = []
    for key in sorted(store.list(ALLOWED)):
        if (named := re.fullmatch(re.escape(ALLOWED) + r"(\d+)\.json", key)) is None:
            continue
        try:
            body = dict(parsed(store.get(key), most_nbytes=MOST_NBYTES))
            why = str(body.pop("why", ""))
            found.append(
                RewindOrder(int(named[1]), why=why, **{k: whole(v, 0) for k, v in body.items()})
            )
        except (BadObject, TypeError, ValueError) as e:
            raise Rewind(
                f"{store.url}/{key}: wanted the leave to go back to an older snapshot, found {e}; "
                "it was changed by hand: restore it"
            ) from e
        except NotFound as e:
            raise StoreUnavailable(f"{store.url}/{key} is listed, and not found") from e
    return found


def left_behind(refs: Iterable[Ref], orders: Sequence[RewindOrder]) -> set[Ref]:
    """Return the snapshots that guards have left behind."""
    return {ref for ref in refs if any(order.leaves(ref) for order in orders)}


def rewind_allowed(store: ObjectStore) -> int:
    """Return the last generation from which on a person or guards left older ones behind; 0:
    none."""
    found = [re.fullmatch(re.escape(ALLOWED) + r"(\d+)\.json", key) for key in store.list(ALLOWED)]
    return max((int(one[1]) for one in found if one), default=0)


def _recorded(store: ObjectStore) -> int:
    """Return the greatest step that was surely committed, by the names of step records; -1: there
    are none."""
    found = [
        re.fullmatch(re.escape(RECORDS) + r"(\d+)-\d+-[^/]*", key) for key in store.list(RECORDS)
    ]
    return max((int(one[1]) - 1 for one in found if one), default=-1)


def _contradiction(snapshots: Snapshots, ref: Ref) -> str:
    """Return why missing objects of a snapshot prove nothing, or "" if they do: the listing agrees,
    and other objects are found."""
    key = manifest_key(ref)
    try:
        if key not in snapshots.store.list(key):
            return "its manifest is not listed either"
        manifest = snapshots.load(ref)
    except SnapshotCorrupt:
        return ""  # it can be read, and is wrong
    except NotFound:
        return "its manifest is listed, and not found"
    for key in manifest.objects:
        try:
            snapshots.store.size(key)
        except NotFound:
            if key in snapshots.store.list(key):
                return f"{key} is listed, and not found"
    return ""


__all__ = [
    "PAUSES_S",
    "ReadRetries",
    "Restore",
    "Rewind",
    "bad_hosts",
    "rewind_allowed",
    "this_machine",
]
