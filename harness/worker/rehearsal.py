"""A stream is tried before the first step: saved, loaded into another one, read. Runs in the
worker, on rank 0.

What a stream loses when it is loaded (a shuffle buffer, the rest of a shard, a sample) shows only
after a resume, in a run that was killed; so a copy of it plays that through at once, with a few
items.
"""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

from harness.core.world import BadInput
from harness.worker.content_hashes import content_hash
from storage import dcp

SKIPPED, COMPARED = 3, 3  # items


def rehearse(dataset: Any) -> str:
    """What a resumed run will not read as a run that was left alone would; "": all the same, or it
    cannot be told. The dataset itself is neither read nor changed. Raises BadInput if its state
    cannot be saved."""
    kind = type(dataset).__name__
    try:
        first, second = copy.deepcopy(dataset), copy.deepcopy(dataset)
    except Exception as e:  # whatever its parts raise that cannot be copied: open files, sockets
        return (
            f"{kind} could not be tried before the first step, since it cannot be copied "
            f"({type(e).__name__}: {e}); whether it goes on where it was after a resume shows "
            "only then"
        )
    items = iter(first)
    if len(list(itertools.islice(items, SKIPPED))) < SKIPPED:
        return ""
    try:
        tensors, plain = dcp.split(copy.deepcopy(first.state_dict()))
        state = dcp.join(tensors, json.loads(json.dumps(plain)))
    except TypeError as e:
        raise BadInput(
            f"the state of {kind} cannot be saved: {e}; its state_dict must be made of tensors, "
            "numbers, strings, lists and dicts"
        ) from e
    wanted = [content_hash(item) for item in itertools.islice(items, COMPARED)]
    try:
        second.load_state_dict(state)
        found = [content_hash(item) for item in itertools.islice(iter(second), len(wanted))]
    except Exception as e:
        raise BadInput(
            f"{kind}.load_state_dict(state) of a state that it has just given raises "
            f"{type(e).__name__}: {e}; a resumed run could not go on"
        ) from e
    if found == wanted:
        return ""
    same = next((i for i, pair in enumerate(zip(wanted, found, strict=False)) if len({*pair}) > 1),
                len(found))  # fmt: skip
    return (
        f"{kind} was tried: saved behind its item {SKIPPED}, and loaded, it goes on with another "
        f"item {SKIPPED + same + 1} than it would have. So after a resume samples are lost or "
        "repeated; shuffle before it is a stream, or use a map-style dataset"
    )
