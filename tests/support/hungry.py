"""A strategy of which one rank takes memory without end, once. Same bits otherwise."""

import time
from pathlib import Path
from typing import Any

import torch

from lockstep.strategies.allreduce import AllReduce


class Hungry(AllReduce):
    """Rank 1 does so at step 15; a file `ate` says so."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        if batch.step == 15 and self.world.rank == 1 and not Path("ate").exists():
            Path("ate").touch()
            eaten = []
            while True:
                eaten.append(torch.ones(2_000_000))
                time.sleep(0.002)  # its launcher looks at it once a second
        return super().train_step(batch, learning_rate)
