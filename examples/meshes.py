"""Which meshes the models of `gpt.py` and `models.py` train on."""

from __future__ import annotations

import harness
import torch

MESHES = "docs/MESHES.md"


def ranks_of(run: harness.Session) -> dict[str, int]:
    """By dimension of the run's mesh, also of `harness run --mesh`; {} on one rank without one."""
    if not torch.distributed.is_initialized():
        return {}
    return dict(zip(run.mesh.mesh_dim_names or (), run.mesh.shape, strict=True))


def check(
    ranks: dict[str, int], shape: harness.ModelShape | None, eval_every: int, compiled: bool
) -> None:
    """Raises BadInput for what these models, or their trainer, do not do. `shape`: of a model of
    `models.py`; None: it is one of `gpt.py`."""
    tp, pp, cp = (ranks.get(name, 1) for name in ("tp", "pp", "cp"))
    if cp > 1:
        raise harness.BadInput(
            f"cp={cp}: wanted a mesh without cp, since these models attend within one rank; "
            f"{MESHES}#long-sequences-cp says what a model needs"
        )
    if shape is None and max(tp, pp) > 1:
        raise harness.BadInput(
            f"{f'tp={tp}' if tp > 1 else f'pp={pp}'}: wanted a model of models.py (--model), found "
            "one of gpt.py"
        )
    if shape is not None and tp > 1 and (shape.experts or shape.kv_heads % tp):
        raise harness.BadInput(
            f"tp={tp}: wanted a model without experts, whose heads of keys and values {tp} ranks "
            f"can share out; found {shape.experts} experts and {shape.kv_heads} heads"
        )
    if tp > 1 and compiled:
        raise harness.BadInput(
            f"tp={tp}: wanted no --compile; torch 2.13 crashes in blocks that split by positions"
        )
    wanted = {
        "a mesh without tp": tp == 1,
        "--no-tied": shape is None or not shape.tied,
        "--eval-every 0": not eval_every,
    }
    if pp > 1 and not all(wanted.values()):
        missing = ", ".join(what for what, is_so in wanted.items() if not is_so)
        raise harness.BadInput(f"pp={pp}: wanted {missing}; see {MESHES}#pipelines")
