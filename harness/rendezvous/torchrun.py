"""A rendezvous backend of plain torchrun that uses the bucket. torchrun's agent runs it.

    torchrun --rdzv-backend=bucket --rdzv-endpoint=s3://bucket/runs --rdzv-id=x --nnodes=1:4
    --max-restarts=100 script.py

The run URL is ENDPOINT/ID; the workers get it and the generation (the code's `epoch`) as
HARNESS_RUN and HARNESS_EPOCH, so that `harness.attach()` needs nothing else. Every generation has a
key-value store of its own, on the agent of its rank 0, at a socket that was bound before the
generation named it; so no node's loss ends the run, and nothing of an older generation is ever
read. Members confirm in that store before torch's agent gets the generation. Lost and waiting
members are known from memory (rendezvous.py, peer_connections.py), so torch's poll costs nothing.

--rdzv-conf: beat_s, dead_s (as `harness run`), join_timeout (600 s), confirm_s (15 s: for all
members to reach a generation's store).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from harness.bucket.layout import NO_EPOCH, Epoch, Member, closed_key, order_by
from harness.bucket.signed_heads import signed
from harness.rendezvous.peer_connections import PeerConnections
from harness.rendezvous.rendezvous import Rendezvous, free_port
from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize, open_store

TICK_S = 0.2
BUSY_S, IDLE_S = 30.0, 2.0  # after BUSY_S a waiting member looks every IDLE_S; lines wake it sooner
BATCH_S = 1.0  # newcomers within this time join together
ANSWER_S = 60.0  # the longest wait of torch's agent for a value in the generation's store
ORDINARY_ENDS = ("finished",)


@dataclass(frozen=True)
class _Bounds:
    """Limits in seconds: to find a place in a generation, for all members to confirm it, and
    between two heartbeats."""

    join_timeout_s: float
    confirm_s: float
    beat_s: float


@dataclass
class _Waiting:
    """The number of members that were lost, have left or want to join the next generation, and
    since when one has waited to join."""

    members: int = 0
    since_s: float | None = None


class BucketRendezvous(RendezvousHandler):
    """One torchrun agent's part in the rendezvous. All times are in seconds."""

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        addr: str,
        *,
        min_nodes: int = 1,
        max_nodes: int = 1,
        beat_s: float = 1.0,
        dead_s: float = 5.0,
        join_timeout_s: float = 600.0,
        confirm_s: float = 15.0,
    ):
        self._store, self._run_id, self._addr, self._max_nodes = store, run_id, addr, max_nodes
        self._bounds = _Bounds(join_timeout_s, confirm_s, beat_s)
        name = f"t{secrets.token_hex(4)}"
        self._lines = PeerConnections(name, addr, beat_s / 2)
        # our store will listen here if we are rank 0 of the next generation
        self._door = socket.create_server((addr, 0))
        me = Member(
            name,
            "warming",
            0,
            addr,
            self._lines.port,
            self._door.getsockname()[1],
            nproc=1,
            attempt=0,
        )
        self._rendezvous = Rendezvous(
            store, me, self._lines, beat_s=beat_s, dead_s=dead_s, min_members=min_nodes
        )
        self._epoch = NO_EPOCH
        self._kv: TCPStore | None = None
        self._waiting = _Waiting()
        self._lock = threading.Lock()  # one thread at a time uses the rendezvous
        self._stop = threading.Event()
        self._over = self._over_before()
        self._rendezvous.start()
        threading.Thread(target=self._watch, name="rendezvous", daemon=True).start()

    # ---- torch's interface -----------------------------------------------------------------------
    def get_backend(self) -> str:
        return "bucket"

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave our generation and enter the next. Raises
        Rendezvous{Closed,Connection,Timeout}Error."""
        deadline_s, busy_until_s = (
            time.monotonic() + self._bounds.join_timeout_s,
            time.monotonic() + BUSY_S,
        )
        with self._lock:
            self._leave_epoch()
        while True:
            try:
                with self._lock:
                    if self.is_closed():
                        raise RendezvousClosedError(
                            f"run {self._run_id}: generation {self._rendezvous.newest().epoch} was "
                            "the last one"
                        )
                    epoch = self._rendezvous.try_form(self._max_nodes)
                    info = self._enter(epoch) if epoch is not None else None
                    if info is not None:
                        return info
            except StoreUnavailable:
                pass  # retried until the deadline
            except StoreError as e:
                raise RendezvousConnectionError(f"{self._store.url}: {e}") from e
            if time.monotonic() > deadline_s:
                self._rendezvous.leave(end="")
                raise RendezvousTimeoutError(
                    f"{self._store.url}: no place in any generation within "
                    f"{self._bounds.join_timeout_s:.0f} s (join_timeout)"
                )
            self._lines.changed.wait(TICK_S if time.monotonic() < busy_until_s else IDLE_S)
            self._lines.changed.clear()

    def num_nodes_waiting(self) -> int:
        """Return the number of members that were lost, have left for the next generation, or want
        to join. Unless it is 0, torch restarts the workers."""
        return self._waiting.members

    def is_closed(self) -> bool:
        """Return whether a member of the newest generation has ended the run. A marker that is
        older than this agent does not count: see `_over_before`."""
        newest = self._rendezvous.newest().epoch
        return newest != self._over and self._exists(closed_key(newest))

    def set_closed(self) -> None:
        newest = self._rendezvous.newest().epoch
        # if this fails, latecomers start again and find the committed end
        with contextlib.suppress(StoreUnavailable):
            self._store.create(closed_key(newest), order_by(self._rendezvous.me.member))

    def shutdown(self) -> bool:
        """Close the rendezvous, since the workers have ended for good. Return True."""
        if not self._stop.is_set():
            self._stop.set()
            self.set_closed()
            self._rendezvous.leave(end="finished")
            self._lines.close()
            self._door.close()
        return True

    # ---- generations -----------------------------------------------------------------------------
    def _exists(self, key: str) -> bool:
        try:
            self._store.get(key)
        except NotFound:
            return False
        return True

    def _over_before(self) -> int:
        """Return the newest generation if it was closed before we started and none of its members
        is left: then we continue the run. Return -1 otherwise."""
        newest = self._rendezvous.newest()
        if not self._exists(closed_key(newest.epoch)):
            return -1
        return -1 if any(self._is_there(name) for name in newest.members) else newest.epoch

    def _is_there(self, name: str) -> bool:
        """Return whether this member is neither gone nor dead."""
        deadline_s = time.monotonic() + 2 * self._bounds.beat_s
        while time.monotonic() < deadline_s:
            seen = [m for m in self._rendezvous.watch([name]) if m.member == name]
            if not seen or seen[0].state in ("gone", "dead"):
                return False
            if self._lines.heard(name).up:
                return True
            time.sleep(0.05)
        return True

    def _leave_epoch(self) -> None:
        self._kv = None  # the store's server ends with it
        self._waiting = _Waiting()
        end = "resize" if self._epoch is not NO_EPOCH else ""
        self._epoch = NO_EPOCH
        self._say(state="ready", end=end)

    def _say(self, **changes: Any) -> None:
        with contextlib.suppress(StoreUnavailable):  # the next heartbeat carries the change
            self._rendezvous.say(**changes)

    def _enter(self, epoch: Epoch) -> RendezvousInfo | None:
        """Meet the other members of a generation in its store. Return None if it broke before it
        began; we are then ready for the next."""
        me = self._rendezvous.me.member
        rank = epoch.members.index(me)
        door, self._door = self._door, socket.create_server((self._addr, 0))
        self._say(state="in", epoch=epoch.epoch, end="", master_port=self._door.getsockname()[1])
        gone_s = time.monotonic() + self._bounds.confirm_s
        try:
            if rank == 0:
                self._kv = TCPStore(
                    epoch.addr,
                    epoch.port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=door.detach(),
                    timeout=timedelta(seconds=ANSWER_S),
                )
            elif self._until(lambda: _answers(epoch.addr, epoch.port), epoch, gone_s):
                left = timedelta(seconds=max(1.0, gone_s - time.monotonic()))
                self._kv = TCPStore(
                    epoch.addr, epoch.port, is_master=False, wait_for_workers=False, timeout=left
                )
            if self._kv is not None:
                self._kv.set_timeout(timedelta(seconds=ANSWER_S))
                store = PrefixStore(f"epoch{epoch.epoch}", self._kv)
                if rank == 0:  # before the others can go on, so that they need not wait for it
                    store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, self._addr)
                    store.set(RendezvousStoreInfo.MASTER_PORT_KEY, str(free_port(self._addr)))
                store.set(f"here/{me}", "")
                if self._until(
                    lambda: store.check([f"here/{m}" for m in epoch.members]), epoch, gone_s
                ):
                    self._epoch = epoch
                    # torch's agent passes its own environment to the workers
                    os.environ.update(HARNESS_RUN=self._store.url, HARNESS_EPOCH=str(epoch.epoch))
                    info = (
                        RendezvousStoreInfo.build(rank, store, self._addr)
                        if rank
                        else self._bootstrap(store)
                    )
                    return RendezvousInfo(store, rank, len(epoch.members), info)
        except DistError:
            pass  # the store's host has gone meanwhile
        finally:
            door.close()
        self._kv = None
        self._say(state="ready", end="peer-lost")
        return None

    @staticmethod
    def _bootstrap(store: Any) -> RendezvousStoreInfo:
        addr, port = (
            store.get(k).decode()
            for k in (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY)
        )
        return RendezvousStoreInfo(master_addr=addr, master_port=int(port))

    def _until(self, condition: Callable[[], bool], epoch: Epoch, deadline_s: float) -> bool:
        """Wait until `condition` holds and return True. Return False if a member has gone, the
        generation is not the newest any more, or the deadline has passed."""
        while not condition():
            if time.monotonic() > deadline_s or self._rendezvous.newest().epoch > epoch.epoch:
                return False
            if any(
                self._lost(m, epoch)
                for m in self._rendezvous.watch(epoch.members)
                if m.member in epoch.members
            ):
                return False
            time.sleep(0.05)
        return True

    def _lost(self, m: Member, epoch: Epoch) -> bool:
        """Return whether a member has left the generation, but not because its workers are done."""
        if m.member == self._rendezvous.me.member or (m.state == "gone" and m.end in ORDINARY_ENDS):
            return False
        return (
            m.state in ("dead", "gone")
            or m.epoch > epoch.epoch
            or epoch.is_left_by(m)
        )

    def _watch(self) -> None:
        """Keep the answer to `num_nodes_waiting` up to date, so that a call costs nothing."""
        while not self._stop.is_set():
            with contextlib.suppress(StoreError):  # retried at the next look
                if self._epoch is not NO_EPOCH and self._lock.acquire(timeout=TICK_S):
                    try:
                        self._look(self._epoch)
                    finally:
                        self._lock.release()
            if self._epoch is NO_EPOCH:
                # `next_rendezvous` uses `changed` then; waiting for it here would spin until that
                # clears it
                self._stop.wait(TICK_S)
            else:
                self._lines.changed.wait(TICK_S)
                self._lines.changed.clear()

    def _look(self, epoch: Epoch) -> None:
        if epoch is NO_EPOCH:
            return
        everybody = {m.member: m for m in self._rendezvous.look()}
        lost = sum(self._lost(everybody[n], epoch) for n in epoch.members if n in everybody)
        room = self._max_nodes - len(epoch.members) + lost
        joining = min(
            room,
            len(
                self._rendezvous.waiting(
                    epoch, [m for m in everybody.values() if m.state != "dead"]
                )
            ),
        )
        now = time.monotonic()
        self._waiting.since_s = (self._waiting.since_s or now) if joining else None
        batched = self._waiting.since_s is not None and now - self._waiting.since_s >= BATCH_S
        self._waiting.members = lost + (joining if batched else 0)


def _answers(addr: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((addr, port), 1.0):
        return True
    return False


def create(parameters: RendezvousParameters) -> BucketRendezvous:
    """Create the rendezvous from torchrun's command line. Raises ValueError for an endpoint that
    is not a URL, StoreError for a bucket that refuses access."""
    if not parameters.endpoint:
        raise ValueError(
            "--rdzv-endpoint: wanted the URL of a folder in a bucket (s3://bucket/runs, "
            "file:///shared/runs), found nothing"
        )
    run = f"{normalize(parameters.endpoint)}/{parameters.run_id}"
    return BucketRendezvous(
        signed(open_store(run), os.environ, "torchrun", time.time),
        parameters.run_id,
        parameters.local_addr or socket.gethostbyname(socket.gethostname()),
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        beat_s=float(parameters.get("beat_s", 1.0)),
        dead_s=float(parameters.get("dead_s", 5.0)),
        join_timeout_s=float(parameters.get("join_timeout", 600.0)),
        confirm_s=float(parameters.get("confirm_s", 15.0)),
    )


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return `create`, for the entry point `bucket` of the group `torchrun.handlers`."""
    return create
