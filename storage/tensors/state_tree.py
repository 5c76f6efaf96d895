"""Conversion between a nested state and flat tensors with plain data."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# ---- state <-> tensors and JSON ------------------------------------------------------------------
TAG = "$"  # {"$": kind, ...} stands for a value that JSON cannot express
INLINE_NBYTES = 64 << 10  # bytes; numpy arrays up to this size go into the JSON


def split(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split nested dicts, lists and tuples into tensors, by '/'-joined path, and plain JSON that
    says where they go.

    Tensors are not copied. Python scalars, bytes, tuples, int-keyed dicts, Counters, dtypes and
    numpy values keep their types; other dicts (OrderedDict, defaultdict) become dict. Raises
    TypeError, naming the path, for anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _split(state, (), tensors)


def join(tensors: dict[str, torch.Tensor], data: Any) -> Any:
    """Return the state that `split` took apart. Raises ValueError if a tensor is missing or `data`
    is not from `split`."""
    if isinstance(data, list):
        return [join(tensors, v) for v in data]
    if not isinstance(data, dict):
        return data
    match data.get(TAG):
        case None:
            return {k: join(tensors, v) for k, v in data.items()}
        case "tensor" | "ndarray" as kind if "name" in data:
            if data["name"] not in tensors:
                raise ValueError(
                    f"the state has a tensor {data['name']!r}, of which nothing was given; load it "
                    "first (see destinations)"
                )
            return tensors[data["name"]] if kind == "tensor" else tensors[data["name"]].numpy()
        case "tuple":
            return tuple(join(tensors, v) for v in data["items"])
        case "dict":
            return {join(tensors, k): join(tensors, v) for k, v in data["items"]}
        case "counter":
            return Counter({join(tensors, k): v for k, v in data["items"]})
        case "bytes":
            return base64.b64decode(data["b64"])
        case "complex":
            return complex(*data["parts"])
        case "dtype":
            return getattr(torch, data["name"])
        case "ndarray":
            array = (
                np.frombuffer(base64.b64decode(data["b64"]), np.dtype(data["dtype"]))
                .reshape(data["shape"])
                .copy()
            )
            return array if data["array"] else array[()]
        case kind:
            raise ValueError(
                f"state of unknown kind {kind!r}: saved by a newer version of this code; update "
                "the package"
            )


def _split(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            what = "a meta" if value.is_meta else "a quantized or sparse"
            raise TypeError(
                f"{_where(path)} is {what} tensor; snapshots hold dense ones: materialize it, or "
                "leave it out"
            )
        return {TAG: "tensor", "name": _add(value.detach(), path, tensors)}
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        if value.nbytes > INLINE_NBYTES:
            return {
                TAG: "ndarray",
                "name": _add(torch.from_numpy(np.ascontiguousarray(value)), path, tensors),
            }
        b64 = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {
            TAG: "ndarray",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "b64": b64,
            "array": isinstance(value, np.ndarray),
        }
    if isinstance(value, Counter):
        return {
            TAG: "counter",
            "items": [
                [_split(k, path, tensors), _split(v, (*path, str(k)), tensors)]
                for k, v in value.items()
            ],
        }
    if isinstance(value, dict):
        if all(type(k) is str for k in value) and TAG not in value:
            return {k: _split(v, (*path, k), tensors) for k, v in value.items()}
        for k in value:
            if type(k) not in (str, int):
                raise TypeError(
                    f"{_where(path)} has the key {k!r}; keys are strings or ints: turn it into one"
                )
        return {
            TAG: "dict",
            "items": [[k, _split(v, (*path, str(k)), tensors)] for k, v in value.items()],
        }
    if type(value) is list:
        return [_split(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {
            TAG: "tuple",
            "items": [_split(v, (*path, str(i)), tensors) for i, v in enumerate(value)],
        }
    if type(value) in (bytes, bytearray):
        return {TAG: "bytes", "b64": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {TAG: "complex", "parts": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "name": dtype_name(value)}
    raise TypeError(
        f"{_where(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a "
        "snapshot cannot hold (nothing is pickled); give its state as numbers, strings, bytes, "
        "tensors, lists and dicts (its state_dict(), or a tuple of its fields)"
    )


def _add(tensor: torch.Tensor, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> str:
    name = path_name(path)
    if name in tensors:
        raise TypeError(
            f"two tensors have the path {name!r} (keys like 1 and '1' in one dict?); rename one"
        )
    tensors[name] = tensor
    return name


def path_name(path: tuple[str, ...]) -> str:
    """Return the name of the tensor at a path of keys."""
    return "/".join(part.replace("~", "~0").replace("/", "~1") for part in path)


def _where(path: tuple[str, ...]) -> str:
    return f"state[{'/'.join(path)!r}]" if path else "the state"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def merged(plains: Sequence[Any]) -> Any:
    """Merge the plain values that several ranks have beside their tensors. Dicts keep the keys of
    all; of other values, the first rank's is kept."""
    first = plains[0]
    if isinstance(first, dict) and first.get(TAG) == "dict":
        found = {key: value for plain in reversed(plains) for key, value in plain["items"]}
        return {TAG: "dict", "items": [[key, found[key]] for key in sorted(found, key=_order)]}
    if isinstance(first, dict) and TAG not in first:
        dicts = [plain for plain in plains if isinstance(plain, dict)]
        keys = dict.fromkeys(key for plain in dicts for key in plain)
        return {key: merged([plain[key] for plain in dicts if key in plain]) for key in keys}
    if isinstance(first, list) and all(len(plain) == len(first) for plain in plains):
        return [merged(some) for some in zip(*plains, strict=True)]
    return first


def _order(key: Any) -> tuple[str, Any]:
    return type(key).__name__, key


def pruned(plain: Any, wanted: Callable[[str], bool]) -> Any:
    """Return `plain` with None in place of references to tensors that are not wanted."""
    if isinstance(plain, list):
        return [pruned(one, wanted) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if plain.get(TAG) in ("tensor", "ndarray") and "name" in plain and not wanted(plain["name"]):
        return None
    return {key: pruned(value, wanted) for key, value in plain.items()}
