"""What is known of each snapshot, as rows and as a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from storage.errors import NotFound
from storage.export import Exported
from storage.manifest import Manifest, Ref, SnapshotCorrupt, SnapshotTooNew
from storage.objects import ObjectStore
from storage.snapshots import Snapshots


@dataclass(frozen=True)
class Note:
    """What a manifest does not say of its snapshot."""

    committed_at: float | None = None  # wall clock, seconds
    commit_s: float | None = None  # from the safe point to the commit
    why: str = ""
    restored: str = ""  # from which tier it was read when somebody resumed from it
    copies: tuple[str, ...] = ()  # URLs of other buckets that have it


@dataclass(frozen=True)
class Notes:
    """By snapshot; and what else of the run a copy needs before its manifests (keys, create-only).

    `pardoned` is told of marks that were taken back, `exported` of exports. `near`: tiers of this
    node that have bytes of a snapshot, and which share of them, nearest first.
    """

    of: dict[Ref, Note] = field(default_factory=dict)
    extra: Collection[str] = ()
    near: Callable[[Manifest], dict[str, float]] = lambda manifest: {}
    # for the record: a mark was taken back
    pardoned: Callable[[Ref, str], None] = lambda ref, what: None
    # ... and weights were exported, with which type of floats ("": as they were)
    exported: Callable[[Ref, Exported, str], None] = lambda ref, made, dtype: None


FindNotes = Callable[[ObjectStore], Notes]


# ---- list ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SnapshotRow:
    """One snapshot. `state`: "whole" (of the sizes of its parts; `verify` reads them),
    "quarantined", "damaged"."""

    step: int
    epoch: int
    state: str
    nbytes: int | None
    own_nbytes: int | None  # stored for it alone, and not for an older one
    world: int | None
    tensors: int | None
    metrics: dict[str, float]
    final: bool
    reason: str  # why it is bad
    committed_at: float | None
    commit_s: float | None
    why: str
    restored: str
    # where it lies, as far as can be seen from here: tier or URL -> share of its bytes
    tiers: dict[str, float]


def rows(store: ObjectStore, notes: Notes) -> list[SnapshotRow]:
    """Newest first. Marks nothing."""
    snapshots = Snapshots(store)
    marked = snapshots.quarantined()
    found = []
    for ref in sorted(snapshots.manifests()[0] | marked, reverse=True):
        note = notes.of.get(ref, Note())
        manifest, state, reason = None, "whole", ""
        try:
            manifest = snapshots.load(ref)
            snapshots.check(manifest)
        except NotFound:
            if ref not in marked:  # pruned a moment ago
                continue
        except SnapshotTooNew as e:
            state, reason = "too new", str(e)
        except SnapshotCorrupt as e:
            state, reason = "damaged", str(e)
        if ref in marked:
            state, reason = "quarantined", snapshots.why(ref)
        data = manifest.data if manifest else {}
        metrics = data.get("metrics") if isinstance(data.get("metrics"), dict) else {}
        numbers = {"loss": data.get("loss"), **(metrics or {})}
        found.append(
            SnapshotRow(
                ref.step,
                ref.epoch,
                state,
                manifest.nbytes if manifest else None,
                manifest.own_nbytes if manifest else None,
                manifest.world if manifest else None,
                len(manifest.tensors) if manifest else None,
                {k: float(v) for k, v in numbers.items() if isinstance(v, int | float)},
                bool(manifest and snapshots.ended(manifest)),
                reason,
                note.committed_at,
                note.commit_s,
                note.why,
                note.restored,
                ({**notes.near(manifest), "bucket": 1.0} if manifest and state == "whole" else {})
                | dict.fromkeys(note.copies, 1.0),
            )
        )
    return found


def table(found: Sequence[SnapshotRow], now_s: float) -> Table:
    """Only the columns that something is known for."""
    columns: list[tuple[str, Callable[[SnapshotRow], str]]] = [
        ("step", lambda r: str(r.step)),
        ("epoch", lambda r: str(r.epoch)),
        ("age", lambda r: age(now_s - r.committed_at) if r.committed_at is not None else ""),
        ("size", lambda r: size(r.nbytes) if r.nbytes is not None else ""),
        (
            "new",
            lambda r: (
                size(r.own_nbytes) if r.own_nbytes is not None and r.own_nbytes != r.nbytes else ""
            ),
        ),
        ("ranks", lambda r: str(r.world or "")),
        ("commit", lambda r: f"{r.commit_s:.1f} s" if r.commit_s is not None else ""),
        ("why", lambda r: r.why),
        ("metrics", lambda r: "  ".join(f"{k} {v:.4g}" for k, v in r.metrics.items())),
        (
            "lies in",
            lambda r: ", ".join(
                tier if share > 0.9995 else f"{tier} {share:.0%}" for tier, share in r.tiers.items()
            ),
        ),
        ("restored from", lambda r: r.restored),
        ("state", lambda r: f"{r.state}, final" if r.final else r.state),
    ]
    made = Table(box=None, pad_edge=False, header_style="bold")
    shown = [(name, cell) for name, cell in columns if any(cell(row) for row in found)]
    for name, _ in shown:
        made.add_column(
            name,
            justify="right"
            if name in ("step", "epoch", "age", "size", "new", "ranks", "commit")
            else "left",
        )
    for row in found:
        made.add_row(*(cell(row) for _, cell in shown), style="" if row.state == "whole" else "red")
    return made


def size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return (
                f"{nbytes:.0f} {unit}" if nbytes >= 99.5 or unit == "B" else f"{nbytes:.3g} {unit}"
            )
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def age(seconds: float) -> str:
    for unit, per, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit:
            return f"{max(0.0, seconds) / per:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
