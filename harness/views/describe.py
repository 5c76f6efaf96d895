"""What trackers are told of a run besides its numbers: configuration, environment, tags.

Read from the run's identity and facts, and from how it was set up (`core/setups.py`): its flags and
configuration, its git commit, its packages, its owner and purpose. Runs of older versions left part
of that in `trackers/machine.json`.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from harness.bucket.setups import newest_setup
from harness.bucket.streamed import MACHINE_KEY, machine_said
from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.masking import MASK
from harness.core.setups import PACKAGES, Setup, flags_of, script_of
from harness.core.values import BadObject
from harness.views.logbook import read_logbook
from harness.views.plugins import RunInfo
from storage.errors import NotFound
from storage.objects import ObjectStore

MOST_NOTES = 8000  # letters


def about_setup(setup: Setup) -> dict[str, Any]:
    """A run's setup as configuration; under "config" what `attach(config=...)` was given."""
    git = setup.git
    about: dict[str, Any] = {
        "script": script_of(setup.argv),
        "flags": {
            name.lstrip("-"): _value(text)
            for name, text in flags_of(setup.argv).items()
            if MASK not in text
        },
        "environment": {**setup.software, **setup.hardware, **setup.environment},
        "packages": {name: setup.packages[name] for name in PACKAGES if name in setup.packages},
        **setup.people,
    }
    if git.commit:
        about["git"] = {
            "commit": git.commit,
            "branch": git.branch,
            "remote": git.remote,
            "changed": bool(git.diff),
            **({"diff_sha256": git.diff} if git.diff else {}),
        }
    return {**about, "config": setup.config}


def _value(text: str) -> int | float | str | bool:
    """Of a flag; without a value it is True."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return (place_of(text)[:200] if "://" in text else text[:200]) or True


def notes_of(store: ObjectStore) -> str:
    """The run's purpose and its logbook, as a tracker's notes; the end of them, if there is much.
    Raises StoreError."""
    text = "\n".join(read_logbook(store).lines())
    return text if len(text) <= MOST_NOTES else f"...{text[-MOST_NOTES:]}"


def place_of(url: str) -> str:
    """A URL without what could be a secret: no user, no query."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


def left_by_node(store: ObjectStore) -> dict[str, Any]:
    """How the run is set up, as configuration; {}: nobody has said. Raises StoreError."""
    if (setup := newest_setup(store)) is not None:
        return about_setup(setup)
    try:
        return machine_said(store.get(MACHINE_KEY))
    except (NotFound, BadObject):
        return {}


def config_of(
    info: RunInfo, facts: Sequence[Stamped], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Flat where users filter by it, nested where they look it up. What `attach(config=...)` was
    given is flat; under "config" stays what would hide something of ours."""
    session = _last(facts, f.SessionStarted)
    asked = _last(facts, f.RunAsked)
    found: dict[str, Any] = dict(info.identity)
    if session:
        found |= {
            "total_steps": session.total_steps,
            "parallel": session.parallel,
            "device": session.device,
            "reduce": session.reduce,
        }
    if asked:
        found["launch"] = {
            "task": asked.task,
            "min_nodes": asked.min_nodes,
            "max_nodes": asked.max_nodes,
            "policy": asked.policy,
            "market": asked.market,
            "budget_usd": asked.budget_usd,
        }
    agents = [s.fact for s in facts if isinstance(s.fact, f.AgentStarted)]
    found["hardware"] = sorted({a.accelerator for a in agents if a.accelerator})
    found = dict(machine) | found
    mine = found.pop("config", None)
    given: dict[str, Any] = mine if isinstance(mine, dict) else {}
    hidden = {name: value for name, value in given.items() if found.get(name, value) != value}
    return {**given, **found, **({"config": hidden} if hidden else {})}


def tags_of(facts: Sequence[Stamped]) -> list[str]:
    """ "spot" or "on-demand", and the clouds of its nodes."""
    offers = [s.fact.offer for s in facts if isinstance(s.fact, f.AttemptIntended)]
    clouds = {str(o.get("name", "")).partition("/")[0] for o in offers} - {""}
    kinds = {"spot" if o.get("spot", True) else "on-demand" for o in offers}
    return sorted(kinds) + sorted(clouds)


def _last(facts: Sequence[Stamped], kind: type[Any]) -> Any:
    return next((s.fact for s in reversed(facts) if isinstance(s.fact, kind)), None)
