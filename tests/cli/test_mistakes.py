"""Mistakes that people make on a command line, each answered in one line: what was wanted, what was
found, what to do. All end before anything is begun, in this process."""

import shlex
from pathlib import Path

import pytest

from harness.bucket.layout import IDENTITY
from harness.cli import main
from storage.stores.store_urls import open_store

TASK = "name: t\nresources: {use_spot: true}\nrun: exit 1\n"
MISTAKES = [
    ("-v", "did you mean|unrecognized arguments: -v"),
    ("--verison", "did you mean --version?"),
    ("version", "did you mean `harness --version`?"),
    ("lanch", "found 'lanch'; did you mean `harness launch`?"),
    ("report x", "did you mean `harness runs report`?"),
    ("runs reprot x", "did you mean `harness runs report`?"),
    ("doctor", "did you mean `harness prove doctor`?"),
    ("simulate", "did you mean `harness market simulate`?"),
    ("drain x", "did you mean `harness stop`?"),
    ("kill x", "did you mean `harness down`?"),
    ("ls", "did you mean `harness status FOLDER`?"),
    ("help nope", "wanted a command, found 'nope'"),
    ("launch", "are required: task: the SkyPilot task YAML"),
    ("launch none.yaml", "none.yaml: wanted a SkyPilot task YAML, found none"),
    ("launch s.py", "s.py: wanted `field: value` lines of a SkyPilot task"),
    ("launch t.yaml --nodes 0", "--nodes: wanted LOW:HIGH or N"),
    ("launch t.yaml --nodes 4:1", "--nodes: wanted LOW:HIGH or N"),
    ("launch t.yaml --nodez 4", "did you mean --nodes?"),
    ("launch t.yaml --deadline soon", "--deadline: wanted a time from the launch on"),
    ("launch t.yaml --budget-usd ten", "--budget-usd: wanted a finite number above 0"),
    ("launch t.yaml --cloud aws", "--cloud sky, with `resources: {infra: aws}` in the task"),
    ("launch t.yaml --cloud loca", "invalid choice: 'loca'"),
    ("launch t.yaml --run s4://b/x", "wanted a folder (file://), s3://, gs://"),
    ("launch t.yaml --run s3:/b/x", "two slashes follow s3:"),
    ("launch t.yaml --run https://b/x", "use s3://, gs://, az:// or a folder"),
    ("launch t.yaml --policy cheap", "no policy 'cheap'; known: cheapest"),
    ("launch t.yaml --deadline 9h --usd-per-hour-late 5", "'by_deadline(best_value)'; found 'deadline'"),
    ("launch t.yaml --market clam", "wanted demo, calm, once, seed:<n> or a trace file"),
    ("launch t.yaml --env X_OF_NOBODY", "write --env X_OF_NOBODY=value"),
    ("run --run r", "no script: write `harness run --run URL -- train.py"),
    ("run -- s.py", "no run URL: give --run URL"),
    ("run --run r -- none.py", "none.py: no such file"),
    ("run --run r s.py --epochs 3", "flags of the script go behind --: harness run -- script.py"),
    ("run --run r --nproc two -- s.py", "--nproc: wanted a number or auto"),
    ("run --run r --nproc 99999 -- s.py", "wanted at most 1024 workers on a node; found '99999'"),
    ("run --run r --set beat=1 -- s.py", "did you mean beat_s?"),
    ("run --run r --set nproc=1 -- s.py", "it is a flag: --nproc"),
    ("run --run r --beat-s 1 -- s.py", "did you mean --set beat_s=VALUE?"),
    ("check", "no script: write `harness check -- train.py"),
    ("check none.py", "none.py: no such file"),
    ("check s.py --steps 3", "--steps: wanted a whole number of at least 8, found '3'"),
    ("init s.py", "s.py is no folder"),
    ("plan", "wanted either a task file, or --model NAME"),
    ("plan none.yaml", "none.yaml: wanted a SkyPilot task YAML"),
    ("status", "are required: url: URL of the run"),
    ("status none", "none: there is no run here"),
    ("stop none", "none: there is no run here"),
    ("logs none", "none: there is no run here"),
    ("snapshots lst none", "did you mean `harness snapshots list`?"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.yaml").write_text(TASK)
    (tmp_path / "s.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HARNESS_RUN", raising=False)
    return tmp_path


@pytest.mark.parametrize(("line", "says"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_answered_in_one_line(line, says, folder, capsys):
    with pytest.raises(SystemExit) as end:
        main(shlex.split(line))
    told = capsys.readouterr()
    assert end.value.code == 2 and told.out == "", told
    assert len(told.err.splitlines()) == 1 and any(each in told.err for each in says.split("|"))
    assert "Traceback" not in told.err
    assert {path.name for path in folder.iterdir()} <= {"t.yaml", "s.py"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", ["start here:", "examples:", "harness help all"]),
        ("help", ["start here:"]),
        ("help launch", ["usage: harness launch", "limits:", "dry run:"]),
        ("help all", ["harness runs report", "harness snapshots prune", "harness prove doctor"]),
        ("runs", ["usage: harness runs [-h] COMMAND ...", "postmortem"]),
        ("--version", ["harness 0."]),
    ],
)
def test_help_is_where_people_look_for_it(line, says, capsys):
    with pytest.raises(SystemExit) as end:
        main(shlex.split(line))
    told = capsys.readouterr().out
    assert end.value.code == 0 and all(each in told for each in says), told


def test_status_of_a_folder_lists_the_runs_in_it(folder, capsys):
    for name in ("a", "b/c"):
        store = open_store(str(folder / "runs" / name))
        store.create(IDENTITY, b"{}")
        store.create("facts/controller-1/000000.jsonl", b"")
    with pytest.raises(SystemExit) as end:
        main(["status", "runs"])
    told = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and [line.split()[0] for line in told] == ["a", "b/c"]
