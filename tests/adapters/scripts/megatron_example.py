"""examples/megatron_gpt.py on a computer without a GPU: what Megatron asks of CUDA is on the CPU.
TOLD_AFTER: the machine is asked to leave behind so many steps."""

import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import megatron_gpt


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda: None
CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
steps, plain = itertools.count(1), megatron_gpt.train_step


def train_step(*args):
    loss = plain(*args)
    if next(steps) == int(os.environ.get("TOLD_AFTER", 0)) and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    return loss


megatron_gpt.train_step = train_step
with OnCpu():
    megatron_gpt.main()
