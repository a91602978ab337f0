"""A strategy whose steps take a while, so that a test can do something in the middle of a job. Same bits."""

import time
from typing import Any

from lockstep.strategies.allreduce import AllReduce


class Slow(AllReduce):
    """`allreduce`, a quarter of a second a step slower."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        time.sleep(0.25)
        return super().train_step(batch, learning_rate)
