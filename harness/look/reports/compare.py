"""The comparison of two runs: are they the same training? `harness runs compare A B`, for example
with and without preemptions, or on 4 and on 3 GPUs.

It compares only what is committed: the identities, the step records (loss bits and digests of the
samples) along the line that leads to each run's newest snapshot, and the weights at its end. It
knows no torch: weights are compared by hash.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.text import Text

from harness.bucket.phases import read_phases
from harness.core import step_records as rec
from harness.core.world import BadInput
from harness.look.audit.audit_records import walk
from storage.canonical_json import BadObject
from storage.errors import NotFound
from storage.snapshots.manifest import Manifest
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

if TYPE_CHECKING:
    from rich.console import Console

SAME_IDENTITY = (
    *("seed", "samples", "global_batch", "micro_batch", "shuffle", "order", "data", "model"),
)

WEAK = "an iterable dataset: contents are hashes of what was read, position by position"


@dataclass(frozen=True)
class StepPair:
    """One step of both runs. `relative`: |a - b| / max(|a|, |b|), 0 when the bits are equal."""

    step: int
    loss_a: float
    loss_b: float
    same_bits: bool
    same_samples: bool
    relative: float


@dataclass(frozen=True)
class Comparison:
    url_a: str
    url_b: str
    different_identity: dict[str, tuple[Any, Any]]  # fields that make them two different trainings
    steps_a: int  # committed
    steps_b: int
    identical_until: int  # loss bits and samples are equal from step 1 up to this one
    first_difference: int | None  # first common step whose loss bits or samples differ
    first_other_samples: int | None  # first step that consumed other samples
    max_relative_loss_difference: float
    max_at: int | None  # the step of that maximum; None: no difference
    # None: not comparable (different last steps, or different shards and no hash)
    same_weights: bool | None
    weights: str  # how `same_weights` was determined
    proof: str = "samples"  # meaning of equal digests; see records.what_digests_prove
    steps: list[StepPair] = field(default_factory=list, repr=False)

    def same(self, rtol: float) -> bool:
        """Return whether this is the same training: same identity, length and samples, and losses
        within `rtol` at every step."""
        alike = (
            not self.different_identity
            and self.steps_a == self.steps_b
            and self.first_other_samples is None
        )
        return alike and self.max_relative_loss_difference <= rtol


@dataclass(frozen=True)
class _Run:
    identities: list[dict[str, Any]]  # of its phases
    manifest: Manifest | None
    # loss and digests of step i + 1; no whole records, so that a million steps fit into memory
    steps: list[tuple[float, str]]


def compare(store_a: ObjectStore, store_b: ObjectStore) -> Comparison:
    """Compare the contents of two runs' buckets.

    Raises BadInput, BrokenRecords, SnapshotCorrupt, StoreError.
    """
    a, b = _read(store_a), _read(store_b)
    proofs = map(rec.what_digests_prove, (a.identities[0], b.identities[0]))
    proof = "contents" if "contents" in proofs else "samples"
    none: dict[str, Any] = {}
    both = itertools.zip_longest(a.identities, b.identities, fillvalue=none)
    different = {
        f"{name} of phase {number}" if number > 1 else name: (said.get(name), other.get(name))
        for number, (said, other) in enumerate(both, 1)
        for name in SAME_IDENTITY
        if said.get(name) != other.get(name)
    }
    pairs = [
        _pair(i, *one, *other)
        for i, (one, other) in enumerate(zip(a.steps, b.steps, strict=False), 1)
    ]
    first = next((p.step for p in pairs if not (p.same_bits and p.same_samples)), None)
    largest = max(pairs, key=lambda p: p.relative, default=None)
    same_weights, weights = _weights(a.manifest, b.manifest)
    return Comparison(
        url_a=store_a.url,
        url_b=store_b.url,
        different_identity=different,
        steps_a=len(a.steps),
        steps_b=len(b.steps),
        identical_until=len(pairs) if first is None else first - 1,
        first_difference=first,
        first_other_samples=next((p.step for p in pairs if not p.same_samples), None),
        max_relative_loss_difference=largest.relative if largest else 0.0,
        max_at=largest.step if largest and largest.relative > 0 else None,
        same_weights=same_weights,
        weights=weights,
        proof=proof,
        steps=pairs,
    )


def _read(store: ObjectStore) -> _Run:
    try:
        identities = [one.identity or {} for one in read_phases(store)]
    except NotFound:
        raise BadInput(
            f"{store.url}: wanted a run to compare, found no run.json there; check the URL"
        ) from None
    except BadObject as e:
        raise BadInput(
            f"{store.url}/run.json: wanted JSON, found something else ({e}); `harness prove "
            "verify` tells what was changed"
        ) from e
    snapshots = Snapshots(store)
    refs = snapshots.refs()
    manifest = snapshots.load(refs[0]) if refs else None
    steps: list[tuple[float, str]] = []
    if manifest is not None and (named := rec.named(manifest.data)):
        for _, part in walk(store, named, rec.genesis(identities[0])):
            steps += [(r.loss, f"{r.digest} {r.contents}".strip()) for r in reversed(part)]
    return _Run(identities, manifest, steps[::-1])


def _pair(step: int, loss_a: float, digest_a: str, loss_b: float, digest_b: str) -> StepPair:
    same = struct.pack("<d", loss_a) == struct.pack("<d", loss_b)
    return StepPair(
        step, loss_a, loss_b, same, digest_a == digest_b, 0.0 if same else _relative(loss_a, loss_b)
    )


def _relative(a: float, b: float) -> float:
    """Return the relative difference; inf if one is not finite, which is no rounding error."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if scale else 0.0


def _weights(a: Manifest | None, b: Manifest | None) -> tuple[bool | None, str]:
    if a is None or b is None:
        return None, "no snapshot to compare"
    if a.step != b.step:
        return None, f"the newest snapshots are of different steps ({a.step} and {b.step})"
    hash_a, hash_b = a.data.get("weights"), b.data.get("weights")
    if hash_a and hash_b:
        return hash_a == hash_b, f"hash of the weights at step {a.step}: {hash_a}" + (
            "" if hash_a == hash_b else f" and {hash_b}"
        )
    if (bits_a := _bits(a)) == (bits_b := _bits(b)):
        return True, f"all stored tensors are the same at step {a.step}"
    if [layout for layout, _ in bits_a] != [layout for layout, _ in bits_b]:
        return None, (
            "the newest snapshots are laid out differently, and hold no hash of the weights"
        )
    return False, f"stored tensors differ at step {a.step}"


def _bits(manifest: Manifest) -> list[tuple[Any, Any]]:
    """Return layout and hashes of the stored tensors, without names that differ by attempt. Hashes
    are of chunks of whole parts."""
    order = {part.key: i for i, part in enumerate(manifest.parts)}
    layout = [
        (
            name,
            t["dtype"],
            t["shape"],
            [(order[c["part"]], c["start"], c["end"], c["offsets"]) for c in t["chunks"]],
        )
        for name, t in sorted(manifest.tensors.items())
    ]
    kinds = [(p.nbytes, p.chunk_nbytes) for p in manifest.parts]
    return [(layout, None), *zip(kinds, (p.hashes for p in manifest.parts), strict=True)]


def print_comparison(found: Comparison, console: Console, rtol: float = 1e-3) -> int:
    """Print the result. Return the exit status: 0 for the same training within `rtol`, or 1."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    say(f"a  {found.url_a}\nb  {found.url_b}", "dim")
    for name, (a, b) in found.different_identity.items():
        say(f"different {name}: {a!r} and {b!r}; these are two different trainings", "red")
    both = min(found.steps_a, found.steps_b)
    if found.steps_a != found.steps_b:
        say(
            f"a has {found.steps_a} committed steps, b has {found.steps_b}; compared up to step "
            f"{both}",
            "red",
        )
    if not both:
        say("no step that both have committed")
    elif found.first_difference is None:
        say(f"identical from step 1 to {both} (loss bits, {found.proof})", "green")
    else:
        same = (
            f"steps 1-{found.identical_until} identical"
            if found.identical_until
            else "different from step 1 on"
        )
        within = "yes" if found.max_relative_loss_difference <= rtol else "no"
        at = f" at step {found.max_at}" if found.max_at is not None else ""
        say(
            f"{same}; largest relative difference of the loss "
            f"{found.max_relative_loss_difference:.1e}{at}; within {rtol:g}: {within}"
        )
        if found.first_other_samples is None:
            say(f"{found.proof}: the same in all {both} steps")
        else:
            say(f"{found.proof}: step {found.first_other_samples} consumed other samples", "red")
    if both and found.proof != "samples":
        say(WEAK, "dim")
    verdict = {True: "the same", False: "different", None: "not comparable"}[found.same_weights]
    say(f"weights: {verdict} ({found.weights})")
    same_training = found.same(rtol)
    say(
        "The same training." if same_training else "Not the same training.",
        "bold green" if same_training else "bold red",
    )
    return 0 if same_training else 1
