"""The wheel of this very package, which `harness launch` and `harness init` give to nodes.

No package index has the package, and a node must run the code that launched it. The wheel is made
of the files that run here, so an editable install, an installed wheel and an install from git all
ship what they are. It is kept below ~/.cache in a folder named by a hash of its content, the
address. A task mounts that folder at the same path on its nodes (`file_mounts`) and has the address
in its variable HARNESS_WHEEL.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import harness
import storage
from harness.core.world import BadInput

WHEEL_ENV = "HARNESS_WHEEL"  # the address, among the `envs` of a task that installs the wheel
WHEELS = Path(".cache", "spotharness", "wheels")  # below the home folder, here and on nodes
NAME = "spotharness"
ABOUT = "Wheel-Version: 1.0\nGenerator: spotharness\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def keep_wheel(home: Path) -> str:
    """Make the wheel below `home`, unless it is there, and return its address: a hash of its
    content. Raises BadInput."""
    # a folder of sources may have an egg-info, which is no installation
    known = importlib.metadata.distributions(name=NAME)
    found = next((one for one in known if one.read_text("METADATA")), None)
    if found is None:
        raise BadInput(
            f"wanted {NAME} as an installed package, whose wheel nodes get, found the files in "
            f"{Path(harness.__file__).parent} without one; pip install -e ."
        )
    about = f"{NAME}-{found.version}.dist-info"
    files = {**dict(_code()), **{f"{about}/{k}": v for k, v in _about(found).items()}}
    record = _record(files, f"{about}/RECORD")
    address = hashlib.sha256(record).hexdigest()[:16]
    path = home / WHEELS / address / f"{NAME}-{found.version}-py3-none-any.whl"
    if not path.exists():
        try:
            _write(path, {**files, f"{about}/RECORD": record})
        except OSError as e:
            raise BadInput(f"cannot keep the package's wheel in {path.parent}: {e}") from e
    return address


def _code() -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of every file of our packages that `pip install` would bring."""
    for package in (harness, storage):
        folder = Path(package.__file__ or "").parent
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder.parent)
            hidden = any(part.startswith((".", "__pycache__")) for part in inside.parts)
            if path.is_file() and not hidden and path.name != "README.md":
                yield inside.as_posix(), path.read_bytes()


def _about(found: importlib.metadata.Distribution) -> dict[str, bytes]:
    """Return the files about the package: dependencies, extras, commands, licence."""
    texts = {
        name: found.read_text(name)
        for name in ("METADATA", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    }
    return {"WHEEL": ABOUT.encode()} | {k: v.encode() for k, v in texts.items() if v}


def _record(files: Mapping[str, bytes], itself: str) -> bytes:
    """Return the list of files that a wheel must have, each with its hash and size."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
        rows.writerow((name, f"sha256={digest.decode()}", len(content)))
    rows.writerow((itself, "", ""))
    return out.getvalue().encode()


def _write(path: Path, files: Mapping[str, bytes]) -> None:
    """Write the wheel. It is there as a whole or not at all."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980, so that equal files make an equal wheel
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            z.writestr(entry, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(out.getvalue())
    os.replace(temporary, path)
