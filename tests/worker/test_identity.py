"""The run's identity, run.json: one unreadable answer, or one reader, ends nothing."""

import threading
from pathlib import Path
from typing import Any

import pytest

from harness.bucket.layout import IDENTITY
from harness.core.world import BadInput
from harness.worker.process_group import Peers
from harness.worker.run_context import Run
from storage.canonical_json import canonical
from storage.errors import StoreUnavailable
from storage.stores.store_urls import open_store

MINE = {"samples": 64, "global_batch": 8, "micro_batch": 4, "seed": 0, "steps": 6}
WHOLE = canonical(MINE)
LOOKS = {"HARNESS_LOOK_AGAIN_S": "0.2,0.4"}


class TwoHosts(Peers):
    """Rank 0 of two hosts. `answers`: what the other one gathers, in order."""

    answers: list[Any]

    def gather(self, value: Any) -> list[Any]:
        return [value, self.answers.pop(0)]


def run_of(folder: Path, recorded: bytes, peers: Peers) -> Run:
    url = f"file://{folder}/run"
    open_store(url).put(IDENTITY, recorded)
    return Run(peers, url, LOOKS)


def test_half_an_answer_is_read_again(tmp_path: Path) -> None:
    run = run_of(tmp_path, WHOLE[: len(WHOLE) // 2], Peers({}))
    threading.Timer(0.3, lambda: run.store.put(IDENTITY, WHOLE)).start()
    run.identify(MINE)
    assert run.identity == MINE
    with pytest.raises(BadInput, match="holds another run: its seed is 0, this script's is 1"):
        run.identify({**MINE, "seed": 1})


def test_one_hosts_word_ends_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path, WHOLE[:9], Peers({}))
    with pytest.raises(StoreUnavailable, match="no other host says so"):
        run.identify(MINE)


def test_what_another_host_reads_is_believed_and_two_that_cannot_stop_the_run(
    tmp_path: Path,
) -> None:
    peers = TwoHosts({})
    run = run_of(tmp_path, WHOLE[:9], peers)
    peers.answers = ["host-2", (MINE, "")]
    run.identify(MINE)
    assert run.identity == MINE
    peers.answers = ["host-2", (None, "half of it")]
    with pytest.raises(BadInput, match="from two hosts; use a new run URL"):
        run.identify(MINE)
