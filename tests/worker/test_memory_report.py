"""What holds the memory, by kind and by name: each byte once, and what is shared only once."""

import pytest
import torch
from torch import nn

import harness
from harness.node.forkserver import is_out_of_memory


def test_each_kind_has_its_bytes_and_the_greatest_have_names():
    run = harness.attach()
    model = nn.ModuleDict({"wide": nn.Linear(1000, 1000), "norm": nn.BatchNorm1d(1000)})
    model["tied"] = nn.Linear(1000, 1000)
    model["tied"].weight = model["wide"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    run.prepare(model, optimizer)
    out = model["tied"](model["norm"](model["wide"](torch.ones(4, 1000))))
    out.sum().backward()
    optimizer.step()
    kept = torch.zeros(3_000_000)  # of the script's own
    said = run.out_of_memory()
    # 1,000,000 weights once, two biases, BatchNorm's two; Adam's averages are two of each
    assert "holds weights 4.0 MB, gradients 4.0 MB, optimizer 8.0 MB, buffers 8.0 kB" in said
    assert said.startswith("rank 0 is out of memory in step 1: this process (")
    greatest = said.partition("the greatest tensors: ")[2]
    assert greatest.startswith("a tensor (3000000,) of torch.float32 12.0 MB, ")
    for name in ("wide.weight", "gradient of wide.weight", "exp_avg of wide.weight"):
        assert f"{name} 4.0 MB" in greatest
    assert len(kept) == 3_000_000


def test_what_counts_as_out_of_memory():
    class Ours(torch.OutOfMemoryError):
        pass

    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 60, dtype=torch.uint8)
    for error in (
        found.value,
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        Ours("x"),
        RuntimeError("CUDA error: out of memory"),
    ):
        assert is_out_of_memory(error)
    for error in (ValueError("out of memory"), RuntimeError("Connection reset"), KeyError("x")):
        assert not is_out_of_memory(error)
