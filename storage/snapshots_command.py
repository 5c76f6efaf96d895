"""Command line for snapshots: `python -m storage list|verify|show|prune|export|copy URL`, and
`harness snapshots ...`.

Knows nothing of harness; a caller that knows more about snapshots (how old, how long it took)
passes `Notes`. Exit status: 0 done, 1 failure or damage found, 2 wrong input.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from rich.table import Table

from storage.errors import NotFound, StoreError, StoreUnavailable
from storage.snapshots.manifest import Manifest, Ref, SnapshotCorrupt, SnapshotTooNew
from storage.snapshots.reader_leases import reading
from storage.snapshots.restore import PAUSES_S, ReadRetries, Restore, this_machine
from storage.snapshots.retention import AGES_H, Keep
from storage.snapshots.snapshots import Snapshots
from storage.snapshots.transfer import Exported, copy, would_prune
from storage.stores.objects import ObjectStore, abort_stale_uploads
from storage.stores.store_urls import normalize, open_store
from storage.terminal_text import Console, plain, progress_bar, why_not_a_word

# Rows and a table of everything known about each snapshot.


@dataclass(frozen=True)
class Note:
    """Facts about a snapshot that its manifest does not contain."""

    committed_at: float | None = None  # wall clock, seconds
    commit_s: float | None = None  # seconds from the safe point to the commit
    why: str = ""
    restored: str = ""  # the tier that it was read from when a run resumed from it
    copies: tuple[str, ...] = ()  # URLs of other buckets that have a copy


@dataclass(frozen=True)
class Notes:
    """Notes by snapshot, and other keys of the run that a copy needs before its manifests
    (create-only).

    `pardoned` is called for marks that were taken back, `exported` for exports. `near` returns the
    tiers of this node that have bytes of a snapshot, nearest first, and the share that each has.
    """

    of: dict[Ref, Note] = field(default_factory=dict)
    extra: Collection[str] = ()
    ends: tuple[int, ...] = ()  # steps whose snapshots are never pruned
    near: Callable[[Manifest], dict[str, float]] = lambda manifest: {}
    # records that a mark was taken back
    pardoned: Callable[[Ref, str], None] = lambda ref, what: None
    # records that weights were exported, and with which float type ("": as they were)
    exported: Callable[[Ref, Exported, str], None] = lambda ref, made, dtype: None


FindNotes = Callable[[ObjectStore], Notes]


@dataclass(frozen=True)
class Command:
    """A sub-command. `run` returns the exit status."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Any, ObjectStore, Console, FindNotes], int]


# ---- list ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SnapshotRow:
    """One snapshot. `state`: "whole" (all parts have their sizes; `verify` reads them),
    "quarantined", "damaged", "too new"."""

    step: int
    epoch: int
    state: str
    nbytes: int | None
    own_nbytes: int | None  # bytes stored for it, and not for an older one
    world: int | None
    tensors: int | None
    metrics: dict[str, float]
    final: bool
    reason: str  # why it is bad
    committed_at: float | None
    commit_s: float | None
    why: str
    restored: str
    # tier or URL -> share of its bytes there, as far as visible from here
    tiers: dict[str, float]


def rows(store: ObjectStore, notes: Notes) -> list[SnapshotRow]:
    """Return the rows of all snapshots, newest first. Marks nothing."""
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
            if ref not in marked:  # it was just pruned
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
    """Return a table with only the columns that have a value in some row."""
    columns: list[tuple[str, Callable[[SnapshotRow], str]]] = [
        ("step", lambda r: str(r.step)),
        ("generation", lambda r: str(r.epoch)),
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
            if name in ("step", "generation", "age", "size", "new", "ranks", "commit")
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


DONE, FAILED, WRONG_INPUT = 0, 1, 2
MOST_PAUSE_S = 600.0
P = TypeVar("P", bound=argparse.ArgumentParser)
STALE_H = 24.0  # an upload that began so long ago counts as abandoned


def parser(prog: str, commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog=prog, description="Snapshots in a bucket.")
    several = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_commands(
        lambda name, about: several.add_parser(name, help=about, description=about), commands
    )
    return root


def add_commands(add: Callable[[str, str], P], commands: Mapping[str, Command]) -> dict[str, P]:
    """Add commands and return their parsers by name. `add`: takes a command's name and a line about
    it, and returns its parser."""
    made: dict[str, P] = {}
    for name, command in commands.items():
        made[name] = one = add(name, command.help)
        one.add_argument("url", help="URL of the run")
        command.add_options(one)
    return made


def bounded(
    kind: type[int] | type[float], low: float, high: float = 1e15
) -> Callable[[str], float]:
    """Return an argparse type for a finite number in [low, high]."""

    def parse(text: str) -> float:
        try:
            found = kind(text)
        except ValueError:
            found = -1
        if not low <= found <= high:
            what = "a whole number" if kind is int else "a finite number"
            raise argparse.ArgumentTypeError(
                f"wanted {what} from {low:g} to {high:g}, found {text[:80]!r}"
            )
        return found

    return parse


def add_step(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--step", type=bounded(int, 0), help="the snapshot of this step (default: the newest)"
    )


def _add_json(one: argparse.ArgumentParser) -> None:
    one.add_argument("--json", action="store_true", help="as JSON")


def _add_show_options(one: argparse.ArgumentParser) -> None:
    add_step(one)
    _add_json(one)


def _add_copy_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("target", help="URL to copy to")
    one.add_argument(
        "--step",
        type=bounded(int, 0),
        help="only the snapshot of this step (default: all, newest first)",
    )


def _add_verify_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--step", type=bounded(int, 0), help="only the snapshot of this step (default: all)"
    )
    one.add_argument(
        "--look-again-s",
        type=bounded(float, 0, MOST_PAUSE_S),
        nargs="*",
        default=PAUSES_S,
        metavar="S",
        help="seconds between looks at what seems damaged (1 3 8)",
    )
    one.add_argument(
        "--quarantine",
        action="store_true",
        help="mark what is damaged, so that nobody resumes from it",
    )
    one.add_argument("--json", action="store_true", help="as JSON")


def _add_prune_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--keep-last",
        type=bounded(int, 0),
        default=3,
        help="so many stay (default: %(default)s)",
    )
    one.add_argument(
        "--keep-every",
        type=bounded(int, 0),
        default=0,
        metavar="STEPS",
        help="and the first in every so many steps (default: none)",
    )
    one.add_argument(
        "--keep-best",
        default="",
        metavar="NAME:min|max",
        help="and the best by a metric, for example loss:min (default: none)",
    )
    one.add_argument(
        "--keep-ages",
        type=float,
        nargs="*",
        default=AGES_H,
        metavar="HOURS",
        help="and, for each, one that is at least so many hours old (default: "
        f"{' '.join(f'{h:g}' for h in AGES_H)}; without a number: none)",
    )
    one.add_argument(
        "--stale-h",
        type=bounded(float, 0),
        default=STALE_H,
        help=f"hours after which an unfinished upload is nobody's (default: {STALE_H:g})",
    )
    one.add_argument(
        "--dry-run", action="store_true", help="say what would be deleted, and delete nothing"
    )


def main(
    argv: Sequence[str] | None = None,
    prog: str = "python -m storage",
    tell: FindNotes = lambda store: Notes(),
) -> int:
    """Parse and run one command, and return its exit status. `tell` returns more about the run."""
    whole = parser(prog, all_commands())
    for word in sys.argv[1:] if argv is None else argv:
        if why := why_not_a_word(word):
            whole.error(f"{word!r:.80}: {why}")
    args = whole.parse_args(argv)
    return execute(args.command, args, prog, tell)


def execute(command: str, args: argparse.Namespace, prog: str, tell: FindNotes) -> int:
    """Run a parsed command and return its exit status. `tell` returns more about the run."""
    try:
        store = open_store(args.url)
        return all_commands()[command].run(args, store, Console(), tell)
    except (StoreError, ValueError) as e:
        print(plain(f"{prog} {command}: {e}", keep="\n"), file=sys.stderr)
        return WRONG_INPUT if isinstance(e, ValueError) else FAILED


def _list(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    found = rows(store, tell(store))
    if args.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
        return DONE
    if not found:
        console.print(f"There is no snapshot at {normalize(args.url)}.")
        return DONE
    console.print(table(found, time.time()))
    whole = [row for row in found if row.state == "whole"]
    stored = sum(row.own_nbytes or 0 for row in found)
    newest = f"the newest is of step {whole[0].step}" if whole else "none is whole"
    console.print(f"{len(found)} snapshots, {size(stored)} stored; {newest}.", highlight=False)
    for row in found:
        if row.reason:
            console.print(
                f"step {row.step}, generation {row.epoch}: {row.reason}",
                style="red",
                highlight=False,
                soft_wrap=True,
            )
    return DONE


# ---- verify, show --------------------------------------------------------------------------------
def chosen(store: ObjectStore, step: int | None) -> Ref:
    refs = Snapshots(store).refs()
    found = [ref for ref in refs if step is None or ref.step == step]
    if not found:
        there = (
            f"there are those of steps {', '.join(str(r.step) for r in refs[:20])}"
            if refs
            else "there is none"
        )
        raise StoreError(
            f"{store.url}: no snapshot {'' if step is None else f'of step {step} '}that can be "
            f"used; {there}"
        )
    return found[0]


def _verify(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    snapshots = Snapshots(store)
    committed, doomed = snapshots.manifests()
    marked = snapshots.quarantined()
    refs = sorted(
        (ref for ref in committed - doomed if args.step is None or ref.step == args.step),
        reverse=True,
    )
    if not refs:
        raise StoreError(
            f"{store.url}: there is no snapshot "
            f"{'' if args.step is None else f'of step {args.step} '}that can be verified"
        )
    found: dict[Ref, str] = {}
    host, pauses_s = this_machine(), tuple(args.look_again_s)
    restore = Restore(
        snapshots, host, ReadRetries(lambda: open_store(args.url), time.sleep, pauses_s)
    )
    for ref in refs:
        with progress_bar(console) as bar, reading(snapshots, ref):
            task = bar.add_task(f"step {ref.step}")
            why = ""
            try:
                why = restore.verify(
                    ref,
                    lambda done, total, bar=bar, task=task: bar.update(  # type: ignore[misc]
                        task, completed=done, total=total
                    ),
                )
            except StoreUnavailable:
                if ref in snapshots.manifests()[0]:
                    raise
                continue  # it was pruned meanwhile
        said = why or "whole"
        if ref in marked:
            said = f"quarantined, and found damaged here too: {why}"
            if not why:
                snapshots.pardon(ref)
                said = "whole; it was quarantined, and its mark was taken back"
                tell(store).pardoned(ref, said)
        if ref not in marked or not why:
            found[ref] = why
        if not args.json:
            console.print(
                f"step {ref.step}, generation {ref.epoch}: {said}",
                style="red" if why else "",
                highlight=False,
                soft_wrap=True,
            )
        if (
            why
            and ref not in marked
            and args.quarantine
            and (unfit := restore.blame(ref, {host: why}))
        ):
            raise StoreError(
                f"{store.url}: two snapshots cannot be read whole here, so it may be this machine: "
                f"{unfit[host]}. Nothing is marked; do the same on another machine, whose word "
                "makes it sure"
            )
    if args.json:
        shown = [
            {"step": r.step, "epoch": r.epoch, "whole": not why, "reason": why}
            for r, why in found.items()
        ]
        print(json.dumps(shown, indent=2))
    return FAILED if any(found.values()) else DONE


def _show(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    manifest = Snapshots(store).load(chosen(store, args.step))
    if args.json:
        print(json.dumps(json.loads(manifest.to_json()), indent=2))
        return DONE
    console.print(
        f"step {manifest.step}, generation {manifest.epoch}, {manifest.world} ranks, "
        f"{size(manifest.nbytes)} in {len(manifest.parts)} parts"
    )
    made = Table(
        "tensor", "shape", "dtype", "chunks", "bytes", box=None, pad_edge=False, header_style="bold"
    )
    for name, entry in manifest.tensors.items():
        nbytes = sum(c["end"] - c["start"] for c in entry["chunks"])
        made.add_row(
            name,
            "x".join(map(str, entry["shape"])) or "scalar",
            str(entry["dtype"]),
            str(len(entry["chunks"])),
            size(nbytes),
        )
    console.print(made)
    for key, value in manifest.data.items():
        text = json.dumps(value)
        console.print(
            f"{key}: {text if len(text) <= 200 else text[:200] + ' ...'}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return DONE


# ---- prune ---------------------------------------------------------------------------------------
def _prune(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    keep = Keep(args.keep_last, args.keep_every, args.keep_best, tuple(args.keep_ages))
    keep = replace(keep, ends=tell(store).ends)
    gone, deleted = would_prune(store, keep)
    will = "would delete" if args.dry_run else "deletes"
    committed = Snapshots(store).manifests()[0]
    for ref in gone:
        what = "snapshot" if ref in committed else "parts that were never committed"
        nbytes = sum(n for key, n in deleted.items() if f"/{ref.name}" in key)
        console.print(
            f"{will} step {ref.step}, generation {ref.epoch}: {what}, {size(nbytes)}",
            highlight=False,
        )
    if not args.dry_run:
        Snapshots(store).prune(keep)
        for key in abort_stale_uploads(store, args.stale_h * 3600):
            console.print(
                f"aborted an upload that was never finished: {key}", highlight=False, soft_wrap=True
            )
    total = sum(deleted.values())
    console.print(
        f"{len(gone)} of {len(committed)} {'would go' if args.dry_run else 'are gone'}, "
        f"{size(total)} in {len(deleted)} objects."
    )
    return DONE


def _copy(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    refs = Snapshots(store).refs() if args.step is None else [chosen(store, args.step)]
    if not refs:
        raise StoreError(f"{store.url}: there is no snapshot that can be copied")
    target = open_store(args.target)
    with progress_bar(console) as bar:
        tasks = {ref: bar.add_task(f"step {ref.step}", visible=False) for ref in refs}
        found = copy(
            store,
            target,
            refs,
            extra=tell(store).extra,
            progress=lambda ref, done, total: bar.update(
                tasks[ref], completed=done, total=total, visible=True
            ),
        )
    for one in found:
        more = f" ({size(one.found)} were there)" if one.found and one.state == "copied" else ""
        what = {
            "copied": f"copied, {size(one.nbytes)} sent{more}",
            "there": "was there",
            "pruned": "was pruned meanwhile",
        }[one.state]
        console.print(f"step {one.ref.step}, generation {one.ref.epoch}: {what}", highlight=False)
    return DONE


def all_commands() -> dict[str, Command]:
    """Return every sub-command by name, in the order in which `--help` lists them."""
    return {
        "list": Command("All snapshots: step, age, size, what they are worth.", _add_json, _list),
        "verify": Command(
            "Read and hash every byte. Exit status 1 if something is damaged.",
            _add_verify_options,
            _verify,
        ),
        "show": Command("What is in a snapshot: tensors, parts, data.", _add_show_options, _show),
        "prune": Command(
            "Delete old snapshots, parts that nobody committed, and uploads that nobody finished.",
            _add_prune_options,
            _prune,
        ),
        "export": _extension("storage.export.export_command", extra="export"),
        "copy": Command(
            "Copy committed snapshots to another URL, verified; go on where a broken-off copy "
            "stopped.",
            _add_copy_options,
            _copy,
        ),
    }


def _extension(module: str, extra: str) -> Command:
    """Return the `COMMAND` of a module that may be absent; then one that says what to install."""
    try:
        found: Command = importlib.import_module(module).COMMAND
    except ModuleNotFoundError as e:
        if e.name is None or not module.startswith(e.name):
            raise  # the module is there, and a package that it needs is not
        return _absent(extra)
    return found


def _absent(extra: str) -> Command:
    why = f'this needs "spotharness[{extra}]"'

    def refuse(*_: object) -> int:
        raise ValueError(f"{why}; pip install 'spotharness[{extra}]'")

    def take_any(one: argparse.ArgumentParser) -> None:
        one.add_argument("words", nargs=argparse.REMAINDER)

    return Command(f"Not installed: {why}.", take_any, refuse)
