"""Run a script, and print a checksum of the weights after each optimizer's steps: equal for a traced and an untraced
run if tracing changes no bit.

    python weight_digest.py SCRIPT ARGUMENTS ...

It imports torch alone, listens to torch's optimizers, and shares no code with the tracer.
"""

import atexit
import ctypes
import runpy
import sys
import zlib

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

DIGEST = {"steps": 0, "weights": 0}


def add(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """After a step: the bits of all local tensors of the optimizer."""
    DIGEST["steps"] += 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            part = getattr(parameter.detach(), "_local_tensor", parameter.detach()).contiguous().cpu()
            content = ctypes.string_at(part.data_ptr(), part.numel() * part.element_size())
            DIGEST["weights"] = zlib.crc32(content, DIGEST["weights"])


register_optimizer_step_post_hook(add)
atexit.register(lambda: print(f"digest {DIGEST['steps']} {DIGEST['weights']:08x}", flush=True))
sys.argv = sys.argv[1:]
# kept: a DDP model that is freed here may wait for ever (`support/forked.py`)
KEPT = runpy.run_path(sys.argv[0], run_name="__main__")
