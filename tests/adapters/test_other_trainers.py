"""Trainers that no adapter drives are refused at once, with what to do; the packages here only look
like theirs."""

import pytest

from harness.adapters.other_trainers import OTHERS
from support.worlds import train

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import harness
{attach}
from {module} import {begins}
{begins_of}
print("trained")
"""


@pytest.fixture(params=OTHERS)
def other(request, tmp_path):
    """A script that begins to train with the trainer of a module; `write(attach)` writes it."""
    module, begins = request.param, OTHERS[request.param].begins
    owner, _, method = begins.partition(".")
    home = tmp_path / "packages" / module.replace(".", "/")
    home.parent.mkdir(parents=True)
    for folder in (home.parent, *home.parent.parents):
        if folder == tmp_path / "packages":
            break
        (folder / "__init__.py").touch()
    text = f"class {owner}:\n    def {method}(self): ..." if method else f"def {owner}(): ..."
    home.with_suffix(".py").write_text(text)

    def write(attach):
        call = {"": f"{owner}()", "__init__": f"{owner}()"}.get(method, f"{owner}().{method}()")
        values = {"module": module, "begins": owner, "begins_of": call, "attach": attach}
        script = tmp_path / "begins.py"
        script.write_text(SCRIPT.format(root=str(tmp_path / "packages"), **values))
        return str(script)

    return OTHERS[module], write


def test_it_is_refused_unless_the_script_has_a_session(other, tmp_path):
    trainer, write = other
    env = {"HARNESS_ADAPT": "auto"}
    ended = train(tmp_path / "run", 1, script=write(""), env=env, codes=(1,))
    assert f"BadInput: {trainer.name} trains in a loop of its own" in ended.output
    assert trainer.instead in ended.output and "trained" not in ended.output.splitlines()
    # a script with a session begins; this one has no step that it could end with
    ended = train(tmp_path / "run", 1, script=write("harness.attach()"), env=env, codes=(0, 1))
    assert "trained" in ended.output.splitlines(), ended.output
    left = {"HARNESS_ADAPT": "none"}
    assert "trained" in train(tmp_path / "run", 1, script=write(""), env=left).output.splitlines()
