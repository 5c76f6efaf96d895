"""What nodes print, beside the screen of `harness launch --follow-logs`."""

import io
import sys
import threading
import time
from pathlib import Path

import pytest

from harness.cli import node_logs
from harness.cli.node_logs import LocalLines, SkyLines, behind, logs_beside, page_logs, show
from harness.clouds.sky_clusters import tag
from harness.core.world import CloudUnavailable
from storage.terminal_text import Console
from support import outside


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def written(folder: Path, node: int, text: str) -> None:
    path = folder / "local-cloud" / "nodes" / str(node) / "log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as log:
        log.write(text)


def test_only_new_and_whole_lines_are_shown(tmp_path):
    look = LocalLines(f"file://{tmp_path}")
    written(tmp_path, 1, "of an earlier launch\n")
    assert look() == {}
    written(tmp_path, 1, "[0] step 1\n[0] st")
    written(tmp_path, 2, "[1] all of a new node\n")
    assert look() == {1: ["[0] step 1"], 2: ["[1] all of a new node"]}
    written(tmp_path, 1, "ep 2\n")
    assert look() == {1: ["[0] step 2"]}
    assert look() == {}


def test_of_very_much_the_newest_is_shown_and_the_rest_is_counted(tmp_path, console):
    look = LocalLines(f"file://{tmp_path}")
    look()
    written(tmp_path, 1, "x" * 3 * node_logs.MOST_NBYTES)  # no line, and no end of one
    written(tmp_path, 1, "".join(f"\nline {i}" for i in range(2000)) + "\n")
    lines = look()[1]
    assert lines[0].endswith("bytes left out") and lines[-1] == "line 1999"
    show({1: lines, 2: ["\x1b[31m" + "y" * 5000]}, console)
    shown = console.file.getvalue().splitlines()
    assert len(shown) == node_logs.MOST_LINES + 2
    assert shown[0].startswith("node 1 | ... ") and "harness logs" in shown[0]
    assert "\x1b" not in shown[-1] and len(shown[-1]) < node_logs.MOST_LETTERS + 20


def test_a_line_without_an_end_is_never_read_twice(tmp_path):
    look = LocalLines(f"file://{tmp_path}")
    look()
    for _ in range(3):
        written(tmp_path, 1, "x" * 3 * node_logs.MOST_NBYTES)
        assert sum(map(len, look().get(1, []))) <= node_logs.MOST_NBYTES + 100


def test_skypilots_last_lines_become_new_lines(monkeypatch):
    assert behind([], ["a", "b"]) == ["a", "b"]
    assert behind(["a", "b", "c"], ["b", "c", "d"]) == ["d"]
    assert behind(["a", "a"], ["a", "a", "a"]) == ["a"]
    assert behind(["a"], ["x", "y"]) == ["x", "y"]  # so many that none is known
    said = {"sh-x-0003": "a\nb", "sh-x-0004": ""}
    monkeypatch.setattr(node_logs, "tails", lambda sky, url, lines: dict(said))
    look = SkyLines(None, "s3://b/runs/x")
    assert look() == {}
    said.update({"sh-x-0003": "b\nc", "sh-x-0005": "new"})
    assert look() == {3: ["c"], 4: [], 5: ["new"]}


def test_looks_that_fail_or_hang_hold_up_nothing(tmp_path, console, monkeypatch):
    """SkyPilot hangs: who ends waits for END_WITHIN_S at most."""
    asked, answered = [], threading.Event()

    class Hanging:
        def close(self):
            asked.append("closed")

    def tails(sky, url, lines):
        asked.append(url)
        if len(asked) > 1:
            answered.wait(30.0)
        raise CloudUnavailable("no answer")

    monkeypatch.setattr(node_logs, "tails", tails)
    monkeypatch.setattr(node_logs, "sky_broker", lambda url: Hanging())
    monkeypatch.setattr(node_logs, "SKY_EVERY_S", 0.01)
    monkeypatch.setattr(node_logs, "END_WITHIN_S", 0.2)
    begun_s = time.monotonic()
    with logs_beside("s3://b/x", True, console):
        outside.until(lambda: len(asked) == 2, "it looks again", 20.0)
    assert asked == ["s3://b/x", "s3://b/x", "closed"] and time.monotonic() - begun_s < 20
    answered.set()


def test_a_page_has_the_last_lines_of_nodes_that_are_there_and_that_are_gone(tmp_path, monkeypatch):
    url = f"file://{tmp_path}"
    written(tmp_path, 2, "x" * 3 * node_logs.MOST_NBYTES + "".join(f"\nline {i}" for i in range(500)))
    (tmp_path / "local-cloud" / "config.json").write_text("{}")
    found, problem = page_logs(url)
    assert list(found) == [2] and problem == ""
    assert found[2].splitlines() == [f"line {i}" for i in range(460, 500)]

    (tmp_path / "local-cloud" / "config.json").unlink()  # of SkyPilot's clusters now
    kept = tmp_path / "sky-logs" / f"{tag(url)}-0007.log"
    kept.parent.mkdir()
    kept.write_text("the end of a failed node\n")
    asked = []

    class Closing:
        def close(self):
            asked.append("closed")

    def tails(sky, url, lines):
        if asked:
            raise CloudUnavailable("no answer")
        return {"sh-abc-0009": "a\nb"}

    monkeypatch.setattr(node_logs, "tails", tails)
    monkeypatch.setattr(node_logs, "sky_broker", lambda url: Closing())
    monkeypatch.setattr(node_logs.importlib.util, "find_spec", lambda name: name)
    assert page_logs(url) == ({7: "the end of a failed node", 9: "a\nb"}, "")
    assert page_logs(url) == ({7: "the end of a failed node"}, "logs of living nodes: no answer")
    assert asked == ["closed", "closed"]
    monkeypatch.setattr(node_logs.importlib.util, "find_spec", lambda name: None)
    found, problem = page_logs(url)
    assert list(found) == [7] and "SkyPilot is not here" in problem and len(asked) == 2


TASK = """
envs: {{RUN: ""}}
run: |
  exec {python} -m harness.cli run --run $RUN -- {script}
"""


@pytest.mark.timeout(120)
def test_a_launch_shows_what_the_script_prints(tmp_path):
    script = tmp_path / "say.py"
    (tmp_path / "task.yaml").write_text(TASK.format(python=sys.executable, script=script))
    script.write_text("print('the very words', flush=True)\n")
    process = outside.start(
        "launch", str(tmp_path / "task.yaml"), "--run", str(tmp_path / "run"), "--market", "calm",
        "--brief", "--follow-logs", "--unmanaged", cwd=tmp_path,
    )  # fmt: skip
    said = outside.said(process, 100.0)
    assert process.returncode == 0, said
    assert "node 1 | [0] the very words" in said
