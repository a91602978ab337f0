"""Statistics of a run before it starts: data, model, steps, tokens per step, and estimated memory.

In: a run, its prepared data and the number of processes. Out: facts for `lockstep plan`. The model is built on the meta
device, where it takes no memory; nothing is trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lockstep.checkpoint.manifest import averaged, unknown_metric
from lockstep.config import plugins
from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.config.schedules import drawn
from lockstep.config.sections import OptimSection
from lockstep.config.written import applies
from lockstep.data.arrow_cache import Columns, Prepared, examples_in
from lockstep.data.cache import STREAM, cache_folder, cached
from lockstep.data.job import Job
from lockstep.data.prepare import left_out, warnings
from lockstep.data.streamed import Streamed
from lockstep.distributed.system_metrics import capacity
from lockstep.distributed.world import World, pick_device
from lockstep.strategies.exact.stepper import assigned, state_bytes
from lockstep.strategies.exact.training_state import freeze
from lockstep.strategies.strategy import shard_recovery
from lockstep.tasks.models import config_checks, model_configs, storage_dtype
from lockstep.tasks.task import Task, make_task
from lockstep.training.data_loader import StepLoader
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.data import stream
    from lockstep.tasks.models import quantized, source_files
else:  # for streamed data; for 4-bit weights, for a pretrained model
    (stream,) = lazy("lockstep.data", "stream")
    quantized, source_files = lazy("lockstep.tasks.models", "quantized", "source_files")

PART = 17  # combined with the seed, so that the validation subset has its own random stream
LOOKED_AT = 32  # evenly spaced steps whose tokens are counted


def in_millions(count: int) -> str:
    """Format a number of parameters, such as 22.71M; small numbers in full."""
    return f"{count / 1e6:.2f}M" if count >= 10_000 else f"{count:,}"


def facts(job: Job) -> dict[str, str]:
    """Rows of the table that `lockstep plan` prints."""
    run, task = job.run, make_task(job)
    feed = StepLoader(task, [], torch.device("cpu"))
    of = model_facts(task)
    frozen = of.every - of.trained
    of_them = f", {in_millions(of.trained)} trained, {frozen:,} frozen" if frozen else ""
    return {
        "model": f"{task.origin}, {in_millions(of.every)} parameters{of_them}",
        "data": data(task),
        **feed.mixture,
        "length": length(feed),
        "rate": drawn(run.optim, feed.total),
        "optimizer": of.treatment,
        **({task.unit: units(feed)} if task.unit else {}),
        **padding(task),
        **selection_lines(task),
        "memory": memory(job, of.every, of.trained, of.packed, of.state_bytes),
    }


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model's weights for a plan."""

    every: int  # all parameters
    trained: int
    packed: int  # parameters stored in 4 bits
    state_bytes: float  # optimizer state per trained parameter
    treatment: str  # description of the optimizer's groups


def model_facts(task: Task) -> ModelFacts:
    """Compute the facts from a model without weights. Cached for a built-in task with one of transformers' own models,
    whose import takes longer than the rest of a plan. Errors: `RunError`."""

    run = task.run

    def computed() -> ModelFacts:
        model = freeze(run.model, task.model(empty=True))
        return ModelFacts(
            *counts(model), storage_dtype.count(model), state_bytes(run.optim, model), treatment(run.optim, model)
        )

    own_code = run.model.trust_remote_code or not task.built_in()
    if task.head is None or own_code or run.optim.name not in plugins.built_in("optimizers"):
        return computed()
    keys = run.model_dump(mode="json", include={"model", "task", "optim", "tokenizer"})
    data = [task.prepared.key, task.prepared.tokenizer, task.prepared.facts]
    key_parts = [keys, model_configs.load_config(run.model).to_dict(), data, _versions(), _code()]
    key = hashlib.sha256(json.dumps(key_parts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def make(aside: Path) -> None:
        aside.write_text(json.dumps(asdict(computed())))

    return ModelFacts(**json.loads(cached(cache_folder() / "sizes" / f"{key}.json", make).read_text()))


def _versions() -> list[str]:
    return [f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "bitsandbytes") if find_spec(name)]


def _code() -> str:
    """Hash of the source code that builds models and groups their weights."""
    ours = Path(__file__).parents[1]
    files = sorted(path for name in ("tasks", "strategies") for path in (ours / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in [*files, Path(__file__)])).hexdigest()


def counts(model: nn.Module) -> tuple[int, int]:
    """(parameters, trained parameters) of a model."""
    return storage_dtype.parameters(model), sum(p.numel() for p in model.parameters() if p.requires_grad)


def resolve_by_memory(job: Job, task: Task, world: World) -> Job:
    """Return the job with the strategy options that depend on the machines' memory filled in; equal on every rank.
    Collective."""
    run, estimate = job.run, job.strategy.memory
    if not estimate.needs_choice(job):
        return job
    memory = min(world.all_gather(capacity(world.device, world.local_size)))
    here = replace(job, processes=world.size)
    return job.having(estimate.choose(here, *counts(freeze(run.model, task.model(empty=True))), memory))


def check_names(job: Job) -> None:
    """Refuse patterns of parameter names that match nothing, before any process starts. Errors: `RunError`."""
    run = job.run
    if run.model.freeze or run.optim.groups or run.optim.layerwise_lr_decay < 1:
        assigned(run.optim, freeze(run.model, make_task(job).model(empty=True)))


def treatment(optim: OptimSection, model: nn.Module) -> str:
    """Describe the optimizer, and the parameter tensors with a learning rate, decay or rule of their own."""
    counts: dict[str, int] = {}
    for how in assigned(optim, model).values():
        kind = f" ({how.kind})" if how.kind else ""
        text = f"{kind} at rate {how.scale * optim.learning_rate:.3g}, decay {how.decay:g}"
        counts[text] = counts.get(text, 0) + 1
    rows = [f"{quantity(count, 'tensor')}{text}" for text, count in counts.items()]
    more = f"; {len(rows) - 6} more groups" if len(rows) > 6 else ""
    return f"{optim.name}: {'; '.join(rows[:6])}{more}"


def data(task: Task) -> str:
    """Describe the source and number of examples."""
    sizes = ", ".join(f"{len(columns):,} {split}" for split, columns in task.splits.items())
    mean = f"; mean {task.splits['train'].mean_length:.1f} {task.unit}" if task.unit else ""
    return f"{task.prepared.facts['source']}: {sizes} examples{mean}{left_out(task.prepared.facts)}"


def check_best(job: Job, own: Sequence[str]) -> None:
    """Refuse a `checkpoint.best` that no evaluation of the task computes. `own`: metrics of the user's functions.
    Errors: `RunError`."""
    if (best := job.run.checkpoint.best) is None:
        return
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
    feed = StepLoader(make_task(job), [], torch.device("cpu"))
    every = feed.interval(run.checkpoint.every)
    if (there := len(averaged(run.average.last, feed.total, every))) < run.average.last:
        raise RunError(
            "LS5060",
            f"average.last: {run.average.last} checkpoints are averaged, but a run of {feed.total:,} steps "
            f"with a checkpoint every {every:,} steps has {there}; lower average.last or checkpoint.every",
        )


def steps_of(job: Job) -> int:
    """Number of optimizer steps of a run."""
    return StepLoader(make_task(job), [], torch.device("cpu")).total


def length(feed: StepLoader) -> str:
    """Describe steps, epochs, and the number of evaluations and checkpoints."""
    run = feed.task.run
    each = feed.order.steps_per_epoch
    evaluations = (feed.total - 1) // every if (every := feed.interval(run.evaluate.every)) else 0
    epochs = quantity(f"{feed.total / each:.4g}", "epoch")
    return (
        f"{feed.total:,} steps of {min(run.batch_size, feed.order.examples):,} examples: "
        f"{epochs} of {quantity(each, 'step')}; "
        f"{quantity(evaluations or 'no', 'evaluation')} during training"
    )


def too_few(job: Job, prepared: Prepared) -> list[str]:
    """Note that there are fewer examples than the batch size, so that a step is smaller."""
    run = job.run
    file = prepared.splits["train"]
    examples = sum(stream.read_index(Path(file))["examples"]) if file.endswith(STREAM) else examples_in(file)
    if examples >= run.batch_size:
        return []
    default = "" if run.wrote("batch_size") else " by default"
    return [
        f"batch_size is {run.batch_size:,}{default}, and train has {examples:,} examples: every step takes all of "
        f"them, and an epoch is one step. batch_size={examples} has the same effect; a smaller one gives more steps "
        "per epoch"
    ]


def remarks(job: Job) -> list[str]:
    """Return notes on a run's data and model config that need no refusal. Errors: `RunError` if the cache cannot be
    written."""
    run, task, prepared = job.run, job.task, job.data
    idle = [note for note in idle_keys(job, prepared.facts) if applies(note, run)]
    about_data = [*too_few(job, prepared), *unused_links(job), *warnings(prepared.facts), *idle]
    about_files = source_files.notes(run.model, task.head, config_entries(job)) if run.model.source is not None else []
    return [*about_data, *about_files, *config_checks.notes(run.model, task.head), *beyond_longrope(job)]


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


def config_entries(job: Job) -> Mapping[str, Any]:
    """Return the config entries that the task sets in its model, such as the labels of its head. Errors: `RunError`."""
    return {} if job.task.head is None else make_task(job).config_entries


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


def units(feed: StepLoader) -> str:
    """Describe the tokens (or other length units) of a step, with and without padding."""
    last = 0 if isinstance(feed.columns, Streamed) else feed.total - 1  # later steps of a stream need other windows
    steps = np.unique(np.linspace(0, last, min(LOOKED_AT, feed.total)).astype(int))
    sampled = [feed.make(int(step)) for step in steps]
    real, padded = (sum(getattr(batch, name) for batch in sampled) for name in ("tokens", "padded"))
    share = f"{padded / real - 1:.0%}" if padded > real else "no"
    return f"about {real / len(sampled):,.0f} a step; {share} padding"


def padding(task: Task) -> dict[str, str]:
    """Explain why padding is computed although the run requests none; empty if it is not."""
    why = task.padded_because if task.run.data.padding == "none" and task.head is not None else None
    return {"padding": f"computed, as with data.padding=batch: {why}"} if why else {}


def validation_rows(task: Task, columns: Columns) -> np.ndarray | None:
    """Validation examples that evaluations use, drawn with the seed: int64. None: all."""
    run = task.run
    most = run.evaluate.limit
    if most is None or most >= len(columns):
        return None
    return np.sort(np.random.default_rng([run.seed, PART]).permutation(len(columns))[:most])


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


def memory(job: Job, every: int, trained: int, packed: int = 0, state: float | None = None) -> str:
    """Estimate the memory of a process by a formula. `every`: all parameters; `packed`: those in 4 bits; `trained`:
    trained ones; `state`: optimizer state per trained parameter."""
    run = job.run
    sizes, note = bytes_by_kind(job, every, trained, packed, state)
    parts = ", ".join(f"{name} {size(each)}" for name, each in sizes.items() if each or name != "partial sums")
    of_layers = " of one layer at a time" * run.model.checkpoint_activations
    place = " (those of layers are moved to host memory)" * run.model.offload_activations
    return (
        f"about {size(sum(sizes.values()))} a process ({parts}){note}; excludes activations{of_layers}{place}, "
        "communication buffers and libraries"
    )


def bytes_by_kind(job: Job, every: int, trained: int, packed: int, state: float | None) -> tuple[dict[str, float], str]:
    """Estimated bytes by kind, and a note on options chosen for them."""
    run, estimate, note = job.run, job.strategy.memory, ""
    if estimate.needs_choice(job):
        run = estimate.choose(job, every, trained, capacity(pick_device(run.launch, run.precision, 0), job.processes))
        job = job.having(run)
        note = f"; gather: {run.strategy.options['gather']}, by the memory of this machine"
    estimate = job.strategy.memory
    each = estimate.bytes_held(job, state) | {"partial sums": estimate.partial_sums(job)}
    # an adapter's base has frozen bfloat16 matrices; its float32 vectors are few
    low = 0.5 if run.model.adapter and run.model.dtype == "bfloat16" else 1.0  # relative to float32
    weights = trained + low * (every - trained - packed) + (quantized.BYTES / 4 * packed if packed else 0)
    return {name: bytes_ * (weights if name == "weights" else trained) for name, bytes_ in each.items()}, note


def shortage(job: Job, there: float) -> str | None:
    """Explain why a run cannot fit into a process's memory, by the lower bound of the formula, or return None if it
    may. Ignores engines that offload from the GPU to host memory."""
    if "offload" in str(job.run.strategy.options):
        return None
    of = model_facts(make_task(job))
    needed = sum(bytes_by_kind(job, of.every, of.trained, of.packed, of.state_bytes)[0].values())
    if needed <= there:
        return None
    return (
        f"memory: a process needs about {size(needed)} besides activations, and has {size(there)}: strategy=fsdp2 "
        "or pipeline divide it among more processes; model.adapter, model.quantization and optim.name=adamw_8bit or "
        "adafactor need less"
    )


def size(count: float) -> str:
    """Format bytes with a suitable unit."""
    for unit, power in (("GB", 9), ("MB", 6)):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def evaluated_at_once(task: Task) -> int:
    """Examples per evaluation batch on a rank."""
    return task.run.evaluate.batch_size or usual_batch(task)


def usual_batch(task: Task) -> int:
    """Default number of examples in a batch without backward; depends only on keys that determine the weights."""
    run = task.run
    return max(32, 4 * run.batch_size // run.micro_batches)
