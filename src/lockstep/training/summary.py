"""Opening lines and closing table of a run.

In: the objects that a rank has built, and the results. Out: facts and tables for the console.
"""

from __future__ import annotations

import hashlib
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from lockstep.checkpoint.manifest import folder_of, name_of
from lockstep.config.model_selection import Best, higher_is_better
from lockstep.config.run import Run, RunError, override_of
from lockstep.data.job import Job
from lockstep.data.prepare import left_out
from lockstep.distributed.world import World
from lockstep.strategies.exact.training_state import TrainedWeights
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Predicts, Task
from lockstep.track.console import Console, clock
from lockstep.track.history import lines_of
from lockstep.training.resolve import launcher_class, resolve_strategy
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.training.session import Session
    from lockstep.training.train_state import Counts


def facts(session: Session) -> dict[str, str]:
    """Opening lines of a run."""
    run, world, task, strategy, feed = session.run, session.world, session.task, session.strategy, session.feed
    cuda = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if cuda else f"CPU, {quantity(world.threads, 'thread')} each"
    return {
        "run": f"{run.name} -> {run.folder}",
        "data": data(task),
        **feed.mixture,
        "model": f"{task.origin}, {parameters(strategy.weights)}; {precisions(strategy)}",
        **padding(task),
        **task.summary_lines,
        **selection_lines(task),
        "processes": f"{world.size} ({run.strategy.name}{strategy.memory.choice}, "
        f"{'exact' if strategy.job.same_bits else 'equal to rounding'}) on {device}",
        "step": f"{quantity(min(run.batch_size, feed.order.examples), 'example')} in "
        f"{quantity(run.micro_batches, 'micro-batch')}{' of about equal work' if run.micro_batches > 1 else ''}; "
        f"{quantity(feed.total, 'step')}",
    }


def parameters(weights: TrainedWeights) -> str:
    """Describe the number of parameters, and of trained ones if fewer, as with an adapter."""
    whole, trained = weights.parameter_count, weights.trained_count
    text = f"{in_millions(whole)} parameters"
    if trained < whole:
        text += f", {trained:,} trained ({100 * trained / whole:.3g}%)"
    return text


def precisions(strategy: Strategy) -> str:
    """Describe the dtypes that the run actually computes with and stores, as opposed to the requested ones; those of
    optimizer moments are known after a step."""
    run = strategy.run
    states = strategy.update.optimizer.state.values()
    moments = [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    tensors_of: dict[str, list[torch.Tensor]] = {"weights": list(strategy.model.parameters()), "moments": moments}
    parts = [
        f"{what} in {' and '.join(sorted({str(t.dtype)[6:] for t in tensors}))}"
        for what, tensors in tensors_of.items()
        if tensors
    ]
    if run.precision == "fp32" and {t.dtype for tensors in tensors_of.values() for t in tensors} <= {torch.float32}:
        return "weights and compute in float32"
    packed = run.model.quantization or "uint8"
    return f"compute in {run.precision}, {', '.join(parts).replace('uint8', packed)}"


def closing(
    console: Console,
    job: Job,
    task: Task,
    scores: dict[str, dict[str, float]],
    counts: Counts,
    world: World,
    weights: str | None,
    promised: Promised,
    better: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print the closing table, the location of the results, and suggested next commands. `better`: from
    `better_step`."""
    run = job.run
    if counts.steps:
        rate = f", {counts.tokens / counts.seconds:,.0f} {task.unit}/s" if task.unit else ""
        speed = f"{clock(counts.seconds)} for {counts.steps:,} steps, {counts.examples / counts.seconds:.0f} examples/s"
        console.facts({"time": f"{speed}{rate}{padding_ratio(task, counts)}"}, cut={"time"})
    for rows in score_tables(scores, console.width):
        console.columns("", rows)
    for name, values in best_possible(task, list(scores)).items():
        console.facts({"limit": f"label noise caps {name} at {values}"})
    console.facts(better, whole=True)
    console.last_samples()
    command, does = the_same_elsewhere(job, world, promised)
    console.facts({"model": f"{run.folder}/export ({task.loader} loads it)"} | ({"sha256": weights} if weights else {}))
    if (page := run.folder / "report.html").is_file():
        console.facts({"report": page.resolve().as_uri()}, whole=True)  # a link that opens in a browser
    then = what_next(task, console.samples)
    room = math.inf if console.width is None else console.width - 11
    noted = f"{command}  # {does.removeprefix('gives ')}"
    if len(command) > room:  # a terminal too narrow for it: the log has it
        console.detail({"repeat": noted})
    elif command != then:
        console.facts({"repeat": noted if len(noted) <= room else command}, whole=True)
    console.facts({"next": then}, whole=True)


def best_so_far(job: Job, step: int) -> Best:
    """Best of the evaluations up to `step` that OUTPUT records."""
    run = job.run
    best = Best(run.checkpoint.best)
    for line in lines_of(run.folder / "metrics.jsonl", ("step", "split")) if step else ():
        if line["split"] == "validation" and line["step"] <= step:
            best.update(line["step"], line)
    return best


def better_step(job: Job, best: Best, exported: int, scores: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Describe an evaluation that was better than that of the exported model, and the command that exports its model;
    empty if there is none. If its loss is lower, the text also gives a score such as accuracy; if the exported model
    has the better score, the line is called `lower loss` and names the key, but recommends no command. `best`: of all
    evaluations of the run. `exported`: step of the exported model."""
    run = job.run
    final = scores.get("validation", {})
    value = final.get(best.name)
    if best.step in (None, exported) or value is None or not best.beats(value) or f"{value:.4g}" == f"{best.value:.4g}":
        return {}
    score = next((name for name in final if higher_is_better(name) and name in best.numbers), None)
    score = None if best.name == score else score
    both = ["", ""] if score is None else [f", {score} {numbers[score]:.4g}" for numbers in (best.numbers, final)]
    text = (
        f"step {best.step:,}: validation {best.name} {best.value:.4g}{both[0]}; the export (step {exported:,}) has "
        f"{best.name} {value:.4g}{both[1]}"
    )
    if run.average.last is not None:
        return {"better": text}  # a mean is exported, so a single step cannot be
    if score is not None and final[score] > best.numbers[score]:
        which = "higher" if higher_is_better(best.name) else "lower"
        return {f"{which} {best.name}": f"{text}; export=best exports that step"}
    if not launcher_class(run.launch).starts_all_ranks:  # this shell may not be able to start its ranks
        return {"better": f"{text}; export: best in the run file exports the best step"}
    words = ["lockstep", "train", str(run.folder / "run.yaml"), "export=best"]
    what = f"writes the export again, from the checkpoint of step {best.step:,}"
    if not (folder_of(run.folder) / name_of(best.step)).is_dir():
        words, what = [*words, *_in_a_folder_of_its_own(run, "best")], "trains again and exports the best step"
    return {"better": text, "best": f"{shlex.join(words)}  # {what}"}


def padding_ratio(task: Task, counts: Counts) -> str:
    """Describe the share of padding beside real tokens, and that of random micro-batches."""
    if not task.unit:
        return ""
    padding, by_chance = counts.padded / counts.tokens - 1, counts.padded_by_chance / counts.tokens - 1
    if max(padding, by_chance) == 0:
        return "; no padding"
    share = f"{_share(padding)} padding" if padding else "no padding"
    return f"; {share} (random micro-batches: {_share(by_chance)})"


def _share(part: float) -> str:
    """Format a share as per cent; a small one is not 0 %."""
    return "<1%" if 0 < part < 0.01 else f"{part:.0%}"


LINE = 80  # columns of a narrow terminal
SPLIT = 12  # columns of the split names in a table of metrics


def score_tables(scores: Mapping[str, Mapping[str, float]], width: int | None) -> list[list[list[str]]]:
    """Return the metrics with one row per split: in as many tables as `LINE` columns need, or, on a terminal of `width`
    columns, in one table of those that fit. The log and the report have all metrics."""

    def cell(split: str, name: str) -> str:
        value = scores[split].get(name)  # missing if the split has no examples of that mixture source
        if value is None:
            return ""
        return f"{value:,.0f}" if name == "examples" else f"{value:.4f}"

    names = list(dict.fromkeys(name for metrics in scores.values() for name in metrics))
    tables: list[list[list[str]]] = []
    room = 0
    for name in names:
        column = [name, *(cell(split, name) for split in scores)]
        room -= max(map(len, column)) + 2
        if room < 0 or not tables:
            tables.append([[""], *([split] for split in scores)])
            room = (width or LINE) - SPLIT - max(map(len, column)) - 2
        for row, value in zip(tables[-1], column, strict=True):
            row.append(value)
    return tables if width is None else tables[:1]


def best_possible(task: Task, splits: Sequence[str]) -> dict[str, str]:
    """Highest value that any model can reach, by metric and split; known only for generated data."""
    limits = {split: task.best_possible(split) for split in splits}
    names = dict.fromkeys(name for metrics in limits.values() for name in metrics)
    return {
        name: ", ".join(f"{metrics[name]:.4f} on {split}" for split, metrics in limits.items() if name in metrics)
        for name in names
    }


def what_next(task: Task, samples: Sequence[Mapping[str, str]]) -> str:
    """Shell command that queries the model with the first words of the first sample."""
    output = str(task.run.folder)
    if not isinstance(task, Predicts):
        return shlex.join(["lockstep", "evaluate", output])
    command = shlex.join(["lockstep", "predict", output])
    if len(task.input_columns()) > 1:
        pair = task.example_input.replace("\t", r"\t")
        return f"{command} $'{pair}'"
    text = task.sample_input(samples[0]) if samples else ""
    room = max(24, LINE - len(f"{'next':<10} {command} ''"))
    return f"{command} {shlex.quote(textwrap.shorten(text, room, placeholder='') or task.example_input)}"


class Promised(StrEnum):
    """Whether a different number of processes gives the same weights."""

    YES = "yes"
    NOT_CHECKED = "not checked"  # there are warnings about the user's code
    ONE_PROCESS = "one process"  # the model keeps state that no strategy synchronizes


def promised(strategy: Strategy, doubts: Sequence[str]) -> Promised:
    """Reproducibility of a run trained by a strategy. `doubts`: warnings about the user's code."""
    if strategy.dry_run.effects.per_process or strategy.dry_run.effects.new_memory:
        return Promised.ONE_PROCESS
    return Promised.NOT_CHECKED if doubts else Promised.YES


def the_same_elsewhere(job: Job, world: World, promised: Promised = Promised.YES) -> tuple[str, str]:
    """Shell command to reproduce this run from the folder where it was started, and a description of its effect."""
    run = job.run
    file = str(run.folder / "run.yaml")
    if (
        not launcher_class(run.launch).starts_all_ranks or promised == Promised.ONE_PROCESS
    ):  # this shell may not be able to start its ranks
        return shlex.join(["lockstep", "evaluate", str(run.folder)]), "scores the exported model again"
    if not job.same_bits or (promised == Promised.NOT_CHECKED and world.size > 1):
        return shlex.join(["lockstep", "verify", file]), "checks that this training equals one on a single process"
    words = ["lockstep", "train" if promised == Promised.YES else "verify", file]
    most = run.micro_batches if world.device.type == "cpu" else torch.cuda.device_count()
    if run.strategy.alone and most > 1:
        run = run.with_keys("strategy", name="ddp")
        words.append("strategy.name=ddp")
    for processes in range(1, most + 1):
        with suppress(RunError):
            if processes == world.size:
                continue
            resolve_strategy(run, processes)
            words += [f"launch.processes={processes}"]
            if promised != Promised.YES:
                return shlex.join(words), f"checks that this training equals one on {quantity(processes, 'process')}"
            words += _in_a_folder_of_its_own(run, str(processes))
            return shlex.join(words), f"gives the same weights on {quantity(processes, 'process')}"
    return shlex.join(["lockstep", "evaluate", str(run.folder)]), "scores the exported model again"


def _in_a_folder_of_its_own(run: Run, ending: str) -> list[str]:
    """Overrides for a run like this one in another output folder, without keys specific to this run."""
    words = [override_of("output", f"{run.folder}-{ending}")]
    words += ["max_time=null"] if run.max_time else []
    words += ["hub.push_to=null"] if run.hub.push_to else []
    return words + (["remote_dir=null"] if run.remote_dir else [])


def digest_of(folder: Path, weights: Mapping[str, torch.Tensor] | None) -> str | None:
    """SHA-256 of the exported weights: an adapter's, or all files of a large model's. For another export format, which
    may contain a date or a pickle, hashes name, dtype, shape and values of `weights`; None if those are not given."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with open(path, "rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    if not files and weights is None:
        return None
    for name, tensor in sorted((weights or {}).items()) if not files else ():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def in_millions(count: int) -> str:
    """Format a number of parameters, such as 22.71M; small numbers in full."""
    return f"{count / 1e6:.2f}M" if count >= 10_000 else f"{count:,}"


def data(task: Task) -> str:
    """Describe the source and number of examples."""
    sizes = ", ".join(f"{len(columns):,} {split}" for split, columns in task.splits.items())
    mean = f"; mean {task.splits['train'].mean_length:.1f} {task.unit}" if task.unit else ""
    return f"{task.prepared.facts['source']}: {sizes} examples{mean}{left_out(task.prepared.facts)}"


def padding(task: Task) -> dict[str, str]:
    """Explain why padding is computed although the run requests none; empty if it is not."""
    why = task.padded_because if task.run.data.padding == "none" and task.head is not None else None
    return {"padding": f"computed, as with data.padding=batch: {why}"} if why else {}


def selection_lines(task: Task) -> dict[str, str]:
    """Lines about evaluation and export, if they do not use all of validation or not the last weights."""
    run = task.run
    lines, of = {}, len(task.splits["validation"])
    if run.evaluate.limit is not None and run.evaluate.limit < of:
        lines["evaluation"] = f"{run.evaluate.limit:,} of {of:,} validation examples, drawn with the seed"
    if run.average.summary:
        both = "evaluated and exported" if run.average.ema is not None else "exported"
        lines["average"] = f"{run.average.summary} is {both}"
    return lines
