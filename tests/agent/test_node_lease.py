"""A node's lease: one whose controller, bucket and launcher are gone ends by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.agent.run_orders import BUCKETLESS_S, COUNTED_S, LOOK_EVERY_S, RunOrders
from harness.core.world import DRAINED
from storage.errors import StoreUnavailable
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import MemoryStore
from storage.stores.store_urls import open_store
from support import buckets
from support.outside import environment, said_of, train_begin, until

LEASE_S, GRACE_S = 15.0, 30.0


class Silent(MemoryStore):
    gone = False

    def get(self, *words: object, **more: object) -> bytes:
        if self.gone:
            raise StoreUnavailable("no answer")
        return super().get(*words, **more)  # type: ignore[arg-type]

    list = get  # type: ignore[assignment]


def orders(store: MemoryStore, leaderless_s: float) -> RunOrders:
    return RunOrders(store, "m0001-x", 1, leaderless_s)


def test_a_bucket_that_does_not_answer_renews_no_lease() -> None:
    store = Silent("memory://lease", {})
    store.gone = True
    for bound_s in (600.0, 24 * 3600.0):
        node, now = orders(store, bound_s), 0.0
        while not (why := node.unled(now)):
            now += LOOK_EVERY_S
        assert "has not answered" in why and node.bucketless
        wanted_s = min(bound_s, BUCKETLESS_S)
        assert wanted_s <= now + LOOK_EVERY_S <= wanted_s + COUNTED_S
    unbound = orders(store, 0.0)
    assert not any(unbound.unled(minute * 60.0) for minute in range(3000))


def test_one_answer_renews_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Silent("memory://lease", {})
    node = orders(store, 24 * 3600.0)
    for minute in range(3000):
        store.gone = bool(minute % 50)
        if not store.gone:
            monkeypatch.setattr(store, "list", lambda *_: [])
        else:
            monkeypatch.undo()
        assert not node.unled(minute * 60.0)


@pytest.mark.proof
def test_a_node_whose_bucket_is_gone_for_good_leaves_within_its_lease(tmp_path: Path) -> None:
    keys = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
        "TMPDIR": str(tmp_path),
    }
    with buckets.moto() as endpoint:
        env = environment(AWS_ENDPOINT_URL=endpoint, **keys)
        flags = ("--set", f"leaderless_hours={LEASE_S / 3600:.6f}", "--grace-s", GRACE_S)
        run = "s3://my-bucket/lease"
        node = train_begin(run, *flags, total=100_000, nap_s=0.2, folder=tmp_path, env=env)
        how = {"key": "k", "secret": "s", "client_kwargs": {"region_name": "us-east-1"}}
        store = open_store(run, endpoint_url=endpoint, **how)
        until(lambda: Snapshots(store).latest(), "a first snapshot", of=node)
    code, text = said_of(node, LEASE_S + GRACE_S + 60.0)  # looks, and a slow computer
    assert code == DRAINED and "the bucket has not answered" in text, text[-3000:]
