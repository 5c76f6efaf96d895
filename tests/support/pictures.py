"""The pictures of the README and docs/REPORT.md, from the story that tests tell too:

    PYTHONPATH=.:tests python tests/support/pictures.py

writes docs/pictures/terminal.svg (`harness status` while a node is being taken), nodes.svg (a part
of `harness runs report`), postmortem.svg (its second interruption), and market.svg (a part of `harness
market simulate --trace FILE --plot FILE`, of a made-up market).
"""

import io
import re
from pathlib import Path

import numpy as np
from rich.console import Console

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.core import facts as f
from harness.look.pages.html_parts import asset
from harness.look.pages.lane_chart import picture, timeline
from harness.look.reports.live_view import LiveView
from harness.look.reports.summary import summarize
from harness.planner.market_charts import svg, timeline_figure
from harness.planner.market_nodes import ReplayJob
from harness.planner.policy_report import story_of
from harness.planner.policy_table import run_table
from harness.planner.synthetic_market import make_up, usual_zones
from storage.stores.folder_store import MemoryStore
from support.histories import T0, whole_run

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
MOMENT_S = 100.5  # of the story: a node has had its notice
# rich's, without fonts from elsewhere and without a window around it
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {terminal_width} {terminal_height}"
 xmlns="http://www.w3.org/2000/svg"><style>
.{unique_id}-matrix {{font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
 line-height: {line_height}px; font-variant-east-asian: full-width}}
{styles}</style><defs>{lines}</defs>
<rect width="100%" height="100%" rx="10" fill="#161c25"/>
<g transform="translate(12, 10)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def live_store() -> MemoryStore:
    """The story until MOMENT_S, with what a policy and the ranks said."""
    store = MemoryStore("memory://s3", {})
    by_writer: dict[str, list[f.Fact]] = {}
    for s in read_facts(whole_run().store):
        if s.t <= T0 + MOMENT_S:
            by_writer.setdefault(s.writer, []).append(s)
    wait = "no offer within 1.5 x the cheapest; next look in 30 s"
    by_writer["controller-1"].append(f.Stamped(T0 + 88, "", f.Decided("wait", wait)))
    shares = (0.03, 0.29, 0.46, 0.11, 0.06, 0.01, 0.01, 0.03)
    split = {phase: 0.81 * share for phase, share in zip(f.PHASES, shares, strict=True)}
    own, loss = (0.6, 0.62, 0.71), (2.2, 2.3, 2.4)
    timed = f.StepsTimed(2, 36, 49, split, own, (0, 2), loss, (0, 2), None, 0.31, 64, 8192)
    by_writer.setdefault("worker-e000002-ab", []).append(f.Stamped(T0 + 99, "", timed))
    for writer, facts in by_writer.items():
        moments = iter([s.t for s in facts])
        journal = Journal(store, writer, moments.__next__)
        for s in facts:
            journal.record(s.fact)
        journal.flush()
    return store


def terminal() -> str:
    store = live_store()
    view = LiveView(store, Console(quiet=True), lambda: T0 + MOMENT_S)
    view.read()
    view.controller, store.url = True, "s3://my-bucket/runs/gpt"
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)
    console.print(view.screen(), highlight=False)
    drawn = console.export_svg(code_format=FORMAT, unique_id="terminal")
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn).groups())
    return re.sub(r'viewBox="[^"]*"', f'viewBox="0 0 {width + 24:.0f} {height + 20:.0f}"', drawn, count=1)


def nodes() -> str:
    """In the colours of the light page."""
    history = whole_run()
    drawn = timeline(summarize(history.store, now=lambda: history.t))
    return alone(re.search(r"<svg.*</svg>", drawn, re.S)[0])


def postmortem() -> str:
    """A notice, its snapshot, and the node that came later."""
    history = whole_run()
    story = summarize(history.store, now=lambda: history.t)
    return picture(story.postmortem.interruptions[1], story.ledger.attempts)


def market() -> str:
    """A published policy beside the optimum, on three made-up zones."""
    rng = np.random.default_rng(11)
    zones = tuple(make_up(usual_zones(3, rng), 48.0, rng, tick_s=600.0))
    found = run_table({"three zones": zones}, [ReplayJob(24.0, 27.0)], ["uniform_progress"], 1, 1)
    return svg(timeline_figure(story_of(found).timelines[0]))


def alone(picture: str) -> str:
    """A picture of a page, without the page."""
    style = re.sub(r"light-dark\((#\w+),#\w+\)", r"\1", asset("page.css"))
    style = style.partition("@media")[0] + "svg{font-family:system-ui,sans-serif;background:#fff}"
    picture = re.sub(r' data-tip="[^"]*"', "", picture)
    picture = re.sub(r" (\w+)=([\w-]+)(?=[ />])", r' \1="\2"', picture)  # as XML has it
    return picture.replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1
    ).replace(">", f"><style>{style}</style>", 1)  # fmt: skip


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for make in (terminal, nodes, postmortem, market):
        (PICTURES / f"{make.__name__}.svg").write_text(make(), encoding="utf-8")
        print(PICTURES / f"{make.__name__}.svg")
