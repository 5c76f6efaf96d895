"""`harness plan`: forecast a run's duration, cost and risk before a launch, or choose a mesh."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from harness.cli.common import DONE, FAILED, RealClock, existing_store, names_of
from harness.cli.dry_run import deadline_at, deadline_text, timed_of
from harness.cli.market_command import SHARED, Histories
from harness.clouds import sky_private, sky_task
from harness.clouds.sky_broker import Broker
from harness.clouds.skypilot import H100_FLOPS
from harness.core.flags import flag, positional
from harness.core.hardware import gpu_memory, link_speed, peak_flops
from harness.core.mesh import mesh_of
from harness.core.world import BadInput, Offer
from harness.meshes.model_shapes import ModelShape, named_shape, shape_of
from harness.notices import sources as notice_sources
from harness.planner import catalogs, launch_plan
from harness.planner import forecast as forecasting
from harness.planner.forecast import ON_DEMAND_ONLY, NodeShape, PlannedRun, as_of, forecast
from harness.planner.mesh_memory import (
    USABLE,
    MeshPlan,
    PlannedGpus,
    best_plans,
    fits_memory,
    plan_to_take,
)
from storage.canonical_json import BadObject, parsed
from storage.errors import NotFound
from storage.stores.store_urls import normalize, open_store
from storage.terminal_text import Console

if TYPE_CHECKING:
    from harness.clouds.sky_task import Task
    from harness.core.estimates import CapacitySeen
    from harness.planner.catalogs import PriceCatalog
    from harness.planner.forecast import PlanCandidate, PlanForecast

MOST_JOBS = 4


SAY_S = 5.0  # between two lines of progress


def _counts(text: str) -> tuple[int, ...]:
    """Parse LOW:HIGH or N into numbers of nodes: LOW, its doublings, and HIGH. Raises ValueError
    that says what is wanted."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise ValueError(f"wanted LOW:HIGH or N, such as 1:8; found {text!r}")
    found, last = [int(low)], int(high or low)
    while found[-1] < last:
        found.append(min(last, 2 * found[-1]))
    return tuple(found)


@dataclass(frozen=True)
class PlanFlags:
    TITLES: ClassVar = {
        "how much work it is": ("step_time", "steps", "measured_on", "record", "work"),
        "what is wanted": ("nodes", "deadline", "budget_usd", "risk", "policy"),
        "prices": ("clouds", "catalog"),
        "assumptions": ("changeover_s", "lost_s", "scaling", "markets", "seed", "jobs"),
        "meshes for a model": ("model", "gpus", "global_batch", "sequence", "network_gbit"),
    }

    task: str = positional("the SkyPilot task YAML; or --model", nargs="?", default="")
    model: str = flag(
        "", "instead: which meshes hold this model: a name (llama-70b), or where a config.json lies"
    )
    gpus: str = flag("H100:8", "of a node, for --model")
    global_batch: int = flag(0, "samples per step, for --model; 0: of 4 M tokens", at_least=0)
    sequence: int = flag(8192, "tokens per sample, for --model", at_least=1)
    network_gbit: float = flag(
        400.0, "what a GPU sends to other nodes, in Gbit/s, for --model", above=0
    )
    step_time: float | None = flag(
        None, "seconds of a step on one node of --measured-on, measured or estimated", above=0
    )
    steps: int | None = flag(
        None, "of the whole run; default: the task's STEPS, or the record's", at_least=1
    )
    measured_on: str = flag(
        "", "what --step-time is about, such as H100:8; default: the task's best value"
    )
    record: str = flag(
        "", "instead: URL of a run (a canary) whose step records tell how fast it was"
    )
    work: str = flag("", "instead: how long one node of --measured-on takes for all, such as 48h")
    nodes: str = flag(
        "1:4", "how many nodes at most, LOW:HIGH (each doubling is tried) or N", check=_counts
    )
    deadline: str = flag("", "when it must be done: 36h from now, or a date", check=deadline_text)
    budget_usd: float | None = flag(None, "what it may cost at most", above=0)
    risk: float = flag(0.05, "of missing deadline or budget that is taken", at_most=1)
    policy: tuple[str, ...] = flag(
        (), "how to choose offers, as for `harness launch`; repeat for more", metavar="NAME"
    )
    clouds: str = flag("", "only these, such as aws,nebius; default: all of the catalog")
    catalog: str = flag(
        "",
        "a folder of CLOUD/vms.csv, or `shipped`; default: SkyPilot's own on this computer, else "
        "the small one that ships",
    )
    changeover_s: float = flag(300.0, "from asking for a node until it trains", above=0)
    lost_s: float = flag(120.0, "training that is lost with a node")
    scaling: float = flag(
        1.0, "share of the speed of more nodes that is kept at each doubling", above=0, at_most=1
    )
    markets: int = flag(99, "how many markets are played for the best", at_least=19)
    seed: int = flag(0, "which markets")
    jobs: int = flag(0, "processes; 0: as many as there are cores, up to 4")
    env: tuple[str, ...] = flag(
        (), "NAME=value for the task; repeat for more", metavar="NAME=value"
    )
    json: bool = flag(False, "print the plan as JSON")
    plot: str = flag("", "also draw it: FILE.html, FILE.png, or FILE for both")


def plan(flags: PlanFlags) -> int:
    """Forecast time, cost and risk for choices of nodes and policies.

    It works from a price catalog: no account and no network is needed. Exit status 1 if no choice
    keeps the accepted risk."""
    if bool(flags.model) is bool(flags.task):
        raise BadInput("wanted either a task file, or --model NAME; found both or neither")
    from harness.planner import forecast_report, policy_report

    counts = _counts(flags.nodes)
    if flags.plot:
        policy_report.plot_paths(flags.plot)  # report an unwritable path immediately
    if flags.task and not Path(flags.task).is_file():
        raise BadInput(f"{flags.task}: wanted a SkyPilot task YAML, found no such file")
    _say(f"reading prices for {flags.task or flags.model}")
    if flags.model:
        return plan_model(flags, counts)
    given = sky_task.pairs(flags.env, os.environ)
    task = sky_task.load(flags.task, {"RUN": "none", **given})
    offers, prices = _offers(flags, task)
    shapes = forecasting.shapes(offers)
    run, speed = _planned(flags, task, shapes)
    history, seen = _history(shapes)
    found, dropped = _forecasts(flags, shapes, counts, run, history)
    ranked = forecasting.ranked(found, run, flags.risk)
    best = ranked[0] if forecasting.risk(ranked[0], run) <= flags.risk + 1e-9 else None
    launch = _launch_words(flags, run, best.candidate) if best else ()
    sources = (prices, speed, seen)
    hindsight: tuple[float, ...] = ()
    if best and run.deadline_h is not None:
        few = min(flags.markets, forecasting.SCREENED)
        _say(f"what the best would cost in hindsight, in {few} markets")
        try:
            hindsight = forecasting.hindsight_usd(best.candidate, run, few, flags.seed, history)
        except BadInput as e:  # a deadline that is very far away
            _say(f"it is not compared with hindsight: {e}")
    shown = forecast_report.ShownPlan(
        run, tuple(ranked), best, flags.risk, sources, launch, dropped, hindsight
    )
    if flags.json:
        print(json.dumps(shown.to_json(), indent=2))
    else:
        forecast_report.show(shown, Console())
    written = forecast_report.write(shown, flags.plot) if flags.plot else ()
    if written and not flags.json:
        print(f"drawn   {', '.join(map(str, written))}")
    return DONE if best else FAILED


# ---- prices --------------------------------------------------------------------------------------
def _offers(flags: PlanFlags, task: Task) -> tuple[tuple[Offer, ...], str]:
    """Return the task's offers, and a description of their catalog. Raises BadInput,
    CloudUnavailable."""
    home = Path(os.environ.get("SKY_RUNTIME_DIR") or Path.home())
    found = catalogs.catalog(flags.catalog, home)
    if flags.clouds:
        found = found.only(names_of(flags.clouds))
    config = {"resources": dict(task.resources), "num_nodes": task.num_nodes}
    with _sky_of(found) as sky:
        offers = catalogs.offers_of(sky, task.path, config, found)
    of = "" if found.ships else time.strftime(", of %Y-%m-%d", time.gmtime(found.of_s))
    return offers, f"prices: {found.what}{of}: {', '.join(sorted(found.files))}"


@contextmanager
def _sky_of(found: PriceCatalog) -> Iterator[Broker]:
    """Yield a caller of a SkyPilot that has this catalog and needs neither account nor network."""
    version = sky_private.catalog_version()
    with tempfile.TemporaryDirectory(prefix="harness-plan-") as folder:
        found.lay_out(Path(folder), version)
        env = {k: v for k, v in os.environ.items() if k != "SKY_RUNTIME_DIR"}
        sky = Broker({**env, "HOME": folder}, Path(folder) / "broker.log")
        try:
            yield sky
        finally:
            sky.close()


def _history(shapes: Sequence[NodeShape]) -> tuple[dict[str, CapacitySeen], str]:
    """Return what runs have seen of these offers' capacity, with times relative to now, and a
    description of it."""
    now_s = RealClock().now()
    kept, warnings = Histories(os.environ.get(SHARED, "")).read(now_s)
    names = [offer.name for shape in shapes for offer in shape.spot]
    before = kept.prior(now_s)
    found = {name: as_of(before[name], now_s) for name in names if name in before}
    words = f"capacity: what runs have seen of {len(found)} of {len(names)} spot offers"
    return found, "; ".join([f"{words} (`harness market show`)", *warnings])


# ---- the work ------------------------------------------------------------------------------------
def _planned(flags: PlanFlags, task: Task, shapes: Sequence[NodeShape]) -> tuple[PlannedRun, str]:
    """Return the planned run, and the source of its speed. Raises BadInput."""
    identity = None
    if flags.record:
        work, identity, speed = _recorded(flags, task)
    else:
        work, speed = _said(flags, task, shapes)
    run = PlannedRun(
        work,
        micro_batches=launch_plan.micro_batches(identity, task.envs) or 0,
        scaling=flags.scaling,
        changeover_s=flags.changeover_s,
        lost_s=flags.lost_s,
        deadline_h=_deadline_h(flags.deadline),
        budget_usd=flags.budget_usd,
    )
    return run, f"speed: {speed}"


def _said(flags: PlanFlags, task: Task, shapes: Sequence[NodeShape]) -> tuple[float, str]:
    """Return the work by the flags, in worker-seconds of speed 1, and its source. Raises
    BadInput."""
    shape = _measured_on(flags.measured_on, shapes)
    on, per_s = f"a node of {shape.name}", max(1, shape.gpus) * shape.speed
    if flags.work:
        hours = _duration_h("--work", flags.work)
        return hours * 3600 * per_s, f"{hours:g} h of work on {on}, as you say"
    steps = flags.steps or _steps_of(task)
    if flags.step_time is None or not steps:
        raise BadInput(
            "wanted how much work it is, found none: --step-time SECONDS --steps N (of a step on "
            f"{on}; --measured-on names another), --record URL of a canary that has made some "
            "steps, or --work 48h"
        )
    said = f"{flags.step_time:g} s for each of {steps} steps on {on}, as you say"
    return steps * flags.step_time * per_s, said


def _steps_of(task: Task) -> int:
    """Return the number of steps in the task's variable STEPS; 0 if it is not set."""
    text = task.envs.get("STEPS", "")
    return int(text) if text.isdecimal() else 0


def _measured_on(name: str, shapes: Sequence[NodeShape]) -> NodeShape:
    """Return the shape of that name; "" means the best value. The speed of a shape that is none of
    the task's is computed from its accelerator's peak. Raises BadInput."""
    if not name:
        return shapes[0]
    wanted = {name.lower(), f"{name.lower()}:1"}
    found = [shape for shape in shapes if shape.name.lower() in wanted]
    if found:
        return found[0]
    accelerator, _, count = name.partition(":")
    flops = peak_flops(accelerator)
    if flops is None or not (count or "1").isdecimal() or count == "0":
        raise BadInput(
            f"--measured-on {name}: wanted one of {', '.join(s.name for s in shapes)}, or another "
            "accelerator whose peak is known, such as H100:8"
        )
    return NodeShape(accelerator, int(count or 1), flops / H100_FLOPS, (), None)


def _recorded(flags: PlanFlags, task: Task) -> tuple[float, Mapping[str, Any] | None, str]:
    """Return the work by a run's step records, in worker-seconds of speed 1, that run's identity,
    and the source of the speed. Raises BadInput."""
    url = normalize(flags.record)
    identity, measured = timed_of(existing_store(url), url)
    steps = flags.steps or _steps_of(task)
    if measured is None:
        raise BadInput(
            f"--record {flags.record}: it has made no steps that could be timed; let it make some, "
            "or give --step-time"
        )
    if not steps:
        raise BadInput("--record tells how fast it was, not how much it is: add --steps N")
    work = steps * measured.step_s * measured.work_per_s
    return work, identity, f"{measured.step_s:.3g} s a step in {flags.record}, {steps} steps"


def _deadline_h(text: str) -> float | None:
    """Return a deadline in hours from now; `None` without one. Raises BadInput."""
    now_s = RealClock().now()
    at_s = deadline_at(text, now_s)
    if at_s is not None and at_s <= now_s:
        raise BadInput(f"--deadline {text}: wanted a time to come, found one that is over")
    return None if at_s is None else (at_s - now_s) / 3600


def _duration_h(name: str, text: str) -> float:
    hours: float = notice_sources.parse_duration(text) / 3600
    if hours <= 0:
        raise BadInput(f"{name} {text}: wanted a time above 0")
    return hours


# ---- forecasts -----------------------------------------------------------------------------------
def _forecasts(
    flags: PlanFlags,
    shapes: Sequence[NodeShape],
    counts: Sequence[int],
    run: PlannedRun,
    history: Mapping[str, CapacitySeen],
) -> tuple[list[PlanForecast], int]:
    """Screen all candidates in a few markets. Return the forecasts of the best ones in all markets,
    and how many candidates were dropped."""
    asked = forecasting.candidates(shapes, counts, flags.policy or _policies(run), run)
    with _mapping(flags.jobs) as each:
        some = each(_forecast_of(run, forecasting.SCREENED, flags.seed, history), asked)
        few = list(_told_of(some, len(asked), f"{forecasting.SCREENED} markets"))
        kept = forecasting.worth_more(few, run, flags.risk)
        again = [one.candidate for one in kept]
        every = each(_forecast_of(run, flags.markets, flags.seed, history), again)
        found = list(_told_of(every, len(again), f"{flags.markets} markets"))
    return found, len(asked) - len(found)


def _say(text: str) -> None:
    """Print progress where it does not mix with the result."""
    print(f"harness plan: {text}", file=sys.stderr, flush=True)


def _told_of(
    found: Iterable[PlanForecast], count: int, where: str, now: Callable[[], float] = time.monotonic
) -> Iterator[PlanForecast]:
    """Yield the forecasts, and show how far they are: a bar on a terminal, else a line at the
    beginning and every SAY_S."""
    _say(f"{count} choices, each in {where}")
    said_s, console = now(), Console(stderr=True)
    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        shown = bar.add_task("", total=count)
        for done, one in enumerate(found, 1):
            yield one
            bar.advance(shown)
            if not console.is_terminal and now() - said_s >= SAY_S and done < count:
                said_s = now()
                _say(f"{done} of {count} are forecast")


def _forecast_of(
    run: PlannedRun, markets: int, seed: int, history: Mapping[str, CapacitySeen]
) -> Callable[[PlanCandidate], PlanForecast]:
    return functools.partial(forecast, run=run, markets=markets, seed=seed, history=history)


@contextmanager
def _mapping(jobs: int) -> Iterator[Callable[..., Iterable[PlanForecast]]]:
    """Yield a `map` that runs in `jobs` processes; 0 means one per core, up to MOST_JOBS."""
    jobs = jobs or min(MOST_JOBS, os.cpu_count() or 1)
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def _policies(run: PlannedRun) -> tuple[str, ...]:
    """Return the policies that are tried without --policy."""
    if run.deadline_h is None:
        return "best_value", ON_DEMAND_ONLY
    return "deadline", "best_value", ON_DEMAND_ONLY


def _launch_words(flags: PlanFlags, run: PlannedRun, best: PlanCandidate) -> tuple[str, ...]:
    """Return the words of the `harness launch` command that carries out the plan."""
    words = ["harness", "launch", flags.task, "--cloud", "sky"]
    words += ["--nodes", f"1:{best.nodes}"]
    if best.policy == forecasting.ON_DEMAND_ONLY:
        words += ["--on-demand", "--policy", "harness.planner.forecast:on_demand_only"]
    elif best.policy == "deadline":
        words += ["--work", f"{run.hours(best.shape, best.nodes):.3g}h"]
    elif best.policy == "uniform_progress":
        hours = run.hours(best.shape, best.nodes)
        steps = flags.steps or "STEPS"
        asked = f"deadline_h={run.deadline_h or 0:.4g}&work_h={hours:.4g}&total_steps={steps}"
        asked += f"&changeover_s={run.changeover_s:g}"
        words += ["--policy", f"uniform_progress?{asked}"]
    else:
        words += ["--policy", best.policy]
    if flags.deadline and best.policy == "deadline":
        words += ["--deadline", flags.deadline]
    if flags.budget_usd is not None:
        words += ["--budget-usd", f"{flags.budget_usd:g}"]
    return (*words, *(word for pair in flags.env for word in ("--env", pair)))


# `harness plan --model`: the meshes that hold a model, what each GPU needs, and which to take.

SHOWN = 8
TOKENS = 1 << 22  # per step, without --global-batch
GB = 1e9


def plan_model(flags: PlanFlags, counts: Sequence[int]) -> int:
    """Print the meshes for each number of nodes. Exit status 1 if no mesh that can be trained holds
    the model."""
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
    """Return a model's shape, by its name or from a config.json. Raises BadInput, StoreError."""
    if "/" not in model:
        return named_shape(model)
    folder = model.removesuffix("/config.json")
    try:
        return shape_of(parsed(open_store(folder).get("config.json")))
    except (NotFound, BadObject) as e:
        raise BadInput(f"--model {model}: wanted a folder with a config.json: {e}") from e


def _gpus(text: str, nodes: int, network_gbit: float) -> PlannedGpus:
    """Parse the GPUs of a node, such as H100:8. Raises BadInput."""
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
    """Return the plan to take; `None` if no mesh that can be trained holds the model."""
    able = [plan for plan in plans if fits_memory(plan, gpus) and not _refused(plan)]
    return plan_to_take(able) if able else None


def _refused(plan: MeshPlan) -> str:
    """Return why a run cannot have this mesh; "" if it can."""
    try:
        mesh_of({name: size for name, size in vars(plan.mesh).items() if size > 1})
    except BadInput as e:
        return str(e)
    return ""


def _told(plan: MeshPlan, gpus: PlannedGpus) -> dict[str, Any]:
    return asdict(plan) | {
        "mesh": str(plan.mesh),
        "nbytes": {**asdict(plan.nbytes), "total": plan.nbytes.total},
        "fits": fits_memory(plan, gpus),
        "refused": _refused(plan),
    }


def _show(
    console: Console, gpus: PlannedGpus, plans: Sequence[MeshPlan], chosen: MeshPlan | None
) -> None:
    fit = [plan for plan in plans if fits_memory(plan, gpus)]
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
    """Return the bytes that a GPU holds, by kind, as text in GB."""
    return ", ".join(f"{kind} {n / GB:.3g}" for kind, n in vars(plan.nbytes).items())
