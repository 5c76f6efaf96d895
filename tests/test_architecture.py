"""The house keeps its shape: imports point one way, pure rooms stay pure, and the page about it
names every room."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = {  # by file; no torch, sky, sockets, wall clock, global randomness
    "core": {"batch", "blocks", "calls", "columns", "dotted", "exposition", "fact_lines", "facts", "identity", "known", "losses", "masking", "mesh", "mesh_plan", "meshes", "mixing", "models", "plain", "prices", "records", "setups", "signing", "stages", "steps_asked", "traffic", "values", "world"},
    "bucket": {"alerts", "archive", "beats", "layout", "lease", "limits", "notes", "orders", "recorded", "setups", "side_jobs", "streamed", "tiers", "volumes"},
    "controller": {"allowance", "book", "bounds", "capacity", "choosing", "clocks", "combinators", "deadline", "durations", "fleet", "fleet_prices", "last_call", "learned", "learning", "listening", "policies", "recovery", "remembered", "together", "value", "work_prices"},
    "market": {"fluid", "fluid_prices", "history", "history_shelf", "lookahead", "made_up", "optimum", "optimum_fleet", "rates", "trace_formats", "traces", "wandering"},
    "clouds": {"market"},
    "agent": {"ends", "gossip", "leaderless", "lines_protocol", "machine"},
    "worker": {"machine"},
    "views": {"alert_rules", "alert_state", "alerts", "beside", "blame", "breaks", "events", "interruption", "ledger", "ledger_parts", "moments", "painting", "postmortem", "rows", "side_jobs", "snapshot_costs", "spans", "speed", "spikes", "testimony", "what_if"},
    "proof": {"check_case", "check_evidence", "check_rules", "check_script", "check_state", "check_worlds", "forecasting", "invariants", "market_fleet", "market_peers", "market_quick", "market_replay", "market_table", "sim", "sim_members", "sim_money", "sim_world"},
    "testing": {"situations"},
    "watch": {"due"},
}
ROOMS = [f"{package}/{name}" for package, names in PURE.items() for name in sorted(names)]
# ... and what runs any seat's real code, so it may import them all, under a clock of its own
CLOCKLESS = sorted(path.stem for path in (ROOT / "harness/proof/system").glob("*.py"))
# ... and what pure rooms may use besides
MAY_USE_ROOMS = {"bucket/epochs", "bucket/journal", "core/given_files", "core/tables", "node/marks"} | {
    "views/watching",
    "views/words",
}
# ... and what they may name of rooms that are not pure: what is said of the world, in plain values
NOUNS = {
    "harness.agent.health.Action",
    "harness.agent.health.HealthVerdict",
    "harness.agent.notices.Notice",
    "harness.node.marks.Want",
}
BELOW: dict[str, set[str]] = {  # which packages a package may import; so there is no circle
    "core": set(),
    "bucket": {"core"},
    "node": {"core"},
    "data": {"core", "node"},
    "clouds": {"core", "bucket", "node"},
    "uploader": {"core", "bucket", "node"},
    "agent": {"core", "bucket", "node", "uploader"},
    "worker": {"core", "bucket", "node", "uploader"},
    "adapters": {"core", "bucket", "node", "uploader", "worker"},
    "watch": {"core", "bucket", "node"},
    "views": {"core", "bucket", "uploader", "data"},
    "market": {"core"},
    "controller": {"core", "bucket", "clouds", "market", "views"},
    "proof": {
        "core",
        "bucket",
        "node",
        "clouds",
        "uploader",
        "agent",
        "worker",
        "views",
        "market",
        "controller",
    },
    "testing": {"core", "clouds", "agent", "controller", "proof"},
}
BANNED = {
    "torch",
    "sky",
    "socket",
    "subprocess",
    "http",
    "urllib",
    "threading",
    "asyncio",
    "os",
    "rich",
    "wandb",
}


def imports(path: Path) -> set[str]:
    """Top names of everything that a file imports, at any depth, except for type checking only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


def tops(names: set[str]) -> set[str]:
    return {n.split(".")[0] for n in names}


def test_storage_knows_nothing_of_harness():
    for path in (ROOT / "storage").glob("*.py"):
        assert "harness" not in tops(imports(path)), path
        with_torch = ("dcp.py", "loading.py", "trees.py", "copying.py", "fingerprints.py")
        with_torch += ("pieces.py", "ranks.py", "state.py")
        if path.name not in with_torch:
            assert "torch" not in tops(imports(path)), path


@pytest.mark.parametrize("room", [*ROOMS, *(f"proof/system/{name}" for name in CLOCKLESS)])
def test_pure_rooms_are_pure(room):
    path = ROOT / "harness" / f"{room}.py"
    assert tops({i for i in imports(path) if not i.startswith("urllib.parse")}) & BANNED == set()
    text = path.read_text()
    clock = r"\btime\.(time|sleep|monotonic)\(|\bdatetime\.(now|utcnow)\("
    assert not re.search(clock + r"|\brandom\.(random|choice|shuffle|uniform|randint)\(", text)
    assert "os.environ" not in text


@pytest.mark.parametrize("room", ROOMS)
def test_pure_rooms_use_only_pure_rooms(room):
    path = ROOT / "harness" / f"{room}.py"
    assert rooms_of(imports(path) - NOUNS) <= {*ROOMS, *MAY_USE_ROOMS}


def used_rooms(path: Path) -> set[str]:
    """`package/module` of everything of harness that a file imports."""
    return rooms_of(imports(path))


def rooms_of(names: set[str]) -> set[str]:
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] == "harness" and len(parts) > 2:
            found.add("/".join(parts[1:3]))
    return found


@pytest.mark.parametrize("package", BELOW)
def test_packages_import_one_way(package):
    for path in (ROOT / "harness" / package).glob("**/*.py"):
        used = {room.split("/")[0] for room in used_rooms(path)} - {package}
        assert used <= BELOW[package], f"{path.name} of {package} imports {used - BELOW[package]}"


def test_there_is_no_circle_between_packages_and_every_folder_is_one():
    for package, below in BELOW.items():
        assert all(package not in BELOW[other] for other in below)
    folders = {
        p.name for p in (ROOT / "harness").iterdir() if p.is_dir() and (p / "__init__.py").exists()
    }
    assert folders == {*BELOW, "cli"}


def test_only_composers_read_the_environment():
    allowed = {
        "adapters",
        "agent",
        "cli",
        "session.py",
        "process.py",
        "replay.py",
        "publisher.py",
        "trackers.py",
        "plugins.py",
        "broker.py",
        "provider.py",
        "local.py",
        "tasks.py",
        "drill.py",
        "scene.py",
        "sore_points.py",
        "server.py",
        "client.py",
        "alerting.py",
        "watched.py",
        "keeper.py",
        "replica.py",
        "node_cache.py",
    }
    for path in (ROOT / "harness").glob("**/*.py"):
        if "os.environ" in path.read_text():
            assert {path.name, path.parent.name} & allowed, path


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_seats_need_only_their_own_packages():
    """The controller's and the agent's rooms import neither torch nor SkyPilot; a worker's
    import no SkyPilot."""
    code = (
        "import sys\nimport harness.cli.command, harness.controller.recovery, "
        "harness.clouds.local, harness.agent.agent, harness.agent.notices, harness.views.report, "
        "harness.views.audit,"
        " harness.views.monitor, storage\nprint('torch' in sys.modules, 'sky' in sys.modules)"
    )
    assert run_python(code).split() == ["False", "False"]
    assert run_python(
        "import sys, harness.worker.session; print('sky' in sys.modules)"
    ).split() == ["False"]


DOORS = (
    "harness.adapters.megatron",
    "harness.attach",
    "harness.chunked_cross_entropy",
    "harness.fsdp2",
)


def test_examples_use_the_front_door_only():
    for path in (ROOT / "examples").glob("*.py"):
        for name in imports(path):
            if name.split(".")[0] in ("harness", "storage"):
                assert name.count(".") == 0 or name in DOORS, (
                    f"{path.name} imports {name}"
                )


def files(*folders: str) -> list[Path]:
    """Files with lines of their own, without the script that `harness init` gives to users."""
    found = [path for folder in folders for path in (ROOT / folder).glob("**/*.py")]
    return sorted(
        path
        for path in found
        if path.name not in ("__init__.py", "__main__.py") and "templates" not in path.parts
    )


def first_sentence(path: Path) -> str:
    words = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s", words)[0].rstrip(".")


def test_architecture_page_has_a_row_for_every_file():
    page, rows, folder = (ROOT / "docs" / "ARCHITECTURE.md").read_text(), [], ""
    for line in page.splitlines():
        if found := re.match(r"\*\*`([\w/]+/)`\*\*", line):
            folder = found[1]
        elif found := re.fullmatch(r"\| `([\w/]+\.py)` \| (.*) \|", line):
            rows.append((folder + found[1], found[2].rstrip(".")))
    wanted = [
        (path.relative_to(ROOT).as_posix(), first_sentence(path))
        for path in files("harness", "storage")
    ]
    assert sorted(rows) == sorted(wanted)


KEYS = ("rdzv/", "facts/", "samples/", "control/", "lease/", "run.json")  # a run's, in the bucket
SPELL_KEYS = {"bucket/layout.py", "core/records.py"}
# ... and these do so still: to be mended where they are worked on
SPELL_KEYS_STILL = {
    "bucket/archive.py",
    "bucket/recorded.py",
    "views/audit_records.py",
}
UNITS = {"samples/s"}


def spelled_keys(path: Path) -> set[str]:
    """Beginnings of keys that a file spells itself. What has a space is words for people."""
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(KEYS)
        and " " not in node.value
        and node.value not in UNITS
    }


def test_keys_of_a_run_are_spelled_in_one_place():
    spelled = {
        path.relative_to(ROOT / "harness").as_posix(): found
        for path in files("harness")
        if (found := spelled_keys(path))
    }
    wrong = {name: found for name, found in spelled.items() if name not in SPELL_KEYS | SPELL_KEYS_STILL}
    assert not wrong, f"use the names of harness/bucket/layout.py: {wrong}"


def test_codes_that_mean_elsewhere_are_in_every_task():
    from harness.core.world import DRAINED, UNFIT

    for path in (ROOT / "sky_tasks").glob("*.yaml"):
        assert re.search(
            rf"recover_on_exit_codes: \[.*\b{DRAINED}\b.*\b{UNFIT}\b.*\]", path.read_text()
        ), path


def test_nothing_names_a_machine_of_ours():
    """No absolute path of a developer's machine stands in the repository."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        path = ROOT / name
        if (
            path.is_file()
            and name != "tests/test_architecture.py"
            and path.suffix in (".py", ".md", ".yaml", ".toml", ".txt", "")
        ):
            assert not re.search(r"/work/|/root/|/home/[a-z]", path.read_text(errors="replace")), (
                name
            )
