"""torchrun on this machine, as a command of its own: for a cluster whose tools watch for `torchrun`.

In: a run. Out: the exit status of torchrun. Its ranks find torchrun's environment variables, and join.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from lockstep import Run, RunError
from lockstep.distributed.job_record import JOB_WORDS, TRAIN
from lockstep.launchers.launcher import Launcher, LaunchPlan


class Torchrun(Launcher):
    """`launch.processes` processes, which must be a number."""

    def plan(self, run: Run) -> LaunchPlan:
        processes = run.launch.processes
        if not isinstance(processes, int):
            raise RunError("launch.processes: torchrun needs a number")
        if processes > run.micro_batches:
            raise RunError(f"launch.processes: {processes} cannot share {run.micro_batches} micro-batches")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "lockstep", "train", str(run.folder / "run.yaml")]
        return LaunchPlan(run, processes, command, notes=["torchrun itself ends with 1 whatever its ranks end with"])

    def start(self, plan: LaunchPlan, job: Sequence[str] = TRAIN) -> int:
        return subprocess.run(plan.command, env={**os.environ, JOB_WORDS: " ".join(job)}, check=False).returncode
