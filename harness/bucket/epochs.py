"""Members and epochs in the bucket: every process reads them; the agent's rendezvous writes
them. What they consist of, and their keys, are in `layout.py`."""

from __future__ import annotations

from typing import TypeVar

from harness.bucket.layout import EPOCHS as EPOCHS
from harness.bucket.layout import MEMBERS as MEMBERS
from harness.bucket.layout import NO_EPOCH as NO_EPOCH
from harness.bucket.layout import Epoch as Epoch
from harness.bucket.layout import Member as Member
from harness.bucket.layout import epoch_key as epoch_key
from harness.bucket.layout import epoch_of
from harness.core.values import BadObject, NewerProtocol
from storage.errors import NotFound
from storage.objects import ObjectStore

T = TypeVar("T", Member, Epoch)


def decode(kind: type[T], data: bytes) -> T:
    """A member or an epoch as it lies in the bucket, or comes over a line. Raises BadObject,
    NewerProtocol."""
    return kind.decode(data)


def encode_epoch(epoch: Epoch) -> bytes:
    """As it lies in the bucket."""
    return epoch.encode()


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
