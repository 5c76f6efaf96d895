"""What run.json says of the samples: how many, in which batches, in which order. Workers write it;
audits and `harness data show` read it. Pure."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from harness.core.batch import MAX_SAMPLES, Batching, SampleOrder
from harness.core.blocks import Blocks
from harness.core.mixing import MixedOrder
from harness.core.values import RUN_VERSION, BadObject, built, canonical
from harness.core.world import BadInput

MOST_ORDER_NBYTES = 24 << 10  # half of what run.json may have, or less
_KINDS: dict[str, type[Blocks | MixedOrder]] = {"blocks": Blocks, "mixture": MixedOrder}


def batching_of(identity: Mapping[str, Any]) -> Batching:
    """What decides the samples of every step. An iterable dataset (0 samples) is one endless
    stream in its own order. Raises BadInput for an order that is unknown here or damaged."""
    return Batching(
        samples=identity["samples"] or MAX_SAMPLES,
        global_batch=identity["global_batch"],
        micro_batch=identity["micro_batch"],
        seed=identity["seed"],
        shuffle=identity["shuffle"] and identity["samples"] > 0,
        order=_order_of(canonical(identity["order"])) if "order" in identity else None,
    )


def said_of(order: SampleOrder | None) -> dict[str, Any]:
    """The fields of run.json that say it: none where a permutation of each epoch, or nothing, is
    all the order there is. Raises BadInput if it takes too many."""
    if order is None:
        return {}
    said = canonical(order.encoded())
    if len(said) > MOST_ORDER_NBYTES:
        raise BadInput(
            f"wanted an order that run.json says in {MOST_ORDER_NBYTES} bytes, found {len(said)}; "
            "use fewer stairs=, phases or sources"
        )
    return {"version": RUN_VERSION, "order": json.loads(said)}


@functools.lru_cache(maxsize=16)
def _order_of(said: bytes) -> SampleOrder:
    """What a mixture has to add up, it adds up once for all who ask of the same run."""
    body = json.loads(said)
    kind = _KINDS.get(str(body.get("kind"))) if isinstance(body, dict) else None
    if kind is None:
        raise BadInput(
            f"run.json: wanted an order of {' or '.join(_KINDS)}, found {str(body)[:200]}; update "
            "the package here, or put back what run.json was"
        )
    try:
        return built(kind, body)
    except BadObject as e:
        raise BadInput(f"run.json: wanted an order as it was written: {e}") from e
