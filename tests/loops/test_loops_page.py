"""docs/trainers/loops.md: what it shows runs, and the lines that it says change are counted."""

import re
from pathlib import Path

import pytest

from support.worlds import history, train

pytestmark = pytest.mark.proof
PAGE = (Path(__file__).parents[2] / "docs/trainers/loops.md").read_text()
DIFFS = {
    name: (int(less), int(more), body)
    for name, less, more, body in re.findall(
        r"^```diff (\w+) -(\d+) \+(\d+)\n(.*?)^```$", PAGE, re.M | re.S
    )
}


def sides(body):
    """The script before, and after."""
    lines = body.splitlines()
    assert all(line[:1] in (" ", "-", "+") for line in lines)
    return ("\n".join(line[1:] for line in lines if line[:1] in (" ", mark)) for mark in "-+")


@pytest.mark.parametrize("name", DIFFS)
def test_a_diff_has_as_many_lines_as_it_says_and_what_it_makes_runs(name, tmp_path):
    less, more, body = DIFFS[name]
    found = [sum(line.startswith(mark) for line in body.splitlines()) for mark in "-+"]
    assert found == [less, more] and f"{less} lines go, {more} come" in PAGE
    before, after = sides(body)
    compile(before, name, "exec")
    script = tmp_path / "script.py"
    script.write_text(after)
    steps = []
    for world in (1, 3):
        train(tmp_path / f"run{world}", world, script=script, env={"HARNESS_MARK": tmp_path / "m"})
        steps.append([(r.step, r.samples) for r in history(tmp_path / f"run{world}")])
    assert steps[0] == steps[1] and len(steps[0]) == 12


def test_the_other_code_of_the_page_is_python():
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(blocks) >= 4
    for block in blocks:
        compile(block, "page", "exec")
