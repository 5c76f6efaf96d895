"""What a change cannot have touched is skipped, and the rest is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import reach

TREE = {
    "pyproject.toml": "[project]\n",
    "tests/suite/test_it.py": 'from harness.used import f\nRUN = "python -m harness.started --x"\n',
    "harness/__init__.py": "",
    "harness/used.py": '"""What it does."""\ndef f():\n    from harness import late\n    return 1\n',
    "harness/late.py": "import harness.deep\n",
    "harness/deep.py": "x = 1\n",
    "harness/started.py": "y = 1\n",
    "harness/other.py": "import harness.used\n",
    "harness/used.csv": "1\n",
    "tests/suite/scripts/own.py": "print(1)\n",
    "storage/__init__.py": "",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    monkeypatch.setattr(reach, "PROVEN", tmp_path / "tests" / "suite" / "proven.json")
    monkeypatch.setattr(reach, "SUITES", {"suite": ("tests/suite/**/*", "pyproject.toml")})
    assert reach.main("suite", record=False) == 1  # never recorded
    reach.main("suite", record=True)
    assert reach.main("suite", record=False) == 0
    return tmp_path


@pytest.mark.parametrize("name", ["used", "late", "deep", "started"])
def test_what_is_imported_or_named_in_a_string_counts(tree: Path, name: str):
    with (tree / "harness" / f"{name}.py").open("a") as file:
        file.write("\nz = 2\n")
    assert reach.main("suite", record=False) == 1


def test_settings_and_the_suite_s_own_files_count(tree: Path):
    (tree / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert reach.main("suite", record=False) == 1
    reach.main("suite", record=True)
    (tree / "tests" / "suite" / "test_more.py").write_text("assert True\n")
    assert reach.main("suite", record=False) == 1


@pytest.mark.parametrize("name", ["harness/used.csv", "tests/suite/scripts/own.py"])
def test_data_beside_code_and_scripts_of_the_suite_count(tree: Path, name: str):
    with (tree / name).open("a") as file:
        file.write("2\n")
    assert reach.main("suite", record=False) == 1


def test_other_files_comments_and_docstrings_do_not(tree: Path):
    (tree / "harness" / "other.py").write_text("import harness.used\nz = 2\n")
    used = tree / "harness" / "used.py"
    used.write_text("# why\n" + used.read_text().replace("What it does", "What it is for"))
    assert reach.main("suite", record=False) == 0


def test_the_suites_of_this_tree_reach_what_they_run():
    meshes = reach.reached("meshes")
    assert {"harness/meshes/pipeline.py", "harness/worker/step.py"} <= set(meshes)
    assert "harness/planner/optimum.py" not in meshes
