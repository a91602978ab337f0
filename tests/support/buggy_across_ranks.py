"""A user module that communicates with other ranks, for `lockstep verify` to detect and name."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from support.buggy_modules import Base


class AcrossRanks(Base):
    """Subtracts the mean over all ranks."""

    def between(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden.tanh()
        mean = hidden.detach().mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return (hidden - mean).tanh()
