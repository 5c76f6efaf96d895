"""Datasets in formats of others, as their own writers write them; run as a script, it writes those
that tests/fixtures/formats has: `python -m support.foreign_datasets` in an environment with
mosaicml-streaming, litdata, webdataset and pyarrow."""

import random
import shutil
import struct
import sys
from pathlib import Path

import numpy as np

FIXTURES = Path(__file__).parents[1] / "fixtures" / "formats"
N = 13


def rng(seed=0):
    return random.Random(seed)


def rows(n=N, seed=0):
    """Plain values that several formats can hold."""
    r = rng(seed)
    return [
        {
            "id": i - 3,
            "text": "ü" * (i % 4) + r.choice(["", "one", "two\nthree"]) + str(i),
            "blob": r.randbytes(r.choice([0, 1, 40])),
        }
        for i in range(n)
    ]


# ---- MDS -----------------------------------------------------------------------------------------
MDS_COLUMNS = {
    **{"id": "int", "text": "str", "blob": "bytes", "row": "json", "pair": "ndarray:int16:2"},
    **{"any": "ndarray", "flat": "ndarray:float32", "scale": "float64", "digits": "str_int"},
    **{"small": "uint8", "object": "pkl"},
}


def mds_rows(n=N, seed=0):
    """As their reader gives them."""
    return [
        row
        | {
            "row": {"n": i, "words": ["a", None]},
            "pair": np.array([i, -i], np.int16),
            "any": np.arange(1 + i * 2, dtype=np.uint32).reshape(1, -1),
            "flat": np.linspace(0, 1, i + 1, dtype=np.float32),
            "scale": i / 7,
            "digits": 10**i,
            "small": i % 256,
            "object": {"i": i},
        }
        for i, row in enumerate(rows(n, seed))
    ]


def write_mds(folder, n=N, seed=0, size_limit=900, **more):
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=MDS_COLUMNS, size_limit=size_limit, **more) as out:
        for row in mds_rows(n, seed):
            out.write(row)


# ---- LitData -------------------------------------------------------------------------------------
def litdata_rows(n=N, seed=0):
    import torch

    return [
        row
        | {
            "flag": i % 2 == 0,
            "half": i / 2,
            "array": np.arange(i + 1, dtype=np.int32),
            "matrix": np.ones((2, i + 1)),
            "tensor": torch.arange(i + 1),
            "nested": {"grid": torch.full((2, 2), i), "pair": (i, f"{i}")},
        }
        for i, row in enumerate(rows(n, seed))
    ]


def write_litdata(folder, items=None, chunk_size=4, **more):
    from litdata.streaming.writer import BinaryWriter

    out = BinaryWriter(str(folder), chunk_size=chunk_size, **more)
    for i, row in enumerate(litdata_rows() if items is None else items):
        out[i] = row
    out.done()
    out.merge()


def documents(n=9, seed=0, below=500):
    """Ids of tokens, without the one that ends them (0)."""
    r = np.random.default_rng(seed)
    return [r.integers(1, below, r.integers(3, 60)) for _ in range(n)]


def write_litdata_tokens(folder):
    import torch
    from litdata.streaming.item_loader import TokensLoader

    items = [torch.tensor([*one, 0], dtype=torch.int) for one in documents()]
    write_litdata(folder, items, chunk_size=None, chunk_bytes=600, item_loader=TokensLoader())


# ---- WebDataset ----------------------------------------------------------------------------------
def write_tar(folder, n=N, per_shard=5, seed=0):
    import webdataset

    folder.mkdir(parents=True)
    found = rows(n, seed)
    for shard, begin in enumerate(range(0, n, per_shard)):
        with webdataset.TarWriter(str(folder / f"{shard:03d}.tar"), mtime=0) as out:
            for i in range(begin, min(begin + per_shard, n)):
                # a name that takes a header of its own
                long = f"{'long/' * 40}" if i % 6 == 5 else "dir/"
                out.write({"__key__": f"{long}{i:04d}", **tar_fields(found[i])})


def tar_fields(row):
    return {"cls": row["id"], "seg.txt": row["text"], "bin": row["blob"]}


# ---- Parquet -------------------------------------------------------------------------------------
def write_parquet(folder, n=N, per_file=8, seed=0, group=3):
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True)
    found = [row | {"image": {"bytes": row["blob"], "path": None}} for row in rows(n, seed)]
    for file, begin in enumerate(range(0, n, per_file)):
        table = pa.Table.from_pylist(found[begin : begin + per_file])
        parquet.write_table(table, folder / f"{file}.parquet", row_group_size=group)


# ---- files of tokens -----------------------------------------------------------------------------
def write_nanogpt(path, seed=0, **more):
    """As its data/*/prepare.py does."""
    found = documents(seed=seed, **more)
    np.concatenate([[*one, 0] for one in found]).astype(np.uint16).tofile(path)


def write_llmc(path, seed=0, wide=False):
    """As llm.c's data_common.py does; `wide`: of its Llama 3."""
    tokens = np.concatenate([[0, *one] for one in documents(seed=seed)])
    header = np.zeros(256, np.int32)
    header[:3] = (20240801, 7, len(tokens)) if wide else (20240520, 1, len(tokens))
    with open(path, "wb") as out:
        out.write(header.tobytes())
        out.write(tokens.astype(np.uint32 if wide else np.uint16).tobytes())


def write_megatron(prefix, seed=0, dtype=np.int32, code=4):
    """As megatron/core/datasets/indexed_dataset.py does."""
    found = [np.array([*one, 0], dtype) for one in documents(seed=seed)]
    Path(f"{prefix}.bin").write_bytes(b"".join(one.tobytes() for one in found))
    sizes = np.array([len(one) for one in found], np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1].astype(np.int64) * found[0].itemsize)])
    with open(f"{prefix}.idx", "wb") as out:
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        out.write(struct.pack("<QQ", len(sizes), len(sizes) + 1))
        out.write(sizes.tobytes() + pointers.astype(np.int64).tobytes())
        out.write(np.arange(len(sizes) + 1, dtype=np.int64).tobytes())


WRITERS = {
    "mds": write_mds,
    "litdata": write_litdata,
    "litdata-tokens": write_litdata_tokens,
    "tar": write_tar,
    "parquet": write_parquet,
}

if __name__ == "__main__":
    shutil.rmtree(FIXTURES, ignore_errors=True)
    for name, write in WRITERS.items():
        write(FIXTURES / name)
    sys.exit(0)
