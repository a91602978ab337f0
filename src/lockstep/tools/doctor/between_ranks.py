"""What lies between ranks: the speed of an all-reduce, the skew of clocks, and what is not the same everywhere.

In: a `World` whose ranks have joined. Out: facts, the same on every rank. Every function is collective. What differs is
named with its ranks and hosts; some of it would break the promise of `strategy.exact` (see README, "The promise").
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.distributed.hardware import available_cores, processor
from lockstep.distributed.world import World
from lockstep.tools.doctor import machine

# What has to be the same on every rank for the same bits, and why a person should care.
EXACT = {
    "lockstep-train": "another version may compute in another order",
    "torch": "another version may compute in another order",
    "transformers": "another version may build another model",
    "tokenizers": "another version may cut texts otherwise",
    "device": "devices of different kinds give different bits",
    "processor": "processors of different models may give different bits",
    "instructions": "other instructions add in another order",
    "cores": "launch.threads: auto depends on them; set launch.threads",
    "OMP_NUM_THREADS": "the number of threads changes bits",
    "driver": "another version of CUDA may compute in another order",
}
_SMALL, _LARGE = 1, 4 * 2**20  # float32 numbers in an all-reduce: of latency, of bandwidth (16 MiB)


def probe(world: World, folder: Path, seconds: float = 3.0) -> dict[str, Any]:
    """All facts between ranks. Collective. Takes about `seconds` for each speed of an all-reduce, at most."""
    everyone = world.all_gather(of_rank(world))
    found: dict[str, Any] = {
        "size": world.size,
        "hosts": _groups([rank["host"] for rank in everyone]),
        "devices": _groups([rank["device"] for rank in everyone]),
        "differs": differences(everyone),
    }
    if world.size > 1:
        latency, took = all_reduce(world, _SMALL, seconds), all_reduce(world, _LARGE, seconds)
        moved = _LARGE * 4 * 2 * (world.size - 1) / world.size  # bytes a rank sends in a ring, as nccl-tests count
        found["all_reduce"] = {
            "backend": "nccl" if world.device.type == "cuda" else "gloo",
            "latency_us": round(latency * 1e6, 1),
            "bytes": _LARGE * 4,
            "ms": round(took * 1e3, 2),
            "bus_mb_s": round(moved / took / 1e6),
        }
    speeds = world.all_gather(_gflops(world.device))
    middle = statistics.median(speeds)
    found["compute"] = {"median_gflops": round(middle), "lowest_gflops": round(min(speeds))}
    found["compute"]["slow_ranks"] = [rank for rank, speed in enumerate(speeds) if speed < 0.7 * middle]
    skews = clock_skew(world)
    found["clock_skew_ms"] = {"largest": round(max(map(abs, skews)) * 1e3, 3), "rank": _largest(skews)}
    found["folder"] = folders(world, folder)
    return found


def of_rank(world: World) -> dict[str, Any]:
    """What this rank is, and what has to be equal. Not collective."""
    cuda = world.device.type == "cuda"
    found: dict[str, Any] = {
        "host": world.host,
        "device": torch.cuda.get_device_name(world.device) if cuda else "CPU",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": None if cuda else available_cores(),
        "OMP_NUM_THREADS": None if cuda else os.environ.get("OMP_NUM_THREADS"),
        "processor": None if cuda else processor(),
        "instructions": None if cuda else torch.backends.cpu.get_cpu_capability(),
        "driver": torch.version.cuda if cuda else None,
    }
    return found | {name: machine.version(name) for name in machine.PACKAGES}


def differences(everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is not the same on all ranks: its name, which ranks of which hosts have which value, and, where it would
    break exactness, why."""
    found = []
    for name in everyone[0]:
        values = [rank[name] for rank in everyone]
        if name == "host" or all(value == values[0] for value in values):
            continue
        sides = []
        for value in dict.fromkeys(map(str, values)):
            ranks = [rank for rank, other in enumerate(values) if str(other) == value]
            sides.append({"value": value, "ranks": ranks, "hosts": sorted({everyone[rank]["host"] for rank in ranks})})
        found.append({"what": name, "sides": sides, "breaks": EXACT.get(name)})
    return found


def all_reduce(world: World, numbers: int, seconds: float) -> float:
    """Median seconds of an all-reduce of so many float32 numbers, of the slowest rank. Collective; two ranks at
    least."""
    tensor = torch.zeros(numbers, device=world.device)
    rounds, times = 5, []
    for part in range(2):  # a few rounds say how many fit into the time
        for _ in range(rounds):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if tensor.device.type == "cuda":
                torch.cuda.synchronize(tensor.device)
            times.append(time.perf_counter() - start)
        if part == 0:
            slowest = max(world.all_gather(statistics.median(times)))
            rounds, times = max(3, min(200, int(seconds / slowest))), []
    return float(max(world.all_gather(statistics.median(times))))


def clock_skew(world: World, rounds: int = 9) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's: the best of some exchanges, as NTP does it, good to half
    of the fastest. Collective."""
    skews = [0.0] * world.size
    box = torch.zeros(1, dtype=torch.float64)  # on the CPU: gloo carries it, whatever carries gradients
    for rank in range(1, world.size):
        best = float("inf")
        for _ in range(rounds):
            if world.rank == rank:
                dist.recv(box, src=0)
                box[0] = time.time()
                dist.send(box, dst=0)
            elif world.is_main:
                asked = time.time()
                dist.send(box, dst=rank)
                dist.recv(box, src=rank)
                back = time.time()
                if back - asked < best:
                    best, skews[rank] = back - asked, float(box) - (asked + back) / 2
    found: list[float] = world.broadcast(skews)
    return found


def folders(world: World, folder: Path) -> dict[str, Any]:
    """Speed of the folder on each host, measured at the same time by one rank of each; and whether all see the same
    one. Collective."""
    token = world.broadcast(f"{os.getpid()}-{time.time_ns()}")
    marker = folder / f".lockstep-doctor-{token}"

    def make() -> machine.Facts:
        marker.touch()
        return {}

    def remove() -> machine.Facts:
        marker.unlink(missing_ok=True)
        return {}

    if world.is_main:
        machine.bounded(make, 5)
    world.barrier()
    seen = world.all_gather(bool(machine.bounded(lambda: {"there": marker.exists()}, 5).get("there")))
    mine = machine.bounded(lambda: machine.file_system(folder), 15) if world.local_rank == 0 else None
    every = world.all_gather((world.host, mine))
    if world.is_main:
        machine.bounded(remove, 5)
    return {"shared_by_all": all(seen), "of_host": {host: facts for host, facts in every if facts is not None}}


def _gflops(device: torch.device) -> float:
    """How fast this rank multiplies float32 matrices while the others do the same."""
    a, best = torch.ones(512, 512, device=device), 0.0
    for _ in range(5):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # the host waits here
        best = max(best, 2 * 512**3 / (time.perf_counter() - start) / 1e9)
    return best


def _groups(values: list[str]) -> dict[str, int]:
    return {value: values.count(value) for value in dict.fromkeys(values)}


def _largest(skews: list[float]) -> int:
    return max(range(len(skews)), key=lambda rank: abs(skews[rank]))
