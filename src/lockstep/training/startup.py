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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.checkpoint import check_resumable
from lockstep.checkpoint.export import try_export
from lockstep.checkpoint.manifest import Goal
from lockstep.config.errors import BAD, coded
from lockstep.config.lazy import lazy
from lockstep.config.run import RunError, write_run_yaml
from lockstep.config.written import applies
from lockstep.data.arrow_cache import Columns, Prepared, examples_in
from lockstep.data.cache import STREAM
from lockstep.data.job import Job, Scope
from lockstep.data.prepare import warnings
from lockstep.distributed import hardware, job_record
from lockstep.distributed.event_log import facts as start_facts
from lockstep.distributed.event_log import launched_by
from lockstep.distributed.randomness import UNCOVERED, own_generators
from lockstep.distributed.system_metrics import free_memory, keep_freed_memory, peak_resident, restart_peak
from lockstep.distributed.torch_internals import local
from lockstep.distributed.world import World
from lockstep.strategies.engines import side_effects
from lockstep.strategies.exact import training_state
from lockstep.strategies.strategy import NotFinite, Strategy, shard_recovery
from lockstep.tasks.models import config_checks
from lockstep.tasks.task import make_task
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console, error
from lockstep.track.history import history_complete
from lockstep.training import plain_check
from lockstep.training.errors import not_finite
from lockstep.training.evaluation import evaluate_with_tables, evaluated_at_once, generate_samples
from lockstep.training.finish import finish_interrupted
from lockstep.training.resolve import config_entries
from lockstep.training.session import Session
from lockstep.training.summary import facts
from lockstep.training.train_state import TrainState
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.checkpoint import hub_push, remote_sync
    from lockstep.data import stream
    from lockstep.tasks.models import source_files
    from lockstep.tasks.models.inference import Decoding
else:  # for uploads, streamed data and a pretrained model
    hub_push, remote_sync = lazy("lockstep.checkpoint", "hub_push", "remote_sync")
    (stream,) = lazy("lockstep.data", "stream")
    (source_files,) = lazy("lockstep.tasks.models", "source_files")


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


def finished_already(job: Job, world: World) -> bool:
    """Whether the run in OUTPUT is already finished. Rank 0 checks, and writes run.yaml. Collective. Errors: `RunError`
    on every rank, if OUTPUT holds another run or cannot be written."""
    run = job.run
    outcome: bool | str = False
    if world.is_main:
        try:
            if world.refusal is not None:
                raise RunError.read(world.refusal)
            manifest = check_resumable(job)
            outcome = Goal.of(run).met_by(manifest)
            write_run_yaml(run)
            if run.hub.push_to is not None:
                hub_push.require(run.folder, run.hub.push_to)
            if run.remote_dir is not None and job.scope < Scope.START:  # not checked by the launcher
                remote_sync.check(job)
                remote_sync.check_other(job)
            if outcome and manifest is not None and not history_complete(run.folder):
                finish_interrupted(job, manifest.step)
        except RunError as caught:
            outcome = str(caught)
    outcome = world.broadcast(outcome)
    if isinstance(outcome, str):
        raise RunError.read(outcome)
    return outcome


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


# -- notes -------------------------------------------------------------------------------------------------------------


def remarks(job: Job) -> list[str]:
    """Return notes on a run's data and model config that need no refusal. Errors: `RunError` if the cache cannot be
    written."""
    run, task, prepared = job.run, job.task, job.data
    idle = [note for note in idle_keys(job, prepared.facts) if applies(note, run)]
    about_data = [*too_few(job, prepared), *unused_links(job), *warnings(prepared.facts), *idle]
    about_files = source_files.notes(run.model, task.head, config_entries(job)) if run.model.source is not None else []
    about_config = [*config_checks.notes(run.model, task.head), *config_checks.unscaled_embeddings(run.model)]
    return [*about_data, *about_files, *about_config, *beyond_longrope(job)]


def too_few(job: Job, prepared: Prepared) -> list[str]:
    """Note that there are fewer examples than the batch size, so that a step is smaller."""
    run = job.run
    file = prepared.splits["train"]
    examples = sum(stream.read_index(Path(file))["examples"]) if file.endswith(STREAM) else examples_in(file)
    if examples >= run.batch_size:
        return []
    default = "" if run.wrote("batch_size") else " by default"
    return [
        f"batch_size is {run.batch_size:,}{default}, and train has {quantity(examples, 'example')}: every step "
        f"takes all of them, and an epoch is one step. batch_size={examples} has the same effect; a smaller one "
        "gives more steps per epoch"
    ]


def beyond_longrope(job: Job) -> list[str]:
    """Note that a LongRoPE model computes short texts differently if their batch also holds longer ones."""
    limit = config_checks.longrope_limit(job.run.model, job.task.head)
    columns = make_task(job).splits["train"] if limit is not None else None
    if limit is None or not isinstance(columns, Columns):
        return []
    beyond = int(np.count_nonzero(np.asarray(columns.lengths) > limit))
    if beyond in (0, len(columns)):
        return []
    return [
        f"the model's LongRoPE computes a batch with its long factors if one text has more than {limit:,} tokens, as "
        f"{beyond:,} of {len(columns):,} train examples do: results of shorter texts then depend on the texts beside "
        f"them, also in predictions. data.max_length={limit} truncates the longer ones"
    ]


def idle_keys(job: Job, facts: Mapping[str, Any]) -> list[str]:
    """Return notes on keys that have no effect with the task's other keys or these data."""
    run = job.run
    notes = job.task(run).idle_keys(facts)
    if facts.get("own_validation"):
        share = f"{run.data.validation_fraction:g}"
        notes.append(f"data.validation_fraction: {share} has no effect; the data have a validation split")
    return notes


def without_effect(job: Job, total: int, processes: int, on_cpu: bool) -> list[str]:
    """Return notes on keys that have no effect with this run's other keys, number of steps (`total`) and number of
    processes."""
    run, strategy, notes = job.run, job.strategy, list[str]()
    if later := [step for step in run.checkpoint.at if step > total]:
        notes.append(f"checkpoint.at: {', '.join(map(str, later))} are after the last step, {total}")
    sharded = strategy.memory.needs_choice(job) or shard_recovery(strategy) is not None
    whole = f"under {run.strategy.name}, where each rank has a whole copy"
    idle = {
        "launch.replicate_every": None if sharded else whole,
        "launch.rebalance_every": "on one process" if processes == 1 else None,
        "launch.processes_per_gpu": "on CPUs" if on_cpu else None,
        "model.compile_lengths": None if run.model.compile == "whole" else "without model.compile=whole",
        "model.cuda_graphs": None if run.model.compile == "whole" else "without model.compile=whole",
        "hub.private": None if run.hub.push_to else "without hub.push_to",
        "profile.after": None if run.profile.steps else "without profile.steps",
        "sdc_check.on_difference": None if run.sdc_check.every else "without sdc_check.every",
        "track.close_timeout_s": None if {*run.track.to} - {"jsonl"} else "without a tracker (track.to)",
    }
    return notes + [f"{key} has no effect {what}" for key, what in idle.items() if what and run.wrote(key)]


def unused_links(job: Job) -> list[str]:
    """Note that `strategy.all_reduce` has no effect."""
    strategy = job.run.strategy
    if strategy.all_reduce == "auto" or (strategy.exact and job.strategy.facts.chooses_links):
        return []
    how = f"{strategy.name}{' and exact: false' * (not strategy.exact)}"
    return [f"strategy.all_reduce: {strategy.all_reduce} has no effect with {how}"]
