"""Before the first step: loss and gradient of a few examples, by the run's own path and by a plain one.

In: a session, and the raw rows that were kept when its data were prepared. Out: what is said of it, or an error that
has both numbers and names the option that makes the difference. The plain path is `lockstep.plain`: the rows, the
model's tokenizer, a padded batch, and a model of transformers whose tensors are the run's own, so that no second model
is in memory. Nothing is left behind: no gradient, no number drawn, no file.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.run import Run
from lockstep.data import raw_rows
from lockstep.data.columns import Columns
from lockstep.data.raw_rows import RawRows
from lockstep.distributed.place import PLACE
from lockstep.distributed.randomness import seed_everything
from lockstep.plain.job import Plain
from lockstep.plain.losses import batch_loss, without_dropout
from lockstep.plain.rows import NotCovered
from lockstep.plain.train import build_model
from lockstep.strategies.engines import blocks
from lockstep.strategies.engines.writes import preserved
from lockstep.strategies.native import Native
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.models import adapters, quantized
from lockstep.tasks.task import Task
from lockstep.training.loop import TrainingFailed
from lockstep.training.session import Session

EXAMPLES = 3  # that are computed together, at most
WHOLE = 100_000_000  # parameters up to which a second model is built, where no rank holds the whole one


@dataclass(frozen=True)
class Tolerance:
    """How far two correct computations may be apart, relatively. Where the numbers come from: docs/verify.md."""

    loss: float
    gradient: float  # of the norm of the whole gradient


SAME_PRECISION = Tolerance(1e-5, 1e-4)  # both in float32
LOW_PRECISION = Tolerance(5e-2, 2e-1)  # the run's own in bfloat16 or float16, where its plain one is in float32


@dataclass(frozen=True)
class Numbers:
    """What a batch comes to, by one path."""

    loss: float  # mean over targets, in training mode
    evaluated: float | None  # the same in evaluation mode; None: the run computes no such loss then
    targets: float
    gradient: dict[str, tuple[float, float]]  # of each weight: its norm, and its product with the weight

    @property
    def norm(self) -> float:
        """Of the whole gradient."""
        return math.sqrt(sum(norm**2 for norm, _ in self.gradient.values()))


@dataclass(frozen=True)
class Difference:
    """Two numbers that should be the same but for rounding."""

    of: str  # which examples
    what: str
    own: float
    plain: float
    relative: float
    allowed: float

    @property
    def wrong(self) -> bool:
        """Whether it is more than rounding."""
        return not self.relative <= self.allowed  # NaN, too

    def __str__(self) -> str:
        return (
            f"{self.what} of {self.of} is {self.own:.8g} as this run computes it, and {self.plain:.8g} by transformers "
            f"alone (they differ by {self.relative:.1e})"
        )


@dataclass(frozen=True)
class Sides:
    """All that two computations of the same examples need."""

    run: Run
    task: Task
    model: nn.Module  # the run's own, with all that lockstep does to it
    plain: nn.Module  # of transformers, with the tensors of the first
    job: Plain
    columns: Columns  # the run's own examples
    at: np.ndarray  # numbers of them
    examples: list[dict[str, Any]]  # the plain ones, as many


class Elsewhere(Exception):
    """Why a run is not compared."""


# -- the check ---------------------------------------------------------------------------------------------------------


def check(session: Session, causes: Callable[[Sides, Strategy], str]) -> str:
    """Compare, on rank 0, and say on all ranks what was compared. `causes`: asked for the option that makes a
    difference. Collective. Errors: `TrainingFailed` on every rank, for a difference."""
    run, world = session.run, session.world
    if not run.verify.plain:
        return "not compared with a plain computation (verify.plain is false)"
    PLACE.at("comparing a few examples with a plain computation")
    outcome: tuple[bool, str] = (True, "")
    if world.is_main:
        with undrawn(world.device):
            outcome = _outcome(session, causes)
    agrees, text = world.broadcast(outcome)
    if not agrees:
        raise TrainingFailed(text)
    return str(text)


def _outcome(session: Session, causes: Callable[[Sides, Strategy], str]) -> tuple[bool, str]:
    """Whether training may begin, and what is said."""
    strategy = session.strategy
    try:
        sides = sides_of(session.run, session.task, strategy)
    except (Elsewhere, NotCovered) as caught:
        return True, f"not compared with a plain computation: {caught}"
    except Exception as caught:  # the plain path is no part of training
        text = " ".join(f"{type(caught).__name__}: {caught}".split())
        return True, f"not compared with a plain computation, which could not be made ready ({text[:200]})"
    with preserved(sides.model, strategy.effects.written):
        try:
            found = differences(sides, strategy)
        except (Elsewhere, NotCovered) as caught:
            return True, f"not compared with a plain computation: {caught}"
    if not found:
        count = len({place for places in groups_of(sides).values() for place in places})
        return True, (
            f"loss and gradient of {count} examples equal those of transformers alone, without dropout, to "
            "rounding"
        )
    lines = "\n".join(f"  {difference}" for difference in found[:6])
    return False, (
        f"before the first step, without dropout:\n{lines}\n{causes(sides, strategy)}\nNothing was trained. If you "
        "know better: verify.plain=false trains without this comparison"
    )


def differences(sides: Sides, strategy: Strategy) -> list[Difference]:
    """What differs by more than rounding, of all groups of examples. Errors: `NotCovered`."""
    found: list[Difference] = []
    strict = takes_float32(sides.run)
    low = "bfloat16" if sides.run.model.trained_in_bfloat16 else sides.run.precision.replace("fp32", "")
    for name, places in groups_of(sides).items():
        plain = plain_numbers(sides, places)
        if strict:
            own = own_numbers(sides, places, strategy.autocast(False))
            found += compared(name, own, plain, SAME_PRECISION)
        if low:
            own = own_numbers(sides, places, strategy.autocast())
            found += compared(f"{name} in {low}", own, plain, LOW_PRECISION)
    return found


def groups_of(sides: Sides) -> dict[str, list[int]]:
    """Which examples are computed together, by what is special about them: places in `sides.at`."""
    return raw_rows.groups([int(n) for n in sides.columns.lengths[sides.at]], EXAMPLES)


def takes_float32(run: Run) -> bool:
    """Whether the run's own path can be computed in float32: not by kernels of half precision, nor with weights in
    it."""
    return run.model.attention in (None, "sdpa", "eager") and not run.model.trained_in_bfloat16


def compared(of: str, own: Numbers, plain: Numbers, within: Tolerance) -> list[Difference]:
    """What of two computations of the same examples differs by more than that; of weights the one that differs most, and
    only where the whole gradient does not."""
    whole = max(plain.norm, 1e-30)
    found = [
        Difference(of, "the number of targets", own.targets, plain.targets, relative(own.targets, plain.targets), 1e-9),
        Difference(of, "the loss", own.loss, plain.loss, relative(own.loss, plain.loss), within.loss),
        Difference(of, "the gradient's norm", own.norm, plain.norm, relative(own.norm, plain.norm), within.gradient),
    ]
    if own.evaluated is not None and plain.evaluated is not None:
        apart = relative(own.evaluated, plain.evaluated)
        found.append(Difference(of, "the loss in evaluation mode", own.evaluated, plain.evaluated, apart, within.loss))
    of_weights = []
    for name in dict.fromkeys([*plain.gradient, *own.gradient]):
        (norm, along), (norms, alongs) = (side.gradient.get(name, (0.0, 0.0)) for side in (own, plain))
        size = _apart(norm, norms) / whole
        of_weights.append(Difference(of, f"the gradient's norm in {name}", norm, norms, size, within.gradient))
        turn, what = _apart(along, alongs) / whole, f"the gradient along the weight {name}"
        of_weights.append(Difference(of, what, along, alongs, turn, within.gradient))
    most = max(of_weights, key=lambda each: each.relative, default=None)
    wrong = [each for each in found if each.wrong]
    return wrong or ([most] if most is not None and most.wrong else [])


def _apart(a: float, b: float) -> float:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def relative(a: float, b: float) -> float:
    """How far they are apart, beside the second."""
    return abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) and math.isfinite(b) else math.inf


# -- both paths --------------------------------------------------------------------------------------------------------


def own_numbers(sides: Sides, places: Sequence[int], precision: torch.autocast) -> Numbers:
    """As a step of the run computes them."""
    task, model, run = sides.task, sides.model, sides.run
    rows = sides.at[list(places)]
    seed_everything(run.seed, 0, 0, 1)  # for a task whose collate draws
    micro = task.collate_at(sides.columns, rows, 0, 0).to(device_of(model))
    targets = task.count_targets_at(sides.columns, rows, 0)

    def loss() -> Tensor | None:
        seed_everything(run.seed, 0, 0)
        with precision:
            return task.loss_sum(model(**micro.inputs), micro.targets)

    return _numbers(model, loss, targets)


def plain_numbers(sides: Sides, places: Sequence[int]) -> Numbers:
    """As transformers and torch compute them."""
    examples = [sides.examples[place] for place in places]
    count = 0.0

    def loss() -> Tensor:
        nonlocal count
        seed_everything(sides.run.seed, 0, 0)
        total, count = batch_loss(sides.job, sides.plain, examples, 0)
        return total

    try:
        found = _numbers(sides.plain, loss, 1.0)
    except NotCovered:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, NotImplementedError) as caught:
        text = " ".join(f"{type(caught).__name__}: {caught}".split())
        raise Elsewhere(f"the plain computation fails ({text[:200]})") from caught
    per = max(count, 1e-30)
    return Numbers(
        found.loss / per,
        None if found.evaluated is None else found.evaluated / per,
        count,
        {name: (norm / per, product / per) for name, (norm, product) in found.gradient.items()},
    )


def _numbers(model: nn.Module, loss: Callable[[], Tensor | None], targets: float) -> Numbers:
    """Loss and gradient in training mode, and loss in evaluation mode, without dropout. Gradients go to no weight:
    hooks on weights do not run."""
    with without_dropout(model):
        try:
            model.eval()
            with torch.no_grad():
                evaluated = loss()
            model.train()
            total = loss()
            assert total is not None
            weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
            found = torch.autograd.grad(total / targets, list(weights.values()), allow_unused=True)
        finally:
            model.train()
    gradient = {}
    for (name, weight), slope in zip(weights.items(), found, strict=True):
        if slope is not None:
            slope = (slope.to_dense() if slope.is_sparse else slope).double()
            own = weight.detach().double()
            size = float(own.norm())
            gradient[name] = (float(slope.norm()), float((slope * own).sum()) / (size or 1.0))
    mean = None if evaluated is None else float(evaluated) / targets
    return Numbers(float(total.detach()) / targets, mean, targets, gradient)


def device_of(model: nn.Module) -> torch.device:
    """Of its first parameter."""
    return next(model.parameters()).device


@contextmanager
def undrawn(device: torch.device) -> Iterator[None]:
    """The generators of Python, numpy and torch afterwards are where they were."""
    state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])


# -- what is compared --------------------------------------------------------------------------------------------------


def sides_of(run: Run, task: Task, strategy: Strategy) -> Sides:
    """Both sides of a run. Errors: `Elsewhere`, `NotCovered`."""
    if task.own_model or "." in run.task.name:
        raise Elsewhere("the model or the task is code of yours")
    if run.model.trust_remote_code:
        raise Elsewhere("the model may be code from the Hub (model.trust_remote_code)")
    kept = RawRows.of(task.prepared.facts)
    if kept is None:
        raise Elsewhere("no raw rows were kept of its data")
    job = job_of(run, task)
    examples = job.encode(kept.rows)[: len(kept.at)]
    columns = task.splits[kept.split] if kept.examples is None else kept.examples
    model = whole_model(run, task, strategy)
    return Sides(run, task, model, plain_model(run, task, job, model), job, columns, kept.at, examples)


def job_of(run: Run, task: Task) -> Plain:
    """The run as the plain path reads it, of the rows that were kept."""
    kept = RawRows.of(task.prepared.facts)
    rows = [] if kept is None else kept.rows
    return Plain(plain_file(run, task), task.prepared.tokenizer, {"train": rows}, labels_of(task))


def labels_of(task: Task) -> list[Any] | None:
    """The values of labels, in the order of their codes."""
    facts = task.prepared.facts
    found = facts.get("label_values", facts.get("labels"))
    return None if found is None else list(found)


def plain_file(run: Run, task: Task) -> dict[str, Any]:
    """The run file as the plain path reads it: with the names of columns that the kept rows have, and weights of labels
    that depend on all rows as numbers."""
    values: dict[str, Any] = run.model_dump(mode="json")
    options = values["task"]
    if run.task.name in ("translation", "summarization"):
        options |= {"source": "source", "target": "target"}
    if run.task.name == "token_classification":
        options |= {"words": "words", "tags": "tags"}
    weights = getattr(getattr(task, "objective", None), "weights", None)
    if weights is not None:
        names = task.prepared.facts["labels"]
        options["class_weights"] = dict(zip(names, map(float, weights), strict=True))
    return values


def whole_model(run: Run, task: Task, strategy: Strategy) -> nn.Module:
    """The model that the strategy trains, where this rank holds all of it; else one like it, which it would have at its
    start. Errors: `Elsewhere` where that is too large."""
    if isinstance(strategy, Native):
        return strategy.model
    if strategy.parameter_count > WHOLE:
        raise Elsewhere(
            f"no rank holds the whole model under {run.strategy.name}, and it is too large for one more in memory"
        )
    from lockstep.strategies.exact.treatment import make_model

    model = make_model(task).to(strategy.world.device)
    blocks.prepare(run, model)
    return model.train()


def plain_model(run: Run, task: Task, job: Plain, model: nn.Module) -> nn.Module:
    """A model of transformers, and of peft where there is an adapter, with the parameters and buffers of another one: the
    very tensors, where they are float32. Errors: `Elsewhere` where their names or shapes differ, or where too many would
    have to be widened."""
    whole = Plain.__new__(Plain)
    vars(whole).update(vars(job))
    whole.run = job.run | {"model": job.run["model"] | {"adapter": {}, "quantization": None, "dtype": "float32"}}

    def built(empty: bool) -> nn.Module:
        plain = build_model(whole, empty=empty)
        if run.model.adapter:
            with torch.device("meta" if empty else "cpu"):
                plain = adapters.wrap(run, plain, str(task.head))
        return plain

    try:
        plain = built(empty=True)
    except NotCovered:
        raise
    except Exception:  # a family that cannot be built without memory
        plain = built(empty=False)
    with_tensors_of(plain, model)
    return plain.to(device_of(model)).train()


def with_tensors_of(plain: nn.Module, model: nn.Module) -> None:
    """Put the parameters and buffers of a model into another one of the same names, in float32."""
    own = dict(model.named_parameters(remove_duplicate=False))
    if sum(p.numel() for p in model.parameters() if p.dtype != torch.float32) > WHOLE:
        raise Elsewhere("too many of the model's weights are kept in few bits to have them in float32, too")
    packed = {n: nn.Parameter(t, requires_grad=False) for n, t in quantized.unpacked(model).items()}
    for name in packed:
        for part in ("packed", "absmax"):
            del own[f"{name.removesuffix('weight')}{part}"]
    own |= packed
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    if own.keys() != theirs.keys():
        raise Elsewhere(f"the plain model has other weights: {', '.join(sorted(own.keys() ^ theirs.keys())[:3])}")
    given: dict[int, nn.Parameter] = {}
    for name, parameter in own.items():
        if parameter.shape != theirs[name].shape:
            raise Elsewhere(f"the plain model's {name} has another shape")
        wide = parameter.dtype == torch.float32
        kept = parameter if wide else nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        holder, _, last = name.rpartition(".")
        setattr(plain.get_submodule(holder), last, given.setdefault(id(parameter), kept))
    modules = dict(model.named_modules())
    for path, module in plain.named_modules():
        others = vars(modules[path]) | dict(modules[path].named_buffers(recurse=False)) if path in modules else {}
        held = {n: v for n, v in vars(module).items() if isinstance(v, Tensor) and v.is_meta}
        for name in [*held, *dict(module.named_buffers(recurse=False))]:
            if isinstance(found := others.get(name), Tensor):
                setattr(module, name, found)
