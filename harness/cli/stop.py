"""`harness stop`, `down` and `snapshots take`: send requests to a run."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.bucket.controller_lease import sign_of_life
from harness.bucket.journal import Follower
from harness.bucket.layout import FACTS, RELEASED, SNAPSHOT, StopOrder
from harness.bucket.member_heartbeats import HeartbeatReader
from harness.bucket.orders import ask_to_stop
from harness.cli.common import (
    DONE,
    FAILED,
    cluster_of,
    existing_store,
    is_final,
    is_local,
    local_cloud,
    sky_broker,
)
from harness.clouds.sky_broker import SkyError
from harness.clouds.sky_clusters import bring_down, known_once
from harness.core.flags import flag, positional
from harness.core.world import CloudUnavailable
from harness.ledger.attempts import AttemptHistory
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize
from storage.terminal_text import Console

if TYPE_CHECKING:
    from harness.bucket.member_heartbeats import MemberHeartbeat


# ---- asking something of a run -------------------------------------------------------------------
@dataclass(frozen=True)
class StopFlags:
    url: str = positional("URL of the run")
    reason: str = flag("asked to stop", "why; it is written into the record")
    wait_s: float = flag(120.0, "how long to wait until it has stopped; 0: do not wait")


def stop(flags: StopFlags) -> int:
    """Drain the whole run: all ranks snapshot at one step, and leave.

    No node returns without a new `harness launch`, which resumes the run."""
    store, console = existing_store(flags.url), Console()
    if is_final(store):
        console.print("This run is finished: there is nothing to stop.")
        return DONE
    ask_stop(store, flags.reason)
    url = normalize(flags.url)
    left = _Ending(store, local_cloud(url).gone if is_local(url) else set).wait(flags.wait_s)
    if not left:

        newest = Snapshots(store).latest()
        console.print(
            f"Stopped at step {newest.step if newest else 0}. `harness launch` with the same --run "
            "resumes it."
        )
        return DONE
    console.print("Asked; nodes will snapshot and leave at their next step boundary.")
    if flags.wait_s == 0:
        return DONE
    names = ", ".join(sorted(b.member for b in left))
    console.print(
        f"After {flags.wait_s:g} s these still beat: {names}", highlight=False, soft_wrap=True
    )
    return FAILED


LED_S = 25.0  # a controller without a heartbeat for this long no longer ends anything


class _Ending:
    """The state of an ending run, from its bucket: which members send heartbeats, which attempts
    are open, whether a controller leads."""

    def __init__(self, store: ObjectStore, gone: Callable[[], Collection[int]] = set):
        """Start to follow the bucket. `gone`: returns the attempts that a cloud within reach knows
        to be over."""
        self._store, self._beats, self._facts = (
            store,
            HeartbeatReader(store, time.monotonic),
            Follower(store, f"{FACTS}controller-"),
        )
        self._sign, self._led_s = (0, b""), time.monotonic()
        self.book, self._gone = AttemptHistory(random.Random(0)), gone

    def look(self) -> list[MemberHeartbeat]:
        """Return the heartbeats of members that are not known to have ended. A member that died has
        ended if a cloud has proven its attempt to be gone (a fact of the controller), or if it is
        silent."""
        for stamped in self._facts.poll():
            self.book.add(stamped.t, stamped.fact)
        if (sign := sign_of_life(self._store, self._sign[0])) != self._sign:
            self._sign, self._led_s = sign, time.monotonic()
        if not sign[0] or sign[1] == RELEASED:
            self._led_s = -LED_S
        ended = {n for n, e in self.book.ended.items() if e.end != "lost"}.union(self._gone())
        return [b for b in self._beats.look() if not b.silent() and b.attempt not in ended]

    @property
    def led(self) -> bool:
        """True while a controller may be at work."""
        return time.monotonic() - self._led_s < LED_S

    def wait(
        self,
        within_s: float,
        over: Callable[[list[MemberHeartbeat]], bool] = lambda beating: not beating,
    ) -> list[MemberHeartbeat]:
        """Wait until `over` is true, at most `within_s`. Return the heartbeats that are left."""
        give_up_s = time.monotonic() + within_s
        while not over(beating := self.look()) and time.monotonic() < give_up_s:
            time.sleep(0.5)
        return beating


def ask_stop(store: ObjectStore, reason: str) -> None:
    ask_to_stop(store, StopOrder(reason, "user"))


@dataclass(frozen=True)
class DownFlags:
    url: str = positional("URL of the run")
    reason: str = flag("taken down", "why; it is written into the record")
    grace_s: float = flag(
        60.0, "how long nodes may take to snapshot and leave by themselves; 0: none"
    )
    timeout_s: float = flag(
        900.0, "how long to wait until the cloud has proven that nothing is left"
    )


def down(flags: DownFlags) -> int:
    """Stop a run, end all its nodes, and name those that may be left."""
    store, console, url = existing_store(flags.url), Console(), normalize(flags.url)
    ask_stop(store, flags.reason)
    local = local_cloud(url) if is_local(url) else None
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
    """End every cluster of the run that SkyPilot knows. Return the attempts that it has or had, and
    that are gone."""
    sky = sky_broker(url)
    try:
        ended = bring_down(sky, url, timeout_s)
        console.print(
            f"SkyPilot brought down {', '.join(ended)}."
            if ended
            else "SkyPilot knows of no cluster of this run."
        )
        gone = {
            int(number)
            for _, _, number in (name.rpartition("-") for name in ended)
            if number.isdecimal()
        }
        # on an error, nothing is proven about the other attempts
        with contextlib.suppress(SkyError, CloudUnavailable):
            gone |= known_once(sky, url)
        return gone
    finally:
        sky.close()


def _prove(
    ending: _Ending, gone: Collection[int], where: str, url: str, timeout_s: float, console: Console
) -> int:
    """Check that nothing is left of what the bucket knows, print the result, and return the exit
    status. Nodes that `where` does not know may have been launched from elsewhere: they are asked
    to stop through the bucket and waited for, but that their machines are gone cannot be proven
    from here."""

    def unknown() -> set[int]:
        return {*ending.book.open, *ending.book.unproven}.difference(gone)

    def strangers(beating: list[MemberHeartbeat]) -> list[MemberHeartbeat]:
        return [b for b in beating if b.attempt not in gone]

    # A controller elsewhere may still be bringing down what it launched; it records the result.
    beating = strangers(
        ending.wait(timeout_s, lambda seen: not strangers(seen) and not (unknown() and ending.led))
    )
    doubts = (
        [
            f"{len(unread)} facts of the controller cannot be read ({unread[0]}): they may hide "
            "what was launched."
        ]
        if (unread := ending.book.unread)
        else []
    )
    if beating:
        names = ", ".join(sorted(b.member for b in beating))
        doubts.append(
            f"STILL RUNNING AND BILLED: {names} beat in the bucket, and {where} does not show "
            "them. They are asked to stop."
        )
    if quiet := sorted(unknown() - {b.attempt for b in beating}):
        names = (
            f"attempts {ending.book.named(quiet)} ({', '.join(cluster_of(url, n) for n in quiet)})"
        )
        doubts.append(
            f"NOT PROVEN TO BE GONE: {names}: open in the facts, silent in the bucket, and {where} "
            "knows nothing of them."
        )
    if not doubts:
        console.print("Nothing of this run is left.")
        return DONE
    doubts.append(
        "They were launched through another API server, another computer or another user, or that "
        f"server has lost its memory. Run `harness down {url}` where they were launched from, or "
        "look for these names in `sky status -r` and in the cloud's console."
    )
    for doubt in doubts:
        console.print(doubt, markup=False, highlight=False, soft_wrap=True)
    return FAILED


@dataclass(frozen=True)
class TakeFlags:
    url: str = positional("URL of the run")


def take(flags: TakeFlags) -> int:
    """Request a snapshot of a running training at its next step boundary."""
    existing_store(flags.url).create(f"{SNAPSHOT}{secrets.token_hex(6)}.json", b"{}")
    Console().print("Asked.")
    return DONE
