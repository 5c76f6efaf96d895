"""The comparison of state between ranks: state that differs must not be mixed into one snapshot.
Runs in the worker; does not communicate itself.

A snapshot takes plain values from rank 0 and each tensor from the rank that has the least to write,
so everything stored under one name must be the same on all ranks. `Held` has hashes of that part of
a rank's state; `differing` names the differences.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from storage.tensors.dcp import fingerprint
from storage.tensors.flat_shards import Pieces

# tensors up to this size that no optimizer updates are compared for every snapshot
SMALL_NBYTES = 1 << 20
SHOWN = 3  # differences that a message names


@dataclass(frozen=True)
class Held:
    """The state of a rank that must be the same elsewhere, as hashes. `tensors`: hash by name;
    `plain`: the plain values from storage.tensors.state_tree.split; `shards`: hashes of this rank's
    shards of
    tensors that are split within a replica, the same at the same place in all replicas."""

    tensors: dict[str, str]
    plain: Any
    shards: dict[str, str] = field(default_factory=dict)

    def total(self) -> int:
        """Return a hash of everything that must be the same on all ranks, below 2**62."""
        text = json.dumps([self.tensors, self.plain], sort_keys=True)
        return xxhash.xxh3_64_intdigest(text.encode()) >> 2

    def shards_total(self) -> int:
        text = json.dumps(self.shards, sort_keys=True)
        return xxhash.xxh3_64_intdigest(text.encode()) >> 2

    def leaves(self) -> dict[str, str]:
        """Return the values to compare, by path: plain values as JSON, tensors as hashes."""
        return dict(_leaves(self.plain, "")) | self.tensors


def held(tensors: Mapping[str, torch.Tensor], plain: Any, within_replicas: bool = False) -> Held:
    """Return everything that should be the same on all ranks. Sharded tensors and pieces count only
    by name, shape and dtype; if they are split within replicas, this rank's shards count too."""
    hashes, shards = {}, {}
    for name, t in tensors.items():
        kind = f"{t.dtype} {tuple(t.shape)}"
        if isinstance(t, DTensor | Pieces):
            hashes[name] = f"sharded {kind}"
            if within_replicas and isinstance(t, DTensor):
                shards[name] = f"{kind} {fingerprint(t.to_local().detach())}"
        else:
            hashes[name] = f"{kind} {fingerprint(t.detach())}"
    return Held(hashes, plain, shards)


def held_aside(
    tensors: Mapping[str, torch.Tensor], plain: dict[str, Any], updated: Collection[str]
) -> Held:
    """Return the small part of the state that optimizers do not change, which is cheap enough to
    compare for every snapshot. `updated`: names of the tensors that they change."""
    some = {
        name: t.detach()
        for name, t in tensors.items()
        if name not in updated
        and not isinstance(t, DTensor | Pieces)
        and t.numel() * t.element_size() <= SMALL_NBYTES
    }
    hashes: dict[str, str] = {}
    for device in dict.fromkeys(t.device for t in some.values()):  # one copy from each
        here = {
            name: t.contiguous().reshape(-1).view(torch.uint8)
            for name, t in some.items()
            if t.device == device
        }
        data = torch.cat(list(here.values())).cpu().numpy().data
        at = 0
        for name, t in here.items():
            hashes[name] = (
                f"{some[name].dtype} {tuple(some[name].shape)} "
                f"{xxhash.xxh3_64_hexdigest(data[at : at + len(t)])}"
            )
            at += len(t)
    rest = {name: value for name, value in plain.items() if name not in ("model", "optimizer")}
    rest["optimizer"] = [
        {k: v for k, v in one.items() if k != "state"} for one in plain.get("optimizer", ())
    ]
    return Held(hashes, rest)


def differing(
    ranks: Sequence[dict[str, str]], numbers: Sequence[int] | None = None
) -> list[tuple[str, str]]:
    """Return (path, text: which ranks have which value) of all leaves that differ. `ranks`: the
    leaves of each rank; `numbers`: the numbers of these ranks, if not all."""
    numbers = range(len(ranks)) if numbers is None else numbers
    found = []
    for path in dict.fromkeys(path for leaves in ranks for path in leaves):
        values: dict[str, list[int]] = {}
        for rank, leaves in zip(numbers, ranks, strict=True):
            values.setdefault(leaves.get(path, "missing"), []).append(rank)
        if len(values) > 1:
            who = [
                f"{_short(value)} on rank{'s' * (len(who) > 1)} {_some_of(who)}"
                for value, who in values.items()
            ]
            found.append((path, ", ".join(who[:SHOWN]) + (", ..." if len(who) > SHOWN else "")))
    return found


def explain(found: Sequence[tuple[str, str]]) -> str:
    """Return a message for users: the differences, and how to mend them."""
    tops = list(dict.fromkeys(path.partition("/")[0] for path, _ in found))
    shown = "; ".join(f"{path} is {who}" for path, who in found[:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    own = [
        top
        for top in tops
        if top not in ("model", "optimizer", "scheduler", "scaler", "reduce", "dataset")
    ]
    advice = (
        f"if each rank has a state of its own, say so with run.prepare(..., per_rank={own}); if "
        "not, "
        if own
        else ""
    )
    return (
        f"the state of {', '.join(repr(top) for top in tops)} is not the same on all ranks, and a "
        f"snapshot would mix them: {shown}{more}; {advice}make it the same (sum or broadcast it, "
        "or draw from what is seeded alike), or leave it out of the state"
    )


def _leaves(plain: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(plain, dict) and plain and "$" not in plain:
        for key, value in plain.items():
            yield from _leaves(value, f"{path}/{key}" if path else str(key))
    elif isinstance(plain, list) and plain:
        for i, value in enumerate(plain):
            yield from _leaves(value, f"{path}/{i}")
    elif not (isinstance(plain, dict) and plain.get("$") == "tensor"):
        yield path, json.dumps(plain, sort_keys=True)


def _short(value: str) -> str:
    return value if len(value) <= 60 else f"{value[:57]}..."


def _some_of(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (
        f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    )
