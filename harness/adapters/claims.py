"""Who drives this process' training: the first framework that the script really uses. Runs in the
worker.

A script imports more than it uses (transformers' Trainer makes an Accelerator of its own), so
adapters claim at first use: when a Trainer is made, not when its module is imported.
"""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

from harness.core.world import BadInput
from harness.worker import hidden
from harness.worker import session as sessions
from harness.worker.session import Session, attach

ADAPT = "HARNESS_ADAPT"  # "auto", "none", or a framework; nothing: `harness run` did not start us
ATTACH = "HARNESS_ATTACH"  # options of `attach` for a script that does not call it, as JSON
FRAMEWORKS = ("transformers", "accelerate", "lightning", "fabric", "torchtitan")


class Claims:
    """Of this process. `framework`: who drives; "": nobody yet."""

    def __init__(self) -> None:
        self.framework = ""
        self.run: Session | None = None


_claims = Claims()


def enter(hide: bool = True) -> Session | None:
    """The script begins to use a framework, whichever it will be: join the world, and hide it from
    the script. None: the script has attached by itself, or is not to be adapted. `hide`: see
    `join`. Raises BadInput."""
    if _claims.run is not None:
        return _claims.run
    if os.environ.get(ADAPT, "none") == "none" or sessions.is_attached():
        return None
    return join(hide)


def join(hide: bool = True) -> Session:
    """As `enter`, for who asks for it by name: a script that makes an elastic trainer. `hide`: the
    world, from the script; not from one that shards its model over it."""
    if _claims.run is None:
        if sessions.is_attached():
            raise BadInput(
                "wanted to attach for this script's trainer, found that it has called "
                "harness.attach() itself; leave that to the trainer, or use run.steps(...)"
            )
        if hide:
            hidden.show_one_gpu(os.environ)
        _claims.run = attach(**attach_options(os.environ.get(ATTACH, "")))
        if hide:
            hidden.world.hide(os.environ)
    return _claims.run


def claim(framework: str, by_name: bool = False, hide: bool = True) -> Session | None:
    """`framework` is what drives the training from here on. None: another one does, the script has
    attached by itself, or --adapt says otherwise. `by_name`: the script asks for it itself; `hide`:
    see `join`. Raises BadInput."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"wanted one of {', '.join(FRAMEWORKS)}, found {framework!r}")
    if not by_name:
        asked = os.environ.get(ADAPT, "none")
        if asked not in ("auto", framework):
            return None
        if _claims.framework not in ("", framework):
            return None
    run = join(hide) if by_name else enter(hide)
    if run is not None and not _claims.framework:
        _claims.framework = framework
        run.print(f"harness: this script's steps are made by {framework}; docs/trainers/ says how")
    return run


def claimed() -> str:
    """Who drives; "": nobody."""
    return _claims.framework


def attach_options(text: str) -> dict[str, Any]:
    """HARNESS_ATTACH. Raises BadInput."""
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
    """Raises BadInput unless `function` has the parameters that an adapter was written for."""
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise BadInput(
            f"{where} of {version} takes ({', '.join(found)}), this adapter knows "
            f"({', '.join(parameters)}); install a version that docs/trainers/ names, or run the "
            "script with --adapt none (it then keeps its own checkpoints)"
        )
