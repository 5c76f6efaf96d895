"""Test support for stores and their users: fakes, damage, and the contract of every store.

    from storage.testing import StoreContract

    class TestMine(StoreContract):
        @pytest.fixture
        def opener(self, tmp_path):
            return lambda tail: MyStore(f"mine://{tmp_path}{tail}")

The contract needs pytest (`pip install spotharness[testing]`); the fakes do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from storage.stores.folder_store import MemoryStore
from storage.testing.faulty_store import Crash, FaultyStore, corrupt

if TYPE_CHECKING:
    from storage.testing.store_contract import StoreContract

__all__ = ["Crash", "FaultyStore", "MemoryStore", "StoreContract", "corrupt"]
_CONTRACT = "storage.testing.store_contract"


def __getattr__(name: str) -> Any:
    if name != "StoreContract":
        raise AttributeError(f"module 'storage.testing' has no attribute {name!r}")
    try:
        import pytest
    except ImportError as e:
        raise ImportError(
            f"the contract of storage.testing needs pytest ({e}): pip install spotharness[testing]",
            name="pytest",
        ) from e
    pytest.register_assert_rewrite(_CONTRACT)  # so that failures show the compared values
    return importlib.import_module(_CONTRACT).StoreContract


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
