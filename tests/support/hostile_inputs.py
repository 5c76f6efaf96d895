"""Bad input to every command: flags, URLs, YAML and environment values, listed and generated.

Each must be refused with exit status 2 and a reason, without a traceback, and with nothing begun:
no file, process or socket.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.cli import command as cli
from harness.core.flags import FlagParser
from storage import snapshots_command as storage_cli
from storage.stores.store_urls import open_store
from support.histories import whole_run
from support.hostile import Case, command, scratch, tree, wrong

TASK = "name: t\nresources: {use_spot: true}\nrun: exit 1\n"
ESCAPE, MARKUP, BIDI = "\x1b]0;owned\x07", "[/red][bold]", "\u202eevil"
LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@functools.cache
def folder() -> Path:
    """What the cases name: a run, a task, a script, and things that are neither."""
    made = scratch("inputs")
    for name in ("home", "folder", "empty-folder"):
        (made / name).mkdir()
    whole_run(open_store(str(made / "run")))
    (made / "folder" / "note.txt").write_text("hello")
    (made / "task.yaml").write_text(TASK)
    (made / "script.py").write_text("print(1)\n")
    (made / "binary").write_bytes(bytes(range(256)) * 20)
    (made / "nothing").write_text("")
    if importlib.util.find_spec("sky"):  # what its import does is not ours
        importlib.import_module("sky.utils.schemas")
    (made / "trace.csv").write_text("time,available\n0,1\n60,0\n120,1\n")
    os.mkfifo(made / "fifo")
    return made


def case(
    *words: str, env: Mapping[str, str] | None = None, yaml: str | bytes = "", main: object = cli.main
) -> Case:
    """`yaml`: what lies in the file that the words name as "it.yaml"."""

    def run() -> str:
        if yaml:
            (folder() / "it.yaml").write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
        before = tree(folder())
        told = command(main, words, folder(), env)  # type: ignore[arg-type]
        return wrong(told, sorted(tree(folder()) - before))

    said = " ".join(w if len(w) < 60 else f"{w[:40]}... ({len(w)})" for w in words)
    where = "".join(f" {k}={v[:40]}" for k, v in (env or {}).items())
    of = f" <- {str(yaml)[:50]}" if yaml else ""
    return Case(ascii(f"{said}{where}{of}")[1:-1], run)


def launch(*words: str, env: Mapping[str, str] | None = None) -> Case:
    return case("launch", "task.yaml", "--run", "new-run", *words, env=env)


def agent(*words: str, env: Mapping[str, str] | None = None) -> Case:
    return case("run", "--run", "new-run", *words, "--", "script.py", env=env)


def task(yaml: str | bytes) -> Case:
    return case("launch", "it.yaml", "--run", "new-run", yaml=yaml)


# ---- URLs ----------------------------------------------------------------------------------------
BAD_URLS = (
    "", "  ", "s3://", "s3:/bucket/run", "gs:bucket", "az://", "://", "file://", "nope://x/run",
    "http://127.0.0.1:9/run", "sftp://host/run", "zip://x::y", "s3://[bad/run", "s3:///run",
    f"s3://b{ESCAPE}/run", f"runs/{ESCAPE}", "runs/\0", "\ud800", "x" * 5000, "a/" * 3000,
    "~nobody-here/run", "s3://key:secret@bucket/run", "az://box/run?sv=1&sig=abc",
    "task.yaml", "binary", "fifo", "/dev/null", "/dev/zero", "file:///dev/zero/run",
)  # fmt: skip
READERS = (
    ("status", "--once"), ("runs report",), ("prove verify",), ("logs",), ("runs costs",),
    ("runs postmortem",), ("stop", "--wait-s", "0"), ("down", "--grace-s", "0", "--timeout-s", "0"),
    ("snapshots take",), ("runs alerts",), ("runs note",), ("runs reproduce",),
    ("runs serve", "--port", "0"), ("runs sync", "--to", "mlflow"),
)  # fmt: skip


def urls() -> list[Case]:
    """Each URL with one command in turn, so that each of both comes often."""
    made = []
    for number, url in enumerate(BAD_URLS):
        for words in (READERS[number % len(READERS)], READERS[(number * 5 + 3) % len(READERS)]):
            made.append(case(*words[0].split(), url, *words[1:]))
        made.append(case("list", url, main=storage_cli.main))
    made += [case(*words[0].split(), "missing", *words[1:]) for words in READERS]
    for url in ("s3://", "runs/\0", "s3://key:secret@bucket/run", "nope://x", "task.yaml"):
        made += [
            case("launch", "task.yaml", "--run", url),
            case("run", "--run", url, "--", "script.py"),
            case("run", "--", "script.py", env={"HARNESS_RUN": url.replace("\0", "\x01")}),
            agent("--replica", url),
            case("snapshots", "watch", url, "--", "script.py"),
            case("snapshots", "watch", "new-run", "--progress", url, "--", "script.py"),
            case("runs", "compare", "run", url),
            case("runs", "reproduce", "run", "--to", url),
            case("market", "show", "--shared", url),
            case("market", "simulate", "--what-if", url),
            case("copy", "run", url, main=storage_cli.main),
        ]
    return made


# ---- flags ---------------------------------------------------------------------------------------
def flags() -> list[Case]:
    return [
        case("nope"), case("runs", "nope"), case("verify", "run"), case("status"), case("launch"), case("status", "run", "--onse"),
        case("launch", "missing.yaml"), case("launch", "folder"), case("launch", "binary"),
        case("launch", "fifo"), case("launch", "/dev/zero"), case("launch", "/dev/null"),
        case("launch", "nothing"),
        launch("--nodes", "4:1"), launch("--nodes", "0"), launch("--nodes", "-1:2"),
        launch("--nodes", "1:2:3"), launch("--nodes", "1e3"), launch("--nodes", "9" * 40),
        launch("--budget-usd", "nan"), launch("--budget-usd", "-5"), launch("--budget-usd", "inf"),
        launch("--budget-usd", "0"), launch("--max-hours", "1e999"), launch("--max-hours", "-1"),
        launch("--deadline", "never"), launch("--deadline", "-3h"), launch("--deadline", "nanh"),
        launch("--deadline", "1999-01-01"), launch("--deadline", "2026-13-45"),
        launch("--deadline", "36h", "--work", "0h"), launch("--work", "infh"),
        launch("--policy", "nope"), launch("--policy", "os:nope"), launch("--policy", "at_most("),
        launch("--policy", "no_such_module:f"), launch("--policy", MARKUP),
        launch("--policy", "at_most(cheapest, usd_per_h=nan)"), launch("--policy", "(" * 5000),
        launch("--policy", "__import__('os').system('true')"),
        launch("--market", "seed:x"), launch("--market", "missing"), launch("--market", "binary"),
        launch("--market", "folder"), launch("--market", "fifo"), launch("--market", "/dev/zero"),
        launch("--market", "trace.csv@0"), launch("--market", "trace.csv@nan"),
        launch("--env", "novalue"), launch("--env", "1X=2"), launch("--env", "A B=2"),
        launch("--env", "=x"), launch("--env", "A=x\0y"), launch("--env", "A=\ud800"),
        launch("--secret", "HARNESS_NOT_SET_ANYWHERE"), launch("--secret", "=x"),
        launch("--alert", "ftp://x"), launch("--alert", "https://"), launch("--alert", "command:"),
        launch("--alert", "command:'unclosed"), launch("--alert", MARKUP),
        launch("--alert-rules", "missing.yaml"), launch("--alert-rules", "folder"),
        launch("--alert-rules", "/dev/zero"), launch("--alert-rules", "os:nope"),
        launch("--prometheus", "x"), launch("--prometheus", "99999"), launch("--prometheus", ":-1"),
        launch("--html", "folder"), launch("--html", "task.yaml/x.html"), launch("--html", "x" * 300),
        launch("--on-interrupt", "maybe"), launch("--cloud", "moon"), launch("--move-saving", "2"),
        agent("--nproc", "0"), agent("--nproc", "x"), agent("--worlds", "0,1"),
        agent("--worlds", "1,two"), agent("--grace-s", "-1"), agent("--notices", "nope"), agent("--set", "nope=1"), agent("--set", "dead_s"),
        agent("--set", "peer_encrypt=yes"), agent("--set", f"{ESCAPE}=1"), agent("--set", "nproc=2"),
        agent("--notices", "no_such_module:f"), agent("--notices", "os:nope"),
        agent("--set", "leave_at=soon"), agent("--set", "leave_at=nan"), agent("--set", "leave_after=-5h"),
        agent("--notify-signal", "NOPE"), agent("--trackers", "nope"),
        agent("--set", "replica_cap_usd=nan"),
        agent("--set", "stage_dir=task.yaml"), agent("--set", "stage_dir=/dev/null/x"),
        agent("--set", "disk_tier_dir=task.yaml"), agent("--set", "peer_tier=moon"),
        agent("--set", "peer_tier=disk"), agent("--set", "gpu_health=nope"), agent("--profile", "9:1"),
        agent("--profile", "x"), agent("--attach", "novalue"), 
        agent("--script-world", "-1"), agent("--set", "preload=no such"), agent("--set", "addr=a b\x1b[0m"),
        agent("--set", "beat_s=nan"), agent("--set", "dead_s=inf"), agent("--alert", "ftp://x"),
        agent("--worlds", "3", "--nproc", "4"), agent("--replica-ranks", "-2"),
        case("run", "--run", "new-run"), case("run", "--run", "new-run", "--", "missing.py"),
        case("run", "--run", "new-run", "--", "folder"), case("run", "--", "script.py"),
        case("snapshots", "watch", "run", "--name", "../x", "--", "script.py"), case("snapshots", "watch", "run"),
        case("snapshots", "watch", "run", "--name", MARKUP, "--", "script.py"),
        case("snapshots", "watch", "run", "--trackers", "nope", "--", "script.py"),
        case("snapshots", "watch", "run", "--every", "0", "--", "script.py"),
        case("runs", "report", "run", "--html", "folder"), case("runs", "report", "run", "--html", "task.yaml/x"),
        case("runs", "postmortem", "run", "99"), case("runs", "postmortem", "run", "-1"),
        case("runs", "postmortem", "run", "x"), case("runs", "postmortem", "run", "--out", "folder"),
        case("runs", "costs", "run", "--by", "colour"), case("runs", "costs", "run", "--by", "run,run"),
        case("runs", "costs", "run", "--month", "2026-13"), case("runs", "costs", "run", "--csv", "folder"),
        case("runs", "costs", "run", "--html", "task.yaml/x"), case("runs", "costs", "folder"),
        case("runs", "serve", "run", "--host", "0.0.0.0"), case("runs", "serve", "run", "--port", "70000"),
        case("runs", "serve", "run", "--host", "no such host"),
        case("logs", "run", "--attempt", "0"), case("logs", "run", "--lines", "-1"),
        case("stop", "run", "--wait-s", "nan"), case("down", "run", "--timeout-s", "-1"),
        case("runs", "note", "run", "--step", "-1", "-m", "x"), case("runs", "note", "run", "-m", "\ud800"),
        case("runs", "reproduce", "run", "--step", "0"), case("runs", "reproduce", "run", "--diff", "folder"),
        case("runs", "reproduce", "run", "--task", "x"), case("runs", "reproduce", "run", "--lock", "task.yaml/x"),
        case("runs", "compare", "run", "run", "--rtol", "nan"),
        case("runs", "replay", "run"), case("runs", "replay", "run", "--into", "folder", "--", "script.py"),
        case("runs", "replay", "run", "--into", "task.yaml", "--", "script.py"),
        case("check"), case("check", "--", "missing.py"), case("check", "--keep", "folder", "--", "script.py"),
        case("check", "--keep", "task.yaml", "--", "script.py"), case("check", "--steps", "0", "--", "script.py"),
        
        case("prove", "drill", "--only", "nope"), case("prove", "drill", "--keep", "task.yaml"), case("prove", "drill", "--jobs", "-1"),
        case("market", "simulate", "--seeds", "0"), case("market", "simulate", "--policy", "nope", "--seed", "1"),
        case("market", "simulate", "--trace", "missing"), case("market", "simulate", "--trace", "binary"),
        case("market", "simulate", "--trace", "/dev/zero"), case("market", "simulate", "--trace", "fifo"),
        case("market", "simulate", "--trace", "empty-folder"), case("market", "simulate", "--trace", "nothing"),
        case("market", "simulate", "--trace", "trace.csv", "--work", "0h"),
        case("market", "simulate", "--trace", "trace.csv", "--work", ""),
        case("market", "simulate", "--trace", "trace.csv", "--deadline", "nanx"),
        case("market", "simulate", "--trace", "trace.csv", "--deadline", "-1x"),
        case("market", "simulate", "--trace", "trace.csv", "--deadline", "infx"),
        case("market", "simulate", "--trace", "trace.csv", "--changeover", "x"),
        case("market", "simulate", "--trace", "trace.csv", "--policy", "nope"),
        case("market", "simulate", "--trace", "trace.csv", "--plot", "folder/x/../../task.yaml/y.html"),
        case("market", "simulate", "--trace", "trace.csv", "--plot", "/"),
        case("market", "simulate", "--trace", "trace.csv", "--zone", "nope"),
        case("market", "simulate", "--what-if", "run", "--trace", "trace.csv"),
        case("market", "simulate", "--what-if", "run", "--interval", "nan"),
        case("market", "show", "x"), case("market", "learn"), case("market", "learn", "binary"),
        case("market", "learn", "fifo"), case("market", "learn", "missing"), case("market", "export"),
        case("market", "export", "x.png"), case("market", "export", "folder/none/x.csv"),
        case("market", "draw", "x.csv"), case("market", "live"), case("market", "nope"),
        case("market", "draw", "x.csv", "--hours", "inf"),
        case("market", "prices", "missing.yaml"), case("market", "prices", "binary"), case("market", "prices", "nothing"),
        case("market", "prices", "fifo"), case("market", "prices", "task.yaml", "--most", "0"),
        case("plan", "missing.yaml"), case("plan", "task.yaml", "--risk", "nan"),
        case("plan", "task.yaml", "--step-time", "-1"), case("plan", "task.yaml", "--plot", "task.yaml/x"),
        case("plan", "task.yaml", "--catalog", "missing"), case("plan", "task.yaml", "--nodes", "0"),
        case("plan", "task.yaml", "--clouds", "moon", "--catalog", "shipped"),
        case("plan", "task.yaml", "--env", "x y"), case("plan", "binary"), case("plan"),
        case("plan", "--model", "nope"), case("plan", "--model", "./folder", "--gpus", "H100:x"),
        case("plan", "--model", "gpt2", "--sequence", "0"), case("plan", "--model", "./binary"),
        case("prove", "fake-metadata", "--port", "-1"), case("prove", "fake-metadata", "--cloud", "moon"),
        case("prove", "fake-metadata", "--clock-ahead-s", "nan"),
        case("runs", "sync", "run", "--to", "nope"), case("runs", "sync", "run", "--to", ""),
        case("runs", "sync", "run", "--out", "task.yaml"), case("runs", "sync", "run", "--patience-s", "inf"),
        case("runs", "alerts", "run", "--alert-rules", "binary"), case("runs", "alerts", "run", "--test", "--alert", "x"),
        case("init", "task.yaml"), case("init", "folder/note.txt/x"), case("init", "\0"),
        case("prove", "doctor", "missing.yaml"), case("prove", "doctor", "task.yaml", "--env", "x y"),
        case("snapshots", "nope"), case("snapshots", "list"),
        case("snapshots", "show", "run", "--step", "x"),
        case("snapshots", "verify", "run", "--look-again-s", "nan"),
        case("snapshots", "verify", "run", "--look-again-s", "-1"),
        case("snapshots", "verify", "run", "--look-again-s", "1e9"),
        case("snapshots", "prune", "run", "--keep-last", "-1"),
        case("snapshots", "prune", "run", "--keep-last", "0", "--dry-run"),
        case("snapshots", "prune", "run", "--keep-every", "-5"),
        case("snapshots", "prune", "run", "--keep-best", "loss:most"),
        case("snapshots", "prune", "run", "--stale-h", "nan"),
        case("snapshots", "prune", "run", "--stale-h", "-1"),
        case("snapshots", "export", "run", "task.yaml"), case("snapshots", "export", "run", "folder"),
        case("snapshots", "export", "run", "out", "--shard-gb", "0"),
        case("snapshots", "export", "run", "out", "--shard-gb", "nan"),
        case("snapshots", "export", "run", "out", "--config", "missing"),
        case("snapshots", "export", "run", "out", "--dtype", "int3"),
        case("snapshots", "copy", "run", "task.yaml"), case("snapshots", "copy", "run", ""),
    ]  # fmt: skip


# ---- YAML and the environment --------------------------------------------------------------------
def files() -> list[Case]:
    texts: list[str | bytes] = [
        "", "null", "[]", "5", "text", "a: b: c", "\tname: x", "name: [", "run: true", "run: 5",
        "run: ''", "run: '   '", "nmae: x\nrun: x", "run: x\nresources: 5", "run: x\nresources: []",
        "run: x\nnum_nodes: 0", "run: x\nnum_nodes: -1", "run: x\nnum_nodes: 1.5",
        "run: x\nnum_nodes: .nan", "run: x\nnum_nodes: 2", "run: x\nenvs: [1]",
        "run: x\nenvs: {A: }", "run: x\nenvs: {'A B': 1}", "run: x\nenvs: {A: \"x\\0y\"}",
        "run: x\nsecrets: 5", "run: x\nsecrets: [K]", "run: x\nworkdir: missing",
        "run: x\nworkdir: 5", "run: x\nfile_mounts: {/x: s3://b}",
        "run: x\nresources: {use_spot: maybe}", "run: x\nresources: {any_of: 5}",
        "run: x\nresources: {job_recovery: {recover_on_exit_codes: x}}",
        "run: x\nname: 5", "run: x\nname: [a]", "run: \"x\\0y\"", "run: x\n---\nrun: y",
        "!!python/object/apply:os.system ['touch owned']", "run: !!binary aGk=\n", LAUGHS,
        "run: x\nenvs:\n  A: &a [*a]\n", "run: x\nenvs: {A: 2026-13-45}", "[" * 3_000,
        "{a: " * 5_000, "x: " + "y" * (2 << 20), bytes(range(256)), b"\xff\xfe\x00run: x",
        b"\xef\xbb\xbf", "run: x\n? [a]\n: b", "run: x\n1: 2", f"run: x\n\"{MARKUP}\": 1",
        "run: x\n\"\\e]0;owned\\a\": 1", "<<: 5\nrun: x", "run: x\nrun: *nope",
    ]  # fmt: skip
    rules: list[str | bytes] = [
        "null", "rules: 5", "rules: [5]", "rules: [{rule: nope}]", "rules: [{name: X Y}]",
        "rules: [{name: x, fact: Nope}]", "rules: [{name: x, fact: WorkerFailed, count: -1}]",
        "rules: [{name: x, fact: WorkerFailed, within_s: .nan}]", "rules: [{rule: [a]}]",
        "rules: [{name: x, fact: WorkerFailed, severity: [x]}]", "[" * 3_000, LAUGHS,
        b"\xff\xfe", "rules: [{name: x, fact: [a]}]",
        "rules: [{name: x, fact: StepDone, where: 5}]",
    ]  # fmt: skip
    return [
        *map(task, texts[1:]),
        *(case("runs", "alerts", "run", "--alert-rules", "it.yaml", yaml=text) for text in rules),
        *(case("market", "prices", "it.yaml", yaml=text) for text in ("[" * 3_000, LAUGHS, b"\xff", "[]")),
    ]


def environment() -> list[Case]:
    values = {
        "HARNESS_WORLDS": ("x", "0", "1,,2"), "HARNESS_REPLICA_RANKS": ("0", "x", "-1"),
        "HARNESS_MESH": ("x", "tp=0", "tp=2,tp=2", "pp=0", "dp_replicate=3"),
        "HARNESS_REPLICA_CAP_USD": ("nan", "-1", "x"), "HARNESS_TRACKERS": ("nope", "a b"),
        "HARNESS_ALERTS": ("ftp://x", "command:'unclosed"), "HARNESS_REPLICA": ("s3://", "nope://x"),
        "HARNESS_ATTEMPT": ("x", "-1", "1e3"), "HARNESS_SCRIPT_WORLD": ("x", "-1"),
        "HARNESS_PROFILE": ("x", "9:1"), "HARNESS_ATTACH": ("x",), 
        "STORAGE_BACKEND": (), "STORAGE_PATIENCE_S": ("nan", "-1", "x", "inf"),
        "SKYPILOT_NODE_RANK": ("x", "-1"), "SKYPILOT_CLUSTER_INFO": ("{", "[]", "5", "[" * 50_000),
        "HARNESS_CAPACITY_END": ("soon",), "HARNESS_PRICES": (), "HARNESS_LOOK_AGAIN_S": ("x", "nan", "-1"),
        "HARNESS_ON_CHANGE": ("maybe",), "HARNESS_DIFF": ("maybe",),
        "HARNESS_USD_PER_H": ("nan", "x"), "HARNESS_PRELOAD": (),
    }  # fmt: skip
    made = [agent(env={name: value}) for name, some in values.items() for value in some]
    made += [
        case("status", "s3://bucket/run", "--once", env={"STORAGE_BACKEND": "moon"}),
        case("status", "run", "--once", env={"STORAGE_PATIENCE_S": "soon"}),
        case("market", "show", env={"HARNESS_MARKET": "nope://x"}),
        launch(env={"HARNESS_ALERTS": "ftp://x"}),
        launch(env={"HARNESS_ALERT_RULES": "missing.yaml"}),
    ]
    return made


# ---- generated -----------------------------------------------------------------------------------
NONSENSE = ("nan", "inf", "-inf", "1e999", "", " ", "ten", "0x1F", "--", ESCAPE, MARKUP, BIDI, "\0", "1,5", "x" * 4000)  # fmt: skip
NAMED = {"--html", "--csv", "--out", "--plot", "--diff", "--lock"}  # files that are written


def generated(count: int = 220, seed: int = 17) -> list[Case]:
    """For options of all commands in turn: nonsense that each must refuse."""
    _, subs = cli.parser()
    rng, made = random.Random(seed), []
    pool = [
        (name, action)
        for name, sub in subs.items()
        for action in [*sub._actions, *_settings(sub)]
        if action.option_strings and action.nargs != 0 and _refuses(action)
    ]
    while len(made) < count:
        name, action = pool[len(made) % len(pool)]
        option = action.option_strings[-1]
        words = [*name.split(), *_before(name)]
        value = rng.choice(_bad(action))
        given = [f"{option}={value}"] if action in subs[name]._actions else ["--set", f"{action.dest}={value}"]
        made.append(case(*words, *given, *_after(name)))
    return made


def _settings(sub: argparse.ArgumentParser) -> list[argparse.Action]:
    return list(sub.settings._actions) if isinstance(sub, FlagParser) and sub.settings else []


def _refuses(action: object) -> bool:
    return bool(_bad(action))


def _bad(action: object) -> list[str]:
    """Values that this option refuses, whatever else is given."""
    if getattr(action, "choices", None):
        return [n for n in NONSENSE if n not in action.choices]  # type: ignore[attr-defined]
    convert, found = getattr(action, "type", None), []
    if convert in (None, str):
        return []
    for value in NONSENSE:
        try:
            convert(value)  # type: ignore[misc]
        except Exception:
            found.append(value)
    return found


def _before(name: str) -> Sequence[str]:
    """What the command wants besides flags."""
    _, subs = cli.parser()
    known = {"task": "task.yaml", "url": "run", "a": "run", "b": "run", "file": "x.csv", "target": "out"}
    return [known.get(a.dest, "run") for a in subs[name]._get_positional_actions() if a.dest != "script"]


def _after(name: str) -> Sequence[str]:
    return ("--", "script.py") if cli.takes_script(name) else ()


def listed() -> list[Case]:
    return [*urls(), *flags(), *files(), *environment()]
