"""`harness plan`: how long, how much, at what risk, before a launch; on which mesh."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.common import DONE, FAILED, RealClock, existing_store, names_of
from harness.cli.deadline import deadline_text
from harness.core.config import flag, positional
from harness.core.world import BadInput, Offer
from storage.opening import normalize
from storage.text import Console

if TYPE_CHECKING:
    from harness.clouds.catalogs import PriceCatalog
    from harness.clouds.sky_client import Broker
    from harness.clouds.tasks import Task
    from harness.core.known import CapacitySeen
    from harness.proof.forecasting import (
        NodeShape,
        PlanCandidate,
        PlanForecast,
        PlannedRun,
    )

MOST_JOBS = 4


def _counts(text: str) -> tuple[int, ...]:
    """LOW:HIGH or N, as numbers of nodes that double. Raises ValueError that says what is
    wanted."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal()) or not 1 <= int(low) <= int(high or low):
        raise ValueError(f"wanted LOW:HIGH or N, such as 1:8; found {text!r}")
    found, last = [int(low)], int(high or low)
    while found[-1] < last:
        found.append(min(last, 2 * found[-1]))
    return tuple(found)


@dataclass(frozen=True)
class PlanFlags:
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
    """What a run will take and cost, on how many nodes of what, by which policy, at what risk: from
    a catalog of prices, without account or network. Exit status 1 if the risk cannot be kept."""
    from harness.clouds import tasks
    from harness.proof import forecast_drawing, forecast_shown, forecasting, market_drawing

    counts = _counts(flags.nodes)
    if bool(flags.model) is bool(flags.task):
        raise BadInput("wanted either a task file, or --model NAME; `harness plan --help`")
    if flags.model:
        from harness.cli.plan_model import plan_model

        return plan_model(flags, counts)
    if flags.plot:
        market_drawing.plot_paths(flags.plot)  # what cannot be written is said at once
    given = tasks.pairs(flags.env, os.environ)
    task = tasks.load(flags.task, {"RUN": "none", **given})
    offers, prices = _offers(flags, task)
    shapes = forecasting.shapes(offers)
    run, speed = _planned(flags, task, shapes)
    history, seen = _history(shapes)
    found, dropped = _forecasts(flags, shapes, counts, run, history)
    ranked = forecasting.ranked(found, run, flags.risk)
    best = ranked[0] if forecasting.risk(ranked[0], run) <= flags.risk + 1e-9 else None
    launch = _launch_words(flags, run, best.candidate) if best else ()
    sources = (prices, speed, seen)
    shown = forecast_shown.ShownPlan(run, tuple(ranked), best, flags.risk, sources, launch, dropped)
    if flags.json:
        print(json.dumps(shown.to_json(), indent=2))
    else:
        forecast_shown.show(shown, Console())
    written = forecast_drawing.write(shown, flags.plot) if flags.plot else ()
    if written and not flags.json:
        print(f"drawn   {', '.join(map(str, written))}")
    return DONE if best else FAILED


# ---- prices --------------------------------------------------------------------------------------
def _offers(flags: PlanFlags, task: Task) -> tuple[tuple[Offer, ...], str]:
    """What the task could have, and by what catalog. Raises BadInput."""
    from harness.clouds import catalogs

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
    """Who speaks with a SkyPilot that has this catalog, no account, and no wish for a network."""
    from harness.clouds.sky_client import Broker

    version = str(importlib.import_module("sky.skylet.constants").CATALOG_SCHEMA_VERSION)
    with tempfile.TemporaryDirectory(prefix="harness-plan-") as folder:
        found.lay_out(Path(folder), version)
        env = {k: v for k, v in os.environ.items() if k != "SKY_RUNTIME_DIR"}
        sky = Broker({**env, "HOME": folder}, Path(folder) / "broker.log")
        try:
            yield sky
        finally:
            sky.close()


def _history(shapes: Sequence[NodeShape]) -> tuple[dict[str, CapacitySeen], str]:
    """What runs have seen of these offers, on a clock that is 0 now."""
    from harness.cli.market import SHARED, Histories
    from harness.proof.forecasting import as_of

    now_s = RealClock().now()
    kept, warnings = Histories(os.environ.get(SHARED, "")).read(now_s)
    names = [offer.name for shape in shapes for offer in shape.spot]
    before = kept.prior(now_s)
    found = {name: as_of(before[name], now_s) for name in names if name in before}
    words = f"capacity: what runs have seen of {len(found)} of {len(names)} spot offers"
    return found, "; ".join([f"{words} (`harness market show`)", *warnings])


# ---- the work ------------------------------------------------------------------------------------
def _planned(flags: PlanFlags, task: Task, shapes: Sequence[NodeShape]) -> tuple[PlannedRun, str]:
    """What is to be done, and where its speed is from. Raises BadInput."""
    from harness.controller import plan as plans
    from harness.proof.forecasting import PlannedRun

    identity = None
    if flags.record:
        work, identity, speed = _recorded(flags, task)
    else:
        work, speed = _said(flags, task, shapes)
    run = PlannedRun(
        work,
        micro_batches=plans.micro_batches(identity, task.envs) or 0,
        scaling=flags.scaling,
        changeover_s=flags.changeover_s,
        lost_s=flags.lost_s,
        deadline_h=_deadline_h(flags.deadline),
        budget_usd=flags.budget_usd,
    )
    return run, f"speed: {speed}"


def _said(flags: PlanFlags, task: Task, shapes: Sequence[NodeShape]) -> tuple[float, str]:
    """The work in worker-seconds of speed 1, by the flags."""
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
    """As the task's own STEPS says; 0: it does not."""
    text = task.envs.get("STEPS", "")
    return int(text) if text.isdecimal() else 0


def _measured_on(name: str, shapes: Sequence[NodeShape]) -> NodeShape:
    """The shape of that name; "": the best value. One that the task does not ask for is known by
    its accelerator's peak. Raises BadInput."""
    from harness.clouds.sky_offers import H100_FLOPS
    from harness.core.hardware import peak_flops
    from harness.proof.forecasting import NodeShape

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
    """The same by a run's step records; and that run's identity."""
    from harness.cli.dry_run import timed_of

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
    """Hours from now. Raises BadInput."""
    from harness.cli.deadline import deadline_at

    now_s = RealClock().now()
    at_s = deadline_at(text, now_s)
    if at_s is not None and at_s <= now_s:
        raise BadInput(f"--deadline {text}: wanted a time to come, found one that is over")
    return None if at_s is None else (at_s - now_s) / 3600


def _duration_h(name: str, text: str) -> float:
    from harness.agent import sources

    hours: float = sources.duration(text) / 3600
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
    """Of the candidates that are best in a few markets, in all; and how many were dropped."""
    from harness.proof import forecasting

    asked = forecasting.candidates(shapes, counts, flags.policy or _policies(run), run)
    with _mapping(flags.jobs) as each:
        few = list(each(_forecast_of(run, forecasting.SCREENED, flags.seed, history), asked))
        kept = forecasting.worth_more(few, run, flags.risk)
        again = [one.candidate for one in kept]
        found = list(each(_forecast_of(run, flags.markets, flags.seed, history), again))
    return found, len(asked) - len(found)


def _forecast_of(
    run: PlannedRun, markets: int, seed: int, history: Mapping[str, CapacitySeen]
) -> Callable[[PlanCandidate], PlanForecast]:
    from harness.proof.forecasting import forecast

    return functools.partial(forecast, run=run, markets=markets, seed=seed, history=history)


@contextmanager
def _mapping(jobs: int) -> Iterator[Callable[..., Iterable[PlanForecast]]]:
    """`map`, on so many processes."""
    jobs = jobs or min(MOST_JOBS, os.cpu_count() or 1)
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def _policies(run: PlannedRun) -> tuple[str, ...]:
    """What is tried when nobody says."""
    from harness.proof.forecasting import ON_DEMAND_ONLY

    if run.deadline_h is None:
        return "best_value", ON_DEMAND_ONLY
    return "deadline", "best_value", ON_DEMAND_ONLY


def _launch_words(flags: PlanFlags, run: PlannedRun, best: PlanCandidate) -> tuple[str, ...]:
    """The command that does as the plan says."""
    from harness.proof import forecasting

    words = ["harness", "launch", flags.task, "--cloud", "sky"]
    words += ["--nodes", f"1:{best.nodes}"]
    if best.policy == forecasting.ON_DEMAND_ONLY:
        words += ["--on-demand", "--policy", "harness.proof.forecasting:on_demand_only"]
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
