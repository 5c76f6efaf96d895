"""What a GPU can do at most, and in which precision a model really computes."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.core.hardware import peak_flops
from harness.core.world import BadInput
from harness.worker.gradients.sharding import groups_of, needs
from harness.worker.step_timing import Precision


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989), ("NVIDIA H100 80GB HBM3", "tf32", 494.5), ("NVIDIA H100 80GB HBM3", "float32", 67),
        ("NVIDIA H100 PCIe", "float16", 756), ("NVIDIA H100 NVL", "bfloat16", 835), ("NVIDIA GH200 480GB", "bfloat16", 989),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5), ("NVIDIA A10G", "bfloat16", 70), ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA L4", "bfloat16", 121), ("NVIDIA L40S", "bfloat16", 362), ("NVIDIA H20", "bfloat16", 148), ("NVIDIA H200", "bfloat16", 989),
        ("Tesla V100-SXM2-16GB", "float16", 125), ("Tesla V100-SXM2-16GB", "bfloat16", None), ("Tesla T4", "tf32", None),
        ("NVIDIA RTX A6000", "bfloat16", 154.85), ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", "tf32", 182.1),
        ("NVIDIA RTX A4000", "bfloat16", None), ("NVIDIA H100 80GB HBM3", "float64", None), ("NVIDIA H100 80GB HBM3", "none", None),
        ("AMD Instinct MI300X", "bfloat16", 1307), ("cpu", "float32", None),
        ("V100-32GB", "", 125), ("A100-80GB", "", 312), ("RTX6000-Ada", "", 364.2), ("RTX4090", "", 165.2), ("K80", "", None),
    ],
)  # fmt: skip
def test_peaks(device: str, precision: str, tflops: float | None) -> None:
    assert peak_flops(device, precision) == (
        None if tflops is None else pytest.approx(tflops * 1e12)
    )


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(1000, 16), nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
    )


TOKENS = torch.arange(8)


def test_what_autocast_makes_of_float32_parameters() -> None:
    made = model()
    seen = Precision(made)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made(TOKENS)
    assert seen.name == "bfloat16"


def test_parameters_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        made = model().to(dtype)
        seen = Precision(made)
        made(TOKENS)
        assert seen.name == str(dtype).removeprefix("torch.")
        assert not any(m._forward_hooks for m in made.modules())  # it watches no longer


def test_float32_products_may_be_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        made = model()
        seen = Precision(made)
        made(TOKENS)
        assert seen.name == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


def test_most_of_the_work_counts() -> None:
    """A head in float32 behind layers in bfloat16."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.body(x)
            return self.head(x.float())

    made = Mixed()
    seen = Precision(made)
    made(torch.randn(2, 64))
    assert seen.name == "bfloat16"


def test_nothing_seen() -> None:
    assert Precision(nn.ReLU()).name == "none"


# ---- other versions of torch ---------------------------------------------------------------------
def test_an_fsdp2_with_other_names_is_told() -> None:
    group = SimpleNamespace(fsdp_params=[], _reduce_scatter_process_group=None, post_backward=None)
    # up to 2.11
    old = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=group))
    new = SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_groups=[group]))
    assert groups_of(old) == groups_of(new) == [group]
    assert (
        groups_of(SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(_fsdp_param_group=None)))
        == []
    )
    for other in (SimpleNamespace(), SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace())):
        with pytest.raises(
            BadInput,
            match=rf"a sharded model.*torch {re.escape(torch.__version__)} has none. Use torch 2.13",
        ):
            groups_of(other)
    with pytest.raises(BadInput, match="wants an FSDP2 with set_gradient_divide_factor;"):
        needs(
            type("FSDPModule", (), {"set_x": None}),
            "harness.fsdp2",
            "set_x",
            "set_gradient_divide_factor",
        )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.relu(self.into(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["blocks", "whole", "wrapped"])
def test_a_compiled_model_is_compiled_once(how: str) -> None:
    """What observes its precision is not compiled with it, so nothing is compiled anew, at the
    limit of which torch goes on without compiling."""
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    def count(observed: bool) -> tuple[int, str]:
        torch._dynamo.reset()
        graphs.clear()
        made: nn.Module = Blocks()
        if how == "blocks":
            for block in made.blocks:  # type: ignore[union-attr]
                block.compile(backend=backend)
        elif how == "whole":
            made.compile(backend=backend)
        else:
            made = torch.compile(made, backend=backend)  # type: ignore[assignment]
        seen, name = Precision(made) if observed else None, ""
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                made(torch.randn(2, 16)).float().sum().backward()
            name = name or (seen.name if seen else "")
        return len(graphs), name

    plain, _ = count(False)
    assert plain > 0 and count(True) == (plain, "bfloat16")
