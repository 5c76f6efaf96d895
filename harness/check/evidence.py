"""The evidence of `harness check`: what its workers saw, as lines of JSON. `probe_hooks.py` writes
it, and the rules read it.

There is one file for each life of a process: its beginning, then its steps. A killed process leaves
what it had written so far.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core import step_records as rec


@dataclass(frozen=True)
class Leaf:
    """One piece of a process's state. `kind`: "tensor", "generator", "number", "float", "text" or
    "series"; `owner`: path of the object that holds it ("" for a plain variable); `keeps`: that
    object has state_dict and load_state_dict; `saved`: it lies in what `prepare` was given."""

    kind: str
    digest: str
    shown: str
    owner: str = ""
    owner_type: str = ""
    keeps: bool = False
    saved: bool = False


Picture = Mapping[str, Leaf]


@dataclass(frozen=True)
class Gradient:
    """A gradient that an optimizer was about to use: its norm, and sums of its numbers, which show
    how far two gradients are apart."""

    norm: float
    sketch: tuple[float, ...]


@dataclass(frozen=True)
class ForwardCall:
    """One forward pass in training. `rows`: hash of its input; `before`: hash of the generators
    before it; `drew`: the generators had changed after it."""

    rows: int
    before: str
    drew: bool


@dataclass(frozen=True)
class ObservedStep:
    """One step of one rank, between two boundaries. `rows`: sum of hashes of the model's input
    rows, `count` of them; `read`: sum of hashes of the samples that a foreign loop reported
    reading, `reads` of them, which takes precedence, since it need not forward each separately;
    `losses`: those on which backward was called, and `backward` where; `norms`: running statistics
    of normalisation layers, by name; `t`: when it ended (s)."""

    number: int
    rows: int = 0
    count: int = 0
    read: int = 0
    reads: int = 0
    calls: tuple[ForwardCall, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    losses: tuple[float, ...] = ()
    backward: str = ""
    norms: Mapping[str, float] = field(default_factory=dict)
    t: float = 0.0
    picture: Picture = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Sum of hashes of what was trained on; the sum over all ranks equals that of one
        worker."""
        return self.read if self.reads else self.rows

    @property
    def amount(self) -> int:
        """Number of the samples or rows in `samples`."""
        return self.reads or self.count


@dataclass(frozen=True)
class FileWritten:
    """A file that the script opened for writing. `where`: the script's line."""

    path: str
    where: str


@dataclass(frozen=True)
class Prepared:
    """The arguments of `prepare`. `where`: the script's line that called it; `driver`: the
    framework that makes the steps, "" means the script itself; `draws`: layers that draw random
    numbers, with their types; `weights`: hash of the model as it was made, "" if unknown."""

    where: str = ""
    driver: str = ""
    names: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    weights: str = ""


@dataclass(frozen=True)
class RankLife:
    """The evidence of one process. `epoch`: its generation; `resumed`: the step at which it began
    (None means that it never did); `begin`: its picture there; `data`: fingerprint of its dataset;
    `unlike`: why samples differ when they are read again; `pass_steps`: steps of a pass over the
    data, 0: unknown; `host_nbytes`, `gpu_nbytes`: the most memory that it held."""

    rank: int = 0
    world: int = 1
    epoch: int = 0
    resumed: int | None = None
    begin: Picture = field(default_factory=dict)
    prepared: Prepared | None = None
    data: str = ""
    unlike: str = ""
    pass_steps: int = 0
    host_nbytes: int = 0
    gpu_nbytes: int = 0
    steps: tuple[ObservedStep, ...] = ()
    written: tuple[FileWritten, ...] = ()

    def at(self, step: int) -> ObservedStep | None:
        """Return the step of that number; None if it was not made."""
        return next((s for s in self.steps if s.number == step), None)

    @property
    def last(self) -> int:
        """The last step that it reached; -1 if it did not begin."""
        if self.steps:
            return self.steps[-1].number
        return -1 if self.resumed is None else self.resumed


@dataclass(frozen=True)
class ScriptFailure:
    """A worker's error. `where`: the script's line that led to it, "" if unknown; `ours`: it was
    raised by the check's own observers."""

    rank: int
    error: str
    text: str
    where: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `ended`: "finished", "stopped" (by us, after the requested steps),
    "failed", "late"; `struck`: the kill or the notice took place; `struck_again`: so did the second
    kill, after the first epoch's end; `needs_s`: an estimate of what that would have taken, in
    seconds, if it was too much for the check (0: it was not); `committed`: the newest step;
    `total`: the last step that the script requested (0 means unknown); `stands`: the lines at which
    its ranks were when time ran out; `left`: exit status of the first node, which got the notice in
    the second run."""

    name: str
    ended: str
    struck: bool = False
    struck_again: bool = False
    needs_s: float = 0.0
    lives: tuple[RankLife, ...] = ()
    records: tuple[rec.StepRecord, ...] = ()
    committed: int = -1
    total: int = 0
    failures: tuple[ScriptFailure, ...] = ()
    warnings: tuple[str, ...] = ()
    stands: tuple[str, ...] = ()
    left: int | None = None
    seconds: float = 0.0
    tail: str = ""

    def of_rank(self, rank: int, life: int = 0) -> RankLife | None:
        """Return this rank's life in the generation at position `life` (0, 1, ...); None if it has
        none."""
        epochs = sorted({each.epoch for each in self.lives})
        if life >= len(epochs):
            return None
        mine = [e for e in self.lives if e.epoch == epochs[life] and e.rank == rank]
        return mine[-1] if mine else None

    def together(self) -> list[RankLife]:
        """Return all ranks of the generation in which two workers came furthest; [] if there is
        none."""
        pairs = [each for each in self.lives if each.world == 2]
        if not pairs:
            return []
        epoch = max(pairs, key=lambda each: (each.last, -each.epoch)).epoch
        return [each for each in pairs if each.epoch == epoch]

    def later(self) -> list[RankLife]:
        """Return the lives that attached after the generation of `together`."""
        epoch = max((each.epoch for each in self.together()), default=0)
        return [each for each in self.lives if each.epoch > epoch]


# ---- lines ---------------------------------------------------------------------------------------
def line_of(what: str, thing: Any) -> bytes:
    """Return one line of evidence, from a dataclass above or a dict."""
    body = dataclasses.asdict(thing) if dataclasses.is_dataclass(thing) else dict(thing)  # type: ignore[arg-type]
    return json.dumps({"what": what, **body}, separators=(",", ":")).encode() + b"\n"


def life_of(lines: Iterable[str]) -> RankLife:
    """Return the life in a file. Its last line may be cut off, if the process was killed."""
    life = RankLife()
    steps: list[ObservedStep] = []
    written: dict[str, FileWritten] = {}
    for line in lines:
        try:
            body = json.loads(line)
        except ValueError:
            continue
        match body.pop("what"):
            case "life" | "memory":
                life = dataclasses.replace(life, **body)
            case "prepared":
                life = dataclasses.replace(life, prepared=_built(Prepared, body))
            case "begin":
                picture = _picture(body["picture"])
                life = dataclasses.replace(life, resumed=body["step"], begin=picture)
            case "step":
                steps.append(_step(body))
            case "wrote":
                written.setdefault(body["path"], FileWritten(**body))
            case what:
                raise ValueError(f"wanted a line of harness check, found {what!r}")
    return dataclasses.replace(life, steps=tuple(steps), written=tuple(written.values()))


def lives_in(folder: Path, copy_ranks: int) -> list[RankLife]:
    """Return the lives of all processes that wrote to the folder, by generation and rank. Where
    several ranks hold one copy of the model, the first of each stands for it, and copies are
    counted as ranks are otherwise."""
    found = [
        life_of(path.read_text(errors="replace").splitlines()) for path in folder.glob("*.jsonl")
    ]
    first = [
        dataclasses.replace(
            life, rank=life.rank // copy_ranks, world=max(1, life.world // copy_ranks)
        )
        for life in found
        if life.rank % copy_ranks == 0
    ]
    return sorted(first, key=lambda life: (life.epoch, life.rank))


def _built(kind: type[Any], body: dict[str, Any]) -> Any:
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in body.items()})


def _picture(body: dict[str, Any]) -> dict[str, Leaf]:
    return {path: Leaf(*leaf) for path, leaf in body.items()}


def _step(body: dict[str, Any]) -> ObservedStep:
    body["calls"] = [ForwardCall(*call) for call in body["calls"]]
    body["gradients"] = [Gradient(g[0], tuple(g[1])) for g in body["gradients"]]
    body["picture"] = _picture(body["picture"])
    step: ObservedStep = _built(ObservedStep, body)
    return step


def packed(picture: Picture) -> dict[str, list[Any]]:
    """Return a picture in the compact form of its line of JSON."""
    return {path: list(dataclasses.astuple(leaf)) for path, leaf in picture.items()}
