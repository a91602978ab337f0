"""The processor of this machine: its model, which exact bits depend on, and the cores that this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
