"""The doors: docs/API.md lists what is public, type checkers see it, and it costs nothing until it
is asked for."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).parents[2]
DOORS = {
    "harness": "harness/__init__.py",
    "harness.data": "harness/data/__init__.py",
    "harness.policies": "harness/controller/policies.py",
    "harness.testing": "harness/testing/__init__.py",
    "storage": "storage/__init__.py",
    "storage.testing": "storage/testing/__init__.py",
}


def door(name):
    return harness.policies if name == "harness.policies" else importlib.import_module(name)


def documented():
    """Door -> [(name, firmness)], from the page."""
    page = (ROOT / "docs" / "API.md").read_text()
    found = {}
    for part in page.split("\n## ")[1:]:
        lists = re.findall(r"^- (Stable|Provisional): ((?:.|\n  )+)\.$", part, re.M)
        names = [(name, firm) for firm, text in lists for name in re.findall(r"`(\w+)`", text)]
        found[part.partition("\n")[0].strip("`")] = names
    return found


def test_the_page_lists_every_public_name_and_no_other():
    page = documented()
    assert set(page) == set(DOORS)
    for name, rows in page.items():
        names = [row[0] for row in rows]
        assert len(names) == len(set(names))
        assert sorted(names) == sorted(door(name).__all__), name


@pytest.mark.parametrize("name", DOORS)
def test_every_public_name_is_there(name):
    found = door(name)
    for one in found.__all__:
        assert getattr(found, one) is not None
    assert set(found.__all__) <= set(dir(found))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = found.nothing_of_the_kind


@pytest.mark.parametrize("name", DOORS)
def test_type_checkers_see_every_public_name(name):
    """Names that are imported late are imported for type checkers too; `__all__` is a literal."""
    tree = ast.parse((ROOT / DOORS[name]).read_text())
    seen = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            seen |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            seen.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            seen.add(node.target.id)
    assert set(door(name).__all__) <= seen


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout


@pytest.mark.proof
def test_a_door_loads_no_more_than_it_must():
    """A worker must not load the controller, nor a controller torch."""
    loaded = "sorted(m for m in sys.modules if m.startswith(('harness', 'storage')))"
    found = run_python(f"import sys, harness; print({loaded})")
    assert [m for m in ast.literal_eval(found) if not m.startswith("__")] == ["harness"]
    code = (
        "import sys, harness, storage\n"
        "for name in harness.__all__:\n"
        "    home = harness._HOMES.get(name, '')\n"
        "    tensors = ('harness.worker.', 'harness.adapters.', 'harness.meshes.')\n"
        "    if name == 'ModelShape' or not home.startswith(tensors): getattr(harness, name)\n"
        "print('torch' in sys.modules, 'sky' in sys.modules, 'pytest' in sys.modules)"
    )
    assert run_python(code).split() == ["False", "False", "False"]
    code = (
        "import sys; from harness import attach\n"
        "print([m for m in sys.modules if m.startswith(('harness.controller', 'harness.clouds'))])"
    )
    assert run_python(code).strip() == "[]"
    code = "import sys; from harness import Notice, View; print('harness.worker' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_fakes_need_no_pytest():
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "from harness.testing import SimCloud, VirtualClock, MetadataServer, LocalCloud, situation\n"
        "from storage.testing.faulty_store import FaultyStore\n"
        "for door in ('harness.testing', 'storage.testing'):\n"
        "    try: exec(f'from {door} import ' + ('PolicyContract' if door[0] == 'h' else 'StoreContract'))\n"
        "    except ImportError as e: print('spotharness[testing]' in str(e))"
    )
    assert run_python(code).split() == ["True", "True"]
