"""The stream is one, whoever writes it; MLflow and TensorBoard say what it says."""

import dataclasses
import threading

import pytest

from harness.bucket.archive import Compactor, read_facts
from harness.bucket.journal import Journal
from harness.core import facts
from harness.core.world import BadInput
from harness.look.alerts.alert_log import AlertLog
from harness.look.reports.summary import summarize
from harness.look.trackers import tracker_stream as streams
from harness.look.trackers.committed_steps import Lineage, committed
from harness.look.trackers.metric_rows import EventWatermark, Operations, RunEvent
from harness.look.trackers.mlflow_run import MlflowRun
from harness.look.trackers.publisher import StreamPublisher, publisher_of, sync
from harness.look.trackers.stream_objects import EVENT, OPS, STEP, STREAM, batch_key
from harness.look.trackers.tensorboard import TensorBoard
from harness.look.trackers.tracker_registry import RunInfo, build
from harness.look.trackers.tracker_stream import every_row, newest_header, read
from harness.look.trackers.trackers import collect
from storage.errors import StoreUnavailable
from storage.snapshots.manifest import Ref
from storage.stores.folder_store import FileStore, MemoryStore
from support.interruptions import lost_node
from support.story import Story
from support.truerun import TrueRun


def writer(run, **changes):
    made = publisher_of(run.store, RunInfo.of(run.store), 0.0)
    made.now = lambda: run.t
    return dataclasses.replace(made, **changes)


def steps(store):
    return [row.step for row in every_row(store) if row.kind == STEP]


def exact(run):
    """Every committed step once, in order, with the record's loss; rows without gaps."""
    rows = list(every_row(run.store))
    records, _ = committed(run.store, RunInfo.of(run.store), 1, 10**6)
    assert [(r.step, r.values["train/loss"], r.t) for r in rows if r.kind == STEP] == [
        (r.step, r.loss, r.t) for r in records
    ]
    assert [r.number for r in rows] == list(range(len(rows)))


# ---- one stream ----------------------------------------------------------------------------------
def test_a_run_that_goes_through_much():
    run = Story()
    w = writer(run)
    run.first_half()
    w.round()
    run.spoiled()
    w.round()
    exact(run)
    run.second_half()
    writer(run).round()  # another publisher
    exact(run)
    run.finish()
    assert w.round()
    run.closed()
    assert w.round(last=True)
    exact(run)
    last = [r for r in every_row(run.store) if r.kind == OPS][-1].values
    assert (last["spot/interruptions"], last["spot/notices"], last["ckpt/step"]) == (5, 1, 40)
    before = run.store.list("trackers/")
    assert w.round(last=True) and writer(run).round(last=True)
    assert run.store.list("trackers/") == before  # nothing is left to say


def test_a_join_is_a_resize_and_no_interruption():
    made = lost_node()  # one node is lost, another joins later
    operations = Operations(store := MemoryStore(), Lineage(store, RunInfo("x", "x", {})))
    journal = Journal(store, "w", lambda: now)
    for stamped in made.facts:
        now = stamped.t
        journal.record(stamped.fact)
    journal.flush()
    operations.poll()
    values = operations.values(made.t)
    found, _ = made.told()
    assert [one.kind for one in found.interruptions] == ["loss", "resize"]
    assert (values["spot/interruptions"], values["spot/resizes"]) == (1, 2)


def test_operations_survive_a_rewind_once():
    """What was told of money and time stays, though the steps beside it are void."""
    run = Story()
    w = writer(run)
    run.first_half()
    w.round()
    run.spoiled()
    w.round()
    told = [r.t for r in every_row(run.store) if r.kind == OPS]
    run.second_half()
    w.round()
    rows = [r for r in every_row(run.store) if r.kind == OPS]
    assert [r.t for r in rows][: len(told)] == told
    assert len({r.t for r in rows}) == len(rows)
    assert any(r.again for r in rows)


def test_events_are_told_once_at_their_own_moments():
    """Whoever publishes, whatever is rewound, and however late a fact comes."""
    run = Story()
    w = writer(run)
    run.first_half()
    w.round()
    run.spoiled()
    writer(run).round()
    run.second_half()
    w.round()
    late = run.t - 5
    run.finish(), run.closed()
    w.round(last=True)
    run.t, now = late, run.t  # its writer could not reach the bucket
    run.told(facts.NoticeSeen("m0005-aa", "aws", "soft", "late"), writer="agent-late")
    run.t = now
    writer(run).round(last=True)
    exact(run)
    told = [r for r in every_row(run.store) if r.kind == EVENT]

    def all_of(name):
        return [(r.t, r.values[name]) for r in told if name in r.values]

    known = read_facts(run.store)
    notices = [s.t for s in known if isinstance(s.fact, facts.NoticeSeen)]
    assert all_of("event/notice") == [(notices[0], 3), (notices[1], 5)]
    up = [(s.t, s.fact.attempt) for s in known if isinstance(s.fact, facts.AttemptUp)]
    assert all_of("event/node_up") == up
    assert [node for _, node in all_of("event/node_lost")] == [1, 4, 2]
    assert [node for _, node in all_of("event/node_gone")] == [3, 5]
    worlds = [s.fact.world for s in known if isinstance(s.fact, facts.EpochStarted)]
    assert [world for _, world in all_of("event/world")] == worlds
    gaps = [e.gap_s for e in summarize(run.store).ledger.epochs if e.gap_s is not None]
    assert [gap for _, gap in all_of("event/recovered_s")] == pytest.approx(gaps)
    assert [step for _, step in all_of("event/quarantined_step")] == [26]
    # nodes have the lowest free numbers
    measured = [s for s in known if isinstance(s.fact, facts.NodeMeasured)]
    rows = [r for r in told if any(name.startswith("node/") for name in r.values)]
    assert [r.t for r in rows] == sorted(s.t for s in measured)
    names = {name for r in rows for name in r.values}
    assert {n for n in names if n.endswith("/number")} == {f"node/{n}/number" for n in (1, 2, 3)}
    assert {v for _, v in all_of("node/1/number")} == {1, 3, 5}
    assert {v for _, v in all_of("node/1/cpu/percent")} == {10.0, 30.0, 50.0}


def test_many_writers_are_forgotten_in_the_order_of_what_they_told():
    heard, t = EventWatermark({}), 0.0
    for i in range(1000):
        t += 1.0
        one = RunEvent(f"w{i % 300}", t, {}, t)
        assert heard.misses(one)
        heard = heard.after([one, RunEvent("recovered", t, {}, i)])
        assert not heard.misses(one)
        assert len(heard.by) <= 129
    assert not heard.misses(RunEvent("w7", 5.0, {}, 5.0))
    assert heard.misses(RunEvent("recovered", 1.0, {}, 1000))


def test_speed_and_hardware_are_operations_too():
    run = Story()
    run.first_half()
    w = writer(run)
    w.round(last=True)
    last = [r for r in every_row(run.store) if r.kind == OPS][-1].values
    assert (last["split/backward_s"], last["live/hfu"], last["live/mfu"]) == (0.125, 0.5, 0.4)
    spread = [last[f"ranks/loss_{which}"] for which in ("least", "median", "most", "most_rank")]
    assert spread == [0.9, 1.0, 1.2, 0]
    assert last["hardware/gpu_percent_min"] == 90.0
    assert last["hardware/gpu_watts"] == 500.0  # of one node: the others are gone
    assert last["cost/usd_per_1m_tokens"] == pytest.approx(last["cost/usd_per_1m_samples"] / 10)
    fired = [alert.severity for alert in AlertLog(run.store).read()]
    severities = ("info", "warning", "critical")
    assert [last[f"alerts/{name}"] for name in severities] == [fired.count(n) for n in severities]
    assert last["alerts/firing"] == len(fired) > 0
    run.t += 600
    w.round(last=True)
    silent = [r for r in every_row(run.store) if r.kind == OPS][-1].values
    assert not [name for name in silent if name.startswith(("hardware/", "split/"))]


def test_many_writers_at_once():
    run = TrueRun().train(2)
    stop = threading.Event()
    lock = threading.Lock()

    def go():
        w = writer(run)
        while not stop.is_set():
            with lock:  # TrueRun's own fields are no thread's
                now = run.t
            w.now = lambda now=now: now
            w.round()

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for to in range(4, 25, 2):
        with lock:
            run.train(to, final=to == 24)
    stop.set()
    for thread in threads:
        thread.join(30)
    writer(run).round(last=True)
    exact(run)


class Deaf(MemoryStore):
    """A batch is created, and nobody hears of it."""

    deaf = False

    def create(self, key, data):
        made = super().create(key, data)
        if self.deaf and key.startswith(STREAM):
            raise StoreUnavailable("no answer")
        return made


def test_a_batch_that_was_written_without_an_answer():
    run = TrueRun(store=Deaf("memory://x/deaf", {})).train(5)
    w = writer(run)
    w.round()
    run.train(9)
    run.store.deaf = True
    with pytest.raises(StoreUnavailable):
        w.round()
    run.store.deaf = False
    run.train(12, final=True)
    assert w.round()
    exact(run)


def test_late_and_in_pieces(monkeypatch):
    monkeypatch.setattr(streams, "MAX_STEPS", 4)
    run = TrueRun().train(19, final=True)
    assert writer(run).round()
    assert steps(run.store) == list(range(1, 20))
    headers = [read(run.store, n)[0] for n in range(newest_header(run.store).number + 1)]
    assert [h.last_step for h in headers] == [0, 4, 8, 12, 16, 19]
    assert [h.end for h in headers] == ["", "", "", "", "", "done"]


def test_rewind_to_the_very_beginning():
    run = TrueRun().train(3)
    w = writer(run)
    w.round()
    run.snapshots.quarantine(Ref(epoch=1, step=3), "bad")
    run.step, run.parent, run.named = 0, None, None
    run.head = TrueRun(begin=False).head
    run.loss = lambda step: 5.0
    run.train(4, final=True)
    assert w.round()
    exact(run)


def test_batches_are_apart_unless_all_is_due():
    run = TrueRun().train(3)
    w = writer(run, min_batch_s=30.0, ops_every_s=30.0)
    w.round()
    run.train(6, new_epoch=False)
    w.round()
    assert steps(run.store) == [1, 2, 3]
    w.round(last=True)
    assert steps(run.store) == [1, 2, 3, 4, 5, 6]


def test_a_changed_batch_is_named():
    run = TrueRun().train(3)
    writer(run).round()
    run.store.put(batch_key(1), b"{}\n")
    with pytest.raises(BadInput, match=r"00000001\.jsonl: wanted a batch of the stream"):
        list(every_row(run.store))


def test_time_without_a_publisher_is_filled_in():
    run = Story()
    run.first_half(), run.spoiled(), run.second_half(), run.finish(), run.closed()
    writer(run).round(last=True)
    rows = [r for r in every_row(run.store) if r.kind == OPS]
    assert len(rows) > 20
    usd = [r.values["cost/usd_total"] for r in rows]
    assert usd == sorted(usd)
    sizes = {r.values["world/size"] for r in rows}
    assert {1, 2, 3} <= sizes
    assert {r.values["nodes/aws_us-east-1_p5"] for r in rows} >= {0, 1}


def test_facts_are_read_once_by_many_threads():
    run = Story()
    run.first_half()
    operations = Operations(run.store, Lineage(run.store, RunInfo.of(run.store)))
    threads = [threading.Thread(target=operations.poll) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert operations.known == len(read_facts(run.store))


def test_an_archived_run_has_the_same_numbers():
    """Its steps come as columns, whether it was archived before or meanwhile."""
    run = Story()
    run.first_half(), run.spoiled()
    follows = writer(run).operations
    follows.poll()
    run.second_half()
    before = writer(run).operations
    before.poll()
    assert Compactor(run.store, fewest=1).compact(all_of_them=True)
    follows.poll()
    after = writer(run).operations
    after.poll()
    assert not run.store.list("facts/")
    wanted = before.values(run.t)
    assert len(before.steps()) == len(after.steps()) == len(follows.steps()) > 5
    assert after.values(run.t) == wanted
    assert follows.values(run.t) == wanted


def test_how_a_run_ends():
    run = TrueRun().train(3)
    operations = Operations(run.store, Lineage(run.store, RunInfo.of(run.store)))
    operations.poll()
    assert operations.end(final=False) == ""
    run.controller.record(facts.RunEnded("failed", "crash loop", 3))
    run.controller.flush()
    operations.poll()
    assert operations.end(final=False) == "failed"
    run.controller.record(facts.LeaseTaken(2, "me"))
    run.controller.flush()
    operations.poll()
    assert (operations.end(final=False), operations.end(final=True)) == ("", "done")


# ---- threads -------------------------------------------------------------------------------------
class Broken:
    """A tracker whose first rounds fail."""

    name = "broken"

    def __init__(self):
        self.rounds, self.closed, self.lasts = 0, 0, []

    def round(self, last=False):
        self.rounds += 1
        self.lasts.append(last)
        if self.rounds < 3:
            raise RuntimeError("api_key=0123456789abcdef0123456789abcdef0123 was refused")
        return True

    def close(self):
        self.closed += 1


def test_a_failing_tracker_is_tried_again_and_stops_nobody(caplog, monkeypatch):
    monkeypatch.setattr("harness.look.trackers.publisher.TELL_S", 0.01)
    run = TrueRun().train(5, final=True)
    broken = Broken()
    telling = StreamPublisher(writer(run), [broken])
    threads = telling.threads()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert steps(run.store) == [1, 2, 3, 4, 5]
    assert broken.lasts[-1] is True
    assert broken.closed >= 2
    assert "0123456789abcdef" not in caplog.text


# ---- MLflow --------------------------------------------------------------------------------------
@pytest.fixture
def mlflow_uri(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return f"sqlite:///{tmp_path}/mlflow.db"


def points(client, run_id, name):
    return sorted((m.step, m.value, m.timestamp) for m in client.get_metric_history(run_id, name))


def test_mlflow_reads_back_what_was_committed(mlflow_uri):
    run = Story()
    run.first_half()
    w = writer(run)
    w.round()
    info = RunInfo.of(run.store)
    names = {"a/../b": 1, "x=y": "", "": 2, "..": 3} | {f"n{i}": i for i in range(150)}
    config = {
        "config": {"lr": 0.1, "deep": {"er": 1}, "odd": names}, "tags": ["spot"], "notes": "why",
    }  # fmt: skip
    tracker = MlflowRun(run.store, info, mlflow_uri, about=lambda: config)
    assert not tracker.round()
    (place,) = run.store.list("trackers/mlflow/")
    run.spoiled()
    w.round()
    tracker.round()
    tracker.round()
    run.second_half(), run.finish(), run.closed()
    w.round(last=True)
    # another publisher, on another machine
    assert MlflowRun(run.store, info, mlflow_uri, about=lambda: config).round()
    old, new = tracker.client.search_runs(["1"], order_by=["attributes.start_time ASC"])
    assert place.endswith("0000.json")
    assert old.data.tags["spotharness.superseded"] == "true"
    assert (old.info.status, new.info.status) == ("KILLED", "FINISHED")
    params = new.data.params
    assert (params["lr"], params["deep.er"], params["odd.a_.._b"]) == ("0.1", "1", "1")
    assert (params["odd"], params["odd.n149"], len(params)) == ("2", "149", 155)
    assert new.data.tags["mlflow.note.content"] == "why"
    records, _ = committed(run.store, info, 1, 10**6)
    assert points(tracker.client, new.info.run_id, "train/loss") == [
        (r.step, r.loss, int(r.t * 1000)) for r in records
    ]
    ops = [r for r in every_row(run.store) if r.kind == OPS]
    usd = points(tracker.client, new.info.run_id, "cost/usd_total")
    assert [t for _, _, t in usd] == [int(r.t * 1000) for r in ops]
    assert usd[-1][1] == ops[-1].values["cost/usd_total"]
    assert new.data.tags["best/val_loss"] == "0.25 at step 31"


def test_mlflow_asks_for_a_place_that_it_supports(tmp_path):
    pytest.importorskip("mlflow")
    with pytest.raises(BadInput, match="wanted sqlite:///FILE"):
        build("mlflow", {"MLFLOW_TRACKING_URI": str(tmp_path)})
    run = TrueRun().train(3)
    with pytest.raises(BadInput, match="MLFLOW_TRACKING_URI"):
        sync(run.store, build("mlflow", {}), {}, 1.0)


# ---- TensorBoard ---------------------------------------------------------------------------------
def test_tensorboard_reads_back_what_was_committed(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Story(FileStore((tmp_path / "run").as_uri()))
    w, tracker = writer(run), TensorBoard(run.store)
    run.first_half()
    w.round(), tracker.round()
    run.spoiled()
    w.round(), tracker.round()
    run.second_half()
    w.round(), TensorBoard(run.store).round()  # another publisher
    run.finish(), run.closed()
    w.round(last=True)
    assert tracker.round()
    # a straggler that writes what is there already
    again = TensorBoard(run.store)
    again._next, again._end_row = 0, 0
    again.round()
    collect(run.store, tmp_path / "out")

    def read_back(which, tag):
        folder = tmp_path / "out" / "tensorboard" / which
        found = EventAccumulator(
            str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True
        )
        found.Reload()
        return [(e.step, e.value, e.wall_time) for e in found.Scalars(tag)]

    records, _ = committed(run.store, RunInfo.of(run.store), 1, 10**6)
    assert [(s, pytest.approx(v), t) for s, v, t in read_back("train", "train/loss")] == [
        (r.step, r.loss, r.t) for r in records
    ]
    ops = [r for r in every_row(run.store) if r.kind == OPS]
    told = read_back("ops", "cost/usd_total")
    assert [t for _, _, t in told] == [r.t for r in ops]
    assert told[-1][1] == pytest.approx(ops[-1].values["cost/usd_total"])
