"""Trackers as plug-ins: W&B, TensorBoard, JSON lines, any function."""

from __future__ import annotations

import base64
import contextlib
import http.client
import importlib.util
import json
import netrc
import pkgutil
import re
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.bucket.layout import IDENTITY, Identity
from harness.core import records as rec
from harness.core.values import BadObject, canonical, digest
from harness.core.world import BadInput
from storage.objects import ObjectStore

WANDB_TIMEOUT_S = 20.0  # to reach W&B at start
WANDB_URL = "https://api.wandb.ai"


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may know of the run. `id` is the same for every attempt, publisher and
    machine."""

    name: str
    id: str
    identity: dict[str, Any]

    @classmethod
    def of(cls, store: ObjectStore) -> RunInfo:
        """Raises NotFound while the run has not begun, BadInput if what says so cannot be read."""
        try:
            identity = Identity.decode(store.get(IDENTITY)).body
        except BadObject as e:
            raise BadInput(
                f"{store.url}/run.json: wanted the run's identity as JSON, found something else "
                f"({e})"
            ) from e
        # No URL leaves this machine: some carry credentials. A hash of it keeps two runs of the
        # same identity apart.
        return cls(
            store.url.rpartition("/")[2] or "run",
            digest(canonical([store.url, rec.genesis(identity)]))[:16],
            identity,
        )


Records = Sequence[rec.StepRecord]
PlugIn = Callable[[Records, RunInfo], None]


class Tracker(Protocol):
    """Publishes one batch of steps, whole or with an exception."""

    @property
    def name(self) -> str: ...

    @property
    def outside(self) -> bool:
        """Acts outside of the bucket, so two publishers must not do it at once."""

    def publish(self, records: Records, info: RunInfo, folder: Path) -> None:
        """`folder` is empty and ours; what lies in it afterwards is stored in the bucket with
        the batch."""


# ---- what is published ---------------------------------------------------------------------------
def metrics(r: rec.StepRecord) -> dict[str, float]:
    """The numbers of one step, as all trackers name them."""
    others = {k: v for k, v in r.metrics.items() if k != "grad_norm"}
    norm = {"train/grad_norm": r.metrics["grad_norm"]} if "grad_norm" in r.metrics else {}
    return {
        "train/loss": r.loss,
        "train/lr": r.lr,
        **norm,
        "world": r.world,
        "accumulation": max(r.shares, default=0),
        "epoch": r.epoch,
        "samples_per_s": r.samples / r.dt if r.dt > 0 else 0.0,
        **others,
    }


class Jsonl:
    """One line of JSON per step."""

    name, outside = "jsonl", False

    def publish(self, records: Records, info: RunInfo, folder: Path) -> None:
        lines = (json.dumps({"step": r.step, "t": r.t, **metrics(r)}) + "\n" for r in records)
        (folder / "metrics.jsonl").write_text("".join(lines))


class TensorBoard:
    """Event files; all batches in one folder are one run to TensorBoard."""

    name, outside = "tensorboard", False

    def publish(self, records: Records, info: RunInfo, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        suffix = f".{records[0].step:010d}-{records[-1].step:010d}"
        with SummaryWriter(str(folder), filename_suffix=suffix) as writer:
            for r in records:
                for key, value in metrics(r).items():
                    writer.add_scalar(key, value, r.step, walltime=r.t)


class Wandb:
    """W&B. Offline: a run directory per batch, stored in the bucket. Online: one run that every
    batch resumes."""

    name = "wandb"

    def __init__(
        self, api: Any, online: bool, project: str = "spotharness", entity: str | None = None
    ):
        self.api, self.online, self.outside = api, online, online
        self.project, self.entity = project, entity

    def publish(self, records: Records, info: RunInfo, folder: Path) -> None:
        with tempfile.TemporaryDirectory(
            prefix="harness-wandb-", ignore_cleanup_errors=True
        ) as temporary:
            self._publish(records, info, Path(temporary))
            if not self.online:
                self._keep(Path(temporary), folder)

    def _publish(self, records: Records, info: RunInfo, temporary: Path) -> None:
        # Console, code, git and machine belong to the publisher's process, not to the training: not
        # recorded.
        quiet = {
            "silent": True,
            "console": "off",
            "disable_git": True,
            "disable_code": True,
            "disable_job_creation": True,
            "x_disable_stats": True,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
        }
        # the private ones come and go with wandb's versions
        known_here = getattr(self.api.Settings, "model_fields", quiet)
        settings = self.api.Settings(**{k: v for k, v in quiet.items() if k in known_here})
        run = self.api.init(
            mode="online" if self.online else "offline",
            id=info.id,
            name=info.name,
            project=self.project,
            entity=self.entity,
            # offline has nobody to ask; the id alone joins the batches
            resume="allow" if self.online else None,
            dir=str(temporary),
            config=dict(info.identity),
            settings=settings,
        )
        failed = True
        try:
            # W&B knows the run up to run.step - 1: a publisher before us may have died between
            # publishing and marking.
            known = int(run.step) if self.online and run.resumed else 0
            for r in records:
                if r.step >= known:
                    run.log({**metrics(r), "_timestamp": r.t}, step=r.step)
            failed = False
        finally:
            run.finish(exit_code=1 if failed else 0)
            # Offline, finish() returns before wandb's own process has written the file (wandb
            # 0.26.1: in 3 of 12 trials it held not one step yet); teardown() waits until that
            # process has ended.
            self.api.teardown()

    @staticmethod
    def _keep(temporary: Path, folder: Path) -> None:
        """The run directory without its logs (they hold this machine's paths and settings, and
        nobody needs them)."""
        for directory in (temporary / "wandb").glob("offline-run-*"):
            for path in sorted(directory.rglob("*")):
                inside = path.relative_to(directory)
                if path.is_file() and inside.parts[0] in ("files", path.name):
                    target = folder / directory.name / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(path.read_bytes())


@dataclass(frozen=True)
class Function:
    """Anybody's `callable(records, run_info)`. After a crash it may get steps again;
    `run_info.id` and `step` tell them apart."""

    name: str
    call: PlugIn
    outside: bool = True

    def publish(self, records: Records, info: RunInfo, folder: Path) -> None:
        self.call(records, info)


def build(spec: str, environ: Mapping[str, str]) -> list[Tracker]:
    """The trackers that `spec` names ("wandb,jsonl,pkg.mod:function"), known to work. Raises
    BadInput."""
    names = [name.strip() for name in spec.split(",") if name.strip()]
    if not names:
        raise BadInput(
            "no tracker: wanted wandb, tensorboard, jsonl or package.module:function, "
            "comma-separated"
        )
    return [_one(name, environ) for name in dict.fromkeys(names)]


def _one(name: str, environ: Mapping[str, str]) -> Tracker:
    if name == "jsonl":
        return Jsonl()
    if name == "tensorboard":
        if (
            importlib.util.find_spec("tensorboard") is None
            or importlib.util.find_spec("torch") is None
        ):
            raise BadInput(
                "tracker tensorboard: package tensorboard (and torch) is not installed here; `pip "
                "install tensorboard`"
            )
        return TensorBoard()
    if name == "wandb":
        return _wandb(environ)
    if ":" in name:
        try:
            call = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as e:
            raise BadInput(
                f"tracker {name}: wanted an importable package.module:function, found "
                f"{type(e).__name__}: {e}"
            ) from e
        if not callable(call):
            raise BadInput(
                f"tracker {name}: wanted a function of (records, run_info), found "
                f"{type(call).__name__}"
            )
        return Function(re.sub(r"[^A-Za-z0-9_.\-]", "-", name), call)
    raise BadInput(
        f"tracker {name!r} is not known; wanted wandb, tensorboard, jsonl or "
        "package.module:function"
    )


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


def _wandb(environ: Mapping[str, str]) -> Wandb:
    try:
        import wandb
    except ImportError as e:
        raise BadInput(
            f"tracker wandb: package wandb cannot be imported ({e}); `pip install wandb`, or leave "
            "the tracker out"
        ) from e
    key, mode = wandb_key(environ), environ.get("WANDB_MODE") or ""
    if mode == "online" and not key:
        raise BadInput(
            "tracker wandb: WANDB_MODE is online, but there is no key; set WANDB_API_KEY, or leave "
            "WANDB_MODE out"
        )
    online = wandb_online(key, mode)
    if online:
        _check_key(key, environ.get("WANDB_BASE_URL") or WANDB_URL)
    return Wandb(
        wandb,
        online,
        environ.get("WANDB_PROJECT") or "spotharness",
        environ.get("WANDB_ENTITY") or None,
    )


def _check_key(key: str, base_url: str) -> None:
    """One bounded question to W&B. Not wandb.login: that writes the key to ~/.netrc, and asks
    for ever while nobody answers."""
    request = urllib.request.Request(
        base_url.rstrip("/") + "/graphql",
        data=b'{"query":"query Viewer { viewer { id } }"}',
        headers={
            "Content-Type": "application/json",
            "Authorization": "Basic " + base64.b64encode(f"api:{key}".encode()).decode(),
        },
    )
    hint = "check it and the network, or set WANDB_MODE=offline and sync later"
    try:
        with urllib.request.urlopen(request, timeout=WANDB_TIMEOUT_S) as answer:
            viewer = json.loads(answer.read(1 << 20)).get("data", {}).get("viewer")
    except urllib.error.HTTPError as e:
        raise BadInput(
            f"tracker wandb: {base_url} did not accept WANDB_API_KEY (HTTP {e.code}); {hint}"
        ) from None
    except (OSError, ValueError, AttributeError, http.client.HTTPException) as e:
        # no answer, or not one of W&B's
        raise BadInput(
            f"tracker wandb: W&B cannot be reached at {base_url} ({type(e).__name__}); {hint}"
        ) from None
    if viewer is None:
        raise BadInput(f"tracker wandb: {base_url} does not know the WANDB_API_KEY; {hint}")
