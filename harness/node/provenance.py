"""The surroundings of a process: its git work tree, packages, image, variables and people.

It runs where a script trains, and where a run is launched. It knows no torch and no bucket, and
uses no network. Values that cannot be found out stay empty: a run does not fail for its record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.core.masking import VARIABLE, masked_patch, url_without_secrets
from harness.core.setup_record import OWNER, PEOPLE, GitState
from storage.terminal_text import plain

GIT_S = 5.0  # timeout of each git command; a work tree may be huge, or on a slow disk
DIFF_NBYTES = 1 << 20  # most bytes kept of uncommitted changes
HASHED_NBYTES = 256 << 20  # most bytes read of them
SCRIPT_NBYTES = 16 << 20
MOST_UNTRACKED = 50  # names
MOST_PACKAGES = 3000
MOST_VARIABLES = 200
MOST_LETTERS = 300
# variables that configure libraries; a script's own settings are in its flags and configuration
STEERS = re.compile(
    r"(CUBLAS|CUDA|CUDNN|FI|GLOO|HF|KMP|MKL|NCCL|NVIDIA|NVTE|OMP|PYTHONHASHSEED|PYTORCH|TORCH"
    r"|TORCHINDUCTOR|TRANSFORMERS|TRITON|XFORMERS)_?[A-Z0-9_]*"
)
# ... except those that identify the node or the generation
PLACES = re.compile(
    r"(CUDA|NVIDIA)_VISIBLE_DEVICES|TORCHELASTIC_.*|.*_(DIR|HOME|PATH|CACHE|FILE|ROOT|IFNAME)"
)
_INSTALLED = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+?)(?:-py\d.*)?\.(?:dist|egg)-info")
_IMAGES = ("HARNESS_IMAGE", "SKYPILOT_DOCKER_IMAGE", "CONTAINER_IMAGE", "SLURM_CONTAINER_IMAGE")
_VERSIONS = ("NVIDIA_PYTORCH_VERSION", "NVIDIA_BUILD_ID", "PYTORCH_VERSION", "CUDA_VERSION")


# ---- git -----------------------------------------------------------------------------------------
def git_state(
    folder: Path, keep_diff: bool = True, script: Path | None = None
) -> tuple[GitState, bytes]:
    """Return the state of the work tree that holds `folder`, and the kept part of its uncommitted
    changes, as a patch without secrets. `keep_diff`: False keeps only a hash of them. `script`: the
    patch adds it if git does not know it, also where there is no work tree."""
    said = _git(folder, "rev-parse", "HEAD", "--show-prefix", "--abbrev-ref", "HEAD").split("\n")
    commit, prefix, branch = [*said, "", "", ""][:3]
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        patch, signs = _new_file(folder, script) if script and keep_diff else (b"", "")
        return GitState(kept="whole" if patch else "", masked=len(signs)), patch
    found = _git(folder, "ls-files", "--others", "--exclude-standard", "--full-name", "-z", ":/")
    names = [name for name in found.split("\0") if name]
    holding = _git(folder, "for-each-ref", "--count=1", f"--contains={commit}", "refs/remotes")
    remote = _remote(folder, branch)
    diff, nbytes, beginning = _diff(folder)
    state = GitState(
        commit=commit,
        branch="" if branch == "HEAD" else plain(branch)[:MOST_LETTERS],
        remote=remote,
        folder=plain(prefix)[:1000],
        pushed=bool(holding.strip()) if remote else None,
        diff=diff,
        diff_nbytes=nbytes,
        kept="hash" if diff else "",
        untracked=tuple(plain(name)[:MOST_LETTERS] for name in names[:MOST_UNTRACKED]),
        untracked_count=len(names),
    )
    if not keep_diff:
        return state, b""
    state, patch = _kept(folder, state, beginning) if diff else (state, b"")
    if script is not None and state.kept != "cut" and not _known(folder, script):
        new, signs = _new_file(_top(folder, prefix), script)
        if new and len(patch) + len(new) <= DIFF_NBYTES:
            state = dataclasses.replace(state, kept="whole", masked=state.masked + len(signs))
            patch += new
    return state, patch


def _kept(folder: Path, state: GitState, beginning: bytes) -> tuple[GitState, bytes]:
    """Return the state and the kept patch of changes whose first bytes are `beginning`."""
    nbytes, context = state.diff_nbytes, 3
    patch, signs = _without_secrets(beginning)
    if " " in signs:  # committed secrets next to a change: a patch with masked context fails
        context = 0
        _, nbytes, beginning = _diff(folder, context)
        patch, signs = _without_secrets(beginning)
    cut = nbytes > len(beginning) or len(patch) > DIFF_NBYTES
    state = dataclasses.replace(
        state,
        kept="cut" if cut else "whole",
        masked=len(signs),
        masked_before=signs.count("-"),
        context=context,
    )
    return state, patch[:DIFF_NBYTES]


def _top(folder: Path, prefix: str) -> Path:
    for _ in Path(prefix).parts:
        folder = folder.parent
    return folder


def _known(folder: Path, script: Path) -> bool:
    """Return whether git knows the script: it is committed, or at least added."""
    return bool(_git(folder, "ls-files", "--error-unmatch", "--", str(script)))


def _new_file(top: Path, script: Path) -> tuple[bytes, str]:
    """Return a patch that creates a script below `top`, and the signs of its masked lines."""
    try:
        path = script.resolve().relative_to(top.resolve()).as_posix()
        text = script.read_bytes()[: DIFF_NBYTES + 1]
    except (OSError, ValueError):  # unreadable, or elsewhere: an installed program
        return b"", ""
    plain_path = path.isascii() and path.isprintable() and not re.search(r'[\s"\\]', path)
    if not text or len(text) > DIFF_NBYTES or b"\0" in text or not plain_path:
        return b"", ""
    lines = text.split(b"\n")
    ends = text.endswith(b"\n")
    lines = lines[:-1] if ends else lines
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    body = b"".join(b"+" + line + b"\n" for line in lines)
    tail = b"" if ends else b"\\ No newline at end of file\n"
    hunk = f"@@ -0,0 +1,{len(lines)} @@\n".encode()
    return _without_secrets(head.encode() + hunk + body + tail)


def _remote(folder: Path, branch: str) -> str:
    """Return the URL of the branch's remote, else of "origin", else of the first remote."""
    said = _git(folder, "config", "--get-regexp", r"^(remote\..*\.url|branch\..*\.remote)$")
    settings = dict(line.partition(" ")[::2] for line in reversed(said.splitlines()))
    mine = settings.get(f"branch.{branch}.remote", "")
    names = sorted(name for name in settings if name.endswith(".url"))
    wanted = (f"remote.{mine}.url", "remote.origin.url", *names)
    url = next((settings[name] for name in wanted if name in settings), "")
    return plain(url_without_secrets(url) if "://" in url else url)[:1000]


def _words(*words: str) -> list[str]:
    # the tree may belong to another user (containers); no program from its settings is run
    settings = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
    return ["git", "--no-optional-locks", *settings, *words]


def _git(folder: Path, *words: str) -> str:
    """Return git's output; "" if git fails, is missing, or takes too long."""
    try:
        out = subprocess.run(
            _words(*words),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return out.stdout.decode(errors="replace") if out.returncode == 0 else ""


def _diff(folder: Path, context: int = 3) -> tuple[str, int, bytes]:
    """Return the sha256 of the uncommitted changes ("": none, or git failed), their size in bytes,
    and their first bytes."""
    words = _words(
        *("-c", "diff.relative=false", "diff", "--no-color", "--no-ext-diff", "--no-textconv"),
        *("--binary", "--src-prefix=a/", "--dst-prefix=b/", f"-U{context}", "HEAD"),
    )
    try:
        process = subprocess.Popen(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return "", 0, b""
    assert process.stdout
    alarm = threading.Timer(GIT_S, process.kill)
    alarm.start()
    hashed, nbytes, kept = hashlib.sha256(), 0, bytearray()
    with process.stdout as out:
        while nbytes < HASHED_NBYTES and (data := out.read(1 << 20)):
            hashed.update(data)
            nbytes += len(data)
            kept += data[: max(0, DIFF_NBYTES - len(kept))]
    alarm.cancel()
    if nbytes >= HASHED_NBYTES:
        process.kill()
    elif process.wait() != 0:
        return "", 0, b""
    process.wait()
    return (hashed.hexdigest(), nbytes, bytes(kept)) if nbytes else ("", 0, b"")


def _without_secrets(patch: bytes) -> tuple[bytes, str]:
    """Return the patch without secrets, and the signs of its masked lines: "+", "-", " ". Bytes
    that are not text stay unchanged."""
    told, signs = [], ""
    for line, sign in masked_patch(patch.decode(errors="surrogateescape").split("\n")):
        told.append(line)
        signs += sign
    return "\n".join(told).encode(errors="surrogateescape"), signs


# ---- packages ------------------------------------------------------------------------------------
def packages(path: Sequence[str] | None = None) -> dict[str, str]:
    """Return all installed packages: name -> version, with " @ URL" if not installed from an index.
    It uses names of folders, since reading all metadata takes half a second."""
    found: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for entry in _listed(folder or os.curdir):
            parts = _INSTALLED.fullmatch(entry)
            if parts is None:
                continue
            name = re.sub(r"[-_.]+", "-", parts["name"]).lower()
            if name not in found and len(found) < MOST_PACKAGES:
                url = _direct_url(Path(folder or os.curdir) / entry)
                version = parts["version"]
                found[name] = f"{version} @ {url}" if url else version
    return dict(sorted(found.items()))


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # a zip file, or nothing
        return []


def _direct_url(info: Path) -> str:
    """Return a package's direct URL (PEP 610) in pip's form; for a folder "file:"; "" if it came
    from an index."""
    try:
        said = json.loads((info / "direct_url.json").read_text())
        url = url_without_secrets(str(said["url"]))
        if vcs := said.get("vcs_info"):
            return f"{vcs['vcs']}+{url}@{vcs['commit_id']}"[:MOST_LETTERS]
        return ("file:" if "dir_info" in said else url)[:MOST_LETTERS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


# ---- the rest ------------------------------------------------------------------------------------
def software(environ: Mapping[str, str]) -> dict[str, str]:
    """Return Python, operating system and image, as far as they are known."""
    found = {
        "python": platform.python_version(),
        "system": _system(),
        "image": next((environ[name] for name in _IMAGES if environ.get(name)), ""),
        "image versions": " ".join(f"{n}={environ[n]}" for n in _VERSIONS if environ.get(n)),
    }
    return {name: plain(value)[:MOST_LETTERS] for name, value in found.items() if value}


def _system() -> str:
    try:
        said = Path("/etc/os-release").read_text(errors="replace")
    except OSError:
        return platform.system()
    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', said, re.M)
    return named[1] if named else platform.system()


def hardware() -> dict[str, str]:
    """Return the facts known without a GPU library: machine, kernel and GPU driver."""
    found = {"machine": platform.machine(), "kernel": platform.release(), "driver": _driver()}
    return {name: plain(value)[:MOST_LETTERS] for name, value in found.items() if value}


def _driver() -> str:
    try:
        said = Path("/proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", said)
    return found[1] if found else ""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that configure libraries, without secrets and without those that differ
    between nodes."""
    return dict(list(_variables(environ))[:MOST_VARIABLES])


def _variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in sorted(environ):
        steers = STEERS.fullmatch(name) and not PLACES.fullmatch(name)
        if steers and not VARIABLE.search(name):
            yield name, plain(environ[name])[:MOST_LETTERS]


def people(environ: Mapping[str, str]) -> dict[str, str]:
    """Return owner, project, experiment and purpose (setup_record.PEOPLE). The default owner is
    the user who is logged in."""
    found = {name: environ.get(variable, "") for name, variable in PEOPLE.items()}
    found[OWNER] = found[OWNER] or environ.get("USER") or environ.get("LOGNAME") or ""
    return {name: plain(value)[:1000] for name, value in found.items() if value}


def file_hash(path: str) -> str:
    """Return the sha256 of a script; "" if it cannot be read or is too large for a script."""
    try:
        with open(path, "rb") as f:
            data = f.read(SCRIPT_NBYTES + 1)
    except OSError:
        return ""
    return hashlib.sha256(data).hexdigest() if len(data) <= SCRIPT_NBYTES else ""
