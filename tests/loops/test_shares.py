"""A script's own DataLoader, shared out: the batches that it would have given alone, in its order,
on any number of ranks, and behind any interruption."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from harness.core.world import BadInput
from harness.loops.shared_batches import PLACEHOLDER, SharedLoader
from harness.worker.batches import rng_state
from harness.worker.batches.loader import seed_everything
from storage.tensors import state_tree

N, M = 23, 4


class Numbers(Dataset):
    def __init__(self, n=N):
        self.n, self.reads = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.reads.append(i)
        return torch.tensor(i)


class Noisy(Numbers):
    """Augmented with all three generators."""

    def __getitem__(self, i):
        noise = [random.random(), np.random.random(), float(torch.rand(()))]
        return torch.tensor([float(i), *noise], dtype=torch.float64)


class Many(Numbers):
    """Read several at a time, as Hugging Face's are."""

    def __getitems__(self, keys):
        return [torch.tensor(k + 100) for k in keys]


class Shuffled(Sampler):
    """Of a script: draws from Python's global generator, and again in the middle of the epoch."""

    def __iter__(self):
        first = list(range(N // 2))
        random.shuffle(first)
        yield from first
        second = list(range(N // 2, N))
        random.shuffle(second)
        yield from second

    def __len__(self):
        return N


class ByEpoch(Sampler):
    """As accelerate's: seeded by its epoch, which it counts on when it was exhausted."""

    epoch = 0

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from np.random.default_rng(self.epoch).permutation(N).tolist()
        self.set_epoch(self.epoch + 1)

    def __len__(self):
        return N


class Unseeded(Shuffled):
    def __iter__(self):
        yield from np.random.default_rng().permutation(N).tolist()


class Drawing(Shuffled):
    """With a generator of its own, which goes on from epoch to epoch."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __iter__(self):
        return iter(self.rng.permutation(N).tolist())


def generator():
    return torch.Generator().manual_seed(5)


def with_one_generator():
    g = generator()
    return DataLoader(Numbers(), 3, sampler=RandomSampler(Numbers(), generator=g), generator=g)


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), 3),
    "shuffled": lambda: DataLoader(Numbers(), 3, shuffle=True),
    "drop_last": lambda: DataLoader(Numbers(), 3, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(Numbers(), 3, shuffle=True, generator=generator()),
    "one generator": with_one_generator,
    "weighted": lambda: DataLoader(
        Numbers(), 2, sampler=WeightedRandomSampler(torch.arange(1.0, N + 1), 11)
    ),
    "replacement": lambda: DataLoader(
        Numbers(), 3, sampler=RandomSampler(Numbers(), replacement=True, num_samples=70)
    ),
    "subset": lambda: DataLoader(Numbers(), 2, sampler=SubsetRandomSampler(range(5, 20))),
    "global generator": lambda: DataLoader(Numbers(), 3, sampler=Shuffled()),
    "own generator": lambda: DataLoader(Numbers(), 3, sampler=Drawing()),
    "by epoch": lambda: DataLoader(Numbers(), 3, sampler=ByEpoch()),
    "distributed of one": lambda: DataLoader(
        Numbers(), 3, sampler=DistributedSampler(Numbers(), num_replicas=1, rank=0)
    ),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 5, drop_last=True)
    ),
    "list of batches": lambda: DataLoader(Numbers(), batch_sampler=[[1, 2], [3], [4, 5, 6]]),
    "no batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "batches by the dataset": lambda: DataLoader(
        torch.arange(N),
        batch_size=None,
        sampler=BatchSampler(SequentialSampler(range(N)), 4, False),
    ),
    "collate": lambda: DataLoader(Numbers(), 3, collate_fn=lambda items: {"sum": sum(items)}),
    "many at a time": lambda: DataLoader(Many(), 3, shuffle=True),
    "processes": lambda: DataLoader(Numbers(), 3, shuffle=True, num_workers=1),
}


def text(data):
    return repr(data)


def told():
    lines = []
    return lines, lines.append


def shared(make, mine=range(M), **more):
    return SharedLoader(make(), micro_batches=M, mine=mine, seed=7, **more)


def epochs_alone(make, epochs, stop=None):
    seed_everything(1)
    loader = make()
    return [[text(b) for b in itertools.islice(loader, stop)] for _ in range(epochs)]


def epochs_of(loader, epochs, stop=None):
    """By epoch: {batch: its data} of what is not a placeholder."""
    found = []
    for _ in range(epochs):
        mine = {}
        for share in loader:
            assert share.mine == (share.data is not PLACEHOLDER)
            if share.mine:
                mine[share.index] = text(share.data)
            if share.index + 1 == stop:
                break
        found.append(mine)
    return found


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_ranks_together_read_what_the_loader_alone_would(make):
    # of a sampler that draws as it goes, only the first epoch has no draws of others before it
    wanted = epochs_alone(make, 1 if make is LOADERS["global generator"] else 3)
    ranks = []
    for mine in (range(0, 1), range(1, 4)):
        seed_everything(1)
        ranks.append(epochs_of(shared(make, mine), 3))
    for epoch, batches in enumerate(wanted):
        together = ranks[0][epoch] | ranks[1][epoch]
        assert [together[i] for i in sorted(together)] == batches
        assert not ranks[0][epoch].keys() & ranks[1][epoch].keys()


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_an_epoch_goes_on_where_it_was_on_another_world(make):
    seed_everything(1)
    wanted = epochs_of(shared(make), 3)
    for epoch, batch in ((0, 2), (1, 3), (1, 0), (0, 10**9)):
        seed_everything(1)
        loader = shared(make, range(2))
        for upto in [10**9] * epoch + [batch]:
            for share in loader if upto else ():
                assert share.index < upto
                if share.index + 1 == upto:
                    break
        tensors, plain = state_tree.split(loader.state_dict())
        seed_everything(99)
        again = shared(make)
        again.load_state_dict(state_tree.join(tensors, plain))
        after = random.getstate()
        first = {} if batch == 10**9 else epochs_of(again, 1)[0]
        assert random.getstate() == after or not batch
        if batch and first:
            assert first == {i: b for i, b in wanted[epoch].items() if i >= batch}
            assert loader.epoch == again.epoch == epoch


@pytest.mark.parametrize(
    "name", ["own generator", "by epoch", "one generator", "distributed of one"]
)
def test_epochs_behind_one_that_was_gone_on_with(name):
    """Their order does not hang on the global generators, so it must be that of the run alone."""
    make = LOADERS[name]
    wanted = epochs_alone(make, 4)
    seed_everything(1)
    loader = shared(make)
    epochs_of(loader, 1)
    for share in loader:
        if share.index == 3:
            break
    for at in ((1, 4), (1, 8), (2, 0)):
        again = shared(make, range(4))
        again.load_state_dict(loader.state_dict())
        again.resume_at(*at)
        found = [list(epoch.values()) for epoch in epochs_of(again, 2)]
        if name in ("one generator", "by epoch") and at == (2, 0):  # they would have gone further
            continue
        epoch = at[0]
        assert found == [wanted[epoch][at[1] :], wanted[epoch + 1]]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_epochs_that_are_left_early_are_those_of_the_loader_alone(make):
    if make().num_workers:
        pytest.skip("how far its processes read ahead decides alone")
    wanted = epochs_alone(make, 3, stop=3)
    seed_everything(1)
    found = epochs_of(shared(make, range(2)), 3, stop=3)
    for epoch, batches in zip(found, wanted, strict=True):
        assert [batches[i] for i in epoch] == list(epoch.values())


def test_set_epoch_after_an_epoch_that_was_left():
    make = LOADERS["by epoch"]
    loader = shared(make)
    epochs_of(loader, 1, stop=2)
    loader.set_epoch(5)
    alone = make()
    alone.sampler.set_epoch(5)
    assert list(epochs_of(loader, 1)[0].values()) == [text(b) for b in alone]


def test_only_own_batches_are_read_and_passed_ones_are_not():
    loader = shared(lambda: DataLoader(Numbers(), 2), range(1, 2))
    keys = {s.index: s.keys.tolist() for s in loader}
    assert loader.dataset.reads == [2, 3, 10, 11, 18, 19]
    assert [k for some in keys.values() for k in some] == list(range(N))
    again = shared(lambda: DataLoader(Numbers(), 2), range(1, 2))
    again.resume_at(0, 6)
    assert [s.index for s in again] == list(range(6, 12)) and again.dataset.reads == [18, 19]
    assert len(again) == 12 and again.batch_size == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_is_the_same_on_any_world_and_costs_the_trainer_no_number(workers):
    def make():
        return DataLoader(
            Noisy(), 3, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )

    seed_everything(1)
    wanted = epochs_of(shared(make), 2)
    assert wanted[0] != wanted[1]
    seed_everything(1)
    loader, found = shared(make, range(2, 4)), []
    for epoch in range(2):
        random.seed(epoch), np.random.seed(epoch), torch.manual_seed(1 if epoch == 0 else 2)
    seed_everything(1)
    iterator = iter(loader)
    found.append(next(iterator))
    before = rng_state.generators_state()
    found += iterator
    assert all(rng_state.equal_entries(value, before[key]) for key, value in rng_state.generators_state().items())
    for share in found:
        assert not share.mine or text(share.data) == wanted[0][share.index]


def test_a_worker_sees_the_scripts_dataset():
    def begin(_):
        torch.utils.data.get_worker_info().dataset.n = -1

    class Asked(Numbers):
        def __getitem__(self, i):
            return self.n

    loader = shared(lambda: DataLoader(Asked(), 3, num_workers=1, worker_init_fn=begin))
    assert {int(x) for s in loader for x in s.data} == {-1}


def test_keys_that_are_no_numbers_are_known_by_what_was_read():
    class Table(Dataset):
        def __getitem__(self, key):
            return float(key[1])

    batches = [[("a", 1), ("b", 2)], [("c", 3)]]
    shares = list(shared(lambda: DataLoader(Table(), batch_sampler=batches)))
    assert [s.keys.tolist() for s in shares] == [[0, 1], [2]]
    assert len({int(c) for s in shares for c in s.contents}) == 3


def test_steps_across_epochs():
    loader = shared(lambda: DataLoader(Numbers(5), 1), range(1), across_epochs=True)
    assert [[s.micro for s in loader] for _ in range(2)] == [[0, 1, 2, 3, 0], [1, 2, 3, 0, 1]]
    state = loader.state_dict()
    again = shared(lambda: DataLoader(Numbers(5), 1), range(1), across_epochs=True)
    again.load_state_dict(state)
    assert [s.micro for s in again] == [2, 3, 0, 1, 2]


def test_ranks_take_the_order_of_the_first():
    seed_everything(1)
    first = epochs_of(shared(LOADERS["global generator"]), 1)
    seed_everything(1)
    state = shared(LOADERS["global generator"])._state_now()
    seed_everything(2)
    other = shared(LOADERS["global generator"], agree=lambda value: state)
    assert epochs_of(other, 1) == first


def test_what_cannot_be_shared_or_gone_on_with_is_said():
    sampler = DistributedSampler(Numbers(), num_replicas=2, rank=0)
    with pytest.raises(BadInput, match="one of 2 ranks"):
        shared(lambda: DataLoader(Numbers(), 3, sampler=sampler))
    with pytest.raises(BadInput, match="shares within"):
        shared(LOADERS["in order"], range(3, 6))
    lines, tell = told()
    loader = shared(lambda: DataLoader(Numbers(), 3, sampler=Unseeded()), tell=tell)
    epochs_of(loader, 1, stop=4)
    assert len(lines) == 1 and "Unseeded gave another order" in lines[0]
    again = shared(lambda: DataLoader(Numbers(), 3, sampler=Unseeded()), tell=tell)
    again.load_state_dict(loader.state_dict())
    assert len(epochs_of(again, 1)[0]) == 4 and len(lines) == 2
    again.load_state_dict(loader.state_dict())
    with pytest.raises(BadInput, match="only that epoch"):
        again.resume_at(3, 1)


# ---- streams -------------------------------------------------------------------------------------
class Stream(IterableDataset):
    """Draws from Python's generator as it goes."""

    def __iter__(self):
        numbers = list(range(N))
        random.shuffle(numbers)
        for i in numbers:
            yield torch.tensor([i, random.randrange(100)])


class Stateful(IterableDataset):
    """Knows its place."""

    def __init__(self):
        self.at, self.read = 0, 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < N:
            self.at, self.read = self.at + 1, self.read + 1
            yield torch.tensor(self.at - 1)
        self.at = 0


class Buffered(Stateful):
    """Shuffles in a buffer that its state leaves out."""

    def __iter__(self):
        rng, buffer = random.Random(4), []
        for item in super().__iter__():
            buffer.append(item)
            if len(buffer) == 6:
                yield buffer.pop(rng.randrange(6))
        yield from buffer


class Counted(Stateful):
    """Wants to be told where it is, as MosaicML's."""

    def state_dict(self, samples, from_beginning):
        raise AssertionError("nobody knows here")


class Whole:
    """No DataLoader, as timm's or NVIDIA's."""

    def __init__(self):
        self.dataset, self.batch_size = None, 3

    def __iter__(self):
        return iter([torch.arange(i, i + 3) for i in range(0, N, 3)])


STREAMS = {
    "no state": lambda: DataLoader(Stream(), 3),
    "state": lambda: DataLoader(Stateful(), 3),
    "no batches": lambda: DataLoader(Stateful(), batch_size=None),
    "processes": lambda: DataLoader(Stream(), 3, num_workers=2),
    "a state with arguments": lambda: DataLoader(Counted(), 3),
    "another loader": Whole,
}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())
def test_streams_are_shared_out_and_gone_on_with(make):
    _, tell = told()
    seed_everything(1)
    alone = [text(b) for b in make()]
    ranks = []
    for mine in (range(3), range(3, 4)):
        seed_everything(1)
        ranks.append(epochs_of(shared(make, mine, tell=tell), 2))
    together = ranks[0][0] | ranks[1][0]
    assert [together[i] for i in sorted(together)] == alone
    for stop in (1, 3, 4, 7):
        seed_everything(1)
        loader = shared(make, range(2), tell=tell)
        epochs_of(loader, 1, stop=stop)
        again = shared(make, tell=tell)
        again.load_state_dict(state_tree.join(*state_tree.split(loader.state_dict())))
        seed_everything(2)
        assert list(epochs_of(again, 1)[0].values()) == alone[stop:]
        assert len(epochs_of(again, 1)[0]) == len(alone)  # the next pass is a whole one


def test_a_state_that_says_all_saves_reading():
    lines, tell = told()
    loader = shared(STREAMS["state"], tell=tell)
    positions = [s.keys.tolist() for s in itertools.islice(loader, 9)]
    assert [k for some in positions for k in some] == list(range(N)) and not lines
    again = shared(STREAMS["state"], tell=tell)
    again.load_state_dict(loader.state_dict())
    again.resume_at(0, 7)  # a trainer that fetches one ahead
    assert [s.keys.tolist() for s in again] == [[21, 22]] and not lines
    assert again.dataset.read == N - 4 * 3  # from the last step's beginning on
    assert next(iter(again)).keys.tolist()[0] == N


@pytest.mark.parametrize("lossy", [False, True])
def test_a_state_that_leaves_something_out_is_found_out(lossy):
    lines, tell = told()

    def make():
        return DataLoader(Buffered(), 1)

    wanted = [text(batch) for batch in make()]
    loader = shared(make, tell=tell)
    epochs_of(loader, 1, stop=10)
    again = shared(make, tell=tell, lossy_streams=lossy)
    again.load_state_dict(loader.state_dict())
    found = list(epochs_of(again, 1)[0].values())
    if lossy:
        assert len(found) > 5 and len(lines) == 1 and "a shuffle buffer's content" in lines[0]
    else:
        assert found == wanted[10:] and len(lines) == 2
        assert "leaves something out" in lines[0] and "10 batches of epoch 0 again" in lines[1]
    assert list(epochs_of(again, 1)[0].values()) == wanted  # the next pass is a whole one


def test_ranks_that_read_different_streams_are_stopped():
    class Own(IterableDataset):
        def __iter__(self):
            return iter(np.random.default_rng().permutation(N))

    _, tell = told()
    loader = shared(
        lambda: DataLoader(Own(), 1),
        tell=tell,
        agree=lambda value: 0 if isinstance(value, int) else value,
    )
    with pytest.raises(BadInput, match=r"up to batch 3 .* fixed seed"):
        list(loader)
