"""Every command line that a page shows is parsed by the parser that it is for, and those that end
by themselves within a second or two are run, on a small run of its own.

Whether commands, flags and settings exist at all: test_docs.py and test_readme.py. Benchmarks start
in test_benchmarks.py, `make gpu` in test_gpu_parts.py."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib

from harness.cli import command as cli
from harness.cli.command import words_of
from support import outside
from support.worlds import free_port

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for room in ("docs", "harness", "storage") for path in sorted((ROOT / room).rglob("*.md"))),
]
BLOCK = re.compile(r"^( *)(```|~~~)(\w*)[^\n]*\n(.*?)^\1\2", re.M | re.S)
FIRST = ("harness ", "torchrun ", "make ", "python ", "curl ", "pip ", "benchmarks/")
ENVS = re.compile(r"^(?:[A-Z_]+=\S+ +)+")
NUMBERS = {"STEP", "N", "W", "K", "I", "R"}  # what pages write for a number


def shown() -> Iterator[tuple[str, str]]:
    """Yield the command lines of all pages, each with where it stands: "block", or "prose", where
    a command may be without its arguments."""
    for path in PAGES:
        text = path.read_text()
        for _, _, language, body in BLOCK.findall(text):
            if language != "diff":
                for line in re.sub(r" *\\\n *", " ", body).splitlines():
                    yield "block", line.strip().removeprefix("$ ")
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", BLOCK.sub("", text)):
            yield "prose", " ".join(span.split())


def words_from(line: str) -> list[str]:
    """Return the words of a command line, without what explains it."""
    line = re.split(r"\s{2,}|\s#\s| -- sh |\\\\\||&$", ENVS.sub("", line))[0]
    words = [word.strip("[]").replace("...", "x").replace("$i", "1") for word in shlex.split(line)]
    return ["1" if word in NUMBERS else word for word in words]


ALL = sorted({(where, line) for where, line in shown() if ENVS.sub("", line).startswith(FIRST)})


def of(program: str, *wheres: str) -> list[list[str]]:
    """Return the shown command lines of a program, each as words behind the program's."""
    found = {
        tuple(words_from(line))
        for where, line in ALL
        if ENVS.sub("", line).startswith(program) and where in (wheres or ("block", "prose"))
    }
    known = len(program.split()) if program.endswith(" ") else 0
    return [list(words[known:]) for words in sorted(found)]


def named(words: list[str]) -> str:
    return " ".join(words)


# ---- harness -------------------------------------------------------------------------------------
PARTIAL = ("are required", "expected one argument", "at least one argument", "found no value")


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[object, str]:
    """Return the exit status and the message of `harness` for a command line, by its own parser and
    the checks of its flags, with nothing carried out."""
    found = cli.command
    monkeypatch.setattr(cli, "command", lambda name: (found(name)[0], lambda flags: 0))
    monkeypatch.setattr(cli.snapshots_command, "execute", lambda *_: 0)
    return ended(words)


def ended(words: list[str]) -> tuple[object, str]:
    """Return the exit status of `harness` and all that it said."""
    said = io.StringIO()
    both = contextlib.redirect_stderr(said), contextlib.redirect_stdout(said)
    with both[0], both[1], pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code, said.getvalue()


@pytest.mark.parametrize("words", of("harness ", "block"), ids=named)
def test_a_command_of_a_block_is_parsed(words: list[str], monkeypatch: pytest.MonkeyPatch):
    assert parsed(words, monkeypatch) == (0, "")


@pytest.mark.parametrize(
    "words", [w for w in of("harness ", "prose") if words_of(w) and len(w) > 2], ids=named
)
def test_a_command_in_prose_is_parsed(words: list[str], monkeypatch: pytest.MonkeyPatch):
    """... as far as it goes: prose may name a flag without its value."""
    code, said = parsed(words, monkeypatch)
    assert code == 0 or any(partial in said for partial in PARTIAL), said


# ---- run -----------------------------------------------------------------------------------------
# commands that read a run and end, or need none; not with these words, which want services, keys,
# files, a launched run or one that was interrupted
RUN = {
    *("status", "init", "plan", "market simulate", "prove verify"),
    *(f"snapshots {word}" for word in ("list", "verify", "prune", "export")),
    *(f"runs {word}" for word in ("report", "postmortem", "costs", "alerts", "note", "reproduce", "sync")),
}
NOT = {"--ask-sky", "--alert", "--follow", "--key", "--data", "--to", "--policy", "--adapter"}
NOT |= {"--what-if", "3"}
URLS = re.compile(r"(?:s3://\S+|runs)/(?:x|first)|URL$|OLD$|NEW$")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run that has ended."""
    folder = tmp_path_factory.mktemp("runs")
    code, said = outside.train(folder / "x", total=30, folder=tmp_path_factory.mktemp("script"))
    assert code == 0, said
    return folder


def runnable() -> list[list[str]]:
    return [
        words
        for words in of("harness ")
        if words_of(words) in RUN
        and not NOT & set(words)
        and any(map(is_given, words))
        and words != ["runs", "sync", "URL"]  # to a tracker
    ]


def is_given(word: str) -> bool:
    return bool(URLS.fullmatch(word)) or word in ("s3://b/runs", "first", "llama-70b", "--seeds")


@pytest.mark.proof
@pytest.mark.parametrize("words", runnable(), ids=named)
def test_a_command_that_ends_soon_does_what_it_says(
    words: list[str], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    place = {"s3://b/runs": str(runs), "1000": "5"}
    given = [place.get(word) or URLS.sub(str(runs / "x"), word) for word in words]
    code, said = ended(given)
    assert code == 0, said


@pytest.mark.proof
def test_logs_of_a_run_that_nobody_launched_are_not_looked_for(runs: Path):
    """SkyPilot's server was started for it, and stayed."""
    code, said = ended(["logs", str(runs / "x")])
    assert code == 2 and "sky jobs logs" in said, said


# ---- Start, Adopt and Run: each command of their blocks is run, or it is said where ---------------
CAPTION = re.compile(r":caption: (?:Start|Adopt|Run)\n(.*?)^```", re.S | re.M)
CLI, CHECK = "harness ", "harness check "
# the beginning of a command: what runs it, or why nothing here can
ELSEWHERE = {
    "python3 -m venv": "each make target has made one",
    ". venv/bin/activate": "a shell's own",
    "cd first": "a shell's own",
    "pip install": "from package indexes; tests/house/test_package.py installs the wheel",
    "harness launch train.yaml --cloud local --nodes 1:2 --market once": "tests/cli/test_start_page.py",
    CHECK: "half a minute each: tests/check and tests/adapters/test_check_trainers.py",
    "harness run --run s3://my-bucket/runs/x -- run_clm": "others' scripts: tests/adapters",
    "harness run --run s3://my-bucket/runs/x -- train.py": "others' trainers: tests/adapters",
    "harness run --run s3://my-bucket/runs/x --mesh": "tests/adapters/test_whole_copies.py",
    "harness run --run s3://my-bucket/runs/x -- -m torchtitan.train": "tests/adapters/test_torchtitan.py",
    "harness runs bisect s3://my-bucket/runs/x -- train.py": "of the reader's script: tests/guards/test_bisect.py",
    "harness run --guards default": "of the reader's script: tests/guards/test_guarded_runs.py",
    "harness prove fake-metadata": "test_the_metadata_server_takes_what_pages_tell_it",
    "curl": "test_the_metadata_server_takes_what_pages_tell_it",
    "harness plan": "minutes on two cores: tests/planner/test_plan.py",
    "harness market simulate --trace": "the reader's own trace: tests/planner/test_simulate_markets.py",
    "harness market simulate --what-if": "of a launched run: tests/planner/test_market_what_if.py",
    "harness snapshots take": "of a run that goes on: tests/worker/test_session.py",
    "harness snapshots export s3://my-bucket/runs/x out/ --adapter": "tests/adapters/test_peft_adapters.py",
    "harness snapshots watch s3://bucket/runs/x --name export": "tests/look/test_watch.py",
    "sky jobs launch": "SkyPilot's own, on clouds: tests/slurm",
    "harness logs": "of launched nodes: tests/cli/test_start_page.py",
    "harness prove doctor": "asks SkyPilot's API server: tests/cli/test_doctor.py",
}
SHELL = (*FIRST, "sky ", "cd ", "python3 ", ". ")


def of_the_first_pages() -> list[str]:
    """Return the command lines in the blocks of Start, Adopt and Run, fenced or indented."""
    found: dict[str, None] = {}
    for body in CAPTION.findall((ROOT / "docs" / "index.md").read_text()):
        for name in body.split():
            text = (ROOT / "docs" / f"{name}.md").read_text()
            fenced = [body for _, _, language, body in BLOCK.findall(text) if language != "diff"]
            indented = re.findall(r"(?:^    [^\n]*\n)+", BLOCK.sub("", text), re.M)
            for block in (*fenced, *indented):
                for line in re.sub(r" *\\\n *", " ", block).splitlines():
                    if ENVS.sub("", line.strip().removeprefix("$ ")).startswith(SHELL):
                        found[ENVS.sub("", line.strip().removeprefix("$ "))] = None
    return list(found)


def elsewhere(line: str) -> str | None:
    return next((why for begin, why in ELSEWHERE.items() if line.startswith(begin)), None)


RUN_HERE = [line for line in of_the_first_pages() if elsewhere(line) is None]
ABOVE = {named(words) for words in runnable()}


def test_each_command_of_the_first_pages_is_run_or_it_is_said_where():
    lines = of_the_first_pages()
    assert len(lines) > 40 and len(RUN_HERE) > 12, lines
    assert [begin for begin in ELSEWHERE if not any(line.startswith(begin) for line in lines)] == []
    for why in ELSEWHERE.values():
        for path in re.findall(r"tests/[\w/.]+", why):
            assert (ROOT / path.rstrip(".")).exists(), path
    assert [line for line in RUN_HERE if not line.startswith(CLI)] == []


@pytest.mark.proof
@pytest.mark.parametrize("line", [x for x in RUN_HERE if named(words_from(x)[1:]) not in ABOVE])
def test_a_command_of_the_first_pages_does_what_it_says(
    line: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A launch as far as its plan, which costs nothing; the others on a run that has ended."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "eval.py").write_text("print('a number')")
    (tmp_path / "my_package").mkdir()
    own = "from harness.controller.policies import cheapest as calm"
    (tmp_path / "my_package" / "policies.py").write_text(own)
    words = shlex.split(line, comments=True)[1:]
    if words[0] == "launch":
        run = words[words.index("--run") + 1] if "--run" in words else "new"
        place = {run: str(tmp_path / "new"), "train.yaml": str(ROOT / "sky_tasks" / "train.yaml")}
        words = [*words, "--dry-run"]
    else:
        place = {}
    given = [place.get(word) or URLS.sub(str(runs / "x"), word) for word in words]
    given = [str(ROOT / word) if word.startswith("sky_tasks/") else word for word in given]
    code, said = ended(given)
    assert code == 0, said
    assert words[0] != "launch" or "first   local/a" in said


# ---- other programs ------------------------------------------------------------------------------
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


@pytest.mark.parametrize("words", of("make "), ids=named)
def test_make_has_the_target_and_its_variables(words: list[str]):
    targets = [word for word in words if "=" not in word]
    assert targets and set(targets) <= TARGETS
    for word in set(words) - set(targets):
        name = word.partition("=")[0]
        assert re.search(rf"\$[({{]{name}[)}}]|\(if \$\({name}\)|\b{name} \?=", MAKEFILE), word


@pytest.mark.parametrize("words", of("python -m "), ids=named)
def test_a_module_that_is_run_exists(words: list[str]):
    name = words[0] if find_spec(words[0]).submodule_search_locations is None else f"{words[0]}.__main__"
    assert find_spec(name) is not None


def test_flags_of_scripts_and_benchmarks_are_theirs():
    shown = [*of("benchmarks/"), *of("python ")]
    scripts = [words for words in shown if (ROOT / words[0]).is_file()]
    assert len(scripts) > 10
    for script, *flags in scripts:
        source = (ROOT / script).read_text()
        for flag in flags:
            assert not flag.startswith("--") or f'"{flag}"' in source, f"{script} {flag}"


@pytest.mark.parametrize("words", of("torchrun "), ids=named)
def test_torchrun_takes_its_flags_and_the_trainer_its_own(words: list[str]):
    torchrun = pytest.importorskip("torch.distributed.run")
    parsed = torchrun.parse_args(words)
    if parsed.training_script.startswith("examples/"):
        sys.path.insert(0, str(ROOT / "examples"))
        import pretrain

        assert pretrain.parse(parsed.training_script_args).model


@pytest.mark.parametrize("words", of("pip install ", "block"), ids=named)
def test_what_pip_installs_of_ours_is_there(words: list[str]):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for asked in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        assert set(asked.split(",")) <= extras.keys()


def test_the_metadata_server_takes_what_pages_tell_it():
    """The commands of `curl` at the server of `harness prove fake-metadata`."""
    (served,) = {tuple(words) for words in of("harness prove fake-metadata ", "block")}
    port = str(free_port())
    asked = [port if word == "1338" else word for word in served]
    process = outside.start("prove", "fake-metadata", *asked)
    try:
        for _, body, url in of("curl ", "block"):
            request = urllib.request.Request(url.replace("1338", port), json.dumps(json.loads(body)).encode())
            outside.until(lambda request=request: answers(request), body, 30.0, of=process)
    finally:
        process.terminate()
        outside.said(process, 30.0)


def answers(request: urllib.request.Request) -> bool:
    """Return whether the server takes it; False while it does not listen yet."""
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status == 200
    except urllib.error.URLError:
        return False
