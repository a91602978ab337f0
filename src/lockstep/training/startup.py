"""Start a rank: print the opening lines, try a step and the final stages, load the newest checkpoint.

In: a session and the console. Out: the state to start from, and the result of the comparison with a plain computation;
or an error that would otherwise occur hours later. The dry run tries the longest examples, a checkpoint's memory, an
evaluation, samples and the export, and leaves no trace.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.checkpoint.export import try_export
from lockstep.config.errors import BAD, coded
from lockstep.config.run import RunError
from lockstep.data.job import Job, Scope
from lockstep.distributed import hardware, job_record
from lockstep.distributed.event_log import facts as start_facts
from lockstep.distributed.event_log import launched_by
from lockstep.distributed.randomness import UNCOVERED, own_generators
from lockstep.distributed.system_metrics import free_memory, keep_freed_memory, peak_resident, restart_peak
from lockstep.distributed.torch_internals import local
from lockstep.strategies.engines import side_effects
from lockstep.strategies.exact import training_state
from lockstep.strategies.strategy import NotFinite, Strategy
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console, error
from lockstep.training import plain_check
from lockstep.training.errors import not_finite
from lockstep.training.evaluation import evaluate_with_tables, generate_samples
from lockstep.training.model_stats import evaluated_at_once, remarks, without_effect
from lockstep.training.session import Session
from lockstep.training.summary import facts
from lockstep.training.train_state import TrainState

if TYPE_CHECKING:
    from lockstep.tasks.models.inference import Decoding


def start_or_resume(session: Session, console: Console) -> tuple[TrainState, str]:
    """Print the opening lines, run the dry run, and load the newest checkpoint. Returns the state to start from, and
    the result of the comparison with a plain computation. Collective."""
    run, world, strategy = session.run, session.world, session.strategy
    opening = facts(session)
    where = {"ranks": f"{world.whereabouts}; {launched_by(run.launch)}"}
    alone = launched_by(run.launch) == "launcher local" and len(set(world.hosts)) == 1
    if alone:  # otherwise the launcher printed it
        console.detail({"run": opening["run"], **where})
        console.facts({k: v for k, v in opening.items() if k != "run"}, cut={"data", "step"})
    else:
        if introduced := job_record.INTRODUCED in os.environ:
            console.detail({"run": opening["run"]})
        console.facts(
            {k: v for k, v in (opening | where).items() if k != "run" or not introduced}, cut={"data", "step"}
        )
    if session.job.same_bits and (own := own_generators(session.task, strategy.model)):
        console.note(f"{UNCOVERED}: {', '.join(own)}")
    resolved_here = session.job.notes if session.job.scope < Scope.START else ()  # otherwise the launcher printed them
    for text in (*strategy.remarks, *resolved_here, *session.task.warnings, *remarks(session.job)):
        console.note(text)
    ACTIVITY.set("trying a step with the longest examples")
    try_before_training(session)
    if names := strategy.dry_run.effects.per_process:  # only with one process; several were refused
        console.note(side_effects.one_process(names))
    compared = plain_check.check(session, plain_check.cause)
    console.facts({"compared": compared}, cut={"compared"})
    ACTIVITY.set("looking for a checkpoint")
    if world.is_main:
        job_record.arrived(run.folder, world.size, session.feed.total)
    state = session.new_state()
    if world.device.type == "cuda":
        from lockstep.training import utilization

        state.meter.utilization = utilization.per_token_rate(world, session.task, strategy)
    step, notes = session.checkpoints.resume(session.averaged, state)
    for text in notes:
        console.note(text)
    idle = without_effect(session.job, session.feed.total, world.size, world.device.type == "cpu")
    for text in [*idle, *other_arithmetic(session.job), *enough_room(session, step)]:
        console.note(text)
    if step:
        console.say(f"resuming after step {step} of {session.feed.total}")
    ACTIVITY.set("starting")
    waits = strategy.facts.waits_inside
    session.journal.event(
        "start",
        step,
        steps=session.feed.total,
        compared=compared,
        **start_facts(run.launch, run.model, world, strategy.needs, opening, strategy.phases.clock, waits),
    )
    return state, compared


EXPORTED_TWICE = 100_000_000  # parameters; larger models are not exported on trial (up to this, a second or two)
FEW, SHARE = 2, 16  # of the longest examples, try at least FEW and one in SHARE if memory certainly suffices
ROOM = 0.5  # share of the free memory that counts as certainly available


def few_of(examples: int) -> int:
    """Number of examples to try, out of those in a micro-batch or evaluation batch."""
    return min(examples, max(FEW, -(-examples // SHARE)))


class MemoryBound:
    """Upper bound on memory in bytes, extrapolated from a trial with few examples: everything except the optimizer
    state is assumed to grow with the number of examples."""

    def __init__(self) -> None:
        self.bytes = 0.0
        self.begin()

    def begin(self) -> None:
        """Start measuring."""
        self._before = restart_peak()

    def end(self, times: float, state: int = 0) -> None:
        """Extrapolate memory used since `begin` by `times`, excluding `state` bytes of optimizer state."""
        if self._before is None:
            self.bytes = math.inf
        else:
            self.bytes = max(self.bytes, state + times * max(0, peak_resident() - self._before - state))


def try_before_training(session: Session) -> None:
    """Try a step and the stages after the last step. On a CPU, where a step may take seconds, try few of the longest
    examples, and the full number only if memory may not suffice. Collective. Errors: as `try_a_step` and `try_the_end`.
    """
    run, world, strategy = session.run, session.world, session.strategy
    few = few_of(run.batch_size // run.micro_batches) * run.micro_batches
    free = free_memory(world.local_size) if world.device.type == "cpu" and not session.task.own_model else 0
    if 2 * few <= run.batch_size and all(world.all_gather(free > 0)):
        bound = MemoryBound()

        def then() -> None:
            state = (local(t) for n, t in strategy.state.sharded_state_dict().items() if n.startswith("optimizer."))
            bound.end(run.batch_size / few, sum(tensor.nbytes for tensor in state))
            try_the_end(session, bound)

        try_a_step(session, then, few)
        if all(world.all_gather(bound.bytes < ROOM * free)):
            return
    try_a_step(session, lambda: try_the_end(session))


def try_a_step(session: Session, then: Callable[[], None] = lambda: None, count: int | None = None) -> None:
    """Try a step with the longest examples (`count`: only that many), then call `then`, which tries other uses of
    memory. If memory does not suffice, exits the process with advice. Errors: `TrainingFailed` for a loss or gradient
    that is not finite."""
    run, world, strategy, feed = session.run, session.world, session.strategy, session.feed
    keep_freed_memory()  # not earlier: memory freed while building the model is not needed again
    batch = feed.longest(count).to(world.device)
    try:
        strategy.dry_run(batch, then)
    except NotFinite as caught:
        when = "before step 0, tried with the longest examples of the training split"
        raise not_finite(caught, feed, batch.ids, when) from caught
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as caught:
        text = " ".join(str(caught).split())
        if not isinstance(caught, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in text:
            raise
        error(
            coded(
                "LS5000",
                f"rank {world.rank} of {world.size} on {world.host}: out of memory on the longest examples (a step "
                f"of {run.batch_size} in {run.micro_batches} micro-batches): {text[:200]}\nUse more micro_batches, "
                "a smaller batch_size or data.max_length, precision=bf16, or a strategy that shards the model "
                "(strategy.name=fsdp2)",
            ),
            world.log,
        )
        sys.stderr.flush()
        os._exit(BAD)  # other ranks wait in a collective; the launcher ends them


def try_the_end(session: Session, bound: MemoryBound | None = None) -> None:
    """Try everything that follows the first step: a checkpoint's memory, evaluation of the longest examples, samples,
    and an export unless the model is large. Exposes errors in a user's task at the start instead of after hours; leaves
    nothing behind. `bound`: evaluate with few examples and add their memory to it. Collective."""
    session.checkpoints.dry_run(session.averaged)
    try:
        _tried(session, bound)
    except Exception as caught:
        caught.add_note(f"({ACTIVITY.name}, tried before training, because it would fail after it)")
        raise


def export_bytes(strategy: Strategy) -> int:
    """Approximate size of an export on disk."""
    model, weights = strategy.run.model, strategy.weights
    count = weights.trained_count if model.adapter else weights.parameter_count
    return count * (2 if model.dtype == "bfloat16" else 4)


def _tried(session: Session, bound: MemoryBound | None) -> None:
    run, world, task, strategy = session.run, session.world, session.task, session.strategy
    checkpoints = session.checkpoints

    def briefly(inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        return strategy.generate(inputs, replace(how, new_tokens=min(2, how.new_tokens)))

    scores: dict[str, dict[str, float]] = {}
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        for split in (split for split in ("validation", "test") if split in task.splits):
            columns = task.splits[split]
            at_once = evaluated_at_once(task)
            longest = columns.longest(at_once if bound is None else few_of(at_once))
            if bound is not None:
                bound.begin()
            scores[split], tables = evaluate_with_tables(world, task, strategy, columns, longest, generate=briefly)
            if bound is not None:
                bound.end(at_once / len(longest))
            json.dumps(tables)
        if run.checkpoint.best:
            checkpoints.is_best(scores["validation"])
        ACTIVITY.set("trying samples")
        generate_samples(task, strategy, world, briefly)
        ACTIVITY.set("trying the export")
        checkpoints.disk.export = export_bytes(strategy)
        weights = (
            training_state.export_averaged(strategy) if strategy.weights.parameter_count <= EXPORTED_TWICE else None
        )
        if weights is not None:
            try:
                checkpoints.disk.export = try_export(task, weights, scores)
                checkpoints.disk.export_written = True
            except OSError as caught:  # e.g. a full disk; it may have space by the end of training
                if caught.errno == errno.EFBIG:  # a limit of the system, which `enough_room` reports
                    checkpoints.disk.too_large = str(caught.filename or caught)
                else:
                    checkpoints.say(f"the export could not be tried: {caught}")


def other_arithmetic(job: Job) -> list[str]:
    """Return a note on environment variables that change the arithmetic of libraries."""
    if not (variables := hardware.set_by_user(job.run.strategy.exact == "portable")):
        return []
    return [
        f"{', '.join(variables)} in the environment: libraries then use other instructions or another precision, so "
        "the weights may differ in bits from a run without it; unset it unless it is intended"
    ]


def enough_room(session: Session, step: int) -> list[str]:
    """Notes on the disk of OUTPUT before training continues after `step` updates. Collective. Errors: `RunError`, on
    every rank, if the run's files do not fit."""
    disk, feed, notes = session.checkpoints.disk, session.feed, list[str]()
    fault = None
    if session.world.is_main:
        try:
            notes = disk.check(step, feed.total, session.checkpoints.every, session.world.size)
        except RunError as caught:
            fault = str(caught)
    if (fault := session.world.broadcast(fault)) is not None:
        raise RunError.read(fault)
    return notes
