"""`harness.Values`: what a script counts for itself is saved and resumed."""

import pytest

import harness
from harness.core.world import BadInput
from storage.tensors import state_tree


def test_values_are_attributes_that_are_saved_and_resumed():
    values = harness.Values(best=0.0, seen=0, names=["a"], place=None)
    values.best, values.seen = 0.5, 3
    tensors, plain = state_tree.split(values.state_dict())
    assert not tensors and plain == {"best": 0.5, "seen": 3, "names": ["a"], "place": None}
    again = harness.Values(best=0.0, seen=0, names=[], place=None, new=7)
    again.load_state_dict(plain)
    assert (again.best, again.seen, again.names, again.new) == (0.5, 3, ["a"], 7)


def test_a_value_that_the_script_no_longer_names_is_named():
    with pytest.raises(BadInput, match=r"the snapshot has best.*add best="):
        harness.Values(seen=0).load_state_dict({"best": 1.0, "seen": 2})
    with pytest.raises(AttributeError, match="these values are seen; found 'best'"):
        _ = harness.Values(seen=0).best
