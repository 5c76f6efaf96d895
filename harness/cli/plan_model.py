"""`harness plan --model`: which meshes hold a model, what they need of each GPU, which to take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from harness.cli.common import DONE, FAILED
from harness.core.hardware import gpu_memory, link_speed, peak_flops
from harness.core.mesh import mesh_of
from harness.core.mesh_plan import USABLE, MeshPlan, PlannedGpus, best_plans, fits, taken
from harness.core.models import ModelShape, named_shape, shape_of
from harness.core.world import BadInput
from storage.errors import NotFound
from storage.json_text import BadObject, parsed
from storage.opening import open_store
from storage.text import Console

if TYPE_CHECKING:
    from harness.cli.plan import PlanFlags

SHOWN = 8
TOKENS = 1 << 22  # of a step, where nobody says
GB = 1e9


def plan_model(flags: PlanFlags, counts: Sequence[int]) -> int:
    """Exit status 1 if no mesh of what can be trained here holds it."""
    shape = _shape(flags.model)
    batch = flags.global_batch or max(1, TOKENS // flags.sequence)
    found = {}
    for nodes in counts:
        gpus = _gpus(flags.gpus, nodes, flags.network_gbit)
        found[nodes] = gpus, best_plans(shape, gpus, batch, flags.sequence)
    chosen = {nodes: _chosen(gpus, plans) for nodes, (gpus, plans) in found.items()}
    if flags.json:
        told: dict[str, Any] = {"model": asdict(shape), "parameters": shape.parameters}
        told |= {"global_batch": batch, "sequence": flags.sequence, "nodes": {}}
        for nodes, (gpus, plans) in found.items():
            best = chosen[nodes]
            rows = [_told(plan, gpus) for plan in plans]
            told["nodes"][nodes] = {"taken": _told(best, gpus) if best else None, "meshes": rows}
        print(json.dumps(told, indent=2))
    else:
        console = Console()
        console.print(
            f"{flags.model}: {shape.parameters / 1e9:.3g} B parameters, {batch} samples of "
            f"{flags.sequence} tokens a step, bf16 with fp32 masters and AdamW; estimates",
            highlight=False,
        )
        for nodes, (gpus, plans) in found.items():
            _show(console, gpus, plans, chosen[nodes])
    return DONE if any(chosen.values()) else FAILED


def _shape(model: str) -> ModelShape:
    """By name, or as a config.json says. Raises BadInput, StoreError."""
    if "/" not in model:
        return named_shape(model)
    folder = model.removesuffix("/config.json")
    try:
        return shape_of(parsed(open_store(folder).get("config.json")))
    except (NotFound, BadObject) as e:
        raise BadInput(f"--model {model}: wanted a folder with a config.json: {e}") from e


def _gpus(text: str, nodes: int, network_gbit: float) -> PlannedGpus:
    """Of H100:8. Raises BadInput."""
    name, _, count = text.partition(":")
    memory, flops, link = gpu_memory(name), peak_flops(name), link_speed(name)
    per_node = int(count) if count.isdecimal() and len(count) < 4 else int(not count)
    if memory is None or flops is None or link is None or not per_node:
        raise BadInput(
            f"--gpus {text}: wanted NAME:COUNT of a GPU that harness knows, such as H100:8 or "
            "A100-80GB:8 (harness/core/peaks.csv)"
        )
    return PlannedGpus(name, memory, flops, per_node, nodes, link, network_gbit / 8 * 1e9)


def _chosen(gpus: PlannedGpus, plans: Sequence[MeshPlan]) -> MeshPlan | None:
    """None: no mesh that can be trained holds the model."""
    able = [plan for plan in plans if fits(plan, gpus) and not _refused(plan)]
    return taken(able) if able else None


def _refused(plan: MeshPlan) -> str:
    """Why a run could not have this mesh; "": it can."""
    try:
        mesh_of({name: size for name, size in vars(plan.mesh).items() if size > 1})
    except BadInput as e:
        return str(e)
    return ""


def _told(plan: MeshPlan, gpus: PlannedGpus) -> dict[str, Any]:
    return asdict(plan) | {
        "mesh": str(plan.mesh),
        "nbytes": {**asdict(plan.nbytes), "total": plan.nbytes.total},
        "fits": fits(plan, gpus),
        "refused": _refused(plan),
    }


def _show(
    console: Console, gpus: PlannedGpus, plans: Sequence[MeshPlan], chosen: MeshPlan | None
) -> None:
    fit = [plan for plan in plans if fits(plan, gpus)]
    fit = [plan for plan in fit if not _refused(plan)] or fit
    have = f"{USABLE * gpus.memory / GB:.3g} of {gpus.memory / GB:.3g} GB"
    console.print(
        f"\n{gpus.nodes} x {gpus.name}:{gpus.per_node}, {have} each: {len(fit)} meshes fit",
        highlight=False,
    )
    shown = (fit or list(plans))[:SHOWN]
    if chosen is not None and chosen not in shown:
        shown[-1:] = [chosen]
    console.print(_table(shown, chosen))
    if chosen is not None:
        mesh = chosen.mesh if chosen.mesh.copy_ranks > 1 else "none: each GPU holds the model"
        console.print(
            f"take    --mesh {mesh}, copies {chosen.copies}, micro-batches of "
            f"{chosen.micro_batch}{', checkpointed' if chosen.checkpointing else ''}: the simplest "
            f"of those that are about as fast, by estimate {chosen.step_s:.3g} s a step\n"
            f"GB      {_kinds(chosen)}",
            highlight=False,
            soft_wrap=True,
        )
    elif fit:
        console.print(f"not yet {fit[0].mesh}: {_refused(fit[0])}", soft_wrap=True)
    else:
        least = plans[0].nbytes.total / GB
        console.print(
            f"none    fits: {plans[0].mesh} needs least, {least:.3g} GB; take more nodes",
            highlight=False,
            soft_wrap=True,
        )


def _table(plans: Sequence[MeshPlan], chosen: MeshPlan | None) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("mesh", no_wrap=True)
    for head in ("copies", "micro", "GB", "bubble", "GB in", "GB out", "s/step"):
        made.add_column(head, justify="right", no_wrap=True)
    for plan in plans:
        mark = "*" if plan == chosen else " "
        made.add_row(
            f"{mark} {plan.mesh}{' (not yet)' if _refused(plan) else ''}",
            str(plan.copies),
            f"{plan.micro_batch}x{plan.micro_batches}{' ck' if plan.checkpointing else ''}",
            f"{plan.nbytes.total / GB:.1f}",
            f"{plan.bubble:.0%}",
            *(f"{n / GB:,.0f}" for n in (plan.traffic.inside, plan.traffic.across)),
            f"{plan.step_s:.3g}",
        )
    return made


def _kinds(plan: MeshPlan) -> str:
    """What a GPU holds."""
    return ", ".join(f"{kind} {n / GB:.3g}" for kind, n in vars(plan.nbytes).items())
