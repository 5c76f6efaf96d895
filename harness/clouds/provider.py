"""The local cloud's provider: nodes that are real processes and can be taken away like spot
machines.

Runs as its own process (`python -m harness.clouds.provider STATE_DIR`), one per STATE_DIR, so that
a controller may die and nodes go on. It owns capacity (the market), starts nodes, serves each one's
metadata endpoint, and answers `local.py` over loopback HTTP. A node is `bash -c COMMAND` in its own
session; its end is the SIGKILL of every process that belongs to it.

In STATE_DIR:  lock            held (flock) while a provider lives; its mtime is the provider's
               heartbeat
               config.json     what `local.py` wants of it (no secrets)
               provider.json   where it listens, and the token (0600)
               nodes.json      every attempt there ever was, and the market's state
               nodes/N/log     what node N printed
Knows nothing of SkyPilot, torch or agents. Linux only (/proc, parent-death signal).
"""

from __future__ import annotations

import functools
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

from harness.clouds import market as markets
from harness.clouds.machines import (
    KILL_WITHIN_S,
    Config,
    LiveMachine,
    LocalMachine,
    NodeCommand,
    kill_all,
    log,
    marker_of,
    start_guard,
    sweep,
)
from harness.clouds.metadata import MetadataServer, protocol_of
from harness.clouds.node_environment import node_env
from harness.clouds.provider_api import Stopping, serve
from harness.clouds.provider_files import lock, write_atomic
from harness.core import steady
from harness.core.last_words import keep_secrets
from harness.core.world import BadInput, NodeState
from harness.node.processes import die_with_parent
from storage.errors import StoreError
from storage.opening import open_store

TICK_S = 0.05
PROGRESS_EVERY_S = 0.5
BEAT_EVERY_S = 0.5
ANSWER_WITHIN_S = 5.0  # how long a `terminate` waits for its node's end
ALREADY_RUNNING = 3  # exit code: another provider owns this STATE_DIR


class Provider:
    """Capacity, nodes and their endings. `tick` is called by the main thread only; calls come
    from the API's threads."""

    def __init__(
        self, state_dir: Path, config: Config, instance: str, now: Callable[[], float] = steady.now
    ):
        self.state_dir, self.config, self.instance, self._now = state_dir, config, instance, now
        self.market = markets.parse(
            config.market, max_nodes=config.max_nodes, min_nodes=config.min_nodes
        )
        self.market_state = self.market.start()
        # at the first launch: nothing happens in a market without buyers
        self.market_began_s: float | None = None
        self.machines: dict[int, LocalMachine] = {}
        self.progress = 0.0
        self.stopping = ""  # reason; not empty: end everything
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
        """Ask for a node; the same attempt twice is one node."""
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
        """Make something happen now, besides the schedule (drills and tests). `attempt`: its
        victim."""
        with self._changed:
            now_s = self._market_s()
            self.market_state = markets.state_after(self.market_state, event, now_s)
            self._apply(event, attempt)
            self._save()

    def inject(self, attempt: int, fault: Mapping[str, Any]) -> None:
        """Make a node's metadata endpoint misbehave."""
        with self._changed:
            machine = self.machines.get(attempt)
            if machine is None or machine.live.metadata is None:
                raise BadInput(f"inject: attempt {attempt} is not up")
            machine.live.metadata.inject(**fault)

    # -- what the main thread does --
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

    # -- inside --
    def _market_s(self) -> float:
        return 0.0 if self.market_began_s is None else self._now() - self.market_began_s

    def _up(self) -> list[LocalMachine]:
        return [
            m
            for m in sorted(self.machines.values(), key=lambda m: m.attempt)
            if m.state is NodeState.UP
        ]

    def _holding(self) -> list[LocalMachine]:
        """Nodes that hold capacity: up, and not already told to go."""
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
        machine.asked = NodeCommand()  # may hold secrets; not needed any more
        self._save()

    def _start(self, machine: LocalMachine, now: float) -> None:
        folder = self.state_dir / "nodes" / str(machine.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        taken = {m.slot for m in self._up()}
        machine.slot = next(n for n in range(len(taken) + 1) if n not in taken)
        machine.live.imds = protocol_of(
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
        """The node's command ended by itself; a machine without its command is given back,
        leftovers and all."""
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
    """Read the run's progress for ever; its own thread, since a bucket may take its time."""
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
        print("usage: python -m harness.clouds.provider STATE_DIR", file=sys.stderr)
        return 2
    state_dir = Path(args[0]).resolve()
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    handle = lock(state_dir, within_s=1.0)  # callers hold it for a moment to see whether we live
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
        left = sweep(state_dir)  # of a provider that was killed together with its guard
        if left:
            log.error("processes %s of an earlier provider survive SIGKILL", sorted(left))
        provider = Provider(state_dir, config, instance)
        os.utime(state_dir / "lock")
        return _run(provider)
    finally:
        os.close(guard)  # the guard sees the end and finds nothing to do
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
