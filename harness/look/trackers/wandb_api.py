"""This project's own queries to W&B: the key, its account, and the state of a run there.

They are three small HTTP requests. All writes go through wandb's own client (`wandb_run.py`), but
its reports of success are not trusted: the server is queried for what it has.
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

from harness.core.world import BadInput, HarnessError
from storage.canonical_json import canonical, digest

WANDB_TIMEOUT_S = 20.0  # timeout of a request to W&B
WANDB_URL = "https://api.wandb.ai"
ONE, GROUPED, OFF = NODES = ("one", "grouped", "off")  # HARNESS_WANDB_NODES
RUN = """query HarnessRun($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) {
    bucket(name: $name, missingOk: true) { id state historyLineCount historyTail }
  }
}"""


class WandbSilent(HarnessError):
    """W&B could not be reached, or its answer was not usable."""


@dataclass(frozen=True)
class ServerRun:
    """The state of a run at W&B. `rows`: number of lines of its history; `last_step`: `_step` of
    the last line, -1: none."""

    state: str
    rows: int
    last_step: int


@dataclass(frozen=True)
class Account:
    """The W&B server, project and key to publish with. If not `online`, nothing is published and
    the stream is kept."""

    online: bool
    key: str = ""
    base_url: str = WANDB_URL
    project: str = "spotharness"
    entity: str | None = None
    name = "wandb"

    @property
    def id(self) -> str:
        """A hash of the server, project and entity, but not of the key."""
        return digest(canonical([self.base_url, self.project, self.entity or ""]))[:16]

    def run(self, run_id: str) -> ServerRun | None:
        """Return a run's state, or `None` if W&B does not have it. Raise WandbSilent."""
        variables = {"project": self.project, "entity": self.entity, "name": run_id}
        body = post_query(self.base_url, self.key, RUN, variables)
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


def post_query(base_url: str, key: str, query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Send one GraphQL query. Raise WandbSilent (from an HTTPError if W&B refused the query)."""
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
    except (OSError, ValueError, http.client.HTTPException) as e:  # no answer, or a malformed one
        raise WandbSilent(f"{base_url} cannot be reached ({type(e).__name__})") from None
    if not isinstance(found, dict):
        raise WandbSilent(f"{base_url}: wanted GraphQL, found something else")
    return found


def wandb_key(environ: Mapping[str, str], home: Path | None = None) -> str:
    """Return the key that wandb would find: WANDB_API_KEY, else the one that `wandb login` stored
    in .netrc. "" means that there is none."""
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
    """Return whether W&B is used online: there is a key, and `mode` (WANDB_MODE) allows it."""
    return bool(key) and mode not in ("offline", "disabled", "dryrun")


def nodes_are(environ: Mapping[str, str]) -> str:
    """Return where the nodes' hardware metrics are published: `ONE` (in the training's run),
    `GROUPED` (in separate runs) or `OFF` (nowhere). Raise BadInput for another value."""
    said = environ.get("HARNESS_WANDB_NODES") or ONE
    if said not in NODES:
        raise BadInput(
            f"HARNESS_WANDB_NODES: wanted one of {', '.join(NODES)}, found {said!r}; one: in the "
            "run that trains; grouped: in a W&B run for each node; off: not at all"
        )
    return said


def wandb_account(environ: Mapping[str, str]) -> Account:
    """Return the account that the environment selects. An online one has been verified. Raise
    BadInput if it cannot be used."""
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
    """Raise BadInput unless W&B accepts the account's key. `wandb.login` is not used: it writes the
    key to ~/.netrc, and waits forever if the server does not answer."""
    hint = "check it and the network, or set WANDB_MODE=offline and sync later"
    try:
        found = post_query(account.base_url, account.key, "query Viewer { viewer { id } }", {})
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
    """Return the entity that the key belongs to. Raise WandbSilent."""
    found = post_query(account.base_url, account.key, "query Viewer { viewer { id entity } }", {})
    try:
        return str(found["data"]["viewer"]["entity"])
    except (KeyError, TypeError):
        raise WandbSilent(f"{account.base_url}: wanted who the key is, found nobody") from None
