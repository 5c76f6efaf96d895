"""What a result depends on besides the run: library versions, accelerator, CPU."""

from __future__ import annotations

import platform

import torch


def environment(device: torch.device) -> dict[str, str]:
    """What the bits of a forward and backward depend on, beside the program."""
    if device.type == "cuda":
        name, threads = torch.cuda.get_device_name(device), "any"
    else:
        name, threads = (
            f"{platform.machine()} {_cpu()} {torch.backends.cpu.get_cpu_capability()}",
            str(torch.get_num_threads()),
        )
    return {"torch": str(torch.__version__), "device": name, "threads": threads}


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(
                (line.partition(":")[2].strip() for line in f if line.startswith("model name")), ""
            )
    except OSError:  # not Linux
        return platform.processor()


def differences(wanted: dict[str, str], found: dict[str, str]) -> str:
    return "; ".join(
        f"{name} was {wanted[name]!r}, here it is {found.get(name)!r}"
        for name in wanted
        if wanted[name] != found.get(name)
    )
