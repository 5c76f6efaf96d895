"""SkyPilot task files: read one, fill in the user's values, and refuse what SkyPilot would refuse,
before money is spent.

If SkyPilot is installed, its own schemas decide. A GPU node needs no SkyPilot, so there is a small
table for use without it. This module knows nothing of clouds. SkyPilot is imported only when a file
is read, because that takes 2-3 s.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.clouds import sky_private
from harness.core.input_files import yaml_given
from harness.core.world import BadInput

ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Secrets(dict[str, str]):
    """A dict of values that must not get into logs: printing it shows the names only."""

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted(self))})"

    __str__ = __repr__


@dataclass(frozen=True)
class Task:
    """One SkyPilot task, with the user's values filled in."""

    path: Path
    name: str
    run: str
    setup: str = ""
    envs: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    workdir: Path | None = None  # None: the file names none
    git: Mapping[str, str] | None = None  # a workdir that is a repository: {"url", "ref"}
    num_nodes: int = 1
    resources: Mapping[str, Any] = field(default_factory=dict)
    file_mounts: Mapping[str, Any] = field(default_factory=dict)
    volumes: Mapping[str, Any] = field(default_factory=dict)  # path on nodes -> SkyPilot's volume
    managed_secrets: tuple[str, ...] = ()  # names whose values only a SkyPilot server knows

    @property
    def use_spot(self) -> bool:
        return bool(self.resources.get("use_spot", False))

    @property
    def recover_on_exit_codes(self) -> tuple[int, ...]:
        recovery = self.resources.get("job_recovery")
        codes = recovery.get("recover_on_exit_codes", ()) if isinstance(recovery, dict) else ()
        return (codes,) if isinstance(codes, int) else tuple(codes or ())


def pairs(given: Sequence[str], environ: Mapping[str, str], flag: str = "--env") -> dict[str, str]:
    """Parse the `K=V` values of a command line. A bare `K` takes its value from the environment, as
    in SkyPilot. `flag`: the option's name, for messages. Raises BadInput."""
    found: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not ENV_NAME.fullmatch(name):
            raise BadInput(
                f"{flag} {item}: {name!r} is not a variable name; write {flag} NAME=value"
            )
        if not equals and name not in environ:
            raise BadInput(
                f"{flag} {name}: it has no value and is not set in your environment; write {flag} "
                f"{name}=value"
            )
        found[name] = value if equals else environ[name]
    return found


def load(
    path: str | Path,
    envs: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    *,
    use_skypilot: bool | None = None,
) -> Task:
    """Read a task file. `envs` and `secrets` override its values. `use_skypilot`: check it with
    SkyPilot's schemas; `None` means if SkyPilot is installed. Raises BadInput."""
    path = Path(path)
    config = _read(path)
    _check_names(path, config)
    _stringify(config, "envs")
    _stringify(config, "secrets")
    if use_skypilot is None:
        use_skypilot = importlib.util.find_spec("sky") is not None
    (_check_with_skypilot if use_skypilot else _check_with_table)(path, config)
    _check_recovery(path, config)
    merged: dict[str, str | None] = {**(config.get("envs") or {}), **(envs or {})}
    missing = [name for name, value in merged.items() if value is None]
    if missing:
        raise BadInput(
            f"{path}: envs.{missing[0]} has no value; give it one with --env {missing[0]}=value, "
            f'or write {missing[0]}: "" in the file if it may be empty'
        )
    values = {name: value for name, value in merged.items() if value is not None}
    given, managed = _secrets(config.get("secrets"), secrets or {})
    run = config.get("run") or ""
    _check_text(path, {"run": run, "setup": config.get("setup") or ""})
    _check_text(path, {f"envs.{name}": value for name, value in values.items()})
    _check_text(path, {f"secrets.{name}": value for name, value in given.items()})
    if not run.strip():
        raise BadInput(
            f"{path}: wanted a `run` section with the command of a node, found none; `exec harness "
            "run ...` is usual"
        )
    num_nodes = 1 if config.get("num_nodes") is None else config["num_nodes"]
    if num_nodes < 1:
        raise BadInput(f"{path}: num_nodes must be 1 or more, found {num_nodes}")
    workdir = config.get("workdir")
    return Task(
        path=path,
        name=config.get("name") or path.stem,
        run=run,
        setup=config.get("setup") or "",
        envs=values,
        secrets=given,
        workdir=Path(_fill(workdir, values)).expanduser() if isinstance(workdir, str) else None,
        git=dict(workdir) if isinstance(workdir, dict) else None,
        num_nodes=num_nodes,
        resources=config.get("resources") or {},
        file_mounts=config.get("file_mounts") or {},
        volumes=config.get("volumes") or {},
        managed_secrets=managed,
    )


def _check_text(path: Path, texts: Mapping[str, str]) -> None:
    """Refuse text that no process can be given. The message leaves out the text, which may be a
    secret. Raises BadInput."""
    for name, text in texts.items():
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise BadInput(f"{path}: {name}: wanted text, found a zero byte or broken Unicode")


def check_local(task: Task) -> None:
    """Refuse what the local cloud cannot do. Its nodes run in place: nothing is copied, `setup` is
    not run, and a member is one node. A mount of a path at itself is there already. Raises
    BadInput."""
    if task.num_nodes != 1:
        raise BadInput(
            f"{task.path}: num_nodes is {task.num_nodes}, but a member of the local cloud is one "
            "node; remove num_nodes and ask for several members with --nodes"
        )
    if task.git is not None:
        raise BadInput(
            f"{task.path}: workdir is a git repository; the local cloud runs in place: write "
            "workdir: . instead"
        )
    if elsewhere := sorted(to for to, source in task.file_mounts.items() if source != to):
        raise BadInput(
            f"{task.path}: file_mounts: the local cloud, whose nodes are processes of this "
            f"computer, would have to write {elsewhere[0]!r} here; read it by its URL, or mount "
            "a path at itself"
        )
    if task.volumes:
        raise BadInput(
            f"{task.path}: volumes: the local cloud has none, and {min(task.volumes)!r} would be "
            "an ordinary path of this computer; read it by its URL, or from a folder that is here"
        )
    if task.managed_secrets:
        name = task.managed_secrets[0]
        raise BadInput(
            f"{task.path}: secrets.{name} is known to a SkyPilot server only; give it here with "
            f"--secret {name}=value"
        )
    if task.workdir is not None and not task.workdir.is_dir():
        raise BadInput(
            f"{task.path}: workdir {str(task.workdir)!r} is not a directory (seen from "
            f"{Path.cwd()})"
        )


def _read(path: Path) -> dict[str, Any]:
    documents = yaml_given(path, "a SkyPilot task YAML")
    if len(documents) != 1:
        raise BadInput(
            f"{path}: wanted one task, found {len(documents)} YAML documents; a run has one task, "
            "not a pipeline"
        )
    if not isinstance(documents[0], dict):
        raise BadInput(
            f"{path}: wanted `field: value` lines of a SkyPilot task, found a "
            f"{type(documents[0]).__name__}"
        )
    return documents[0]


def _check_names(path: Path, section: Any) -> None:
    """Refuse field names that are not text: SkyPilot's schemas crash on them. Raises BadInput."""
    for name, value in section.items() if isinstance(section, dict) else ():
        if not isinstance(name, str):
            raise BadInput(f"{path}: wanted names of fields as text, found {name!r:.80}")
        _check_names(path, value)
    for value in section if isinstance(section, list) else ():
        _check_names(path, value)


def _stringify(config: dict[str, Any], key: str) -> None:
    """Turn the values of a section into text in place: `STEPS: 100` is "100", as in SkyPilot."""
    section = config.get(key)
    if isinstance(section, dict):
        config[key] = {str(k): None if v is None else str(v) for k, v in section.items()}


def _secrets(section: Any, overrides: Mapping[str, str]) -> tuple[Secrets, tuple[str, ...]]:
    """Split the secrets into values, and names that a SkyPilot server resolves (`KEY:` without a
    value, or `secrets:KEY`)."""
    found: dict[str, str | None] = (
        dict.fromkeys(section) if isinstance(section, list) else dict(section or {})
    )
    found = {k.removeprefix("secrets:"): v for k, v in found.items()} | dict(overrides)
    return Secrets({k: v for k, v in found.items() if v is not None}), tuple(
        k for k, v in found.items() if v is None
    )


def _fill(text: str, envs: Mapping[str, str]) -> str:
    """Expand `$NAME` and `${NAME}` from the task's own envs, as SkyPilot does in paths."""
    return re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda m: envs.get(m[1] or m[2], m[0]), text)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return (
        f"did you mean {near[0]!r}?"
        if near
        else f"known are {', '.join(sorted(k for k in known if k[:1] != '_'))}"
    )


# ---- with SkyPilot -------------------------------------------------------------------------------
def _check_with_skypilot(path: Path, config: dict[str, Any]) -> None:
    # otherwise importing SkyPilot would set up its usage reports
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    of_task, of_resources = sky_private.task_schemas()
    for prefix, value, schema in (
        ("", config, of_task),
        ("resources", config.get("resources"), of_resources),
    ):
        if value is None:
            continue
        try:
            sky_private.validate(value, schema)
        except ValueError as e:
            raise BadInput(f"{path}: {_where(value, schema, prefix)}{_oneline(str(e))}") from e


def _where(value: Any, schema: Mapping[str, Any], prefix: str) -> str:
    """Return the dotted name of the field that a schema refuses, followed by ": ". SkyPilot's own
    message leaves nested names out."""
    clean = {k: v for k, v in value.items() if v is not None}
    errors = sky_private.schema_errors(clean, schema)
    if not errors:
        return f"{prefix}: " if prefix else ""
    names = [str(p) for p in min(errors, key=lambda e: len(e.absolute_path)).absolute_path]
    where = ".".join([prefix, *names] if prefix else names)
    return f"{where}: " if where else ""


def _oneline(text: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # SkyPilot colours its messages
    return "; ".join(line.strip() for line in plain.splitlines() if line.strip())


# ---- without SkyPilot ----------------------------------------------------------------------------
_STR, _INT, _DICT, _LIST, _BOOL, _NUMBER = (str,), (int,), (dict,), (list,), (bool,), (int, float)
_TASK_FIELDS: dict[str, tuple[type, ...]] = {
    "name": _STR,
    "workdir": (str, dict),
    "event_callback": _STR,
    "num_nodes": _INT,
    "resources": _DICT,
    "file_mounts": _DICT,
    "service": _DICT,
    "pool": _DICT,
    "setup": _STR,
    "run": _STR,
    "envs": _DICT,
    "secrets": (dict, list),
    "managed_secrets": _LIST,
    "inputs": _DICT,
    "outputs": _DICT,
    "file_mounts_mapping": _DICT,
    "config": _DICT,
    "volumes": _DICT,
    "volume_mounts": _LIST,
    "api_server_access": _BOOL,
    "_metadata": _DICT,
}
_RESOURCES_FIELDS: dict[str, tuple[type, ...]] = {
    "cloud": _STR,
    "region": _STR,
    "zone": _STR,
    "infra": _STR,
    "cpus": (str, int, float),
    "memory": (str, int, float),
    "accelerators": (str, dict, list),
    "instance_type": _STR,
    "use_spot": _BOOL,
    "job_recovery": (str, dict),
    "volumes": _LIST,
    "disk_size": (str, int),
    "ephemeral_storage": (str, int),
    "disk_tier": _STR,
    "network_tier": _STR,
    "local_disk": _STR,
    "max_hourly_cost": _NUMBER,
    "ports": (str, int, list),
    "labels": _DICT,
    "accelerator_args": _DICT,
    "image_id": (str, dict),
    "autostop": (bool, int, str, dict),
    "priority": _INT,
    "priority_class": _STR,
    "any_of": _LIST,
    "ordered": _LIST,
}
_RECOVERY_FIELDS = ("strategy", "max_restarts_on_errors", "recover_on_exit_codes")


def _check_with_table(path: Path, config: dict[str, Any]) -> None:
    _check_fields(path, "", config, _TASK_FIELDS)
    for name in config.get("envs") or {}:
        if not ENV_NAME.fullmatch(name):
            raise BadInput(f"{path}: envs.{name}: not a variable name; use letters, digits and _")
    resources = config.get("resources") or {}
    _check_fields(path, "resources", resources, _RESOURCES_FIELDS)
    for key in ("any_of", "ordered"):
        for number, choice in enumerate(resources.get(key) or ()):
            if not isinstance(choice, dict):
                raise BadInput(
                    f"{path}: resources.{key}.{number}: wanted `field: value` lines, found "
                    f"{choice!r}"
                )
            inner = {k: v for k, v in _RESOURCES_FIELDS.items() if k not in ("any_of", "ordered")}
            _check_fields(path, f"resources.{key}.{number}", choice, inner)


def _check_fields(
    path: Path, prefix: str, section: Mapping[str, Any], known: Mapping[str, tuple[type, ...]]
) -> None:
    for name, value in section.items():
        where = f"{prefix}.{name}" if prefix else str(name)
        if name not in known:
            raise BadInput(f"{path}: {where}: no such field; {_nearest(str(name), list(known))}")
        types = known[name]
        if value is not None and (
            not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        ):
            wanted = " or ".join(t.__name__ for t in types)
            raise BadInput(
                f"{path}: {where}: wanted {wanted}, found {value!r} ({type(value).__name__})"
            )


def _check_recovery(path: Path, config: dict[str, Any]) -> None:
    """Refuse unknown job_recovery keys and bad exit codes. SkyPilot's client accepts any key and
    only its server refuses it; a misspelt exit code list would cost a run. Raises BadInput."""
    resources = config.get("resources") or {}
    places = [("resources", resources)]
    for key in ("any_of", "ordered"):
        places += [
            (f"resources.{key}.{i}", choice) for i, choice in enumerate(resources.get(key) or ())
        ]
    for where, place in places:
        recovery = place.get("job_recovery")
        for name in recovery if isinstance(recovery, dict) else ():
            if name not in _RECOVERY_FIELDS:
                raise BadInput(
                    f"{path}: {where}.job_recovery.{name}: no such field; "
                    f"{_nearest(str(name), _RECOVERY_FIELDS)}"
                )
        codes = recovery.get("recover_on_exit_codes", []) if isinstance(recovery, dict) else []
        for code in codes if isinstance(codes, list) else [codes]:
            if not isinstance(code, int) or not 0 <= code <= 255:
                raise BadInput(
                    f"{path}: {where}.job_recovery.recover_on_exit_codes: wanted codes of 0..255, "
                    f"found {code!r}"
                )
