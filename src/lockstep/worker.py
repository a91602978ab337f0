"""What every launcher starts: one rank of a job, from the run file to the export.

In: a run and the six variables. Out: an exit status (0 done, 1 failed, 2 bad run, 75 stopped and resumable), and
on rank 0 OUTPUT/.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.modeling_utils  # what every model needs: workers fork from a process that has imported it

from lockstep import launched, plugins
from lockstep.agreement import agree
from lockstep.checkpoint import CheckpointError, Checkpoints, check_resumable, finished
from lockstep.console import LOG, Console, append, clock, error
from lockstep.data.feed import Feed
from lockstep.data.prepare import prepare
from lockstep.data.tokens import Prepared
from lockstep.hub import push_pending, require, write_export
from lockstep.journal import Journal, launched_by
from lockstep.journal import facts as start_facts
from lockstep.launchers.launcher import TRAIN
from lockstep.report import write_report
from lockstep.run import Run, RunError, keep, load
from lockstep.strategies import strategy as strategies
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task
from lockstep.track.tracker import End, Sample
from lockstep.track.trackers import Trackers
from lockstep.train import Counts, TrainingFailed, samples, scored, train
from lockstep.usage import Usage
from lockstep.watch import Watch
from lockstep.world import Unreached, World

DONE, FAILED, BAD, STOPPED = 0, 1, 2, 75


def main(run: Run, init_method: str = "env://", job: Sequence[str] = TRAIN) -> int:
    """Run one rank to its end. Collective. A failure is told once for the job, with rank and host, and is status 1."""
    world = None
    try:
        world = World(run, init_method)
        if world.size > run.micro_batches:
            raise RunError(
                f"micro_batches: {run.micro_batches} pieces cannot be shared by {world.size} processes; use fewer "
                f"processes or "
                "more micro_batches"
            )
        module, _, function = job[0].rpartition(".")
        return left(run, world, job, getattr(importlib.import_module(module), function)(run, world, *job[1:]))
    except RunError as caught:
        if world is None or world.local_rank == 0:  # on every machine: its person should know, too
            error(str(caught), run.folder / LOG)
        return left(run, world, job, BAD)
    except Exception as caught:
        if not isinstance(caught, CheckpointError | TrainingFailed | Unreached):
            tell_failure(caught, world, run.folder / LOG)
        elif world is None or world.is_main or (isinstance(caught, Unreached) and world.local_rank == 0):
            error(str(caught), run.folder / LOG)
        left(run, world, job, FAILED)
        if world is not None and world.size > 1:
            if lost_contact(caught):
                world.wait_to_be_stopped(1.0)  # so that the launcher sees the rank that failed by itself first
            sys.stdout.flush()
            os._exit(FAILED)  # leaving properly would wait for ranks that may be gone
        return FAILED
    finally:
        if world is not None:
            world.close()


def left(run: Run, world: World | None, job: Sequence[str], status: int) -> int:
    """Rank 0 writes down how training ended, for `lockstep status`. Returns the status."""
    if world is not None and world.is_main and tuple(job) == TRAIN:
        launched.note(run.folder, status=status, ended=time.time())
    return status


def main_of_file(path: str, job: Sequence[str] = TRAIN) -> None:
    """The same for a resolved run file, as the process of its own that a launcher starts. Exits."""
    status = main(load(path, []), job=job)
    sys.stdout.flush()
    sys.exit(status)


def work(run: Run, world: World) -> int:
    """Build, resume, train, evaluate, export."""
    strategy = strategies.checked(run, world.size)(run, world)
    task_class = plugins.find("tasks", run.task.name)
    prepared = prepare(run, task_class)
    world.join()
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)  # transformers may import DeepSpeed, which asks aloud
    agree(run, world, prepared)
    console = Console(world.is_main, world.log, run.track.console)
    if world.is_main:
        append(world.log, f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {world.size} process(es), rank 0 on {world.host}")
    if finished_already(run, world, prepared):
        console.say(f"{run.folder} is finished; the model is in {run.folder}/export")
        return push_pending(run, console.say) if world.is_main else DONE
    task: Task = task_class(run, prepared)
    strategy.build(task)
    feed = Feed(run, task, strategy.leaves(), world.device)
    opening = facts(run, world, task, strategy, feed)
    console.facts(opening | {"ranks": f"{world.whereabouts}; {launched_by(run)}"})
    checkpoints = Checkpoints(run, world, prepared, feed.total, console.note)
    rehearse(run, world, strategy, feed)
    if world.is_main:
        launched.arrived(run.folder, world.size, feed.total)
    step, notes = checkpoints.resume(strategy)
    for text in notes:
        console.note(text)
    if step:
        console.say(f"resuming after step {step} of {feed.total}")
    journal = Journal(world, run.folder)
    told = start_facts(run, world, opening, strategy.phases.clock, strategy.waits_inside)
    journal.event("start", step, **told)
    trackers = Trackers(run, step, checkpoints.trackers, console.tracker, console.note, world.is_main)
    usage = Usage(world)
    end: End = "failed"

    def log(step: int, split: str, numbers: dict[str, float]) -> None:
        console.log(step, split, numbers)
        trackers.log(step, split, numbers)
        if split == "train":
            usage.ask(step)

    def advance(step: int) -> None:
        console.advance(step)
        if (found := usage.found()) is not None:
            log(found[0], "system", found[1])

    def show(step: int, samples: Sequence[Sample]) -> None:
        console.show(step, samples)
        trackers.show(step, samples)

    watch = Watch(world, run.launch.hang_s).start()
    try:
        console.start(feed.total, step, lambda: world.place)
        step, counts = train(run, world, task, strategy, feed, checkpoints, log, advance, step, show, journal)
        advance(step)
        console.stop()
        if step < feed.total:
            there = "there" if checkpoints.newest == step else f"step {checkpoints.newest or 0}"
            console.say(f"stopped on request after step {step} of {feed.total}; the same command goes on from {there}")
            strategy.close()
            journal.event("stop", step)
            end = "stopped"
            return STOPPED
        console.facts({"precision": precisions(run, strategy)})
        with strategy.phases("evaluation"):
            splits = [split for split in ("validation", "test") if split in task.splits]
            found = {split: scored(run, world, task, strategy, task.splits[split]) for split in splits}
            for split, (scores, _) in found.items():
                log(step, split, scores)
            show(step, samples(task, strategy, world))
        journal.event("evaluation", step)
        journal.times(step, strategy.phases.take())
        journal.answer()
        end = "done"
    except BaseException as caught:
        journal.failed(caught, world.place)
        raise
    finally:
        watch.stop()
        console.stop()
        trackers.close(end)
    weights = strategy.export()
    strategy.close()
    if weights is not None:
        final: dict[str, dict[str, float]] = {split: scores for split, (scores, _) in found.items()}
        write_export(run, task, weights, final, feed.total)
        sha256 = digest_of(run.folder / "export")
        best = {split: task.best_possible(split) for split in final}
        journal.event("finish", step, weights=sha256, best_possible=best)
        write_pages(run, {split: tables for split, (_, tables) in found.items()}, console)
        closing(console, run, task, final, counts, strategy.gives_bits(run), sha256)
        # The upload is rank 0's alone and may take long: no other rank waits for it in a collective.
        return push_pending(run, console.say)
    return DONE


def write_pages(run: Run, tables: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """OUTPUT/tables.json and report.html. The run is done, whatever becomes of a page about it: the user is told."""
    try:
        (run.folder / "tables.json").write_text(json.dumps(tables), encoding="utf-8")
        write_report(run.folder)
    except (OSError, ValueError) as caught:
        console.note(f"{run.folder}/report.html could not be written: {caught}")


def rehearse(run: Run, world: World, strategy: Strategy, feed: Feed) -> None:
    """Try the longest examples before the first step. Ends the process, with advice, where memory does not suffice."""
    try:
        strategy.rehearse(feed.longest().to(world.device))
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as caught:
        text = " ".join(str(caught).split())
        if not isinstance(caught, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in text:
            raise
        error(
            f"rank {world.rank} of {world.size} on {world.host}: memory does not suffice for the longest examples (a "
            f"step of {run.batch_size} in {run.micro_batches} micro-batches): {text[:200]}\nUse more micro_batches, a "
            f"smaller batch_size or data.max_length, precision=bf16, or a strategy that shares out the model (fsdp2)",
            world.log,
        )
        sys.stderr.flush()
        os._exit(BAD)  # the others wait in a collective: the launcher ends them


def finished_already(run: Run, world: World, prepared: Prepared) -> bool:
    """Whether OUTPUT holds this run's end; rank 0 looks, and writes run.yaml. Collective. Errors: `RunError` on every
    rank, when OUTPUT holds another run or cannot be written."""
    found: bool | str = False
    if world.is_main:
        try:
            found = finished(run, check_resumable(run, prepared))
            keep(run)
            require(run)
        except RunError as caught:
            found = str(caught)
    found = world.from_main(found)
    if isinstance(found, str):
        raise RunError(found)
    return found


def facts(run: Run, world: World, task: Task, strategy: Strategy, feed: Feed) -> dict[str, str]:
    """The opening lines."""
    sizes = ", ".join(f"{len(columns):,} {split}" for split, columns in task.splits.items())
    cuda = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if cuda else f"CPU, {world.threads} thread(s) each"
    return {
        "run": f"{run.name} -> {run.folder}",
        "data": f"{task.prepared.facts['source']}: {sizes} examples; mean {task.splits['train'].lengths.mean():.1f} "
        "tokens",
        "model": f"{run.model.source or f'{run.model.type} from scratch'}, {strategy.parameter_count / 1e6:.2f}M "
        f"parameters; {precisions(run, strategy)}",
        "processes": f"{world.size} ({run.strategy.name}, "
        f"{'exact' if strategy.gives_bits(run) else 'equal to rounding'}) on {device}",
        "step": f"{run.batch_size} examples in {run.micro_batches} micro-batches of equal padded cost; {feed.total} "
        "steps",
    }


def precisions(run: Run, strategy: Strategy) -> str:
    """What numbers are computed and kept in, as it is and not as it was asked for; moments are there after a step."""
    optimizer: Any = getattr(strategy, "optimizer", None)
    states = optimizer.state.values() if optimizer is not None else ()
    moments = [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    kept: dict[str, list[torch.Tensor]] = {"weights": list(strategy.model.parameters()), "moments": moments}
    told = [f"{what} {' and '.join(sorted({str(t.dtype)[6:] for t in held}))}" for what, held in kept.items() if held]
    return f"computed in {run.precision}, kept in {', '.join(told)}"


def closing(
    console: Console,
    run: Run,
    task: Task,
    scores: dict[str, dict[str, float]],
    counts: Counts,
    exact: bool,
    weights: str,
) -> None:
    """The closing table, where the results are, and what to try next."""
    best = {split: task.best_possible(split) for split in scores}
    rows = []
    for name in next(iter(scores.values())):
        row = [name]
        for split in scores:
            value = scores[split][name]
            limit = f" (best possible {best[split][name]:.4f})" if name in best[split] else ""
            row.append(f"{value:,.0f}" if name == "examples" else f"{value:.4f}{limit}")
        rows.append(row)
    console.table("results", ["", *scores], rows)
    if counts.steps:
        console.facts(
            {
                "speed": f"{counts.examples / counts.seconds:.0f} examples/s, {counts.tokens / counts.seconds:,.0f} "
                "tokens/s; "
                f"{counts.steps} steps in {clock(counts.seconds)}",
                "padding": f"{counts.padded / counts.tokens:.2f} tokens computed per real token; "
                f"cut at random it would have been {counts.padded_by_chance / counts.tokens:.2f}",
            }
        )
    folder = run.folder
    again = f"lockstep train launch.processes=1 output={folder}-1" if run.name == "quickstart" else "launch.processes=1"
    console.facts(
        {
            "weights": f"sha256 {weights}",
            "results": f"{folder}/export (from_pretrained loads it), {folder}/report.html, {folder}/metrics.jsonl",
            "next": f"{again}: the same weights on another number of processes"
            if exact
            else "lockstep verify: whether this is the same training as on one process",
        }
    )


def digest_of(folder: Path) -> str:
    """SHA-256 over the exported weights: an adapter's, or all parts of a large model's."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            while block := file.read(2**20):
                found.update(block)
    return found.hexdigest()


def tell_failure(caught: Exception, world: World | None, log: Path | None = None) -> None:
    """The traceback, from the first rank of this machine that fails; the others only lost contact with it.

    The first one creates a file that no other can create. A restart has a number of its own.
    """
    # torchrun's run id is "none" unless given: its workers' parent tells one job from the next
    job = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.getppid()}" if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    attempt = f"{job}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    try:
        with open(Path(tempfile.gettempdir()) / f"lockstep-failure-{attempt}", "x", encoding="utf-8"):
            pass
    except OSError:
        return
    who = f"rank {world.rank} of {world.size} on {world.host}" if world is not None else "a process"
    if lost_contact(caught):
        error(f"{who} lost contact with another rank: {' '.join(str(caught).split())[:200]}", log)
    else:
        error(f"{who} failed at {time.strftime('%H:%M:%S')}:\n{''.join(traceback.format_exception(caught))}", log)


def lost_contact(caught: Exception) -> bool:
    """Whether this rank failed because another one did."""
    return any(sign in str(caught) for sign in _LOST)


# What gloo says on the ranks that are left when one is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "Connection refused")

transformers.logging.set_verbosity_error()
