"""The hardware that a node's workers run on, and the variables that tell each worker its GPU.

Pure. The agent sets the variables; the fork server applies them before a script begins, and
`worker/alone.py` checks what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass

OWN_GPU = "HARNESS_GPU"  # this worker's GPU, as CUDA_VISIBLE_DEVICES names it; "": none
ONE_GPU = "HARNESS_ONE_GPU"  # "1": this process sees its own GPU only, as number 0
GPU_INDEX = "HARNESS_GPU_INDEX"  # number of its own GPU among those that a worker sees
GPUS = "HARNESS_GPUS"  # number of GPUs that the node has; workers on fewer would train elsewhere
# torch then answers is_available() and device_count() without initializing CUDA, which reads
# CUDA_VISIBLE_DEVICES once and does not survive a fork
UNTOUCHED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class NodeHardware:
    """The hardware of a node. `speed`: relative, of one worker; `gpus`: as CUDA_VISIBLE_DEVICES
    names them; `one_each`: each worker sees its own GPU only."""

    accelerator: str = "cpu"
    speed: float = 1.0
    gpus: tuple[str, ...] = ()
    one_each: bool = False

    def environment(self, local_rank: int) -> dict[str, object]:
        """Return the variables that tell a worker its GPU."""
        gpus = self.gpus
        return {
            OWN_GPU: gpus[local_rank % len(gpus)] if gpus else "",
            ONE_GPU: "1" if gpus and self.one_each else "",
            GPUS: len(gpus),
        }
