"""Statistics of a run for `lockstep plan`: data, model, steps, tokens per step, and estimated memory.

In: a run, its prepared data and the number of processes. Out: rows of a table. The model is built on the meta
device, where it takes no memory; nothing is trained.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from lockstep.config import plugins
from lockstep.config.lazy import lazy
from lockstep.config.schedules import drawn
from lockstep.config.sections import OptimSection
from lockstep.data.cache import cache_folder, cached
from lockstep.data.job import Job
from lockstep.data.streamed import Streamed
from lockstep.distributed.system_metrics import capacity
from lockstep.distributed.world import pick_device
from lockstep.strategies.exact.stepper import assigned, state_bytes
from lockstep.strategies.exact.training_state import freeze
from lockstep.tasks.models import model_configs, storage_dtype
from lockstep.tasks.task import Task, make_task
from lockstep.training.data_loader import StepLoader
from lockstep.training.summary import data, in_millions, padding, selection_lines
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from lockstep.tasks.models import quantized
else:  # for 4-bit weights
    (quantized,) = lazy("lockstep.tasks.models", "quantized")

LOOKED_AT = 32  # evenly spaced steps whose tokens are counted


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
            *storage_dtype.counts(model),
            storage_dtype.count(model),
            state_bytes(run.optim, model),
            treatment(run.optim, model),
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


def units(feed: StepLoader) -> str:
    """Describe the tokens (or other length units) of a step, with and without padding."""
    last = 0 if isinstance(feed.columns, Streamed) else feed.total - 1  # later steps of a stream need other windows
    steps = np.unique(np.linspace(0, last, min(LOOKED_AT, feed.total)).astype(int))
    sampled = [feed.make(int(step)) for step in steps]
    real, padded = (sum(getattr(batch, name) for batch in sampled) for name in ("tokens", "padded"))
    share = f"{padded / real - 1:.0%}" if padded > real else "no"
    return f"about {real / len(sampled):,.0f} a step; {share} padding"


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
