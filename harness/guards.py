"""Guards: what stops a training run that has gone wrong, before its state is committed. Runs in the worker."""

from __future__ import annotations

import math

from harness.world import HarnessError


class NonFiniteLoss(HarnessError):
    """The loss or the gradient norm is NaN or infinite; the last committed snapshot is from before."""


def check_finite(step: int, loss: float, grad_norm: float | None) -> None:
    """Raises NonFiniteLoss. A GradScaler's skipped steps pass grad_norm=None: an overflow there is no fault."""
    for what, value in (("loss", loss), ("gradient norm", grad_norm)):
        if value is not None and not math.isfinite(value):
            raise NonFiniteLoss(
                f"step {step}: the {what} is {value}, wanted a finite number. Nothing of this step is committed; the run stays at "
                f"its last snapshot. Look at the learning rate, the precision and the samples of this step."
            )


PEAK_TFLOPS = {  # dense bf16 (fp16 for V100/T4), per device, by a part of its name; vendors' data sheets, sparsity excluded
    "B300": 2250, "B200": 2250, "GB200": 2500, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "GH200": 989, "H20": 148,
    "A100": 312, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "V100": 125, "T4": 65, "MI300X": 1307, "MI355X": 2500,
}  # fmt: skip


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of one device, or None if unknown. The longest matching name wins (A10G is not A10)."""
    names = sorted((n for n in PEAK_TFLOPS if n.lower() in device_name.lower()), key=len)
    return PEAK_TFLOPS[names[-1]] * 1e12 if names else None
