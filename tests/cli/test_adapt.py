"""How an unchanged script meets its adapter: flags of `harness run`, the import hook, claims."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness.cli.node import adapting, to_preload
from harness.core.world import BadInput


def flags(**said):
    usual = {"adapt": "auto", "attach": (), "script_world": 0, "preload": "auto"}
    return SimpleNamespace(**{**usual, **said})


def test_what_workers_are_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import os, trl\nfrom transformers import Trainer\nimport numpy\n")
    said = adapting(flags(attach=("reduce=exact", "snapshot_every_s=60")), [str(script)], {})
    assert said["HARNESS_ADAPT"] == "auto" and said["HARNESS_PRELOAD"] == "transformers.trainer"
    assert json.loads(said["HARNESS_ATTACH"]) == {"reduce": "exact", "snapshot_every_s": 60}
    assert "HARNESS_SCRIPT_WORLD" not in said
    assert adapting(flags(script_world=8), ["x"], {})["HARNESS_SCRIPT_WORLD"] == "8"


@pytest.mark.parametrize(
    ("preload", "env", "wanted"),
    [("none", {}, ""), ("json,csv", {}, "json,csv"), ("auto", {"HARNESS_PRELOAD": "a"}, None)],
)
def test_what_is_imported_once(preload, env, wanted):
    assert adapting(flags(preload=preload), ["-m", "x"], env).get("HARNESS_PRELOAD") == wanted


def test_a_script_that_cannot_be_read_is_no_matter_here(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import (")
    assert to_preload([str(broken)]) == to_preload([str(tmp_path / "none.py")]) == []


@pytest.mark.parametrize("option", ["reduce", "=3", "a b=3"])
def test_an_option_is_a_name_and_a_value(option):
    with pytest.raises(BadInput, match="wanted NAME=VALUE"):
        adapting(flags(attach=(option,)), ["x"], {})


def test_unknown_options_of_attach_are_refused_by_name():
    from harness.adapters.framework_claim import attach_options

    assert attach_options('{"seed": 3}') == {"seed": 3}
    with pytest.raises(BadInput, match="--attach colour"):
        attach_options('{"colour": 3}')
    with pytest.raises(BadInput, match="wanted a JSON object"):
        attach_options("[1]")


def test_a_function_that_is_another_is_refused():
    from harness.adapters.framework_claim import refuse_unlike

    def known(self, model): ...

    refuse_unlike("Trainer.f", known, ("self", "model"), "x 1.0")
    with pytest.raises(BadInput, match=r"Trainer.f of x 2.0 takes \(self, model\)"):
        refuse_unlike("Trainer.f", known, ("self", "net"), "x 2.0")


FRAMEWORK = """
import sys
sys.path.insert(0, {folder!r})
{before}
from harness.adapters import import_hook as hook
hook.install({{"its.trainer": "adapter:patch"}})
hook.install({{}})  # once is enough
from its.trainer import Trainer
import its.trainer
assert its.trainer.__spec__.loader.get_source("its.trainer").startswith("class Trainer")
print(Trainer().train(), "transformers" in sys.modules, len(sys.meta_path))
"""


@pytest.mark.parametrize("before", ["", "import its.trainer"])
def test_a_module_is_adapted_when_it_is_imported_or_was(tmp_path, before):
    (tmp_path / "its").mkdir()
    (tmp_path / "its/__init__.py").write_text("")
    (tmp_path / "its/trainer.py").write_text("class Trainer:\n    def train(self): return 1\n")
    (tmp_path / "adapter.py").write_text(
        "def patch(module):\n    module.Trainer.train = lambda self: 2\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", FRAMEWORK.format(folder=str(tmp_path), before=before)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout.startswith("2 False"), ended.stdout + ended.stderr
