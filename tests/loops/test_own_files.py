"""`run.files`: a script that keeps checkpoints of its own, in any world."""

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import SnapshotCommitted
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import newest, train

pytestmark = pytest.mark.proof
SCRIPT = """
import json, os, pathlib, signal, sys, time
import harness

total, every, sleep_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
folder = pathlib.Path(os.environ.get("HARNESS_NODE_DIR") or os.environ["OUT"]) / "out"
run = harness.attach()
begin = run.files.restore(folder)
state = json.loads((folder / "deep" / "state.json").read_text()) if begin else {"sum": 0}
assert begin == 0 or sorted(p.name for p in folder.glob("rank*")), "every node has all of it"
for step in range(begin + 1, total + 1):
    state["sum"] += step
    leaving = run.files.leaving()
    if leaving or run.files.due or step % every == 0 or step == total:
        (folder / "deep").mkdir(parents=True, exist_ok=True)
        if run.rank == 0 or "HARNESS_NODE_DIR" in os.environ:
            (folder / "deep" / "state.json").write_text(json.dumps(state))
        (folder / f"rank{run.rank}").write_text(f"{step}")
        (folder / "empty").touch()
        run.sum(0)  # all have written
        run.files.save(folder, step)
    if leaving:
        run.files.leave()
    if step == int(os.environ.get("TOLD_AT", 0)) and run.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if step == int(os.environ.get("DIE_AT", 0)):
        os._exit(9)
    time.sleep(sleep_s)
print("began", begin, "ended", json.dumps(state), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_files_come_back_as_they_were(tmp_path, script):
    run, out = tmp_path / "run", tmp_path / "node"
    env = {"OUT": str(out)}
    train(run, 2, 5, 2, 0, script=script, env=env | {"DIE_AT": "5"}, codes=(9, -9, 1))
    assert newest(run).step == 4
    (out / "out" / "deep" / "state.json").write_text("half of it")
    (out / "out" / "newer").touch()
    other = train(run, 3, 7, 2, 0, script=script, env=env)
    assert f"began 4 ended {{\"sum\": {sum(range(8))}}}" in other.output
    assert (out / "out.aside" / "newer").exists() and not (out / "out" / "newer").exists()
    assert (out / "out" / "empty").stat().st_size == 0
    assert newest(run).step == 7
    report = audit(open_store(str(run)))
    assert report.ok, report.first_violation


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run.files.leave()", "wanted run.files.leaving() to say so"),
        ("run.files.save('nothing', 1)", "wanted files in it, found none"),
        ("run.files.save('x', 3); run.files.save('x', 3)", "wanted a greater step"),
        (
            "import torch; run.files.restore('x'); m = torch.nn.Linear(1, 1); "
            "run.prepare(m, torch.optim.SGD(m.parameters()))",
            "wanted one of them",
        ),
    ],
)
def test_what_cannot_be_is_told(tmp_path, text, says):
    path = tmp_path / "script.py"
    path.write_text(
        f"import os, harness\nos.chdir({str(tmp_path)!r})\nos.mkdir('x')\n"
        f"open('x/a', 'w').write('a')\nrun = harness.attach()\n{text}\n"
    )
    assert says in train(tmp_path / "run", 1, script=path, codes=(1,)).output


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, script):
    from harness.loops.loop_files import _names_in
    from storage.snapshots.manifest import SnapshotCorrupt

    class Made:
        world, tensors = 1, {}

        class ref:
            name = "s"

        def __init__(self, name):
            self.data = {"state": {"files@r0": {"names": [name], "bytes": {}}}}

    for name in ("../x", "/x", "a/../../x", "a\\..\\x", "", "."):
        with pytest.raises(SnapshotCorrupt, match="below a folder"):
            _names_in(Made(name))
    assert _names_in(Made("a/b.bin")) == {"a/b.bin": "files@r0/bytes/0"}


def test_all_ranks_save_and_leave_together(tmp_path, script):
    """One of them is told."""
    env = {"OUT": str(tmp_path / "node"), "TOLD_AT": "3"}
    train(tmp_path / "run", 2, 100, 100, 0, script=script, env=env, codes=(33,))
    manifest = newest(tmp_path / "run")
    assert manifest.step == 4 and not manifest.data["final"]
    ended = train(tmp_path / "run", 1, 5, 100, 0, script=script, env=env | {"TOLD_AT": "0"})
    assert f"began 4 ended {{\"sum\": {sum(range(6))}}}" in ended.output
    facts = [s.fact for s in read_facts(open_store(str(tmp_path / "run")))]
    whys = [f.why for f in facts if isinstance(f, SnapshotCommitted)]
    assert set(whys) == {"own", "drain"} and whys.count("drain") == 1
