"""Members and epochs in the bucket: every process reads them; the agent's rendezvous writes
them. What they consist of, and their keys, are in `layout.py`."""

from __future__ import annotations

from harness.bucket.layout import EPOCHS, NO_EPOCH, Epoch, epoch_key, epoch_of
from harness.core.values import BadObject, NewerProtocol
from storage.errors import NotFound
from storage.objects import ObjectStore


def read_epoch(store: ObjectStore, epoch: int) -> Epoch:
    """Raises NotFound; BadObject for an object that is no epoch of this number; NewerProtocol."""
    found = Epoch.decode(store.get(epoch_key(epoch)))
    if found.epoch != epoch:
        raise BadObject(f"wanted epoch {epoch}, found {found.epoch}")
    return found


def epoch_numbers(store: ObjectStore) -> list[int]:
    """Numbers that are taken, ascending; by what does not matter."""
    return sorted(number for key in store.list(EPOCHS) if (number := epoch_of(key)))


def newest_epoch(store: ObjectStore) -> Epoch:
    """The newest that can be read; what is damaged is passed over. Raises NewerProtocol."""
    for number in reversed(epoch_numbers(store)):
        try:
            return read_epoch(store, number)
        except NewerProtocol:
            raise
        except (NotFound, BadObject):
            continue
    return NO_EPOCH
