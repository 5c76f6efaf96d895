"""For tests of stores and of what uses them: fakes, damage, and the contract of every store.

    from storage.testing import StoreContract

    class TestMine(StoreContract):
        @pytest.fixture
        def opener(self, tmp_path):
            return lambda tail: MyStore(f"mine://{tmp_path}{tail}")

Needs pytest: `pip install spotharness[testing]`.
"""

from __future__ import annotations

import sys

try:
    import pytest
except ImportError as e:
    raise ImportError(
        f"storage.testing needs pytest ({e}): pip install spotharness[testing]; the fakes alone "
        "are in storage.faults and storage.files",
        name="pytest",
    ) from e

from storage.faults import Crash, FaultyStore, corrupt
from storage.files import MemoryStore

if "storage.store_contract" not in sys.modules:
    pytest.register_assert_rewrite("storage.store_contract")  # failures show what was compared

from storage.store_contract import StoreContract

__all__ = ["Crash", "FaultyStore", "MemoryStore", "StoreContract", "corrupt"]
