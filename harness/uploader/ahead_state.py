"""A state that the nodes of a world keep in memory together, ahead of a loss. A rank's share lies
on its own node and on the next one (`node_tiers.py`), and each node has the list of all shares.

It is what a snapshot is, except that no bucket has it. Knows nothing about torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from harness.bucket.layout import Epoch
from harness.core import step_records as rec
from storage.snapshots.manifest import Manifest, PartList, Ref


@dataclass(frozen=True)
class AheadState:
    """See the module. `behind` and `records`: as in `StateOrigin`, the latter encoded; `told`: the
    part lists of all ranks, in rank order, as JSON."""

    run: str
    phase: int
    epoch: int
    step: int
    behind: tuple[str, ...]
    records: str
    told: tuple[str, ...] = field(default=(), repr=False)

    @property
    def ref(self) -> Ref:
        return Ref(epoch=self.epoch, step=self.step)

    @cached_property
    def shares(self) -> list[PartList]:
        """The part lists. Raises SnapshotCorrupt, SnapshotTooNew."""
        return [PartList.from_json(text) for text in self.told]

    def manifest(self) -> Manifest:
        """Return the manifest of all shares. Raises SnapshotCorrupt, SnapshotTooNew."""
        return Manifest.merge(self.shares)

    def steps(self) -> list[rec.StepRecord]:
        """Return the records. Raises BrokenRecords."""
        return rec.decode(self.records.encode(), "the state that nodes keep")

    def head(self) -> AheadState:
        """Return it without the records and part lists, which are large."""
        return replace(self, records="", told=())

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> AheadState:
        """Parse the result of `encode`. Raises ValueError, TypeError, KeyError."""
        body = json.loads(text)
        return cls(**{**body, "behind": tuple(body["behind"]), "told": tuple(body["told"])})


def lost_share(world: Epoch, now: Collection[str]) -> str:
    """Return which share of a state is on none of these members, in words; "": all are there.
    `world`: the generation whose members have kept it."""
    after = [*world.members[1:], *world.members[:1]]
    for name, other in zip(world.members, after, strict=True):
        if name not in now and other not in now:
            return f"{name} and {other}, which had a share of it, are both gone"
    return ""
