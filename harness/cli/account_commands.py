"""Commands about the machines of an account: `harness guard` lists what is alive and ends what is
forgotten, `harness image` writes the Dockerfile of what nodes start from.

The folder that `harness image` writes is what `docker build` is given. The image has torch, the
wheel of this very package and the script's requirements in a venv, and the mark there that the
setup of `harness init` looks for: with the same torch and wheel a node's setup does nothing, with a
newer wheel it installs that alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from harness.cli.common import DONE, FAILED, is_final, sky_broker
from harness.clouds.account import Alive, alive, end, end_unknown, unknown_to_skypilot
from harness.clouds.own_wheel import WHEELS, keep_wheel
from harness.clouds.sky_broker import SkyError
from harness.core.flags import flag, positional
from harness.core.input_files import output_folder, yaml_given
from harness.core.world import BadInput
from storage.errors import StoreError
from storage.stores.store_urls import open_store
from storage.terminal_text import Console


# ---- harness guard -------------------------------------------------------------------------------
@dataclass(frozen=True)
class GuardFlags:
    end: str = flag("", "names of clusters to end, with commas", metavar="NAMES")
    end_idle: bool = flag(False, "end what costs money for nothing: no job, or a run that is over")
    timeout_s: float = flag(600.0, "how long to wait until what is ended is gone")


def guard(flags: GuardFlags) -> int:
    """List every cluster of the account: cost, owner, what works there, what ends it.

    AWS, Google and Azure are asked too, for machines that SkyPilot has forgotten.
    """
    sky, console = sky_broker("guard"), Console()
    try:
        found = alive(sky, _has_ended)
        strays, silent = unknown_to_skypilot(sky, _has_ended)
        found += strays
        show(found, console)
        for who, why in silent.items():
            console.print(f"Not asked: {who}: {why}", markup=False, highlight=False, soft_wrap=True)
        names = [name.strip() for name in flags.end.split(",") if name.strip()]
        if unknown := sorted(set(names) - {one.name for one in found}):
            raise BadInput(f"--end: wanted names of the list above, found {', '.join(unknown)}")
        if flags.end_idle:
            names += [one.name for one in found if one.forgotten and one.name not in names]
        if not names:
            lost = any(one.forgotten or (one.ours and not one.known) for one in found)
            return FAILED if lost else DONE
        of_cloud = {one.name for one in found if not one.known} & set(names)
        ended = end_unknown(sky, of_cloud, flags.timeout_s) if of_cloud else []
        ended += end(sky, set(names) - of_cloud, flags.timeout_s)
    except SkyError as e:
        console.print(f"Refused: {e}", markup=False, highlight=False, soft_wrap=True)
        return FAILED
    finally:
        sky.close()
    console.print(f"Ended: {', '.join(ended) or 'none'}.")
    return DONE


def _has_ended(url: str) -> bool | None:
    try:
        return is_final(open_store(url))
    except (StoreError, BadInput):
        return None


def show(found: list[Alive], console: Console) -> None:
    """Print what is alive, and what of it costs money for nothing."""
    if not found:
        console.print("No cluster of SkyPilot's. (Machines made by hand are not seen here.)")
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("cluster", no_wrap=True)  # to be copied
    for column in ("owner", "hours", "$/h", "$", "works", "ends when idle"):
        number = column in ("hours", "$/h", "$")
        table.add_column(column, justify="right" if number else "left", no_wrap=number)
    for one in found:
        works = one.idle or ("its run is over" if one.over else one.job or "is being launched")
        lease = "never" if one.lease_min is None else f"after {one.lease_min} min"
        if not one.known:
            works, lease = one.idle or ("its run is over" if one.over else "?"), "?"
        table.add_row(
            one.name,
            one.owner,
            f"{one.hours:.1f}",
            "?" if one.usd_per_h is None else f"{one.usd_per_h:.2f}",
            "?" if one.usd is None else f"{one.usd:.2f}",
            works,
            lease,
        )
    console.print(table)
    hourly = sum(one.usd_per_h or 0.0 for one in found)
    counted = "1 cluster" if len(found) == 1 else f"{len(found)} clusters"
    console.print(f"{counted}, {hourly:.2f} USD an hour.", highlight=False)
    for one in found:
        if one.forgotten:
            word, why = "FORGOTTEN", one.idle or "its run is over"
        elif not one.known:
            word, why = "UNKNOWN" if one.ours else "SOMEONE ELSE'S", "SkyPilot does not know it"
        else:
            continue
        run = f"; run {one.run}" if one.run else ""
        console.print(
            f"{word}: {one.name} ({one.where}): {why}{run}. End it: harness guard --end {one.name}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


# ---- harness image -------------------------------------------------------------------------------
PLACE = "/opt/spotharness"  # the image's venv, which a task names in its variable VENV
EXTRA = re.compile(r"[a-z]+(,[a-z]+)*")
PACKAGES = "build-essential ca-certificates curl fuse git openssh-server patch rsync socat sudo"

DOCKERFILE = """\
# Everything that a node installs, made by `harness image`. Build it on a computer like the nodes
# (linux/amd64); torch's wheels bring CUDA, the node brings the driver.
FROM {base}
# A compiler for torch.compile, and what SkyPilot would install in each container.
RUN apt-get update && apt-get install -y --no-install-recommends {packages} \\
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv {place}
# Torch comes first: it is the largest, and nothing installed later may change it.
RUN {place}/bin/python -m pip install --no-cache-dir {torch}
{requirements}\
COPY {wheel} /tmp/
RUN {place}/bin/python -m pip install --no-cache-dir {torch} '/tmp/{wheel}[{extra}]' \\
    && rm /tmp/{wheel}
# A node's setup finds this mark, and installs nothing.
RUN echo {mark} > {place}/.installed
ENV PATH={place}/bin:$PATH
"""
REQUIREMENTS = """\
COPY requirements.txt /tmp/
RUN {place}/bin/python -m pip install --no-cache-dir {torch} -r /tmp/requirements.txt
"""


@dataclass(frozen=True)
class ImageFlags:
    task: str = positional("a task file; its TORCH and its requirements.txt count")
    out: str = flag("image", "the folder to write, for `docker build`", check=output_folder)
    tag: str = flag(
        "my-registry/my-image:tag", "what the image is to be called", metavar="REGISTRY/NAME:TAG"
    )
    requirements: str = flag(
        "", "the script's packages, as pip takes them; default: requirements.txt of the workdir"
    )
    base: str = flag(
        f"python:{sys.version_info.major}.{sys.version_info.minor}-slim-bookworm",
        "the image to begin with: a Debian or Ubuntu with Python",
    )
    extra: str = flag("worker", "extras of spotharness for nodes, with commas")


def image(flags: ImageFlags) -> int:
    """Write a Dockerfile with what a task's setup installs; nodes then start fast.

    Print how to build it, and the lines that the task needs.
    """
    if not EXTRA.fullmatch(flags.extra):
        raise BadInput(f"--extra {flags.extra!r}: wanted names with commas, such as worker,data")
    folder = Path(flags.out)
    write(folder, Path(flags.task), flags.requirements, flags.base, flags.extra)
    print(f"wrote {folder / 'Dockerfile'}")
    print("next:")
    print(f"  docker build --platform linux/amd64 -t {flags.tag} {folder}")
    print(f"  docker push {flags.tag}")
    print(f"and in {flags.task}:")
    print(f"  resources: {{image_id: 'docker:{flags.tag}', ...}}")
    print(f"  envs: {{VENV: {PLACE}, ...}}")
    return DONE


def write(folder: Path, task: Path, requirements: str, base: str, extra: str) -> None:
    """Write the folder. Raises BadInput, and writes nothing, if something is there that this did
    not write."""
    documents = yaml_given(task, "a SkyPilot task YAML")
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise BadInput(f"{task}: wanted one SkyPilot task, `field: value` lines")
    config = documents[0]
    known = folder / "Dockerfile"
    if folder.exists() and any(folder.iterdir()) and not known.exists():
        raise BadInput(f"--out {folder}: wanted an empty folder or one of `harness image`")
    address = keep_wheel(Path.home())
    (wheel,) = (Path.home() / WHEELS / address).glob("*.whl")
    given = _requirements(config, requirements)
    torch = _torch(config)
    about = {"place": PLACE, "torch": torch}
    text = DOCKERFILE.format(
        **about,
        base=base,
        packages=PACKAGES,
        requirements=REQUIREMENTS.format(**about) if given else "",
        wheel=wheel.name,
        extra=extra,
        mark=json.dumps(f"{torch} {address}"),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, folder / wheel.name)
        if given:
            shutil.copy(given, folder / "requirements.txt")
        known.write_text(text)
    except OSError as e:
        raise BadInput(f"cannot write into {folder}: {e.strerror}; name another --out") from e


def _torch(config: dict[str, object]) -> str:
    """Return the torch that nodes install, as pip takes it: the task's, else the one that is
    installed here. Raises BadInput."""
    envs = config.get("envs")
    asked = str(envs.get("TORCH") or "") if isinstance(envs, dict) else ""
    if asked:
        if not re.fullmatch(r"[A-Za-z0-9_.=<>~!+\[\],-]+", asked):
            raise BadInput(f"envs.TORCH: wanted one package such as torch==2.13.0, found {asked!r}")
        return asked
    try:
        return f"torch=={importlib.metadata.version('torch').partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        raise BadInput(
            "wanted the version of torch for the nodes: the task has no variable TORCH, and no "
            "torch is installed here; write TORCH: torch==2.13.0 under envs"
        ) from None


def _requirements(config: dict[str, object], asked: str) -> Path | None:
    """Return the file with the script's packages; None if there is none. Raises BadInput."""
    if asked:
        if not Path(asked).is_file():
            raise BadInput(f"--requirements {asked}: no such file (seen from {Path.cwd()})")
        return Path(asked)
    workdir = config.get("workdir")
    found = Path(workdir if isinstance(workdir, str) else ".").expanduser() / "requirements.txt"
    return found if found.is_file() else None
