"""The report and `harness runs serve` in a real browser: no console error, values at the pointer, curves,
a phone's width, dark mode, print."""

import math
import random
import threading
from dataclasses import replace

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.core import facts as f
from harness.look.pages.run_index import RunsFolder
from harness.look.pages.speed_charts import _rank_band, loss_keys
from harness.look.pages.web_server import RunsServer
from harness.look.reports.report import write_html
from harness.look.reports.summary import summarize
from storage.stores.folder_store import MemoryStore
from support.chromium import browser, program
from support.histories import T0, whole_run

pytestmark = pytest.mark.skipif(program() is None, reason="there is no Chromium on this machine")
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
LOGS = {n: "\n".join(f"[0] {EVIL} step {i} " + "loss " * 40 for i in range(30)) for n in (1, 2)}


@pytest.fixture(scope="module")
def chrome():
    with browser() as one:
        yield one


@pytest.fixture
def tab(chrome):
    tab = chrome.tab()
    tab.size(1280, 900)
    return tab


@pytest.fixture(scope="module")
def history():
    """A whole run whose ranks and nodes measured themselves, and with hostile names."""
    history, rng = whole_run(evil=EVIL), random.Random(1)
    steps = [s.fact for s in read_facts(history.store) if isinstance(s.fact, f.StepDone)]
    timed = Journal(history.store, "worker-e000001-timed", lambda: T0 + 100)
    for s in (s for s in steps if s.epoch == 1):
        split = {p: s.seconds / len(f.PHASES) for p in f.PHASES}
        own, loss = (s.seconds, 1.1 * s.seconds, 1.2 * s.seconds), (s.loss - 0.1, s.loss, s.loss + 0.1)
        timed.record(f.StepsTimed(1, s.step, s.step, split, own, (0, 1), loss, (0, 1), None, 0.3))
    timed.flush()
    for member in history.members.values():
        told = Journal(history.store, f"agent-{member}-hw", lambda: T0 + 10 + 50 * rng.random())
        for _ in range(20):
            busy = {"gpu0/percent": 100 * rng.random(), "cpu/percent": 50 * rng.random()}
            told.record(f.NodeMeasured(member, 5.0, busy))
        told.flush()
    return history


@pytest.fixture(scope="module")
def report(history, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_html(summarize(history.store, now=lambda: history.t), path)
    return path.as_uri()


@pytest.fixture(scope="module")
def served(history):
    runs = {"first": history.store, EVIL.replace("/", "_"): whole_run().store}
    objects = {f"{name}/{key}": s.get(key) for name, s in runs.items() for key in s.list("")}

    def open_run(url):
        name = url.removeprefix("memory://runs").removeprefix("/")
        return MemoryStore(url, objects) if not name else runs[name]

    server = RunsServer(RunsFolder("memory://runs", open_run, read_logs=lambda url: (LOGS, "")))
    server.folder.start()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.url
    server.shutdown()
    server.server_close()
    server.folder.close()
    thread.join(10.0)


OVERFLOW = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
COLOUR = "getComputedStyle(document.body).backgroundColor"


def test_the_report_loads_without_a_word_and_runs_nothing_of_others(tab, report):
    tab.open(report)
    assert tab.said == []
    assert tab.run("document.querySelectorAll('img').length") == 0
    assert tab.run("document.querySelectorAll('svg.plot').length") >= 10
    blocked = "new Promise(d=>{const s=document.createElement('script');s.textContent='window.bad=1';"
    blocked += "document.body.append(s);setTimeout(()=>d(window.bad),50)})"
    assert tab.run(blocked) is None and "Content Security Policy" in tab.said[0]


def test_every_plot_of_the_report_tells_its_values(tab, report):
    tab.open(report)
    said = tab.hover("#loss svg.plot", 0.25)
    assert said.startswith("step 2") and "loss  2." in said and "ranks  " in said
    assert "generation 1: 2 ranks" in said
    for anchor, word in (
        ("money", "paid  $0."), ("step-time", "forward  "), ("scaling", "measured  "), ("hardware", "GPU 0  "),
    ):  # fmt: skip
        plot = f"#{anchor} svg.plot"
        points = [tab.hover(plot, x) for x in (0.2, 0.3, 0.5, 0.97)]
        assert any(word in text for text in points), (anchor, points)
    assert "node 1 · " in tab.hover("#nodes-over-time rect.b-useful")
    assert "useful: " in tab.hover("#where-billed-time-went .track:has(.b-useful)")
    assert tab.hover("footer") == ""
    assert tab.said == []


def test_the_report_on_a_phone(tab, report):
    tab.size(390, 800, touch=True)
    tab.open(report)
    assert not tab.run(OVERFLOW)
    assert "loss  " in tab.touch("#loss svg.plot", 0.25)
    wide = "[...document.querySelectorAll('section')].filter(s=>s.scrollWidth>s.clientWidth).length"
    assert tab.run(wide) == 0 and tab.said == []


def test_the_loss_lies_within_the_spread_of_the_ranks(history):
    """... which is known as means over windows of steps only."""
    summary = summarize(history.store, now=lambda: history.t)
    wide = replace(summary.speed.windows[0], first=1, last=30)
    some = replace(summary, speed=replace(summary.speed, windows=(wide,)))
    (band,) = _rank_band(some)
    loss = {p.step: p.loss for p in some.curve}
    assert list(band.xs) == list(loss)
    inside = [i for i, y in enumerate(band.ys) if math.isfinite(y)]
    assert [band.xs[i] for i in inside] == list(range(1, 31))
    assert all(band.low[i] <= loss[band.xs[i]] <= band.ys[i] for i in inside)
    apart = {round(band.ys[i] - band.low[i], 9) for i in inside}
    assert len(apart) == 1 and apart != {0.0}
    assert ("lost", "", "lost and redone") in loss_keys(some)


def test_dark_mode_is_the_systems_until_somebody_says_otherwise(tab, report):
    tab.open(report)
    light = tab.run(COLOUR)
    tab.media(prefers_color_scheme="dark")
    dark = tab.run(COLOUR)
    assert dark != light
    tab.run("document.getElementById('theme').click()")
    assert tab.run(COLOUR) == light
    tab.open(report)
    assert tab.run(COLOUR) == light  # remembered
    tab.run("document.getElementById('theme').click()")
    tab.media("print", prefers_color_scheme="dark")
    assert tab.run(COLOUR) == "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.media()
    tab.run("localStorage.clear()")


def test_the_report_prints(tab, report):
    tab.open(report)
    pages = tab.printed()
    assert pages.startswith(b"%PDF") and 2 <= pages.count(b"/Type /Page\n") <= 24


def test_the_served_table_and_curves(tab, served):
    tab.open(served)
    tab.until("document.querySelectorAll('#runs tbody tr').length == 2")
    tab.until("document.querySelectorAll('#chart path').length == 2")
    assert tab.run("document.querySelectorAll('img').length") == 0
    said = tab.hover("#chart svg", 0.5)
    assert said.startswith("step ") and "first  " in said
    for axis in ("tokens", "hours", "dollars"):
        tab.run(f"(e=>{{e.value='{axis}';e.dispatchEvent(new Event('input'))}})(axis)")
        assert tab.hover("#chart svg", 0.5).startswith(axis)
    tab.run("(e=>{e.value='validation';e.dispatchEvent(new Event('change'))})(metric)")
    tab.until("document.querySelector('#chart script').textContent.includes('\"first\"')")
    names = "[...document.querySelectorAll('#runs tbody a')].map(a=>a.textContent)"
    tab.run("document.querySelectorAll('#runs th')[1].click()")
    down = tab.run(names)
    tab.run("document.querySelectorAll('#runs th')[1].click()")
    assert tab.run(names) == down[::-1] and EVIL.replace("/", "_") in down
    tab.run("document.querySelector('#runs tbody input').click()")
    tab.until("document.querySelectorAll('#chart path').length == 1")
    tab.run("(e=>{e.value='first';e.dispatchEvent(new Event('input'))})(document.getElementById('find'))")
    assert tab.run(names) == ["first"]
    assert tab.said == []


def test_the_served_table_on_a_phone(tab, served):
    """Each run is a card: nothing lies beyond the edge, and each value has its name beside it."""
    tab.size(390, 800, touch=True)
    tab.open(served)
    tab.until("document.querySelectorAll('#chart path').length == 2")
    assert not tab.run(OVERFLOW)
    beyond = "[...document.querySelectorAll('#runs td')].filter(c=>c.getBoundingClientRect().right>390).length"
    assert tab.run(beyond) == 0
    tab.until("document.querySelector('#runs td[data-name=region]')?.offsetHeight")  # has a digest
    named = "[...document.querySelectorAll('#runs tr td')].filter(c=>c.offsetHeight).map(c=>c.dataset.name)"
    assert {"state", "step", "loss", "spent", "region", "last heartbeat"} <= set(tab.run(named))


def test_the_served_table_is_filtered_by_state_and_has_what_differs(tab, served):
    tab.open(served)
    tab.until("document.querySelectorAll('#runs tbody tr').length == 2")
    tab.until("document.querySelector('#only').options.length == 2")
    head = "[...document.querySelectorAll('#runs th')].map(h=>h.textContent)"
    assert {"region", "instance", "tags", "notes", "status"} <= set(tab.run(head))
    assert "lr" not in tab.run(head)  # the same in all
    row = "[...document.querySelectorAll('#runs tbody tr')].find(r=>r.textContent.includes('first')).textContent"
    assert "aws us-east-1" in tab.run(row) and "g6e.xlarge" in tab.run(row) and "simulated" in tab.run(row)
    choose = "(e=>{{e.value='{0}';e.dispatchEvent(new Event('change'))}})(document.getElementById('only'))"
    count = "document.getElementById('count').textContent"
    tab.run(choose.format("done"))
    assert tab.run(count) == "2 runs" and "only=done" in tab.run("location.hash")
    # another run's answer, as the server would give it
    tab.run(
        "(f=>{window.fetch=u=>f(u).then(r=>r.url.includes('/api/runs')&&r.ok?r.json().then(b=>{"
        "b.runs=[{...b.runs[0],id:'one',config:{lr:'0.1',seed:'1'},people:['ann'],notes:2,note:'why'},"
        "{...b.runs[0],id:'two',config:{lr:'0.2',seed:'1'},state:'failed',simulated:false}];"
        "return {ok:true,status:200,headers:r.headers,json:()=>Promise.resolve(b)}}):r)})(window.fetch)"
    )
    tab.run(choose.format(""))
    tab.until("[...document.querySelectorAll('#runs th')].some(h=>h.textContent=='lr')")
    assert "seed" not in tab.run(head)
    tab.run(choose.format("failed"))
    assert tab.run(count) == "1 of 2 runs"
    assert tab.run("document.querySelector('#runs tbody a').textContent") == "two"
    assert tab.said == []


def test_a_served_run_is_its_report(tab, served):
    tab.open(f"{served}run/first")
    tab.until("document.querySelector('#report section')")
    tab.until("document.getElementById('live').textContent.includes('done')")
    assert "loss  " in tab.hover("#loss svg.plot", 0.25)
    assert tab.run("document.querySelectorAll('img').length") == 0
    tab.until("document.querySelectorAll('#commands code').length == 2")
    commands = "[...document.querySelectorAll('#commands code')].map(c=>c.textContent)"
    assert tab.run(commands) == [f"harness {n} memory://runs/first" for n in ("logs", "runs report")]
    assert tab.said == []


@pytest.mark.parametrize("width", [1400, 390])
def test_a_served_run_has_the_logs_of_its_nodes(tab, served, width):
    tab.size(width, 900, touch=width < 640)
    tab.open(served)
    tab.until("document.querySelectorAll('#runs tbody tr').length == 2")  # the runs are known
    tab.open(f"{served}run/first")
    tab.until("document.querySelector('#report section')")
    assert tab.run("document.querySelectorAll('#logs pre').length") == 0  # read only when opened
    tab.run("document.querySelector('#logs summary').click()")
    tab.until("document.querySelectorAll('#logs pre').length == 2")
    heads = "[...document.querySelectorAll('#logs h3')].map(h=>h.textContent)"
    assert tab.run(heads) == ["node 2", "node 1"]
    assert EVIL in tab.run("document.querySelector('#logs pre').textContent")
    assert tab.run("document.querySelectorAll('#logs img, #logs script').length") == 0
    at_end = "(p=>p.scrollHeight>p.clientHeight&&p.scrollTop+p.clientHeight>=p.scrollHeight-1)"
    assert tab.run(f"{at_end}(document.querySelector('#logs pre'))")  # the newest lines are in view
    assert not tab.run(OVERFLOW) and tab.said == []
