"""The page's tables: attempts, worlds, notices, snapshots, trouble."""

from __future__ import annotations

from harness.views.page_html import PageSection, html_table, numbers, section
from harness.views.painting import BUCKETS
from harness.views.plots import esc
from harness.views.report import attempt_end, refusals, snapshot_rows, verdict
from harness.views.rows import BAD_ENDS, AttemptRow
from harness.views.summary import Summary
from harness.views.words import duration, money, percent, spread, steps_text

TROUBLE_SHOWN = 30


def attempts(s: Summary) -> PageSection | None:
    used = [a for a in s.ledger.attempts if a.up_s is not None or a.end != "no-capacity"]
    refused = len(s.ledger.attempts) - len(used)
    note = refusals(refused) if refused else ""
    if not used:
        return section("Attempts", f"<p>{note}</p>" if note else "")
    head = ["node", "offer", "up", "why it ended", "billed", "", "useful", "$"]
    rows = [_attempt(a, s) for a in used]
    return section("Attempts", html_table(head, rows, right={2, 4, 6, 7}), note)


def _attempt(a: AttemptRow, s: Summary) -> list[str]:
    tone = "bad" if a.end in BAD_ENDS else "good" if a.end == "finished" else ""
    mini = "".join(f'<i class="b-{b}" style="flex:{a.ns[b]} 0 0"></i>' for b in BUCKETS if a.ns[b])
    price = f"{money(a.usd_per_h)}/h" if a.usd_per_h else "price unknown"
    return [
        esc(a.name),
        f"{esc(a.offer or '–')}<small>{esc(a.accelerator)}{'' if a.spot else ' on demand'} "
        f"{price}</small>",
        "–" if a.up_s is None else "+" + duration(a.up_s - s.started_s),
        f"<span class='{tone}'>{esc(attempt_end(a))}</span>"
        + ("" if a.exit_code is None else f"<small>exit {esc(a.exit_code)}</small>"),
        duration(a.billed_s),
        f"<div class=mini>{mini}</div>",
        percent(a.ns["useful"] / a.billed_ns) if a.billed_ns else "–",
        esc(money(a.usd)),
    ]


def worlds(s: Summary) -> PageSection | None:
    rows = [
        [
            esc(e.epoch),
            esc(e.world),
            esc(" ".join(e.attempts)) or "–",
            esc(e.accumulation or "–"),
            esc(spread(e.shares)) or "–",
            esc(steps_text(e)),
            esc(e.ended) or "goes on",
            f"<span class=bad>{esc(e.steps_lost)}</span>" if e.steps_lost else "0",
            duration(e.gap_s),
            duration(e.lost_s),
        ]
        for e in s.ledger.epochs
    ]
    head = ["epoch", "ranks", "nodes", "accum", "micro-batches", "steps", "why it ended"]
    head += ["steps lost", "began after", "end cost"]
    note = "accum: micro-batches of the busiest rank. The global batch never changes."
    body = html_table(head, rows, right={0, 1, 3, 7, 8, 9}) if rows else ""
    return section("Worlds", body, note)


def notices(s: Summary) -> PageSection | None:
    rows = [
        [
            "+" + duration(n.seen_s - s.started_s),
            esc(n.attempt or n.member),
            esc(n.kind),
            esc(n.source),
            duration(n.grace_s),
            duration(n.commit_s),
            esc(n.step or "–"),
            f"<span class='{ {True: 'good', False: 'bad', None: ''}[n.in_time] }'>"
            f"{verdict(n.in_time, n.cancelled)}</span>",
        ]
        for n in s.ledger.notices
    ]
    head = ["at", "node", "notice", "from", "grace", "committed after", "step", ""]
    return section("Notices", html_table(head, rows, right={0, 4, 5, 6}) if rows else "")


def snapshots(s: Summary) -> PageSection | None:
    return section("Snapshots", numbers(snapshot_rows(s)))


def trouble(s: Summary) -> PageSection | None:
    out = []
    for m in s.marks[-TROUBLE_SHOWN:]:
        detail = (
            f"<details><summary>last words</summary><pre>{esc(m.detail)}</pre></details>"
            if m.detail.strip()
            else ""
        )
        out.append(
            f"<li><b>+{duration(m.t - s.started_s)} {esc(m.what)}</b> {esc(m.text)}{detail}</li>"
        )
    return section("Trouble", f"<ul class=trouble>{''.join(out)}</ul>" if out else "")
