"""Tests of the house: imports point one way, the spine needs no satellite, pure rooms stay pure."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from support.rooms import ORDER, ROOT, SATELLITES, SPINE, STORAGE_SATELLITES

MOST_DOORS = 20  # files in a folder
# Files that know no torch, sky, sockets, wall clock or global randomness.
PURE = {
    "agent": {"node_state"},
    "bucket": {"archive", "member_heartbeats", "orders", "setup_objects", "volumes"},
    "check": {"check_case", "check_rules", "evidence", "output_folders", "run_diff"},
    "controller": {"combinators", "deadline_policy", "fleet_moves", "fleet_policy", "learning", "offer_value", "policies", "recovery", "run_limits"},
    "controller/forecast": {"dynamic_program", "fleet_program", "price_process", "room_belief", "spell_rates"},
    "core": {"batch", "decoding", "estimates", "facts", "loss_rates", "mesh", "read_traffic", "sample_order", "setup_record", "signing", "step_records", "user_functions", "world"},
    "lab/simulation": {"invariants", "sim_nodes", "sim_world", "simulation"},
    "guards": {"guard_rules"},
    "ledger": {"attempts", "bill", "ledger", "run_state", "time_spans", "world_speed"},
    "local": {"spot_schedule"},
    "look/alerts": {"alert_log", "alert_rules"},
    "look/postmortems": {"alternatives", "attribution", "interruption", "postmortem", "world_ends"},
    "look/trackers": {"stream_objects"},
    "look/watch": {"side_jobs"},
    "meshes": {"model_shapes"},
    "planner": {"decision_log", "fast_replay", "forecast", "market_history", "market_nodes", "market_replay", "mesh_memory", "optimum", "published_policies", "synthetic_market", "trace_formats", "traces"},
    "rendezvous": {"gossip", "peer_heartbeats"},
    "testing": {"situations"},
}
PURE_FILES = [f"harness/{room}/{name}.py" for room, names in PURE.items() for name in sorted(names)]
# Imports by pure files of rooms that are not pure: plain values and readers that are given a store.
MAY_USE = {
    *("harness.bucket.controller_lease", "harness.bucket.journal", "harness.bucket.layout"),
    *("harness.agent.gpu_health", "harness.agent.run_orders", "harness.agent.workers"),
    *("harness.core.flags", "harness.core.formatting", "harness.core.hardware"),
    *("harness.core.input_files", "harness.core.masking", "harness.node.marks"),
    *("harness.notices.notice", "harness.look.reports.summary", "harness.planner.policy_table"),
    "harness.look.watch.due_snapshots",
}
BANNED = {"torch", "sky", "socket", "subprocess", "http", "urllib", "threading", "asyncio", "os"}
BANNED |= {"rich", "wandb"}


def files(*folders: str) -> list[Path]:
    """Return the Python files below folders, without those that `harness init` gives to users."""
    found = [path for folder in folders for path in (ROOT / folder).glob("**/*.py")]
    return sorted(path for path in found if "templates" not in path.parts)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def functions(path: Path) -> list[range]:
    """The lines of each function."""
    return [
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SHIPPED = files("harness", "storage")
MODULES = {module_of(path): path for path in SHIPPED}


def is_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk_running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node but those below `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if is_typing(child):
            continue
        yield child
        yield from walk_running(child)


@functools.cache
def imports(path: Path, typing: bool = False) -> frozenset[str]:
    """Return what a file imports while it runs, at any depth: modules, and `module.name`.
    `typing`: add what it imports for annotations only."""
    found: set[str] = set()
    tree = parsed(path)
    for node in ast.walk(tree) if typing else walk_running(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return frozenset(found)


def used_modules(path: Path, typing: bool = False) -> set[str]:
    """Return the modules of this project that a file imports while it runs. `typing`: see
    `imports`."""
    found = set()
    for name in imports(path, typing):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name:
            found.add(name)
    return found - {module_of(path)}


def room_of(module: str) -> str:
    """Return the room of a module of harness: "core", "look", ...; "" of any other."""
    return [*module.split("."), ""][1] if module.startswith("harness.") else ""


def tops(names: frozenset[str] | set[str]) -> set[str]:
    return {n.split(".")[0] for n in names}


def test_storage_knows_nothing_of_harness():
    for path in files("storage"):
        assert "harness" not in tops(imports(path)), path
        if path.parent.name not in ("tensors", "export") and path.name != "save_load.py":
            assert "torch" not in tops(imports(path)), path


def test_rooms_import_one_way():
    wrong = []
    for path in files("harness"):
        room = room_of(module_of(path))
        if room not in ORDER:
            continue
        below = ORDER[ORDER.index(room) + 1 :]
        wrong += [
            f"{named(path)} imports {name}"
            for name in sorted(used_modules(path))
            if room_of(name) in below
        ]
    assert not wrong, "\n".join(wrong)


def test_every_folder_is_a_room():
    folders = {p.name for p in (ROOT / "harness").iterdir() if (p / "__init__.py").exists()}
    assert folders == set(ORDER)


@pytest.mark.parametrize("path", [p for p in SHIPPED if p.name == "__init__.py"], ids=named)
def test_a_folder_has_few_doors(path):
    doors = [p for p in path.parent.glob("*.py") if p.name != "__init__.py"]
    assert len(doors) <= MOST_DOORS, f"{named(path.parent)} has {len(doors)} files"


def is_of_the_spine(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "storage":
        return parts[1] not in STORAGE_SATELLITES
    return len(parts) > 2 and parts[1] in SPINE


def test_the_spine_imports_no_satellite():
    """Imports for annotations count as well."""
    wrong = []
    for path in SHIPPED:
        if not is_of_the_spine(path):
            continue
        wrong += [
            f"{named(path)} imports {name}"
            for name in sorted(used_modules(path, typing=True))
            if not is_of_the_spine(MODULES[name]) and name not in ("harness", "storage")
        ]
    assert not wrong, "\n".join(wrong)


TESTS = ROOT / "tests"
KITS = {"harness.testing.situations", "storage.testing"}  # fakes that ship for tests


def needed_by_a_test(path: Path) -> set[str]:
    """Return the modules of this project that a test file imports, itself or through `support`."""
    found, waiting = set(), [path]
    seen = set(waiting)
    while waiting:
        one = waiting.pop()
        for name in imports(one):
            if name.startswith("harness.") and name.count(".") == 1:
                name = harness._HOMES.get(name.removeprefix("harness."), name)
            while name and name not in MODULES and not is_support(name):
                name = name.rpartition(".")[0]
            if is_support(name):
                if (module := support_file(name)) not in seen:
                    seen.add(module)
                    waiting.append(module)
            elif name:
                found.add(name)
    return found


def support_file(name: str) -> Path:
    path = TESTS.joinpath(*name.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"


def is_support(name: str) -> bool:
    return name.split(".")[0] == "support" and support_file(name).exists()


def test_tests_are_in_the_rooms_of_the_code():
    rooms = {path.parent.relative_to(TESTS).as_posix() for path in TESTS.glob("**/test_*.py")}
    known = {"storage", "house", "slurm", *ORDER} - {"testing"}  # its tests are the lab's
    assert rooms == known
    spine = re.search(r"^SPINE := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert spine and spine[1].split() == ["storage", *SPINE]


@pytest.mark.parametrize("room", ["storage", *SPINE])
def test_tests_of_the_spine_import_no_satellite(room):
    wrong = [
        f"{named(path)} imports {name}"
        for path in sorted((TESTS / room).glob("*.py"))
        for name in sorted(needed_by_a_test(path))
        if name not in ("harness", "storage")
        and not any(name == kit or name.startswith(f"{kit}.") for kit in KITS)
        and not is_of_the_spine(MODULES[name])
    ]
    assert not wrong, "\n".join(wrong)


def test_no_test_module_imports_another():
    wrong = [
        f"{named(path)} imports {name}"
        for path in sorted(TESTS.glob("*/*.py"))
        for name in imports(path)
        if name.startswith("test_")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_satellite_has_an_extra_and_what_the_spine_loads_from_it_is_there():
    import tomllib

    from harness.cli import command
    from harness.core import extensions

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*SATELLITES, "export"} <= extras.keys()
    assert {*command.OF_COMMANDS.values()} <= {*SATELLITES}
    loaded = {extensions.LOADER, extensions.FILES, extensions.IMPORT_HOOK}
    for where in loaded | {*extensions.STATE_CODECS.values()}:
        assert extensions.load(where, "a test") and extensions.extra_of(where) in SATELLITES
    for name in command.COMMANDS:
        flags, function = command.command(name)
        assert flags is not command.AbsentFlags and function.__doc__, name


def test_there_is_no_circle_of_imports():
    """Imports inside functions count as well."""
    graph = {name: used_modules(path) for name, path in MODULES.items()}
    waiting = {name: {m for m in used if m not in ("harness", "storage")} for name, used in graph.items()}
    while ready := {name for name, used in waiting.items() if not used & waiting.keys()}:
        for name in ready:
            del waiting[name]
    assert not waiting, f"in circles, or above one: {sorted(waiting)}"


@pytest.mark.parametrize("name", PURE_FILES)
def test_pure_files_are_pure(name):
    path = ROOT / name
    assert tops({i for i in imports(path) if not i.startswith("urllib.parse")}) & BANNED == set()
    text = path.read_text()
    clock = r"\btime\.(time|sleep|monotonic)\(|\bdatetime\.(now|utcnow)\("
    assert not re.search(clock + r"|\brandom\.(random|choice|shuffle|uniform|randint)\(", text)
    assert "os.environ" not in text


@pytest.mark.parametrize("name", PURE_FILES)
def test_pure_files_use_only_pure_files(name):
    pure = {module_of(ROOT / other) for other in PURE_FILES} | MAY_USE
    used = {m for m in used_modules(ROOT / name) if m.startswith("harness.")}
    packages = {m for m in used if MODULES[m].name == "__init__.py"}
    assert used - packages <= pure


READ_THE_ENVIRONMENT = {
    *("harness/adapters", "harness/agent", "harness/cli", "harness/rendezvous/torchrun.py"),
    *("harness/worker/session.py", "harness/worker/setup_check.py", "harness/worker/alone.py"),
    *("harness/node/forkserver.py", "harness/lab/replay.py", "harness/look/trackers"),
    *("harness/clouds/sky_broker.py", "harness/clouds/sky_task.py", "harness/local"),
    *("harness/lab/drills", "harness/uploader", "harness/look/alerts/alert_evaluator.py"),
    *("harness/look/watch/watched.py", "harness/data/chunk_cache.py", "harness/notices"),
}


def test_only_composers_read_the_environment():
    for path in files("harness"):
        if "os.environ" in path.read_text():
            name = named(path)
            assert any(name.startswith(allowed) for allowed in READ_THE_ENVIRONMENT), name


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_seats_need_only_their_own_packages():
    """The controller's and the agent's rooms import neither torch nor SkyPilot; a worker's
    import no SkyPilot."""
    code = (
        "import sys\nimport harness.cli.command, harness.controller.recovery, "
        "harness.local.local_cloud, harness.agent.agent, harness.notices.sources, "
        "harness.look.reports.report, harness.look.audit.audit, harness.look.reports.live_view, "
        "storage\nprint('torch' in sys.modules, 'sky' in sys.modules)"
    )
    assert run_python(code).split() == ["False", "False"]
    code = "import sys, harness.worker.session; print('sky' in sys.modules)"
    assert run_python(code).split() == ["False"]


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
                assert name.count(".") == 0 or name in DOORS, f"{path.name} imports {name}"


KEYS = ("rdzv/", "facts/", "samples/", "control/", "lease/", "run.json")  # a run's, in the bucket
SPELL_KEYS = {"bucket/layout.py", "core/step_records.py"}
# ... and these do so still: to be mended where they are worked on
SPELL_KEYS_STILL = {"bucket/archive.py", "look/audit/audit_records.py"}
UNITS = {"samples/s"}


def spelled_keys(path: Path) -> set[str]:
    """Return beginnings of keys that a file spells itself. What has a space is words for people."""
    return {
        node.value
        for node in ast.walk(parsed(path))
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
    wrong = {n: found for n, found in spelled.items() if n not in SPELL_KEYS | SPELL_KEYS_STILL}
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
            and name != named(Path(__file__))
            and path.suffix in (".py", ".md", ".yaml", ".toml", ".txt", "")
        ):
            text = path.read_text(errors="replace")
            assert not re.search(r"/work/|/root/|/home/[a-z]", text), name


def test_every_type_and_file_name_has_one_room():
    """A file name is used in one room; only adapters share names."""
    where = defaultdict(list)
    for path in SHIPPED:
        if path.name not in ("__init__.py", "__main__.py") and "adapters" not in path.parts:
            where[path.name].append(named(path))
    twice = {name: found for name, found in where.items() if len(found) > 1}
    assert not twice, twice


def test_imports_inside_functions_are_few():
    """One inside a function is for a library that is heavy or optional, or for a satellite."""
    late = [
        f"{named(path)}:{node.lineno}"
        for path in files("harness", "storage")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Import | ast.ImportFrom) and node.col_offset
        if any(node.lineno in lines for lines in functions(path))
    ]
    assert len(late) <= 120
