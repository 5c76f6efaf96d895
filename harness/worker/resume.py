"""Resuming: every rank loads the same newest snapshot, or all know why not. Runs in the worker.

`storage/restore.py` says what is done about a snapshot that some rank cannot read; here the ranks
agree on what they found.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections import Counter
from pathlib import Path

from harness.core.facts import SnapshotQuarantined, Warned
from harness.core.world import BadInput, HarnessError
from harness.uploader.nearby import tiers_for
from harness.worker.environment import differences, environment
from harness.worker.hold import Hold
from harness.worker.peers import Peers
from harness.worker.process import write_error
from harness.worker.run import Run
from harness.worker.sharding import drawn_by_shard
from harness.worker.training import Training
from storage.errors import StoreUnavailable
from storage.leases import held
from storage.manifest import Manifest, Ref
from storage.opening import open_store
from storage.restore import PAUSES_S, Looks, Restore, Rewind, bad_hosts
from storage.snapshots import Snapshots
from storage.tiers import Tiered

REPLICA_S = 15.0  # how long a restore waits for a silent second bucket


class UnfitHosts(HarnessError):
    """Not the snapshot is bad, but some hosts. `mine`: this is one of them."""

    def __init__(self, what: str, mine: bool):
        super().__init__(what)
        self.mine = mine


class LastSeen:
    """The newest snapshot that workers of this node saw committed, whatever the bucket says of it
    now: a small file beside the mark. `path`: None without an agent."""

    def __init__(self, path: Path | None, run_url: str | None, writes: bool):
        self._path, self._run_url, self._writes = path, run_url, writes

    def name(self) -> str:
        """ "": none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            body = json.loads(self._path.read_text()) if self._path else {}
            return Ref.parse(body["ref"]).name if body["run"] == self._run_url else ""
        return ""

    def note(self, ref: Ref) -> None:
        """It is committed."""
        if self._path is None or not self._writes:
            return
        with contextlib.suppress(OSError, ValueError):
            if not (before := self.name()) or Ref.parse(before) < ref:
                new = self._path.with_suffix(".new")
                new.write_text(json.dumps({"run": self._run_url, "ref": ref.name}))
                new.replace(self._path)


class Resume:
    """`tier`: where the last restore found its bytes; `read_nbytes`: how many all ranks together
    found in each."""

    def __init__(
        self,
        peers: Peers,
        run: Run,
        training: Training,
        hold: Hold,
        last_seen: LastSeen,
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

    def restore(self) -> Manifest | None:
        """Every rank loads the same snapshot; None: there is none. Raises UnfitHosts,
        BadInput, StoreError."""
        if not self._run.url:
            return None
        reopen = functools.partial(open_store, self._run.url)
        self._peers.life.tell()
        names = self._peers.gather(self._last_seen.name())
        restore = Restore(
            self._run.snapshots,
            self._peers.host,
            Looks(reopen, self._pause, self._look_again_s),
            epoch=self._run.epoch,
            seen=max((Ref.parse(name) for name in names if name), default=None),
            must_list=self._run.surely_there(),
            allow_rewind=self._allow_rewind,
            tell=self._note_reading,
            on_bad=self._note_bad,
        )
        while True:
            with contextlib.ExitStack() as lease:  # nobody prunes it while we load it
                manifest, again = self._restore_newest(restore, lease)
            if not again:
                if manifest is not None:
                    self._last_seen.note(manifest.ref)
                return manifest

    def _restore_newest(
        self, restore: Restore, lease: contextlib.ExitStack
    ) -> tuple[Manifest | None, bool]:
        """True: it was bad, and there may be an older one."""
        newest: str | None = self._peers.agree(functools.partial(self._newest, restore, lease))
        if newest is None:
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

    def _newest(self, restore: Restore, lease: contextlib.ExitStack) -> str | None:
        try:
            found = held(self._run.snapshots, lambda: restore.choose(self._progress), lease)
        except Rewind as e:  # a person has to decide; agents stop the run for that
            raise BadInput(str(e)) from e
        return found.name if found else None

    def _progress(self, done: int, total: int) -> None:
        self._peers.life.tell()

    def _load_newest(self, ref: Ref, snapshots: Snapshots, look: int) -> Manifest:
        manifest = snapshots.load(ref)
        held = self._hold.courier.held(ref) if look == 0 else {}
        tiers = tiers_for(manifest, held, snapshots.store) if held else []
        near = Tiered(snapshots.store, manifest, tiers, self._wrong_tier, replica=self._replica)
        self._training.load(manifest, Snapshots(near))
        self.tier, self._found = near.tier, near.read_nbytes
        return manifest

    def _refuse_hosts(self, unfit: dict[str, str]) -> None:
        """They end for good; the others form a world without them. Raises UnfitHosts on
        all."""
        for host, why in unfit.items():
            what = f"host {host} is unfit to read snapshots: {why}"
            self._run.fact(Warned(self._run.step, self._run.epoch, what))
            if host == self._peers.host or self._peers.rank == 0:
                print(f"harness: {what}", flush=True)
        mine = unfit.get(self._peers.host)
        if mine:
            write_error(HarnessError(f"this host is unfit to read snapshots: {mine}"))
        raise UnfitHosts("; ".join(unfit.values()), mine=bool(mine))

    # ---- what is told ----------------------------------------------------------------------------
    def check(self, manifest: Manifest | None) -> None:
        """Warn if the run will not be the same to the bit as it would have been."""
        if manifest is not None:
            before = manifest.data.get("environment") or {}
            if unlike := differences(before, environment(self._peers.device)):
                self._run.warn(
                    f"from here on the run may not be the same to the bit as before: {unlike}",
                    manifest.step,
                )
        elif (
            # Weights that were drawn after they were sharded depend on the world; most of the time
            # that shows.
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


def look_again_s(environ: dict[str, str]) -> tuple[float, ...]:
    """Seconds between two looks at something bad: HARNESS_LOOK_AGAIN_S, "1,3,8". Raises
    BadInput."""
    text = environ.get("HARNESS_LOOK_AGAIN_S", "")
    try:
        found = tuple(float(word) for word in text.split(",")) if text else PAUSES_S
    except ValueError:
        found = (-1.0,)
    if not all(0.0 <= each <= 600.0 for each in found):
        raise BadInput(
            f"HARNESS_LOOK_AGAIN_S={text!r}: wanted seconds between 0 and 600, separated by "
            "commas, for example 1,3,8"
        )
    return found
