"""What trackers are told of a run besides its numbers: configuration, environment, tags.

Read from the run's identity and facts, and from rank 0's machine: its git commit, its packages, and
such environment variables as are no secrets. The publisher there leaves it in the bucket, for those
that run elsewhere:

    trackers/machine.json
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import shlex
import subprocess
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bucket.streamed import MACHINE_KEY, machine_said
from harness.core import facts as f
from harness.core.facts import Stamped
from harness.core.values import BadObject
from harness.views.plugins import RunInfo
from storage.errors import NotFound
from storage.objects import ObjectStore

SAID = re.compile(r"(HARNESS|SKYPILOT|CUDA|NCCL|TORCH|OMP)_[A-Z0-9_]+")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|INFO|URL|URI|IPS|ALERT", re.IGNORECASE)
PACKAGES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "flash-attn",
    "numpy",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "safetensors",
    "spotharness",
    "tokenizers",
    "torch",
    "torchao",
    "torchdata",
    "transformers",
    "triton",
)
HIDDEN = re.compile(
    r"(^|[-_])(key|token|secret|passw\w*|credentials?|auth)$", re.IGNORECASE
)  # names of flags
GIT_S = 10.0


def machine_of(environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Of this process."""
    return {"environment": environment(environ), "packages": packages(), "git": git(folder)}


def script_of(words: str) -> dict[str, Any]:
    """The script's name, and its flags as values: "--lr 0.1 --fast" -> {"lr": 0.1, "fast": True}.
    What may be a secret is left out, by its name; of URLs only the place is told."""
    given = shlex.split(words)
    if given[:1] == ["-m"]:
        given = given[1:]
    if not given:
        return {}
    flags: dict[str, Any] = {}
    name = ""
    for word in given[1:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = _value(value) if equals else True
            name = "" if equals else name
        elif name:
            flags[name], name = _value(word), ""
    told = {k: v for k, v in flags.items() if not HIDDEN.search(k)}
    return {"script": Path(given[0]).name, "flags": told}


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return place_of(text)[:200] if "://" in text else text[:200]


def place_of(url: str) -> str:
    """A URL without what could be a secret: no user, no query."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", ""))


def left_by_node(store: ObjectStore) -> dict[str, Any]:
    """What rank 0's publisher said of its machine; {}: nothing. Raises StoreError."""
    try:
        return machine_said(store.get(MACHINE_KEY))
    except (NotFound, BadObject):
        return {}


def config_of(
    info: RunInfo, facts: Sequence[Stamped], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Flat where users filter by it, nested where they look it up."""
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
    return found | dict(machine)


def tags_of(facts: Sequence[Stamped]) -> list[str]:
    """ "spot" or "on-demand", and the clouds of its nodes."""
    offers = [s.fact.offer for s in facts if isinstance(s.fact, f.AttemptIntended)]
    clouds = {str(o.get("name", "")).partition("/")[0] for o in offers} - {""}
    kinds = {"spot" if o.get("spot", True) else "on-demand" for o in offers}
    return sorted(kinds) + sorted(clouds)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Python, platform, and the variables that say how the run was set up."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in sorted(environ):
        if SAID.fullmatch(name) and not SECRET.search(name):
            found[name] = environ[name][:200]
    return found


def packages() -> dict[str, str]:
    """Versions of what a result depends on, of what is installed here."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git(folder: Path) -> dict[str, Any]:
    """Commit and state of the work tree that holds `folder`; {}: it is in none. Of what is not
    committed only a hash leaves this machine."""

    def said(*words: str) -> str | None:
        try:
            out = subprocess.run(
                ["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return out.stdout if out.returncode == 0 else None

    commit = said("rev-parse", "HEAD")
    if not commit:
        return {}
    diff = said("diff", "HEAD") or ""
    found: dict[str, Any] = {"commit": commit.strip(), "changed": bool(diff.strip())}
    if diff.strip():
        found["diff_sha256"] = hashlib.sha256(diff.encode()).hexdigest()
    branch = said("rev-parse", "--abbrev-ref", "HEAD")
    return found | ({"branch": branch.strip()} if branch else {})


def _last(facts: Sequence[Stamped], kind: type[Any]) -> Any:
    return next((s.fact for s in reversed(facts) if isinstance(s.fact, kind)), None)
