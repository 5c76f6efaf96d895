"""`harness postmortem`: what happened at each interruption, what it cost and what it saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from harness.cli.common import DONE, existing_store
from harness.core.config import flag, positional
from harness.core.given_files import output_file
from harness.core.world import BadInput
from storage.text import Console


@dataclass(frozen=True)
class PostmortemFlags:
    url: str = positional("URL of the run")
    number: str = positional(
        "of the interruption to tell in full; may be left out: all, as a table", nargs="?"
    )
    all: bool = flag(False, "tell every interruption in full")
    out: str = flag("", "write a page with a picture of each to this file", check=output_file)
    json: bool = flag(False, "print the numbers as JSON instead")


def postmortem(flags: PostmortemFlags) -> int:
    """What happened at each interruption, moment by moment, what it cost and what it saved."""
    from harness.views.postmortem_page import postmortem_page
    from harness.views.postmortem_text import as_json, details, overview
    from harness.views.summary import summarize

    number = _number(flags.number)
    summary, console = summarize(existing_store(flags.url)), Console()
    pm, attempts = summary.postmortem, summary.ledger.attempts
    chosen = pm.interruptions
    if number is not None:
        chosen = tuple(one for one in pm.interruptions if one.number == number)
        if not chosen:
            raise BadInput(
                f"interruption {number}: this run has had {len(pm.interruptions) or 'none'}; "
                "leave the number out to see which"
            )
    if flags.json:
        print(json.dumps(as_json(pm if number is None else pm.only(number)), indent=2))
        return DONE
    if number is None:
        console.print(overview(pm, summary.started_s), highlight=False)
    for one in chosen if flags.all or number is not None else ():
        console.print(details(one, attempts), highlight=False)
    if flags.out:
        shown = pm if number is None else pm.only(number)
        path = Path(flags.out)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = postmortem_page(summary.url, shown, attempts, summary.started_s)
        path.write_text(text, encoding="utf-8")
        console.print(f"\npost-mortem  {flags.out}", highlight=False, soft_wrap=True)
    return DONE


def _number(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or not int(text):
        raise BadInput(f"{text!r}: wanted the number of an interruption (1, 2, ...)")
    return int(text)
