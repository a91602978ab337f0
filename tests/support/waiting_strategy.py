"""A strategy that waits in the middle of a run, so that a test can intervene there."""

import os
import time
from pathlib import Path
from typing import Any

from lockstep.strategies.allreduce import AllReduce
from support.at_once import SavesAtOnce

STEP = 25


class Held(SavesAtOnce, AllReduce):
    """Step 25 does not begin before a rank is asked to stop, or a file `go` exists, for at most two minutes per step. A
    file `held-PID` says that a rank has reached it. The checkpoint of step 20 exists then."""

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        limit = time.monotonic() + float(os.environ.get("HELD_S", "120"))
        if batch.step == STEP:
            Path(f"held-{os.getpid()}").touch()
        while batch.step == STEP and not Path("go").exists() and time.monotonic() < limit:
            if self.world.stop.came:
                Path("go").touch()  # the other ranks may not have been told
            time.sleep(0.05)
        return super().train_step(batch, learning_rate)
