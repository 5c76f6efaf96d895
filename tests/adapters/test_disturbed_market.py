"""Scripts of other people's trainers, unchanged, under `harness launch`: one to three nodes, a
market that takes them away, and two kills. Compared with the same script that nothing disturbs."""

import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support.campaign import Campaign
from support.worlds import history

SCRIPTS = Path(__file__).parent / "scripts"
# script, what it needs, its flags, what `harness run` is told
CASES = {
    "accelerate": (
        SCRIPTS / "accelerate_loop.py",
        ("accelerate",),
        "--epochs 8 --patience 1 --sleep-s 0.1",
        "--set preload=accelerate",
    ),
    "alone": (
        Path(__file__).parents[1] / "support" / "alone_trainer.py",
        ("torch",),
        "--epochs 20 --sleep-s 0.1",
        "",
    ),
    "transformers": (
        SCRIPTS / "hf_trainer.py",
        ("transformers",),
        "--epochs 8 --accumulation 3 --best --sleep-s 0.1",
        "",
    ),
    "trl": (
        SCRIPTS / "trl_trainer.py",
        ("trl",),
        "--kind sft --lora --epochs 14 --sleep-s 0.1",
        "",
    ),
    "torchtitan": (  # its FSDP2 sums gradients itself
        SCRIPTS / "titan_debug.py",
        ("torchtitan",),
        "--training.steps 40",
        "--attach reduce=fast --set preload=torchtitan.trainer",
    ),
    "lightning": (
        SCRIPTS / "lightning_plain.py",
        ("lightning",),
        "--epochs 14 --sleep-s 0.08 --accumulate 3 --samples 52",
        "",
    ),
}
TITAN_CPU = Path(__file__).parent / "titan_cpu"  # what torchtitan needs without an accelerator
MEASURED = re.compile(r"\d+\.\d+")
EXACT = "--attach reduce=exact --attach snapshot_every_steps=8 --script-world 2"


def harness(*words, env=None, timeout_s=240):
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def fired(folder):
    """What the script says that it did, as {event: its measured values}."""
    path = folder / "events"
    said = path.read_text().splitlines() if path.exists() else []
    return {MEASURED.sub("~", event): [*map(float, MEASURED.findall(event))] for event in said}


@pytest.mark.parametrize("name", CASES)
def test_unchanged_under_a_disturbed_market(name, tmp_path, monkeypatch):
    script, needs, flags, run_flags = CASES[name]
    if missing := [n for n in needs if importlib.util.find_spec(n) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    run_flags = f"{EXACT} {run_flags}"
    paths = (str(TITAN_CPU), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    calm = Campaign(
        _folder(tmp_path / "calm"), flags=flags, nodes="1", trainer=script, run_flags=run_flags
    )
    calm.launch()
    rough = Campaign(
        _folder(tmp_path / "rough"),
        market="demo",
        nodes="1:3",
        flags=flags,
        trainer=script,
        run_flags=run_flags,
    )
    try:
        assert calm.wait() == 0, calm.logs()
        rough.launch()
        rng = random.Random(1)
        for step, kind in ((10, "worker"), (25, "agent")):
            rough.until(lambda step=step: rough.step() >= step)
            rough.kill(kind, rng)
        assert rough.wait() == 0, rough.logs()
    finally:
        calm.close()
        rough.close()
    compare(rough, calm)


def _folder(path):
    path.mkdir()
    return path


def compare(rough, calm):
    """The same training, and the script's own doings fired as often."""
    verified = harness("prove", "verify", rough.run)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    one, other = history(rough.run), history(calm.run)
    assert [r.step for r in one] == [r.step for r in other]
    assert [r.samples for r in one] == [r.samples for r in other]
    assert [r.contents for r in one] == [r.contents for r in other]
    assert [r.loss for r in one] == pytest.approx([r.loss for r in other], rel=1e-4)
    snapshots = Snapshots(open_store(str(rough.run)))
    assert snapshots.ended(snapshots.latest())
    assert len({r.world for r in one}) >= 2
    # What a kill undid was done again; so an event may have fired twice, but none is missing, and
    # there are no others.
    ours, theirs = fired(rough.folder), fired(calm.folder)
    assert set(ours) == set(theirs)
    for event, values in ours.items():  # a mean over ranks is rounded as these share the samples
        assert values == pytest.approx(theirs[event], rel=1e-5, abs=2e-5), event
