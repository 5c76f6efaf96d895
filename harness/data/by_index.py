"""StreamingDatasets of others, read by index: whole on every rank, in the order of `run.steps`.

    train = harness.data.ByIndex(streaming.StreamingDataset(local=..., remote=...))

They are streams that share themselves over ranks, by an environment that they read, and their
length is that of a rank's part. By index they give any sample to any rank.
"""

from __future__ import annotations
