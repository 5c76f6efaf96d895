"""Resuming: every rank loads the same newest snapshot, or the state that survivors of the last
world keep, or all fail alike. Runs in the worker."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.facts import SnapshotQuarantined, Warned
from harness.core.world import BadInput, HarnessError
from harness.node.forkserver import write_error
from harness.uploader.node_tiers import tiers_for
from harness.worker.gradients.sharding import drawn_by_shard
from harness.worker.process_group import Peers
from harness.worker.resuming.ahead_states import (
    AheadStates,
    ChosenAhead,
    StateInMemory,
    choose_ahead,
)
from harness.worker.resuming.hand_over import TIER, Chosen, Survivors
from harness.worker.run_context import Run, look_again_s
from harness.worker.setup_check import differences, environment
from harness.worker.training_state import Training
from storage.errors import StoreError, StoreUnavailable
from storage.snapshots.manifest import Manifest, Ref
from storage.snapshots.reader_leases import held
from storage.snapshots.restore import ReadRetries, Restore, Rewind, bad_hosts
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from storage.tiers.tiers import Tiered

if TYPE_CHECKING:
    from harness.worker.snapshotter import StagingBuffers

REPLICA_S = 15.0  # timeout of a restore for a silent second bucket


class UnfitHosts(HarnessError):
    """The error for hosts that cannot read a good snapshot. `mine`: this host is one of them."""

    def __init__(self, what: str, mine: bool):
        super().__init__(what)
        self.mine = mine


class NewestCommitted:
    """The newest snapshot that workers of this node saw committed, whatever the bucket shows now.
    It is kept in a small file beside the mark. `path`: None without an agent."""

    def __init__(self, path: Path | None, run_url: str | None, writes: bool):
        self._path, self._run_url, self._writes = path, run_url, writes

    def name(self) -> str:
        """Return the snapshot's name; "": none of this run."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            body = json.loads(self._path.read_text()) if self._path else {}
            return Ref.parse(body["ref"]).name if body["run"] == self._run_url else ""
        return ""

    def note(self, ref: Ref) -> None:
        """Record that this snapshot is committed."""
        if self._path is None or not self._writes:
            return
        with contextlib.suppress(OSError, ValueError):
            if not (before := self.name()) or Ref.parse(before) < ref:
                new = self._path.with_suffix(".new")
                new.write_text(json.dumps({"run": self._run_url, "ref": ref.name}))
                new.replace(self._path)


class Resume:
    """The resuming of this rank. `tier`: the storage tier from which it last read a snapshot;
    `read_nbytes`: bytes that all ranks together read from each tier; `kept`: the state of survivors
    that the world goes on from, behind the snapshot that `restore` has returned; None: there is
    none; `step`: the one that it goes on behind."""

    def __init__(
        self,
        peers: Peers,
        run: Run,
        training: Training,
        hold: StagingBuffers,
        last_seen: NewestCommitted,
        environ: dict[str, str],
    ):
        self._peers, self._run, self._training = peers, run, training
        self._hold, self._last_seen = hold, last_seen
        self._look_again_s = look_again_s(environ)
        self._allow_rewind = environ.get("HARNESS_ALLOW_REWIND", "") not in ("", "0")
        second = environ.get("HARNESS_REPLICA", "")
        self._replica = (
            functools.partial(open_store, second, retry_within_s=REPLICA_S) if second else None
        )
        self.tier, self._found = "bucket", Counter[str]()
        self.read_nbytes: dict[str, int] = {}
        self.kept: StateInMemory | None = None
        self.step = 0
        stage = environ.get("HARNESS_STAGE")
        self._survivors = Survivors(peers, Path(stage) if stage else None, run.warn)
        self._ahead = AheadStates(peers, run, hold, run.warn)

    def restore(self) -> Manifest | None:
        """Load the same snapshot of the present phase on every rank, or what survivors keep, and
        return the snapshot's manifest; None: there is none. Raises UnfitHosts, BadInput,
        StoreError."""
        phase, self.kept, self.step = self._run.phase, None, 0
        if not self._run.url or phase.ends == phase.begins:
            return None
        reopen = functools.partial(open_store, self._run.url)
        self._peers.life.tell()
        said = self._survivors.meet((self._last_seen.name(), self._ahead.head()))
        names, heads = zip(*said, strict=True)
        choose = functools.partial(choose_ahead, heads, self._run.url, phase.number)
        restore = Restore(
            self._run.snapshots,
            self._peers.host,
            ReadRetries(reopen, self._pause, self._look_again_s),
            epoch=self._run.epoch,
            seen=max((Ref.parse(name) for name in names if name), default=None),
            must_list=self._run.surely_there(),
            allow_rewind=self._allow_rewind,
            ends_at=phase.ends,
            tell=self._note_reading,
            on_bad=self._note_bad,
        )
        while True:
            with contextlib.ExitStack() as lease:  # so that it is not pruned while it is loaded
                manifest, again = self._restore_newest(restore, lease, choose)
            if not again:
                if manifest is not None:
                    self.step = manifest.step
                    self._last_seen.note(manifest.ref)
                if self.kept is not None:
                    self.step = self.kept.step
                return manifest

    def _restore_newest(
        self, restore: Restore, lease: contextlib.ExitStack, choose: Callable[..., ChosenAhead]
    ) -> tuple[Manifest | None, bool]:
        """Return the manifest, and whether to try again: the snapshot was bad, and there may be an
        older one."""
        newest, chosen, ahead = self._peers.agree(
            functools.partial(self._newest, restore, lease, choose)
        )
        if chosen.doubt:
            self._run.warn(chosen.doubt)
        survivors = functools.partial(self._survivors.take, chosen, store=self._run.store)
        takes: list[tuple[int, Callable[..., StateInMemory | None]]] = [
            (chosen.step, survivors),
            (ahead.step, functools.partial(self._ahead.take, ahead)),
        ]
        for step, take in sorted(takes, key=lambda one: one[0], reverse=True):
            base = self._from_memory(newest, take) if step else None
            if self.kept is not None:
                return base, False
        if not newest:
            return None, False
        ref, manifest, why, silent = Ref.parse(newest), None, "", ""
        try:
            manifest, why = restore.read(ref, functools.partial(self._load_newest, ref))
        except StoreUnavailable as e:
            silent = str(e)
        self._peers.life.tell()
        said = self._peers.gather((self._peers.host, why, silent))
        if not bad_hosts(said):
            found = self._peers.gather(dict(self._found))
            self.read_nbytes = dict(sum(map(Counter, found), Counter()))
            if self._peers.rank == 0:
                restore.done(ref)
            return manifest, False
        peers = self._peers
        unfit = restore.judge(ref, said, peers.rank, peers.gather, peers.agree, self._progress)
        if unfit:
            self._refuse_hosts(unfit)
        return None, True

    def _from_memory(
        self, newest: str, take: Callable[..., StateInMemory | None]
    ) -> Manifest | None:
        """Load a state that nodes keep, and set `kept` if that was possible on all ranks. Return
        the manifest of the snapshot that it comes after; None: there is none."""

        def text() -> str:
            return self._run.snapshots.load(Ref.parse(newest)).to_json() if newest else ""

        try:
            told = self._peers.agree(text)
        except (StoreError, HarnessError):  # the usual way reads it again, and finds out why
            return None
        base = Manifest.from_json(told) if told else None
        after = base.step if base is not None else 0
        self.kept = take(after=after, load=self._training.load)
        if self.kept is not None:
            self.tier, self.read_nbytes = TIER, {}
        return base

    def _newest(
        self, restore: Restore, lease: contextlib.ExitStack, choose: Callable[..., ChosenAhead]
    ) -> tuple[str, Chosen, ChosenAhead]:
        """Return the name of the newest snapshot ("": there is none), what survivors hold, and what
        nodes have kept ahead of a loss."""
        try:
            found = held(self._run.snapshots, lambda: restore.choose(self._progress), lease)
        except Rewind as e:  # a person has to decide; on BadInput, agents stop the run
            raise BadInput(str(e)) from e
        phase = self._run.phase
        if found is not None and phase.number > 1 and found.step <= phase.begins:
            found = None  # the phase begins
        name = found.name if found is not None else ""
        chosen = self._survivors.choose(
            self._run.url or "", phase.number, name, restore.orders
        )
        return name, chosen, choose(name, restore.orders)

    def _progress(self, done: int, total: int) -> None:
        self._peers.life.tell()

    def _load_newest(self, ref: Ref, snapshots: Snapshots, look: int) -> Manifest:
        manifest = snapshots.load(ref)
        self._check_phase(manifest)
        held = self._hold.courier.held(ref) if look == 0 else {}
        tiers = tiers_for(manifest, held, snapshots.store) if held else []
        near = Tiered(snapshots.store, manifest, tiers, self._wrong_tier, replica=self._replica)
        self._training.load(manifest, Snapshots(near))
        self.tier, self._found = near.tier, near.read_nbytes
        return manifest

    def _check_phase(self, manifest: Manifest) -> None:
        """Raise BadInput if the snapshot is of another phase than the present one."""
        phase, said = self._run.phase, manifest.data.get("phase", 1)
        if said != phase.number:
            raise BadInput(
                f"{self._run.url}: wanted a snapshot of {phase.label}, which ended at step "
                f"{phase.ends}, found as the newest one {manifest.ref.name} of phase {said}: what "
                "the phase had made cannot be brought back; use a new run URL"
            )

    def _refuse_hosts(self, unfit: dict[str, str]) -> None:
        """Raise UnfitHosts on all ranks: unfit hosts end for good, and the others form a world
        without them. `unfit`: the reason for each host."""
        for host, why in unfit.items():
            what = f"host {host} is unfit to read snapshots: {why}"
            self._run.fact(Warned(self._run.step, self._run.epoch, what))
            if host == self._peers.host or self._peers.rank == 0:
                print(f"harness: {what}", flush=True)
        mine = unfit.get(self._peers.host)
        if mine:
            write_error(HarnessError(f"this host is unfit to read snapshots: {mine}"))
        raise UnfitHosts("; ".join(unfit.values()), mine=bool(mine))

    # ---- reports ---------------------------------------------------------------------------------
    def check(self, manifest: Manifest | None) -> None:
        """Warn if the run may differ, to the bit, from one that is not interrupted."""
        if manifest is not None:
            before = manifest.data.get("environment") or {}
            if unlike := differences(before, environment(self._peers.device)):
                self._run.warn(
                    f"from here on the run may not be the same to the bit as before: {unlike}",
                    manifest.step,
                )
        elif (
            # Weights that were drawn after they were sharded depend on the world; that usually
            # shows.
            self._peers.control is not None
            and self._training.model is not None
            and (names := drawn_by_shard(self._training.model, self._peers.control))
        ):
            self._run.warn(
                f"{names[0]!r} (one of {len(names)}) begins with the same values on every rank's "
                "shard: it was drawn after it was sharded, so what the run begins with depends "
                "on the number of ranks. harness.fsdp2(model, run) takes models on the meta "
                "device and gives them values that do not",
                0,
            )

    def _pause(self, seconds: float) -> None:
        self._peers.life.tell()
        time.sleep(seconds)

    def _note_reading(self, ref: Ref, what: str) -> None:
        self._run.warn_here(what, ref.step)

    def _note_bad(self, ref: Ref, why: str) -> None:
        self._run.fact(SnapshotQuarantined(ref.step, ref.epoch, why))
        print(f"harness: {why}; falling back to the next older snapshot", flush=True)

    def _wrong_tier(self, tier: str, what: str) -> None:
        self._run.fact(Warned(self._run.step, self._run.epoch, what))
