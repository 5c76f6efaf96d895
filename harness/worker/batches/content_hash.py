"""Hashes of values by content, the same in any process. Runs in the worker.

Numbers, strings, arrays and fields count, never an object's repr or address. An item of a stream is
identified by its hash, since its position identifies nothing; a dataset by a few of its samples.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

PLAIN = {type(None), bool, int, float, complex, str, bytes}  # types whose repr is complete


def content_hash(value: Any) -> int:
    """Return a 64-bit hash of a value's content, the same in any process: numbers, strings, arrays
    and fields count, never an object's repr or address.

    Objects are taken apart as pickle does it (`__reduce_ex__`). Of an object that cannot be pickled
    only the type's name counts, which is weak.
    """
    h = xxhash.xxh3_64()
    spell(h, value, ())
    return h.intdigest()


def contents_of(items: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return the hashes of the items, int64 (n,)."""
    return np.array([content_hash(item) for item in items], np.uint64).view(np.int64)


def spell(h: Any, value: Any, above: tuple[int, ...]) -> None:
    """Feed a value to the hash `h`, every piece with its kind and length, so that different values
    give different bytes. `above`: ids of the objects that contain this one, to detect cycles."""
    kind = type(value)
    if kind in PLAIN:
        data = value if kind is bytes else repr(value).encode()
        h.update(b"%s %d:" % (kind.__name__.encode(), len(data)))
        h.update(data)
        return
    if id(value) in above:
        h.update(b"cycle %d;" % (len(above) - above.index(id(value))))
        return
    within = (*above, id(value))
    if isinstance(value, torch.Tensor):
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        raw = dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        h.update(f"tensor {value.dtype} {tuple(value.shape)}:".encode())
        h.update(raw.data)
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        h.update(f"{kind.__name__} {value.dtype.str} {value.shape}:".encode())
        h.update(value.tobytes())
    elif isinstance(value, np.ndarray):
        h.update(f"objects {value.shape}:".encode())
        spell(h, value.reshape(-1).tolist(), within)
    elif kind in (list, tuple) and set(map(type, value)) <= PLAIN:
        # mostly lists of tokens: faster, and as unambiguous
        data = repr(value).encode()
        h.update(b"%s %d:" % (kind.__name__.encode(), len(data)))
        h.update(data)
    elif kind in (list, tuple):
        h.update(b"%s of %d:" % (kind.__name__.encode(), len(value)))
        for item in value:
            spell(h, item, within)
    elif kind is dict and all(type(key) is str for key in value):
        h.update(b"dict %d:" % len(value))
        for key in sorted(value):
            spell(h, key, within)
            spell(h, value[key], within)
    elif kind in (dict, set, frozenset):  # sorted, so that no hash seed decides the order
        pairs = value.items() if kind is dict else ((item, None) for item in value)
        h.update(b"%s %d:" % (kind.__name__.encode(), len(value)))
        for part in sorted(_alone(pair, within) for pair in pairs):
            h.update(part)
    elif isinstance(value, enum.Enum):
        h.update(f"enum {_name(kind)}.{value.name};".encode())
    elif isinstance(value, (bytearray, memoryview)):
        spell(h, bytes(value), within)
    elif isinstance(
        value,
        (
            type,
            types.FunctionType,
            types.BuiltinFunctionType,
            types.ModuleType,
            torch.dtype,
            torch.device,
        ),
    ):
        h.update(f"name {_name(value)};".encode())
    else:
        _spell_object(h, value, within)


def _spell_object(h: Any, value: Any, within: tuple[int, ...]) -> None:
    h.update(f"object {_name(type(value))}:".encode())
    try:
        parts: Any = value.__reduce_ex__(4)
    except Exception:
        # An object that cannot be pickled may raise anything; only its type is known then.
        return
    if isinstance(parts, str):
        h.update(parts.encode())
        return
    make, arguments, state, items, pairs = (*tuple(parts)[:5], None, None, None)[:5]
    h.update(f"{_name(make)}:".encode())
    spell(h, arguments, within)
    spell(h, state, within)
    spell(h, None if items is None else list(items), within)
    spell(h, None if pairs is None else dict(pairs), within)


def _alone(value: Any, within: tuple[int, ...]) -> bytes:
    h = xxhash.xxh3_128()
    spell(h, value, within)
    return h.digest()


def _name(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None)
    return f"{getattr(thing, '__module__', '')}.{name}" if name else str(thing)
