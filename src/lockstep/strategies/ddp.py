"""PyTorch DistributedDataParallel: gradients travel in buckets while backward is still computing.

In: this rank's micro-batches. Out: the same update on every rank. `engines/hooked_ddp.py` sums the buckets.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.strategies.engines.hooked_ddp import Hooked

_OURS = {"module", "device_ids", "output_device", "process_group", "device_mesh"}


class DDP(Hooked):
    """`strategy.options` are options of DistributedDataParallel (`bucket_cap_mb`, `static_graph`,
    `find_unused_parameters`, ...)."""

    gloo_threads = 2

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        run = job.run
        known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - _OURS - {"self"}
        if unknown := set(run.strategy.options) - known:
            raise RunError(
                "LS4010",
                f"strategy.options: DistributedDataParallel has no option {', '.join(sorted(unknown))}; "
                f"it has {', '.join(sorted(known))}",
            )

    @override
    def wrap(self) -> nn.Module:
        if self.world.size == 1:
            return self.model
        # Buffers (position ids) stay equal on all ranks without a broadcast. torch 2.13 renamed the option.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True} | self.run.strategy.options
        self.overlap.primed = not options.get("static_graph")
        return DistributedDataParallel(self.model, **options)
