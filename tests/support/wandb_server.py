"""W&B on loopback: the GraphQL and file-stream calls that wandb 0.31's own process makes.

    with WandbServer() as server:                       in a test
        environ = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.key}
    python -m support.wandb_server --port 8080    to try trackers by hand

It keeps in memory what W&B would: runs with their history, summary, config, files, alerts and
artifacts. `LoopbackRun.problems` names what the real one would silently do harm with: a line that
was overwritten by another one, a gap, steps that do not grow. What is not known of the real server
is chosen plainly: state "crashed" after `crashed_after_s` without a word, "killed" for exit code
255 (Ctrl-C).

Knows W&B's protocol only; nothing of runs, buckets or trackers.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import itertools
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from storage.http_server import BoundedHandler, BoundedHTTPServer, HTTPBounds

BOUNDS = HTTPBounds(head_s=120.0, request_s=120.0)  # W&B's process keeps its connections
MOST_BODY_NBYTES = 256 << 20
CRASHED_AFTER_S = 300.0  # without a post
HISTORY, EVENTS, SUMMARY = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json"
Json = dict[str, Any]


@dataclass
class LoopbackRun:
    """One run as the server knows it."""

    name: str  # the run's id, as users see it
    project: str
    entity: str
    storage_id: str
    config: Json = field(default_factory=dict)
    summary: Json = field(default_factory=dict)
    about: Json = field(default_factory=dict)  # displayName, groupName, jobType, notes, tags, ...
    lines: dict[str, list[str]] = field(default_factory=dict)  # by stream file
    files: dict[str, bytes] = field(default_factory=dict)
    alerts: list[Json] = field(default_factory=list)
    used: list[str] = field(default_factory=list)  # artifacts, by id
    logged: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # exit codes of all ends
    rewinds: list[int] = field(default_factory=list)  # steps that were kept
    upserts: int = 0
    heard_s: float = 0.0
    exit_code: int | None = None
    stopped: bool = False  # the Stop button

    @property
    def history(self) -> list[Json]:
        """Rows, in order."""
        return [json.loads(line) for line in self.lines.get(HISTORY, [])]

    def values(self) -> Json:
        """The configuration as the user gave it."""
        return {k: v.get("value") for k, v in self.config.items() if k != "_wandb"}

    def write(self, name: str, offset: int, content: list[str]) -> None:
        if name == SUMMARY:
            self.summary = json.loads(content[-1])
            return
        lines = self.lines.setdefault(name, [])
        if offset > len(lines):
            self.problems.append(f"{name}: lines {len(lines)}-{offset - 1} are missing")
            lines += ["{}"] * (offset - len(lines))
        for i, line in enumerate(content, offset):
            if i == len(lines):
                lines.append(line)
            elif lines[i] != line:
                if _without_runtime(lines[i]) != _without_runtime(line):
                    self.problems.append(f"{name}: line {i} was overwritten by another one")
                lines[i] = line
        if name == HISTORY:
            steps = [json.loads(line).get("_step", -1) for line in lines[max(0, offset - 1) :]]
            if any(b <= a for a, b in itertools.pairwise(steps)):
                self.problems.append(f"{name}: steps do not grow: {steps[:20]}")

    def rewind(self, step: int) -> None:
        lines = self.lines.get(HISTORY, [])
        self.lines[HISTORY] = [x for x in lines if json.loads(x).get("_step", 0) <= step]
        self.rewinds.append(step)


def _without_runtime(line: str) -> Json:
    return {k: v for k, v in json.loads(line).items() if k != "_runtime"}


@dataclass
class Artifact:
    """One version of a collection."""

    id: str
    kind: str
    collection: str
    digest: str
    version: int
    metadata: Json
    by: str  # the run that logged it
    aliases: list[str] = field(default_factory=list)
    manifest: bytes = b""
    committed: bool = False


class WandbServer:
    """All of it; a context manager. Fields may be read and changed at any time."""

    def __init__(
        self,
        key: str = "local" * 8,
        entity: str = "someone",
        now: Callable[[], float] = time.time,
        crashed_after_s: float = CRASHED_AFTER_S,
        port: int = 0,
    ):
        self.key, self.entity, self.now, self.crashed_after_s = key, entity, now, crashed_after_s
        self.can_rewind = True
        self.deleted: set[str] = set()  # ids of runs that somebody deleted: refused with 409
        self.stale: dict[str, int] = {}  # run id -> rows that a resume is told of, at most
        self.runs: dict[str, LoopbackRun] = {}
        self.views: list[Json] = []  # of UpsertView2: workspaces and reports
        self.artifacts: list[Artifact] = []
        self.calls: list[str] = []  # operations and paths, in order
        self.misunderstood: list[str] = []  # what a newer client asks and this server does not know
        self._faults: list[list[Any]] = []  # [pattern, status, times left]
        self._lock = threading.RLock()
        self._http = BoundedHTTPServer("127.0.0.1", port, _handler(self), BOUNDS)

    def __enter__(self) -> WandbServer:
        self._http.serve_in_thread("wandb-server")
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def fail(self, pattern: str, status: int, times: int) -> None:
        """Answer the next `times` calls whose operation or path matches with an HTTP status."""
        self._faults.append([pattern, status, times])

    def state(self, run_id: str) -> str:
        """As W&B's pages show it."""
        run = self.runs[run_id]
        if run.exit_code is not None:
            return {0: "finished", 255: "killed"}.get(run.exit_code, "failed")
        return "crashed" if self.now() - run.heard_s > self.crashed_after_s else "running"

    def aliases(self, collection: str) -> dict[str, str]:
        """alias -> version, of one collection of artifacts."""
        mine = [a for a in self.artifacts if a.collection == collection and a.committed]
        return {alias: f"v{a.version}" for a in mine for alias in a.aliases}

    # ---- what comes in ---------------------------------------------------------------------------
    def answer(self, method: str, path: str, key: str, body: bytes) -> tuple[int, bytes]:
        """HTTP status and body."""
        asked: Json = json.loads(body) if path == "/graphql" else {}
        found = re.search(r"\b(?:query|mutation)\s+(\w+)", asked.get("query", ""))
        operation = found[1] if found else path
        with self._lock:
            self.calls.append(operation)
            for fault in self._faults:
                if fault[2] > 0 and re.search(fault[0], operation):
                    fault[2] -= 1
                    return fault[1], b'{"error": "on purpose"}'
            if path == "/graphql":
                return self._graphql(operation, asked.get("variables") or {}, key)
            if path.startswith("/upload/"):
                return self._uploaded(path, body)
            parts = path.strip("/").split("/")
            if len(parts) == 5 and parts[0] == "files" and parts[4] == "file_stream":
                if key != self.key:
                    return 401, b'{"error": "who are you?"}'
                return self._stream(parts[3], json.loads(body))
        return 404, b"{}"  # telemetry of the client, and what newer ones ask

    def _graphql(self, operation: str, v: Json, key: str) -> tuple[int, bytes]:
        handler = getattr(self, f"_on_{operation}", None)
        if operation == "Viewer" and key != self.key:
            return 200, b'{"data": {"viewer": null}}'
        if key != self.key:
            return 401, b'{"errors": [{"message": "user is not logged in"}]}'
        if handler is None:
            message = f"the loopback server does not know {operation}"
            self.misunderstood.append(message)
            return 200, json.dumps({"data": None, "errors": [{"message": message}]}).encode()
        try:
            found = handler(v)
        except (KeyError, StopIteration, TypeError, ValueError) as e:
            message = f"{operation}: {type(e).__name__} {e} with {json.dumps(v)[:500]}"
            self.misunderstood.append(message)
            return 200, json.dumps({"data": None, "errors": [{"message": message}]}).encode()
        return found if isinstance(found, tuple) else (200, json.dumps({"data": found}).encode())

    def _stream(self, run_id: str, body: Json) -> tuple[int, bytes]:
        run = self.runs.get(run_id)
        if run is None or run_id in self.deleted:
            return 404, b'{"error": "run not found"}'
        run.heard_s, run.exit_code = self.now(), None
        for name, part in (body.get("files") or {}).items():
            run.write(name, int(part["offset"]), part["content"])
        if body.get("complete"):
            run.exit_code = int(body.get("exitcode") or 0)
            run.ends.append(run.exit_code)
        return 200, b'{"stopped": true}' if run.stopped else b"{}"

    def _uploaded(self, path: str, body: bytes) -> tuple[int, bytes]:
        _, _, kind, name, *rest = path.split("/")
        if kind == "run" and name in self.runs:
            self.runs[name].files[urllib.parse.unquote("/".join(rest))] = body
        for artifact in self.artifacts:
            if kind == "manifest" and artifact.id == name:
                artifact.manifest = body
        return 200, b""

    # ---- runs ------------------------------------------------------------------------------------
    def _on_Viewer(self, v: Json) -> Json:
        return {
            "viewer": {
                "id": "viewer",
                "entity": self.entity,
                "username": self.entity,
                "email": f"{self.entity}@localhost",
                "flags": "{}",
                "teams": {"edges": []},
            }
        }

    def _on_ServerFeaturesQuery(self, v: Json) -> Json:
        return {"serverInfo": {"features": []}}

    def _on_UpsertBucket(self, v: Json) -> Json | tuple[int, bytes]:
        name = v.get("name") or next(
            (r.name for r in self.runs.values() if r.storage_id == v.get("id")), "anonymous"
        )
        if name in self.deleted:
            return 409, b'{"errors": [{"message": "run was deleted"}]}'
        inserted = name not in self.runs
        run = self.runs.setdefault(
            name,
            LoopbackRun(
                name,
                v.get("project") or "uncategorized",
                v.get("entity") or self.entity,
                storage_id=base64.b64encode(f"Run:v1:{name}".encode()).decode(),
                heard_s=self.now(),
            ),
        )
        run.upserts += 1
        if v.get("config"):
            run.config.update(json.loads(v["config"]))
        if v.get("summaryMetrics"):
            run.summary = json.loads(v["summaryMetrics"])
        wanted = ("displayName", "groupName", "jobType", "notes", "tags", "host", "program")
        run.about.update({k: v[k] for k in (*wanted, "commit", "repo") if v.get(k) is not None})
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": inserted}}

    def _bucket(self, run: LoopbackRun) -> Json:
        """The fields of a run that any of the client's questions names."""
        history = run.lines.get(HISTORY, [])[: self.stale.get(run.name)]
        events = run.lines.get(EVENTS, [])
        return {
            "id": run.storage_id,
            "name": run.name,
            "displayName": run.about.get("displayName") or run.name,
            "description": None,
            "project": {"id": "p", "name": run.project, "entity": {"id": "e", "name": run.entity}},
            "config": json.dumps(run.config),
            "sweepName": None,
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(history),
            "eventsLineCount": len(events),
            "logLineCount": len(run.lines.get("output.log", [])),
            "historyTail": json.dumps(history[-1:]),
            "eventsTail": json.dumps(events[-1:]),
            "tags": run.about.get("tags") or [],
            "notes": run.about.get("notes"),
            "wandbConfig": json.dumps({"t": run.config.get("_wandb", {})}),
            "state": self.state(run.name),
        }

    def _on_RunResumeStatus(self, v: Json) -> Json:
        run = self.runs.get(v["name"])
        entity = v.get("entity") or self.entity
        known = run is not None and (run.project, run.entity) == (v.get("project"), entity)
        return {
            "model": {
                "id": "p",
                "name": v.get("project"),
                "entity": {"id": "e", "name": entity},
                "bucket": self._bucket(run) if run and known else None,
            }
        }

    _on_HarnessRun = _on_RunResumeStatus  # what harness/look/trackers/wandb_run.py reads back

    def _on_RewindRun(self, v: Json) -> Json:
        run = self.runs.get(v["runName"])
        if not self.can_rewind or run is None:
            return {"rewindRun": None}
        run.rewind(int(v["metricValue"]))
        return {"rewindRun": {"rewoundRun": self._bucket(run)}}

    def _on_CreateRunFiles(self, v: Json) -> Json:
        files = [
            {"name": f, "uploadUrl": f"{self.url}/upload/run/{v['run']}/{urllib.parse.quote(f)}"}
            for f in v["files"]
        ]
        return {"createRunFiles": {"runID": v["run"], "uploadHeaders": [], "files": files}}

    def _on_NotifyScriptableRunAlert(self, v: Json) -> Json:
        self.runs[v["runName"]].alerts.append(v)
        return {"notifyScriptableRunAlert": {"success": True}}

    # ---- artifacts -------------------------------------------------------------------------------
    def _on_CreateArtifact(self, v: Json) -> Json:
        given = v["input"]
        collection, digest = given["artifactCollectionName"], given["digest"]
        aliases = [a["alias"] for a in given.get("aliases") or []]
        mine = [a for a in self.artifacts if a.collection == collection]
        found = next((a for a in mine if a.digest == digest and a.committed), None)
        if found is None:
            found = Artifact(
                base64.b64encode(f"Artifact:{len(self.artifacts)}".encode()).decode(),
                given.get("artifactTypeName") or "",
                collection,
                digest,
                len(mine),
                json.loads(given.get("metadata") or "{}"),
                given.get("runName") or "",
            )
            self.artifacts.append(found)
        for other in mine:
            other.aliases = [a for a in other.aliases if a not in aliases]
        found.aliases = [*dict.fromkeys([*found.aliases, *aliases])]
        if run := self.runs.get(found.by):
            run.logged.append(found.id)
        latest = next((a for a in reversed(mine) if a.committed), None)
        return {
            "createArtifact": {
                "artifact": {
                    "id": found.id,
                    "state": "COMMITTED" if found.committed else "PENDING",
                    "artifactSequence": {
                        "id": f"S{collection}",
                        "latestArtifact": latest
                        and {"id": latest.id, "versionIndex": latest.version},
                    },
                }
            }
        }

    def _on_CreateArtifactManifest(self, v: Json) -> Json:
        url = f"{self.url}/upload/manifest/{v['artifactID']}"
        manifest = {
            "id": f"M{v['artifactID']}",
            "file": {"id": "f", "name": v["name"], "uploadUrl": url, "uploadHeaders": []},
        }
        return {"createArtifactManifest": {"artifactManifest": manifest}}

    _on_UpdateArtifactManifest = _on_CreateArtifactManifest

    def _on_CommitArtifact(self, v: Json) -> Json:
        artifact = next(a for a in self.artifacts if a.id == v["artifactID"])
        artifact.committed = True
        return {"commitArtifact": {"artifact": {"id": artifact.id, "digest": artifact.digest}}}

    def _on_ArtifactType(self, v: Json) -> Json:
        name = str(v["name"]).rpartition("/")[2].partition(":")[0]
        kind = next((a.kind for a in self.artifacts if a.collection == name), None)
        found = {"artifactType": {"name": kind}} if kind else None
        return {"project": {"artifact": found}}

    def _on_UseArtifact(self, v: Json) -> Json:
        given = v.get("input") or v  # from the core process, or from Python
        self.runs[given["runName"]].used.append(given["artifactID"])
        return {"useArtifact": {"artifact": {"id": given["artifactID"]}}}

    def _on_ArtifactByID(self, v: Json) -> Json:
        a = next(a for a in self.artifacts if a.id == v["id"])
        run = self.runs.get(a.by)
        project = {
            "id": "p",
            "internalId": "p",
            "name": run.project if run else "uncategorized",
            "entity": {"name": run.entity if run else self.entity},
        }
        of = {"name": a.collection, "project": project, "__typename": "ArtifactSequence"}
        aliases = [
            {"id": alias, "alias": alias, "__typename": "ArtifactAlias", "artifactCollection": of}
            for alias in a.aliases
        ]
        return {
            "artifact": {
                "__typename": "Artifact",
                "id": a.id,
                "artifactSequence": of,
                "versionIndex": a.version,
                "artifactType": {"name": a.kind},
                "metadata": json.dumps(a.metadata),
                "ttlDurationSeconds": 0,
                "ttlIsInherited": True,
                "tags": [],
                "state": "COMMITTED" if a.committed else "PENDING",
                "size": 0,
                "digest": a.digest,
                "digestAlgorithm": "MANIFEST_MD5",
                "fileCount": 1,
                "createdAt": "2026-01-01T00:00:00Z",
                "aliases": aliases,
                **dict.fromkeys(("description", "historyStep", "commitHash", "updatedAt")),
            }
        }

    def _on_ArtifactMembershipByName(self, v: Json) -> Json:
        """By "collection:alias"."""
        collection, _, alias = str(v["name"]).partition(":")
        mine = [a for a in self.artifacts if a.collection == collection and alias in a.aliases]
        if not mine:
            return {"project": {"artifactCollectionMembership": None}}
        artifact = self._on_ArtifactByID({"id": mine[-1].id})["artifact"]
        kept = ("id", "versionIndex", "createdAt", "aliases")
        found = {k: artifact[k] for k in kept} | {"__typename": "ArtifactCollectionMembership"}
        found |= {"artifact": artifact, "artifactCollection": artifact["artifactSequence"]}
        return {"project": {"artifactCollectionMembership": found}}

    # ---- workspaces and reports ------------------------------------------------------------------
    def _on_UpsertView2(self, v: Json) -> Json:
        found = next((o for o in self.views if o["id"] == v.get("id")), None)
        if found is None:
            found = {"id": f"V{len(self.views)}", "name": v.get("name") or "view"}
            self.views.append(found)
        found.update({k: value for k, value in v.items() if value is not None})
        project = {"id": "p", "name": v.get("projectName"), "entityName": v.get("entityName")}
        view = {k: found.get(k) for k in ("id", "name", "type", "displayName", "spec")}
        view |= {"description": found.get("description") or "", "project": project}
        return {"upsertView": {"view": view}}

    _on_upsertView = _on_UpsertView2

    def _on_GetProjects(self, v: Json) -> Json:
        names = {r.project for r in self.runs.values()} | {o["projectName"] for o in self.views}
        more = {"entityName": self.entity, "createdAt": "", "isBenchmark": False, "user": None}
        edges = [{"node": {"id": "p", "name": name, **more}} for name in sorted(names)]
        return {"models": {"pageInfo": {"endCursor": None, "hasNextPage": False}, "edges": edges}}

    def _on_HarnessViews(self, v: Json) -> Json:
        mine = [
            o for o in self.views if (o.get("projectName"), o["type"]) == (v["project"], v["kind"])
        ]
        nodes = [{k: o.get(k) for k in ("id", "name", "displayName")} for o in mine]
        return {"project": {"allViews": {"edges": [{"node": node} for node in nodes]}}}


def _handler(server: WandbServer) -> type[BoundedHandler]:
    class Handler(BoundedHandler):
        def _any(self) -> None:
            if (body := self.body(MOST_BODY_NBYTES)) is None:
                self.send_error(413)
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            path = urllib.parse.urlsplit(self.path).path
            key = _key(self.headers.get("Authorization") or "")
            status, answer = server.answer(self.command, path, key, body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PUT = _any

    return Handler


def _key(header: str) -> str:
    kind, _, value = header.partition(" ")
    if kind != "Basic":
        return ""
    return base64.b64decode(value + "==").decode(errors="replace").partition(":")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=8080)
    server = WandbServer(port=parser.parse_args().port)
    with server:
        print(f"export WANDB_BASE_URL={server.url} WANDB_API_KEY={server.key}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
