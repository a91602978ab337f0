"""Before the first step, compare loss and gradient of a few examples with a plain transformers computation.

In: a session, and the raw rows kept by data preparation. Out: a description, or an error with both numbers and the
option that causes the difference, identified by disabling options one by one. The plain path is `lockstep.plain`: the
rows, the model's tokenizer, a padded batch, and a transformers model that shares the run's tensors, so that no second
model is in memory. The check leaves no gradients, files or changes to random generators.

As the judge of what is recorded later, it compares whole tensors and shares no code with `step_record.py`. The plain
path also measures the tolerance: in float32 by the effect of a change in the last bit of the weights, in half precision
by the effect of half precision on the plain path itself.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.lazy import lazy
from lockstep.config.run import Run
from lockstep.data import raw_rows
from lockstep.data.streamed import Streamed
from lockstep.distributed.randomness import seed_everything
from lockstep.plain.losses import batch_loss
from lockstep.plain.rows import NotCovered
from lockstep.strategies.engines.side_effects import preserved
from lockstep.strategies.exact.training_state import make_model
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task
from lockstep.track.busy import ACTIVITY
from lockstep.training import plain_sides
from lockstep.training.errors import TrainingFailed
from lockstep.training.plain_sides import (
    Elsewhere,
    OtherTokens,
    PlainFailed,
    Sides,
    device_of,
    drawn_examples,
    masked,
    perturbed,
    plain_path,
    sides_of,
    without_dropout,
)
from lockstep.training.session import Session

if TYPE_CHECKING:
    from lockstep.strategies.engines import blocks
else:  # for a difference
    (blocks,) = lazy("lockstep.strategies.engines", "blocks")

_NEW_WEIGHTS = ("model.adapter", "model.quantization")  # disabling them changes the set of weights


def cause(sides: Sides, strategy: Strategy) -> str:
    """Describe the option that causes the difference."""
    if sides.task.own_model:
        return (
            "Your own functions, called directly, give other results than the run: check task.loss (a mean or a sum "
            "over targets?), task.targets and task.collate"
        )
    if (text := _of_examples(sides)) is not None:
        return text
    try:
        anew = not plain_differences(_sides(sides, "", sides.run.model_dump(mode="json")), strategy)
    except Exception:  # the model cannot be built a second time
        anew = False
    if anew:
        return (
            "A second model built from the same run file matches transformers, so this one was changed after it was "
            "built"
        )
    tried = []
    for key, values in _without(sides.task):
        try:
            agrees = not plain_differences(_sides(sides, key, values), strategy)
        except Exception:  # the run requires this option
            continue
        tried.append(key)
        if agrees:
            return f"{key} causes the difference: without it both are equal"
    rest = f" Switching off each of {', '.join(tried)} did not remove it." if tried else ""
    return f"No option of the run file causes the difference.{rest} Check the loss, the labels and the model's family"


def _of_examples(sides: Sides) -> str | None:
    """Describe the first difference in the tokens of an example, or return None."""
    if len(sides.examples) != len(sides.at):
        return (
            f"The number of examples differs: {len(sides.at)} here, {len(sides.examples)} by the model's "
            "tokenizer alone"
        )
    if "input_ids" not in sides.columns.names:
        return None
    tokens = sides.columns.ragged("input_ids")
    for place, example in zip(sides.at.tolist(), sides.examples, strict=True):
        own, plain = tokens.row(place).tolist(), example.get("input_ids")
        if isinstance(plain, list) and plain and isinstance(plain[0], int) and own != plain:
            return (
                f"The tokens of example {place} differ already: {str(own[:12])[:-1]}, ...] here, "
                f"{str(plain[:12])[:-1]}, ...] by the model's tokenizer alone (data.max_length, tokenizer, the cache)"
            )
    return None


def _without(task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield keys that may cause a difference, each with the run file that disables it."""

    run = task.run

    def other(section: str, key: str, value: Any) -> tuple[str, dict[str, Any]]:
        values: dict[str, Any] = run.model_dump(mode="json")
        values[section][key] = value
        return f"{section}.{key}", values

    if run.data.padding != "batch" and task.padded_because is None:
        yield other("data", "padding", "batch")
    if run.task.options.get("loss_chunk") is not None:
        yield other("task", "loss_chunk", None)
    if run.strategy.tensor_leaves > 1:
        yield other("strategy", "tensor_leaves", 1)
    for key in blocks.KEYS:
        if getattr(run.model, key):
            yield other("model", key, False)
    if run.model.quantization is not None:
        yield other("model", "quantization", None)
    if run.model.adapter:
        yield other("model", "adapter", {})
    if run.model.dtype != "float32":
        yield other("model", "dtype", "float32")
    yield other("model", "attention", None if run.model.attention else "eager")


def _sides(sides: Sides, key: str, values: dict[str, Any]) -> Sides:
    """Return the run's and the plain model for `values`, which lack the option `key`. They keep their weights if that
    option does not affect them."""
    run = Run.model_validate(values)
    task = type(sides.task)(run).opened(sides.task.prepared)
    if key in _NEW_WEIGHTS or sides.run.model.dtype != "float32":
        model: nn.Module = make_model(task).to(plain_sides.device_of(sides.model))
    else:
        model = task.model(empty=True)
        plain_sides.with_tensors_of(model, sides.model)
    blocks.prepare(run.model, model, run.strategy.tensor_leaves)
    job = plain_sides.job_of(task)
    plain = plain_sides.plain_model(job, model.train()) if key in _NEW_WEIGHTS else sides.plain
    job.reference = plain
    return replace(sides, run=run, task=task, model=model, plain=plain, job=job)


EXAMPLES = 3  # maximum examples computed together
CHUNK = {"cpu": 2**16, "cuda": 2**25}  # elements measured at once, in float64: what fits the cache; 256 MiB on a GPU
FACTOR = 10.0  # allowed difference, as a multiple of the effect of a weight's last bit or of half precision


@dataclass(frozen=True)
class PlainTolerance:
    """Tolerances, as relative differences of two correct computations. See docs/how-to/verify.md for their source."""

    loss: float
    gradient: float  # relative to the norm of the whole gradient

    def at_least(self, measured: PlainTolerance) -> PlainTolerance:
        """The maximum of these tolerances and FACTOR times the measured differences."""
        return PlainTolerance(max(self.loss, FACTOR * measured.loss), max(self.gradient, FACTOR * measured.gradient))


DRAWS = 4  # perturbations of the last bit to try if half precision exceeds its measured tolerance
LEAST = PlainTolerance(1e-5, 1e-4)  # minimum tolerance, both in float32
LEAST_LOW = PlainTolerance(1e-3, 1e-2)  # minimum tolerance, run in bfloat16 or float16


@dataclass(frozen=True)
class PlainNumbers:
    """Loss and gradients of a batch, computed by one path."""

    loss: float  # mean over targets, in training mode
    evaluated: float | None  # as `loss`, in evaluation mode; None: the run has no loss in evaluation mode
    targets: float
    gradient: dict[str, tuple[float, float]]  # weight -> (norm of its gradient, product of gradient and weight)

    @property
    def norm(self) -> float:
        """Norm of the whole gradient."""
        return math.sqrt(sum(norm**2 for norm, _ in self.gradient.values()))


@dataclass(frozen=True)
class PlainDifference:
    """Two numbers that should be equal within rounding."""

    of: str  # group of examples
    what: str
    own: float
    plain: float
    relative: float
    allowed: float

    @property
    def wrong(self) -> bool:
        """Whether the difference exceeds rounding."""
        return not self.relative <= self.allowed  # also true for NaN

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.of} is {self.own:.8g} in this run, and {self.plain:.8g} by transformers alone "
            f"(relative difference {self.relative:.1e})"
        )


# -- the check ---------------------------------------------------------------------------------------------------------


def check(session: Session, causes: Callable[[Sides, Strategy], str]) -> str:
    """Compare on rank 0, and return on all ranks a description of the comparison. `causes`: called to identify the
    option that causes a difference. All ranks compare weights from a source by name with those that `from_pretrained`
    loads. Collective. Errors: `TrainingFailed` on every rank, if there is a difference."""
    run, world = session.run, session.world
    if not run.verify.plain:
        return "not compared with a plain computation (verify.plain is false)"
    ACTIVITY.set("comparing a few examples with a plain computation")
    skipped = ""
    if run.model.source is not None:
        from lockstep.training import source_weights

        skipped = source_weights.skipped(session)
        if (fault := source_weights.difference(session)) is not None:
            raise TrainingFailed("LS5220", fault)
    outcome: tuple[bool, str] = (True, "")
    if world.is_main:
        with undrawn(world.device):
            outcome = _outcome(session, causes)
    agrees, text = world.broadcast(outcome)
    if not agrees:
        raise TrainingFailed("LS5170", text)
    if skipped:
        text += f"; weights not compared by name with those of {run.model.source}: {skipped}"
    return str(text)


def _outcome(session: Session, causes: Callable[[Sides, Strategy], str]) -> tuple[bool, str]:
    """(whether training may start, description)."""
    strategy = session.strategy
    try:
        sides = sides_of(session.task, strategy, first_micro_batch(session))
        with preserved(sides.model, strategy.dry_run.effects.written):
            differing = plain_differences(sides, strategy)
    except (Elsewhere, NotCovered) as caught:
        return True, f"not compared with a plain computation: {caught}"
    except OtherTokens as caught:
        return False, f"before the first step: {caught}"
    except PlainFailed as caught:
        if session.task.own_model:  # may need more than one item, or a resource that exists once
            return True, f"not compared with a plain computation: your code cannot be called again ({caught})"
        return False, (
            f"before the first step: the comparison with a plain computation failed ({caught}), so this run's loss "
            "is unchecked. verify.plain=false trains without it; please report this"
        )
    if not differing:
        groups = groups_of(sides)
        count = len({place for places in groups.values() for place in places})
        by = "your own functions" if session.task.own_model else "plain transformers"
        return True, f"loss and gradients match {by} within rounding ({count} examples, dropout off)"
    if session.task.own_model and not _repeatable(sides, strategy):
        return True, "not compared with a plain computation: your code gives different numbers each time"
    lines = "\n".join(f"  {difference}" for difference in differing[:6])
    if session.task.own_model:
        lines = lines.replace("by transformers alone", "by your own functions alone")
    if not any(math.isfinite(number) for each in differing for number in (each.own, each.plain)):
        why = "Both results are not finite: the cause is the model itself or its weights, for these examples"
    else:
        why = causes(sides, strategy)
    return False, (
        f"before the first step, without dropout:\n{lines}\n{why}\nNothing was trained. If the difference is "
        "intended, verify.plain=false trains without this comparison"
    )


def _repeatable(sides: Sides, strategy: Strategy) -> bool:
    """Whether two computations by the run's own path give the same numbers."""
    with preserved(sides.model, strategy.dry_run.effects.written):
        places = next(iter(groups_of(sides).values()))
        one, other = (own_numbers(sides, places, strategy.precision.autocast(False)) for _ in range(2))
    return one == other


def first_micro_batch(session: Session) -> np.ndarray:
    """Indices of the examples in the first micro-batch of the first step: int64; empty for a stream."""
    feed = session.feed
    if isinstance(feed.columns, Streamed):
        return np.empty(0, np.int64)
    rows = feed.order.step(0)
    first: np.ndarray = rows[feed.task.split_micro_batches(feed.columns, rows)[0]]
    return first


def plain_differences(sides: Sides, strategy: Strategy) -> list[PlainDifference]:
    """Differences beyond rounding, over all groups of examples. Errors: `NotCovered`."""
    differing: list[PlainDifference] = []
    inside = strategy.facts.engine_casts and sides.run.precision == "bf16"
    strict = takes_float32(sides.task) and not inside
    low = "bfloat16" if sides.run.model.trained_in_bfloat16 else sides.run.precision.replace("fp32", "")
    groups = groups_of(sides)
    plain = {name: plain_numbers(sides, places) for name, places in groups.items()}
    if strict:
        for name, places in groups.items():
            own = own_numbers(sides, places, strategy.precision.autocast(False))
            if compared(name, own, plain[name], LEAST):  # measure rounding only if it exceeds the minimum tolerance
                measured = largest_differences(perturbed_numbers(sides, places), plain[name])
                differing += compared(name, own, plain[name], LEAST.at_least(measured))
    if low:
        within = LEAST_LOW.at_least(half_precision(sides, groups, plain))
        own_low = {name: own_numbers(sides, places, strategy.precision.autocast()) for name, places in groups.items()}
        for draw in range(1 + DRAWS):
            apart_low = [d for name in groups for d in compared(f"{name} in {low}", own_low[name], plain[name], within)]
            if not apart_low:
                break
            if draw < DRAWS:  # gradients that cancel are pure rounding error, which one draw may not change
                with perturbed(sides.plain, low, draw):
                    within = within.at_least(half_precision(sides, groups, plain))
        differing += apart_low
    return differing


def groups_of(sides: Sides) -> dict[str, list[int]]:
    """Groups of examples to compute together, by their special property -> indices into `sides.at`."""
    groups = raw_rows.groups([int(n) for n in sides.columns.lengths[sides.at]], EXAMPLES)
    if sides.first:
        del groups["the first examples"]
        groups = {"the first micro-batch": sides.first[:EXAMPLES]} | groups
    return groups


def takes_float32(task: Task) -> bool:
    """Whether the run's own path can run in float32: not with half-precision kernels or weights, nor with reference
    outputs computed in half precision."""
    run = task.run
    if run.precision != "fp32" and task.needs_reference:
        return False
    return run.model.attention in (None, "sdpa", "eager") and not run.model.trained_in_bfloat16


def compared(of: str, own: PlainNumbers, plain: PlainNumbers, within: PlainTolerance) -> list[PlainDifference]:
    """Differences of two computations of the same examples beyond the tolerance; for weights, only the largest, and
    only if the whole gradient agrees."""
    whole, of_weights = all_of(of, own, plain, within)
    most = max(of_weights, key=lambda each: each.relative, default=None)
    wrong = [each for each in whole if each.wrong]
    return wrong or ([most] if most is not None and most.wrong else [])


def largest_differences(a: PlainNumbers, b: PlainNumbers) -> PlainTolerance:
    """Largest differences between two computations of the same examples."""
    whole, of_weights = all_of("", a, b, LEAST)
    losses = [each.relative for each in whole if "loss" in each.what]
    return PlainTolerance(max(losses), max(each.relative for each in [*whole, *of_weights] if "gradient" in each.what))


def all_of(
    of: str, own: PlainNumbers, plain: PlainNumbers, within: PlainTolerance
) -> tuple[list[PlainDifference], list[PlainDifference]]:
    """Compare two computations of the same examples. Returns the comparisons of losses and whole gradients, and those
    of each weight's gradient, whether or not they are within the tolerance `within`."""
    whole = max(plain.norm, 1e-30)
    numbers = [
        ("the number of targets", own.targets, plain.targets, 1e-9),
        ("the loss", own.loss, plain.loss, within.loss),
        ("the gradient's norm", own.norm, plain.norm, within.gradient),
    ]
    if own.evaluated is not None and plain.evaluated is not None:
        numbers.append(("the loss in evaluation mode", own.evaluated, plain.evaluated, within.loss))
    pairs = [PlainDifference(of, what, a, b, relative(a, b), allowed) for what, a, b, allowed in numbers]
    of_weights = []
    for name in dict.fromkeys([*plain.gradient, *own.gradient]):
        (norm, along), (norms, alongs) = (side.gradient.get(name, (0.0, 0.0)) for side in (own, plain))
        size = _distance(norm, norms) / whole
        of_weights.append(PlainDifference(of, f"the gradient's norm in {name}", norm, norms, size, within.gradient))
        turn, what = _distance(along, alongs) / whole, f"the gradient along the weight {name}"
        of_weights.append(PlainDifference(of, what, along, alongs, turn, within.gradient))
    return pairs, of_weights


def _distance(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def relative(a: float, b: float) -> float:
    """Relative difference of `a` from `b`; infinite if either is not finite."""
    return abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) and math.isfinite(b) else math.inf


# -- both paths --------------------------------------------------------------------------------------------------------


def own_numbers(sides: Sides, places: Sequence[int], precision: torch.autocast) -> PlainNumbers:
    """Compute loss and gradients as a step of the run does."""
    task, model, run = sides.task, sides.model, sides.run
    rows = sides.at[list(places)]
    seed_everything(run.seed, 0, 0, 1)  # for a task whose collate uses random numbers
    micro = task.collate_at(sides.columns, rows, 0, 0).to(device_of(model))
    targets = task.count_targets_at(sides.columns, rows, 0)

    def loss() -> Tensor | None:
        seed_everything(run.seed, 0, 0)
        with precision:
            return task.loss_sum(model(**micro.inputs), micro.targets)

    return _numbers(model, loss, targets)


def plain_numbers(
    sides: Sides, places: Sequence[int], precision: AbstractContextManager[Any] | None = None
) -> PlainNumbers:
    """Compute loss and gradients with transformers and torch alone. Errors: `NotCovered`, `PlainFailed`."""
    count = 0.0
    with plain_path():
        examples = _plain_examples(sides, places)

    def loss() -> Tensor:
        nonlocal count
        seed_everything(sides.run.seed, 0, 0)
        with precision or nullcontext():
            total, count = batch_loss(sides.job, sides.plain, examples)
        return total

    with plain_path():
        numbers = _numbers(sides.plain, loss, 1.0)
    per = max(count, 1e-30)
    return PlainNumbers(
        numbers.loss / per,
        None if numbers.evaluated is None else numbers.evaluated / per,
        count,
        {name: (norm / per, product / per) for name, (norm, product) in numbers.gradient.items()},
    )


def perturbed_numbers(sides: Sides, places: Sequence[int]) -> PlainNumbers:
    """Compute `plain_numbers` with weights perturbed in the last bit; restores the weights."""
    with perturbed(sides.plain, "fp32"):
        return plain_numbers(sides, places)


class Uncast(nn.Module):
    """A model that computes in float32 even under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        with torch.autocast(device_of(self.model).type, enabled=False):
            return self.model(**inputs)


def half_precision(
    sides: Sides, groups: Mapping[str, Sequence[int]], plain: Mapping[str, PlainNumbers]
) -> PlainTolerance:
    """Largest differences, over all groups, between the plain path in the run's half precision and in float32. The
    reference model of preference learning stays in float32."""
    job, model = copy.copy(sides.job), sides.plain
    job.reference = Uncast(model)
    if sides.run.model.trained_in_bfloat16:
        model = copy.deepcopy(model).bfloat16()
    low, kind = replace(sides, job=job, plain=model), device_of(model).type
    dtype = torch.float16 if sides.run.precision == "fp16" else torch.bfloat16
    pairs = [
        largest_differences(plain_numbers(low, places, torch.autocast(kind, dtype)), plain[name])
        for name, places in groups.items()
    ]
    return PlainTolerance(max(each.loss for each in pairs), max(each.gradient for each in pairs))


def _plain_examples(sides: Sides, places: Sequence[int]) -> list[dict[str, Any]]:
    """Examples of a group, as the plain path creates them."""
    if sides.job.own_model:
        from lockstep.tasks.modules.dataset import OwnCode

        return drawn_examples(
            OwnCode.of(sides.run), sides.job, "train", sides.at[list(places)].tolist(), (0, 0), device_of(sides.model)
        )
    examples = [sides.examples[place] for place in places]
    return _masked(sides, places, examples) if sides.task.draws_targets else examples


def _masked(sides: Sides, places: Sequence[int], examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Examples with the masks that the run draws for them. Errors: `PlainFailed`, if the masks do not fit the
    examples."""
    micro = sides.task.collate_at(sides.columns, sides.at[list(places)], 0, 0)
    rows = zip(micro.inputs["input_ids"].tolist(), micro.targets.tolist(), examples, strict=True)
    with plain_path():
        return [
            masked(sides.job, example, read[: len(example["input_ids"])], targets[: len(example["input_ids"])])
            for read, targets, example in rows
        ]


def _numbers(model: nn.Module, loss: Callable[[], Tensor | None], targets: float) -> PlainNumbers:
    """Loss and gradient in training mode, and loss in evaluation mode, without dropout. Gradients are not accumulated
    in weights, so hooks on weights do not run. Buffers, such as running statistics, are restored, so that both paths
    start from the same ones."""
    with preserved(model), without_dropout(model):
        try:
            model.eval()
            with torch.no_grad():
                evaluated = loss()
            model.train()
            total = loss()
            assert total is not None
            weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(total / targets, list(weights.values()), allow_unused=True)
        finally:
            model.train()
    sums = {
        name: _sums(slope.to_dense() if slope.is_sparse else slope, weight.detach())
        for (name, weight), slope in zip(weights.items(), gradients, strict=True)
        if slope is not None
    }
    measured = torch.stack([*sums.values()]).tolist() if sums else []  # one transfer: the host waits for a GPU once
    gradient = {
        name: (math.sqrt(squared), product / (math.sqrt(size) or 1.0))
        for name, (squared, product, size) in zip(sums, measured, strict=True)
    }
    mean = None if evaluated is None else float(evaluated) / targets
    return PlainNumbers(float(total.detach()) / targets, mean, targets, gradient)


def _sums(gradient: Tensor, weight: Tensor) -> Tensor:
    """Sums of squares of a gradient, of its products with the weight, and of squares of the weight: float64 [3]. In
    chunks: on a CPU a whole copy takes ten times as long and twice the memory of the weight."""
    sums = torch.zeros(3, dtype=torch.float64, device=weight.device)
    chunk = CHUNK.get(weight.device.type, CHUNK["cpu"])
    for part, own in zip(gradient.reshape(-1).split(chunk), weight.reshape(-1).split(chunk), strict=True):
        part, own = part.double(), own.double()
        sums += torch.stack((part.dot(part), part.dot(own), own.dot(own)))
    return sums


@contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """Context that restores the random generators of Python, numpy and torch."""
    state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
