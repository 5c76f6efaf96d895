"""The sub-command `export` of `python -m storage` and `harness snapshots`: it writes a snapshot's
weights as safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from storage.export.safetensors import (
    FLOATS,
    PREFIX,
    SHARD_NBYTES,
    check_empty,
    export,
    export_adapter,
)
from storage.snapshots.manifest import Manifest
from storage.snapshots.reader_leases import reading
from storage.snapshots.snapshots import Snapshots
from storage.snapshots_command import DONE, Command, FindNotes, add_step, bounded, chosen, size
from storage.stores.objects import ObjectStore
from storage.terminal_text import Console, progress_bar


def _add_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("out", help="a new or empty folder")
    add_step(one)
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
        type=bounded(float, 1e-6),
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


def _run(args: Any, store: ObjectStore, console: Console, tell: FindNotes) -> int:
    snapshots = Snapshots(store)
    manifest: Manifest = snapshots.load(chosen(store, args.step))
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


COMMAND = Command(
    "Write the model's weights as safetensors, the way Hugging Face reads them.",
    _add_options,
    _run,
)
