"""Decoders for the fields of records in foreign formats: values for `decode=` of `Records`.

    train = harness.data.Records(url, decode=harness.data.from_mds)

Nothing is ever unpickled: fields that a format pickles, or with an unknown encoding, stay bytes.
Images need pillow. Arrays, and torch's tensors, become arrays of numpy.
"""

from __future__ import annotations

import decimal
import io
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from harness.core.world import BadInput
from harness.data.card import CorpusCorrupt
from harness.data.formats.format import U32, EncodedRecord
from harness.data.formats.litdata import NUMPY_DTYPES, TORCH_DTYPES, dtype_of
from harness.data.prepare.units import needed

# by MDS's own numbers
MDS_DTYPES = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
Decode = Callable[[bytes], Any]


def from_mds(record: Mapping[str, bytes]) -> dict[str, Any]:
    """Return a sample of MDS as StreamingDataset gives it; `pkl` fields stay bytes. Raises
    BadInput, CorpusCorrupt."""
    return _values(record, MDS, "ndarray", _mds_array)


def from_litdata(record: Mapping[str, bytes]) -> dict[str, Any]:
    """Return an item of LitData, a value for each leaf; `pickle`, `json`, video and the like stay
    bytes. Raises BadInput, CorpusCorrupt."""
    return _values(record, LITDATA, "no_header_", _litdata_array)


def _values(
    record: Mapping[str, bytes],
    known: Mapping[str, Decode],
    arrays: str,
    of_array: Callable[[str, bytes], Any],
) -> dict[str, Any]:
    if not isinstance(record, EncodedRecord):
        raise BadInput(
            "wanted a record of a corpus that `harness data index` has made of MDS or LitData, "
            "found one without encodings; take another decode="
        )
    out: dict[str, Any] = {}
    for name, data in record.items():
        encoding = record.encodings[name]
        try:
            if encoding.startswith(arrays):
                out[name] = of_array(encoding, data)
            else:
                out[name] = known.get(encoding.partition(":")[0], bytes)(data)
        except (ValueError, LookupError, TypeError, ArithmeticError, struct.error) as e:
            raise CorpusCorrupt(f"{name}: wanted a value as {encoding}, found {data[:40]!r}") from e
    return out


# ---- arrays --------------------------------------------------------------------------------------
def _mds_array(encoding: str, data: bytes) -> Any:
    """Decode `ndarray[:DTYPE[:SHAPE]]`. What the encoding leaves out precedes the values."""
    words = encoding.split(":")
    at, dtype = (0, words[1]) if len(words) > 1 else (1, MDS_DTYPES[data[0]])
    if len(words) > 2:
        shape = [int(word) for word in words[2].split(",")]
    else:  # the two low bits give the bytes of each axis, as a power of two
        axes, nbytes = data[at] >> 2, 1 << (data[at] & 3)
        end = at + 1 + axes * nbytes
        shape = np.frombuffer(data[at + 1 : end], f"<u{nbytes}").tolist()
        at = end
    return np.frombuffer(data, dtype, offset=at).reshape(shape).copy()


def _litdata_array(encoding: str, data: bytes) -> Any:
    dtype = dtype_of(encoding)
    return np.frombuffer(data, dtype).copy() if dtype else data


def _tensor(data: bytes) -> Any:
    dtype, axes = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{axes}I", data, 8)
    if not TORCH_DTYPES[dtype]:
        return data
    found = np.frombuffer(data, TORCH_DTYPES[dtype], math.prod(shape), offset=8 + 4 * axes)
    return found.reshape(shape).copy()


def _numpy(data: bytes) -> Any:
    dtype, axes = np.frombuffer(data, U32, 2).tolist()
    shape = np.frombuffer(data, U32, axes, 8).tolist()
    return np.frombuffer(data, NUMPY_DTYPES[dtype], offset=8 + 4 * axes).reshape(shape).copy()


# ---- images --------------------------------------------------------------------------------------
def _image(data: bytes) -> Any:
    return needed("PIL.Image", "pillow", "images").open(io.BytesIO(data))


def _pixels(data: bytes) -> Any:
    width, height, letters = np.frombuffer(data, U32, 3).tolist()
    mode, raw = data[12 : 12 + letters].decode(), data[12 + letters :]
    return needed("PIL.Image", "pillow", "images").frombytes(mode, (width, height), raw)


def _several(decode: Decode, before: int) -> Decode:
    """Return a decoder of lists: `before` ignored bytes, the count, each length, and all values."""

    def values(data: bytes) -> Iterator[Any]:
        (n,) = np.frombuffer(data, U32, 1, before).tolist()
        at = before + U32.itemsize * (n + 1)
        for size in np.frombuffer(data, U32, n, before + U32.itemsize).tolist():
            yield decode(data[at : at + size])
            at += size

    return lambda data: list(values(data))


# ---- by the names of encodings -------------------------------------------------------------------
def _scalar(dtype: str) -> Decode:
    return lambda data: np.frombuffer(data, dtype)[0]


def _unpacked(format: str) -> Decode:
    return lambda data: struct.unpack(format, data)[0]


MDS: dict[str, Decode] = {
    **{dtype: _scalar(dtype) for dtype in MDS_DTYPES.values()},
    **{"str": bytes.decode, "int": _unpacked("<q"), "json": json.loads},
    **{"str_int": int, "str_float": float, "str_decimal": lambda d: decimal.Decimal(d.decode())},
    **{"pil": _pixels, "jpeg": _image, "png": _image},
    **{"jpeg_array": _several(_image, 0), "jpegarray": _several(_image, 0)},
    **{"list[pil]": _several(_pixels, 4), "list[jpeg]": _several(_image, 4)},
    "list[png]": _several(_image, 4),
}
LITDATA: dict[str, Decode] = {
    **{"str": bytes.decode, "text": bytes.decode, "int": _unpacked("<q")},
    **{"float": _unpacked("<d"), "bool": _unpacked("<?"), "numpy": _numpy, "tensor": _tensor},
    **{"pil": _pixels, "jpeg": _image, "image": _image, "jpeg_array": _several(_image, 0)},
}
