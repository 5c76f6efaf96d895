"""Every table of a hostile day, whole (`make audit` prints them)."""

from __future__ import annotations

import pytest

from support import hostile_day

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("name", hostile_day.TABLES)
def test_all_of_it_is_handled(name: str) -> None:
    cases = hostile_day.TABLES[name]()
    assert cases
    assert [f"{one.name}: {why}" for one in cases if (why := one.run())] == []
