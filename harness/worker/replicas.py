"""Do all ranks hold the same state? What differs must not be mixed into one snapshot. Runs in the
worker; talks to nobody itself.

A snapshot takes plain values from rank 0 and each tensor from whichever rank has the least to
write, so what is stored under one name must be the same on all ranks. `Held` is what of a rank's
state has to be so, as hashes; `differing` names what is not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from storage.fingerprints import fingerprint
from storage.pieces import Pieces

# tensors up to this are looked at for every snapshot, if anything but an optimizer changes them
SMALL_NBYTES = 1 << 20
SHOWN = 3  # differences that a message names


@dataclass(frozen=True)
class Held:
    """`tensors`: hash by name; `plain`: what storage.dcp.split left beside them; `shards`: hashes
    of this rank's part of what is split within a replica, which must be the same at the same place
    of all replicas."""

    tensors: dict[str, str]
    plain: Any
    shards: dict[str, str] = field(default_factory=dict)

    def total(self) -> int:
        """Of all that is the same on all ranks, below 2**62."""
        text = json.dumps([self.tensors, self.plain], sort_keys=True)
        return xxhash.xxh3_64_intdigest(text.encode()) >> 2

    def shards_total(self) -> int:
        text = json.dumps(self.shards, sort_keys=True)
        return xxhash.xxh3_64_intdigest(text.encode()) >> 2

    def leaves(self) -> dict[str, str]:
        """What to compare, by path: values as they are, tensors as hashes."""
        return dict(_leaves(self.plain, "")) | self.tensors


def held(tensors: Mapping[str, torch.Tensor], plain: Any, within_replicas: bool = False) -> Held:
    """All that should be the same on all ranks. Of sharded tensors and pieces only name, shape and
    dtype; if they are split within replicas, this rank's shards as well."""
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
    """The little of it that is not changed by optimizers: cheap enough for every snapshot.
    `updated`: tensors that are."""
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
    """`ranks`: the leaves of each; `numbers`: which they are, if not all. (path, who has what) of
    what is not the same on all of them."""
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
    """For people: what differs, and what to do."""
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
