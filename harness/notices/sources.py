"""The sources of notices: a row for each cloud, and the sources that need no file of their own.
Built by `cli/node.py`.

Knows metadata endpoints, files and traits of machines (DMI, environment, files); never tries an
address to find out where it is. All external data is read below a given root and from a given
environment, so that a test can imitate any cloud. docs/NOTICES.md lists what each cloud promises.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from harness.core.world import BadInput
from harness.notices.aws import AWS_V4, AWS_V6, AwsSource
from harness.notices.azure import AZURE, AzureSource
from harness.notices.custom_source import sources_of
from harness.notices.gcp import GCP_HOST, MAINTENANCE_EVENT, PREEMPTED, GcpSource
from harness.notices.kubernetes import ACCOUNT, KubernetesSource
from harness.notices.notice import KINDS, Notice, NoticeSource, log, utc


# ---- files ---------------------------------------------------------------------------------------
class FileSource:
    """Notices from a file that a person may `touch`, or a script fill with JSON; removing it
    cancels the notice.

    Empty: leave now. JSON: any of `{"kind", "grace_s" | "deadline_s", "id", "detail"}`; the grace
    period counts from the file's last change.
    """

    name = "file"

    def __init__(
        self,
        path: str | Path,
        *,
        pace_s: float = 0.5,
        settle_s: float = 0.2,
        now: Callable[[], float] = time.time,
    ):
        self.path, self.pace_s, self.errors = Path(path), pace_s, 0
        self._settle_s, self._now = settle_s, now
        self._seen: tuple[int, int] = (0, 0)
        self._known: tuple[Notice, ...] = ()

    def poll(self) -> Sequence[Notice]:
        try:
            stat = self.path.stat()
            text = self.path.read_text(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            self._known, self._seen = (), (0, 0)
            return []
        except OSError as e:
            self.errors += 1
            log.warning("notices: %s: %s", self.path, e.strerror)
            return list(self._known)
        if self._seen != (stat.st_ino, stat.st_mtime_ns):
            try:
                fresh, whole = self._parse(text, stat), bool(text.strip())
            except (ValueError, TypeError, yaml.YAMLError) as e:
                fresh, whole = self._unreadable(f"unreadable: {e}", stat), False
            if not whole and 0 <= self._now() - stat.st_mtime < self._settle_s:
                return list(self._known)  # it may be just being written
            if any(n.detail.startswith("unreadable") for n in fresh):
                self.errors += 1
            self._known, self._seen = fresh, (stat.st_ino, stat.st_mtime_ns)
        return list(self._known)

    def acknowledge(self, notice: Notice) -> bool:
        return False

    def close(self) -> None:
        pass

    def _id(self, stat: Any) -> str:
        return f"{self.name}-{stat.st_ino}-{stat.st_mtime_ns}"

    def _unreadable(self, why: str, stat: Any) -> tuple[Notice, ...]:
        """Return a kill notice for an unreadable file: to leave is the safe interpretation."""
        return (Notice(self.name, "kill", self._id(stat), None, True, why),)

    def _parse(self, text: str, stat: Any) -> tuple[Notice, ...]:
        said = json.loads(text) if text.strip() else {}
        if not isinstance(said, dict):
            raise ValueError("not a JSON object")
        deadline_s = said.get("deadline_s")
        if deadline_s is None and said.get("grace_s") is not None:
            deadline_s = stat.st_mtime + float(said["grace_s"])
        kind = said.get("kind", "kill")
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
        deadline_s = None if deadline_s is None else float(deadline_s)
        name, detail = (
            str(said.get("id") or self._id(stat)),
            str(said.get("detail", "")) or str(self.path),
        )
        return (Notice("file", kind, name, deadline_s, True, detail),)


class MithrilSource(FileSource):
    """Notices of Mithril: a YAML file announces a lost bid five minutes before the end, and
    vanishes if the bid wins again."""

    name = "mithril"
    LEAD_S = 300.0
    LOSING = ("STATUS_PREEMPTING", "STATUS_RELOCATING")

    def _parse(self, text: str, stat: Any) -> tuple[Notice, ...]:
        said = yaml.safe_load(text)
        if not isinstance(said, dict):
            raise ValueError("not a YAML mapping")
        status, end = str(said.get("instance_status", "")), said.get("end_time")
        if status not in self.LOSING:
            return ()
        if isinstance(end, datetime):
            deadline_s = (end if end.tzinfo else end.replace(tzinfo=timezone.utc)).timestamp()
        elif isinstance(end, str) and end.strip():
            deadline_s = utc(end.strip())
        else:
            deadline_s = float(end) if end is not None else stat.st_mtime + self.LEAD_S
        detail = f"{status}, bid {said.get('bid_status', '?')}"
        return (Notice("mithril", "kill", f"mithril-{deadline_s:.0f}", deadline_s, True, detail),)


# ---- an end that is known from the start ---------------------------------------------------------
class LimitSource:
    """The end of a capacity block, of a batch system's time limit, or of the user's own limit."""

    def __init__(self, name: str, deadline_s: float):
        self.name, self.pace_s, self.errors = name, 60.0, 0
        self._notice = Notice(
            name,
            "maintenance",
            f"{name}-{deadline_s:.0f}",
            deadline_s,
            False,
            "the time is up then",
        )

    def poll(self) -> Sequence[Notice]:
        return [self._notice]

    def acknowledge(self, notice: Notice) -> bool:
        return False

    def close(self) -> None:
        pass


def moment(text: str) -> float:
    """Return the time of `2026-11-21T08:00:00Z`, or of seconds since 1970. Raises BadInput."""
    try:
        return float(text) if re.fullmatch(r"\d{9,}(\.\d*)?", text) else utc(text)
    except ValueError:
        raise BadInput(
            f"{text!r:.80} is no time; wanted 2026-11-21T08:00:00Z or seconds since 1970"
        ) from None


def parse_duration(text: str) -> float:
    """Return the seconds of `90`, `90s`, `30m`, `12h` or `7d`. Raises BadInput."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([smhd]?)", text.strip())
    if found is None:
        raise BadInput(
            f"{text!r:.80} is no duration; wanted seconds, or a number with s, m, h, d, such as 12h"
        )
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


# ---- the sources of this machine -----------------------------------------------------------------
@dataclass(frozen=True)
class MachineInfo:
    """The data from which a machine's cloud is detected: environment, and files below `root`."""

    env: Mapping[str, str]
    root: Path = Path("/")
    # all machines that an event names belong to this run, so one may acknowledge it for all
    speaks_for_all: bool = False

    def dmi(self, *signs: str) -> bool:
        """Return whether its firmware names one of `signs`. Containers see it too. Xen instances
        have the name in other files than Nitro ones."""
        # a node of the local cloud is not the machine that it runs on
        if "HARNESS_NODE_DIR" in self.env:
            return False
        for name in (
            "sys_vendor",
            "product_name",
            "board_vendor",
            "bios_vendor",
            "product_version",
            "bios_version",
            "chassis_asset_tag",
        ):
            try:
                said = (
                    (self.root / "sys/class/dmi/id" / name)
                    .read_text(errors="replace")
                    .strip()
                    .lower()
                )
            except OSError:
                continue
            if any(sign.lower() in said for sign in signs) or (
                "Amazon EC2" in signs and said.endswith("amazon")
            ):
                return True
        return False

    @property
    def gpu(self) -> bool:
        return any((self.root / "dev").glob("nvidia[0-9]*"))


@dataclass(frozen=True)
class CloudNotices:
    """One cloud: whether a machine is there, its grace period at SIGTERM, and its notices."""

    here: Callable[[MachineInfo], bool]
    sigterm_s: float | None  # None: no limit; SIGTERM does not announce the end there
    sources: Callable[[MachineInfo], list[NoticeSource]]


def metadata_endpoint(cloud: str, m: MachineInfo) -> str:
    """Return the URL of this cloud's metadata service; "" if it has none, or it is disabled."""
    match cloud:
        case "aws":
            if m.env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
                return ""
            v6 = m.env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "").lower() == "ipv6"
            usual = AWS_V6 if v6 else AWS_V4
            named = _said(m, "AWS_EC2_METADATA_SERVICE_ENDPOINT", "INSTANCE_METADATA_URL")
            return named or usual
        case "gcp":
            host = _said(m, "GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")
            return f"http://{host or GCP_HOST}"
        case "azure":
            return m.env.get("HARNESS_AZURE_METADATA") or AZURE
    return ""


def _said(m: MachineInfo, *names: str) -> str:
    """Return the value of the first of these variables that is not empty; "" if none is."""
    return next((m.env[name] for name in names if m.env.get(name)), "")


def _aws(m: MachineInfo) -> list[NoticeSource]:
    endpoint = metadata_endpoint("aws", m)
    return [AwsSource(endpoint)] if endpoint else []


def _gcp(m: MachineInfo) -> list[NoticeSource]:
    endpoint = metadata_endpoint("gcp", m)
    return [GcpSource(endpoint, path, gpu=m.gpu) for path in (PREEMPTED, MAINTENANCE_EVENT)]


def _kubernetes(m: MachineInfo) -> list[NoticeSource]:
    host, port = (
        m.env.get("KUBERNETES_SERVICE_HOST", ""),
        m.env.get("KUBERNETES_SERVICE_PORT_HTTPS", "443"),
    )
    account = m.root / ACCOUNT
    pod = m.env.get("POD_NAME") or m.env.get("HOSTNAME", "")
    if not (host and pod and (account / "token").exists()):
        return []
    return [
        KubernetesSource(f"https://{f'[{host}]' if ':' in host else host}:{port}", pod, account)
    ]


def _slurm(m: MachineInfo) -> list[NoticeSource]:
    end = m.env.get("SLURM_JOB_END_TIME", "")
    return [LimitSource("slurm", float(end))] if end.isdigit() and int(end) else []


def _file(m: MachineInfo) -> list[NoticeSource]:
    path = m.env.get("HARNESS_NOTICE_FILE") or (
        f"{m.env['HARNESS_NODE_DIR']}/notice" if m.env.get("HARNESS_NODE_DIR") else ""
    )
    return [FileSource(path)] if path else []


def _limit(m: MachineInfo) -> list[NoticeSource]:
    return (
        [LimitSource("limit", moment(m.env["HARNESS_CAPACITY_END"]))]
        if m.env.get("HARNESS_CAPACITY_END")
        else []
    )


def _given(*names: str) -> Callable[[MachineInfo], bool]:
    return lambda m: any(m.env.get(name) for name in names)


def _none(_: MachineInfo) -> list[NoticeSource]:
    return []


# Inner environments come first: their SIGTERM is the one that reaches us.
CLOUDS: dict[str, CloudNotices] = {
    "file": CloudNotices(lambda m: bool(_file(m)), None, _file),
    "limit": CloudNotices(_given("HARNESS_CAPACITY_END"), None, _limit),
    "slurm": CloudNotices(_given("SLURM_JOB_ID"), 30.0, _slurm),
    "kubernetes": CloudNotices(_given("KUBERNETES_SERVICE_HOST"), 25.0, _kubernetes),
    "runpod": CloudNotices(_given("RUNPOD_POD_ID"), 5.0, _none),
    "sagemaker": CloudNotices(_given("SM_TRAINING_ENV"), 120.0, _none),
    "mithril": CloudNotices(
        lambda m: (m.root / "opt/mithril").is_dir(),
        30.0,
        lambda m: [MithrilSource(m.root / "opt/mithril/MITHRIL_SIGNAL.yml")],
    ),
    "nebius": CloudNotices(lambda m: m.dmi("Nebius"), 60.0, _none),
    "aws": CloudNotices(
        lambda m: (
            _given("AWS_EC2_METADATA_SERVICE_ENDPOINT", "INSTANCE_METADATA_URL")(m)
            or m.dmi("Amazon EC2")
        ),
        30.0,
        _aws,
    ),
    "gcp": CloudNotices(
        lambda m: (
            _given("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP")(m)
            or m.dmi("Google Compute Engine")
        ),
        25.0,
        _gcp,
    ),
    "azure": CloudNotices(
        lambda m: _given("HARNESS_AZURE_METADATA")(m) or m.dmi("7783-7084-3265-9085-8269-3286-77"),
        30.0,
        lambda m: [AzureSource(metadata_endpoint("azure", m), speaks_for_all=m.speaks_for_all)],
    ),
}


def places(env: Mapping[str, str], root: Path = Path("/"), asked: str = "") -> list[str]:
    """Return the names in `CLOUDS` that apply here: those `asked` for ("aws,gcp"), or those that
    are detected ("", or "auto" among the names). Raises BadInput."""
    machine = MachineInfo(env, root)
    names = [name for name in _words(asked) if ":" not in name]
    if unknown := [name for name in names if name not in (*CLOUDS, "auto", "none")]:
        raise BadInput(
            f"--notices: {', '.join(unknown)} is not known; wanted a list of {', '.join(CLOUDS)}, "
            "auto (what this machine says of itself), and sources of your own as "
            "pkg.module:function; or none"
        )
    if not _words(asked) or "auto" in names:
        return [name for name, row in CLOUDS.items() if name in names or row.here(machine)]
    return [name for name in names if name != "none"]


def _words(asked: str) -> list[str]:
    return [word for name in asked.split(",") if (word := name.strip())]


def detect(
    env: Mapping[str, str], root: Path = Path("/"), asked: str = "", speaks_for_all: bool = False
) -> list[NoticeSource]:
    """Return the sources of this machine, as detected or as `asked` for, and the user's own; never
    by trying addresses and waiting for timeouts. Raises BadInput."""
    machine = MachineInfo(env, root, speaks_for_all)
    found = [
        source for name in places(env, root, asked) for source in CLOUDS[name].sources(machine)
    ]
    for spec in dict.fromkeys(word for word in _words(asked) if ":" in word):
        found += sources_of(spec, taken={*CLOUDS, *(source.name for source in found)})
    return found


def sigterm_s(env: Mapping[str, str], root: Path = Path("/"), asked: str = "") -> float:
    """Return the grace period at SIGTERM, in seconds: the shortest that any of our places promises;
    30 s if none promises one."""
    promised = [
        grace for name in places(env, root, asked) if (grace := CLOUDS[name].sigterm_s) is not None
    ]
    return min(promised, default=30.0)
