"""Side jobs of committed snapshots: which are due, who does them, what their numbers reach."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import harness
from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.bucket.layout import WATCH
from harness.cli.command import main
from harness.cli.publish import default_name
from harness.core.facts import RunEnded, SnapshotCommitted, Stamped, Validated
from harness.core.world import BadInput
from harness.look.pages.report_page import page
from harness.look.reports.report import print_report, to_json
from harness.look.reports.summary import summarize
from harness.look.trackers.committed_steps import Lineage
from harness.look.trackers.metric_rows import Operations
from harness.look.trackers.stream_objects import EVENT
from harness.look.trackers.tracker_registry import RunInfo
from harness.look.trackers.tracker_stream import StreamWriter, every_row, newest_header
from harness.look.trackers.wandb_run import define_side_job
from harness.look.watch.due_snapshots import DueRule, HeldSnapshots, due
from harness.look.watch.side_command import argument_vector, metrics_in
from harness.look.watch.side_jobs import SideJobs, SideOutcome, side_jobs
from harness.look.watch.watched import Watched
from storage.snapshots.manifest import Ref
from storage.snapshots.reader_leases import reading
from storage.snapshots.retention import MOST_NBYTES, Keep, measure, recorded_metrics
from storage.stores.folder_store import FileStore, MemoryStore
from support.interleavings import explore
from support.truerun import TrueRun


def refs(*steps, epoch=1):
    return [Ref(epoch, step) for step in steps]


# ---- due -----------------------------------------------------------------------------------------
def test_each_snapshot_is_due_once_oldest_first():
    seen = refs(30, 10, 20)
    assert due(DueRule(), seen, ()) == refs(10, 20, 30)
    assert due(DueRule(), seen, refs(10, 30)) == refs(20)
    assert due(DueRule(), seen, seen) == [] == due(DueRule(), (), ())


def test_every_third_is_counted_from_the_one_that_was_done_last():
    seen = refs(*range(10, 100, 10))
    assert due(DueRule(every=3), seen, ()) == refs(30, 60, 90)
    assert due(DueRule(every=3), seen, refs(30)) == refs(60, 90)
    # pruned since, and not seen by who starts now: those that were done still count
    assert due(DueRule(every=3), refs(50, 60, 70), refs(40)) == refs(70)
    assert due(DueRule(every=3), [*refs(40, 50, 60, 70)], refs(40)) == refs(70)


def test_the_first_in_every_so_many_steps():
    seen = refs(5, 15, 95, 105, 115, 205)
    assert due(DueRule(every_steps=100), seen, ()) == refs(5, 105, 205)
    assert due(DueRule(every_steps=100), seen, refs(15)) == refs(105, 205)


def test_the_newest_only():
    assert due(DueRule(newest=True), refs(10, 20, 30), refs(10)) == refs(30)
    assert due(DueRule(newest=True), refs(10, 20, 30), refs(30)) == []


def test_the_last_of_a_run_is_always_due():
    seen, final = refs(10, 20, 30, 40), Ref(1, 40)
    assert due(DueRule(every=3), seen, (), final) == refs(30, 40)
    assert due(DueRule(every_steps=100), seen, refs(10), final) == [final]
    assert due(DueRule(every=3), seen, [*refs(30), final], final) == []


def test_work_that_a_newer_epoch_left_behind_is_nobodys_job():
    seen = [*refs(10, 20, 30), *refs(15, 25, epoch=2)]
    assert due(DueRule(), seen, ()) == [Ref(1, 10), Ref(2, 15), Ref(2, 25)]


@pytest.mark.parametrize("bad", [{"every": 0}, {"every_steps": -1}, {"every": 2, "newest": True}])
def test_rules_that_contradict_each_other_are_refused(bad):
    with pytest.raises(BadInput, match="wanted one of --every"):
        DueRule(**bad)


# ---- claims --------------------------------------------------------------------------------------
class At:
    """A clock that stands still until it is set."""

    def __init__(self):
        self.s = 1000.0

    def __call__(self):
        return self.s


def two_watchers(lease_s=60.0):
    store, clock = MemoryStore("memory://x/side-jobs", {}), At()
    return clock, *(SideJobs(store, "eval", name, lease_s, now=clock) for name in ("a", "b"))


def test_a_snapshot_is_claimed_by_one_watcher_and_done_once():
    _, a, b = two_watchers()
    ref = Ref(1, 10)
    number = a.claim(ref)
    assert number == 1 and a.is_ours(ref, 1) and not b.claim(ref)
    assert a.settle(ref, SideOutcome("done", {"eval/loss": 2.0}, 1, 3.0, "a"))
    assert a.settled() == b.settled() == {ref} and not b.claim(ref)
    assert b.outcome(ref) == SideOutcome("done", {"eval/loss": 2.0}, 1, 3.0, "a")
    assert not b.settle(ref, SideOutcome("failed"))
    assert a._store.list(WATCH) == ["watch/eval/done/0000000010-e000001.json"]


def test_a_dead_watchers_claim_is_taken_over_and_it_learns_so():
    clock, a, b = two_watchers()
    ref = Ref(1, 10)
    assert a.claim(ref) == 1 and not b.claim(ref)
    for beat in (1, 2):
        clock.s += 59
        a.beat(ref, 1, beat)
        assert not b.claim(ref)
    clock.s += 59
    assert not b.claim(ref)
    clock.s += 1
    assert b.claim(ref) == 2 and b.is_ours(ref, 2) and not a.is_ours(ref, 1)
    assert (b.deaths(ref, 1), b.deaths(ref, 2)) == (0, 1)


def test_a_claim_that_was_given_back_is_free_at_once_and_nobody_died():
    _, a, b = two_watchers()
    ref = Ref(1, 10)
    a.give_back(ref, a.claim(ref))
    assert b.claim(ref) == 2 and b.deaths(ref, 2) == 0


def test_a_claim_without_a_beat_is_somebodys():
    clock, a, _ = two_watchers()
    a._store.create("watch/eval/claims/0000000010-e000001-0001.json", b"no JSON")
    assert not a.claim(Ref(1, 10))
    clock.s += 60
    assert a.claim(Ref(1, 10)) == 2


def test_a_watcher_that_comes_late_does_not_do_it_again():
    """It has listed the claims, and they are settled and deleted before it creates its own."""
    _, a, b = two_watchers()
    ref, outcome = Ref(1, 10), SideOutcome("done")
    a.claim(ref)
    b._numbers = lambda ref: []
    a.settle(ref, outcome)
    assert not b.claim(ref) and a._store.list("watch/eval/claims/") == []


def test_what_failed_can_be_done_again():
    _, a, b = two_watchers()
    good, bad = refs(10, 20)
    for ref, state in ((good, "done"), (bad, "failed")):
        a.claim(ref)
        a.settle(ref, SideOutcome(state, why="it is bad"))
    a._store.put("watch/eval/done/0000000030-e000001.json", b"no JSON")
    assert a.outcome(Ref(1, 30)).state == "failed"
    assert b.forget_failed() == 2 and a.settled() == {good} and b.claim(bad) == 1


def test_foreign_objects_are_nobodys_outcome():
    _, a, _ = two_watchers()
    for key in ("watch/eval/done/x.json", "watch/eval/done/", "watch/eval/claims/0000000010-e000001-x"):
        a._store.put(key or "x", b"{}")
    assert a.settled() == set() and a.claim(Ref(1, 10)) == 1


def test_no_interleaving_lets_two_living_watchers_do_one_snapshot():
    """Every order of two watchers' calls; neither waits long enough to take the other for dead."""
    ref = Ref(1, 10)

    def watcher(name):
        def act(store, say):
            jobs = SideJobs(store, "eval", name, now=lambda: 0.0)
            if number := jobs.claim(ref):
                say("did it")
                if jobs.is_ours(ref, number):
                    jobs.settle(ref, SideOutcome("done", by=name))

        return act

    def check(state):
        did = [actor for actor, word in state.said if word == "did it"]
        assert len(did) <= 1, did
        if state.settled:
            assert [key for key in state.objects if "/done/" in key] and len(did) == 1

    found = explore({"a": watcher("a"), "b": watcher("b")}, {}, check=check)
    assert found.endings > 0


# ---- numbers that are told later -----------------------------------------------------------------
def test_the_best_by_a_number_that_was_told_later_stays():
    run = TrueRun().train(20)
    store, snapshots = run.store, run.snapshots
    assert snapshots.refs() == refs(20, 15, 10, 5)
    for ref, loss in zip(refs(5, 10, 15), (3.0, 1.0, 2.0), strict=True):
        assert measure(store, ref, "eval", {"eval/loss": loss})
        assert not measure(store, ref, "eval", {"eval/loss": 0.0})  # the first word stays
    assert measure(store, Ref(1, 5), "other", {"other/accuracy": 1})
    assert recorded_metrics(store, refs(5)) == {Ref(1, 5): {"eval/loss": 3.0, "other/accuracy": 1.0}}
    store.put("snapshots/measured/0000000015-e000001/odd.json", b'{"metrics": [1]}')
    assert snapshots.prune(Keep(1, best="eval/loss:min")) == refs(15, 5)
    assert snapshots.refs() == refs(20, 10)
    assert recorded_metrics(store, refs(5, 10, 15, 20)) == {Ref(1, 10): {"eval/loss": 1.0}}
    run.train(30, new_epoch=False)
    snapshots.prune(Keep(1, best="eval/loss:min"))
    assert snapshots.refs() == refs(30, 10)


def test_a_snapshot_that_is_held_while_others_are_pruned_can_still_be_found_the_best():
    run = TrueRun().train(15)
    keep = Keep(1, best="eval/loss:min")
    measure(run.store, Ref(1, 5), "eval", {"eval/loss": 3.0})
    holds = HeldSnapshots(run.snapshots)
    assert holds.keep(refs(10)) == []
    assert run.snapshots.prune(keep) == [] and run.snapshots.refs() == refs(15, 10, 5)
    measure(run.store, Ref(1, 10), "eval", {"eval/loss": 1.0})
    holds.close()
    assert run.snapshots.prune(keep) == refs(5)
    assert run.snapshots.refs() == refs(15, 10)
    assert holds.keep(refs(5)) == refs(5)  # pruned
    with reading(run.snapshots, Ref(1, 10)) as ours:
        assert ours


def test_numbers_that_are_told_have_bounds():
    store = MemoryStore("memory://x/measured", {})
    with pytest.raises(ValueError, match="letters, digits"):
        measure(store, Ref(1, 1), "a/b", {"loss": 1.0})
    with pytest.raises(ValueError, match="bytes of numbers"):
        measure(store, Ref(1, 1), "eval", {"x" * MOST_NBYTES: 1.0})


# ---- what they reach -----------------------------------------------------------------------------
def tell(run, step, loss, by="eval", writer="watch-eval-1", epoch=1):
    journal = Journal(run.store, writer, lambda: run.t)
    journal.record(Validated(step, epoch, {f"{by}/loss": loss, f"{by}/n": 3}, by, 1.5))
    journal.flush()


def test_numbers_reach_the_stream_once_at_their_own_step():
    run = TrueRun().train(20, final=True)

    def writer():
        lineage = Lineage(run.store, RunInfo.of(run.store))
        return StreamWriter(run.store, lineage.info, Operations(run.store, lineage), now=lambda: run.t)

    tell(run, 10, 3.0)
    run.t += 1
    tell(run, 5, 2.0, writer="watch-eval-2")
    writer().round(last=True)
    run.t += 1
    tell(run, 10, 3.0, writer="watch-eval-3")  # its watcher died before it said that it was done
    run.t += 1
    tell(run, 15, 4.0, writer="watch-eval-4")
    writer().round(last=True), writer().round(last=True)
    rows = [row for row in every_row(run.store) if row.kind == EVENT and row.step]
    assert [(row.step, row.values["eval/loss"], row.values["train/step"]) for row in rows] == [
        (10, 3.0, 10),
        (5, 2.0, 5),
        (15, 4.0, 15),
    ]
    assert newest_header(run.store).best == {"eval/loss": (2.0, 5)}

    class Run:
        def __init__(self):
            self.defined = []

        def define_metric(self, name, **how):
            self.defined.append((name, how["step_metric"]))

    wandb = Run()
    define_side_job(wandb, rows[0])
    assert wandb.defined == [("eval/*", "train/step")]


def test_numbers_reach_the_report():
    run = TrueRun().train(20, final=True)
    for step, loss in ((5, 3.0), (10, 2.0), (15, 2.5)):
        run.t += 1
        tell(run, step, loss, writer=f"watch-eval-{step}")
    found = summarize(run.store)
    assert (found.validation_name, found.validation) == (
        "eval/loss",
        ((5, 3.0), (10, 2.0), (15, 2.5)),
    )


def test_the_report_has_a_table_of_each_watch_and_knows_the_lowest_loss():
    run = TrueRun().train(20, final=True)
    run.controller.record(RunEnded("done", "", 20))
    run.controller.flush()
    ended_s = summarize(run.store).ended_s
    run.t += 3600  # long after the run's end
    for step, loss in ((10, 2.0), (5, 3.0), (15, float("nan"))):
        tell(run, step, loss, writer=f"watch-eval-{step}")
    tell(run, 20, 7.0, by="<b>", writer="watch-b-1")
    tell(run, 10, 9.0, writer="watch-eval-again")  # told before: the first counts
    s = summarize(run.store)
    assert s.ended_s == ended_s
    assert [(one.name, [step for step, _ in one.rows]) for one in s.side_jobs] == [
        ("<b>", [20]),
        ("eval", [5, 10, 15]),
    ]
    one = s.side_jobs[1]
    assert one.metrics == ["loss", "n"] and one.lowest("loss") == 10 and one.lowest("n") == 0
    assert one.rows[1] == (10, {"loss": 2.0, "n": 3}) and one.seconds == 1.5
    html = page(s)
    assert "Side jobs" in html and "<span class=good>2.0000</span>" in html and "<h3><b>" not in html
    out = io.StringIO()
    print_report(s, Console(file=out, width=120))
    assert "lowest loss at step 10" in out.getvalue() and "<b>" in out.getvalue()
    assert to_json(s)["side_jobs"]["eval"][2] == {"step": 15, "metrics": {"loss": None, "n": 3}}


def test_what_side_jobs_measured_of_work_that_was_done_again_is_left_out():
    refs_of = [Ref(1, 10), Ref(1, 20), Ref(2, 15), Ref(2, 20)]
    told = [
        Stamped(float(i), "watch-eval-1", Validated(ref.step, ref.epoch, {"eval/loss": i}, "eval"))
        for i, ref in enumerate([*refs_of, Ref(2, 17)])
    ]
    made = [SnapshotCommitted(ref.step, ref.epoch, 1, 0.0, 0.0, "interval", 0.0) for ref in refs_of]
    (one,) = side_jobs(told, made)
    # of step 17 nobody told that it was committed: its fact was lost with its writer
    assert [(step, metrics["loss"]) for step, metrics in one.rows] == [(10, 0), (15, 2), (17, 4), (20, 3)]


def test_an_older_fact_without_a_watch_is_the_trainings_own():
    run = TrueRun().train(5)
    journal = Journal(run.store, "worker-x", lambda: run.t)
    journal.record(Validated(5, 1, {"val_loss": 1.0}))
    journal.flush()
    told = [s.fact for s in read_facts(run.store) if isinstance(s.fact, Validated)]
    assert told == [Validated(5, 1, {"val_loss": 1.0}, "", 0.0)]


# ---- the command ---------------------------------------------------------------------------------
def test_what_is_executed(tmp_path):
    script = tmp_path / "eval.py"
    script.touch()
    assert argument_vector([str(script), "--x"])[1:] == [str(script), "--x"]
    assert argument_vector(["-m", "pkg.eval"])[1:] == ["-m", "pkg.eval"]
    assert argument_vector(["sh", "-c", "true"]) == ["sh", "-c", "true"]
    for bad in ([], ["no-such-script.py"], ["no-such-program"]):
        with pytest.raises(BadInput):
            argument_vector(bad)
    names = [default_name(words) for words in (("a/eval.py",), ("-m", "pkg.mod"), ("./run it",))]
    assert names == ["eval", "mod", "run-it"]


def test_numbers_are_lines_of_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics_in(path) == {}
    path.write_text('{"loss": 2, "a/b": 1e-3}\n\n{"loss": NaN, "n": 1}\n')
    found = metrics_in(path)
    assert found.pop("loss") != 0 and found == {"a/b": 1e-3, "n": 1.0}
    for bad in ('{"loss": "low"}', "[1]", "loss 2", '{"ok": true}', '{"": 1}', '{"n": 1' + 400 * "0" + "}"):
        path.write_text(bad)
        with pytest.raises(BadInput, match="wanted"):
            metrics_in(path)


def test_outside_of_a_watch_it_says_what_to_do(monkeypatch):
    monkeypatch.delenv("HARNESS_WATCH_RUN", raising=False)
    with pytest.raises(BadInput, match=r"harness snapshots watch URL -- script\.py"):
        harness.watched()


def test_what_a_command_is_told(monkeypatch, tmp_path):
    said = {"RUN": str(tmp_path), "NAME": "eval", "STEP": "10", "EPOCH": "2", "FOLDER": str(tmp_path)}
    for name, value in {**said, "METRICS": str(tmp_path / "m"), "TRY": "2", "FINAL": "1"}.items():
        monkeypatch.setenv(f"HARNESS_WATCH_{name}", value)
    one = harness.watched()
    assert (one.step, one.epoch, one.final, one.tried, one.weights) == (10, 2, True, 2, None)
    one.log(loss=1), one.log(loss=2.5, accuracy=0.5)
    assert [json.loads(line) for line in Path(tmp_path / "m").read_text().splitlines()] == [
        {"loss": 1.0},
        {"loss": 2.5, "accuracy": 0.5},
    ]
    with pytest.raises(BadInput, match="wanted numbers by name"):
        one.log(loss="low")


def test_a_command_that_lives_long_finds_newer_snapshots(tmp_path):
    run = TrueRun(FileStore(f"file://{tmp_path}/run")).train(10)
    url, folder = f"{tmp_path}/run", tmp_path
    first = Watched(url, "actor", 5, 1, folder, None, False, 1, tmp_path / "metrics")
    newer = first.newer()
    assert (newer.step, newer.epoch, newer.final, newer.newer()) == (10, 1, False, None)
    with pytest.raises(BadInput, match="wanted the snapshot that this command was started for"):
        newer.log(reward=1)
    run.train(12, final=True)
    last = newer.newer()
    assert (last.step, last.epoch, last.final) == (12, 2, True)
    assert last.manifest.step == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--name", "a b", "--", "true"], "letters, digits"),
        (["--name", "train", "--", "true"], "section of the run's own numbers"),
        (["--every", "2", "--newest", "--", "true"], "wanted one of --every"),
        (["--", "no-such.py"], "no such file"),
        ([], "no command"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_begun(words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["snapshots", "watch", str(tmp_path / "run"), *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


