"""`harness launch --cloud sky` from its first decision to its end, against a SkyPilot that is played:
what the run has seen of offers is kept, and the next run begins with it, on another computer too."""

import json
import subprocess
import sys
import threading
import time

import pytest
import yaml

from harness.cli import launch
from harness.cli.command import main
from harness.cli.market_command import SHARED, Histories
from harness.clouds.own_wheel import WHEEL_ENV, WHEELS
from harness.clouds.sky_broker import SkyError
from harness.controller import policies
from harness.planner.market_history import OfferSeen
from storage.snapshots.manifest import Manifest, PartList, Ref
from storage.snapshots.snapshot_keys import manifest_key
from storage.stores.store_urls import open_store
from support.fakesky import FakeSky, answer

EAST, WEST = answer("aws/us-east-1/use1-az1/p5", 10.0), answer("nebius/eu-north1/p5", 12.0)
FASTER = 60.0  # than the clock, the API server
NOTED, VIEWS = [], []


def noting(view):
    """The usual policy, by which a test sees what it was told of capacity."""
    NOTED.append(dict(view.known.capacity))
    VIEWS.append(view)
    return policies.best_value(view)


class PlayedSky(FakeSky):
    """Its time passes, and whoever runs does the last step at once and exits."""

    clouds = ("aws", "nebius")

    def __init__(self, store, *offers):
        super().__init__(offers)
        self.store, self.lock, self.seen_s = store, threading.Lock(), time.monotonic()

    def __call__(self, method, timeout_s, **arguments):
        with self.lock:
            now_s = time.monotonic()
            self.tick(FASTER * (now_s - self.seen_s))
            self.seen_s = now_s
            for name in self.real:
                if self.jobs.get(name) == "RUNNING":
                    self.train()
                    self.end_job(name, "SUCCEEDED", "Job finished (code 0)")
            return super().__call__(method, timeout_s, **arguments)

    def train(self):
        ref = Ref(1, 10)
        share = PartList(ref, 0, 1, "m1-x", (), {}, {"step": 10, "final": True})
        self.store.create(manifest_key(ref), Manifest.merge([share]).to_json().encode())

    def server(self):
        return {"endpoint": "http://127.0.0.1:46580", "status": "healthy", "version": "0.14.1"}

    def enabled(self):
        return list(self.clouds)

    def close(self):
        pass


def main_ends(argv):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert not ended.value.code


@pytest.fixture
def led(tmp_path, monkeypatch):
    """Lead a run on a computer of its own, with a bucket for its history that all of them share:
    (exit status, the API server, what the computer knows of offers then)."""
    task = tmp_path / "task.yaml"
    task.write_text("name: t\nresources: {accelerators: 'H100:8', use_spot: true}\nrun: exec train\n")
    monkeypatch.setenv(SHARED, f"file://{tmp_path}/team")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))  # what a test notes is not the user's
    monkeypatch.setitem(sys.modules, "sky", None)  # as if SkyPilot were not installed
    monkeypatch.setattr(launch, "_check_skypilot", lambda cloud: None)  # it is played

    def lead(computer, *, full=(), more=(), url="", task=task, run=("--run",)):
        monkeypatch.setenv("HOME", str(tmp_path / computer))
        url = url or f"file://{tmp_path}/runs/{computer}"
        sky = PlayedSky(open_store(url), EAST, WEST)
        none = SkyError("ResourcesUnavailableError", "no capacity", [("E", "no capacity here")])
        sky.trouble = {offer["resources"]["infra"]: [none] for offer in full}
        monkeypatch.setattr(launch, "sky_broker", lambda _: sky)
        where = [*run, url] if run else []
        argv = ["launch", str(task), *where, "--cloud", "sky", "--nodes", "1", "--brief"]
        with pytest.raises(SystemExit) as ended:
            main([*argv, *more, "--policy", f"{__name__}:noting"])
        own = Histories("").own().read(time.time()).records
        return ended.value.code, sky, {offer for _, offer in own}

    NOTED.clear()
    VIEWS.clear()
    return lead


@pytest.mark.proof
def test_what_one_run_has_seen_is_where_the_next_begins(led, tmp_path, capsys):
    code, sky, known = led("a", full=[EAST])
    assert code == 0, capsys.readouterr().out
    assert NOTED[0] == {} and not sky.real
    assert [kind for kind, _ in sky.calls if kind == "launch"] == ["launch"] * 2
    assert known == {EAST["name"], WEST["name"]}
    team = Histories(f"file://{tmp_path}/team").team().read(time.time())
    assert {offer for _, offer in team.records} == known

    NOTED.clear()
    code, sky, _ = led("b")
    assert code == 0, capsys.readouterr().out
    first = NOTED[0]  # before it has asked anybody for anything
    assert set(first) == known
    assert not first[EAST["name"]].open and first[WEST["name"]].node_s > 0


def test_a_dry_run_knows_what_a_launch_would_and_leaves_no_trace(led, tmp_path, capsys):
    """What other runs have seen, what the run itself has, its deadline and its budget."""
    now_s, known = time.time(), {EAST["name"]}
    paid = ((1.0, 9.0),)
    seen = OfferSeen("other", EAST["name"], now_s, False, now_s - 60, (), 3600.0, usd_per_h=paid)
    assert not Histories(f"file://{tmp_path}/team").write([seen], now_s)
    said = ["--deadline", "36h", "--work", "10h", "--budget-usd", "500"]

    def files():
        return {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}

    before = files()
    code, sky, _ = led("a", more=["--dry-run", *said], url=f"file://{tmp_path}/runs/new")
    out = capsys.readouterr().out
    assert code == 0, out
    assert set(NOTED[0]) == known and not NOTED[0][EAST["name"]].open
    first = VIEWS[0]
    assert first.known.prices[EAST["name"]][0] == (1.0, 9.0)
    assert first.known.work == 10 * 3600 * 8 and first.known.budget_usd == 500.0
    assert first.known.deadline_s - first.now_s == pytest.approx(36 * 3600, abs=60)
    assert "first   " in out
    assert {kind for kind, _ in sky.calls} <= {"offers"} and not sky.jobs
    assert {p for p in files() if "team" in p.parts or "runs" in p.parts} == {
        p for p in before if "team" in p.parts or "runs" in p.parts
    }
    assert not (tmp_path / "runs" / "new").exists()


def test_output_that_goes_with_a_node_is_warned_of_before_anything_is_launched(
    led, tmp_path, capsys
):
    task = tmp_path / "trainer.yaml"
    command = "exec harness run --run $RUN -- train.py --output_dir out"
    task.write_text(f"resources: {{accelerators: 'H100:8'}}\nenvs: {{RUN: null}}\nrun: {command}\n")
    code, sky, _ = led("a", task=task, more=["--dry-run", "--json"])
    said = capsys.readouterr()
    assert code == 0 and not sky.jobs and json.loads(said.out)
    assert f"warning {task}: --output_dir: out is on the node's disk" in said.err
    code, *_ = led("b", task=task)
    assert code == 0 and "--output_dir" in capsys.readouterr().err


def test_without_skypilot_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sky", None)
    task = tmp_path / "t.yaml"
    task.write_text("name: t\nrun: 'true'\n")
    with pytest.raises(SystemExit) as end:
        main(["launch", str(task), "--cloud", "sky", "--run", str(tmp_path / "run")])
    assert end.value.code == 2 and "spotharness[controller]" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["t.yaml"]


def test_a_launch_ships_the_package_that_it_runs_from(led, tmp_path):
    """The task of `harness init`: its member is given the wheel, and setup installs that."""
    folder = tmp_path / "first"
    main_ends(["init", str(folder)])
    written = yaml.safe_load((folder / "train.yaml").read_text())["envs"][WHEEL_ENV]
    (folder / "train.yaml").write_text((folder / "train.yaml").read_text().replace(written, "old"))
    code, sky, _ = led("a", task=folder / "train.yaml")
    assert code == 0
    config = next(iter(sky.configs.values()))[0]
    address = config["envs"][WHEEL_ENV]
    assert address == written != "old"
    [(to, source)] = config["file_mounts"].items()
    assert to == source == f"~/{WHEELS}/${WHEEL_ENV}"
    [wheel] = (tmp_path / "a" / WHEELS / address).iterdir()

    calls, fake = tmp_path / "calls", tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" >> {calls}\n'
        '[ "$2" != venv ] || { mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }\n'
    )
    fake.chmod(0o755)
    env = {"PATH": f"{fake.parent}:/usr/bin:/bin", "HOME": str(tmp_path / "a"), **config["envs"]}
    for _ in range(2):  # the second time does nothing
        subprocess.run(["bash", "-c", config["setup"]], env=env, check=True, timeout=60)
    words = calls.read_text().splitlines()
    assert words.count("venv") == 1 and words.count(f"{wheel}[worker]") == 1
    assert not [word for word in words if word.startswith("spotharness")]


@pytest.mark.parametrize(
    ("more", "clouds", "says"),
    [
        ({"run": []}, ("aws",), "wanted --run with the URL of a bucket"),
        ({}, (), "clouds: none is enabled; sky check -v"),
        ({"url": "file:///proc/no/such/bucket"}, ("aws",), "bucket: "),
    ],
)
def test_a_launch_that_cannot_work_is_refused_before_anything_is_written(
    led, tmp_path, monkeypatch, capsys, more, clouds, says
):
    monkeypatch.setattr(PlayedSky, "clouds", clouds)
    monkeypatch.chdir(tmp_path)
    code, sky, _ = led("a", **more)
    assert code == 2 and says in capsys.readouterr().err
    assert {kind for kind, _ in sky.calls} <= {"server", "enabled"}
    assert [p.name for p in tmp_path.iterdir()] == ["task.yaml"]
