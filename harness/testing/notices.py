"""The contract of a source of notices, as tests: inherit them (`NoticeSourceContract`).

All of our own sources pass it (tests/test_contracts.py): AWS, GCP, Azure, Kubernetes, Mithril,
files, and ends that are known from the start.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from harness.agent.notices import KINDS, Notice, NoticeSource, step, watch
from harness.testing.waits import WITHIN_S, until


class Ear:
    """What an agent would have heard of a source, and what it would hold to be in force."""

    def __init__(self) -> None:
        self.seen: list[Notice] = []
        self.gone: list[Notice] = []
        self.known: dict[str, Notice] = {}

    def step(self, source: NoticeSource) -> list[Notice]:
        """One poll."""
        self.known = step(source, self.known, self.seen.append, self.gone.append)
        return list(self.known.values())


@dataclass
class NoticeBench:
    """A source, and the levers of what it listens to.

    announce:    a notice appears; None: the source tells one from the start.
    withdraw:    it is taken back; None: that never happens there.
    silence:     called with True: nobody answers the source; with False: all is well again. None:
                 it asks nobody.
    kind, deadline_s:  what the notice must say; "" and NaN: not looked at
    """

    source: NoticeSource
    announce: Callable[[], Any] | None = None
    withdraw: Callable[[], Any] | None = None
    silence: Callable[[bool], Any] | None = None
    kind: str = ""
    deadline_s: float | None = math.nan


class NoticeSourceContract:
    """What the agent needs of a source. A subclass, whose name begins with Test, gives the fixture
    `bench`: a NoticeBench whose source was never polled."""

    @pytest.fixture
    def bench(self) -> NoticeBench:
        raise NotImplementedError(
            f"{type(self).__name__}: give it a fixture `bench`, which returns a NoticeBench"
        )

    def announced(self, bench: NoticeBench) -> tuple[Ear, Notice]:
        """It was calm, and then there was a notice."""
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
        # by its name the agent finds whom to acknowledge it to
        assert notice.source == bench.source.name
        assert notice.kind in KINDS and (not bench.kind or notice.kind == bench.kind)
        assert isinstance(notice.id, str) and notice.id
        assert notice.deadline_s is None or math.isfinite(notice.deadline_s)
        if bench.deadline_s is None or not math.isnan(bench.deadline_s):
            assert notice.deadline_s == bench.deadline_s
        assert notice.scope in ("self", "others")
        hash(notice)  # a value: nobody can change it later

    def test_a_notice_is_heard_once_and_its_end_too(self, bench: NoticeBench) -> None:
        ear, notice = self.announced(bench)
        for _ in range(3):
            assert ear.step(bench.source) == [notice]  # the same, with the same id
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
        """From a thread of its own, as the agent does it; also while a poll waits."""
        heard = threading.Event()
        before = set(threading.enumerate())
        watcher = watch([bench.source], lambda _: heard.set(), lambda _: None)
        # not those of a server that plays the cloud in this process
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
