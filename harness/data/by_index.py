"""StreamingDatasets of others, read by index: whole on every rank, in the order of `run.steps`.

    train = harness.data.ByIndex(streaming.StreamingDataset(local=..., remote=...))

They are streams that share themselves over ranks, by an environment that they read, and their
length is that of a rank's part. By index they give any sample to any rank.
"""

from __future__ import annotations

from typing import Any

from harness.core.world import BadInput


class ByIndex:
    """A map-style dataset of all samples of `dataset`: a StreamingDataset of MosaicML's streaming
    or of LitData. Each process gets its own connections and files as theirs does. Raises
    BadInput."""

    def __init__(self, dataset: Any):
        env = getattr(dataset, "distributed_env", None)
        if env is not None and hasattr(dataset, "set_num_workers"):  # LitData's
            dataset.distributed_env = type(env)(1, 0, 1)
            self._samples = len(dataset)
        elif hasattr(dataset, "epoch_size") and hasattr(dataset, "size"):  # MosaicML's
            self._samples = int(dataset.size)
        else:
            raise BadInput(
                f"ByIndex({type(dataset).__name__}): wanted a StreamingDataset of MosaicML's "
                "streaming or of LitData, found another; run.steps takes any other dataset with "
                "__getitem__ and __len__ as it is"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self._samples:
            raise IndexError(f"item {i} of {self._samples}")
        return self.dataset[i]
