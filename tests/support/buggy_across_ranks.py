"""A module of a user's own that speaks with other ranks, for `lockstep verify` to find and name."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from support.buggy_modules import Base


class AcrossRanks(Base):
    """Takes off the mean of what all ranks compute at the moment."""

    def between(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden.tanh()
        mean = hidden.detach().mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return (hidden - mean).tanh()
