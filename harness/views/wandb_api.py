"""W&B as far as this project asks it itself: which key, which account, and what a run there has.

Three small questions by HTTP. All that is written goes through wandb's own client
(`wandb_run.py`); what it says of success is not believed: the server is asked what it has.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import importlib.util
import json
import netrc
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.values import canonical, digest
from harness.core.world import BadInput, HarnessError

WANDB_TIMEOUT_S = 20.0  # to reach W&B
WANDB_URL = "https://api.wandb.ai"
ONE, GROUPED, OFF = NODES = ("one", "grouped", "off")  # HARNESS_WANDB_NODES
RUN = """query HarnessRun($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) {
    bucket(name: $name, missingOk: true) { id state historyLineCount historyTail }
  }
}"""


class WandbSilent(HarnessError):
    """W&B could not be asked, or did not understand."""


@dataclass(frozen=True)
class ServerRun:
    """What W&B has of a run. `rows`: lines of its history; `last_step`: `_step` of the last one,
    -1: none."""

    state: str
    rows: int
    last_step: int


@dataclass(frozen=True)
class Account:
    """Where W&B is told, and as whom. Offline: nobody is told, the stream is kept."""

    online: bool
    key: str = ""
    base_url: str = WANDB_URL
    project: str = "spotharness"
    entity: str | None = None
    name = "wandb"

    @property
    def id(self) -> str:
        """Names the place, not the key."""
        return digest(canonical([self.base_url, self.project, self.entity or ""]))[:16]

    def run(self, run_id: str) -> ServerRun | None:
        """None: there is no such run. Raises WandbSilent."""
        variables = {"project": self.project, "entity": self.entity, "name": run_id}
        body = ask(self.base_url, self.key, RUN, variables)
        try:
            found = (body["data"]["model"] or {}).get("bucket")
            if found is None:
                return None
            tail = [json.loads(line) for line in json.loads(found["historyTail"] or "[]")]
            last = max((int(row.get("_step", -1)) for row in tail), default=-1)
            return ServerRun(str(found["state"]), int(found["historyLineCount"] or 0), last)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            said = json.dumps(body)[:200]
            raise WandbSilent(
                f"{self.base_url}: wanted a run's state, found {said} ({type(e).__name__})"
            ) from None


def ask(base_url: str, key: str, query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """One bounded question by GraphQL. Raises WandbSilent, and HTTPError of what W&B refuses."""
    request = urllib.request.Request(
        base_url.rstrip("/") + "/graphql",
        data=json.dumps({"query": query, "variables": dict(variables)}).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": "Basic " + base64.b64encode(f"api:{key}".encode()).decode(),
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=WANDB_TIMEOUT_S) as answer:
            found = json.loads(answer.read(1 << 24))
    except urllib.error.HTTPError as e:
        raise WandbSilent(f"{base_url} answered HTTP {e.code}") from e
    except (OSError, ValueError, http.client.HTTPException) as e:  # no answer, or not one of W&B's
        raise WandbSilent(f"{base_url} cannot be reached ({type(e).__name__})") from None
    if not isinstance(found, dict):
        raise WandbSilent(f"{base_url}: wanted GraphQL, found something else")
    return found


def wandb_key(environ: Mapping[str, str], home: Path | None = None) -> str:
    """The key that W&B would find: the variable's, else that of `wandb login`, which is in
    .netrc. Empty: there is none."""
    if environ.get("WANDB_API_KEY"):
        return environ["WANDB_API_KEY"]
    home = home or Path(environ.get("HOME") or Path.home())
    host = urllib.parse.urlsplit(environ.get("WANDB_BASE_URL") or WANDB_URL).hostname or ""
    for path in (
        (Path(environ["NETRC"]),) if environ.get("NETRC") else (home / ".netrc", home / "_netrc")
    ):
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if found := netrc.netrc(str(path)).authenticators(host):
                return found[2] or ""
    return ""


def wandb_online(key: str, mode: str) -> bool:
    """A key alone is enough; WANDB_MODE may say otherwise."""
    return bool(key) and mode not in ("offline", "disabled", "dryrun")


def nodes_are(environ: Mapping[str, str]) -> str:
    """Where nodes' hardware is told: in the run that trains, in runs of their own, nowhere. Raises
    BadInput."""
    said = environ.get("HARNESS_WANDB_NODES") or ONE
    if said not in NODES:
        raise BadInput(
            f"HARNESS_WANDB_NODES: wanted one of {', '.join(NODES)}, found {said!r}; one: in the "
            "run that trains; grouped: in a W&B run for each node; off: not at all"
        )
    return said


def wandb_account(environ: Mapping[str, str]) -> Account:
    """Where the environment says. Online means known to work. Raises BadInput."""
    if importlib.util.find_spec("wandb") is None:
        raise BadInput(
            "tracker wandb: package wandb is not installed here; `pip install 'wandb>=0.31'`, or "
            "leave the tracker out"
        )
    key, mode = wandb_key(environ), environ.get("WANDB_MODE") or ""
    if mode == "online" and not key:
        raise BadInput(
            "tracker wandb: WANDB_MODE is online, but there is no key; set WANDB_API_KEY, or leave "
            "WANDB_MODE out"
        )
    nodes_are(environ)
    account = Account(
        wandb_online(key, mode),
        key,
        (environ.get("WANDB_BASE_URL") or WANDB_URL).rstrip("/"),
        environ.get("WANDB_PROJECT") or "spotharness",
        environ.get("WANDB_ENTITY") or None,
    )
    if account.online:
        check_key(account)
    return account


def check_key(account: Account) -> None:
    """Not wandb.login: that writes the key to ~/.netrc, and asks for ever while nobody
    answers. Raises BadInput."""
    hint = "check it and the network, or set WANDB_MODE=offline and sync later"
    try:
        found = ask(account.base_url, account.key, "query Viewer { viewer { id } }", {})
    except WandbSilent as e:
        if isinstance(e.__cause__, urllib.error.HTTPError) and e.__cause__.code in (401, 403):
            raise BadInput(
                f"tracker wandb: {account.base_url} did not accept WANDB_API_KEY (HTTP "
                f"{e.__cause__.code}); {hint}"
            ) from None
        raise BadInput(
            f"tracker wandb: W&B cannot be reached at {account.base_url} ({e}); {hint}"
        ) from None
    if not (found.get("data") or {}).get("viewer"):
        raise BadInput(f"tracker wandb: {account.base_url} does not know the WANDB_API_KEY; {hint}")


def viewer_of(account: Account) -> str:
    """The entity that the key belongs to. Raises WandbSilent."""
    found = ask(account.base_url, account.key, "query Viewer { viewer { id entity } }", {})
    try:
        return str(found["data"]["viewer"]["entity"])
    except (KeyError, TypeError):
        raise WandbSilent(f"{account.base_url}: wanted who the key is, found nobody") from None
