"""A store in memory whose line brings half of each object for a while."""

from __future__ import annotations

from storage.stores.folder_store import MemoryStore
from storage.stores.objects import all_of


class HalfAtFirst(MemoryStore):
    """Half of an object comes the first time that it is read while `broken`; of `most` objects."""

    def __init__(self, name: str, broken: bool = True, most: int = 1000) -> None:
        super().__init__(f"memory://{name}", {})
        self.broken, self.most, self.read = broken, most, set[str]()

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        first = self.broken and key not in self.read and len(self.read) < self.most
        if self.broken:
            self.read.add(key)
        return all_of(f"{self.url}/{key}", data[: len(data) // 2], len(data)) if first else data
