"""Resolve a run into a job: make every decision and every refusal once, in the order of the lines here.

In: a run, the known facts about the machines, and the number of processes. Out: a frozen `Job`, or a `RunError`. `plan`
prints the job, and ranks receive it as text. They refuse only what their own machines or the built model show: the
memory of all machines, side effects of `forward`, what the plain comparison finds. This module belongs
to the rank, above tasks, strategies and checkpoints: it calls all of them, and a rank whose run was not resolved by a
launcher (torchrun by hand, a scheduler) calls it too. Imports no torch at the top: a machine that only submits jobs may
not have it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from lockstep.config import error_messages as messages
from lockstep.config import plugins
from lockstep.config.lazy import lazy
from lockstep.config.output_files import check_output
from lockstep.config.run import Run, RunError
from lockstep.config.sections import LaunchSection, ModelSection, StrategySection, TokenizerSection
from lockstep.config.written import naming_defaults, naming_lowered
from lockstep.data.job import OWN_ATTENTION, Job, Scope
from lockstep.distributed.hardware import gpus_of

if TYPE_CHECKING:
    from lockstep.checkpoint import hub_push, remote_sync
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.config import processor
    from lockstep.data import hub
    from lockstep.data.job import StrategyRules
    from lockstep.distributed.world import World
    from lockstep.strategies.engines import blocks, region, tensor_plans, zero_agreement
    from lockstep.strategies.exact import training_state
    from lockstep.strategies.optimizers import optimizer as optimizers
    from lockstep.tasks import own_metrics
    from lockstep.tasks.models import chunked_loss, model_configs, padding, quantized, source_files
else:  # most import torch
    hub_push, remote_sync = lazy("lockstep.checkpoint", "hub_push", "remote_sync")
    (processor,) = lazy("lockstep.config", "processor")
    (hub,) = lazy("lockstep.data", "hub")
    blocks, region, tensor_plans = lazy("lockstep.strategies.engines", "blocks", "region", "tensor_plans")
    (zero_agreement,) = lazy("lockstep.strategies.engines", "zero_agreement")
    (training_state,) = lazy("lockstep.strategies.exact", "training_state")
    (optimizers,) = lazy("lockstep.strategies.optimizers", "optimizer")
    (own_metrics,) = lazy("lockstep.tasks", "own_metrics")
    chunked_loss, model_configs, padding = lazy("lockstep.tasks.models", "chunked_loss", "model_configs", "padding")
    quantized, source_files = lazy("lockstep.tasks.models", "quantized", "source_files")

FILL_IN = "FILL-IN"  # placeholder in a converted run file for a value that the original lacks

Tell = Callable[[str, str], None]  # (label, text); the label is `checks` or `tokens`


class Starter(Protocol):
    """Interface of a launcher, as needed to resolve a run."""

    submits: ClassVar[bool]
    starts_all_ranks: ClassVar[bool]

    @classmethod
    def fewest_machines(cls, launch: LaunchSection) -> int | None:
        """Fewest machines with which a job continues after evicting one; None: it cannot evict machines."""

    @classmethod
    def loses_ranks(cls, launch: LaunchSection) -> bool:
        """Whether a job on one machine can continue without single ranks, according to its keys."""

    def check(self, plan: Any) -> None:
        """Refuse errors that can be detected before anything is started. Errors: `RunError`."""


@dataclass(frozen=True)
class Machine:
    """Facts that the resolving process knows about the ranks' machines."""

    like_this_one: bool = True  # same devices, kernels and packages as the ranks' machines
    has_rank_0: bool = True  # rank 0 is this process or runs on this machine, with its trackers and OUTPUT
    launcher: Starter | None = None  # None: this process is a rank
    plan: Any = None  # the launcher's `LaunchPlan`


def resolve(
    run: Run,
    machine: Machine,
    processes: int,
    scope: Scope = Scope.DATA,
    tell: Tell | None = None,
    data: Run | None = None,
) -> Job:
    """Decide and refuse everything that can be decided before a process group exists.

    `processes`: ranks over all machines; 0: unknown, because this rank joins a running job. `tell` receives where the
    tokens came from. `data`: the run whose data to use, if not this one's. Writes to the cache and, briefly, to the
    object store of `remote_dir`. Errors: `RunError`."""
    resolve_launch(run, machine, processes, scope)
    with naming_defaults(run):
        job = _options(run, machine, processes)
        notes = _output(job, scope) if scope >= Scope.OUTPUT else ()
        if scope == Scope.OPTIONS:
            _refuse_best(job)
            return job
        job = _data(job, data, tell, fresh=machine.launcher is not None)
        if machine.like_this_one:
            _refuse_sharding(job)
        job = replace(job, scope=scope, notes=(*notes, *job.notes))
        return job if scope < Scope.OUTPUT else replace(job, newest=newest_checkpoint(job))


def resolve_launch(run: Run, machine: Machine, processes: int, scope: Scope) -> None:
    """Refuse errors that the run file and the launcher alone reveal. On a submitting machine without torch, only this
    runs; the ranks resolve the rest. Errors: `RunError`."""
    with naming_defaults(run):
        if scope > Scope.OPTIONS:  # `init --from` resolves the options of run files with placeholders
            _refuse_placeholders(run.model_dump(mode="json"))
        if processes and run.strategy.options:
            zero_agreement.check(run, processes)  # reports all its errors in one message
        if machine.launcher is not None and (scope == Scope.START or not machine.launcher.submits):
            machine.launcher.check(machine.plan)
            if scope in (Scope.DATA, Scope.START) and not machine.launcher.submits:
                _refuse_missing_gpu(run.launch)


def _refuse_missing_gpu(launch: LaunchSection) -> None:
    """Refuse to start ranks on GPUs that are not there; `lockstep plan` serves other machines. Errors: `RunError`."""
    if launch.device == "cuda" and not gpus_of(launch):
        raise RunError(
            "LS5250",
            "launch.device: cuda, but this machine has no CUDA device that torch can use; set launch.device=cpu, or "
            "run it on a machine with a GPU (`lockstep doctor` shows what torch sees)",
        )


def _refuse_placeholders(values: dict[str, Any]) -> None:
    """Refuse placeholders left by `lockstep init --from` in a run's values. Errors: `RunError`."""
    left = [key for key, value in messages.flat(values).items() if value == FILL_IN]
    if left:
        raise RunError("LS5130", f"{left[0]}: {FILL_IN} is a placeholder; set {', '.join(left)}")


def _options(run: Run, machine: Machine, processes: int) -> Job:
    """Make the decisions that depend only on the run file and the installed packages. Errors: `RunError`."""
    job = Job.of(run, processes)
    for name in run.track.to if machine.has_rank_0 else ():
        tracker: Any = plugins.of_key("track.to", "track", name)
        tracker.check()

    _make_source(run.model, run.tokenizer)
    kernel, place, exact = run.model.attention, run.launch.device, bool(run.strategy.exact)
    model_configs.check_attention(kernel, place, run.precision, machine.like_this_one, exact)
    if job.task.chunks_loss:
        chunked_loss.check(job)
    run.check_shared(processes, f"launch: {processes} processes")
    if processes:
        _refuse_strategy(job)
    if job.run.model.changes_layers or job.run.model.compiled:
        blocks.check(job, machine.like_this_one)
    _refuse_unportable(job, machine.like_this_one)
    if run.remote_dir is not None:
        remote_sync.require_extra(run.remote_dir)
    return replace(job, scope=Scope.OPTIONS)


def _make_source(model: ModelSection, tokenizer: TokenizerSection) -> None:
    """Make the model of a checkpoint that `model.source` names, whose config decides what strategies refuse. Errors:
    `RunError`."""

    source = model.source
    if source is None or hub.parts(Path(source).expanduser())[1] is None:
        return
    if not Path(hub.model_folder(source)).is_dir() or not Path(source).expanduser().exists():
        from lockstep.training.checkpoint_model import fetch

        fetch(model, tokenizer)


def _refuse_best(job: Job) -> None:
    """Refuse, without data, a `checkpoint.best` that is no metric of the task; `check_best` knows more.
    Errors: `RunError`."""
    from lockstep.checkpoint.manifest import unknown_metric

    run, best = job.run, job.run.checkpoint.best
    if best is None or run.metrics or best.startswith("-loss_"):
        return
    if (names := job.task(run).score_names()) is not None and best.removeprefix("-") not in {*names, "examples"}:
        raise unknown_metric(best, names)


def resolve_strategy(run: Run, processes: int) -> type[StrategyRules]:
    """Return the strategy's class, after each of its parts has refused unsupported keys. Errors: `RunError`."""
    job = Job.of(run, processes)
    _refuse_strategy(job)
    return job.strategy


def _refuse_strategy(job: Job) -> None:
    """Let the strategy and each of its parts refuse unsupported keys. Errors: `RunError`."""

    run, strategy = job.run, job.strategy
    _refuse_features(job)
    optimizers.check(job)
    training_state.check_masters(job)
    if run.model.quantization is not None:
        quantized.check(job)
    training_state.check_average(job)
    strategy.check(job)
    if run.strategy.exact and (keys := strategy.inexact_options(run.strategy)):
        raise RunError(
            "LS5138",
            f"{keys[0]}: it changes the arithmetic compared to one process, so results depend on the number of "
            "processes; set strategy.exact=false to accept that, or remove it",
        )
    if run.strategy.tensor_leaves > 1:
        tensor_plans.check(job)
    plugins.refuse_old(["torch", "transformers", "tokenizers", *packages_of(job)])
    if (option := _samples(job)) is not None and (not option or run.wrote(f"task.{option[0]}")):
        task: Any = job.task
        raise RunError(
            "LS5131",
            f"strategy.name: under {run.strategy.name} evaluations can generate texts greedily only; {task.greedy_by}",
        )


def _samples(job: Job) -> tuple[str, Any] | tuple[()] | None:
    """Return the task's option for greedy decoding and its value (`()` if it has none) if evaluations would sample or
    search beams and the strategy does not support that; else None."""
    from lockstep.strategies.strategy import Strategy
    from lockstep.tasks.task import Generates

    own = issubclass(job.strategy, Strategy) and job.strategy.generate is not Strategy.generate
    task = job.task(job.run)
    if own or not isinstance(task, Generates) or task.decodes_greedily():
        return None
    return task.greedy_option or ()


def _greedy(job: Job) -> tuple[Job, list[str]]:
    """Switch off sampling or beam search in evaluations if they are defaults that the strategy does not support.
    Returns the job and a note; `_refuse_strategy` has refused written values."""
    if not (option := _samples(job)):
        return job, []
    name, value = option
    run = job.run
    default = job.task(run).options.model_dump()[name]
    note = (
        f"task.{name} is {value:g}, because evaluations under {run.strategy.name} can generate texts greedily only; "
        f"its default is {default:g}"
    )
    return replace(job, run=run.with_keys("task", **{name: value})), [note]


def packages_of(job: Job) -> list[str]:
    """Packages that a run computes with, besides torch, transformers and tokenizers."""
    model = job.run.model
    of_model = ["peft"] * bool(model.adapter) + ["bitsandbytes"] * bool(model.quantization)
    return [*job.strategy.needs, *of_model, *job.optimizer.packages]


RECOMPUTES = "use ddp or a strategy like it, fsdp2 with gather: step, or zero with strategy.exact=true"
WHOLE_COPIES = "use a strategy whose ranks each hold the whole model, such as ddp, or fsdp2 with gather: step"


def launcher_class(launch: LaunchSection) -> type[Starter]:
    """Class of the launcher that the run file names. Errors: `PluginError`."""
    cls: Any = plugins.find("launchers", launch.name)
    return cls


def _refuse_features(job: Job) -> None:
    """Refuse silent-corruption checks, rebalancing and peer checkpoints if the strategy or launcher does not support
    them. Refusals that depend on the machines' memory come later. Errors: `RunError`."""
    from lockstep.strategies.single import ReplicatedStrategy
    from lockstep.strategies.strategy import recomputes, shard_recovery

    run, strategy = job.run, job.strategy
    check, launch, name = run.sdc_check, run.launch, run.strategy.name
    later = strategy.memory.needs_choice(job)
    parts = not later and not issubclass(strategy, ReplicatedStrategy)
    if check.every and check.on_difference == "evict":
        launcher = launcher_class(run.launch)
        if launcher.fewest_machines(launch) is None and not launcher.loses_ranks(launch):
            raise RunError(
                "LS5132",
                "sdc_check.on_difference: evict continues without the faulty rank or machine, which needs "
                "launch.name=torchrun with launch.machines as fewest:most and launch.on_rank_failure=restart, "
                "or, on one machine, launch.on_rank_failure=continue with launch.name=local or torchrun. This "
                f"run (launch.name={launch.name}) has neither; use stop or retry",
            )
    if check.every and not later and not recomputes(job):
        raise RunError(
            "LS5133",
            f"sdc_check.every: {name} shards the model with these options, so another rank cannot repeat the "
            f"computation of a rank; {RECOMPUTES}",
        )
    if launch.rebalance_every and parts:
        raise RunError(
            "LS5134",
            f"launch.rebalance_every: {name} shards the model with these options, so its ranks must process "
            f"equal numbers of micro-batches; {WHOLE_COPIES}",
        )
    if launch.rebalance_every and not run.strategy.exact:
        raise RunError(
            "LS5135",
            "launch.rebalance_every: with strategy.exact=false the result depends on the distribution of "
            "micro-batches; set strategy.exact=true",
        )
    recovery = shard_recovery(strategy)
    if launch.replicate_every and recovery is not None and not recovery.rebuilds:
        raise RunError(
            "LS5136",
            f"launch.replicate_every: with these options {name} uses Accelerate's engine, which cannot be "
            "rebuilt within a process, so a failed rank restarts the job; remove it, or use "
            "strategy.name=fsdp2",
        )


def ends_with_a_rank(job: Job) -> str | None:
    """Explain, as far as the job reveals it, why a failed rank ends the others too; None if it does not.
    `training/recovery/` adds reasons that depend on device and model."""
    from lockstep.strategies.strategy import Strategy, shard_recovery

    run, strategy = job.run, job.strategy
    later = strategy.memory.needs_choice(job)
    assert issubclass(strategy, Strategy), strategy
    recovery = shard_recovery(strategy)
    shards = recovery is not None and recovery.rebuilds and recovery.survives(job)
    whole = recovery is None and strategy.recovery is not None and job.same_bits
    if not (later or shards or whole):
        return f"strategy {run.strategy.name} does not keep the whole state on every rank"
    if run.average.ema is not None or job.optimizer.averages:
        return "weights are averaged"
    if run.remote_dir is not None:
        return "checkpoints are mirrored by rank 0"
    return "the model is compiled" if run.model.compiled else None


def shards_this_model(strategy: StrategySection) -> RunError:
    """Return the error for a strategy that shards this model, so that no other rank can repeat a computation."""
    return RunError("LS5150", f"sdc_check.every: {strategy.name} shards this model; {RECOMPUTES}")


def _refuse_sharding(job: Job) -> None:
    """Refuse `sdc_check` if the memory of this machine makes the strategy shard the model; another machine may have
    less. GPUs are left to the ranks. Errors: `RunError`."""
    from lockstep.strategies.strategy import recomputes

    run, strategy = job.run, job.strategy
    if not run.sdc_check.every or not job.processes or gpus_of(run.launch):
        return
    if not strategy.memory.needs_choice(job):
        return
    from torch import device

    from lockstep.distributed.system_metrics import capacity
    from lockstep.strategies.exact.training_state import freeze
    from lockstep.tasks.models.storage_dtype import counts
    from lockstep.tasks.task import make_task

    here = run.launch.processes if isinstance(run.launch.processes, int) else 1  # ranks of this machine, at least
    memory = capacity(device("cpu"), min(here, job.processes))
    sizes = counts(freeze(run.model, make_task(job).model(empty=True)))
    chosen = job.having(strategy.memory.choose(job, *sizes, memory))
    if not recomputes(chosen):
        raise shards_this_model(run.strategy)


def refuse_eviction(job: Job, why: str | None) -> None:
    """Refuse `sdc_check.on_difference: evict` if neither machines nor ranks can be removed. `why`: why a failed rank
    ends the others. Errors: `RunError`."""
    check = job.run.sdc_check
    if why is None or not check.every or check.on_difference != "evict":
        return
    if launcher_class(job.run.launch).fewest_machines(job.run.launch) is None:
        raise RunError("LS5154", f"sdc_check.on_difference: evict cannot remove a rank here ({why}); use stop or retry")


def _refuse_unportable(job: Job, like_this_one: bool) -> None:
    """Refuse, under `strategy.exact: portable`, operations whose bits differ between processors. Errors: `RunError`."""
    run = job.run
    if run.strategy.exact != "portable":
        return

    why: dict[str, str | None] = {
        f"launch.device: {run.launch.device}": "a GPU is not an x86-64 processor" if gpus_of(run.launch) else None,
        "model.compile": "its code is compiled for this processor" if run.model.compiled else None,
        "model.quantization": "its kernels depend on the processor" if run.model.quantization else None,
        f"optim.name: {run.optim.name}": "its kernels depend on the processor" if "8bit" in run.optim.name else None,
        f"strategy.name: {run.strategy.name}": None
        if job.same_bits
        else "with these options it is not bitwise equal to one process even on one processor",
    }
    for key, reason in why.items():
        if reason is not None:
            raise RunError(
                "LS5140", f"strategy.exact: portable does not support {key}: {reason}; set strategy.exact=true"
            )
    if like_this_one:
        processor.refuse()


def _output(job: Job, scope: Scope) -> tuple[str, ...]:
    """Check that results can be written to OUTPUT, the object store and the Hub. Returns notes. Errors: `RunError`."""

    run = job.run
    pushes = scope == Scope.START and run.hub.push_to is not None
    notes = hub_push.check(run.folder, run.hub, lambda: _config_sizes(run.model, run.tokenizer)) if pushes else []
    notes += remote_sync.check(job) if run.remote_dir is not None else []
    check_output(run.folder)
    return tuple(notes)


def _config_sizes(model: ModelSection, tokenizer: TokenizerSection) -> dict[str, Any]:
    """Return the entries of the model's config that do not depend on the data; empty if no model config is exported."""
    if (model.adapter or {}).get("export") == "adapter" or not (model.source or model.type):
        return {}
    config = model_configs.load_config(model).to_dict()
    return {key: value for key, value in config.items() if key != "vocab_size" or tokenizer.train is None}


def _data(job: Job, data: Run | None, tell: Tell | None, fresh: bool) -> Job:
    """Prepare the data and tokens, and make the decisions that depend on them and the model. `data`: the run whose data
    to use, if not this one's. `fresh`: query the Hub again. Errors: `RunError`."""
    from lockstep.data.prepare import prepare
    from lockstep.data.source import names_hub

    task: Any = job.task
    if names_hub(job.run.data, job.run.model.source, job.run.tokenizer.source):
        hub.be_brief()
    edits: list[str] = []
    if job.run.model.source is not None or job.run.tokenizer.source is not None:
        from lockstep.training.checkpoint_model import fetch

        edits = fetch(job.run.model, job.run.tokenizer)
    run, notes = task(job.run).fit_defaults()
    data = run if data is None else task(data).fit_defaults()[0]
    label = "checks" if task.own_model else "tokens"
    with naming_lowered(notes):
        prepared = prepare(data, task, fresh, None if tell is None else lambda text: tell(label, text))
        task(run).check_prepared(prepared)
    job = replace(job, run=run, prepared=prepared)
    if task.head is not None and run.model.source is not None:  # the cache of `prepare` does not depend on the weights
        source_files.check(run.model, task.head, config_entries(job))
    job.strategy.check_prepared(job)
    check_names(job)
    check_best(job, own_metrics.check(job) if run.metrics else ())
    check_average(job)
    job, greedily = _greedy(job)
    run, more = _compiled(job)
    choice = model_configs.ModelChoice.of(run)
    why = "the task pads" if task.head is None else padding.unsupported_reason(choice, task.head)
    attention = model_configs.UNPADDED if why is None else run.model.attention or OWN_ATTENTION
    job = replace(job, run=run, padding=why, attention=attention, notes=(*edits, *notes, *greedily, *more))
    refuse_eviction(job, ends_with_a_rank(job))
    return job


def check_names(job: Job) -> None:
    """Refuse patterns of parameter names that match nothing, and optimizers without a weight. Errors: `RunError`."""
    run = job.run
    if run.model.freeze or run.optim.groups or run.optim.layerwise_lr_decay < 1 or job.optimizer.selective:
        from lockstep.strategies.exact.stepper import check_weights
        from lockstep.tasks.task import make_task

        check_weights(run.optim, training_state.freeze(run.model, make_task(job).model(empty=True)))


def check_best(job: Job, own: Sequence[str]) -> None:
    """Refuse a `checkpoint.best` that no evaluation of the task computes. `own`: metrics of the user's functions.
    Errors: `RunError`."""
    if (best := job.run.checkpoint.best) is None:
        return
    from lockstep.checkpoint.manifest import unknown_metric
    from lockstep.tasks.task import make_task

    task = make_task(job)
    if (names := task.possible_scores()) is None:
        return
    of_sources = [f"loss_{name}" for name in task.sources(task.splits["validation"])]
    if best.removeprefix("-") not in (known := [*names, *of_sources, *own, "examples"]):
        raise unknown_metric(best, known)


def check_average(job: Job) -> None:
    """Refuse a run that writes fewer checkpoints than `average.last` averages. Errors: `RunError`."""
    run = job.run
    if run.average.last is None:
        return
    from torch import device

    from lockstep.checkpoint.manifest import averaged
    from lockstep.tasks.task import make_task
    from lockstep.training.data_loader import StepLoader

    feed = StepLoader(make_task(job), [], device("cpu"))
    every = feed.interval(run.checkpoint.every)
    if (there := len(averaged(run.average.last, feed.total, every))) < run.average.last:
        raise RunError(
            "LS5060",
            f"average.last: {run.average.last} checkpoints are averaged, but a run of {feed.total:,} steps "
            f"with a checkpoint every {every:,} steps has {there}; lower average.last or checkpoint.every",
        )


def config_entries(job: Job) -> Mapping[str, Any]:
    """Return the config entries that the task sets in its model, such as the labels of its head. Errors: `RunError`."""
    from lockstep.tasks.task import make_task

    return {} if job.task.head is None else make_task(job).config_entries


def _compiled(job: Job) -> tuple[Run, list[str]]:
    """Decide `model.compile`; return the run and notes. A resumed run computes as its checkpoint did. Errors:
    `RunError` if the run file asks for something impossible."""
    run = job.run
    if run.model.compile not in ("whole", "auto") or job.task.own_model:  # `module` has no keys of `model`
        return run, []
    from lockstep.checkpoint.manifest import Manifest, candidates

    before = next((each for _, each in candidates(run.folder) if isinstance(each, Manifest)), None)
    then = None if before is None else before.arithmetic.get("model.compile")
    if run.model.compile == "auto" and (then is False or (then != "whole" and not gpus_of(run.launch))):
        return run.with_keys("model", compile=False), []
    from torch import device

    from lockstep.tasks.task import make_task
    from lockstep.training.data_loader import StepLoader

    task = make_task(job)
    feed = StepLoader(task, [], device("cpu"))
    return region.decided(job, task, feed.total, feed.equal_sizes(), {} if before is None else before.arithmetic)


def fitted(run: Run) -> Run:
    """Return the run as its job will have it, with defaults that fit the model. Unchanged on a machine without
    torch."""
    if importlib.util.find_spec("torch") is None:
        return run
    job = Job.of(run)
    return _greedy(replace(job, run=job.task(run).fit_defaults()[0]))[0].run


def newest_checkpoint(job: Job) -> Manifest | None:
    """Return the checkpoint in OUTPUT from which the job resumes, or None. Errors: `RunError` if OUTPUT or the object
    store holds another run, or only unusable checkpoints."""
    from lockstep.checkpoint.manifest import check_resumable

    manifest = check_resumable(job)
    if job.run.remote_dir is not None:
        remote_sync.check_other(job)
    return manifest


def for_rank(job: Run | Job, world: World, data: Run | None = None) -> Job:
    """Return a rank's job: the one it received, if its data are still intact on this machine, else the run resolved
    here. Errors: `RunError`."""
    # transformers may import DeepSpeed, which otherwise prints messages
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    if isinstance(job, Job):
        if (world.joining or job.processes == world.size) and not job.data.damages():
            return job
        job = job.run  # fewer machines than planned, or the cache was cleared
    return resolve(job, Machine(has_rank_0=world.rank == 0), 0 if world.joining else world.size, data=data)
