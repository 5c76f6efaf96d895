"""Lets torchtitan start on a computer without an accelerator: what it asks of one is stubbed as
soon as it is imported. For tests only."""

import importlib.abc
import os
import sys
import types


class AtImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchtitan":
            sys.meta_path.remove(self)
            stub()


def when_needed():
    sys.meta_path.insert(0, AtImport())


def stub():
    import torch
    import torch._utils
    import torch.nn.attention.flex_attention as flex

    # its kernels want triton; only expert parallelism uses them
    kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = lambda name: None
    sys.modules[kernels.__name__] = kernels
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu = torch.cpu
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 34)
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None
    cpu.memory_stats = lambda device=None: {}
    # FlexAttention has no compiled backward on a CPU
    torch.compile = lambda model=None, **options: model
    flex._validate_device = lambda *tensors: None
    for name in ("normal_", "trunc_normal_"):
        setattr(torch.nn.init, name, drawn_whole(getattr(torch.nn.init, name)))
    if os.environ.get("TITAN_PLAIN"):
        stub_sums()


def drawn_whole(plain):
    """DTensor's own generator, which gives a sharded tensor the same values on any number of
    ranks, is for accelerators only."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    def draw(tensor, *args, **options):
        if not isinstance(tensor, DTensor):
            return plain(tensor, *args, **options)
        whole = plain(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **options)
        shard = distribute_tensor(whole, tensor.device_mesh, tensor.placements).to_local()
        with torch.no_grad():
            tensor.to_local().copy_(shard)
        return tensor

    return draw


def stub_sums():
    """gloo cannot multiply before it adds, which FSDP2 asks of it, and torch 2.13.0 has no
    set_timeout. Our adapter sees to both; plain torchtitan needs this."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    plain = FSDPModule.set_gradient_divide_factor

    def divide(self, factor):
        plain(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide
    dist.set_timeout = lambda timeout, group=None: None
