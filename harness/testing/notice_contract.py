"""The contract of a notice source, as tests to inherit (`NoticeSourceContract`).

All of our own sources pass it (tests/lab/test_contracts.py): AWS, GCP, Azure, Kubernetes, Mithril,
files, and ends that are known from the start.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from harness.notices.notice import KINDS, Notice, NoticeSource, step, watch
from harness.testing import WITHIN_S, until


class Ear:
    """The notices that a node agent would have received from a source, and those in force."""

    def __init__(self) -> None:
        self.seen: list[Notice] = []
        self.gone: list[Notice] = []
        self.known: dict[str, Notice] = {}

    def step(self, source: NoticeSource) -> list[Notice]:
        """Poll once and return the notices in force."""
        self.known = step(source, self.known, self.seen.append, self.gone.append)
        return list(self.known.values())


@dataclass
class NoticeBench:
    """A source, and levers for its environment.

    announce:    makes a notice appear; None: the source has one from the start.
    withdraw:    takes it back; None: that never happens there.
    silence:     called with True: nothing answers the source; with False: all is well again. None:
                 the source queries nothing.
    kind, deadline_s:  values that the notice must have; "" and NaN: not checked
    """

    source: NoticeSource
    announce: Callable[[], Any] | None = None
    withdraw: Callable[[], Any] | None = None
    silence: Callable[[bool], Any] | None = None
    kind: str = ""
    deadline_s: float | None = math.nan


class NoticeSourceContract:
    """The requirements of the node agent on a source. A subclass, whose name begins with Test,
    defines the fixture `bench`: a NoticeBench whose source was never polled."""

    @pytest.fixture
    def bench(self) -> NoticeBench:
        raise NotImplementedError(
            f"{type(self).__name__}: give it a fixture `bench`, which returns a NoticeBench"
        )

    def announced(self, bench: NoticeBench) -> tuple[Ear, Notice]:
        """Return the first notice after a calm start, and the ear that received it."""
        ear = Ear()
        if bench.announce is not None:
            assert ear.step(bench.source) == []
            bench.announce()
        until(lambda: ear.step(bench.source), "a notice")
        assert len(ear.seen) == 1
        return ear, ear.seen[0]

    def test_it_is_a_source(self, bench: NoticeBench) -> None:
        source = bench.source
        assert isinstance(source.name, str) and source.name
        assert 0 < source.pace_s < math.inf
        assert source.errors == 0
        assert all(callable(getattr(source, name)) for name in ("poll", "acknowledge", "close"))

    def test_calm_is_no_notice(self, bench: NoticeBench) -> None:
        if bench.announce is None:
            pytest.skip("its notice is there from the start")
        for _ in range(3):
            assert list(bench.source.poll()) == []
        assert bench.source.errors == 0

    def test_a_notice_is_whole(self, bench: NoticeBench) -> None:
        _, notice = self.announced(bench)
        assert isinstance(notice, Notice)
        # the agent finds the source to acknowledge by this name
        assert notice.source == bench.source.name
        assert notice.kind in KINDS and (not bench.kind or notice.kind == bench.kind)
        assert isinstance(notice.id, str) and notice.id
        assert notice.deadline_s is None or math.isfinite(notice.deadline_s)
        if bench.deadline_s is None or not math.isnan(bench.deadline_s):
            assert notice.deadline_s == bench.deadline_s
        assert notice.scope in ("self", "others")
        hash(notice)  # a value that nobody can change later

    def test_a_notice_is_heard_once_and_its_end_too(self, bench: NoticeBench) -> None:
        ear, notice = self.announced(bench)
        for _ in range(3):
            assert ear.step(bench.source) == [notice]  # the same notice, with the same id
        assert (ear.seen, ear.gone) == ([notice], [])
        if bench.withdraw is not None:
            bench.withdraw()
            until(lambda: not ear.step(bench.source), "the notice to be taken back")
            assert ear.gone == [notice]
        assert bench.source.errors == 0

    def test_silence_neither_makes_nor_takes_back_a_notice(self, bench: NoticeBench) -> None:
        if bench.silence is None or bench.announce is None:
            pytest.skip("it asks nobody")
        source, ear = bench.source, Ear()
        ear.step(source)
        bench.silence(True)
        assert ear.step(source) == []  # and no exception
        bench.announce()
        assert ear.step(source) == []
        assert source.errors >= 1
        bench.silence(False)
        until(lambda: ear.step(source), "a notice after the silence")
        (notice,) = ear.seen
        bench.silence(True)
        assert ear.step(source) == [notice]
        if bench.withdraw is not None:
            bench.withdraw()
            assert ear.step(source) == [notice]
        bench.silence(False)
        if bench.withdraw is not None:
            until(lambda: not ear.step(source), "the notice to be taken back")
        assert ear.seen == [notice]

    def test_acknowledging_says_whether_it_was_heard(self, bench: NoticeBench) -> None:
        _, notice = self.announced(bench)
        unknown = Notice(bench.source.name, "kill", "nobody-told-this", None)
        for one in (notice, unknown):
            assert bench.source.acknowledge(one) in (True, False)

    def test_a_watch_of_it_hears_and_ends(self, bench: NoticeBench) -> None:
        """Watch from a separate thread, as the node agent does, also while a poll waits."""
        heard = threading.Event()
        before = set(threading.enumerate())
        watcher = watch([bench.source], lambda _: heard.set())
        # not the threads of a server that simulates the cloud in this process
        followers = {
            thread
            for thread in set(threading.enumerate()) - before
            if thread.name.startswith("notices-")
        }
        try:
            if bench.announce is not None:
                bench.announce()
            assert heard.wait(WITHIN_S)
        finally:
            watcher.stop(within_s=WITHIN_S)
        assert not any(thread.is_alive() for thread in followers)

    def test_closing_may_be_repeated(self, bench: NoticeBench) -> None:
        bench.source.close()
        bench.source.close()
