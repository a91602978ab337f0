"""Infer from a few items, before any process starts, whether the user's loss and metrics are sums or means.

In: the user's functions. Out: `ProbeResult`, stored with the prepared data; or a `RunError` if it cannot be decided.

A loss is a mean if duplicating a batch leaves it unchanged, and a sum if duplicating doubles it. A mean is accepted
only if it adds up: the target-weighted means of two batches must give the mean of both together. An untrained model
gives nearly equal losses for all targets, so that all kinds of means look alike; the test is therefore repeated with
random weights, on groups of small and large items.
"""

from __future__ import annotations

import ast
import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lockstep.config import user_code
from lockstep.config.run import RunError
from lockstep.distributed.randomness import seed_everything
from lockstep.tasks.models import adapters
from lockstep.tasks.modules import dataset, wrapped_module
from lockstep.tasks.modules.dataset import OwnCode
from lockstep.tasks.modules.wrapped_module import Calling

GROUPS, HALF = 3, 4  # number of groups; small items per group, and as many large ones
LOOKED_AT = 64  # candidate items, evenly spaced
TIMES = 4  # repetitions of one half in a batch


# Three batches by name. Each holds all items, for equal padding: "0" once, "1" one half `TIMES` times, "2" the other
# half `TIMES` times.
ContrastGroup = dict[str, list[Any]]


def groups(code: OwnCode, data: Any, places: np.ndarray) -> list[ContrastGroup]:
    """Groups of items: the smallest with the largest, then the next smallest with the next largest, and so on.
    Errors: `RunError` if an item cannot be read."""
    chosen = np.unique(places[np.linspace(0, len(places) - 1, LOOKED_AT).astype(np.int64)])
    read = sorted((dataset.item(code, data, int(place), -1) for place in chosen), key=size)
    half = min(HALF, len(read) // 2)
    group_list = []
    for start in range(0, min(GROUPS * half, len(read) // 2), max(1, half)):
        stop = min(start + half, len(read) // 2)
        little, much = read[start:stop], read[len(read) - stop : len(read) - start]
        whole = [*little, *much]
        group_list.append({"0": whole, "1": whole + little * (TIMES - 1), "2": whole + much * (TIMES - 1)})
    return group_list


def size(value: Any, depth: int = 4) -> int:
    """Size of an item in numbers and characters, without padding at one end."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Tensor | np.ndarray):
        return _unfilled(np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value).reshape(-1))
    if isinstance(value, list | tuple) and value and all(isinstance(each, int | float) for each in value):
        return _unfilled(np.asarray(value))
    if depth:
        attributes = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        parts = value if isinstance(value, list | tuple) else attributes.values()
        return sum(size(part, depth - 1) for part in parts)
    return 0


def _unfilled(flat: np.ndarray) -> int:
    """Length of a row without the longer run of equal numbers at its ends (padding), counting that run as one."""
    if len(flat) < 2 or flat.dtype == object:
        return len(flat)
    turns = np.flatnonzero(flat[1:] != flat[:-1])
    if not len(turns):
        return 1
    return int(len(flat) - max(turns[0], len(flat) - 2 - turns[-1]))


def shaken(model: nn.Module, strength: float) -> Iterator[nn.Module]:
    """Yield the model repeatedly, with randomly perturbed weights each time, so that outputs differ by item and target
    but stay plausible for this model."""
    draw = torch.Generator().manual_seed(0)
    while True:
        with torch.no_grad():
            for weight in model.parameters():
                if weight.is_floating_point() and weight.numel():
                    noise = torch.randn(weight.shape, generator=draw).to(weight.dtype)
                    weight.add_(noise, alpha=strength * _spread(weight))
        yield model


def _spread(weight: Tensor) -> float:
    """A standard deviation for the perturbation of a weight that makes outputs neither equal nor very large."""
    here = float(weight.float().std()) if weight.numel() > 1 else 0.0
    return max(here, 0.5 if weight.dim() < 2 else weight[0].numel() ** -0.5)


class MeansByClass(TorchFunctionMode):
    """Detect a cross-entropy that divides by the class weights of its batch. If a rare class is missing from the tried
    items, no number would reveal it."""

    weighted = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.cross_entropy, functional.nll_loss) and kwargs.get("reduction", "mean") == "mean":
            targets = args[1] if len(args) > 1 else kwargs.get("target")
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            if weight is not None and isinstance(targets, Tensor) and not targets.is_floating_point():
                self.weighted |= bool((weight != weight.flatten()[0]).any())
        return func(*args, **kwargs)


FIRST, SECOND = 8, 5  # items of the two batches
NEAR = 1e-3  # relative tolerance of float32 sums


@dataclass
class ProbeResult:
    """Inferred kinds of the loss and the metrics, and warnings about the model."""

    loss: str  # "sum", "mean", or "each"
    each: int  # targets per example, without `task.targets`
    metrics: dict[str, str] = field(default_factory=dict)  # name -> "sum", "mean", "each", or "pair"
    called_once: list[str] = field(default_factory=list)  # modules that every forward calls exactly once
    doubts: list[str] = field(default_factory=list)  # reasons why the result may depend on the number of processes
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Trial:
    """The model on the CPU, and batches of a few items: A, B, A twice, A with B."""

    code: OwnCode
    model: nn.Module
    calling: Calling
    batches: Mapping[str, Any]
    sizes: Mapping[str, int]
    weights: Mapping[str, int]  # targets of each batch; examples without task.targets
    fresh: Callable[[], nn.Module] | None = None  # new model per batch, if the model keeps state

    def forward(self, name: str) -> tuple[Any, Any]:
        """The model's outputs for a batch, and the loss function's other input. Errors: `RunError`."""
        (arguments, named), loss_inputs = self.calling.arguments(self.batches[name])
        model = self.fresh() if self.fresh else self.model
        seed_everything(self.code.seed, -3)
        with dataset.user_call(self.code.task, "model", ": forward"):
            return model(*arguments, **named), loss_inputs

    def loss(self, name: str) -> Any:
        """The user's loss of a batch. Errors: `RunError`."""
        outputs, loss_inputs = self.forward(name)
        with dataset.user_call(self.code.task, "loss"):
            return self.calling.loss(outputs, loss_inputs)


def probe(code: OwnCode, names: Collection[str], data: Any, places: np.ndarray) -> ProbeResult:
    """Infer the kinds of loss and metrics by running the user's functions on train items. `names`: dotted names of the
    user's functions and classes, whose files are searched for communication. Errors: `RunError`."""
    chosen = places[np.linspace(0, len(places) - 1, FIRST + SECOND).astype(np.int64)]
    read = _items(code, data, places)
    doubts = _unsteady(code, data, chosen, read)
    parts = {"A": read[:FIRST], "B": read[FIRST:], "AA": read[:FIRST] * 2, "AB": read}
    batches, weights = _batches(code, parts)
    model = dataset.model(code)
    loss, metrics_of = dataset.function(code, "loss"), dataset.function(code, "metrics")
    calling = Calling(code, loss, "", metrics_of, {}, None, wrapped_module.names_of(model))
    trial = _Trial(code, model, calling, batches, {name: len(part) for name, part in parts.items()}, weights)
    model.eval()
    with torch.no_grad():
        with _calls(model) as calls:
            first, again = trial.loss("AB"), trial.loss("AB")
        steady = dataset.same(first, again)
        tried = trial if steady else replace(trial, fresh=lambda: dataset.model(code).eval())
        kind, each, doubt = _kind_of_loss(tried)
        metrics = _kinds_of_metrics(tried)
        if kind == "mean" or "mean" in metrics.values():
            _check_means(tried, kind, metrics, groups(code, data, places))
    result = ProbeResult(kind, each, metrics, [], [*doubts, *doubt, *foreign_sums(names, model)])
    new = dataset.model(code).train()  # unused so far
    with torch.no_grad(), _calls(new) as training_calls:
        result.doubts += _remembers(replace(trial, model=new))
    adapters.refuse_bypassed(model, "task.model")
    usage = _uses(code, read)
    result.notes += _untrained(model, usage, len(read))
    always = _common(usage)
    result.called_once = [name for name in _once(calls) if name in _once(training_calls) and name in always]
    return result


def trained_on_one(code: OwnCode) -> None:
    """Run one train item through the model in training mode. Errors: those of the model."""
    sets, _ = dataset.data_sets(code)
    data, places = sets["train"]
    batches, _ = _batches(code, {"one": [dataset.item(code, data, int(places[0]), -1)]})
    model = dataset.model(code).train()
    calling = Calling(code, lambda *_: None, "", None, {}, None, wrapped_module.names_of(model))
    try:
        _Trial(code, model, calling, batches, {}, {}).forward("one")
    except RunError as caught:
        raise caught.__cause__ or caught from None


def used_now_and_then(code: OwnCode) -> str | None:
    """Name of a module with weights, or of a weight, that only some train items use; None if all items use the same.
    Errors: `RunError`."""
    sets, _ = dataset.data_sets(code)
    data, places = sets["train"]
    model, usage = dataset.model(code), _uses(code, _items(code, data, places))
    weights = {name for name, _ in model.named_parameters()}
    weights |= {name for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None}
    differing = weights & (set[str]().union(*usage) - _common(usage))
    return min(differing, default=None)


def _common(usage: list[set[str]]) -> set[str]:
    return set[str].intersection(*usage) if usage else set()


def _items(code: OwnCode, data: Any, places: np.ndarray) -> list[Any]:
    chosen = places[np.linspace(0, len(places) - 1, FIRST + SECOND).astype(np.int64)]
    return [dataset.item(code, data, int(place), -1) for place in chosen]


def _uses(code: OwnCode, read: list[Any]) -> list[set[str]]:
    """Names of the modules called, and of the weights that the loss depends on, in training mode, for single items and
    all together. Items that fail alone, as under BatchNorm, are skipped."""
    batches, _ = _batches(code, {"all": read} | {str(i): [item] for i, item in enumerate(read)})
    model, loss = dataset.model(code).train(), dataset.function(code, "loss")
    trial = _Trial(
        code, model, Calling(code, loss, "", None, {}, None, wrapped_module.names_of(model)), batches, {}, {}
    )
    before, names = copy.deepcopy(model.state_dict()), {id(p): name for name, p in model.named_parameters()}
    usage: list[set[str]] = []
    for name in batches:
        with suppress(RunError), _calls(model) as calls, torch.enable_grad():
            reached = _reached(trial.loss(name))
            usage.append({names[key] for key in reached if key in names} | calls.keys())
        model.load_state_dict(before)
    return usage


def _untrained(model: nn.Module, usage: list[set[str]], examples: int) -> list[str]:
    """Note the weights that the loss of no tried example depends on, although they are not frozen."""
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    idle = [name for name in trained if usage and name not in set[str]().union(*usage)]
    if not idle:
        return []
    return [
        f"task.model: in {examples} examples the loss depends on none of {len(idle):,} of {len(trained):,} weights "
        f"that are not frozen, such as {idle[0]}; without a gradient they are not trained"
    ]


def _reached(loss: Tensor) -> set[int]:
    """Ids of the weights with a gradient path from a loss."""
    leaves: set[int] = set()
    nodes, met = [loss.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return leaves


# -- the loss --------------------------------------------------------------------------------------------------------


def _kind_of_loss(trial: _Trial) -> tuple[str, int, list[str]]:
    """Kind of the loss, targets per example, and warnings. Errors: `RunError`."""
    with MeansByClass() as by_class:
        values = {name: trial.loss(name) for name in trial.batches}
    for value in values.values():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise RunError(
                "LS3230",
                f"task.loss: expected a tensor of floats, but the function returned {wrapped_module.kind_of(value)}",
            )
    named = trial.code.task.options.get("targets") is not None
    if values["A"].numel() > 1:
        ratios = {value.numel() / trial.sizes[name] for name, value in values.items()}
        each = ratios.pop()
        if not named and (ratios or each != int(each)):
            raise RunError(
                "LS3231",
                f"task.loss: it returns {values['A'].numel()} numbers for {trial.sizes['A']} examples and "
                f"{values['B'].numel()} for {trial.sizes['B']}, so the number of targets is unknown; "
                f"{wrapped_module.COUNT}",
            )
        return "each", 1 if named else int(each), []
    numbers = {name: float(value) for name, value in values.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise RunError("LS3232", f"task.loss: the loss of the untrained model is {numbers['A']}, which is not finite")
    kind = _kind(numbers)
    if kind is None:
        raise RunError(
            "LS3233",
            f"task.loss: a batch has the loss {numbers['A']:.6g} and the same batch repeated twice "
            f"{numbers['AA']:.6g}, so it is neither a sum nor a mean over targets; return a sum, or one "
            "number per target (reduction='none')",
        )
    if kind == "mean" and by_class.weighted:
        raise _no_mean(trial, "its cross-entropy divides by the weights of the classes in a batch")
    if _adds_up(kind, numbers, trial.weights):
        return kind, 1, []
    if kind == "mean":
        raise _no_mean(
            trial,
            f"batches of {trial.weights['A']} and {trial.weights['B']} with {numbers['A']:.6g} and "
            f"{numbers['B']:.6g} have {numbers['AB']:.6g} together",
        )
    return kind, 1, [
        f"task.loss: the loss of two batches together ({numbers['AB']:.6g}) is not the sum of both "
        f"({numbers['A'] + numbers['B']:.6g}): an example's weight depends on the others in its micro-batch, and so "
        "on micro_batches (not on the number of processes)"
    ]  # fmt: skip


def _no_mean(trial: _Trial, observed: str) -> RunError:
    over = "targets" if trial.code.task.options.get("targets") is not None else "examples"
    return RunError(
        "LS3234",
        f"task.loss: the function returns a mean, but not over {over}: {observed}. Return a sum "
        f"(reduction='sum'), or one number per target; {wrapped_module.COUNT}. (Or an example's loss depends "
        "on the others: padding without a mask, a normalisation over the batch)",
    )


def _check_means(trial: _Trial, kind: str, metrics: Mapping[str, str], groups: list[ContrastGroup]) -> None:
    """Check, with perturbed weights, that the loss and metrics are means over examples (or targets). Errors:
    `RunError`."""
    for strength in (1.0, 0.1, 0.0):  # weaker if the loss is not finite; finally unperturbed
        model = dataset.model(trial.code).eval()
        measured = []
        for group, variant in zip(groups, shaken(model, strength), strict=False):
            batches, weights = _batches(trial.code, group)
            fresh = lambda of=variant: copy.deepcopy(of)  # noqa: E731 - where it keeps state, a batch changes the next
            sizes = {name: len(part) for name, part in group.items()}
            one = replace(trial, model=variant, batches=batches, sizes=sizes, weights=weights)
            try:
                if trial.fresh is not None or not dataset.same(one.loss("0"), one.loss("0")):
                    one = replace(one, fresh=fresh)
                losses = {name: float(one.loss(name)) for name in batches} if kind == "mean" else {}
                measured.append((one, losses, _means(one, metrics)))
            except (RunError, ValueError, TypeError):  # the loss rejects the outputs of these weights
                break
        tables = [table for _, losses, means in measured for table in (losses, *means.values())]
        if len(measured) == len(groups) and all(math.isfinite(n) for table in tables for n in table.values()):
            break
    for one, losses, means in measured:
        if losses and not _sums_up(losses, one.weights):
            raise _no_mean(
                trial,
                f"with random weights {one.weights['0']} have {losses['0']:.6g}, and with some of them "
                f"{TIMES} times {losses['1']:.6g}, with the others {losses['2']:.6g}",
            )
        for name, numbers in means.items():
            if not _sums_up(numbers, one.sizes):
                raise RunError("LS3235", f"task.metrics: {name} is a mean, but not over examples; {METRICS}")


def _means(trial: _Trial, metrics: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Mean-type metrics of each batch."""
    means: dict[str, dict[str, float]] = {name: {} for name, kind in metrics.items() if kind == "mean"}
    for batch in trial.batches if means else ():
        outputs, loss_inputs = trial.forward(batch)
        with dataset.user_call(trial.code.task, "metrics"):
            values = trial.calling.metrics(outputs, loss_inputs) if trial.calling.metrics else {}
        for name in means:
            means[name][batch] = float(values[name])
    return means


def _sums_up(numbers: Mapping[str, float], weights: Mapping[str, int]) -> bool:
    """Whether the measurements of a `ContrastGroup` are consistent with sums over items; True if they are not
    finite."""
    totals = whole, one, other = tuple(numbers[name] * weights[name] for name in "012")
    near = NEAR * max(map(abs, totals))
    return not all(map(math.isfinite, totals)) or abs(one + other - (TIMES + 1) * whole) <= near


def _batches(code: OwnCode, parts: Mapping[str, list[Any]]) -> tuple[dict[str, Any], dict[str, int]]:
    """Collate items to batches, with the number of targets of each (or of examples, without `task.targets`). Errors:
    `RunError`."""
    targets = dataset.function(code, "targets")
    collate = dataset.function(code, "collate") or dataset.default_collate
    batches, weights = {}, {}
    for name, part in parts.items():
        seed_everything(code.seed, -3)
        batches[name] = dataset.collated(code.task, collate, list(part))
        with dataset.user_call(code.task, "targets"):
            weights[name] = sum(int(targets(each)) for each in part) if targets else len(part)
    return batches, weights


def _kind(numbers: Mapping[str, float]) -> str | None:
    """Whether a number is a sum or a mean; None if neither or undecidable."""
    one, two = numbers["A"], numbers["AA"]
    if abs(one) < 1e-12:
        return None
    if abs(two - one) <= NEAR * abs(one):
        return "mean"
    return "sum" if abs(two - 2 * one) <= NEAR * abs(one) else None


def _adds_up(kind: str, numbers: Mapping[str, float], weights: Mapping[str, int]) -> bool:
    factors = weights if kind == "mean" else dict.fromkeys(weights, 1)
    a, b, both = (numbers[name] * factors[name] for name in ("A", "B", "AB"))
    return abs(both - (a + b)) <= NEAR * max(abs(a), abs(b), abs(both))


# -- metrics ---------------------------------------------------------------------------------------------------------


def _kinds_of_metrics(trial: _Trial) -> dict[str, str]:
    """Kind of each metric, by name. Errors: `RunError`."""
    if trial.calling.metrics is None:
        return {}
    values_by_name: dict[str, dict[str, Any]] = {}
    for batch in trial.batches:
        outputs, loss_inputs = trial.forward(batch)
        with dataset.user_call(trial.code.task, "metrics"):
            values = trial.calling.metrics(outputs, loss_inputs)
        if not isinstance(values, Mapping) or not values:
            raise RunError(
                "LS3236",
                "task.metrics: expected a mapping of names to numbers, the function returned "
                f"{wrapped_module.kind_of(values)}",
            )
        for name, value in values.items():
            values_by_name.setdefault(str(name), {})[batch] = value
    if taken := {"loss", "examples"} & values_by_name.keys():
        raise RunError("LS3237", f"task.metrics: {taken.pop()} is the name of another metric; choose a different name")
    return {name: _kind_of_metric(trial, name, values) for name, values in values_by_name.items()}


def _kind_of_metric(trial: _Trial, name: str, values: Mapping[str, Any]) -> str:
    """Kind of a metric. Errors: `RunError` if it cannot be combined from batches."""
    if len(values) < len(trial.batches):
        raise RunError("LS3238", f"task.metrics: {name} is missing for some batches; return it for every batch")
    if isinstance(values["A"], tuple) and len(values["A"]) == 2:
        return "pair"
    if isinstance(values["A"], Tensor) and values["A"].dim() > 0:
        return "each"
    try:
        numbers = {batch: float(value) for batch, value in values.items()}
    except (TypeError, ValueError):
        raise RunError("LS3239", f"task.metrics: {name} is {wrapped_module.kind_of(values['A'])}; {METRICS}") from None
    kind = _kind(numbers)
    if kind is None or not _adds_up(kind, numbers, trial.sizes):
        why = "is 0 for the tried items, so whether it is a sum or a mean is unknown"
        why = why if kind is None and not numbers["A"] else "is neither a sum over examples nor their mean"
        raise RunError("LS3240", f"task.metrics: {name} {why}; {METRICS}")
    return kind


METRICS = "return one number per example (a tensor), or a pair (sum, count)"


# -- dependence on the number of processes ---------------------------------------------------------------------------


def _unsteady(code: OwnCode, data: Any, chosen: np.ndarray, read: list[Any]) -> list[str]:
    """Warn about items that change when read again with the same random numbers."""
    for place, before in zip(chosen, read, strict=True):
        if not dataset.same(before, dataset.item(code, data, int(place), -1)):
            return [
                f"task.data: item {place} differs when it is read again with Python's, numpy's and torch's "
                "generators seeded alike: the data set keeps state, or has its own generator"
            ]
    return []


def _remembers(trial: _Trial) -> list[str]:
    """Warn about a model whose loss changes for the same batch and random numbers. Buffers are restored in between:
    another check covers buffers that training changes."""
    buffers = {name: b.detach().clone() for name, b in trial.model.named_buffers()}
    before = _attributes(trial.model)
    losses, counts = [], []
    for _ in range(2):
        try:
            losses.append(trial.loss("AB"))
            counts.append({n: v for n, v in _attributes(trial.model).items() if type(v) in (bool, int, float)})
        except RunError as caught:
            if losses:
                return [f"task.model: the second batch fails where the same one did not before: {caught}"]
            raise
        for name, buffer in trial.model.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])
    if torch.equal(*losses):
        counting = [name for name, value in counts[1].items() if value != counts[0].get(name, value)]
        return [
            f"task.model: forward counts its calls in {', '.join(counting[:4])}: the count depends on the number of "
            "processes"
        ] * bool(counting)
    changed = [name for name, value in _attributes(trial.model).items() if not _alike(value, before.get(name))]
    which = f": {', '.join(changed[:4])}" if changed else ", or draws from its own generator"
    return [
        "task.model: the same batch with the same random numbers has a different loss the second time: the model "
        f"keeps state between batches{which}"
    ]


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Attributes of modules other than weights, buffers and submodules, by name."""
    attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not (name.startswith("_") and name.endswith(("hooks", "_parameters", "_buffers", "_modules"))):
                if isinstance(value, Tensor):
                    value = value.clone()
                elif isinstance(value, list | dict):
                    value = copy.copy(value)
                attributes[f"{path}.{name}" if path else name] = value
    return attributes


def _alike(first: Any, second: Any) -> bool:
    try:
        return dataset.same(first, second)
    except Exception:  # an object that cannot be compared
        return first is second


def foreign_sums(names: Collection[str], model: nn.Module) -> list[str]:
    """Warn about user code that communicates with other ranks, and about models that normalize across ranks."""
    doubts = [
        f"task.model: {name} is a SyncBatchNorm, which normalises over the batches of all ranks; BatchNorm "
        "normalises over a micro-batch, which is the same at any number of processes"
        for name, module in model.named_modules()
        if isinstance(module, nn.SyncBatchNorm)
    ][:1]
    for file, path in sorted(user_code.files_of(names).items()):
        for line, name in _named(ast.parse(path.read_bytes())):
            if f"{name}.".startswith("torch.distributed."):
                message = (
                    f"{file}, line {line}: your code uses torch.distributed: its result depends on the number of "
                    "processes and on the micro-batches that they run at the same time"
                )
                return [*doubts, message]
    return doubts


def _named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line number and dotted name of imports and attribute accesses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


@contextmanager
def _calls(model: nn.Module) -> Iterator[Counter[str]]:
    """Count the calls of each module, by name (the model itself: empty name), while the context is active."""
    counts: Counter[str] = Counter()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
        for name, module in model.named_modules()
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _once(counts: Counter[str]) -> list[str]:
    """Modules that every forward calls exactly once."""
    return [name for name, count in counts.items() if name and count == counts[""]]
