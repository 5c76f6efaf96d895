"""Dashboards as code: a workspace and a report of W&B for a project, from one table of charts.

`harness runs dashboards` builds both with wandb-workspaces; without network they can be written as
JSON, compared, and kept under version control. The names are those of `tracker_stream.py` and
`metric_rows.py`; steps are drawn over `train/step`, operations over `time/wall_s`.

The functions know wandb-workspaces; the table does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.facts import PHASES
from harness.ledger.bill import BUCKETS
from harness.look.trackers.wandb_api import Account, WandbSilent, post_query

STEP, TIME, USD = "train/step", "time/wall_s", "cost/usd_total"
TITLE = "Spot training"
ABOUT = (
    "What a run on spot machines did, what it cost, and what was lost. Made by `harness "
    "runs dashboards`; changes made by hand are overwritten by the next one."
)
VIEWS = """query HarnessViews($project: String!, $entity: String, $kind: String!) {
  project(name: $project, entityName: $entity) {
    allViews(viewType: $kind) { edges { node { id name displayName } } }
  }
}"""


@dataclass(frozen=True)
class LineChart:
    """Metrics over `x`. `regex`: also all metrics whose names match. `expression`: an expression of
    metrics, such as "${a} / ${b}"."""

    title: str
    y: tuple[str, ...] = ()
    x: str = STEP
    regex: str = ""
    expression: str = ""
    stacked: bool = False
    log: bool = False


@dataclass(frozen=True)
class Number:
    """The last value of one metric."""

    title: str
    metric: str


@dataclass(frozen=True)
class Bars:
    """The last values of some metrics, run by run."""

    title: str
    metrics: tuple[str, ...]


Drawn = LineChart | Number | Bars
SPREAD_LOSS, SPREAD_OWN = (
    tuple(f"ranks/{name}_{which}" for which in ("least", "median", "most"))
    for name in ("loss", "own_s")
)


def _gpu(ours: str, theirs: str) -> str:
    """Match a metric of every GPU, from agents or from W&B's client (if its stats are on)."""
    return rf"(^(node/[0-9]+/)?gpu[0-9]+/{ours}$|system\.gpu\..*\.{theirs}$)"


SECTIONS: tuple[tuple[str, tuple[Drawn, ...]], ...] = (
    (
        "Training",
        (
            LineChart("Loss", ("train/loss",)),
            LineChart("World (ranks): the same steps, shaded", ("train/world",), stacked=True),
            LineChart("Validation", regex="^val/"),
            LineChart("Loss of the ranks: least, median, most", SPREAD_LOSS, x="live/step"),
            LineChart("Gradient norm", ("train/grad_norm",), log=True),
            LineChart("Guards: steps at which one tripped", regex="^event/guard_step$", x=TIME),
            LineChart("Learning rate", ("train/lr",)),
            LineChart("Loss over dollars", ("live/loss",), x=USD),
            LineChart("Newest step, committed or not", ("live/step", "ckpt/step"), x=TIME),
        ),
    ),
    (
        "Speed",
        (
            LineChart("Samples per second", ("train/samples_per_s",)),
            LineChart("Tokens per second", regex="^(train|live)/tokens_per_s", x=TIME),
            LineChart("MFU and HFU", regex="^live/(mfu|hfu)$", x=TIME),
            LineChart("Seconds per step", ("train/step_s",)),
            LineChart(
                "Step time: where it goes",
                tuple(f"split/{phase}_s" for phase in PHASES),
                x=TIME,
                stacked=True,
            ),
            LineChart("A rank's own seconds: least, median, most", SPREAD_OWN, x=TIME),
            LineChart(
                "Samples per second and rank",
                expression="${train/samples_per_s} / ${train/world}",
            ),
        ),
    ),
    (
        "Goodput",
        (
            LineChart("Goodput so far", ("goodput/fraction",), x=TIME),
            LineChart(
                "Billed seconds, by what they went into",
                tuple(f"goodput/{b}_s" for b in BUCKETS),
                x=TIME,
                stacked=True,
            ),
            Bars(
                "Waterfall: dollars by what they went into",
                tuple(f"goodput/{b}_usd" for b in BUCKETS),
            ),
            LineChart("Steps lost", ("spot/steps_lost",), x=TIME),
        ),
    ),
    (
        "Spot",
        (
            LineChart("Nodes", ("world/nodes", "world/members"), x=TIME),
            # W&B draws history only as lines: one each for nodes that come, are noticed, and go
            LineChart(
                "Timeline: which node came, was noticed, was lost",
                ("event/node_up", "event/notice", "event/node_lost", "event/node_gone"),
                x=TIME,
            ),
            LineChart("Members by place", x=TIME, regex="^nodes/", stacked=True),
            LineChart(
                "Notices, losses, interruptions",
                ("spot/notices", "spot/losses", "spot/interruptions"),
                x=TIME,
            ),
            LineChart("Recoveries: seconds without a step", ("event/recovered_s",), x=TIME),
            LineChart(
                "Seconds to recover",
                ("spot/recover_last_s", "spot/recover_mean_s", "spot/recover_max_s"),
                x=TIME,
            ),
            Number("Resizes", "spot/resizes"),
            Number("Notices that a snapshot was in time for", "spot/notices_in_time"),
            LineChart("Alerts", x=TIME, regex="^alerts/(info|warning|critical)$"),
        ),
    ),
    (
        "Cost",
        (
            LineChart("Dollars per hour", ("cost/usd_per_h",), x=TIME),
            LineChart("Dollars, and the same on demand", (USD, "cost/on_demand_usd"), x=TIME),
            LineChart("Saved", ("cost/saved_usd",), x=TIME),
            LineChart("Dollars per 1000 steps", ("cost/usd_per_1k_steps",), x=TIME),
            LineChart("Dollars per million tokens", x=TIME, regex="^cost/usd_per_1m_tokens$"),
            LineChart("Dollars per million samples", ("cost/usd_per_1m_samples",), x=TIME),
            LineChart("Dollars by cloud", x=TIME, regex="^cost/usd_by_cloud/", stacked=True),
            LineChart(
                "Bucket: storage, egress, requests (estimates)",
                x=TIME,
                regex="^cost/(storage|egress|requests)_usd$",
            ),
            Number("Saved, of what on demand costs", "cost/saved_fraction"),
        ),
    ),
    (
        "Snapshots",
        (
            LineChart("Training stands still for a snapshot", ("ckpt/stall_s",), x=TIME),
            LineChart("Time to durable", ("ckpt/durable_s",), x=TIME),
            LineChart("Steps that no snapshot holds", ("ckpt/lag_steps",), x=TIME),
            LineChart("What snapshots cost the training", ("ckpt/cost_total_s",), x=TIME),
            LineChart(
                "Steps beside the sending are longer by", ("ckpt/throttle_slowdown",), x=TIME
            ),
            LineChart("Bytes per second that are not felt", ("ckpt/throttle_pace",), x=TIME),
            LineChart("Restores by tier", x=TIME, regex="^restore/from_", stacked=True),
            LineChart("Seconds of a restore", ("restore/last_s",), x=TIME),
            Number("Quarantined", "ckpt/quarantined"),
        ),
    ),
    (
        "Hardware",
        (
            LineChart("GPU utilisation", x=TIME, regex=_gpu("percent", "gpu")),
            LineChart("Idlest GPU", x=TIME, regex="^hardware/gpu_percent_min$"),
            LineChart("GPU memory", x=TIME, regex=_gpu("memory_percent", "memoryAllocated")),
            LineChart("GPU power", x=TIME, regex=_gpu("watts", "powerWatts")),
            LineChart("GPU temperature", x=TIME, regex=_gpu("celsius", "temp")),
            LineChart("Power of all GPUs (W)", x=TIME, regex="^hardware/gpu_watts$"),
            LineChart("CPU", x=TIME, regex="^node/[0-9]+/cpu/percent$"),
            LineChart("Host memory and disk", x=TIME, regex="^node/[0-9]+/(memory|disk)/percent$"),
            LineChart("Network (bytes per second)", x=TIME, regex="^node/[0-9]+/net/"),
            LineChart("Which node has which number", x=TIME, regex="^node/[0-9]+/number$"),
        ),
    ),
)


def _panel(wr: Any, chart: Drawn) -> Any:
    if isinstance(chart, Number):
        return wr.ScalarChart(title=chart.title, metric=wr.SummaryMetric(chart.metric))
    if isinstance(chart, Bars):
        return wr.BarPlot(title=chart.title, metrics=list(chart.metrics), orientation="v")
    more: dict[str, Any] = {}
    if chart.regex:
        more["metric_regex"] = chart.regex
    if chart.expression:
        more["custom_expressions"] = [chart.expression]
    if chart.stacked:
        more["plot_type"] = "stacked-area"
    if chart.log:
        more["log_y"] = True
    return wr.LinePlot(title=chart.title, x=chart.x, y=list(chart.y), **more)


def workspace(project: str, entity: str) -> Any:
    """Return a workspace of wandb-workspaces, without network access. Superseded runs
    (`wandb_run.py`) are left out."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    return ws.Workspace(
        entity=entity,
        project=project,
        name=TITLE,
        sections=[
            ws.Section(
                name=name,
                panels=[_panel(wr, chart) for chart in charts],
                is_open=i < 5,
                panel_settings=ws.SectionPanelSettings(x_axis=_axis(charts)),
            )
            for i, (name, charts) in enumerate(SECTIONS)
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, group_by_prefix="first", max_runs=20),
        runset_settings=ws.RunsetSettings(
            filters="Tags not in ['superseded']",
            pinned_columns=[
                f"summary:{name}" for name in ("train/step", "train/loss", USD, "goodput/fraction")
            ],
        ),
    )


def report(project: str, entity: str) -> Any:
    """Return the same charts as a page to read and share."""
    import wandb_workspaces.reports.v2 as wr

    # given an entity, a runset would request the project's number over the network
    blocks: list[Any] = [wr.TableOfContents(), wr.P(ABOUT)]
    for name, charts in SECTIONS:
        panels = [_panel(wr, chart) for chart in charts]
        blocks += [wr.H1(name), wr.PanelGrid(runsets=[wr.Runset(name="Runs")], panels=panels)]
    blocks += [
        wr.H1("Runs compared"),
        wr.PanelGrid(runsets=[wr.Runset(name="Runs")], panels=[wr.RunComparer(diff_only="split")]),
    ]
    return wr.Report(
        project=project, entity=entity, title=TITLE, description=ABOUT, blocks=blocks, width="fluid"
    )


def _axis(charts: Sequence[Drawn]) -> str:
    return next((c.x for c in charts if isinstance(c, LineChart)), STEP)


def definition(project: str = "spotharness", entity: str = "") -> dict[str, Any]:
    """Return both as W&B stores them, without random ids."""
    made = {"workspace": workspace(project, entity), "report": report(project, entity)}
    return {
        kind: _settled(
            json.loads(one._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
        )
        for kind, one in made.items()
    }


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _settled(v) for k, v in value.items() if k not in ("__id__", "id")}
    return [_settled(v) for v in value] if isinstance(value, list) else value


def save(account: Account, entity: str) -> list[str]:
    """Create both in the project, or replace those of an earlier call. Return their URLs.

    Raises WandbSilent, and the exceptions of wandb.
    """
    made = workspace(account.project, entity)
    if known := _known(account, entity, "project-view"):
        made._internal_id, made._internal_name = known
    made.save()
    page = report(account.project, entity)
    if known := _known(account, entity, "runs"):
        page.id = known[0]
    page.save()
    return [str(made.url), str(page.url)]


def _known(account: Account, entity: str, kind: str) -> tuple[str, str] | None:
    """Return id and name of the view that an earlier `save` made."""
    body = post_query(
        account.base_url,
        account.key,
        VIEWS,
        {"project": account.project, "entity": entity or None, "kind": kind},
    )
    try:
        project = body["data"]["project"] or {"allViews": {"edges": []}}
        nodes = [edge["node"] for edge in project["allViews"]["edges"]]
    except (KeyError, TypeError) as e:
        raise WandbSilent(f"{account.base_url}: wanted the project's views, found none") from e
    return next(((n["id"], n["name"]) for n in nodes if n["displayName"] == TITLE), None)
