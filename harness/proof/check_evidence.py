"""What the workers of `harness check` saw, as lines of JSON: written by `check_probe.py`, read for
the rules.

One file for each life of a process: what it began with, then its steps. A process that was killed
leaves what it had written so far.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core import records as rec


@dataclass(frozen=True)
class Leaf:
    """One piece of what a process remembers. `kind`: "tensor", "generator", "number", "float",
    "text" or "series"; `owner`: path of the object that holds it ("": a name by itself); `keeps`:
    that object has state_dict and load_state_dict; `saved`: it lies in what `prepare` was given."""

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
    """What one optimizer was about to use: its norm, and sums of its numbers, which show how far
    two gradients are apart."""

    norm: float
    sketch: tuple[float, ...]


@dataclass(frozen=True)
class ForwardCall:
    """One forward of the training. `rows`: hash of what it was given; `before`: of the generators
    before it; `drew`: they were another thing after it."""

    rows: int
    before: str
    drew: bool


@dataclass(frozen=True)
class StepSeen:
    """One step of one rank, between two boundaries. `rows`: sum of hashes of what the model was
    given, `count` of them; `read`: of what a loop that is not ours said that it read, `reads` of
    them, which counts more: it need not forward each by itself; `losses`: on which backward was
    called, and `backward` where; `norms`: running statistics of normalisation layers, by name;
    `t`: when it ended (s)."""

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
        """A sum of hashes of what was trained on; of all ranks together it is that of one."""
        return self.read if self.reads else self.rows

    @property
    def amount(self) -> int:
        """How many they were."""
        return self.reads or self.count


@dataclass(frozen=True)
class FileWritten:
    """The script opened a file to write. `where`: the script's line."""

    path: str
    where: str


@dataclass(frozen=True)
class Prepared:
    """What `prepare` was given. `where`: the script's line that led there; `driver`: the framework
    that makes the steps, "" the script itself; `draws`: layers that draw random numbers, with their
    types."""

    where: str = ""
    driver: str = ""
    names: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankLife:
    """What one process left. `resumed`: the step at which it began, None: it never did; `begin`:
    its picture there; `data`: fingerprint of its dataset; `unlike`: why samples are others when
    they are read again; `host_nbytes`, `gpu_nbytes`: the most memory that it held."""

    rank: int = 0
    world: int = 1
    epoch: int = 0
    resumed: int | None = None
    begin: Picture = field(default_factory=dict)
    prepared: Prepared | None = None
    data: str = ""
    unlike: str = ""
    host_nbytes: int = 0
    gpu_nbytes: int = 0
    steps: tuple[StepSeen, ...] = ()
    written: tuple[FileWritten, ...] = ()

    def at(self, step: int) -> StepSeen | None:
        """The step of that number."""
        return next((s for s in self.steps if s.number == step), None)

    @property
    def last(self) -> int:
        """The last step that it reached; -1: none, and it did not begin."""
        if self.steps:
            return self.steps[-1].number
        return -1 if self.resumed is None else self.resumed


@dataclass(frozen=True)
class ScriptFailure:
    """A worker's error. `where`: the script's line that led to it, "" unknown."""

    rank: int
    error: str
    text: str
    where: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of a run. `ended`: "finished", "stopped" (by us, after the steps asked for),
    "failed", "late"; `struck`: the kill or the notice took place; `committed`: the newest step;
    `total`: the last step that the script asked for, 0: it did not say; `stands`: the lines at
    which its ranks stood when its time was over; `left`: exit status of the first node, which got
    the notice in the second run."""

    name: str
    ended: str
    struck: bool = False
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
        """The life with that number, of those in which this rank attached."""
        epochs = sorted({each.epoch for each in self.lives})
        if life >= len(epochs):
            return None
        mine = [e for e in self.lives if e.epoch == epochs[life] and e.rank == rank]
        return mine[-1] if mine else None

    def together(self) -> list[RankLife]:
        """All ranks of the epoch in which two workers came furthest; none, if there is none."""
        pairs = [each for each in self.lives if each.world == 2]
        if not pairs:
            return []
        epoch = max(pairs, key=lambda each: (each.last, -each.epoch)).epoch
        return [each for each in pairs if each.epoch == epoch]

    def later(self) -> list[RankLife]:
        """Those that attached after it."""
        epoch = max((each.epoch for each in self.together()), default=0)
        return [each for each in self.lives if each.epoch > epoch]


# ---- lines ---------------------------------------------------------------------------------------
def line_of(what: str, thing: Any) -> bytes:
    """One line, of a dataclass above or a dict."""
    body = dataclasses.asdict(thing) if dataclasses.is_dataclass(thing) else dict(thing)  # type: ignore[arg-type]
    return json.dumps({"what": what, **body}, separators=(",", ":")).encode() + b"\n"


def life_of(lines: Iterable[str]) -> RankLife:
    """What a file says. Its last line may be cut off, if the process was killed."""
    life = RankLife()
    steps: list[StepSeen] = []
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


def lives_in(folder: Path) -> list[RankLife]:
    """Of all processes that wrote there, by epoch and rank."""
    found = [
        life_of(path.read_text(errors="replace").splitlines()) for path in folder.glob("*.jsonl")
    ]
    return sorted(found, key=lambda life: (life.epoch, life.rank))


def _built(kind: type[Any], body: dict[str, Any]) -> Any:
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in body.items()})


def _picture(body: dict[str, Any]) -> dict[str, Leaf]:
    return {path: Leaf(*leaf) for path, leaf in body.items()}


def _step(body: dict[str, Any]) -> StepSeen:
    body["calls"] = [ForwardCall(*call) for call in body["calls"]]
    body["gradients"] = [Gradient(g[0], tuple(g[1])) for g in body["gradients"]]
    body["picture"] = _picture(body["picture"])
    step: StepSeen = _built(StepSeen, body)
    return step


def packed(picture: Picture) -> dict[str, list[Any]]:
    """A picture as JSON has it: short."""
    return {path: list(dataclasses.astuple(leaf)) for path, leaf in picture.items()}
