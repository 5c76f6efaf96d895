"""How a run was set up, in its bucket: one object for each time that it changed.

Pure. The key of a setup says who was set up so (a world's rank 0, by epoch; or a launch, by
number) and has the digest of what is in it, so one listing tells which setups there were, and
whether one's own is the same as the newest. What was not committed to git lies beside:

    setup/session-{epoch:06d}-{digest}.json
    setup/launch-{number:06d}-{digest}.json
    setup/diff-{digest}.patch
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from harness.bucket.layout import SETUP
from harness.core.setups import LAUNCH, SESSION, Setup
from harness.core.values import BadObject, canonical, decoded, digest
from storage.errors import NotFound
from storage.objects import ObjectStore

SETUP_NBYTES = 1 << 20
DIFF_NBYTES = 1 << 20
# what is given up first if a setup is too large, with what it is called
_LARGE = (("task", "the task file"), ("config", "the configuration"), ("packages", "the packages"))

_KEY = re.compile(r"setup/(session|launch)-(\d{6,12})-([0-9a-f]{32})\.json")
_PATCH = re.compile(r"setup/diff-([0-9a-f]{32})\.patch")
_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, order=True)
class SetupAt:
    """Where a setup lies. `number`: the epoch that was the first to be set up so, or the launch."""

    seat: str
    number: int
    digest: str

    @property
    def key(self) -> str:
        return f"{SETUP}{self.seat}-{self.number:06d}-{self.digest}.json"


def places(keys: Iterable[str], seat: str = SESSION) -> list[SetupAt]:
    """Of what lies under `setup/`, in order of numbers."""
    found = (_KEY.fullmatch(key) for key in keys)
    return sorted(SetupAt(f[1], int(f[2]), f[3]) for f in found if f and f[1] == seat)


def kept_digest(key: str) -> str:
    """Of what lies there; "": it is another key."""
    if patch := _PATCH.fullmatch(key):
        return patch[1]
    found = _KEY.fullmatch(key)
    return found[3] if found else ""


def encoded(setup: Setup) -> bytes:
    """Within SETUP_NBYTES: what is too large for that is left out, and named."""
    data = canonical(dataclasses.asdict(setup))
    for name, words in _LARGE:
        if len(data) <= SETUP_NBYTES:
            break
        left_out = (*setup.left_out, f"{words} (too large)")
        setup = dataclasses.replace(setup, **{name: type(getattr(setup, name))()})
        setup = dataclasses.replace(setup, left_out=left_out)
        data = canonical(dataclasses.asdict(setup))
    return data


def decode_setup(data: bytes) -> Setup:
    """Raises BadObject."""
    found = decoded(Setup, data, most_nbytes=SETUP_NBYTES)
    for text in (found.git.commit, found.git.diff, found.git.diff_key, found.script):
        if not _HEX.fullmatch(text) or len(text) > 64:
            raise BadObject(f"wanted a hash in hexadecimal, found {text!r:.60}")
    return found


# ---- reading -------------------------------------------------------------------------------------
def list_setups(store: ObjectStore, seat: str = SESSION) -> list[SetupAt]:
    """Raises StoreError."""
    return places(store.list(SETUP), seat)


def read_setup(store: ObjectStore, at: SetupAt) -> Setup:
    """Raises BadObject, StoreError."""
    data = store.get(at.key)
    if digest(data) != at.digest:
        raise BadObject(f"{at.key} was changed: its hash does not fit")
    return decode_setup(data)


def first_setup(store: ObjectStore, seat: str = SESSION) -> Setup | None:
    """How the run began; None: nobody has said, or it cannot be read. Raises StoreError."""
    return readable(store, list_setups(store, seat)[:1])


def newest_setup(store: ObjectStore, seat: str = SESSION) -> Setup | None:
    """How the run is set up now, or was in the end; None as in `first_setup`."""
    return readable(store, list_setups(store, seat)[-1:])


def people_of(store: ObjectStore) -> dict[str, str]:
    """Owner, project, experiment and purpose (setups.PEOPLE), as the newest session or launch says
    them. Raises StoreError."""
    keys = store.list(SETUP)
    return of_people(readable(store, places(keys, seat)[-1:]) for seat in (SESSION, LAUNCH))


def of_people(setups: Iterable[Setup | None]) -> dict[str, str]:
    """What the first one that knows says."""
    return next((found.people for found in setups if found is not None and found.people), {})


def readable(store: ObjectStore, found: list[SetupAt]) -> Setup | None:
    """The only one of them; None: there is none, or it cannot be read. Raises StoreError."""
    try:
        return read_setup(store, found[0]) if found else None
    except (BadObject, NotFound):
        return None


def diff_key(found: str) -> str:
    return f"{SETUP}diff-{found}.patch"


def read_diff(store: ObjectStore, setup: Setup) -> bytes:
    """What is kept of a setup's uncommitted changes; b"": nothing. Raises BadObject, StoreError."""
    if not setup.git.diff_key:
        return b""
    key = diff_key(setup.git.diff_key)
    data = store.get(key, 0, DIFF_NBYTES + 1)
    if len(data) > DIFF_NBYTES or digest(data) != setup.git.diff_key:
        raise BadObject(f"{key} was changed: its hash does not fit")
    return data


# ---- writing -------------------------------------------------------------------------------------
def with_diff(setup: Setup, diff: bytes) -> Setup:
    """The same, naming what is kept of its uncommitted changes (b"": nothing)."""
    if not diff:
        return setup
    return dataclasses.replace(setup, git=dataclasses.replace(setup.git, diff_key=digest(diff)))


def write_setup(store: ObjectStore, number: int, setup: Setup, diff: bytes) -> SetupAt:
    """`setup` as from epoch (or launch) `number` on; what it names first. Raises StoreError."""
    data = encoded(setup)
    at = SetupAt(setup.seat, number, digest(data))
    if diff:
        store.create(diff_key(digest(diff)), diff)
    store.create(at.key, data)
    return at


def write_launch(store: ObjectStore, setup: Setup, diff: bytes) -> SetupAt:
    """Of `harness launch`, unless it is the same as the launch before. Raises StoreError."""
    before = list_setups(store, LAUNCH)
    mine = digest(encoded(setup))
    if before and before[-1].digest == mine:
        return before[-1]
    return write_setup(store, before[-1].number + 1 if before else 1, setup, diff)
