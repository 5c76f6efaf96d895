"""`save` and `load`: store or restore a whole training state in two lines, with the commit protocol
beneath.

    storage.save("s3://bucket/mine", {"model": model, "optimizer": opt, "step": 7}, step=7, keep=3)
    state = storage.load("s3://bucket/mine")                        # new tensors, on the CPU
    storage.load("s3://bucket/mine", into={"model": model, "optimizer": opt, "step": 0})  # in place

A state is a tensor, a number, a string, bytes, or dicts, lists and tuples of them; an object with
`state_dict` and `load_state_dict` stands for its state. Nothing is pickled. Under torch.distributed
all ranks call both together: sharded tensors (DTensor) are written and read by the ranks that hold
them, other values are assumed to be the same on all ranks.

Both return when everything is done. A run of `harness` saves beside its training instead; its
snapshots can be loaded here, but not added to.

Errors (all are StoreErrors, and the same on all ranks):
    NoSnapshot        there is nothing to load
    StepBehind        a greater step is committed already
    StateMismatch     `into` is not laid out like the saved state, or the ranks' states differ
    UnsupportedValue  the state holds something that cannot be stored without pickling it
    Rewind            more than one damaged snapshot would be passed over
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from storage.errors import (
    NoSnapshot,
    NotFound,
    StateMismatch,
    StepBehind,
    StoreError,
    StoreUnavailable,
    UnsupportedValue,
)
from storage.snapshots.manifest import PARTS, Manifest, Ref, SnapshotCorrupt
from storage.snapshots.reader_leases import Watch, held, reading
from storage.snapshots.restore import (
    PAUSES_S,
    ReadRetries,
    Restore,
    Rewind,
    bad_hosts,
    this_machine,
)
from storage.snapshots.retention import TAKEN, Keep
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore
from storage.stores.store_urls import normalize, open_store
from storage.tensors import dcp, loading, state_tree
from storage.tensors.save_ranks import Ranks
from storage.tensors.state_tree import TAG

log = logging.getLogger(__name__)

BY = "storage.save"  # the value of a manifest's data["by"], which names the code that saved it


@runtime_checkable
class Stateful(Protocol):
    """An object with a state: a module, an optimizer, a scheduler, a class of your own."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


# ---- saving --------------------------------------------------------------------------------------
def save(
    url: str | os.PathLike[str] | ObjectStore,
    state: Any,
    *,
    step: int,
    keep: int | Keep | None = None,
    metrics: Mapping[str, float] | None = None,
    rewind: bool = False,
    alone: bool = False,
) -> Ref:
    """Store a state as the snapshot of `step`; it is committed, and the newest, on return.

    keep:     how many snapshots to keep, or which; None: all. The newest is always kept.
    metrics:  numbers for `Keep(best="loss:min")`.
    rewind:   continue from an older snapshot: `step` may be less than the newest one's, which
              is kept.
    alone:    only this process saves, though torch.distributed is initialized.

    Chunks that the newest snapshot has are not sent again. Needs host memory for one copy of what
    this rank writes. Raises StepBehind, UnsupportedValue, StateMismatch, StoreError.
    """
    if step < 0:
        raise ValueError(f"save(step={step}): wanted a number of steps, 0 or more")
    kept = Keep(last=keep) if isinstance(keep, int) else keep
    ranks = Ranks(alone)
    store, _ = _opened(url)
    snapshots = Snapshots(store)
    tensors, plain = ranks.each(lambda: _split(_plain(state)))
    ref, base, token = ranks.first(lambda: _next(snapshots, step, rewind))
    saver = dcp.Saver(snapshots, ranks.group)
    try:
        saver.plan(tensors)
    except ValueError as e:  # raised on all ranks alike
        raise StateMismatch(str(e)) from e
    data: dict[str, Any] = {}
    if ranks.rank == 0:
        before = base.ref.name if base is not None else ""
        numbers = {TAKEN: time.time(), "metrics": dict(metrics or {})}
        data = {"state": plain, "by": BY, "resumed": before, **numbers}

    def write() -> None:
        staged = saver.stage(tensors)
        mine = snapshots.write(
            ref, ranks.rank, ranks.world, staged.files(), staged.layout.index, data, token, base
        )
        if mine.token != token:
            raise StoreError(
                f"{store.url}: somebody else saves snapshot {ref} at the same time; one writer "
                "saves to a URL: give each its own"
            )

    def commit() -> None:
        if snapshots.commit(ref, ranks.world) is None:
            raise StoreUnavailable(
                f"{store.url}: snapshot {ref} was not committed, since what it builds on was "
                "pruned meanwhile; save it again"
            )
        if kept is not None:
            _prune(snapshots, kept)

    ranks.each(write)
    ranks.first(commit)
    return ref


def _next(snapshots: Snapshots, step: int, rewind: bool) -> tuple[Ref, Manifest | None, str]:
    """Return the new snapshot's ref, the newest snapshot's manifest (None: none is readable), and a
    token."""
    committed, doomed = snapshots.manifests()
    usable = committed - doomed - snapshots.quarantined()
    newest, base = max(usable, default=None), None
    if newest is not None:
        with contextlib.suppress(SnapshotCorrupt, NotFound):  # then the new snapshot has no base
            base = snapshots.load(newest)
            if base.data.get("by") != BY:
                raise StoreError(
                    f"{snapshots.store.url}: its snapshots were not saved by storage.save, but by "
                    "a run; wanted a URL of its own, for example one level below"
                )
        if step < newest.step and not rewind:
            raise StepBehind(
                f"{snapshots.store.url} has committed step {newest.step}; step {step} would go "
                "behind it. Go on from storage.load(url), or, to go on from an older snapshot on "
                "purpose, save with rewind=True; or save to another URL"
            )
    last = max(committed | doomed, default=Ref(0, -1))
    # the newest snapshot has the greatest (epoch, step), so a step that goes back or is saved again
    # needs a new generation
    ref = Ref(last.epoch if step > last.step else last.epoch + 1, step)
    # parts of a writer that died or still writes
    while snapshots.store.list(f"{PARTS}{ref.name}/"):
        ref = Ref(ref.epoch + 1, step)
    return ref, base, secrets.token_hex(6)


def _prune(snapshots: Snapshots, keep: Keep) -> None:
    try:
        snapshots.prune(keep, expired=_watch(snapshots.store.url))
    except StoreError as e:  # the new snapshot is committed; the next save prunes
        log.warning("storage.save: old snapshots were not pruned: %s", e)


@functools.lru_cache(maxsize=64)
def _watch(url: str) -> Watch:
    """Return the one Watch for all saves of this process, since dead readers are detected over
    time."""
    return Watch()


# ---- loading -------------------------------------------------------------------------------------
def load(
    url: str | os.PathLike[str] | ObjectStore,
    *,
    step: int | None = None,
    epoch: int | None = None,
    into: Any = None,
    only: Collection[str] | None = None,
    allow_rewind: bool = False,
    alone: bool = False,
    look_again_s: Sequence[float] = PAUSES_S,
) -> Any:
    """Load the newest whole snapshot, or that of `step`, and return the state; every byte is
    verified.

    epoch:         generation of `step`, if several have committed it; None: the newest.
    into:          what to load in place: tensors, objects with `load_state_dict`, and dicts and
                   lists of them. The whole saved state is loaded; values that `into` lacks are
                   created and put in its dicts. It is returned. None: return a new state, with
                   tensors on the CPU.
    only:          load these keys alone, such as ["model"], of a state that is a dict.
    allow_rewind:  pass over more than one damaged snapshot.
    alone:         only this process loads, though torch.distributed is initialized.
    look_again_s:  seconds between the attempts to read what seems damaged.

    A damaged snapshot is passed over and marked (docs/SNAPSHOTS.md, "restore"); then, and after an
    error, tensors of `into` may hold a mixture of several. Raises NoSnapshot, StateMismatch,
    SnapshotCorrupt (of `step`), Rewind, StoreError.
    """
    ranks = Ranks(alone)
    store, reopen = _opened(url)
    one = _Load(
        ranks,
        Snapshots(store),
        ReadRetries(reopen, time.sleep, tuple(look_again_s)),
        ranks.each(lambda: _Into(into, only)),
    )
    state = one.newest(allow_rewind) if step is None else one.at(step, epoch)
    if into is None:
        return state
    return ranks.each(lambda: _put(into, state))


class _Load:
    """One load on all ranks."""

    def __init__(self, ranks: Ranks, snapshots: Snapshots, looks: ReadRetries, into: _Into):
        self._ranks, self._snapshots, self._looks, self._into = ranks, snapshots, looks, into
        self._host = this_machine()

    def newest(self, allow_rewind: bool) -> Any:
        restore = self._restore(allow_rewind)
        while True:
            with contextlib.ExitStack() as lease:
                ref = self._ranks.first(lambda: self._choose(restore, lease))
                if ref is None:
                    raise NoSnapshot(
                        f"{self._snapshots.store.url} has no snapshot; save one first "
                        "(storage.save), or look whether the URL is the right one"
                    )
                state, again = self._read(restore, ref, judge=True)
            if not again:
                return state

    def at(self, step: int, epoch: int | None) -> Any:
        restore = self._restore(False)
        with contextlib.ExitStack() as lease:
            ref = self._ranks.first(lambda: self._of_step(step, epoch, lease))
            state, again = self._read(restore, ref, judge=False)
        assert not again
        return state

    def _restore(self, allow_rewind: bool) -> Restore:
        def say(ref: Ref, what: str) -> None:
            log.warning("storage.load: %s", what)

        # the mark of a rewind that a person allowed applies to generations after the existing ones
        committed = self._snapshots.manifests()[0] if allow_rewind else ()
        return Restore(
            self._snapshots,
            self._host,
            self._looks,
            epoch=max((ref.epoch for ref in committed), default=0) + 1,
            allow_rewind=allow_rewind,
            tell=say,
            on_bad=lambda ref, why: say(ref, f"{ref} is passed over: {why}"),
        )

    def _choose(self, restore: Restore, lease: contextlib.ExitStack) -> Ref | None:
        try:
            return held(self._snapshots, restore.choose, lease)
        except Rewind as e:
            raise Rewind(f"{e}; here: storage.load(url, allow_rewind=True)") from e

    def _of_step(self, step: int, epoch: int | None, lease: contextlib.ExitStack) -> Ref:
        committed, doomed = self._snapshots.manifests()
        have = {ref for ref in committed - doomed if epoch is None or ref.epoch == epoch}
        found = max((ref for ref in have if ref.step == step), default=None)
        if found is None:
            steps = sorted({ref.step for ref in have})
            raise NoSnapshot(
                f"{self._snapshots.store.url} has no snapshot of step {step}; it has "
                f"{', '.join(map(str, steps)) if steps else 'none at all'}"
            )
        lease.enter_context(reading(self._snapshots, found))
        return found

    def _read(self, restore: Restore, ref: Ref, judge: bool) -> tuple[Any, bool]:
        """Return the state, and whether it was bad and an older one should be tried."""

        def look() -> tuple[Any, str, str]:
            try:
                return *restore.read(ref, lambda snapshots, _: self._into.read(snapshots, ref)), ""
            except StoreUnavailable as e:
                return None, "", str(e)

        state, why, silent = self._ranks.each(look)
        ranks = self._ranks
        said = ranks.gather((self._host, why, silent))
        bad = bad_hosts(said)
        if bad and not judge:
            raise SnapshotCorrupt(next(iter(bad.values())))
        if not bad:
            ranks.first(lambda: self._whole(restore, ref))
            return state, False
        unfit = restore.judge(ref, said, ranks.rank, ranks.gather, ranks.first)
        if unfit:
            raise SnapshotCorrupt(
                f"{'; '.join(unfit.values())}; load from another machine, or load an older one: "
                "storage.load(url, step=N)"
            )
        return None, True

    def _whole(self, restore: Restore, ref: Ref) -> None:
        """Record that all ranks have read their part of the snapshot, so all of it was read."""
        restore.done(ref)
        with contextlib.suppress(StoreError):  # without write permission the mark stays
            if ref in self._snapshots.quarantined():
                restore.pardon(ref)


class _Into:
    """The target that a state is loaded into. The constructor raises UnsupportedValue if it cannot
    be a state."""

    def __init__(self, into: Any, only: Collection[str] | None):
        self._into, self._only = into, only
        self._have = {} if into is None else _split(_plain(into))[0]
        self._like = loading.like_parameters(into)

    def read(self, snapshots: Snapshots, ref: Ref) -> Any:
        """Read snapshot `ref` into the target and return the state. Raises SnapshotCorrupt,
        StateMismatch, NotFound."""
        manifest = snapshots.load(ref)
        if "state" not in manifest.data:
            raise StateMismatch(
                f"snapshot {ref}: it holds no whole state (storage.save and harness save such)"
            )
        plain = _part(ref, manifest.data["state"], self._only)
        _check(self._into, plain, ())
        names = set(_names(plain))
        try:
            tensors = loading.destinations(manifest, self._have, self._like, names.__contains__)
            loading.load(snapshots, manifest, tensors)
            return state_tree.join(tensors, plain)
        except ValueError as e:
            raise StateMismatch(str(e)) from e


def _names(plain: Any) -> list[str]:
    """Return the names of the tensors that plain data from `split` refers to."""
    if isinstance(plain, list):
        return [name for one in plain for name in _names(one)]
    if not isinstance(plain, dict):
        return []
    if plain.get(TAG) in ("tensor", "ndarray") and "name" in plain:
        return [plain["name"]]
    return [name for one in plain.values() for name in _names(one)]


def _part(ref: Ref, plain: Any, only: Collection[str] | None) -> Any:
    """Return the keys `only` of plain data, or all. Raises StateMismatch if a key is missing."""
    if only is None:
        return plain
    have = plain if isinstance(plain, dict) and TAG not in plain else {}
    if missing := [key for key in only if key not in have]:
        raise StateMismatch(
            f"snapshot {ref}: wanted only {missing[0]!r} and the like, found "
            f"{', '.join(have) or 'a state that is no dict of names'}"
        )
    return {key: have[key] for key in only}


def _check(into: Any, plain: Any, path: tuple[str, ...]) -> None:
    """Raise StateMismatch if a dict of `into` has keys that were not saved."""
    if not isinstance(into, dict) or not isinstance(plain, dict) or TAG in plain:
        return
    for key, value in into.items():
        if key not in plain:
            where = "/".join((*path, str(key)))
            raise StateMismatch(
                f"nothing was saved as {where!r}; there is {', '.join(plain) or 'nothing'}; load "
                "into what it was saved from, or leave that out"
            )
        _check(value, plain[key], (*path, str(key)))


def _put(into: Any, found: Any) -> Any:
    """Put what was loaded into `into` and return it; tensors were filled in place before."""
    if _is_stateful(into):
        into.load_state_dict(found)
        return into
    if isinstance(into, dict) and isinstance(found, dict):
        for key, value in found.items():
            into[key] = _put(into[key], value) if key in into else value
        return into
    if isinstance(into, list | tuple) and type(found) is type(into) and len(found) == len(into):
        filled = [_put(one, value) for one, value in zip(into, found, strict=True)]
        if isinstance(into, tuple):
            return tuple(filled)
        into[:] = filled
        return into
    return found


# ---- states --------------------------------------------------------------------------------------
def _is_stateful(value: Any) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, type)


def _plain(state: Any) -> Any:
    """Replace each object with a state by its state."""
    if _is_stateful(state):
        return _plain(state.state_dict())
    if isinstance(state, dict) and not isinstance(state, Counter):
        return {key: _plain(value) for key, value in state.items()}
    if type(state) is list:
        return [_plain(value) for value in state]
    if type(state) is tuple:
        return tuple(_plain(value) for value in state)
    return state


def _split(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    try:
        return state_tree.split(state)
    except TypeError as e:
        raise UnsupportedValue(str(e)) from e


def _opened(
    url: str | os.PathLike[str] | ObjectStore,
) -> tuple[ObjectStore, Callable[[], ObjectStore]]:
    """Return a store, and a function that opens it again."""
    if isinstance(url, str | os.PathLike):
        where = normalize(os.fspath(url))
        return open_store(where), functools.partial(open_store, where)
    return url, lambda: url


__all__ = ["load", "save"]
