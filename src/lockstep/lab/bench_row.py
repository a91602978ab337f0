"""One configuration that `lockstep bench` measures, and its numbers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.lab.sweep import sweep_file
from lockstep.training.timing import Timing


@dataclass(eq=False)
class BenchRow:
    """One configuration and its measurements."""

    processes: int  # `launch.processes`
    series: str  # all varied keys but the processes: the name of its line in the plots
    keys: sweep_file.Overrides  # of the run file
    run: Run | None = None  # None if the keys are invalid together
    reason: str | None = None  # why it could not run
    rounds: dict[int, Timing] = field(default_factory=dict)  # by the round's number, from 0
    job: Job | None = None  # None if it could not be resolved

    @property
    def count(self) -> int:
        """Number of processes that ran, or were requested if none has run yet."""
        return next((t.processes for t in self.rounds.values()), self.processes)

    @property
    def rates(self) -> list[float]:
        """Examples per second, by round."""
        return [t.examples / t.seconds for t in self.rounds.values()]

    def middle(self) -> dict[str, float]:
        """Medians over the rounds; bytes are of the rank that uses the most."""
        rounds = list(self.rounds.values())
        step_s = statistics.median(t.seconds / t.steps for t in rounds)

        def most(name: str) -> int:
            return max(getattr(rank, name) for t in rounds for rank in t.ranks)

        return {
            "examples_per_s": statistics.median(self.rates),
            "examples_per_s_lowest": min(self.rates),
            "examples_per_s_highest": max(self.rates),
            "tokens_per_s": statistics.median(t.tokens / t.seconds for t in rounds),
            "seconds_per_step": step_s,
            "whole_run_s": step_s * rounds[0].whole_steps,
            "padding": rounds[0].padded / rounds[0].tokens,
            "threads": rounds[0].threads,
            "peak_resident": most("peak_resident"),
            "peak_device": most("peak_device"),
            "at_rest": most("at_rest"),
            "at_update": most("at_update"),
        }
