"""Who speaks with the broker process (`broker.py`), which speaks SkyPilot."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Protocol

from harness.core.world import CloudUnavailable, HarnessError

CALL_TIMEOUT_S = 60.0  # a question to the API server
REFRESH_TIMEOUT_S = 120.0  # a question that the API server passes on to clouds
OFFERS_TIMEOUT_S = 180.0  # the first one may download catalogs
JOB_TIMEOUT_S = 45.0  # a question that goes to the node itself, which may be dead
HANGING = 16  # calls without an answer; more, and the process that speaks SkyPilot is replaced
# of a launch that failed for no reason of its own (a worker of the API server died, a connection
# broke)
TRIES = 3
# clouds that can, end a node themselves if its job is over and no controller is there
IDLE_MINUTES = 10
LOG_LINES = 200  # of a node that failed, kept
JOB_OVER = {
    "SUCCEEDED": 0,
    "FAILED": 1,
    "FAILED_SETUP": 1,
    "FAILED_DRIVER": None,
    "CANCELLED": None,
}
QUOTA = re.compile(
    r"quota|VcpuLimitExceeded|MaxSpotInstanceCountExceeded|LimitExceeded|limit exceeded", re.I
)
CREDENTIALS = re.compile(
    r"NoCredentials|credential|UnauthorizedOperation|AuthFailure|AccessDenied|InvalidClientTokenId|ExpiredToken|PermissionDenied"
    r"|not authorized|authentication|403 Forbidden|401 Unauthorized|NoCloudAccess|is not enabled",
    re.I,
)
NO_CAPACITY_TYPES = {"ResourcesUnavailableError", "KubeAPIUnreachableError"}
BAD_INPUT_TYPES = {
    "ValueError",
    "InvalidClusterNameError",
    "NotSupportedError",
    "InvalidSkyPilotConfigError",
    "StorageSpecError",
    "StorageNameError",
    "StorageSourceError",
    "StorageModeError",
    "StorageBucketCreateError",
    "StorageBucketGetError",
    "UserRequestRejectedByPolicy",
    "PermissionDeniedError",
    "ResourcesMismatchError",
    "KubernetesValidationError",
    "ProvisionPrechecksError",
    "ProvisionUnsupportedError",
    "VolumeNotFoundError",
    "APIVersionMismatchError",
    "GitError",
    "FileNotFoundError",
    "ClusterOwnerIdentityMismatchError",
}
# in the addresses from which SkyPilot downloads what clouds offer; the API server has no part in
# that
CATALOG = "/skypilot-catalog/"
SERVER_TYPES = {
    "ApiServerConnectionError",
    "ServerTemporarilyUnavailableError",
    "ConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
}


class SkyError(HarnessError):
    """What SkyPilot raised. `history`: what each place answered, as (type, message)."""

    def __init__(self, type: str, message: str, history: Sequence[tuple[str, str]] = ()):
        super().__init__(f"{type}: {message}")
        self.type, self.message, self.history = type, message, tuple(history)


def verdict(error: SkyError) -> str:
    """What a failed launch means: "no-capacity" | "quota" | "credentials" | "bad-input" |
    "setup" | "again"."""
    words = [(error.type, error.message), *error.history]
    if error.type in NO_CAPACITY_TYPES:
        said = [f"{t}: {m}" for t, m in error.history] or [error.message]
        if all(QUOTA.search(s) for s in said):
            return "quota"
        if all(CREDENTIALS.search(s) for s in said):
            return "credentials"
        return "no-capacity"
    if error.type in ("NoCloudAccessError", "InvalidCloudCredentials", "CloudUserIdentityError"):
        return "credentials"
    if error.type == "CloudError":  # a cloud's own error, wrapped
        for kind, pattern in (("quota", QUOTA), ("credentials", CREDENTIALS)):
            if any(pattern.search(f"{t}: {m}") for t, m in words):
                return kind
        return "again"
    if error.type in BAD_INPUT_TYPES:
        return "bad-input"
    if error.type in ("ClusterSetUpError", "CommandError"):
        return "setup"
    return "again"


class Sky(Protocol):
    """Ask SkyPilot: a method of `broker.Calls` with its arguments. Raises SkyError;
    CloudUnavailable if no answer came in time."""

    def __call__(self, method: str, timeout_s: float, **arguments: Any) -> Any: ...


class Broker:
    """A `Sky` that is a process of its own. One that hangs or dies is replaced; what it had
    asked for goes on at the API server."""

    def __init__(self, env: Mapping[str, str], log: str | Path):
        self._env, self._log = (
            {**env, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONUNBUFFERED": "1"},
            Path(log),
        )
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, Future[Any]] = {}
        self._hanging: set[int] = set()  # calls that were given up and have not come back
        self._number = 0

    def __call__(self, method: str, timeout_s: float, **arguments: Any) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            process = (
                self._process if self._process and self._process.poll() is None else self._start()
            )
            self._number += 1
            number, self._waiting[self._number] = self._number, future
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its reader will tell
                process.stdin.write(
                    json.dumps({"id": number, "method": method, "arguments": arguments}) + "\n"
                )
                process.stdin.flush()
        try:
            answer = future.result(timeout_s)
        except TimeoutError:
            with self._lock:
                self._waiting.pop(number, None)
                self._hanging.add(number)
                hopeless = len(self._hanging) > HANGING or method in ("server", "requests")
            if hopeless:
                self._end(process)  # its other calls are lost with it, and are made again
            raise CloudUnavailable(
                f"SkyPilot did not answer `{method}` within {timeout_s:g} s; see {self._log}"
            ) from None
        if error := answer.get("error"):
            raised = SkyError(
                error["type"],
                error["message"],
                [(h["type"], h["message"]) for h in error["history"]],
            )
            if CATALOG in error.get("url", ""):
                host = urllib.parse.urlsplit(error["url"]).hostname
                hint = (
                    f"is there a way from here to {host}, or a proxy to name (HTTPS_PROXY)? "
                    f"`harness plan` needs no network. See {self._log}"
                )
                raise CloudUnavailable(
                    f"SkyPilot's catalog of prices cannot be downloaded ({raised.type}): {hint}"
                ) from raised
            if raised.type in SERVER_TYPES:
                raise CloudUnavailable(
                    f"SkyPilot's API server does not answer ({raised.message}); try `sky api "
                    "status`"
                ) from raised
            raise raised
        return answer["result"]

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process:
            self._end(process)

    def _start(self) -> subprocess.Popen[str]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "harness.clouds.broker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._env, "PYTHONPATH": _with_us(self._env.get("PYTHONPATH", ""))},
                text=True,
                start_new_session=True,  # Ctrl-C at the controller is not for it
            )
        threading.Thread(
            target=self._read, args=(self._process, self._process.stdout), daemon=True
        ).start()
        return self._process

    def _read(self, process: subprocess.Popen[str], lines: IO[str]) -> None:
        for line in lines:
            body = json.loads(line)
            self._hanging.discard(body["id"])
            if future := self._waiting.pop(body["id"], None):
                future.set_result(body)
        process.wait()
        with self._lock:
            if self._process not in (process, None):
                return  # a successor's calls are not ours to fail
            lost, self._waiting = self._waiting, {}
            self._hanging.clear()
        for future in lost.values():
            future.set_exception(
                CloudUnavailable(
                    f"the process that speaks SkyPilot ended ({process.returncode}); see "
                    f"{self._log}"
                )
            )

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()


def _with_us(path: str) -> str:
    """PYTHONPATH with this package's folder, wherever the controller was started."""
    root = str(Path(__file__).resolve().parent.parent)
    return f"{root}:{path}" if path else root
