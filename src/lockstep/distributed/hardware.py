"""This machine's GPUs and processor, as far as a run may use them. Nothing here imports torch at the top.

In: a run. Out: how many GPUs it may use and whether its processes share them; the processor's model, which exact bits
depend on, and the cores that this process may use.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from lockstep.config.run import Run


def gpus_of(run: Run) -> int:
    """CUDA devices of this machine that the run may use; 0 where there is no torch."""
    if run.launch.device == "cpu":
        return 0
    try:
        import torch
    except ImportError:  # a machine that only submits
        return 0
    return torch.cuda.device_count()


def share_gpus(run: Run) -> bool:
    """Whether several of its processes compute on one GPU; on a CPU, `launch.processes_per_gpu` means nothing."""
    several = run.launch.processes_per_gpu > 1 and run.launch.processes != 1
    return several and (run.launch.device == "cuda" or gpus_of(run) > 0)


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line for line in lines if line.startswith(("model name", "Hardware", "cpu model")))
    return next(named, "").partition(":")[2].strip() or platform.processor() or platform.machine()
