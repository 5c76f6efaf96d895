"""What a simulated run trains: samples, digests and weights as functions of the step. Pure."""

from __future__ import annotations

import functools
from typing import Any

from harness.core import batch
from harness.core.values import digest

MICRO = 2  # samples of a micro-batch


def batching(micro_batches: int) -> batch.Batching:
    return batch.Batching(1000, MICRO * micro_batches, MICRO, seed=7)


@functools.cache
def consumed(micro_batches: int, step: int, micro: int) -> int:
    """Sum of the hashes of one micro-batch's samples, as a loader makes it."""
    b = batching(micro_batches)
    where = batch.positions(b, step, micro)
    return batch.digest(batch.sample_hash(where, batch.indices_at(b, where)))


@functools.cache
def expected(micro_batches: int, step: int) -> str:
    """The digest of a step, whoever did it."""
    return f"{batch.expected_digest(batching(micro_batches), step):016x}"


@functools.cache
def state_after(micro_batches: int, step: int) -> str:
    """The weights after a step are a function of the samples up to it."""
    if not step:
        return "initial weights"
    return digest(
        f"{state_after(micro_batches, step - 1)} {expected(micro_batches, step)}".encode()
    )


def identity(micro_batches: int, total_steps: int) -> dict[str, Any]:
    b = batching(micro_batches)
    return {
        "samples": b.samples,
        "global_batch": b.global_batch,
        "micro_batch": b.micro_batch,
        "seed": b.seed,
        "steps": total_steps,
    }
