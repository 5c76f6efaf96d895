"""Names and layouts of Hugging Face's language models, as data: which of our tensors corresponds to
which of theirs.

Pure: converts a snapshot's index to an index with their names, and the reverse; no bytes are read.
Rows (slices of the first dimension) are mapped, since several of their matrices may be one of ours
(a fused product, a stack of experts) and the reverse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# entry of a tensor as in `Manifest.tensors`, plus "layout" if it has one
TensorEntry = dict[str, Any]
TensorIndex = dict[str, TensorEntry]

TURNED = "turned"  # theirs is (in, out), as in GPT-2's Conv1D
PAIRS = "pairs"  # ours rotates neighbours (x[2i], x[2i+1]) by an angle, theirs (x[i], x[i + d/2])


@dataclass(frozen=True)
class NamesRule:
    """A rule by which the rows of `ours`, in order, are the rows of `theirs`. "*" is the layer's
    number; "#" stands for all experts in turn, which ours stacks as (experts, rows, columns).
    `rows`: words for the number of rows of each of several names (see `_rows`)."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    rows: tuple[str, ...] = ()
    layout: str = ""


def _same(pairs: Mapping[str, str], layer: str, layout: str = "") -> tuple[NamesRule, ...]:
    """Return rules for tensors of a block that differ only in their names."""
    return tuple(
        NamesRule((f"blocks.*.{ours}",), (f"{layer}.*.{theirs}",), layout=layout)
        for ours, theirs in pairs.items()
    )


_LAYER = "model.layers"
_QKV = tuple(f"{_LAYER}.*.self_attn.{name}_proj" for name in "qkv")
_ENDS = (
    NamesRule(("embed.weight",), ("model.embed_tokens.weight",)),
    NamesRule(("norm.weight",), ("model.norm.weight",)),
    NamesRule(("head.weight",), ("lm_head.weight",)),
)
_ATTENTION = (
    *_same(
        {
            "norm_1.weight": "input_layernorm.weight",
            "norm_2.weight": "post_attention_layernorm.weight",
            "attention.q.weight": "self_attn.q_proj.weight",
            "attention.k.weight": "self_attn.k_proj.weight",
            "attention.v.weight": "self_attn.v_proj.weight",
            "attention.out.weight": "self_attn.o_proj.weight",
            # Qwen 2
            "attention.q.bias": "self_attn.q_proj.bias",
            "attention.k.bias": "self_attn.k_proj.bias",
            "attention.v.bias": "self_attn.v_proj.bias",
            # Qwen 3
            "attention.q_norm.weight": "self_attn.q_norm.weight",
            "attention.k_norm.weight": "self_attn.k_norm.weight",
        },
        _LAYER,
    ),
    NamesRule(
        ("blocks.*.attention.qkv.weight",),
        tuple(f"{name}.weight" for name in _QKV),
        ("q", "k", "k"),
    ),
)
_MLP = (
    *_same(
        {
            "mlp.gate.weight": "mlp.gate_proj.weight",
            "mlp.up.weight": "mlp.up_proj.weight",
            "mlp.out.weight": "mlp.down_proj.weight",
        },
        _LAYER,
    ),
    NamesRule(
        ("blocks.*.mlp.gate_up.weight",),
        (f"{_LAYER}.*.mlp.gate_proj.weight", f"{_LAYER}.*.mlp.up_proj.weight"),
        ("hidden", "hidden"),
    ),
)
_EXPERTS = (
    *_same({"mlp.router.weight": "block_sparse_moe.gate.weight"}, _LAYER),
    *(
        NamesRule(
            (f"blocks.*.mlp.experts.{ours}",),
            (f"{_LAYER}.*.block_sparse_moe.experts.#.{theirs}.weight",),
            (rows,),
        )
        for ours, theirs, rows in (
            ("gate", "w1", "hidden"),
            ("up", "w3", "hidden"),
            ("out", "w2", "dim"),
        )
    ),
)
_GPT2 = (
    NamesRule(("embed.weight",), ("transformer.wte.weight",)),
    NamesRule(("positions.weight",), ("transformer.wpe.weight",)),
    NamesRule(("norm.weight",), ("transformer.ln_f.weight",)),
    NamesRule(("norm.bias",), ("transformer.ln_f.bias",)),
    NamesRule(("head.weight",), ("lm_head.weight",)),
    *_same(
        {
            f"{ours}.{kind}": f"{theirs}.{kind}"
            for ours, theirs in {"norm_1": "ln_1", "norm_2": "ln_2"}.items()
            for kind in ("weight", "bias")
        }
        | {
            "attention.out.bias": "attn.c_proj.bias",
            "mlp.up.bias": "mlp.c_fc.bias",
            "mlp.out.bias": "mlp.c_proj.bias",
        },
        "transformer.h",
    ),
    *_same(
        {
            "attention.out.weight": "attn.c_proj.weight",
            "mlp.up.weight": "mlp.c_fc.weight",
            "mlp.out.weight": "mlp.c_proj.weight",
        },
        "transformer.h",
        TURNED,
    ),
    *(
        NamesRule(
            tuple(f"blocks.*.attention.{name}.{kind}" for name in "qkv"),
            (f"transformer.h.*.attn.c_attn.{kind}",),
            ("q", "k", "k"),
            layout,
        )
        for kind, layout in (("weight", TURNED), ("bias", ""))
    ),
)
# Meta's own names, and torchtitan's, for the same models
_META_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
    "layers.*.attention_norm.weight": f"{_LAYER}.*.input_layernorm.weight",
    "layers.*.ffn_norm.weight": f"{_LAYER}.*.post_attention_layernorm.weight",
    "layers.*.attention.wo.weight": f"{_LAYER}.*.self_attn.o_proj.weight",
    "layers.*.feed_forward.w1.weight": f"{_LAYER}.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": f"{_LAYER}.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": f"{_LAYER}.*.mlp.down_proj.weight",
} | {
    f"layers.*.{attention}.w{name}.weight": f"{_LAYER}.*.self_attn.{name}_proj.weight"
    for attention in ("attention", "attention.qkv_linear")
    for name in "qkv"
}
_META = tuple(
    NamesRule((ours,), (theirs,), layout=PAIRS if re.search(r"\.w[qk]\.", ours) else "")
    for ours, theirs in _META_NAMES.items()
)
_DENSE = (*_ENDS, *_ATTENTION, *_MLP)
# by Hugging Face's `model_type`: the naming schemes that a model may use
TABLES: dict[str, tuple[tuple[NamesRule, ...], ...]] = {
    "llama": (_DENSE, _META),
    "qwen2": (_DENSE,),
    "qwen3": (_DENSE,),
    "mixtral": ((*_ENDS, *_ATTENTION, *_EXPERTS),),
    "gpt2": (_GPT2,),
}


@dataclass(frozen=True)
class MovedRows:
    """A mapping of `rows` rows: theirs from row `theirs_at` on, ours from row `ours_at` on. In a
    stack of ours, rows are counted through the whole stack."""

    ours: str
    ours_at: int
    theirs: str
    theirs_at: int
    rows: int | None  # None: all rows
    layout: str = ""
    stack: int = 0  # rows of each element of our stack; 0: not stacked


def layout_moves(config: Mapping[str, Any], ours: Collection[str]) -> tuple[MovedRows, ...]:
    """Return where each tensor of `ours` lies in Hugging Face's model with that config.json.

    Returns () if no name is in the tables (then they may be Hugging Face's own). Raises ValueError
    for a model that is unknown, or known only in part.
    """
    kind = config.get("model_type")
    if kind not in TABLES:
        raise ValueError(f"wanted a model_type of {', '.join(TABLES)}, found {kind!r}")
    best: list[MovedRows] = []
    left = set(ours)
    for table in TABLES[kind]:
        found = list(_matched(table, ours, config))
        unknown = set(ours) - {one.ours for one in found}
        if len(unknown) < len(left):
            best, left = found, unknown
    if all(m.ours == m.theirs for m in best):  # Meta's head has the same name as Hugging Face's
        return ()
    if left:
        raise ValueError(
            f"{_some(left)}: wanted tensors of a {kind} model, as examples/models.py names them; "
            "found others, which have no place there. Give the config.json of the right model, or "
            "none to keep the names"
        )
    return tuple(best)


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def _rows(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows of a matrix, by the word that rules use. Raises ValueError."""
    try:
        if config["model_type"] == "gpt2":
            dim = int(config["n_embd"])
            return {"dim": dim, "q": dim, "k": dim, "head": dim // int(config["n_head"])}
        dim, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head = int(config.get("head_dim") or dim // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        hidden = int(config["intermediate_size"])
        sizes = {"dim": dim, "q": heads * head, "k": kv_heads * head, "hidden": hidden}
        return sizes | {"head": head, "experts": int(config.get("num_local_experts") or 0)}
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"config.json: wanted the model's sizes, found none ({e})") from e


def _matched(
    table: Sequence[NamesRule], names: Collection[str], config: Mapping[str, Any]
) -> Iterator[MovedRows]:
    for rule in table:
        pattern = re.compile(re.escape(rule.ours[0]).replace(r"\*", r"(\d+)"))
        for found in filter(None, map(pattern.fullmatch, sorted(names))):
            layer = found[1] if pattern.groups else ""
            ours = [name.replace("*", layer) for name in rule.ours]
            if set(ours) <= set(names):
                yield from _placed(rule, ours, layer, _rows(config))


def _placed(
    rule: NamesRule, ours: list[str], layer: str, rows: Mapping[str, int]
) -> Iterator[MovedRows]:
    theirs = [name.replace("*", layer) for name in rule.theirs]
    layout = f"{PAIRS}:{rows['head']}" if rule.layout == PAIRS else rule.layout
    if "#" in theirs[0]:
        n = rows[rule.rows[0]]
        for e in range(rows["experts"]):
            name = theirs[0].replace("#", str(e))
            yield MovedRows(ours[0], e * n, name, 0, n, layout, stack=n)
        return
    if not rule.rows:
        yield MovedRows(ours[0], 0, theirs[0], 0, None, layout)
        return
    at = 0
    for i, n in enumerate(rows[word] for word in rule.rows):
        if len(theirs) > 1:
            yield MovedRows(ours[0], at, theirs[i], 0, n, layout)
        else:
            yield MovedRows(ours[i], 0, theirs[0], at, n, layout)
        at += n


# ---- indices -------------------------------------------------------------------------------------
def to_theirs(index: TensorIndex, moved: Iterable[MovedRows]) -> TensorIndex:
    """Convert an index of our tensors to theirs. A tensor with a "layout" keeps our shape and
    chunks; whoever writes its bytes must rearrange them. Raises ValueError for a tensor of a wrong
    shape."""
    made: TensorIndex = {}
    for m in moved:
        source = _flat(m.ours, index[m.ours], m.stack)
        n = _put(made, m.theirs, m.theirs_at, m.ours, source, m.ours_at, m.rows)
        made[m.theirs]["shape"][0] += n
        if m.layout:
            made[m.theirs]["layout"] = m.layout
    return made


def to_ours(index: TensorIndex, moved: Sequence[MovedRows]) -> TensorIndex:
    """Convert an index of their tensors to ours. The chunks of a tensor with a layout lie in a part
    named by `laid_out`, which holds its bytes in our layout. Raises ValueError for missing or
    surplus tensors and wrong shapes."""
    wanted = {m.theirs: m.layout for m in moved}
    missing, more = wanted.keys() - index.keys(), index.keys() - wanted.keys()
    more = {name for name in more if not _COMPUTED.search(name)}
    if missing or more:
        what = f"no {_some(missing)}" if missing else f"{_some(more)}, which the model has not"
        raise ValueError(f"wanted the {len(wanted)} tensors that the model has, found {what}")
    known = {name: _seen(name, index[name], layout) for name, layout in wanted.items()}
    made: TensorIndex = {}
    stacks = {m.ours: m.stack for m in moved}
    for m in moved:
        n = _put(made, m.ours, m.ours_at, m.theirs, known[m.theirs], m.theirs_at, m.rows)
        made[m.ours]["shape"][0] += n
    return {name: _stacked(entry, stacks[name]) for name, entry in made.items()}


# buffers that old files contain
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")


def as_published(config: Mapping[str, Any], index: TensorIndex) -> TensorIndex:
    """Return the index with the names that `save_pretrained` writes, for files by others: GPT-2's
    were made from the model without its head. A tied head may be in the file or not."""
    found = dict(index)
    if config.get("model_type") == "gpt2" and "wte.weight" in found:
        found = {
            name if name.startswith("lm_head.") else f"transformer.{name}": entry
            for name, entry in found.items()
        }
    return found


def tie(index: TensorIndex, wanted: Collection[str], tied: bool) -> TensorIndex:
    """Return the index with or without the head, as `wanted` says, if the model is tied: its head
    is then the embedding, whether or not the file has both."""
    embedding = "transformer.wte.weight" if "transformer.wte.weight" in index else _EMBEDDING
    if not tied or embedding not in index:
        return index
    found = {name: entry for name, entry in index.items() if name != "lm_head.weight"}
    head = {"lm_head.weight": index[embedding]}
    return found | (head if "lm_head.weight" in wanted else {})


_EMBEDDING = "model.embed_tokens.weight"


def laid_out(name: str, layout: str) -> str:
    """Return the name of a part that holds one of their tensors in our layout."""
    return f"{layout}/{name}"


def order_of(layout: str, rows: int) -> np.ndarray[Any, Any] | None:
    """Return which of their rows each of our rows is; None if the order is the same."""
    kind, _, size = layout.partition(":")
    if kind != PAIRS:
        return None
    head = int(size)
    theirs = np.arange(rows).reshape(rows // head, 2, head // 2)
    return theirs.transpose(0, 2, 1).reshape(rows)


def _seen(name: str, entry: TensorEntry, layout: str) -> TensorEntry:
    """Return the entry of one of their tensors in our layout, as one chunk that the caller has to
    produce."""
    if not layout:
        return entry
    shape = list(reversed(entry["shape"])) if layout == TURNED else list(entry["shape"])
    nbytes = sum(chunk["end"] - chunk["start"] for chunk in entry["chunks"])
    chunk = {"offsets": [0] * len(shape), "sizes": shape, "start": 0, "end": nbytes}
    return {**entry, "shape": shape, "chunks": [{**chunk, "part": laid_out(name, layout)}]}


def _put(
    made: TensorIndex,
    target: str,
    at: int,
    source: str,
    entry: TensorEntry,
    first: int,
    rows: int | None,
) -> int:
    """Add rows [first, first + rows) of `entry` to the target, from its row `at` on, and return how
    many there are. Raises ValueError."""
    n = entry["shape"][0] - first if rows is None else rows
    if first + n > entry["shape"][0]:
        raise ValueError(
            f"{source}: wanted rows {first} to {first + n} for {target}, found "
            f"{entry['shape'][0]}; is this the config.json of that model?"
        )
    fresh = {"shape": [0, *entry["shape"][1:]], "dtype": entry["dtype"], "chunks": []}
    into = made.setdefault(target, fresh)
    if (into["shape"][1:], into["dtype"]) != (fresh["shape"][1:], fresh["dtype"]):
        raise ValueError(
            f"{source}: wanted {into['dtype']} and rows of {into['shape'][1:]}, as its neighbours "
            f"in {target} have; found {fresh['dtype']} and {fresh['shape'][1:]}"
        )
    for chunk in _cut(entry["chunks"], first, first + n):
        row, *others = chunk["offsets"]
        into["chunks"].append({**chunk, "offsets": [row - first + at, *others]})
    return n


def _cut(chunks: Iterable[TensorEntry], low: int, high: int) -> Iterator[TensorEntry]:
    """Yield the rows [low, high) of a tensor, as each chunk's contiguous share of them."""
    for chunk in chunks:
        first, n = chunk["offsets"][0], chunk["sizes"][0]
        start, end = max(first, low), min(first + n, high)
        if start < end:
            row = (chunk["end"] - chunk["start"]) // n
            yield {
                **chunk,
                "offsets": [start, *chunk["offsets"][1:]],
                "sizes": [end - start, *chunk["sizes"][1:]],
                "start": chunk["start"] + (start - first) * row,
                "end": chunk["start"] + (end - first) * row,
            }


def _flat(name: str, entry: TensorEntry, stack: int) -> TensorEntry:
    """Return (experts, rows, columns) as (experts * rows, columns); unchanged without a `stack`.
    Raises ValueError."""
    if not stack:
        return entry
    if len(entry["shape"]) != 3 or entry["shape"][1] != stack:
        raise ValueError(
            f"{name}: wanted experts of {stack} rows each, found a shape of {entry['shape']}; is "
            "this the config.json of that model?"
        )
    chunks = []
    for chunk in entry["chunks"]:
        (first, row, column), (n, rows, columns) = chunk["offsets"], chunk["sizes"]
        nbytes = (chunk["end"] - chunk["start"]) // n
        for e in range(n):
            at = chunk["start"] + e * nbytes
            place = {"offsets": [(first + e) * stack + row, column], "sizes": [rows, columns]}
            chunks.append({**chunk, **place, "start": at, "end": at + nbytes})
    shape = [math.prod(entry["shape"][:2]), entry["shape"][2]]
    return {**entry, "shape": shape, "chunks": chunks}


def _stacked(entry: TensorEntry, stack: int) -> TensorEntry:
    """Undo `_flat` for chunks that hold whole experts."""
    if not stack:
        return entry
    chunks = [
        {
            **chunk,
            "offsets": [*divmod(chunk["offsets"][0], stack), *chunk["offsets"][1:]],
            "sizes": [1, *chunk["sizes"]],
        }
        for chunk in entry["chunks"]
    ]
    shape = [entry["shape"][0] // stack, stack, *entry["shape"][1:]]
    return {**entry, "shape": shape, "chunks": chunks}
