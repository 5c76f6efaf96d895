"""The setups of a run in its bucket: one object for each change.

Pure. The key of a setup names its seat (a world's rank 0, by generation, the code's `epoch`; or a
launch, by number) and the digest of its content, so one listing shows all setups, and whether one's
own equals the newest. Changes that were not committed to git lie beside them:

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
from harness.core.decoding import decoded
from harness.core.setup_record import LAUNCH, SESSION, Setup
from storage.canonical_json import BadObject, canonical, digest
from storage.errors import NotFound
from storage.stores.objects import ObjectStore

SETUP_NBYTES = 1 << 20
DIFF_NBYTES = 1 << 20
# fields that are dropped, in this order, from a setup that is too large, with their descriptions
_LARGE = (("task", "the task file"), ("config", "the configuration"), ("packages", "the packages"))

_KEY = re.compile(r"setup/(session|launch)-(\d{6,12})-([0-9a-f]{32})\.json")
_PATCH = re.compile(r"setup/diff-([0-9a-f]{32})\.patch")
_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True, order=True)
class SetupAt:
    """The place of a setup. `number`: the first generation with this setup, or the launch."""

    seat: str
    number: int
    digest: str

    @property
    def key(self) -> str:
        return f"{SETUP}{self.seat}-{self.number:06d}-{self.digest}.json"


def places(keys: Iterable[str], seat: str = SESSION) -> list[SetupAt]:
    """Return the setups of one seat among the keys under `setup/`, in order of numbers."""
    found = (_KEY.fullmatch(key) for key in keys)
    return sorted(SetupAt(f[1], int(f[2]), f[3]) for f in found if f and f[1] == seat)


def kept_digest(key: str) -> str:
    """Return the digest in a setup's or patch's key; "" for another key."""
    if patch := _PATCH.fullmatch(key):
        return patch[1]
    found = _KEY.fullmatch(key)
    return found[3] if found else ""


def encoded(setup: Setup) -> bytes:
    """Encode a setup within SETUP_NBYTES: fields that are too large are left out, and named."""
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
    """Decode a setup. Raises BadObject."""
    found = decoded(Setup, data, most_nbytes=SETUP_NBYTES)
    for text in (found.git.commit, found.git.diff, found.git.diff_key, found.script):
        if not _HEX.fullmatch(text) or len(text) > 64:
            raise BadObject(f"wanted a hash in hexadecimal, found {text!r:.60}")
    return found


# ---- reading -------------------------------------------------------------------------------------
def list_setups(store: ObjectStore, seat: str = SESSION) -> list[SetupAt]:
    """List the setups of one seat, in order of numbers. Raises StoreError."""
    return places(store.list(SETUP), seat)


def read_setup(store: ObjectStore, at: SetupAt) -> Setup:
    """Read a setup. Raises BadObject, also if its hash does not fit; StoreError."""
    data = store.get(at.key)
    if digest(data) != at.digest:
        raise BadObject(f"{at.key} was changed: its hash does not fit")
    return decode_setup(data)


def newest_setup(store: ObjectStore) -> Setup | None:
    """Return the setup of the run's newest session, or None if there is none or it cannot be read.
    Raises StoreError."""
    return readable(store, list_setups(store)[-1:])


def people_of(store: ObjectStore) -> dict[str, str]:
    """Return owner, project, experiment and purpose (setup_record.PEOPLE) from the newest
    session, or else from the newest launch. Raises StoreError."""
    keys = store.list(SETUP)
    return of_people(readable(store, places(keys, seat)[-1:]) for seat in (SESSION, LAUNCH))


def of_people(setups: Iterable[Setup | None]) -> dict[str, str]:
    """Return the people of the first setup that names any; {} if none does."""
    return next((found.people for found in setups if found is not None and found.people), {})


def readable(store: ObjectStore, found: list[SetupAt]) -> Setup | None:
    """Read the first of `found`; None if it is empty or the setup cannot be read. Raises
    StoreError."""
    try:
        return read_setup(store, found[0]) if found else None
    except (BadObject, NotFound):
        return None


def diff_key(found: str) -> str:
    return f"{SETUP}diff-{found}.patch"


def read_diff(store: ObjectStore, setup: Setup) -> bytes:
    """Return the kept part of a setup's uncommitted changes; b"" if there is none. Raises
    BadObject, StoreError."""
    if not setup.git.diff_key:
        return b""
    key = diff_key(setup.git.diff_key)
    data = store.get(key, 0, DIFF_NBYTES + 1)
    if len(data) > DIFF_NBYTES or digest(data) != setup.git.diff_key:
        raise BadObject(f"{key} was changed: its hash does not fit")
    return data


# ---- writing -------------------------------------------------------------------------------------
def with_diff(setup: Setup, diff: bytes) -> Setup:
    """Return `setup` with the digest of the kept part of its uncommitted changes. `diff`: that
    part; b"": nothing is kept."""
    if not diff:
        return setup
    return dataclasses.replace(setup, git=dataclasses.replace(setup.git, diff_key=digest(diff)))


def write_setup(store: ObjectStore, number: int, setup: Setup, diff: bytes) -> SetupAt:
    """Write `setup` as valid from generation (or launch) `number` on. The diff, which it names, is
    written first. Raises StoreError."""
    data = encoded(setup)
    at = SetupAt(setup.seat, number, digest(data))
    if diff:
        store.create(diff_key(digest(diff)), diff)
    store.create(at.key, data)
    return at


def write_launch(store: ObjectStore, setup: Setup, diff: bytes) -> SetupAt:
    """Write the setup of a `harness launch`, unless it equals that of the launch before; return its
    place. Raises StoreError."""
    before = list_setups(store, LAUNCH)
    mine = digest(encoded(setup))
    if before and before[-1].digest == mine:
        return before[-1]
    return write_setup(store, before[-1].number + 1 if before else 1, setup, diff)
