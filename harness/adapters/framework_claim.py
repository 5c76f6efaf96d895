"""The choice of what drives this process' training: the first framework that the script really
uses. Runs in the worker.

A script imports more than it uses (transformers' Trainer makes an Accelerator of its own), so
adapters claim at first use: when a Trainer is made, not when its module is imported.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import MutableMapping
from typing import Any

from harness.core.mesh import ModelMesh, meshes_told, replica_ranks_told
from harness.core.world import BadInput
from harness.worker import alone
from harness.worker import session as sessions
from harness.worker.session import Session, attach

ADAPT = "HARNESS_ADAPT"  # "auto", "none" or a framework; unset: not started by `harness run`
ATTACH = "HARNESS_ATTACH"  # options of `attach` for a script that does not call it, as JSON
MESH, REPLICA_RANKS = "HARNESS_MESH", "HARNESS_REPLICA_RANKS"
FRAMEWORKS = ("transformers", "accelerate", "lightning", "fabric", "torchtitan")
# those that lay out a mesh of the whole world themselves, as the run's: the others split a model
# over the ranks of its copy
LAYING_OUT = ("torchtitan",)


class Claims:
    """The claims of this process. `framework`: the one that drives; "": none yet; `mesh`: of a copy
    of the model, if one was told."""

    def __init__(self) -> None:
        self.framework = ""
        self.run: Session | None = None
        self.mesh: ModelMesh | None = None


_claims = Claims()


def enter(hide: bool = True, lays_out: bool = False) -> Session | None:
    """Join the world when the script begins to use any framework, and hide it from the script.
    Return None if the script has attached itself, or is not to be adapted. `hide`, `lays_out`: see
    `join`. Raises BadInput."""
    if _claims.run is not None:
        return _claims.run
    if os.environ.get(ADAPT, "none") == "none" or sessions.is_attached():
        return None
    return join(hide, lays_out)


def join(hide: bool = True, lays_out: bool = False) -> Session:
    """Join for a script that makes an elastic trainer by name; see `enter`. `hide`: hide the world
    from the script, except from one that shards its model over it; `lays_out`: the framework lays
    out the mesh of the world itself. Raises BadInput."""
    if _claims.run is None:
        if sessions.is_attached():
            raise BadInput(
                "wanted to attach for this script's trainer, found that it has called "
                "harness.attach() itself; leave that to the trainer, or use run.steps(...)"
            )
        ranks = 1 if lays_out else copies_of_mesh(os.environ)
        copy = alone.CopyRanks.of(os.environ, ranks) if ranks > 1 else None
        if hide and copy is not None:
            copy.show_gpus(os.environ)
        elif hide:
            alone.show_one_gpu(os.environ)
        run = _claims.run = attach(**attach_options(os.environ.get(ATTACH, "")))
        if lays_out:
            _claims.mesh = run._peers.model_mesh
        if copy is not None:
            assert run.mesh is not None  # made now, since the ranks make it together
        if hide:
            alone.world.hide(os.environ, copy)
    return _claims.run


def copies_of_mesh(environ: MutableMapping[str, str]) -> int:
    """Let the ranks of one copy of the mesh be a replica: a foreign trainer splits its model over
    them, and shares out a micro-batch among them, itself. Return their number. Raises BadInput."""
    choice = meshes_told(environ)
    if choice is not None:
        mesh = _claims.mesh = choice.of_world(int(environ.get("WORLD_SIZE", 1)))
        environ[REPLICA_RANKS] = str(mesh.copy_ranks)
        del environ[MESH]
    return replica_ranks_told(environ) or 1


def claim(framework: str, by_name: bool = False, hide: bool = True) -> Session | None:
    """Let `framework` drive the training from now on. Return None if another one does, if the
    script has attached itself, or if --adapt says otherwise. `by_name`: the script asks for it
    itself; `hide`: see `join`. Raises BadInput."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"wanted one of {', '.join(FRAMEWORKS)}, found {framework!r}")
    if not by_name:
        asked = os.environ.get(ADAPT, "none")
        if asked not in ("auto", framework):
            return None
        if _claims.framework not in ("", framework):
            return None
    lays_out = framework in LAYING_OUT
    run = join(hide, lays_out) if by_name else enter(hide, lays_out)
    if run is not None and not _claims.framework:
        _claims.framework = framework
        run.print(f"harness: this script's steps are made by {framework}; docs/trainers/ says how")
    return run


def claimed() -> str:
    """Return the framework that drives, or "" if none does."""
    return _claims.framework


def told_mesh() -> ModelMesh | None:
    """Return the mesh of a copy of the model, or None if none was told."""
    return _claims.mesh


def second_training(call: str) -> str:
    """Return the message for a script that trains more than once, in a way that does not show
    where one training ends and the next one begins."""
    return (
        f"{call}: where this training ends and another one begins cannot be told; prepare what the "
        "second one trains after the first, make it a run of its own, or run with --adapt none"
    )


def attach_options(text: str) -> dict[str, Any]:
    """Parse the value of HARNESS_ATTACH. Raises BadInput."""
    known = inspect.signature(attach).parameters
    try:
        options = json.loads(text) if text else {}
        if not isinstance(options, dict):
            raise ValueError("it is no object")
    except ValueError as e:
        raise BadInput(f"{ATTACH}: wanted a JSON object of options of attach, found {e}") from e
    if unknown := sorted(set(options) - set(known)):
        raise BadInput(
            f"--attach {unknown[0]}=...: attach has no such option; wanted one of "
            f"{', '.join(sorted(known))}"
        )
    return options


def refuse_unlike(where: str, function: Any, parameters: tuple[str, ...], version: str) -> None:
    """Raise BadInput unless `function` has the parameters that an adapter was written for."""
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise BadInput(
            f"{where} of {version} takes ({', '.join(found)}), this adapter knows "
            f"({', '.join(parameters)}); install a version that docs/trainers/ names, or run the "
            "script with --adapt none (it then keeps its own checkpoints)"
        )
