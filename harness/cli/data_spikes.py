"""`harness data spikes`: from a loss that spikes to the samples of that step, the oddest first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from harness.cli.common import DONE, existing_store
from harness.core.config import flag, positional
from harness.core.world import BadInput
from storage.objects import ObjectStore
from storage.text import Console

if TYPE_CHECKING:
    from harness.core.batch import Batching
    from harness.data.card import Int64Array
    from harness.data.mixture import Mixture
    from harness.data.oddness import Oddities, Oddness
    from harness.data.reading import Records, Tokens

SHOWN_LETTERS = 300  # of a sample


@dataclass(frozen=True)
class SpikesFlags:
    run: str = positional("URL of the run")
    data: tuple[str, ...] = flag(
        (), "URL of the corpus that it reads; of a mixture repeated", metavar="URL"
    )
    step: tuple[int, ...] = flag(
        (), "look at this step, whether it spikes or not; may be repeated", metavar="K", type=int
    )
    score: float = flag(
        6.0, "robust z-score from which on a loss or a gradient norm stands out", at_least=1
    )
    steps: int = flag(3, "how many steps to look into, the worst first", at_least=1)
    samples: int = flag(3, "how many samples of each to print, the oddest first", at_least=1)


def spikes(flags: SpikesFlags) -> int:
    """Find the steps whose loss or gradient spikes, and print their oddest samples."""
    from harness.bucket.archive import read_facts
    from harness.data.mixture import Mixture
    from harness.data.oddness import Oddities
    from harness.views.spikes import Spike
    from harness.views.spikes import spikes as found_in

    if not flags.data:
        raise BadInput("harness data spikes RUN --data URL: wanted the URL of the run's corpus")
    run, console = existing_store(flags.run), Console()
    dataset, batching = read_by(run, flags.data)
    for one in dataset.sources.values() if isinstance(dataset, Mixture) else [dataset]:
        one.exclude(0)  # nothing is left out
    everything = found_in([s.fact for s in read_facts(run)], flags.score)
    by_step = {spike.step: spike for spike in everything}
    steps = list(flags.step) or [spike.step for spike in everything[: flags.steps]]
    if not steps:
        console.print(f"no step stands out by {flags.score:g} usual distances", highlight=False)
        return DONE
    if not flags.step and len(everything) > len(steps):
        others = ", ".join(str(spike.step) for spike in everything[len(steps) :][:20])
        console.print(f"also: steps {others} (--steps, --step)", highlight=False)
    odd = functools.cache(Oddities)  # of a corpus
    for step in steps:
        spike: Spike | None = by_step.get(step)
        said = "does not stand out"
        if spike is not None:
            said = (
                f"{spike.what} {spike.value:.4g}, usual {spike.usual:.4g}, score {spike.score:.1f}"
            )
        console.print(f"step {step}: {said}", style="bold", highlight=False)
        _print_samples(dataset, batching, odd, step, flags, console)
    return DONE


@dataclass(frozen=True)
class StepSample:
    """A sample of a step: `sample` of all data, which is `item` of `dataset`; `source`: its name in
    a mixture."""

    position: int
    micro: int
    sample: int
    source: str
    dataset: Tokens | Records
    item: int


def read_by(
    run: ObjectStore, urls: Sequence[str], source: str = ""
) -> tuple[Tokens | Records | Mixture, Batching]:
    """What the run reads, and in which order. `source`: see `CorpusReader`. Raises BadInput."""
    from harness.bucket.layout import IDENTITY, Identity
    from harness.core.identity import batching_of
    from harness.data.mixture import proved_by

    found = Identity.decode(run.get(IDENTITY))
    dataset = proved_by(found.data, urls, source=source)
    return dataset, batching_of(vars(found) | found.body)  # what it lacks is as by default


def samples_of(
    dataset: Tokens | Records | Mixture, batching: Batching, step: int
) -> list[StepSample]:
    """In the order of positions. Raises BadInput."""
    from harness.core.batch import indices_at, positions_of
    from harness.data.mixture import Mixture

    if step < 1:
        raise BadInput(f"--step {step}: steps are numbered from 1 on")
    at = positions_of(batching, step)
    samples = indices_at(batching, at).tolist()
    dataset.read_ahead(samples)
    out = []
    for position, sample in zip(at.tolist(), samples, strict=True):
        micro = (position % batching.global_batch) // batching.micro_batch
        one, name, item = dataset, "", sample
        if isinstance(dataset, Mixture):
            name, item = dataset.source_of(sample)
            one = dataset.sources[name]
        out.append(StepSample(position, micro, sample, name, cast("Tokens | Records", one), item))
    return out


def _print_samples(
    dataset: Tokens | Records | Mixture,
    batching: Batching,
    odd: Callable[[Tokens | Records], Oddities],
    step: int,
    flags: SpikesFlags,
    console: Console,
) -> None:
    rows = [(odd(one.dataset).of(one.item), one) for one in samples_of(dataset, batching, step)]
    rows.sort(key=lambda row: (-row[0].score, row[1].position))
    for found, one in rows[: flags.samples]:
        where = f"position {one.position}, micro-batch {one.micro}, item {one.item}"
        console.print(f"  {where}: odd by {found.score:.1f}: {found.why}", highlight=False)
        console.print(f"  {_how_to_exclude(one.dataset, found)}", highlight=False, soft_wrap=True)
        console.print(_shown(one.dataset, found, one.item), highlight=False, markup=False)


@functools.cache
def _gone(dataset: Tokens | Records) -> Int64Array:
    """(n, 2): what the corpus' newest list leaves out."""
    from harness.data.excluding import list_of
    from storage.opening import open_store

    return list_of(open_store(dataset.url), dataset.card).ranges(dataset.split)


def _how_to_exclude(dataset: Tokens | Records, found: Oddness) -> str:
    from harness.data.excluding import marked
    from harness.data.reading import Tokens

    split, gone = dataset.split, _gone(dataset)
    of_tokens = isinstance(dataset, Tokens)
    place = (found.start + found.end) // 2
    what = f"tokens {found.start} to {found.end - 1}" if of_tokens else f"record {found.start}"
    if marked(gone, place, place + 1).any():
        return f"{what}: left out by now"
    name = "--token" if of_tokens else "--record"
    more = "" if split == "train" else f" --split {split}"
    return f"{what}: harness data exclude {dataset.url} {name} {place}{more}"


def _shown(dataset: Tokens | Records, found: Oddness, item: int) -> str:
    from harness.data.describing import decoder_of, described
    from harness.data.reading import Tokens

    if not isinstance(dataset, Tokens):
        return described(dataset[item], SHOWN_LETTERS)
    first = item * dataset.length
    ids = dataset[item][0][found.start - first : found.end - first]
    return decoder_of(dataset.card)(ids.tolist())[:SHOWN_LETTERS]
