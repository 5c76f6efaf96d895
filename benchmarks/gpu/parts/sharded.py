"""FSDP2 on a device: a run that is lost and resumed in another process ends as the run that nothing
happened to, to the bit; so does one that goes on as a whole model, or on another number of ranks.

The processes are those of `precision`, with a process group each: `first` and `second` are worlds
of one rank (in miniature one process is both, one session after the other). `two` is a world of two
ranks where there are two GPUs, or where NCCL lets ranks share one, which two pairs of processes
find out. `alone` has no process group of its own.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parts.precision import (
    TOTAL,
    Again,
    Course,
    Way,
    compare,
    ended_well,
    first,
    in_order,
    lacking,
    processes,
    second,
    told,
    watch,
)

MODULE = "benchmarks.gpu.parts.sharded"
FAST = Way("fsdp2", "FSDP2", sharded="fsdp2", fused=False)
EXACT = Way("exact", "FSDP2, reduce='exact'", reduce="exact", sharded="fsdp2", fused=False)
PLAIN = Way("plain", "a whole model, reduce='exact'", reduce="exact", fused=False)
ALONE = replace(FAST, name="alone", says="FSDP2 in a process without torchrun")
WAYS = (  # by value: what comes last is lost first
    FAST,
    EXACT,
    PLAIN,
    Way("offload", "FSDP2 with offload, bf16", "bf16", sharded="offload", fused=False),
    Way("mixed", "FSDP2 in bf16 with dropout", "bf16", 0.1, sharded="fsdp2", fused=False),
    Way("exact32", "FSDP2, reduce='exact32'", reduce="exact32", sharded="fsdp2", fused=False),
)
TWO_EXACT = replace(EXACT, name="two-exact", says="FSDP2 on two ranks, reduce='exact'")
TWO = (TWO_EXACT, replace(FAST, name="two-fast", says="FSDP2 on two ranks"))
# a snapshot, how it goes on, and what that is to end like
MORE = {
    "FSDP2's snapshot goes on as a whole model": (
        Again("exact", replace(PLAIN, name="exact-as-plain")),
        "exact",
    ),
    "a whole model's snapshot goes on as FSDP2": (
        Again("plain", replace(EXACT, name="plain-as-exact")),
        "plain",
    ),
}
FROM_TWO = Again("two-exact", replace(EXACT, name="two-on-one"))  # by `second`
TO_TWO = Again("exact", replace(TWO_EXACT, name="one-on-two"))  # by `two`
SHARED = {"": "0", "with NCCL_MULTI_RANK_GPU_ENABLE=1": "1"}  # ways to ask NCCL, by their name
PROBE_S = 40.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def world(name: str, ranks: int, gpus: int, **more: object) -> dict[str, dict[str, object]]:
    """Return the variables of each rank of a world, by "name rank"."""
    port = free_port()
    return {
        f"{name} {rank}": {
            "RANK": rank,
            "LOCAL_RANK": rank % max(1, gpus),
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **more,
        }
        for rank in range(ranks)
    }


# ---- does NCCL let two ranks share a GPU? --------------------------------------------------------
def probe(course: Course) -> None:
    """Sum over two ranks that share the first GPU, and write the sum, or why there is none."""
    import torch.distributed as dist

    try:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=PROBE_S - 10))
        one = torch.ones(1, device="cuda")
        dist.all_reduce(one)
        torch.cuda.synchronize()
        found: dict[str, Any] = {"sum": float(one)}
    except Exception as e:
        traceback.print_exc()
        lines = [line for line in str(e).splitlines() if line.strip()]
        found = {"error": f"{type(e).__name__}: {lines[-1] if lines else ''}"[:300]}
    # each rank writes: the first may be told less than the second
    name = f"probe-{os.environ['PROBE']}-{os.environ['RANK']}"
    new = course.folder / f".{name}.json"
    new.write_text(json.dumps(found))
    new.replace(course.folder / f"{name}.json")
    sys.stdout.flush()
    os._exit(0)  # a broken group would wait in its destructor


def nccl_shares(course: Course, number: str) -> tuple[bool, str] | None:
    """Return whether the two ranks of a probe had their sum, and what they said; None: not yet."""
    both = [course.read(f"probe-{number}-{rank}") for rank in range(2)]
    if None in both:
        return None
    said = sorted({str(one.get("error") or f"sum {one['sum']:g}") for one in both if one})
    return all(one and one.get("sum") == 2.0 for one in both), "; ".join(said)


# ---- rows ----------------------------------------------------------------------------------------
def alike(bench: Bench, course: Course, what: str, resumed_name: str, whole_name: str) -> None:
    """Write whether a resumed run has loaded the state of another world or sharding, and ends like
    its whole run."""
    resumed, whole = course.read(f"{resumed_name}.resumed"), course.read(f"{whole_name}.whole")
    if lacking(bench, what, resumed, whole):
        return
    assert resumed and whole
    at = resumed["at"]
    then = whole["states"].get(str(at), {})
    wrong = [k for k, v in then.items() if resumed["loaded"].get(k) != v]
    wrong += [f"{k} at the end" for k, v in whole["end"].items() if resumed["end"].get(k) != v]
    note = f"other {', '.join(wrong)}" if wrong else f"from step {at} to {TOTAL}"
    bench.checked(what, bool(then) and not wrong, note)


def same_end(bench: Bench, course: Course, what: str, one: str, other: str) -> None:
    """Write whether two whole runs end alike."""
    ends = [course.read(f"{name}.whole") for name in (one, other)]
    if lacking(bench, what, *ends):
        return
    weights = [found["end"]["weights"] for found in ends if found]
    bench.checked(what, weights[0] == weights[1], weights[0][:12])


def rows_of_two(bench: Bench, course: Course) -> None:
    for way in TWO:
        compare(bench, course, way)
    same_end(
        bench, course, "one and two ranks, reduce='exact': the same weights", "exact", "two-exact"
    )
    alike(bench, course, "two ranks' snapshot goes on with one, to the bit", "two-on-one", "exact")
    alike(bench, course, "one rank's snapshot goes on with two, to the bit", "one-on-two", "exact")


def run(bench: Bench) -> None:
    gpus = 0 if bench.tiny else torch.cuda.device_count()
    pair = bench.tiny or gpus > 1  # a world of two ranks is there; else it depends on NCCL
    asked = {} if pair else SHARED
    roles: dict[str, Mapping[str, object]] = {}
    for name in ("both",) if bench.tiny else ("first", "second"):
        roles |= world(name, 1, gpus, TWO=int(pair))
    if pair:
        roles |= world("two", 2, gpus)
    for number in asked.values():
        roles |= {
            f"{role} probe {number}": {**own, "NCCL_MULTI_RANK_GPU_ENABLE": number}
            for role, own in world("probe", 2, 1, PROBE=number).items()
        }
    if not bench.tiny:
        roles["alone"] = {}
    course, started = processes(MODULE, roles, bench, spare_s=4.0)
    probes_end_s = bench.left_s - PROBE_S
    found: dict[str, tuple[bool, str]] = {}
    left = list(WAYS)

    def heard() -> bool:
        """Hear the probes; return whether all have answered, or had their time."""
        for name, number in asked.items():
            if name not in found and (answer := nccl_shares(course, number)) is not None:
                found[name] = answer
        return len(found) == len(asked) or bench.left_s < probes_end_s

    waits, late = bool(asked), dict[str, subprocess.Popen[bytes]]()
    for _ in watch(course, started):
        while left and course.read(f"{left[0].name}.resumed") is not None:
            compare(bench, course, left.pop(0))
        if waits and heard():
            waits = False
            for role, p in started.items():
                if role.startswith("probe") and p.poll() is None:
                    p.kill()
            shares = tell_nccl(bench, found)
            if shares is not None:
                more = {"NCCL_MULTI_RANK_GPU_ENABLE": SHARED[shares], "NCCL": 1}
                _, late = processes(MODULE, world("two", 2, 1, **more), bench, spare_s=4.0)
                started |= late
                pair = True
    for way in left:
        compare(bench, course, way)
    for what, (again, like) in MORE.items():
        alike(bench, course, f"{what}, to the bit", again.way.name, like)
    same_end(
        bench, course, "FSDP2 and a whole model, reduce='exact': the same weights", "exact", "plain"
    )
    if not bench.tiny:
        compare(bench, course, ALONE)
    if pair:
        rows_of_two(bench, course)
    else:
        bench.missing(
            "FSDP2 on two ranks",
            "one GPU, which NCCL does not let ranks share; gloo has no reduce-scatter for tensors "
            "on GPUs",
        )
    ended_well(bench, {k: p for k, p in started.items() if not k.startswith("probe")})


def tell_nccl(bench: Bench, found: Mapping[str, tuple[bool, str]]) -> str | None:
    """Write what the probes have found. Return the first name in SHARED of a way in which NCCL lets
    two ranks share a GPU; None: in none."""
    shares = next((name for name in SHARED if found.get(name, (False, ""))[0]), None)
    silent = (False, f"no answer in {PROBE_S:.0f} s")
    said = [f"{name or 'as it comes'}: {found.get(name, silent)[1]}" for name in SHARED]
    bench.measured(
        "ranks that NCCL lets share one GPU",
        1 if shares is None else 2,
        "ranks",
        note=f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}; {'; '.join(said)}",
    )
    return shares


def main() -> None:
    role, course = told(sys.argv[1:])
    # NCCL for ranks that share a GPU: the product's own choice is gloo
    backend = "cpu:gloo,cuda:nccl" if os.environ.get("NCCL") else None
    two = [replace(way, backend=backend) for way in TWO]
    resumes = [again for again, _ in MORE.values()]
    of_two = [FROM_TWO] if os.environ.get("TWO") == "1" else []

    def train() -> None:
        first(course, WAYS, [*resumes, TO_TWO])

    def resume() -> None:
        second(course, [*in_order(WAYS, resumes), *of_two])

    def both() -> None:
        train()
        resume()

    def alone() -> None:
        first(course, [ALONE], [])
        second(course, [Again(ALONE.name, ALONE)])

    def of_two_ranks() -> None:
        first(course, two, [FROM_TWO])
        second(course, [*in_order(two, []), TO_TWO])

    do: dict[str, Callable[[], None]] = {
        "probe": functools.partial(probe, course),
        "first": train,
        "second": resume,
        "both": both,
        "alone": alone,
        "two": of_two_ranks,
    }
    do[role]()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
