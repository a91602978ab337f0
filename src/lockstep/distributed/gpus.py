"""The GPUs that a run may use on this machine, and whether its processes share them.

In: a run. Out: a count; yes or no.
"""

from __future__ import annotations

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
    return run.launch.processes_per_gpu > 1 and (run.launch.device == "cuda" or gpus_of(run) > 0)
