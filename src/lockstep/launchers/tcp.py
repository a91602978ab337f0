"""Ranks started by hand: this process is one rank and connects to the others at a URL. For machines without another
launcher.

In: `launch: {name: tcp, init_method: tcp://host:port, rank: R, world_size: W}`, the same command on every machine with
its own rank. Out: an exit status.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from pydantic import Field

from lockstep.config.run import Run, RunError
from lockstep.config.sections import Positive, Section, Steps
from lockstep.distributed.job_record import TRAIN
from lockstep.launchers.launcher import Launcher, LaunchPlan


class Tcp(Launcher):
    """Launcher that calls `init_process_group` with a URL, a rank and a world size."""

    joins = True

    class Options(Section):
        """Arguments of `init_process_group`."""

        init_method: str | None = Field(None, description="tcp://host:port of rank 0")
        rank: Steps | None = Field(None, description="this process's rank")
        world_size: Positive | None = Field(None, description="total number of processes")

    def plan(self, run: Run) -> LaunchPlan:
        launch = self.options(run.launch)
        if launch.init_method is None:
            raise RunError("LS7521", "launch.init_method: missing; the tcp launcher needs tcp://host:port of rank 0")
        if not re.fullmatch(r"tcp://[^:/]+:\d+", launch.init_method):
            raise RunError(
                "LS7420",
                f"launch.init_method: invalid value {launch.init_method!r}; expected tcp://host:port of rank 0",
            )
        if launch.rank is None or launch.world_size is None:
            raise RunError("LS7421", "launch: the tcp launcher needs launch.rank and launch.world_size")
        if launch.rank >= launch.world_size:
            raise RunError(
                "LS7422",
                f"launch.rank: {launch.rank} must be less than launch.world_size ({launch.world_size}); ranks "
                "count from 0",
            )
        if run.launch.on_rank_failure == "continue":
            raise RunError(
                "LS7423",
                "launch.on_rank_failure: continue needs a launcher that watches the ranks: launch.name=local, "
                "torchrun, or slurm with ranks=elastic. With tcp each rank is started by hand, and one failure "
                "ends them all; set restart",
            )
        run.check_shared(launch.world_size, f"launch.world_size: {launch.world_size} processes")
        variables = {
            "RANK": str(launch.rank),
            "WORLD_SIZE": str(launch.world_size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        notes = [f"this process is rank {launch.rank} of {launch.world_size}, rendezvous at {launch.init_method}"]
        return LaunchPlan(
            run, launch.world_size, ["lockstep", "train", str(run.folder / "run.yaml")], variables, notes=notes
        )

    def start(self, plan: LaunchPlan, words: Sequence[str] = TRAIN) -> int:
        from lockstep.training import rank as worker

        os.environ.update(plan.variables)
        return worker.main(plan.job or plan.run, str(self.options(plan.launch).init_method), words)
