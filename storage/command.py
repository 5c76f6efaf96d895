"""Snapshots at the command line: `python -m storage list|verify|show|prune|export|copy URL`, and
`harness snapshots ...`.

Knows nothing of harness; whoever has more to tell of a snapshot (how old, how long it took) gives
`Notes`. Exit status: 0 done, 1 it failed or something is damaged, 2 the input was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from storage.errors import StoreError, StoreUnavailable
from storage.export import FLOATS, PREFIX, SHARD_NBYTES, check_empty, export, export_adapter
from storage.leases import reading
from storage.listing import FindNotes, Notes, rows, size, table
from storage.manifest import Manifest, Ref
from storage.objects import ObjectStore, abort_stale_uploads
from storage.opening import normalize, open_store
from storage.restore import PAUSES_S, Looks, Restore, this_machine
from storage.retention import AGES_H, Keep
from storage.snapshots import Snapshots
from storage.text import Console, plain, progress_bar, why_not_a_word
from storage.transfer import copy, would_prune

DONE, FAILED, WRONG_INPUT = 0, 1, 2
MOST_PAUSE_S = 600.0
STALE_H = 24.0  # an upload that began so long ago is nobody's any more


def parser(prog: str) -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog=prog, description="Snapshots in a bucket.")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help)
        one.add_argument("url", help="URL of the run")
        return one

    one = command("list", "All snapshots: step, age, size, what they are worth.")
    one.add_argument("--json", action="store_true", help="as JSON")
    _add_verify_options(
        command("verify", "Read and hash every byte. Exit status 1 if something is damaged.")
    )
    one = command("show", "What is in a snapshot: tensors, parts, data.")
    _add_step(one)
    one.add_argument("--json", action="store_true", help="as JSON")
    _add_prune_options(
        command(
            "prune",
            "Delete old snapshots, parts that nobody committed, and uploads that nobody finished.",
        )
    )
    _add_export_options(
        command(
            "export", "Write the model's weights as safetensors, the way Hugging Face reads them."
        )
    )
    one = command(
        "copy",
        "Copy committed snapshots to another URL, verified; go on where a broken-off copy stopped.",
    )
    one.add_argument("target", help="URL to copy to")
    one.add_argument(
        "--step",
        type=_bounded(int, 0),
        help="only the snapshot of this step (default: all, newest first)",
    )
    return root


def _bounded(
    kind: type[int] | type[float], low: float, high: float = 1e15
) -> Callable[[str], float]:
    """A number as argparse takes it: finite, in [low, high]."""

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


def _add_step(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--step", type=_bounded(int, 0), help="the snapshot of this step (default: the newest)"
    )


def _add_verify_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--step", type=_bounded(int, 0), help="only the snapshot of this step (default: all)"
    )
    one.add_argument(
        "--look-again-s",
        type=_bounded(float, 0, MOST_PAUSE_S),
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
        type=_bounded(int, 0),
        default=3,
        help="so many stay (default: %(default)s)",
    )
    one.add_argument(
        "--keep-every",
        type=_bounded(int, 0),
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
        type=_bounded(float, 0),
        default=STALE_H,
        help=f"hours after which an unfinished upload is nobody's (default: {STALE_H:g})",
    )
    one.add_argument(
        "--dry-run", action="store_true", help="say what would be deleted, and delete nothing"
    )


def _add_export_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("out", help="a new or empty folder")
    _add_step(one)
    one.add_argument(
        "--dtype",
        choices=sorted(FLOATS),
        default="",
        help="of floating-point tensors (default: as saved)",
    )
    one.add_argument(
        "--prefix",
        default=PREFIX,
        help=f"which tensors; it is taken off their names (default: {PREFIX})",
    )
    one.add_argument(
        "--shard-gb",
        type=_bounded(float, 1e-6),
        default=SHARD_NBYTES / 1e9,
        help=f"largest file, in GB (default: {SHARD_NBYTES / 1e9:g})",
    )
    one.add_argument(
        "--keep-tied", action="store_true", help="store tied weights as often as they have names"
    )
    one.add_argument(
        "--adapter",
        nargs="?",
        const="default",
        metavar="NAME",
        help="this adapter alone, as PEFT reads it (without a name: default)",
    )
    one.add_argument("--config", default="", help="a config.json to put beside them")


def main(
    argv: Sequence[str] | None = None,
    prog: str = "python -m storage",
    tell: FindNotes = lambda store: Notes(),
) -> int:
    """Run one command; its exit status. `tell` knows more about the run."""
    whole = parser(prog)
    for word in sys.argv[1:] if argv is None else argv:
        if why := why_not_a_word(word):
            whole.error(f"{word!r:.80}: {why}")
    args = whole.parse_args(argv)
    console = Console()
    try:
        store = open_store(args.url)
        return int(COMMANDS[args.command](args, store, console, tell))
    except (StoreError, ValueError) as e:
        print(plain(f"{prog} {args.command}: {e}", keep="\n"), file=sys.stderr)
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
                f"step {row.step}, epoch {row.epoch}: {row.reason}",
                style="red",
                highlight=False,
                soft_wrap=True,
            )
    return DONE


# ---- verify, show --------------------------------------------------------------------------------
def _chosen(store: ObjectStore, step: int | None) -> Ref:
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
    restore = Restore(snapshots, host, Looks(lambda: open_store(args.url), time.sleep, pauses_s))
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
                continue  # pruned
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
                f"step {ref.step}, epoch {ref.epoch}: {said}",
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
        print(
            json.dumps(
                [
                    {"step": r.step, "epoch": r.epoch, "whole": not why, "reason": why}
                    for r, why in found.items()
                ],
                indent=2,
            )
        )
    return FAILED if any(found.values()) else DONE


def _show(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    manifest = Snapshots(store).load(_chosen(store, args.step))
    if args.json:
        print(json.dumps(json.loads(manifest.to_json()), indent=2))
        return DONE
    console.print(
        f"step {manifest.step}, epoch {manifest.epoch}, {manifest.world} ranks, "
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
    gone, deleted = would_prune(store, keep)
    will = "would delete" if args.dry_run else "deletes"
    committed = Snapshots(store).manifests()[0]
    for ref in gone:
        what = "snapshot" if ref in committed else "parts that were never committed"
        nbytes = sum(n for key, n in deleted.items() if f"/{ref.name}" in key)
        console.print(
            f"{will} step {ref.step}, epoch {ref.epoch}: {what}, {size(nbytes)}", highlight=False
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


# ---- export, copy --------------------------------------------------------------------------------
def _export(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    snapshots = Snapshots(store)
    manifest: Manifest = snapshots.load(_chosen(store, args.step))
    config = Path(args.config) if args.config else None
    if config is not None and not config.is_file():
        raise ValueError(f"--config {config}: there is no such file")
    check_empty(Path(args.out))
    with progress_bar(console) as bar, reading(snapshots, manifest.ref):
        task = bar.add_task(f"step {manifest.step}")

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        made = (
            export_adapter(snapshots, manifest, Path(args.out), args.adapter, progress)
            if args.adapter
            else export(
                snapshots,
                manifest,
                Path(args.out),
                dtype=args.dtype,
                prefix=args.prefix,
                shard_nbytes=int(args.shard_gb * 1e9),
                keep_tied=args.keep_tied,
                config=config,
                progress=progress,
            )
        )
    console.print(
        f"step {manifest.step}: {made.tensors} tensors, {size(made.nbytes)} in {len(made.files)} "
        f"files in {args.out}",
        highlight=False,
    )
    for name, first in made.tied.items():
        console.print(
            f"{name} is tied to {first} and stored once (--keep-tied: twice)", highlight=False
        )
    tell(store).exported(manifest.ref, made, args.dtype or "")
    return DONE


def _copy(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    refs = Snapshots(store).refs() if args.step is None else [_chosen(store, args.step)]
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
        console.print(f"step {one.ref.step}, epoch {one.ref.epoch}: {what}", highlight=False)
    return DONE


COMMANDS: dict[str, Callable[[Any, ObjectStore, Console, FindNotes], int]] = {
    "list": _list,
    "verify": _verify,
    "show": _show,
    "prune": _prune,
    "export": _export,
    "copy": _copy,
}
