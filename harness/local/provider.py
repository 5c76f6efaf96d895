"""The local cloud's provider: nodes that are real processes and are preempted like spot machines.

It runs as its own process (`python -m harness.local.provider STATE_DIR`), one per STATE_DIR, so
that nodes go on when a controller dies. It owns capacity (the market), starts nodes, serves each
one's metadata endpoint, and answers `local_cloud.py` over loopback HTTP. A node is `bash -c
COMMAND` in its own session; it is ended by a SIGKILL of every process that belongs to it.

In STATE_DIR:  lock            held (flock) while a provider lives; its mtime is the provider's
               heartbeat
               config.json     the configuration from `local_cloud.py` (no secrets)
               provider.json   where it listens, and the token (0600)
               nodes.json      every attempt there ever was, and the market's state
               nodes/N/log     what node N printed
It knows nothing of SkyPilot, torch or agents. Linux only (/proc, parent-death signal).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import hmac
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.core.masking import keep_secrets
from harness.core.world import BadInput, NodeState
from harness.local import spot_schedule as markets
from harness.local.metadata_server import MetadataServer, environment_of, metadata_service
from harness.local.process_nodes import (
    KILL_WITHIN_S,
    Config,
    LiveMachine,
    LocalMachine,
    NodeCommand,
    kill_all,
    log,
    marker_of,
    start_guard,
    sweep_processes,
)
from harness.node import steady_clock
from harness.node.heartbeat import die_with_parent
from storage.errors import StoreError
from storage.http_server import BoundedHandler, BoundedHTTPServer
from storage.stores.store_urls import open_store

# The environment of a local node's command. The local cloud's provider uses it.


def node_env(
    config: Config, machine: LocalMachine, folder: Path, endpoint: str, instance: str
) -> dict[str, str]:
    """Return the environment of a node's command: the caller's variables, those that SkyPilot sets
    on a one-node cluster, and the node's identity."""
    share = share_of_gpus(config.gpus, machine.slot, config.max_nodes)
    place = {
        "cluster_name": f"local-{machine.attempt}",
        "cloud": "local",
        "region": machine.offer.name,
        "zone": None,
    }
    run = hashlib.sha256((config.run_url or str(folder.parent.parent)).encode()).hexdigest()[:12]
    env = {
        "OMP_NUM_THREADS": "1",
        **machine.asked.env,
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(len(share)),
        "SKYPILOT_TASK_ID": f"local-{run}_{config.name}",
        "SKYPILOT_CLUSTER_INFO": json.dumps(place),
        "SKYPILOT_INTERNAL_JOB_ID": "1",
        "HARNESS_ATTEMPT": str(machine.attempt),
        "HARNESS_NODE_DIR": str(folder),
        "HARNESS_HOST": f"local-{machine.attempt}",
        "HARNESS_OFFER": machine.offer.name,
        "HARNESS_SPEED": f"{machine.offer.speed:.6g}",
        "HARNESS_PROVIDER": instance,
        **environment_of(config.notices, endpoint),
        "PATH": os.pathsep.join(
            [os.path.dirname(sys.executable), machine.asked.env.get("PATH", os.defpath)]
        ),
    }
    if config.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    return env


def share_of_gpus(gpus: tuple[str, ...], slot: int, nodes: int) -> tuple[str, ...]:
    """Return a node's GPUs: an equal share, or one GPU that several nodes share when there are
    fewer GPUs than nodes."""
    if not gpus:
        return ()
    each = len(gpus) // nodes
    if each == 0 or (slot + 1) * each > len(gpus):
        return (gpus[slot % len(gpus)],)
    return gpus[slot * each : (slot + 1) * each]


# The provider's loopback HTTP API: its calls and their authorization.

MAX_BODY = 4 << 20


class Stopping(Exception):
    """The error of a call that comes too late: the provider is ending."""


EVENTS: dict[str, type[Any]] = {
    "capacity": markets.Capacity,
    "preempt": markets.Preempt,
    "kill": markets.Kill,
    "outage": markets.Outage,
}


def _route(provider: Provider, method: str, path: str, body: Mapping[str, Any]) -> Any:
    """Return the answer to one call, or `None` if there is no such call. Raises BadInput, KeyError,
    TypeError, ValueError for bad bodies, and Stopping."""
    match method, path:
        case "GET", "/offers":
            return [dataclasses.asdict(o) for o in provider.config.offers]
        case "GET", "/nodes":
            return provider.nodes()
        case "GET", "/status":
            return provider.status()
        case "POST", "/launch":
            provider.launch(
                int(body["attempt"]), body["offer"], body["command"], body["cwd"], body["env"]
            )
        case "POST", "/terminate":
            provider.terminate(int(body["attempt"]))
        case "POST", "/event":
            fields = {k: v for k, v in body.items() if k not in ("event", "attempt")}
            provider.event(EVENTS[body["event"]](**fields), body.get("attempt"))
        case "POST", "/inject":
            provider.inject(int(body["attempt"]), {k: v for k, v in body.items() if k != "attempt"})
        case "POST", "/shutdown":
            provider.stop("terminated")
        case _:
            return None
    return {}


def serve(provider: Provider, token: str) -> BoundedHTTPServer:
    """Serve the provider on loopback to callers that know the token. Others are refused before
    their body is read. Return the running server."""

    class ProviderHandler(BoundedHandler):
        def do_GET(self) -> None:
            if not hmac.compare_digest(
                self.headers.get("Authorization", "").encode("latin-1", "replace"),
                f"Bearer {token}".encode(),
            ):
                self.close_connection = True
                return self._answer(401, {"error": "wrong token; it is in provider.json"})
            self.server.trust(self.connection)
            if (raw := self.body(MAX_BODY)) is None:
                return self._answer(413, {"error": f"a body may have {MAX_BODY} bytes"})
            provider.touch()
            try:
                found = _route(provider, self.command, self.path, json.loads(raw or b"{}"))
            except (BadInput, KeyError, TypeError, ValueError, RecursionError) as e:
                return self._answer(
                    400,
                    {"error": str(e) if isinstance(e, BadInput) else f"{type(e).__name__}: {e}"},
                )
            except Stopping as e:
                return self._answer(503, {"error": str(e)})
            if found is None:
                return self._answer(404, {"error": f"no call {self.command} {self.path}"})
            return self._answer(200, found)

        do_POST = do_GET

        def _answer(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = BoundedHTTPServer("127.0.0.1", 0, ProviderHandler)
    server.serve_in_thread("api")
    return server


# A provider's files: atomic writes, and a lock that allows one provider at a time.


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically with mode 0600: readers see the old or the new text, and only this
    user may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
        f.write(text)
    os.replace(temporary, path)


def lock(state_dir: Path, within_s: float = 0.0) -> int | None:
    """Take the provider's lock, waiting up to `within_s`. Return it as an open file descriptor, or
    `None` if another process holds it."""
    handle = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    give_up_s = time.monotonic() + within_s
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        if time.monotonic() >= give_up_s:
            os.close(handle)
            return None
        time.sleep(0.02)


TICK_S = 0.05
PROGRESS_EVERY_S = 0.5
BEAT_EVERY_S = 0.5
ANSWER_WITHIN_S = 5.0  # how long a `terminate` waits for its node's end
ALREADY_RUNNING = 3  # exit code: another provider owns this STATE_DIR


class Provider:
    """The provider's state: capacity, nodes and how they end. Only the main thread calls `tick`;
    the other calls come from the API's threads."""

    def __init__(
        self,
        state_dir: Path,
        config: Config,
        instance: str,
        now: Callable[[], float] = steady_clock.now,
    ):
        self.state_dir, self.config, self.instance, self._now = state_dir, config, instance, now
        self.market = markets.parse(
            config.market, max_nodes=config.max_nodes, min_nodes=config.min_nodes
        )
        self.market_state = self.market.start()
        # set at the first launch: market time does not run before that
        self.market_began_s: float | None = None
        self.machines: dict[int, LocalMachine] = {}
        self.progress = 0.0
        self.stopping = ""  # why everything is to end; "" while it goes on
        self._changed = threading.Condition(threading.RLock())
        self._last_call_s = time.monotonic()
        self._last_beat_s = 0.0
        with self._changed:
            self._load()

    # -- history --
    def _load(self) -> None:
        path = self.state_dir / "nodes.json"
        if not path.exists():
            return
        body = json.loads(path.read_text())
        died_s = (self.state_dir / "lock").stat().st_mtime  # the old provider's last heartbeat
        for item in body["nodes"]:
            machine = LocalMachine.from_json(item)
            if machine.state in (NodeState.PENDING, NodeState.UP):
                machine.state, machine.reason = NodeState.GONE, "provider died"
                machine.gone_s = max(died_s, machine.up_s or machine.asked_s)
            self.machines[machine.attempt] = machine
        if body.get("market") == self.config.market:
            self.market_state = markets.MarketState.from_json(body["market_state"])
            self.market_began_s = body["market_began_s"]
        self._save()

    def _save(self) -> None:
        body = {
            "nodes": [m.to_json() for m in self.machines.values()],
            "market": self.config.market,
            "market_state": self.market_state.to_json(),
            "market_began_s": self.market_began_s,
        }
        write_atomic(self.state_dir / "nodes.json", json.dumps(body))
        self._changed.notify_all()

    # -- calls --
    def touch(self) -> None:
        self._last_call_s = time.monotonic()

    def nodes(self) -> list[dict[str, Any]]:
        with self._changed:
            return [m.to_json() for m in self.machines.values()]

    def status(self) -> dict[str, Any]:
        with self._changed:
            return {
                "market": self.market.spec,
                "market_s": self._market_s(),
                "available": self.market_state.available(self._market_s()),
                "holding": len(self._holding()),
                "max_nodes": self.config.max_nodes,
                "progress": self.progress,
                "pid": os.getpid(),
            }

    def launch(
        self, attempt: int, offer_name: str, command: str, cwd: str, env: Mapping[str, str]
    ) -> None:
        """Request a node. Idempotent: the same attempt again is the same node. Raises BadInput,
        Stopping."""
        offers = {o.name: o for o in self.config.offers}
        if offer_name not in offers:
            raise BadInput(
                f"launch {attempt}: no offer {offer_name!r}; there are {', '.join(offers)}"
            )
        if not os.path.isdir(cwd):
            raise BadInput(f"launch {attempt}: workdir {cwd!r} is not a directory")
        with self._changed:
            if attempt in self.machines:
                return
            if self.stopping:
                raise Stopping(f"launch {attempt}: this provider is ending; ask again")
            now = self._now()
            if self.market_began_s is None:
                self.market_began_s = now
            machine = LocalMachine(
                attempt, offers[offer_name], asked_s=now, asked=NodeCommand(command, cwd, dict(env))
            )
            machine.ready_s = now + self.config.launch_s
            self.machines[attempt] = machine
            self._save()

    def terminate(self, attempt: int) -> None:
        with self._changed:
            machine = self.machines.get(attempt)
            if machine is None or machine.state not in (NodeState.PENDING, NodeState.UP):
                return
            machine.doom = (self._now(), "terminated")
            self._changed.wait_for(lambda: machine.gone_s is not None, timeout=ANSWER_WITHIN_S)

    def stop(self, reason: str) -> None:
        with self._changed:
            self.stopping = self.stopping or reason

    def event(self, event: markets.MarketEvent, attempt: int | None = None) -> None:
        """Apply an event now, outside the schedule (for drills and tests). `attempt`: its victim;
        `None` leaves the choice to the event."""
        with self._changed:
            now_s = self._market_s()
            self.market_state = markets.state_after(self.market_state, event, now_s)
            self._apply(event, attempt)
            self._save()

    def inject(self, attempt: int, fault: Mapping[str, Any]) -> None:
        """Inject a fault into a node's metadata endpoint; see `MetadataServer.inject`. Raises
        BadInput if the node is not up."""
        with self._changed:
            machine = self.machines.get(attempt)
            if machine is None or machine.live.metadata is None:
                raise BadInput(f"inject: attempt {attempt} is not up")
            machine.live.metadata.inject(**fault)

    # -- main thread --
    def tick(self) -> None:
        with self._changed:
            now = self._now()
            if time.monotonic() - self._last_beat_s > BEAT_EVERY_S:
                self._last_beat_s = time.monotonic()
                os.utime(self.state_dir / "lock")
            events, state = self.market.due(self._market_s(), self.progress, self.market_state)
            if events and self.market_began_s is not None:
                self.market_state = state
                for event in events:
                    self._apply(event)
                self._save()
            for machine in list(self.machines.values()):
                if machine.live.process is not None and machine.live.process.poll() is not None:
                    self._ended(machine)
                if machine.doom is not None and now >= machine.doom[0]:
                    self._take(machine, machine.doom[1])
                if machine.state is NodeState.PENDING and now >= machine.ready_s:
                    self._admit(machine, now)

    def idle(self) -> bool:
        with self._changed:
            alive = any(
                m.state in (NodeState.PENDING, NodeState.UP) for m in self.machines.values()
            )
            return not alive and time.monotonic() - self._last_call_s > self.config.idle_exit_s

    def end_all(self, reason: str) -> None:
        with self._changed:
            for machine in self.machines.values():
                if machine.state in (NodeState.PENDING, NodeState.UP):
                    self._take(machine, reason)

    # -- internals --
    def _market_s(self) -> float:
        return 0.0 if self.market_began_s is None else self._now() - self.market_began_s

    def _up(self) -> list[LocalMachine]:
        return [
            m
            for m in sorted(self.machines.values(), key=lambda m: m.attempt)
            if m.state is NodeState.UP
        ]

    def _holding(self) -> list[LocalMachine]:
        """Return the nodes that hold capacity: up, and not about to be killed."""
        return [m for m in self._up() if m.doom is None]

    def _apply(self, event: markets.MarketEvent, attempt: int | None = None) -> None:
        now = self._now()
        log.info("market: %s at %.1f s, progress %.3f", event, self._market_s(), self.progress)
        spots = [m for m in self._holding() if m.offer.spot]
        if attempt is not None:
            spots = [m for m in spots if m.attempt == attempt]
        match event:
            case markets.Preempt(grace_s=grace_s, victim=victim) if spots:
                self._announce(_pick(spots, victim), now + grace_s)
            case markets.Kill(victim=victim) if spots:
                _pick(spots, victim).doom = (now, "killed")
            case markets.Outage():
                for machine in self._up():
                    machine.doom = (now, "killed")
            case markets.Capacity(nodes=nodes, grace_s=grace_s):
                for machine in spots[: max(0, len(self._holding()) - nodes)]:
                    self._announce(machine, now + grace_s)
            case _:
                log.info("market: nobody there to be taken")

    def _announce(self, machine: LocalMachine, deadline_s: float) -> None:
        machine.noticed_s = self._now()
        machine.doom = (deadline_s, "preempted")
        if machine.live.imds is not None:
            machine.live.imds.notice("kill", deadline_s)

    def _admit(self, machine: LocalMachine, now: float) -> None:
        if len(self._holding()) >= self.market_state.available(self._market_s()):
            machine.state, machine.gone_s, machine.reason = (
                NodeState.NO_CAPACITY,
                now,
                "no capacity",
            )
            log.info("attempt %d: no capacity", machine.attempt)
        else:
            self._start(machine, now)
        machine.asked = NodeCommand()  # no longer needed, and may hold secrets
        self._save()

    def _start(self, machine: LocalMachine, now: float) -> None:
        folder = self.state_dir / "nodes" / str(machine.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        taken = {m.slot for m in self._up()}
        machine.slot = next(n for n in range(len(taken) + 1) if n not in taken)
        machine.live.imds = metadata_service(
            self.config.notices, f"i-{self.instance[:8]}{machine.attempt:09d}"
        )
        machine.live.metadata = MetadataServer(machine.live.imds)
        env = node_env(self.config, machine, folder, machine.live.metadata.endpoint, self.instance)
        with open(folder / "log", "ab") as out:
            machine.live.process = subprocess.Popen(
                ["bash", "-c", machine.asked.command],
                cwd=machine.asked.cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        machine.pid, machine.up_s, machine.state = machine.live.process.pid, now, NodeState.UP
        log.info(
            "attempt %d: up, pid %d, %s",
            machine.attempt,
            machine.pid,
            machine.live.metadata.endpoint,
        )

    def _ended(self, machine: LocalMachine) -> None:
        """End a node whose command has exited. Processes that it left behind are killed."""
        assert machine.live.process is not None
        code = machine.live.process.returncode
        self._gone(machine, "exited", code if code >= 0 else 128 - code)

    def _take(self, machine: LocalMachine, reason: str) -> None:
        machine.doom = None
        if machine.state in (NodeState.PENDING, NodeState.UP):
            self._gone(machine, reason, None)

    def _gone(self, machine: LocalMachine, reason: str, exit_code: int | None) -> None:
        if machine.pid:
            folder = self.state_dir / "nodes" / str(machine.attempt)
            left = kill_all(marker_of("HARNESS_NODE_DIR", str(folder)), session=machine.pid)
            if left:
                log.error(
                    "attempt %d: processes %s survived SIGKILL for %g s",
                    machine.attempt,
                    sorted(left),
                    KILL_WITHIN_S,
                )
        if machine.live.process is not None:
            machine.live.process.wait(timeout=KILL_WITHIN_S)
        if machine.live.metadata is not None:
            machine.live.metadata.close()
        machine.live, machine.doom = LiveMachine(), None
        machine.state, machine.gone_s, machine.reason, machine.exit_code = (
            NodeState.GONE,
            self._now(),
            reason,
            exit_code,
        )
        log.info("attempt %d: gone, %s, exit code %s", machine.attempt, reason, exit_code)
        self._save()


def _pick(machines: list[LocalMachine], victim: int) -> LocalMachine:
    return machines[victim % len(machines)]


def _follow_progress(provider: Provider) -> None:
    """Read the run's progress until the provider stops. It runs in a thread of its own, because
    reads from a bucket may be slow."""
    try:
        progress = markets.RunProgress(open_store(provider.config.run_url))
    except (StoreError, ValueError, ImportError) as e:
        log.error(
            "progress of %s cannot be read, events by progress will not happen: %s",
            provider.config.run_url,
            e,
        )
        return
    while not provider.stopping:
        try:
            provider.progress = progress.poll()
        except StoreError as e:
            log.warning("progress not read this time: %s", e)
        time.sleep(PROGRESS_EVERY_S)


def main(argv: list[str] | None = None) -> int:
    keep_secrets(os.environ)
    args = sys.argv[1:] if argv is None else argv
    if len(args) != 1:
        print("usage: python -m harness.local.provider STATE_DIR", file=sys.stderr)
        return 2
    state_dir = Path(args[0]).resolve()
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    handle = lock(state_dir, within_s=1.0)  # clients hold it briefly to see whether we live
    if handle is None:
        print(
            f"{state_dir}: a provider is running already; there can be one per STATE_DIR",
            file=sys.stderr,
        )
        return ALREADY_RUNNING
    config_path = state_dir / "config.json"
    config = Config.from_json(config_path.read_text()) if config_path.exists() else Config()
    instance = secrets.token_hex(8)
    guard_pid, guard = start_guard(instance)
    try:
        left = sweep_processes(
            state_dir
        )  # nodes of a provider that was killed together with its guard
        if left:
            log.error("processes %s of an earlier provider survive SIGKILL", sorted(left))
        provider = Provider(state_dir, config, instance)
        os.utime(state_dir / "lock")
        return _run(provider)
    finally:
        os.close(guard)  # the guard then ends; no node is left for it to kill
        os.waitpid(guard_pid, 0)
        os.close(handle)


def _run(provider: Provider) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(
            number, lambda *_: setattr(provider, "stopping", provider.stopping or "provider ended")
        )
    token = secrets.token_urlsafe(32)
    server = serve(provider, token)
    address = {"port": server.server_address[1], "pid": os.getpid(), "token": token}
    path = provider.state_dir / "provider.json"
    write_atomic(path, json.dumps(address))
    if (
        provider.market.needs_progress
        and provider.config.run_url
        and not provider.config.run_url.startswith("memory:")
    ):
        threading.Thread(
            target=_follow_progress, args=(provider,), name="progress", daemon=True
        ).start()
    log.info(
        "provider %d listens on port %d, market %s",
        os.getpid(),
        address["port"],
        provider.market.spec,
    )
    try:
        while not provider.stopping:
            provider.tick()
            if provider.idle():
                provider.stop("idle")
            time.sleep(TICK_S)
    finally:
        provider.end_all(provider.stopping or "provider ended")
        path.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()
    log.info("provider ends: %s", provider.stopping or "idle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
