"""What `harness run` tells its workers about scripts whose training loop is not ours."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness.core.world import BadInput

# importing them takes seconds, and forks of the warm process need not
FRAMEWORKS = {
    "transformers": "transformers.trainer",
    "trl": "transformers.trainer",
    "accelerate": "accelerate",
    "lightning": "lightning.pytorch",
    "pytorch_lightning": "pytorch_lightning",
    "datasets": "datasets",
    "peft": "peft",
    "torchtitan": "torchtitan.trainer",
}


class AdaptFlags(Protocol):
    """Of `harness run`."""

    @property
    def adapt(self) -> str: ...
    @property
    def attach(self) -> tuple[str, ...]: ...
    @property
    def script_world(self) -> int: ...
    @property
    def preload(self) -> str: ...


def adapting(flags: AdaptFlags, argv: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Variables for the workers. Raises BadInput."""
    said = {"HARNESS_ADAPT": flags.adapt}
    if flags.attach:
        said["HARNESS_ATTACH"] = json.dumps(dict(map(_option, flags.attach)))
    if flags.script_world:
        said["HARNESS_SCRIPT_WORLD"] = str(flags.script_world)
    if flags.preload == "auto":
        if "HARNESS_PRELOAD" not in env and flags.adapt != "none":
            said["HARNESS_PRELOAD"] = ",".join(to_preload(argv))
    else:
        said["HARNESS_PRELOAD"] = "" if flags.preload == "none" else flags.preload
    return said


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise BadInput(f"--attach {text}: wanted NAME=VALUE, such as snapshot_every_s=60")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a word


def to_preload(argv: Sequence[str]) -> list[str]:
    """The frameworks that a script imports at its top, or that it is a module of, as modules."""
    if argv[0] == "-m":
        top = argv[1].partition(".")[0] if len(argv) > 1 else ""
        return [FRAMEWORKS[top]] if top in FRAMEWORKS else []
    if not argv[0].endswith(".py"):
        return []
    try:
        tree = ast.parse(Path(argv[0]).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []  # the worker will say so
    tops: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            tops += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            tops.append(node.module.partition(".")[0])
    return list(dict.fromkeys(FRAMEWORKS[top] for top in tops if top in FRAMEWORKS))
