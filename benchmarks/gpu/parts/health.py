"""What the harness reads of a GPU's health, through the library of the driver."""

from __future__ import annotations

import time

from benchmarks.gpu.bench import Bench
from harness.agent import gpu_health
from harness.cli.node import node_gpus
from harness.core.hardware import peak_flops


def run(bench: Bench) -> None:
    import os

    import torch

    if bench.tiny:
        path = bench.folder / "nvml"
        path.write_text('{"gpus": 1}\n{"gpu": 0, "percent": 50, "watts": 100}\n')
        nvml = gpu_health.FakeNvml(path)
    else:
        import pynvml as nvml  # type: ignore[no-redef]
    reader = gpu_health.NvmlReader(nvml)
    bench.checked("a GPU has a name", bool(reader.names) and reader.names[0].startswith("GPU-"))
    findings = list(reader.look())
    bench.checked("a healthy GPU has no findings", not findings, str(findings)[:200])
    events = list(reader.wait(100))
    bench.checked("and no events", not events, str(events)[:200])
    found = reader.measure()
    wanted = {f"gpu0/{k}" for k in ("percent", "memory_percent", "celsius", "watts")}
    bench.checked("all four readings are there", wanted <= found.keys(), str(found)[:200])
    for what, do in (("look", lambda: list(reader.look())), ("measure", reader.measure)):
        t0, n = time.perf_counter(), 20
        for _ in range(n):
            do()
        bench.measured(f"NVML: a {what}", (time.perf_counter() - t0) / n * 1e3, "ms")
    # the agent's own way: a process that looks, and tells
    heard: list[object] = []
    seen: list[object] = []
    what = str(bench.folder / "nvml") if bench.tiny else "auto"
    monitor = gpu_health.start(what, heard.append, on_measured=seen.append)
    ends_s = time.monotonic() + 10
    while not seen and time.monotonic() < ends_s:
        time.sleep(0.05)
    monitor.stop()
    bench.checked("the monitor's process reads them too", bool(seen), str(seen[:1])[:200])
    bench.checked("and has nothing to tell", not heard, str(heard[:1])[:200])
    if bench.tiny:
        bench.missing("GPUs that a node's agent finds", "no GPU")
        return
    gpus = node_gpus(os.environ)
    bench.checked(
        "an agent finds as many GPUs as torch",
        len(gpus) == torch.cuda.device_count(),
        f"{gpus}, torch {torch.cuda.device_count()}",
    )
    name = torch.cuda.get_device_name(0)
    bench.measured(f"peak of {name}, bfloat16", peak_flops(name, "bfloat16") / 1e12, "TFLOP/s")
