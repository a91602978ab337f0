"""`lockstep bench --options`: measure which options for speed or memory help this job.

In: the user's run. Out: values of such options to try, one key at a time; from the measured rows, how each compares
with the run file as it is, and the set of them that made the job faster in every round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config.error_messages import flat
from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.hardware import gpus_of
from lockstep.lab.bench_row import BenchRow
from lockstep.lab.sweep.sweep_file import Overrides, format_value

GAIN = 1.02  # a smaller ratio is not a gain, even on a quiet machine
CHUNK = 2048  # value of task.loss_chunk to try: tokens whose logits are in memory at a time


def options_of(run: Run) -> dict[str, list[Any]]:
    """Return key -> values to try, other than the run's own: options that trade time for memory on the same examples.
    Some change rounding, and so the bits of the weights. `precision` and `strategy.exact` are excluded, because
    they change what the run promises."""
    job = Job.of(run)
    tried: dict[str, list[Any]] = {
        "model.compile": [False, True, "whole"],
        "model.cuda_graphs": [True, False] if run.model.compile == "whole" and gpus_of(run.launch) else [],
        "model.checkpoint_activations": [False, True],
        "micro_batches": [max(1, run.micro_batches // 2), run.micro_batches * 2],
    }
    if not job.task.own_model:
        tried["data.padding"] = ["none", "batch"]
    if job.task.chunks_loss:
        tried["task.loss_chunk"] = [None, CHUNK]
    tried |= {f"strategy.options.{key}": [*values] for key, values in job.strategy.facts.bench_options.items()}
    own = flat(run.model_dump(mode="json"))
    others = {key: [value for value in values if value != own.get(key)] for key, values in tried.items()}
    return {key: values for key, values in others.items() if values}


def pairs_of(run: Run) -> list[Overrides]:
    """Return options to try together, because one needs the other."""
    graphs = run.model.compile != "whole" and gpus_of(run.launch)
    return [{"model.compile": "whole", "model.cuda_graphs": True}] if graphs else []


def ratios(row: BenchRow, base: BenchRow) -> list[float]:
    """Examples per second relative to `base`, in each round that has both."""
    both = [(t, base.rounds[number]) for number, t in row.rounds.items() if number in base.rounds]
    return [t.examples / t.seconds / (b.examples / b.seconds) for t, b in both]


def noise(rows: Sequence[BenchRow]) -> float:
    """Return the largest ratio, in any round, between the run file (`rows[0]`) and itself measured again (`rows[1]`).
    An option must exceed this noise."""
    return max((max(ratio, 1 / ratio) for ratio in ratios(rows[1], rows[0])), default=1.0)


def gains(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows that were faster than the run file in every round by more than `noise`, fastest first."""
    least = max(GAIN, noise(rows))
    gained = [row for row in rows[2:] if (speeds := ratios(row, rows[0])) and min(speeds) >= least]
    return sorted(gained, key=lambda row: -statistics.median(ratios(row, rows[0])))


def faster(rows: Sequence[BenchRow]) -> Overrides:
    """Return the fastest value of each key that is faster when changed alone."""
    best: Overrides = {}
    for row in gains(rows):
        if len(keys := varied(row)) == 1:
            best = keys | best
    return best


def varied(row: BenchRow) -> Overrides:
    """Return the keys in which a row differs from the run file."""
    return {key: value for key, value in row.keys.items() if key != "launch.processes"}


def same_weights(row: BenchRow, base: BenchRow) -> str:
    """Compare the weights that two rows train, for a table: `same` (bit for bit), `other`, `may differ` or `-`."""
    if row.job is None or base.job is None:
        return "-"
    mine, other = row.job, base.job
    if "auto" in (mine.run.model.compile, other.run.model.compile):  # resolved on the ranks
        return "may differ"
    return "same" if mine.arithmetic() == other.arithmetic() else "other"


def table(rows: Sequence[BenchRow]) -> tuple[list[str], list[list[str]]]:
    """Columns and cells: the run file, the run file measured again, then the options, fastest first."""
    columns = ["", "speed", "in all rounds", "examples/s", "peak MiB", "weights"]
    base, tried = rows[0], [row for row in rows[2:] if ratios(row, rows[0])]
    tried.sort(key=lambda row: -statistics.median(ratios(row, base)))
    cells = []
    for row in [row for row in rows[:2] if ratios(row, base)] + tried:
        speeds, middle = ratios(row, base), row.middle()
        own = "run file" if row is base else "run file, again"
        cells.append(
            [
                words(varied(row)) or own,
                f"{statistics.median(speeds):.2f}",
                "" if row is base else f"{min(speeds):.2f} to {max(speeds):.2f}",
                f"{middle['examples_per_s']:.1f}",
                f"{max(middle['peak_device'], middle['peak_resident']) / 2**20:.0f}",
                same_weights(row, base),
            ]
        )
    return columns, cells


def advice(rows: Sequence[BenchRow], run: Run) -> list[str]:
    """Return a sentence about each key that the user wrote and that makes the job slower than another value."""
    own = flat(run.model_dump(mode="json"))
    lines = []
    for key, value in faster(rows).items():
        if run.wrote(key):
            row = next(row for row in rows if varied(row) == {key: value})
            times = statistics.median(ratios(row, rows[0]))
            lines.append(
                f"{words({key: own.get(key)})} is slower: {words({key: value})} has {times:.2f} times its speed"
            )
    return lines


def words(keys: Mapping[str, Any]) -> str:
    """Format keys as on a command line: `key=value key=value`."""
    return " ".join(f"{key}={format_value(value)}" for key, value in keys.items())
