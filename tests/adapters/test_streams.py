"""Streams of Hugging Face's datasets, torchdata, WebDataset, MosaicML's streaming and LitData,
shared out and gone on with: what docs/trainers/data.md says of each."""

import io
import tarfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from harness.core.world import BadInput
from harness.loops.shared_batches import SharedLoader
from harness.worker.batches.feed import rehearse
from harness.worker.batches.loader import seed_everything
from storage.tensors import state_tree

datasets = pytest.importorskip("datasets")
wds = pytest.importorskip("webdataset")
nodes = pytest.importorskip("torchdata.nodes")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

N, M = 37, 3
AGAIN = "batches of epoch 0 again"  # what is said of who cannot go on from a state
LEAVES = "leaves something out"


def rows(**more):
    return datasets.Dataset.from_dict({"i": list(range(N))}).to_iterable_dataset(**more)


def doubled(row):
    return {"twice": 2 * row["i"]}


class Split(IterableDataset):
    """A script's own: knows its place, and which process it is in."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        mine, of = (info.id, info.num_workers) if info else (0, 1)
        while self.at < N:
            self.at += 1
            if (self.at - 1) % of == mine:
                yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for i in range(shard * 19, shard * 19 + 19):
                entry, text = tarfile.TarInfo(f"{i:04d}.txt"), str(i).encode()
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
    return [str(folder / f"{shard}.tar") for shard in range(2)]


def node_loader():
    batches = nodes.Batcher(nodes.IterableWrapper(range(N)), batch_size=4, drop_last=False)
    return nodes.Loader(nodes.Mapper(batches, torch.tensor))


def web(shards, **more):
    return wds.WebDataset(shards, shardshuffle=False, **more)


def mosaic(shards, **more):
    streaming = pytest.importorskip("streaming")
    folder = Path(shards[0]).parent / "mds"
    if not folder.exists():
        columns = {"i": "int"}
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=300) as out:
            for i in range(N):
                out.write({"i": i})
    streaming.base.util.clean_stale_shared_memory()  # of the loader before it
    dataset = streaming.StreamingDataset(local=str(folder), batch_size=4, shuffle=True)
    return dataset, streaming.StreamingDataLoader(dataset, batch_size=4, **more)


def lit(shards, **more):
    litdata = pytest.importorskip("litdata")
    folder = Path(shards[0]).parent / "lit"
    if not folder.exists():
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(folder), chunk_size=5)
        for i in range(N):
            writer[i] = {"i": i}
        writer.done()
        writer.merge()
    dataset = litdata.StreamingDataset(str(folder), shuffle=True)
    return dataset, litdata.StreamingDataLoader(dataset, batch_size=4, **more)


Stateful = stateful.StatefulDataLoader
# name -> (shards -> loader, what is said when it is gone on with)
STREAMS = {
    "datasets": (lambda _: DataLoader(rows(num_shards=3), 4), ""),
    # of a table of Arrow, its state counts rows that were not given yet
    "datasets, map": (lambda _: DataLoader(rows(num_shards=3).map(doubled), 4), LEAVES),
    "datasets, shuffle": (
        lambda _: DataLoader(rows(num_shards=3).shuffle(seed=3, buffer_size=8), 4),
        LEAVES,
    ),
    "datasets, processes": (lambda _: DataLoader(rows(num_shards=4), 4, num_workers=2), AGAIN),
    "stateful, datasets": (lambda _: Stateful(rows(num_shards=4), 4), ""),
    "stateful, datasets, processes": (
        lambda _: Stateful(rows(num_shards=4), 4, num_workers=2),
        "",
    ),
    "stateful, own": (lambda _: Stateful(Split(), 4), ""),
    "stateful, own, processes": (lambda _: Stateful(Split(), 4, num_workers=2), ""),
    "nodes": (lambda _: node_loader(), ""),
    "webdataset": (lambda s: DataLoader(web(s).decode(), 4), AGAIN),
    "webdataset, shuffle, seed": (
        lambda s: DataLoader(web(s).compose(wds.detshuffle(10, seed=5)).decode(), 4),
        AGAIN,
    ),
    "webdataset, its loader": (
        lambda s: wds.WebLoader(web(s).decode().batched(4), batch_size=None),
        AGAIN,
    ),
    "mosaic, its loader": (lambda s: mosaic(s)[1], ""),
    "mosaic, its loader, processes": (lambda s: mosaic(s, num_workers=2)[1], ""),
    "mosaic, torch's loader": (lambda s: DataLoader(mosaic(s)[0], 4), AGAIN),
    "litdata, its loader": (lambda s: lit(s)[1], ""),
    "litdata, its loader, processes": (lambda s: lit(s, num_workers=2)[1], ""),
    "litdata, torch's loader": (lambda s: DataLoader(lit(s)[0], 4), AGAIN),
}


def epoch(loader, stop=None):
    found = {}
    for share in loader:
        if share.mine:
            found[share.index] = repr(share.data)
        if share.index + 1 == stop:
            break
    return found


def shared(make, shards, mine=range(M), **more):
    return SharedLoader(make(shards), micro_batches=M, mine=mine, seed=7, **more)


def told():
    lines = []
    return lines, lines.append


@pytest.mark.parametrize(("make", "says"), STREAMS.values(), ids=STREAMS.keys())
def test_streams_are_shared_out_and_gone_on_with_exactly(make, says, shards):
    lines, tell = told()
    seed_everything(1)
    alone = [repr(batch) for batch in make(shards)]
    ranks = []
    for mine in (range(1), range(1, 3)):
        seed_everything(1)
        loader = shared(make, shards, mine, tell=tell)
        ranks.append(epoch(loader))
        assert len(epoch(loader)) == len(ranks[-1])
    together = ranks[0] | ranks[1]
    assert [together[i] for i in sorted(together)] == alone
    for stop in (2, 7):
        lines.clear()
        seed_everything(1)
        loader = shared(make, shards, range(1), tell=tell)
        epoch(loader, stop)
        state = state_tree.join(*state_tree.split(loader.state_dict()))
        seed_everything(9)
        again = shared(make, shards, tell=tell)
        again.load_state_dict(state)
        assert list(epoch(again).values()) == alone[stop:]
        assert len(epoch(again)) == len(alone)  # the next pass is a whole one
    assert says in "\n".join(lines)
    assert says or "again" not in "\n".join(lines)


def test_a_map_style_stateful_loader_is_read_by_its_sampler(shards):
    for workers in (0, 1):

        def make(_, workers=workers):
            return Stateful(list(range(N)), 4, shuffle=True, num_workers=workers)

        seed_everything(1)
        alone = [repr(batch) for batch in make(0)]
        seed_everything(1)
        loader = shared(make, shards)
        assert list(epoch(loader, 5).values()) == alone[:5]
        again = shared(make, shards)
        again.load_state_dict(state_tree.join(*state_tree.split(loader.state_dict())))
        assert list(epoch(again).values()) == alone[5:]


def test_a_shuffle_without_a_seed_is_refused_on_two_ranks_and_told_of_alone(shards):
    def make(shards):
        return DataLoader(web(shards).shuffle(10).decode(), 4)

    lines, tell = told()
    loader = shared(make, shards, tell=tell)
    epoch(loader, 5)
    again = shared(make, shards, tell=tell)
    again.load_state_dict(loader.state_dict())
    assert len(epoch(again)) == len(epoch(again)) - 5
    assert "some are lost and some repeated" in lines[-1]
    said = []  # what rank 0 says of what it has read
    first = shared(make, shards, tell=tell, agree=lambda value: said.append(value) or value)
    epoch(first)
    second = shared(make, shards, tell=tell, agree=lambda value: said.pop(0))
    with pytest.raises(BadInput, match="other samples of the stream than rank 0"):
        epoch(second)


def test_steps_say_at_the_start_what_a_stream_will_lose():
    """`run.steps(dataset)` has the dataset's state alone."""
    assert rehearse(rows(num_shards=3)) == ""
    for stream in (rows().map(doubled), rows().shuffle(seed=3, buffer_size=8)):
        assert "samples are lost or repeated" in rehearse(stream)


def test_datasets_by_name_have_a_fingerprint():
    """... as sentence-transformers' trainers are given them."""
    from harness.worker.batches.loader import fingerprint

    def made(**columns):
        sets = {name: datasets.Dataset.from_dict({"i": rows}) for name, rows in columns.items()}
        return fingerprint(datasets.DatasetDict(sets))

    one = made(pairs=[1, 2], triplets=[3])
    assert one == made(triplets=[3], pairs=[1, 2]) and one.startswith("named:")
    assert one != made(pairs=[1, 2], triplets=[4]) and one != made(pairs=[1, 2], others=[3])
