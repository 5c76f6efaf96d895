"""`harness stop`, `down`, `snapshot`: what people ask of a run."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.bucket.layout import FACTS, SNAPSHOT, StopOrder
from harness.bucket.orders import ask_to_stop
from harness.cli.common import (
    DONE,
    FAILED,
    cluster_of,
    existing_store,
    is_local,
    local_cloud,
    sky_broker,
)
from harness.core.config import flag, positional
from harness.core.world import CloudUnavailable
from storage.objects import ObjectStore
from storage.opening import normalize
from storage.text import Console

if TYPE_CHECKING:
    from harness.bucket.beats import Beat


# ---- asking something of a run -------------------------------------------------------------------
@dataclass(frozen=True)
class StopFlags:
    url: str = positional("URL of the run")
    reason: str = flag("asked to stop", "why; it is written into the record")
    wait_s: float = flag(120.0, "how long to wait until it has stopped; 0: do not wait")


def stop(flags: StopFlags) -> int:
    """Drain the whole run: all ranks snapshot at the same step boundary and leave; nobody comes
    back by itself."""
    store, console = existing_store(flags.url), Console()
    ask_stop(store, flags.reason)
    url = normalize(flags.url)
    left = _Ending(store, local_cloud(url).gone if is_local(url) else set).wait(flags.wait_s)
    if not left:
        from storage.snapshots import Snapshots

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


LED_S = 25.0  # a controller that has not beaten for so long does not end anything any more


class _Ending:
    """What the bucket tells of a run that is coming to its end: whose members beat, which
    attempts are open, whether somebody leads."""

    def __init__(self, store: ObjectStore, gone: Callable[[], Collection[int]] = set):
        """`gone`: attempts of which a cloud at hand knows that they are over."""
        from harness.bucket.beats import Beats
        from harness.bucket.journal import Follower
        from harness.controller.book import Book

        self._store, self._beats, self._facts = (
            store,
            Beats(store, time.monotonic),
            Follower(store, f"{FACTS}controller-"),
        )
        self._sign, self._led_s = (0, b""), time.monotonic()
        self.book, self._gone = Book(random.Random(0)), gone

    def look(self) -> list[Beat]:
        """Members that are not known to have ended. One that died never says goodbye: that a cloud
        has proven its attempt to be gone (a fact of the controller) tells, or its silence."""
        from harness.bucket.lease import RELEASED, sign_of_life

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
        """May a controller be at work?"""
        return time.monotonic() - self._led_s < LED_S

    def wait(
        self, within_s: float, over: Callable[[list[Beat]], bool] = lambda beating: not beating
    ) -> list[Beat]:
        """Until it is over, or for so long; who beats then."""
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
    """Stop a run and end every node of it, wherever it came from; what is left running, or
    cannot be proven to be gone, is named."""
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
    """End every cluster that SkyPilot knows of. Returns the attempts that it has, or had, and
    that are gone."""
    from harness.clouds.clusters import bring_down, known_once
    from harness.clouds.sky_client import SkyError

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
        # then it proves nothing about the others
        with contextlib.suppress(SkyError, CloudUnavailable):
            gone |= known_once(sky, url)
        return gone
    finally:
        sky.close()


def _prove(
    ending: _Ending, gone: Collection[int], where: str, url: str, timeout_s: float, console: Console
) -> int:
    """Is nothing left, of all that the bucket knows of? What `where` does not know may have been
    launched from elsewhere: such nodes are asked to stop through the bucket, and waited for; that
    their machines are gone cannot be proven from here."""

    def unknown() -> set[int]:
        return {*ending.book.open, *ending.book.unproven}.difference(gone)

    def strangers(beating: list[Beat]) -> list[Beat]:
        return [b for b in beating if b.attempt not in gone]

    # A controller elsewhere may be bringing down what it launched, and then says so.
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
class SnapshotFlags:
    url: str = positional("URL of the run")


def snapshot(flags: SnapshotFlags) -> int:
    """Ask a running training for a snapshot at its next step boundary."""
    existing_store(flags.url).create(f"{SNAPSHOT}{secrets.token_hex(6)}.json", b"{}")
    Console().print("Asked.")
    return DONE
