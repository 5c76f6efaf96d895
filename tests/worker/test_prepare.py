"""What `attach` and `prepare` take, what they do to the process, and what they refuse by name.
Each case is a script of its own, in one process."""

import collections
import dataclasses
import datetime
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.worker.batches.loader import MicroBatch, map_style, to_device
from support.worlds import train

HEAD = """
import datetime, os, torch, harness
from torch import nn
class Thing:
    def __init__(self, state): self.state = state
    def state_dict(self): return self.state
    def load_state_dict(self, state): self.state = state
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def script(tmp_path, text, world=1, codes=(0,), env=None):
    path = tmp_path / "script.py"
    path.write_text(HEAD + text)
    return train("", world, script=path, codes=codes, env=env).output


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            "state=[1]",
            "prepare(state=...): wanted a dict of names and objects, such as {'ema': ema}, found "
            "list",
        ),
        ("state={'a/b': Thing({})}", "wanted names without '/' and '@r', found 'a/b'"),
        ("state={'a@r1': Thing({})}", "wanted names without '/' and '@r', found 'a@r1'"),
        ("state={'model': Thing({})}", "prepare(state=...): the name 'model' is taken"),
        ("per_rank=['ema']", "prepare(per_rank=['ema']): wanted names of what is in state"),
        ("after_update=['ema']", "prepare(after_update=['ema']): wanted names of what is in state"),
        ("state={'ema': object()}", "prepare(state={'ema': ...}): object has no state_dict"),
        (
            "state={'clock': Thing({'wait': datetime.timedelta(1)})}",
            "prepare(state={'clock': ...}): the state of this Thing cannot be saved: state['wait'] is",
        ),
        (
            "scheduler=Thing({'f': [lambda: 0]})",
            "prepare(scheduler=...): the state of this Thing cannot be saved: state['f/0'] is",
        ),
    ],
)
def test_state_that_cannot_be_kept_is_told_at_once(tmp_path, call, says):
    text = f"run = harness.attach()\nrun.prepare(model, optimizer, {call})\n"
    output = script(tmp_path, text, codes=(1,))
    assert f"BadInput: {says}" in output or (says in output and "BadInput: prepare" in output)


def test_an_optimizer_of_more_than_the_model_is_refused(tmp_path):
    text = """
head = nn.Linear(3, 2)
optimizer.add_param_group({"params": head.parameters()})
harness.attach().prepare(model, optimizer)
"""
    output = script(tmp_path, text, codes=(1,))
    assert (
        "found 2 that are not the model's (the first has shape (2, 3)): nobody would sum" in output
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("timeout_s=0", "attach(timeout_s=0): wanted seconds above 0"),
        ("timeout_s=float('nan')", "attach(timeout_s=nan): wanted seconds above 0"),
        ("replica_ranks=2", "1 ranks make no whole number of replicas of 2 ranks; use 2 ranks"),
        ("replica_ranks=0", "a replica has at least 1 rank, found 0"),
        ("reduce='exakt'", "reduce='exakt' is not known"),
    ],
)
def test_what_attach_cannot_do_is_refused(tmp_path, call, says):
    assert f"BadInput: {says}" in script(tmp_path, f"harness.attach({call})", codes=(1,))


def test_attach_joins_a_process_group_as_it_is_told(tmp_path):
    text = """
import torch.distributed as dist
run = harness.attach(timeout_s=77, backend="cpu:gloo")
groups = [dist.group.WORLD, run._peers.control]
print("timeouts", {g._get_backend(torch.device("cpu")).options._timeout for g in groups})
try:
    harness.attach(timeout_s=5)
except Exception as e:
    print(type(e).__name__, e)
"""
    output = script(tmp_path, text, world=2)
    assert f"timeouts {{{datetime.timedelta(seconds=77)!r}}}" in output
    assert "BadInput attach(backend=..., timeout_s=...): the process group stands already" in output


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("", "False False None"),
        ("reduce='exact'", "False False None"),  # on a CPU
        ("deterministic=True", "True False :4096:8"),
        ("reduce='exact', deterministic=False", "False False None"),
    ],
)
def test_deterministic_kernels_are_asked_for_as_told(tmp_path, call, found):
    text = f"""
harness.attach({call})
print("found", torch.are_deterministic_algorithms_enabled(),
      torch.is_deterministic_algorithms_warn_only_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
"""
    assert f"found {found}" in script(tmp_path, text)


# ---- what the body is given ----------------------------------------------------------------------
class Pinned(torch.Tensor):
    """Stands for a batch in pinned memory: any copy of it would be another object."""

    moved = ()

    def to(self, device, **how):
        self.moved += ((device, how),)
        return self


def test_what_the_loader_pinned_goes_to_the_device_as_it_is():
    """Copied by hand it would be pageable memory, and its transfer would wait."""
    batches = [torch.zeros(1).as_subclass(Pinned) for _ in range(3)]
    device = torch.device("cuda", 0)
    moved = to_device({"a": batches[0], "b": [batches[1], (batches[2],)]}, device)
    given = [moved["a"], moved["b"][0], moved["b"][1][0]]
    assert all(a is b for a, b in zip(given, batches, strict=True))
    assert all(b.moved == ((device, {"non_blocking": True}),) for b in batches)


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    more: Any = "a word"


class Plain:
    def __init__(self, x):
        self.x, self.inner = x, self  # a circle is no harm


class Encoding(collections.UserDict):
    """As tokenizers give it: a mapping that moves itself, and knows nothing of blocking."""

    def to(self, device):
        self.data = {k: v.to(device) for k, v in self.data.items()}


def held(batch):
    """The tensors in it."""
    return {
        Pair: lambda: list(batch),
        Frozen: lambda: [batch.x],
        Plain: lambda: [batch.x],
        types.SimpleNamespace: lambda: [batch.x, batch.list[0]],
    }.get(type(batch), lambda: list(batch.values()))()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Pair(x, x),
        lambda x: Frozen(x),
        lambda x: Frozen(x=x, more=Frozen(x)),
        lambda x: Plain(x),
        lambda x: types.SimpleNamespace(x=x, list=[x], name="b"),
        lambda x: Encoding(a=x),
        lambda x: collections.UserDict(a=x),
        lambda x: collections.OrderedDict(a=x, b=x),
        lambda x: collections.defaultdict(list, a=x),
        lambda x: types.MappingProxyType({"a": x}),
    ],
)
def test_batches_of_any_type_reach_the_device(make):
    batch = make(torch.ones(2))
    kind = dict if isinstance(batch, types.MappingProxyType) else type(batch)
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is kind and all(t.is_meta for t in held(moved))
    if not isinstance(batch, Encoding):  # which moves itself
        assert not any(t.is_meta for t in held(batch))
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 1)])
    assert to_device([packed], torch.device("meta"))[0].data.is_meta
    for other in ("word", 1, None, range(3), {1}, object(), nn.ReLU, held):
        assert to_device(other, torch.device("meta")) is other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_batches_of_a_gpu_are_pinned():
    from harness.core.batch import Batching, plan

    data = torch.utils.data.TensorDataset(torch.randn(64, 8))
    batching = Batching(64, 8, 4, 0)
    first = next(map_style(data, batching, plan(2, 1), 0, 1, 1, None, 0, pin=True))
    assert isinstance(first, MicroBatch) and first.data[0].is_pinned()


def test_a_loader_can_pin_a_micro_batch():
    """torch leaves what it does not know as it is, and says nothing."""

    class Rows(list):
        def pin_memory(self):
            return "pinned"

    at = np.arange(2)
    batch = MicroBatch(at, at, {"x": Rows(), "y": [Rows(), 1]}, at)
    pinned = torch.utils.data._utils.pin_memory.pin_memory(batch)
    assert pinned.data == {"x": "pinned", "y": ["pinned", 1]} and pinned.positions is at
    assert pinned.contents is at and isinstance(pinned, MicroBatch)


def test_a_model_is_moved_and_kept(tmp_path):
    text = """
before = {id(p) for p in model.parameters()}
given = harness.attach().prepare(model, optimizer, state={"thing": Thing({"n": 1})})
print("kept", given is model, {id(p) for p in model.parameters()} == before)
"""
    assert "kept True True" in script(tmp_path, text)
