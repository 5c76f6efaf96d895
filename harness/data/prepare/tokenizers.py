"""Tokenizers by name, each imported when it is requested. `bytes` needs no package.

Text is never parsed into special tokens, so the token that ends each document occurs nowhere else,
and documents can be separated without a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.input_files import read_given
from harness.core.world import BadInput
from harness.data.card import hash_of
from harness.data.prepare.units import needed

TokenIds = np.ndarray[Any, Any]
BYTES_EOS = 256  # the first id after the 256 bytes
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
KINDS = (
    "bytes, a tokenizer.json, tokenizers:FILE, transformers:NAME, tiktoken:NAME, "
    "sentencepiece:FILE (or a .model file)"
)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer. `hash`: covers all that decides its tokens; `vocabulary`: all ids, `eos`
    included, are below it. `encode` returns an array of ids for each text; `decode` returns the
    text of some ids."""

    name: str
    hash: str
    vocabulary: int
    eos: int
    encode: Callable[[list[str]], list[TokenIds]]
    decode: Callable[[Sequence[int]], str]

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocabulary <= 1 << 16 else "uint32"


def tokenizer_of(spec: str, eos: str = "") -> Tokenizer:
    """Return the tokenizer that `spec` names. `eos`: the token (or its id) that ends documents; ""
    means the tokenizer's own. Raises BadInput."""
    kind, _, what = spec.partition(":")
    if kind not in _MAKERS:
        ending = Path(spec).suffix
        kind = {".json": "tokenizers", ".model": "sentencepiece"}.get(ending, "")
        what = spec
    if spec == "bytes":
        return _bytes(eos)
    if not kind or not what:
        raise BadInput(f"--tokenizer {spec}: wanted {KINDS}")
    return _MAKERS[kind](spec, what, eos)


def _bytes(eos: str) -> Tokenizer:
    if eos not in ("", str(BYTES_EOS)):
        raise BadInput(f"--eos {eos}: documents of bytes end with {BYTES_EOS}; leave it out")
    return Tokenizer(
        "bytes",
        hash_of(b"bytes, and 256 behind a document").hex(),
        BYTES_EOS + 1,
        BYTES_EOS,
        lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        lambda ids: bytes(i for i in ids if i < BYTES_EOS).decode(errors="replace"),
    )


def _tokenizers(spec: str, path: str, eos: str) -> Tokenizer:
    package = needed("tokenizers", "tokenizers", f"--tokenizer {spec}")
    text = read_given(path, "a tokenizer.json of the package tokenizers")
    try:
        fast = package.Tokenizer.from_str(text.decode())
    except Exception as e:  # the package raises Exception itself
        raise BadInput(f"--tokenizer {spec}: {path} is no tokenizer.json ({e})") from e
    return _fast(spec, fast, hash_of(text).hex(), eos, None)


def _fast(spec: str, fast: Any, hash: str, eos: str, own_eos: int | None) -> Tokenizer:
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = True  # special tokens in a text are encoded as text
    vocabulary = max(fast.get_vocab(with_added_tokens=True).values()) + 1
    end = _end_of(spec, eos, vocabulary, fast.token_to_id, own_eos)

    def encode(texts: list[str]) -> list[TokenIds]:
        found = fast.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in found]

    def decode(ids: Sequence[int]) -> str:
        return str(fast.decode(list(ids), skip_special_tokens=False))

    return Tokenizer(spec, hash, vocabulary, end, encode, decode)


def _transformers(spec: str, name: str, eos: str) -> Tokenizer:
    transformers = needed("transformers", "transformers", f"--tokenizer {spec}")
    try:
        made = transformers.AutoTokenizer.from_pretrained(name, use_fast=True)
    except (OSError, ValueError) as e:
        raise BadInput(f"--tokenizer {spec}: transformers has no such tokenizer ({e})") from e
    if not getattr(made, "is_fast", False):
        raise BadInput(
            f"--tokenizer {spec}: wanted a fast one (with a tokenizer.json), found "
            f"{type(made).__name__}; name its own file by sentencepiece: or tiktoken:"
        )
    fast = made.backend_tokenizer
    fast.no_truncation()
    fast.no_padding()
    return _fast(spec, fast, hash_of(fast.to_str().encode()).hex(), eos, made.eos_token_id)


def _tiktoken(spec: str, name: str, eos: str) -> Tokenizer:
    tiktoken = needed("tiktoken", "tiktoken", f"--tokenizer {spec}")
    try:
        made = tiktoken.get_encoding(name)
    except (KeyError, ValueError) as e:
        raise BadInput(f"--tokenizer {spec}: tiktoken has no such encoding ({e})") from e
    ranks = sorted((rank, token.hex()) for token, rank in made._mergeable_ranks.items())
    said = json.dumps([made.name, made._pat_str, ranks, sorted(made._special_tokens.items())])
    own = made._special_tokens.get("<|endoftext|>")
    end = _end_of(spec, eos, made.n_vocab, made._special_tokens.get, own)

    def encode(texts: list[str]) -> list[TokenIds]:
        return [made.encode_to_numpy(text, disallowed_special=()) for text in texts]

    return Tokenizer(
        spec,
        hash_of(said.encode()).hex(),
        made.n_vocab,
        end,
        encode,
        lambda ids: str(made.decode(list(ids))),
    )


def _sentencepiece(spec: str, path: str, eos: str) -> Tokenizer:
    package = needed("sentencepiece", "sentencepiece", f"--tokenizer {spec}")
    data = read_given(path, "a model of SentencePiece")
    try:
        made = package.SentencePieceProcessor(model_proto=data)
        vocabulary = made.get_piece_size()
    except RuntimeError as e:
        raise BadInput(f"--tokenizer {spec}: {path} is no model of SentencePiece ({e})") from e
    own = made.eos_id() if made.eos_id() >= 0 else None

    def piece(token: str) -> int | None:
        found = int(made.piece_to_id(token))
        return None if found == made.unk_id() else found

    end = _end_of(spec, eos, vocabulary, piece, own)
    return Tokenizer(
        spec,
        hash_of(data).hex(),
        vocabulary,
        end,
        lambda texts: [np.array(ids, np.uint32) for ids in made.encode(texts, out_type=int)],
        lambda ids: str(made.decode(list(ids))),
    )


_MAKERS: dict[str, Callable[[str, str, str], Tokenizer]] = {
    "tokenizers": _tokenizers,
    "transformers": _transformers,
    "tiktoken": _tiktoken,
    "sentencepiece": _sentencepiece,
}


def _end_of(
    spec: str,
    eos: str,
    vocabulary: int,
    id_of: Callable[[str], int | None],
    own: int | None,
) -> int:
    """Return the id of the token that ends documents. Raises BadInput."""
    if eos.isdecimal():
        found: int | None = int(eos)
    elif eos:
        found = id_of(eos)
    else:
        known = (id_of(token) for token in ENDS)
        found = own if own is not None else next((i for i in known if i is not None), None)
    if found is None or not 0 <= found < vocabulary:
        what = f"--eos {eos}" if eos else f"--tokenizer {spec}"
        raise BadInput(
            f"{what}: wanted a token of its vocabulary (ids below {vocabulary}) to put behind each "
            "document, found none; name one: --eos TOKEN or --eos ID"
        )
    return found
