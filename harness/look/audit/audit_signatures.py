"""Checks of signed heads in an audit: what only a holder of the run's key can have written, and how
much of it there must be.

Pure but for the store it is given. docs/PROOF.md lists what is signed, and what is not.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.bucket.archive import raw_key
from harness.bucket.layout import EPOCHS, HEADS, SETUP, epoch_of, segment_key
from harness.bucket.signed_heads import (
    NAMED,
    PURPOSE,
    Head,
    head_key,
    head_numbers,
    is_named,
    last_lines,
)
from harness.core.decoding import built
from harness.core.facts import is_sealed
from harness.core.signing import RunKey, SigningKey
from harness.look.audit.audit import AuditReport, Check
from harness.look.audit.audit_rules import RuleBroken
from storage.canonical_json import BadObject, digest, parsed
from storage.snapshots.restore import rewind_allowed
from storage.snapshots.snapshot_keys import MANIFESTS, ref_in, refs_in
from storage.stores.objects import ObjectStore, get_each


@dataclass(frozen=True)
class SeenHead:
    """The newest head of an earlier audit that passed. `digest`: of its bytes."""

    number: int
    digest: str


@dataclass
class _Said:
    """The combined content of all heads."""

    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    facts: dict[str, tuple[int, int]] = field(default_factory=dict)  # (segments, head number)
    volumes: tuple[int, int] = (0, 0)
    older: dict[str, str] = field(default_factory=dict)
    newest: SeenHead = SeenHead(0, "")
    run: str = ""  # the run's id


def with_signatures(
    report: AuditReport, store: ObjectStore, key: SigningKey, seen: SeenHead | None
) -> tuple[AuditReport, SeenHead | None]:
    """Return the report with one more check, and the newest head if that check passes. `seen`: the
    newest head of an earlier audit. Raises StoreError."""
    notes: list[str] = []
    try:
        n, newest = _check(store, key, seen, notes)
    except (RuleBroken, BadObject) as e:
        check, newest = Check("signatures", False, str(e), 0), None
    else:
        check = Check("signatures", True, f"each of a holder of the key ({key.kind})", n)
    first = report.first_violation or (None if check.ok else check.detail)
    checks, told = [*report.checks, check], [*report.notes, *notes]
    return AuditReport(report.ok and check.ok, checks, first, told), newest


def _check(
    store: ObjectStore, key: SigningKey, seen: SeenHead | None, notes: list[str]
) -> tuple[int, SeenHead]:
    # in this order: everything listed now was signed before; what a head names stays
    listed = [k for prefix in NAMED for k in store.list(prefix) if is_named(k)]
    said = _read(store, key, seen)
    for at, data in get_each(store, listed):
        if data is None:
            continue  # pruned, or a mark that was taken back
        if at not in said.names:
            raise RuleBroken(f"{at}: wanted a head that names it, found none; it was put there")
        if digest(data) not in said.names[at]:
            heads = " or ".join(sorted(said.names[at]))
            raise RuleBroken(
                f"{at}: wanted the hash {heads} that a head names, found {digest(data)}; it was "
                "changed"
            )
    _check_missing(store, said, set(listed), notes)
    _check_facts(store, key, said)
    return said.newest.number + len(listed), said.newest


def _read(store: ObjectStore, key: SigningKey, seen: SeenHead | None) -> _Said:
    said, wanted, prev = _Said(), 1, ""
    for at, data in get_each(store, map(head_key, head_numbers(store))):
        head = _head(at, data, key)
        if (head.number, at) != (wanted, head_key(wanted)):
            raise RuleBroken(
                f"{head_key(wanted)}: wanted heads without a gap, found {at} of number "
                f"{head.number} in its place"
            )
        if head.prev != prev:
            raise RuleBroken(
                f"{at}: wanted it to follow the head before it ({prev or 'none'}), found "
                f"{head.prev or 'none'}"
            )
        if head.number == 1:
            said.run = head.run
        elif head.run != said.run:
            raise RuleBroken(
                f"{at}: wanted the run's id {said.run or 'none'}, as the first head says, found "
                f"{head.run or 'none'}: it was signed for another run"
            )
        prev, wanted = digest(data or b""), wanted + 1
        said.newest = SeenHead(head.number, prev)
        if seen is not None and seen.number == head.number and seen.digest != prev:
            raise RuleBroken(
                f"{at}: wanted the head {seen.digest} that an earlier audit saw here, found {prev}"
            )
        for named, found in head.names.items():
            said.names[named].add(found)
        for writer, count in head.facts.items():
            said.facts[writer] = max(said.facts.get(writer, (0, 0)), (count, head.number))
        said.volumes = max(said.volumes, (head.volumes, head.number))
        said.older |= head.older if head.number == 1 else {}
    if seen is not None and seen.number >= wanted:
        raise RuleBroken(
            f"{head_key(seen.number)}: wanted this head, which an earlier audit saw; the newest is "
            f"number {wanted - 1}: the bucket was rolled back"
        )
    if wanted == 1:
        raise RuleBroken(
            f"{HEADS}: wanted signed heads, found none: the run was trained without a key "
            "(harness launch --sign-key FILE), or they were deleted"
        )
    return said


def _head(at: str, data: bytes | None, key: SigningKey) -> Head:
    if data is None:
        raise RuleBroken(f"{at}: listed, and not there; heads are never deleted")
    try:
        head = Head.decode(data)
    except BadObject as e:
        raise RuleBroken(f"{at}: wanted a head, found another object ({e})") from e
    if head.encode() != data or not key.holds(PURPOSE, head.unsigned(), head.signature):
        raise RuleBroken(
            f"{at}: wanted this key's signature of it, found another one; it is forged"
        )
    return head


def _check_missing(store: ObjectStore, said: _Said, listed: set[str], notes: list[str]) -> None:
    """Check that things that are never deleted exist; note a newest snapshot that is missing."""
    newest_epoch = max(map(epoch_of, said.names), default=0)
    for at in sorted(set(said.names) - listed):
        # the newest may be missing if its creator died; facts show whether it began
        if at.startswith(SETUP) or (at.startswith(EPOCHS) and epoch_of(at) < newest_epoch):
            raise RuleBroken(f"{at}: wanted it as a head names it, found no such object")
    since = rewind_allowed(store)
    refs = refs_in(k for k in said.names if k.startswith(MANIFESTS) and k.endswith(".json"))
    there = {ref_in(k) for k in listed if k.startswith(MANIFESTS) and k.endswith(".json")}
    newest = max((ref for ref in there if ref is not None), default=None)
    lost = [r for r in refs if r.epoch >= since and (newest is None or r > newest)]
    if lost:
        notes.append(
            f"a head names snapshot {max(lost)}, which is not there: its writer died before it was "
            "committed, or it was deleted before that was told"
        )


def _check_facts(store: ObjectStore, key: SigningKey, said: _Said) -> None:
    """Check that each writer's last line is a signed seal, which fixes all lines before it, and
    that there are as many facts as the heads count."""
    found, bound = last_lines(store), RunKey(key, said.run)
    for writer, (count, head) in said.facts.items():
        if (there := found.get(writer, (0, b""))[0]) < count:
            raise RuleBroken(
                f"{segment_key(writer, there)}: wanted {count} segments of facts of {writer}, as "
                f"{head_key(head)} says, found {there}; they were cut off"
            )
    last, head = said.volumes
    if last and not store.list(raw_key(last - 1)):
        raise RuleBroken(f"{raw_key(last - 1)}: wanted it as {head_key(head)} says, found none")
    for writer, (count, line) in found.items():
        if is_sealed(writer, line, bound) or said.older.get(writer) == digest(line):
            continue
        raise RuleBroken(
            f"{segment_key(writer, count - 1)}: wanted a last line with this key's signature, "
            "for this run, found none: a process without the key wrote it, it is another run's, or "
            "it is forged"
        )


def remembered(text: str, url: str) -> SeenHead | None:
    """Return the head that a state file remembers for a run. Raises BadObject."""
    body = parsed(text) if text.strip() else {}
    if not isinstance(body, dict):
        raise BadObject("wanted an object by URL of a run")
    return built(SeenHead, body[url]) if url in body else None


def remembering(text: str, url: str, newest: SeenHead) -> str:
    """Return the next content of the state file."""
    body: Mapping[str, object] = parsed(text) if text.strip() else {}
    return json.dumps({**body, url: dataclasses.asdict(newest)}, indent=1) + "\n"
