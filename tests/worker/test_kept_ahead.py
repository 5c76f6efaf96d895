"""States that nodes keep in memory ahead of a loss: who has what, and which one a world takes."""

import contextlib
import threading

import pytest

from harness.bucket.layout import Epoch, epoch_key
from harness.uploader.ahead_state import AheadState, lost_share
from harness.uploader.handoff import InProcessSender, UploaderClient, UploadServer
from harness.uploader.node_tiers import NearbyConfig, tiers_for
from harness.worker.resuming.ahead_states import ChosenAhead, choose_ahead
from harness.worker.resuming.kept_ahead import LEAST_S, AheadCost
from harness.worker.resuming.kept_state import SHARE
from storage import MemoryStore, NotFound, Snapshots
from storage.snapshots.manifest import Ref
from storage.snapshots.restore import RewindOrder
from storage.snapshots.staging import Stage
from storage.tiers.tiers import Tiered, chunks_of
from support.uploads import R1, VIEW, Told, job

RUN, EPOCH = "file:///run", 3


def kept(step, epoch=EPOCH, behind=("",), phase=1, run=RUN):
    return AheadState(run, phase, epoch, step, behind, "")


def choose(heads, newest="", orders=()):
    return choose_ahead(heads, RUN, 1, newest, orders)


def test_the_newest_state_behind_the_newest_snapshot_is_taken():
    assert choose([None, None]) == ChosenAhead()
    assert choose([None, kept(8), None, kept(12)]) == ChosenAhead(12, holder=3)
    assert choose([kept(8), kept(8)]) == ChosenAhead(8, holder=0)
    saved = Ref(epoch=2, step=10).name
    assert choose([kept(12)], saved) == ChosenAhead(), "it comes after another history"
    assert choose([kept(12, behind=(saved,)), kept(14)], saved) == ChosenAhead(12)
    assert choose([kept(10, behind=(saved,))], saved) == ChosenAhead(), "the snapshot is as new"
    assert choose([kept(8, phase=2), kept(9, run="file:///other")]) == ChosenAhead()


def test_what_guards_have_left_behind_is_not_taken():
    order = RewindOrder(epoch=4, step=6, was=8, why="a loss spike")
    assert choose([kept(8)], orders=[order]) == ChosenAhead()
    assert choose([kept(6)], orders=[order]).step == 6


def test_a_share_is_lost_with_both_nodes_that_have_it():
    world = Epoch(EPOCH, ("a", "b", "c", "d"), (1, 1, 1, 1), (1.0,) * 4, "h", 1, "start")
    assert lost_share(world, ["a", "c", "new"]) == ""
    assert "b and c" in lost_share(world, ["a", "d"])
    assert "d and a" in lost_share(world, ["b", "c"])


def test_a_state_goes_through_json():
    state = AheadState(RUN, 1, EPOCH, 8, ("", "x"), "records", ("one", "two"))
    assert AheadState.decode(state.encode()) == state
    assert state.head() == kept(8, behind=("", "x"))


def test_the_interval_follows_from_what_a_state_has_cost():
    cost = AheadCost()
    cost.stood(5.0)
    assert cost.end() == LEAST_S, "the first one sets up what later ones use"
    cost.stood(0.02)
    cost.begin(now_s=100.0, step=10)
    cost.beside(101.0, 12, calm_step_s=0.4, ended=False)
    cost.beside(102.6, 16, calm_step_s=0.4, ended=True)  # 6 steps of 0.4 s have taken 2.6 s
    cost.beside(200.0, 99, calm_step_s=0.4, ended=True)
    cost.stood(0.01)
    assert cost.end() == pytest.approx((0.03 + 0.2) / SHARE)
    assert cost.interval_s == pytest.approx(0.23 / SHARE)


@contextlib.contextmanager
def node(tmp_path, store, name, budget_nbytes=1 << 20):
    stage = Stage(tmp_path / name, budget_nbytes)
    nearby = NearbyConfig(peer="memory", memory_nbytes=budget_nbytes)
    server = UploadServer(store, stage.folder, budget_nbytes, name, nearby)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        local = InProcessSender(store, lambda job, outcome: None)
        yield UploaderClient(stage.folder, EPOCH, 0, local), server
    finally:
        server.stop()
        stage.close()


def content(ref, rank):
    start = 1000 * rank + ref.step
    return VIEW[start : start + 4000]


def keep(client, ref, rank, world=2):
    """Keep a share of 4000 bytes of a state on a node; return its part list, or the error."""
    segment, told = client.segment(4000, must=False), Told()
    segment.view[:] = content(ref, rank)
    client.keep(job(ref, rank=rank, world=world), segment, told)
    outcome = told.wait()
    return outcome.note.get("part_list", outcome.error)


@pytest.fixture
def store(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    store = MemoryStore(objects={})
    store.create(epoch_key(EPOCH), Epoch(EPOCH, ("a", "b"), (1, 1), (1, 1), "h", 1, "").encode())
    return store


def ref(step):
    return Ref(epoch=EPOCH, step=step)


def test_a_share_is_read_from_the_next_node_when_its_own_is_lost(tmp_path, store):
    with node(tmp_path, store, "b") as (b, server):
        with node(tmp_path, store, "a") as (a, _):
            b.held(ref(5))  # its chunk server is there
            for step in (5, 6):
                lists = (keep(a, ref(step), 0), keep(b, ref(step), 1))
                state = AheadState(RUN, 1, EPOCH, step, ("",), "", lists)
                for client in (a, b):
                    client.set_ahead(state.encode())
                assert b.ahead() == state.encode()
        assert Snapshots(store).refs() == [], "no bucket has it"
        manifest = state.manifest()
        near = Tiered(store, manifest, tiers_for(manifest, b.held(ref(6)), store))
        found = b"".join(near.get(part.key) for part in manifest.parts)
        assert found == bytes(content(ref(6), 0)) + bytes(content(ref(6), 1))
        assert near.tier == "memory"
        # nodes keep only the newest one for others
        kept_for_others = {id for folder in server.nearby._folders for id in folder.list()}
        assert kept_for_others == chunks_of(state.shares[:1])
        b.set_ahead("")
        assert b.ahead() == ""


def test_a_share_that_the_next_node_does_not_take_is_not_kept(tmp_path, store):
    with node(tmp_path, store, "a") as (a, _):
        assert "did not take" in keep(a, ref(5), 0)  # b never came
        assert a.held(ref(5))["parts"] == {}


def test_a_node_alone_keeps_its_share_for_itself(tmp_path, store):
    store.create(epoch_key(4), Epoch(4, ("a",), (1,), (1,), "h", 1, "").encode())
    alone = Ref(epoch=4, step=5)
    with node(tmp_path, store, "a") as (a, _):
        manifest = AheadState(RUN, 1, 4, 5, ("",), "", (keep(a, alone, 0, world=1),)).manifest()
        near = Tiered(store, manifest, tiers_for(manifest, a.held(alone), store))
        found = b"".join(near.get(part.key) for part in manifest.parts)
        assert found == bytes(content(alone, 0))
        with pytest.raises(NotFound):
            store.get(manifest.parts[0].key)


def test_a_trainer_without_an_uploader_keeps_nothing():
    local, told = InProcessSender(MemoryStore(objects={}), lambda job, outcome: None), Told()
    local.keep(job(R1), local.segment(4000), told)
    assert told.wait().error == "this node has no uploader"
    local.set_ahead("x")
    assert local.ahead() == ""


def test_the_newest_state_stays_until_a_snapshot_is_as_new(tmp_path, store):
    store.create(epoch_key(4), Epoch(4, ("a",), (1,), (1,), "h", 1, "").encode())
    with node(tmp_path, store, "a") as (a, _):
        told = keep(a, Ref(epoch=4, step=5), 0, world=1)
        a.set_ahead(AheadState(RUN, 1, 4, 5, ("",), "", (told,)).encode())
        local = InProcessSender(store, lambda job, outcome: None)
        later = UploaderClient(a._folder, 5, 0, local)  # the next generation's worker
        segment, committed = later.segment(4000), Told()
        assert later.ahead() and later.held(Ref(epoch=4, step=5))["parts"]
        segment.view[:] = content(ref(6), 0)
        later.send(job(Ref(epoch=4, step=6)), segment, committed)
        assert committed.wait().state == "committed"
        assert later.ahead() == ""
