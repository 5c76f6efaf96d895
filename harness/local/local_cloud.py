"""The local cloud as the controller uses it: a `Cloud` whose nodes are processes on this computer.

It is a thin client of `provider.py`, which it starts when there is none. Nodes and their history
outlive any controller, and a new one with the same `state_dir` adopts them. It knows nothing of
recovery, agents or torch.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.clouds.sky_task import Task, check_local
from harness.core.world import BadInput, CloudUnavailable, Node, Offer
from harness.local import process_nodes, provider
from harness.local import spot_schedule as markets
from storage.private_folders import why_not_ours

CALL_TIMEOUT_S = 15.0
START_WITHIN_S = 30.0
END_WITHIN_S = 15.0

# Variables that a node must not inherit: the caller's identity in another run, job, test or torch
# world.
NOT_FOR_NODES = re.compile(
    r"(HARNESS|SKYPILOT|TORCHELASTIC|PYTEST|COV_CORE|SLURM)_.*|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|AWS_EC2_METADATA_.*|AWS_METADATA_SERVICE_.*|INSTANCE_METADATA_URL|GCE_METADATA_.*|CUDA_VISIBLE_DEVICES|BASH_ENV|OLDPWD|_"
)


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's environment without the variables that a node must not inherit."""
    return {k: v for k, v in env.items() if not NOT_FOR_NODES.fullmatch(k)}


def visible_gpus(env: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs of this computer that the caller may use, as in CUDA_VISIBLE_DEVICES."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return tuple(d.strip() for d in listed.split(",") if d.strip() and d.strip() != "-1")
    found = (re.fullmatch(r"nvidia(\d+)", p.name) for p in dev.glob("nvidia*"))
    return tuple(sorted((m[1] for m in found if m), key=int))


class LocalCloud:
    """A `Cloud` of processes. `wanted`: (min, max) nodes, or max; `env`: the caller's environment
    (`None` means this process's).

    Market and capacity are fixed when the provider starts; a controller that finds one running
    adopts it as it is.
    """

    def __init__(
        self,
        state_dir: str | Path,
        task: Task,
        market: str = "demo",
        run_url: str = "",
        wanted: int | tuple[int, int] = (1, 3),
        env: Mapping[str, str] | None = None,
        *,
        launch_s: float = 0.3,
        idle_exit_s: float = 30.0,
        offers: Sequence[Offer] = markets.OFFERS,
        gpus: Sequence[str] | None = None,
        notices: str = "aws",
    ):
        check_local(task)
        if not sys.platform.startswith("linux"):
            raise BadInput(
                f"the local cloud needs Linux (/proc, parent-death signals), found {sys.platform}"
            )
        self.state_dir, self.task = Path(state_dir).resolve(), task
        self._env = dict(os.environ if env is None else env)
        low, high = (1, wanted) if isinstance(wanted, int) else wanted
        self._config = process_nodes.Config(
            market=_absolute(market),
            min_nodes=low,
            max_nodes=high,
            run_url=run_url,
            name=task.name,
            launch_s=launch_s,
            idle_exit_s=idle_exit_s,
            gpus=visible_gpus(self._env) if gpus is None else tuple(gpus),
            offers=tuple(offers),
            notices=notices,
        )
        # report a bad spec immediately
        markets.parse(self._config.market, min_nodes=low, max_nodes=high)
        self._started: subprocess.Popen[bytes] | None = None
        self._closed = False

    # -- Cloud --
    def offers(self) -> Sequence[Offer]:
        return sorted(self._config.offers)

    def launch(self, attempt: int, offer: Offer) -> None:
        body = {
            "attempt": attempt,
            "offer": offer.name,
            "command": self.task.run,
            "cwd": str((self.task.workdir or Path.cwd()).resolve()),
            "env": {**clean(self._env), **self.task.envs, **self.task.secrets},
        }
        self._call("POST", "/launch", body)

    def nodes(self) -> Sequence[Node]:
        if self._closed:
            return self._history()
        return [process_nodes.node_of(body) for body in self._call("GET", "/nodes")]

    def terminate(self, attempt: int) -> None:
        if not self._closed:
            self._call("POST", "/terminate", {"attempt": attempt})

    # -- beyond the Cloud protocol --
    def gone(self) -> set[int]:
        """Return the attempts that are surely over. Unlike `nodes`, it starts no provider: without
        a provider no node is alive."""
        alive = (
            {n.attempt for n in self.nodes() if n.alive}
            if not self._closed and self._alive()
            else set()
        )
        return {n.attempt for n in self._history()} - alive

    def status(self) -> dict[str, Any]:
        """Return the provider's state: market, market_s, available, holding, max_nodes, progress,
        pid."""
        found: dict[str, Any] = self._call("GET", "/status")
        return found

    def event(self, event: str, **fields: Any) -> None:
        """Apply a market event now, such as `event("preempt", grace_s=8)`, or `"kill"`, `"outage"`,
        `"capacity"`; `attempt=` names a victim."""
        self._call("POST", "/event", {"event": event, **fields})

    def inject(self, attempt: int, **fault: Any) -> None:
        """Inject a fault into a node's metadata endpoint; see
        `metadata_server.MetadataServer.inject`."""
        self._call("POST", "/inject", {"attempt": attempt, **fault})

    def close(self) -> None:
        """Release nothing: nodes and their provider stay as they are."""

    def shutdown(self) -> None:
        """End all nodes and the provider. `nodes()` still returns the history. Raises
        CloudUnavailable if something survives."""
        self._closed = True
        if self._alive():
            address = self._address()
            if address is not None:
                try:
                    self._http(address, "POST", "/shutdown", None)
                except (OSError, http.client.HTTPException):
                    _signal(address["pid"], signal.SIGTERM)
            if not self._ends_within(END_WITHIN_S) and address is not None:
                _signal(address["pid"], signal.SIGKILL)
                self._ends_within(END_WITHIN_S)
        if self._started is not None:
            self._started.wait(timeout=END_WITHIN_S)
            self._started = None
        if self._alive():
            raise CloudUnavailable(
                f"the provider of {self.state_dir} does not end; look at "
                f"{self.state_dir}/provider.log"
            )
        left = process_nodes.sweep_processes(self.state_dir)
        if left:
            raise CloudUnavailable(
                f"processes {sorted(left)} of {self.state_dir} survive SIGKILL; look at them with "
                "ps"
            )

    # -- the provider --
    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if self._closed:
            raise CloudUnavailable(f"the local cloud of {self.state_dir} has been shut down")
        error: Exception | None = None
        for _ in range(2):  # a dead provider is restarted once
            address = self._address() if self._alive() else None
            try:
                status, answer = self._http(address or self._start(), method, path, body)
            except (OSError, http.client.HTTPException, ValueError) as e:
                error = e
                if self._alive():
                    break
                continue
            if status == 200:
                return answer
            if status == 400:
                raise BadInput(f"local cloud: {answer['error']}")
            error = CloudUnavailable(f"{status} {answer.get('error', '')}")
            break
        raise CloudUnavailable(
            f"the provider of {self.state_dir} did not answer {method} {path} ({error}); "
            f"it will be asked again; its log is {self.state_dir}/provider.log"
        ) from error

    def _http(
        self, address: Mapping[str, Any], method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", address["port"], timeout=CALL_TIMEOUT_S
        )
        try:
            headers = {
                "Authorization": f"Bearer {address['token']}",
                "Content-Type": "application/json",
            }
            connection.request(method, path, json.dumps(body or {}), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def _address(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.state_dir / "provider.json").read_text())
        except FileNotFoundError:
            return None
        return found

    def _alive(self) -> bool:
        """Return whether a provider holds the lock; a process id alone would prove nothing. Raises
        BadInput if the folder belongs to another user."""
        if not self.state_dir.is_dir():
            return False
        if why := why_not_ours(self.state_dir):
            raise BadInput(
                f"{self.state_dir}: wanted a folder of this user's own for the local cloud's "
                f"state, but {why}; remove it, or choose another --run"
            )
        handle = provider.lock(self.state_dir)
        if handle is None:
            return True
        os.close(handle)
        return False

    def _start(self) -> dict[str, Any]:
        """Start a provider, or wait for one that is starting. Return its address."""
        self.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        give_up_s = time.monotonic() + START_WITHIN_S
        if not self._alive():
            self._reap()
            # left by a provider that was killed
            (self.state_dir / "provider.json").unlink(missing_ok=True)
            provider.write_atomic(self.state_dir / "config.json", self._config.to_json())
            root = str(Path(__file__).resolve().parent.parent)
            with open(self.state_dir / "provider.log", "ab") as out:
                self._started = subprocess.Popen(
                    [sys.executable, "-m", "harness.local.provider", str(self.state_dir)],
                    cwd=root,
                    env=clean(self._env),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,  # so that Ctrl-C at the controller does not reach it
                )
        while time.monotonic() < give_up_s:
            address = self._address()
            if address is not None and self._alive():
                return address
            code = self._started.poll() if self._started is not None else None
            if code is not None and code != provider.ALREADY_RUNNING:
                break
            time.sleep(0.03)
        raise CloudUnavailable(
            f"the provider of {self.state_dir} did not start: {self._last_words()}"
        )

    def _reap(self) -> None:
        if self._started is not None:
            self._started.wait(timeout=END_WITHIN_S)
            self._started = None

    def _ends_within(self, seconds: float) -> bool:
        give_up_s = time.monotonic() + seconds
        while self._alive():
            if time.monotonic() > give_up_s:
                return False
            time.sleep(0.03)
        return True

    def _history(self) -> list[Node]:
        try:
            body = json.loads((self.state_dir / "nodes.json").read_text())
        except FileNotFoundError:
            return []
        return [process_nodes.node_of(item) for item in body["nodes"]]

    def _last_words(self) -> str:
        try:
            lines = (self.state_dir / "provider.log").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "it left no log"
        return "; ".join(lines[-3:]) or "its log is empty"


def _absolute(market: str) -> str:
    """Return the market spec with an absolute path: the provider runs in another folder."""
    if market in markets.NAMED or market.startswith("seed:"):
        return market
    path, at, scale = market.rpartition("@")
    if not at or "/" in scale:
        path, at, scale = market, "", ""
    return f"{Path(path).expanduser().resolve()}{at}{scale}"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
