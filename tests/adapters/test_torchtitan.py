"""torchtitan's debug model under real agents: killed, drained, and resumed on other worlds; by the
import hook, and by torchtitan's own overrides."""

import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.core.mesh import ModelMesh
from harness.core.world import DRAINED, BadInput
from harness.look.audit.audit import audit
from harness.node.marks import MarkFile
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support.worlds import environment, history, newest, until

pytest.importorskip("torchtitan")

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "titan_cpu"))

import titan_assets
import titan_stubs

titan_stubs.when_needed()  # before anything here imports torchtitan

LAST = 12
STEPS = ["--training.steps", str(LAST)]
VALIDATION = [
    *("--validator.enable", "--validator.freq", "5", "--validator.steps", "2"),
    *("--validator.dataloader.dataset", "c4_test"),
    *("--validator.dataloader.dataset_path", "assets/documents"),
]
HARNESS = [sys.executable, "-m", "harness.cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def environ(folder, *, plain=False):
    path = [str(HERE / "titan_cpu"), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "NO_COLOR": "1"}
    own |= {"TITAN_PLAIN": "1"} if plain else {}
    return environment() | own | {"PYTHONPATH": os.pathsep.join(path)}


def agent(folder, run, nproc, *flags, options=()):
    """`harness run` of torchtitan.train, as it is."""
    asked = ["--attach", "snapshot_every_steps=2", *options]
    log = open(folder / f"{nproc}.log", "w")  # noqa: SIM115
    return subprocess.Popen(
        [
            *(*HARNESS, "run", "--run", str(run), "--nproc", str(nproc), *asked, "--"),
            *("-m", "torchtitan.train", *titan_assets.FLAGS, *STEPS, *flags),
        ],
        cwd=folder,
        env=environ(folder),
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def torchrun(folder, *flags, plain=False, run=""):
    """Two ranks without an agent; what they said."""
    env = environ(folder, plain=plain) | ({"HARNESS_RUN": str(run)} if run else {})
    ended = subprocess.run(
        [*TORCHRUN, "2", "-m", "torchtitan.train", *titan_assets.FLAGS, *STEPS, *flags],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return clean(ended.stdout + ended.stderr)


def clean(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def logged(text, what="step"):
    """Step -> loss, as torchtitan logs them."""
    found = re.findall(rf"INFO - {what}: *(\d+) *loss: *([0-9.]+)", text)
    return {int(step): float(loss) for step, loss in found}


def step_of(run):
    try:
        return newest(run).step
    except (AttributeError, OSError):
        return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("titan")
    titan_assets.make(made)
    return made


@pytest.fixture(scope="module")
def plain(folder):
    """What torchtitan alone logs."""
    return torchrun(folder, *VALIDATION, "--dump_folder", "plain", plain=True)


def trained(folder, run, worlds, *flags):
    """Train on `worlds`: (ranks, mesh or "", the signal that ends it amid or None), one after the
    other. Return what the last one said, and the run's steps."""
    said = ""
    for nproc, mesh, how in worlds:
        begun = step_of(run)
        started = agent(folder, run, nproc, *flags, options=["--mesh", mesh] if mesh else ())
        try:
            if how is not None:
                until(lambda n=begun, p=started: step_of(run) > n or p.poll() is not None)
                started.send_signal(how)
            code = started.wait(240)
        finally:
            started.kill()
        said = clean((folder / f"{nproc}.log").read_text())
        wanted = {signal.SIGKILL: -9, signal.SIGTERM: DRAINED, None: 0}[how]
        assert code == wanted, said
    mine = {r.step: r for r in history(run)}
    assert sorted(mine) == list(range(1, LAST + 1))
    assert {r.world for r in mine.values()} == {nproc for nproc, _, _ in worlds}
    assert {r.samples for r in mine.values()} == {4}
    return said, mine


def test_killed_and_drained_on_other_worlds_it_trains_as_torchtitan_alone(folder, plain):
    run = folder / "run"
    worlds = (2, "", signal.SIGKILL), (3, "", signal.SIGTERM), (1, "", None)
    said, mine = trained(folder, run, worlds, *VALIDATION)
    alone = logged(plain)
    assert [r.loss for r in mine.values()] == pytest.approx(list(alone.values()), rel=1e-4)
    last = logged(said, "validate step")
    assert last and last.items() <= logged(plain, "validate step").items()
    verified = subprocess.run([*HARNESS, "prove", "verify", str(run)], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout
    snapshots = Snapshots(open_store(str(run)))
    assert snapshots.ended(snapshots.latest())


MOE = ["--module", "titan_moe"]
LONG = ["--training.seq_len", "256"]  # FlexAttention cuts in blocks of 128


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("flags", "worlds"),
    [
        (
            VALIDATION,
            (
                (4, "dp_shard=2,tp=2", signal.SIGKILL),
                (2, "tp=2", signal.SIGTERM),
                (3, "", signal.SIGKILL),
                (4, "tp=2", None),
            ),
        ),
        (LONG, ((4, "cp=2", signal.SIGKILL), (2, "cp=2", None))),
        (MOE, ((2, "dp_shard=2,ep=2", signal.SIGKILL), (3, "", signal.SIGTERM), (1, "", None))),
    ],
    ids=["tensors", "contexts", "experts"],
)
def test_a_model_in_parts_goes_on_on_any_mesh(folder, flags, worlds):
    name = "-".join(flags[:2]).strip("-")
    alone = logged(torchrun(folder, *flags, "--dump_folder", f"plain {name}", plain=True))
    _, mine = trained(folder, folder / name, worlds, *flags)
    assert [r.loss for r in mine.values()] == pytest.approx(list(alone.values()), rel=1e-4)
    assert audit(open_store(str(folder / name))).ok


def test_by_its_own_overrides_without_an_agent(folder, plain):
    """The same, from torchrun; and data that end are the end of the training."""
    run, ours = folder / "own", "harness.adapters.torchtitan.overrides"
    said = torchrun(
        folder,
        *("--training.global_batch_size", "-1", "--dump_folder", "own_outputs"),
        *("--override.imports", f"{ours}.data", f'{ours}.snapshots={{"micro_batches": 4}}'),
        *("--dataloader.no-infinite", "--dataloader.dataset_path", "assets/few"),
        run=run,
    )
    steps = history(run)
    assert "Ran out of data" in said and 1 <= len(steps) < LAST
    assert [r.loss for r in steps] == pytest.approx(list(logged(said).values()), rel=1e-5)
    snapshots = Snapshots(open_store(str(run)))
    assert snapshots.latest().step == len(steps) and snapshots.ended(snapshots.latest())


LONG_STEPS = """
import os, runpy, time
from pathlib import Path
from torchtitan.trainer import Trainer
from harness.node.marks import MarkFile, Want
from harness.worker import votes

votes.VOTE_EVERY_S = 0.05  # the steps of this test take less than two seconds
part, calls = Trainer.forward_backward_step, 0

def slow(self, **words):
    global calls
    calls += 1
    time.sleep(0.1)
    if calls == int(os.environ["NOTICE_AT"]):  # as an agent does when the cloud says so
        mark = MarkFile(Path(os.environ["HARNESS_MARK"]))
        mark.write(Want.RESIZE, "notice:x", time.time() + 2.05)
    return part(self, **words)

Trainer.forward_backward_step = slow
runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.timeout(900)  # three starts of torchtitan on two ranks each
def test_a_step_that_would_end_too_late_is_dropped_and_done_again_the_same(folder):
    ours, script = "harness.adapters.torchtitan.overrides", folder / "long_steps.py"
    script.write_text(LONG_STEPS)
    flags = ["--training.steps", "5", "--training.global_batch_size", "-1"]
    flags += ["--override.imports", f"{ours}.data", f'{ours}.snapshots={{"micro_batches": 16}}']

    def trained(name, notice_at=0):
        mark = folder / f"{name}.node" / "mark.json"
        mark.parent.mkdir(exist_ok=True)
        mark.unlink(missing_ok=True)
        MarkFile(mark)
        env = environ(folder) | {"HARNESS_RUN": str(folder / name), "HARNESS_MARK": str(mark)}
        env |= {"NOTICE_AT": str(notice_at), "HARNESS_ATTACH": '{"snapshot_every_steps": 1000}'}
        words = [*TORCHRUN, "2", str(script), *titan_assets.FLAGS, *flags]
        words += ["--dump_folder", f"{name}_outputs"]
        ended = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, timeout=240
        )
        return ended.returncode, clean(ended.stdout + ended.stderr)

    def told():
        return [
            [(r.step, r.loss, r.contents, r.lr) for r in history(folder / name)]
            for name in ("long", "parts")
        ]

    assert trained("long")[0] == 0
    code, said = trained("parts", notice_at=3 * 8 + 3)
    assert code and "step 4 would end too late for the notice" in said, said
    assert newest(folder / "parts").step == 3
    assert trained("parts")[0] == 0
    whole, parts = told()
    assert parts == whole and len(parts) == 5
    assert newest(folder / "parts").data["weights"] == newest(folder / "long").data["weights"]


def test_a_node_imports_it_once():
    from harness.cli.node import to_preload

    assert to_preload(["-m", "torchtitan.train", "--module", "llama3"]) == ["torchtitan.trainer"]
    assert to_preload(["-m", "timeit"]) == []


# ---- the parts -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "world", "fitted"),
    [
        ((1, -1), 3, (1, -1)),
        ((1, 8), 3, (1, -1)),
        ((2, 1), 3, (3, 1)),
        ((1, 1), 4, (4, 1)),
        ((2, 4), 12, (3, 4)),
        ((2, 4), 6, (1, -1)),
        ((4, -1), 6, (3, -1)),
    ],
)
def test_degrees_fit_any_world(asked, world, fitted):
    from harness.adapters.torchtitan.patch import fit_degrees

    parallelism = SimpleNamespace(
        data_parallel_replicate_degree=asked[0], data_parallel_shard_degree=asked[1]
    )
    told = fit_degrees(parallelism, world)
    assert fitted == (
        parallelism.data_parallel_replicate_degree,
        parallelism.data_parallel_shard_degree,
    )
    assert bool(told) == (asked != fitted)


def test_what_does_not_fit_is_refused_by_name():
    from harness.adapters.torchtitan.patch import adopt, check_parallelism, fit_batch

    with pytest.raises(BadInput, match=r"comm\.mode='torchcomms'"):
        adopt(SimpleNamespace(comm=SimpleNamespace(mode="torchcomms")), None)
    degrees = dict.fromkeys((f"{n}_parallel_degree" for n in ("tensor", "context", "pipeline")), 1)
    with pytest.raises(BadInput, match="expert_parallel_degree=2"):
        check_parallelism(SimpleNamespace(**degrees, expert_parallel_degree=2), ModelMesh())
    degrees |= {"expert_parallel_degree": 1, "tensor_parallel_degree": 2}
    with pytest.raises(BadInput, match=r"tensor_parallel_degree=2.*run --mesh tp=2`, found.*tp=4"):
        check_parallelism(SimpleNamespace(**degrees), ModelMesh(tp=4))
    with pytest.raises(BadInput, match="pipeline stages are not built"):
        check_parallelism(SimpleNamespace(**degrees), ModelMesh(tp=2, pp=2))
    training = SimpleNamespace(global_batch_size=10, local_batch_size=4)
    with pytest.raises(BadInput, match=r"multiple of training\.local_batch_size"):
        fit_batch(training)
    training.local_batch_size = 2
    assert (fit_batch(training), training.global_batch_size) == (5, -1)


class Numbers:
    """A loader of stream s: (s, 0), (s, 1), ..."""

    def __init__(self, stream):
        self.stream, self.next = stream, 0

    def __iter__(self):
        while self.next < 6:
            self.next += 1
            yield self.stream, self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.parametrize("micro_batches", [2, 4, 5, 7])
def test_any_world_reads_the_same_streams(micro_batches):
    from harness.adapters.torchtitan.data import TitanStreams

    def read(bounds, places=None):
        """One step on that many ranks, and where the streams are after it."""
        at, found = {}, []
        for first, last in pairwise(bounds):
            streams = TitanStreams(Numbers, 3, micro_batches, range(first, last))
            if places is not None:
                streams.load(places)
            found += list(streams.step())
            at |= streams.state()
        return found, at

    alone, at = read([0, micro_batches])
    assert [m for m, _ in alone] == list(range(micro_batches))
    assert len({batch for _, batch in alone}) == micro_batches
    for bounds in ([0, 1, micro_batches], range(micro_batches + 1)):
        assert read(bounds) == (alone, at)
        assert read(bounds, at) == read([0, micro_batches], at)


def test_a_place_that_nobody_knows_is_refused():
    from harness.adapters.torchtitan.data import TitanStreams

    with pytest.raises(BadInput, match="stream 1 of the data stands, found only 0"):
        TitanStreams(Numbers, 2, 2, range(2)).load({0: {"next": 1}})


class Loader:
    """Where one rank's streams stand."""

    def __init__(self, places=()):
        self.at = dict(places)

    def places(self):
        return self.at

    def go_to(self, places):
        self.at = places


def test_tokens_and_places_on_as_many_ranks_and_on_others():
    from harness.adapters.torchtitan.loop import TitanState

    def state(tokens=0, places=(), counts=True):
        return TitanState(SimpleNamespace(ntokens_seen=tokens), Loader(places), counts)

    saved = [state(100, {0: "a"}).state_dict(), state(60, {1: "b"}).state_dict()]
    assert state(60, counts=False).state_dict() == {"tokens": 0, "places": {}}
    same, others = state(), [state(), state()]
    same.load_state_dict(saved[1])
    same.settle(rank=1)
    assert same.state_dict() == saved[1]
    for rank, other in enumerate(others):
        other.load_state_dicts(saved)
        other.settle(rank)
    places = {0: "a", 1: "b"}
    assert others[0].state_dict() == {"tokens": 160, "places": places}
    assert others[1].state_dict() == {"tokens": 0, "places": places}


def test_a_stream_that_ends_cancels_the_step():
    from torchtitan.components.dataloader import DataloaderExhaustedError

    from harness.adapters.torchtitan.data import TitanStreams

    streams = TitanStreams(Numbers, 1, 4, range(4))
    assert len(list(streams.step())) == 4
    with pytest.raises(DataloaderExhaustedError):
        list(streams.step())
