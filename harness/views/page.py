"""The report as one HTML page: hand-made SVG, a little inline script for tooltips, nothing from anywhere else.

Called by `report.write_html`. Everything that users, machines or clouds wrote goes through `esc`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from harness.views.charts import _loss_chart, _loss_legend, _timeline, _timeline_legend, esc
from harness.views.painting import BUCKETS, NANO
from harness.views.report import MEANING, attempt_end, money_rows, refusals, snapshot_rows, verdict
from harness.views.summary import Summary
from harness.views.words import clock, duration, money, number, percent, plural, spread, steps_text

TROUBLE_SHOWN = 30





def page(s: Summary) -> str:
    """The whole document."""
    name = s.url.rstrip("/").rsplit("/", 1)[-1] or s.url
    sections = [
        _section("Loss", _loss_chart(s), _loss_legend(s)),
        _section("Nodes over time", _timeline(s), _timeline_legend()),
        _section("Where billed time went", _goodput(s), percent(s.ledger.goodput) + " of billed time went into steps that count"),
        _section("Money", _money(s), "" if s.ledger.cost.known else "some on-demand prices are unknown; the paid price stands for them"),
        _section("Attempts", _attempts(s)),
        _section("Worlds", _epochs(s), "accum: micro-batches of the busiest rank. The global batch never changes."),
        _section("Notices", _notices(s)),
        _section("Snapshots", _snapshots(s)),
        _section("Trouble", _trouble(s)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{esc(name)} – spotharness report</title><style>{CSS}</style></head><body><main>"
        f"{_header(s, name)}{_cards(s)}{''.join(sections)}"
        f"<footer>{esc(s.url)} · times are UTC · made by spotharness from the facts in the bucket</footer></main>"
        f'<div id="tip" role="tooltip" hidden></div><script>{SCRIPT}</script></body></html>\n'
    )


def _section(title: str, body: str, note: str = "") -> str:
    if not body:
        return ""
    return f"<section><h2>{title}</h2>{f'<p class=note>{note}</p>' if note else ''}{body}</section>"


def _header(s: Summary, name: str) -> str:
    tone = {"done": "good", "finished": "good", "failed": "bad", "stopped": "warn"}.get(s.state, "live")
    problems = "".join(f"<p class=problem>{esc(p)}</p>" for p in s.problems)
    what = [esc(f"{clock(s.started_s)} – {clock(s.ended_s)}")]
    if s.asked:
        what.append(esc(s.asked.task))
    if s.session:
        size = f"global batch {s.session.global_batch} in micro-batches of {s.session.micro_batch}" if s.session.micro_batch else ""
        what += [esc(x) for x in (s.session.device, size) if x]
    reason = f"<p class=reason>{esc(s.reason)}</p>" if s.reason else ""
    return (
        f"<header><h1>{esc(name)} <span class='pill {tone}'>{esc(s.state)}</span></h1>"
        f"<p class=sub>{' · '.join(what)}</p>{reason}{problems}</header>"
    )


def _cards(s: Summary) -> str:
    ledger, cost = s.ledger, s.ledger.cost
    up = [a for a in ledger.attempts if a.up_s is not None]
    low, high = s.worlds
    steps = f"of {s.total_steps:,} committed" if s.total_steps else "committed"
    world = f"on {low} to {high} ranks" if low != high else f"on {plural(high, 'rank')}"
    cards = [("steps", f"{s.step:,}", steps)]
    if s.losses:
        cards.append(("loss", number(s.losses[1]), f"from {number(s.losses[0])}"))
    if s.validations:
        cards.append((s.validation_name.replace("_", " "), number(s.validations[1]), f"from {number(s.validations[0])}"))
    cards += [
        ("wall time", duration(s.wall_s), world),
        ("goodput", percent(ledger.goodput), f"of {duration(ledger.billed_s)} billed"),
        ("paid", money(cost.spot_usd), f"{percent(cost.saved)} less than on demand" if cost.on_demand_usd else ""),
        ("nodes", str(len(up)), f"{plural(sum(bool(e.steps) for e in ledger.epochs), 'world')}, {plural(len(ledger.notices), 'notice')}"),
        ("steps redone", str(ledger.steps_lost), f"{duration(ledger.ns['redone'] / NANO)} of node time"),
    ]
    shown = (f"<div><b>{esc(a)}</b><strong>{esc(b)}</strong><i>{esc(c)}</i></div>" for a, b, c in cards)
    return f"<div class=cards>{''.join(shown)}</div>"






























def _goodput(s: Summary) -> str:
    ledger = s.ledger
    if not ledger.billed_ns:
        return ""
    shares = {b: ledger.ns[b] / ledger.billed_ns for b in BUCKETS if ledger.ns[b]}
    bar = "".join(
        f'<div class="b-{b}" style="flex:{share:.5f} 0 0" data-tip="{b}: {percent(share)}">{percent(share) if share > 0.07 else ""}</div>'
        for b, share in shares.items()
    )
    rows = [
        [
            f"<u class='b-{b}'></u>{b}", f"<span class=wide>{MEANING[b]}</span>", percent(share), duration(ledger.ns[b] / NANO),
            esc(money(ledger.nusd[b] / NANO)),
        ]
        for b, share in shares.items()
    ]  # fmt: skip
    total = ["<b>billed</b>", "", "100 %", f"<b>{duration(ledger.billed_s)}</b>", f"<b>{esc(money(ledger.usd))}</b>"]
    return f"<div class=stack>{bar}</div>" + _html_table(["", "", "share", "node time", "$"], [*rows, total], right={2, 3, 4})


def _money(s: Summary) -> str:
    if not s.ledger.billed_ns:
        return ""
    rows = money_rows(s)
    most = max(usd for _, usd, _ in rows) or 1.0
    return "<div class=money>" + "".join(
        f"<div><span>{name}</span>"
        f"<div class=track><i class='{'paid' if i == 0 else 'ref'}' style='width:{100 * usd / most:.2f}%'></i></div>"
        f"<b>{esc(money(usd))}</b><em>{esc(note)}</em></div>"
        for i, (name, usd, note) in enumerate(rows)
    ) + "</div>"  # fmt: skip


# ---- tables -----------------------------------------------------------------------------------------------------
def _html_table(head: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> str:
    """Cells are HTML already."""

    def cells(row: Sequence[object], tag: str) -> str:
        return "".join(f"<{tag}{' class=r' if i in right else ''}>{c}</{tag}>" for i, c in enumerate(row))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"


def _attempts(s: Summary) -> str:
    used = [a for a in s.ledger.attempts if a.up_s is not None or a.end != "no-capacity"]
    refused = len(s.ledger.attempts) - len(used)
    if not used:
        return f"<p>{refusals(refused)}</p>" if refused else ""
    rows = []
    for a in used:
        tone = "bad" if a.end in ("failed", "preempted", "lost", "unfit") else "good" if a.end == "finished" else ""
        share = f"{percent(a.ns['useful'] / a.billed_ns)}" if a.billed_ns else "–"
        mini = "".join(f'<i class="b-{b}" style="flex:{a.ns[b]} 0 0"></i>' for b in BUCKETS if a.ns[b])
        rows.append(
            [
                esc(a.name),
                f"{esc(a.offer or '–')}<small>{esc(a.accelerator)}{'' if a.spot else ' on demand'} {money(a.usd_per_h)}/h</small>",
                "–" if a.up_s is None else "+" + duration(a.up_s - s.started_s),
                f"<span class='{tone}'>{esc(attempt_end(a))}</span>"
                + ("" if a.exit_code is None else f"<small>exit {esc(a.exit_code)}</small>"),
                duration(a.billed_s),
                f"<div class=mini>{mini}</div>",
                share,
                esc(money(a.usd)),
            ]
        )
    head = ["node", "offer", "up", "why it ended", "billed", "", "useful", "$"]
    return _html_table(head, rows, right={2, 4, 6, 7}) + (f"<p class=note>{refusals(refused)}</p>" if refused else "")


def _epochs(s: Summary) -> str:
    rows = [
        [
            esc(e.epoch), esc(e.world), esc(" ".join(e.attempts)) or "–", esc(e.accumulation or "–"), esc(spread(e.shares)) or "–",
            esc(steps_text(e)), esc(e.ended) or "goes on", f"<span class=bad>{esc(e.steps_lost)}</span>" if e.steps_lost else "0",
            duration(e.gap_s),
            duration(e.lost_s),
        ]
        for e in s.ledger.epochs
    ]  # fmt: skip
    head = ["epoch", "ranks", "nodes", "accum", "micro-batches", "steps", "why it ended", "steps lost", "began after", "end cost"]
    return _html_table(head, rows, right={0, 1, 3, 7, 8, 9}) if rows else ""


def _notices(s: Summary) -> str:
    rows = []
    for n in s.ledger.notices:
        tone = {True: "good", False: "bad", None: ""}[n.in_time]
        rows.append(
            [
                "+" + duration(n.seen_s - s.started_s), esc(n.attempt or n.member), esc(n.kind), esc(n.source), duration(n.grace_s),
                duration(n.commit_s), esc(n.step or "–"), f"<span class='{tone}'>{verdict(n.in_time, n.cancelled)}</span>",
            ]
        )  # fmt: skip
    return _html_table(["at", "node", "notice", "from", "grace", "committed after", "step", ""], rows, right={0, 4, 5, 6}) if rows else ""


def _snapshots(s: Summary) -> str:
    rows = snapshot_rows(s)
    return "<dl>" + "".join(f"<dt>{esc(a)}</dt><dd>{esc(b)}</dd>" for a, b in rows) + "</dl>" if rows else ""


def _trouble(s: Summary) -> str:
    out = []
    for m in s.marks[-TROUBLE_SHOWN:]:
        detail = f"<details><summary>last words</summary><pre>{esc(m.detail)}</pre></details>" if m.detail.strip() else ""
        out.append(f"<li><b>+{duration(m.t - s.started_s)} {esc(m.what)}</b> {esc(m.text)}{detail}</li>")
    return f"<ul class=trouble>{''.join(out)}</ul>" if out else ""


# ---- looks ------------------------------------------------------------------------------------------------------
CSS = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1a2230;--dim:#667085;--line:#e3e7ee;--grid:#dfe5ee;--accent:#2563eb;--world:#dbe7fb;
--good:#15803d;--bad:#d92d20;--warn:#b45309;--val:#9333ea;
--useful:#2e9f6b;--redone:#e5484d;--snapshot:#2f7de1;--start:#a78bfa;--reform:#f0a429;--drain:#22b8c8;--idle:#c3cad6;
--other:#8a94a6}
@media(prefers-color-scheme:dark){:root{--bg:#0e1218;--card:#161c25;--ink:#e7ecf3;--dim:#94a0b3;--line:#27303d;--grid:#2a3443;
--accent:#6ea8fe;--world:#20304b;--good:#4ade80;--bad:#ff7a73;--warn:#fbbf24;--val:#c792ff;
--useful:#38b27c;--redone:#f0625f;--snapshot:#4f97f5;--start:#9d86ee;--reform:#eba937;--drain:#2fb9c7;--idle:#465062;
--other:#76839a}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1180px;margin:0 auto;padding:28px 20px 40px}h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 4px}header{margin-bottom:18px}.sub,.note,.reason{color:var(--dim);margin:4px 0 0}
.reason{color:var(--ink)}
.note{font-size:13px;margin:0 0 10px}.problem{border-left:4px solid var(--warn);padding:6px 12px;background:var(--card);
margin:10px 0 0}
.pill{display:inline-block;vertical-align:3px;font-size:13px;font-weight:600;padding:1px 10px;border-radius:99px;
color:var(--card);background:var(--accent)}
.pill.good{background:var(--good)}.pill.bad{background:var(--bad)}.pill.warn{background:var(--warn)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(124px,1fr));gap:10px;margin-bottom:14px}
.cards div,section{background:var(--card);border:1px solid var(--line);border-radius:12px}
.cards div{padding:11px 12px;display:flex;flex-direction:column;min-width:0}.cards b{font-weight:500;font-size:12.5px;
color:var(--dim)}
.cards strong{font-size:18.5px;line-height:1.45;font-variant-numeric:tabular-nums;white-space:nowrap}
.cards i{font-style:normal;font-size:12.5px;color:var(--dim)}
section{padding:16px 18px 14px;margin-top:14px}.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
svg{display:block;width:100%;min-width:700px;height:auto}.legend svg{display:inline-block;width:auto;min-width:0;
vertical-align:-2px;margin-right:3px}
svg text{font-size:11.5px;fill:var(--dim);font-variant-numeric:tabular-nums}svg .strong{fill:var(--ink);font-weight:600}
.grid{stroke:var(--grid)}.base{stroke:var(--line)}.cut{stroke:var(--card)}.world{fill:var(--world)}
.curve,.lost,.valline{fill:none;stroke-width:1.8;stroke-linejoin:round}.curve{stroke:var(--accent)}
.lost{stroke:var(--redone);stroke-dasharray:4 3}.valline{stroke:var(--val);stroke-width:1;opacity:.55}.val{fill:var(--card);
stroke:var(--val);stroke-width:2}
.lostband{fill:var(--redone);opacity:.13}.losttab{fill:var(--redone);pointer-events:none}.cross{stroke:var(--dim);
stroke-dasharray:2 3;pointer-events:none}
.epoch{stroke:var(--ink);opacity:.38;stroke-dasharray:3 3;pointer-events:none}.hit{fill:transparent}.asked{stroke:var(--dim);
stroke-dasharray:2 3}
.hatchline{stroke:var(--line);stroke-width:5}.notice{fill:var(--warn);stroke:var(--card)}.kill{stroke:var(--bad);
stroke-width:2.6;fill:none;stroke-linecap:round}
.snap{fill:var(--card);stroke:var(--snapshot);stroke-width:2}
.b-useful{fill:var(--useful);background:var(--useful)}.b-redone{fill:var(--redone);background:var(--redone)}
.b-snapshot{fill:var(--snapshot);background:var(--snapshot)}.b-start{fill:var(--start);background:var(--start)}
.b-reform{fill:var(--reform);background:var(--reform)}.b-drain{fill:var(--drain);background:var(--drain)}
.b-idle{fill:var(--idle);background:var(--idle)}.b-other{fill:var(--other);background:var(--other)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center}
u{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;text-decoration:none;vertical-align:-1px}
.k-curve{height:3px;width:18px;vertical-align:3px;background:var(--accent)}.k-lost{height:3px;width:18px;vertical-align:3px;
background:var(--redone)}
.k-val{border-radius:50%;border:2px solid var(--val)}.k-world{background:var(--world);border:1px solid var(--line)}
.stack{display:flex;height:34px;border-radius:8px;overflow:hidden;margin:4px 0 12px;gap:1px}
.stack div{min-width:2px;color:#fff;font-size:12px;font-weight:600;display:flex;align-items:center;justify-content:center;
overflow:hidden;white-space:nowrap}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{font-weight:500;color:var(--dim);font-size:12.5px;text-align:left;white-space:nowrap}th,td{padding:6px 12px 6px 0;
border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}.r{text-align:right}td.r{white-space:nowrap}td small{display:block;color:var(--dim);
font-size:12px}
td .good{color:var(--good)}td .bad{color:var(--bad);font-weight:600}
.mini{display:flex;width:110px;height:9px;border-radius:4px;overflow:hidden;margin-top:6px}.mini i{min-width:0}
.money{display:grid;gap:9px}.money>div{display:grid;grid-template-columns:minmax(150px,270px) 1fr 84px minmax(110px,190px);
gap:12px;align-items:center}
.money b{text-align:right;font-variant-numeric:tabular-nums}.money em{font-style:normal;color:var(--dim);font-size:13px}
.track i{display:block;height:18px;border-radius:5px;min-width:2px}.paid{background:var(--useful)}.ref{background:var(--idle)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 20px;margin:6px 0 0}dt{color:var(--dim)}dd{margin:0}
.trouble{margin:6px 0 0;padding-left:18px;overflow-wrap:anywhere}pre{overflow-x:auto;font-size:12px;background:var(--bg);
padding:10px;border-radius:8px}
summary{cursor:pointer;color:var(--dim)}footer{color:var(--dim);font-size:12.5px;margin-top:18px;overflow-wrap:anywhere}
#tip{position:fixed;z-index:9;pointer-events:none;max-width:320px;background:var(--ink);color:var(--bg);font-size:12.5px;
line-height:1.4;
padding:6px 10px;border-radius:7px;white-space:pre-line;box-shadow:0 3px 14px #0004}#tip[hidden]{display:none}
@media(max-width:640px){main{padding:18px 12px 30px}section{padding:13px 13px 11px}.cards{grid-template-columns:repeat(2,1fr)}
.money>div{grid-template-columns:1fr auto;gap:2px 10px}.money .track{grid-column:1/-1;grid-row:2}.money b{grid-row:1;
grid-column:2}
.money em{grid-column:1/-1;grid-row:3}dl{grid-template-columns:1fr}dt{margin-top:4px}th,td{padding-right:14px}.wide{display:none}
table{width:max-content;min-width:100%}td{max-width:250px}td:first-child{white-space:nowrap}}
@media print{body{background:#fff}section,.cards div{break-inside:avoid}}
"""

SCRIPT = """
(function(){var tip=document.getElementById('tip');
function show(text,e){tip.textContent=text;tip.hidden=false;var w=tip.offsetWidth,h=tip.offsetHeight;
tip.style.left=Math.max(4,Math.min(e.clientX+14,innerWidth-w-6))+'px';
tip.style.top=(e.clientY+18+h>innerHeight?e.clientY-h-10:e.clientY+18)+'px';}
function hide(){tip.hidden=true;}
document.addEventListener('pointermove',function(e){if(e.target.closest('#loss'))return;var t=e.target.closest('[data-tip]');
if(t)show(t.getAttribute('data-tip'),e);else hide();});
document.addEventListener('pointerdown',function(e){var t=e.target.closest('[data-tip]');
if(t&&!e.target.closest('#loss'))show(t.getAttribute('data-tip'),e);});
var svg=document.getElementById('loss'),data=document.getElementById('lossdata');if(!svg||!data)return;
var d=JSON.parse(data.textContent),cross=document.getElementById('cross'),inner=d.width-d.left-d.right;
function over(e){var box=svg.getBoundingClientRect(),u=(e.clientX-box.left)/box.width*d.width,step=(u-d.left)/inner*d.last+.5,best=null;
d.rows.forEach(function(r){if(!best||Math.abs(r[0]-step)<Math.abs(best[0]-step))best=r;});if(!best)return;
var x=d.left+(best[0]-.5)/d.last*inner;cross.setAttribute('x1',x);cross.setAttribute('x2',x);
cross.setAttribute('visibility','visible');
var val=best[5]==null?'':'\\n'+d.val+' '+(+best[5].toPrecision(6));
var t='step '+best[0]+'\\nloss '+best[1]+val+'\\nepoch '+best[2]+', '+best[3]+' ranks\\n'+best[4]+' s';
var own=e.target.getAttribute&&e.target.getAttribute('class')==='lostband'?e.target.getAttribute('data-tip'):null;
show(own?t+'\\n'+own:t,e);}
svg.addEventListener('pointermove',over);svg.addEventListener('pointerdown',over);
svg.addEventListener('pointerleave',function(){cross.setAttribute('visibility','hidden');hide();});})();
"""
