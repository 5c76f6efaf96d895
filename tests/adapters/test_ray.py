"""A Ray Train worker function on other worlds after a failure. Ray itself is not installed: the
worker meets the documented part of its interface only (scripts/ray_worker.py)."""

from pathlib import Path

from support.worlds import history, newest, train

SCRIPT = Path(__file__).parent / "scripts" / "ray_worker.py"


def reported(ended):
    return [line for line in ended.output.splitlines() if line.startswith("reported")]


def test_a_worker_that_fails_goes_on_in_another_world(tmp_path):
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    told = reported(train(calm, 1, calm, script=SCRIPT))
    assert [line.split("'step': ")[1].split(",")[0] for line in told] == [
        str(n) for n in range(1, 13)
    ]
    failed = train(rough, 2, rough, "--fail-at", "7", script=SCRIPT, codes=(0, 1))
    assert "a node of Ray's is gone" in failed.output
    assert newest(rough).step == 4
    again = reported(train(rough, 3, rough, script=SCRIPT))
    assert len(again) == 3 * 8  # every worker reports steps 5 to 12
    assert [r.loss for r in history(rough)] == [r.loss for r in history(calm)]
    assert {r.world for r in history(rough)} == {2, 3}
    assert newest(rough).data["weights"] == newest(calm).data["weights"]
