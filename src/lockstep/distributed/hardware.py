"""The GPUs, processor and cores of this machine that a run may use. Does not import torch at the top.

In: the section `launch` of a run. Out: how many GPUs it may use and whether its processes share them; the processor's
model, which exact results depend on, and the cores that this process may use.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from lockstep.config.sections import LaunchSection


def gpus_of(launch: LaunchSection) -> int:
    """Return the number of CUDA devices of this machine that the run may use; 0 without torch."""
    if launch.device == "cpu":
        return 0
    try:
        import torch
    except ImportError:  # a machine that only submits jobs
        return 0
    return torch.cuda.device_count()


def share_gpus(launch: LaunchSection) -> bool:
    """Whether several processes of the run share a GPU; `launch.processes_per_gpu` has no effect on a CPU."""
    several = launch.processes_per_gpu > 1 and launch.processes != 1
    return several and (launch.device == "cuda" or gpus_of(launch) > 0)


def available_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line for line in lines if line.startswith(("model name", "Hardware", "cpu model")))
    return next(named, "").partition(":")[2].strip() or platform.processor() or platform.machine()
