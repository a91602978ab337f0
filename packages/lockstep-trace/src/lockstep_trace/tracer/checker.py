"""`--check`: chooses the steps to recompute inside the traced process, on copies, and compares with what training used.

In: calls from hooks; the optimizer before and after a step. Out: one `check` record per optimizer and checked step, for
`rules/checks.py`: the gradient that the optimizer should see; observations with `reference` and `result`; `Update`. The
reader averages over ranks. `replay.py` records the calls of a step and repeats them on a copy of the model, `rows.py`
repeats them in other ways. Everything is computed before the optimizer's step, and nothing of the training is written
to: its weights, gradients, buffers, modes, random numbers and hooks stay as they are.

Three references here: the sum of the gradients of the step's micro-batches; the gradient of all micro-batches as one
batch; and the optimizer's own formula on copies of its parameters, gradients and state. For the second, dropout is off
on both sides, because one batch draws other masks than its parts. Losses outside of the model are not checked.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import placement, replay
from .fingerprint import measure, whole
from .gradient_history import written
from .graph import loss_function, loss_nodes
from .inputs import wrapped
from .records import packed
from .replay import CALLS, ModuleCall, NotRecomputable, RandomState, connect, mapped, observe_output, recorded, tensors
from .rows import REFERENCES, batch_of, distance_between, exactly, first_difference, limit_of, quiet, seed

MOST_WINDOWS = 8  # max. optimizers of a process to check


class Checker:
    """Checks the steps in `steps` of each optimizer of this process. Hooks call its methods and turn exceptions into
    records."""

    def __init__(self, hooks: Any, recorder: Any, steps: tuple[int, ...]) -> None:
        self.hooks, self.recorder, self.steps = hooks, recorder, frozenset(steps)
        self.calls: list[ModuleCall] = []
        self.backwards: list[Backward] = []
        self.begun: dict[int, int] = {}  # optimizer -> index in `backwards` since which its gradients accumulate
        self.leftovers: dict[int, dict[int, Tensor]] = {}  # optimizer -> gradients before its first backward
        self.current: ModuleCall | None = None
        self.collectives: dict[str, list[int]] = {}  # counted before the current call
        self.done: set[tuple[int, int]] = set()
        self.overflowed = False
        self.numbers = 0
        self.updates: dict[int, Update] = {}

    # -- recording ---------------------------------------------------------------------------------------------------

    def _waiting(self) -> list[int]:
        rows = enumerate(self.recorder.steps[:MOST_WINDOWS])
        return [o for o, n in rows if n in self.steps and (o, n) not in self.done]

    def active(self) -> bool:
        return bool(self._waiting()) or (not self.recorder.steps and 0 in self.steps)

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall | None:
        """Record a call of an outermost module with gradients, before it is made."""
        if not self.active() or not torch.is_grad_enabled() or self.overflowed:
            return None
        if any(wrapped(p) for p in module.parameters()):  # inside of torch.func
            return None
        if len(self.calls) >= CALLS:
            self.overflowed = True
            self.calls.clear()
            return None
        call = self.current = recorded(module, args, kwargs)
        self.collectives = {name: list(row) for name, row in self.recorder.since.collectives.items()}
        if next(module.children(), None) is None:
            self.inside(module)
        self.calls.append(call)
        return call

    def inside(self, module: nn.Module) -> None:
        """Record the autocast state inside of the current call."""
        if self.current is not None:
            device = next((p.device.type for p in self.current.module.parameters()), "cpu")
            device = device if device in ("cpu", "cuda") else "cpu"
            if torch.is_autocast_enabled(device):
                self.current.autocast = (device, torch.get_autocast_dtype(device))
            self.current = None

    def after_call(self, call: ModuleCall, args: Any, output: Any) -> None:
        """Measure the outputs of a recorded call, and watch the gradients that arrive at them."""
        self.current = None
        if self.recorder.since.collectives != self.collectives:
            call.reason = call.reason or "the forward communicates with other ranks"
        observe_output(call, args, output, lambda: self.numbers - 1 if self.hooks.backward_depth else None)

    def before_backward(self, losses: Any) -> None:
        """Record the graph of a loss, and whether gradients were zeroed before it."""
        if not self.active():
            return
        number, self.numbers = self.numbers, self.numbers + 1
        tensors = [losses] if isinstance(losses, Tensor) else [t for t in losses if isinstance(t, Tensor)]
        for optimizer in self._waiting():
            present = [
                p for p in self._parameters(optimizer) if p.grad is not None and placement.is_plain_tensor(p.grad)
            ]
            full = [p for p in present if bool((p.grad.coalesce().values() if p.grad.is_sparse else p.grad).any())]
            if not full:
                self.begun[optimizer] = len(self.backwards)
                self.leftovers.pop(optimizer, None)
            elif optimizer not in self.begun:
                self.begun[optimizer] = len(self.backwards)
                self.leftovers[optimizer] = {id(p): p.grad.detach().clone() for p in full}
        self.backwards.append(observed(self.calls, tensors, number))

    def _parameters(self, optimizer: int) -> list[Any]:
        holder = self.recorder.optimizers[optimizer]()
        return [] if holder is None else [p for group in holder.param_groups for p in group["params"]]

    # -- checking ----------------------------------------------------------------------------------------------------

    def at_step(self, optimizer: Any, here: dict[str, Any]) -> None:
        """Check a step before the optimizer makes it."""
        number = self.recorder.number_of(optimizer)
        step = self.recorder.steps[number]
        if step not in self.steps or (number, step) in self.done or number >= MOST_WINDOWS:
            return
        self.done.add((number, step))
        self.recorder.flush()
        record: dict[str, Any] = {"opt": number, "step": step, "references": []}
        with self._preserved():
            try:
                if self.hooks.backward_depth:
                    raise NotRecomputable("the optimizer steps inside backward")
                if self.overflowed:
                    raise NotRecomputable(f"the step has more than {CALLS} calls of models")
                record |= self._gradient(number, here)
            except (NotRecomputable, torch.cuda.OutOfMemoryError) as error:
                record["reason"] = str(error)
            record["references"] = [] if self.hooks.backward_depth else self._references(number)
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                self.updates[number] = before_update(optimizer, here.get("grad_scale"))
        self.recorder.write("check", **record)
        self.begun.pop(number, None)
        self.leftovers.pop(number, None)
        if not self._waiting():
            self.calls, self.backwards, self.overflowed = [], [], False

    def after_step(self, optimizer: Any) -> None:
        """Compare a checked step's weights with the optimizer's own formula."""
        number = self.recorder.number_of(optimizer)
        expected = self.updates.pop(number, None)
        if expected is not None:
            with self._preserved():
                record = after_update(optimizer, expected, self.recorder.names()[0])
            self.recorder.write("check update", opt=number, step=self.recorder.steps[number], **record)

    @contextlib.contextmanager
    def _preserved(self) -> Iterator[None]:
        recorder, self.hooks.recorder, self.hooks.replaying = self.hooks.recorder, None, True
        state = RandomState.now()
        try:
            yield
        finally:
            state.restore()
            self.hooks.recorder, self.hooks.replaying = recorder, False

    def _gradient(self, number: int, here: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for p, _ in here.get("parameters", [])]
        if not parameters or not all(type(p) is nn.Parameter or type(p) is Tensor for p in parameters):
            raise NotRecomputable("the optimizer's parameters are sharded")
        backwards = self.backwards[self.begun.get(number, 0) :]
        if not backwards:
            raise NotRecomputable("no call of backward was seen for this step")
        result = recomputed(self.calls, backwards, parameters)
        scale = float(self.recorder.since.scale) if self.recorder.since.scale is not None else 1.0
        return self._packed(result, backwards, parameters, scale) | self._left(number, parameters, scale)

    def _packed(
        self, result: Recomputed, backwards: list[Backward], parameters: list[Tensor], scale: float
    ) -> dict[str, Any]:
        names = self.recorder.names()[0]
        total = result.total()
        of = [i for i, p in enumerate(parameters) if id(p) in total and id(p) not in result.excluded]
        excluded = {names.get(key, "?"): why for key, why in result.excluded.items()}
        record: dict[str, Any] = {
            "of": of,
            "recomputed": _measured([total[id(parameters[i])] / scale for i in of], parameters, of),
            "excluded": dict(list(excluded.items())[:20]),
            "apart": result.distance,
            "backwards": len(backwards),
            "autocast": any(call.autocast for call in self.calls),
        }
        factors = [b.factors[0] for b in backwards if len(b.factors) == 1]
        if len(factors) == len(backwards) and all(f.factor is not None and f.targets is not None for f in factors):
            record["factors"] = [float(f.factor) / scale for f in factors]  # type: ignore[arg-type]
            record["targets"] = counts = [int(f.targets) for f in factors]  # type: ignore[arg-type]
            record["means"] = all(f.mean for f in factors)
            enter = record["factors"]
            if len(set(counts)) > 1 and all(counts) and all(enter) and record["means"]:
                weights = [n / sum(counts) * sum(enter) / f for n, f in zip(counts, enter, strict=True)]
                union = result.total(weights)
                record["of_union"] = _measured([union[id(parameters[i])] / scale for i in of], parameters, of)
        return record

    def _left(self, number: int, parameters: list[Tensor], scale: float) -> dict[str, Any]:
        left = self.leftovers.get(number, {})
        of = [i for i, p in enumerate(parameters) if id(p) in left and not left[id(p)].is_sparse]
        return {"left_of": of, "left": _measured([left[id(parameters[i])] / scale for i in of], parameters, of)}

    def _references(self, number: int) -> list[dict[str, Any]]:
        own = {id(p) for p in self._parameters(number)}
        calls = [c for c in self.calls if any(id(p) in own for p in c.module.parameters())]
        calls = [c for c in calls if any(o.gradients for o in c.outputs)] or calls
        if not calls:
            return []
        largest = max(calls, key=lambda c: sum(p.numel() for p in c.module.parameters()))
        results = []
        for look in (*REFERENCES, seed):
            results += [r | {"model": type(largest.module).__name__} for r in _observations(look, largest)]
        backwards = self.backwards[self.begun.get(number, 0) :]
        model = {"model": type(calls[-1].module).__name__}
        return results + [model | r for r in _observations(accumulation, calls, backwards, own)]


def _observations(look: Any, *args: Any) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = look(*args)
        return rows
    except (NotRecomputable, torch.cuda.OutOfMemoryError) as error:
        why = str(error)
    except Exception as error:  # another batch may do anything to a forward
        why = f"{type(error).__name__}: {str(error)[:200]}"
    return [{"reference": look.__name__, "result": "not made", "why": why}]


def _measured(tensors: list[Tensor], parameters: list[Tensor], of: list[int]) -> dict[str, str]:
    dense = [t.to_dense() if t.is_sparse else t for t in tensors]
    vectors = measure([t.contiguous() for t in dense], [whole(parameters[i]) for i in of])
    return packed([v.cpu() for v in vectors])


# -- gradients and updates ---------------------------------------------------------------------------------------------


@dataclass
class LossFactor:
    """A loss function of torch in one backward. `factor`: gradient that reaches its result (None until the backward).
    `targets`: number of targets that count. `mean`: whether it is a mean over them."""

    node: Any
    targets: Tensor | None
    mean: bool
    factor: Tensor | None = None

    def keep(self, gradients: Any) -> None:
        first = gradients[0] if gradients else None
        if isinstance(first, Tensor) and first.numel() == 1:
            self.factor = first.detach().clone()


@dataclass
class Backward:
    """A backward of the checked step. `outside`: parameters that the loss uses outside of calls."""

    number: int
    outside: dict[int, Tensor]
    factors: list[LossFactor]
    reason: str | None = None


def observed(calls: list[ModuleCall], losses: list[Tensor], number: int) -> Backward:
    """Record a backward before it is made."""
    try:
        outside, _ = connect(calls, losses, number)
    except NotRecomputable as error:
        return Backward(number, {}, [], str(error))
    factors = []
    for node in loss_nodes(losses[0]) if len(losses) == 1 else []:
        about = loss_function(node)
        targets = None if about.targets is None else about.targets[0].clone()
        row = LossFactor(node, targets, about.about["reduction"] == 1)
        node.register_prehook(row.keep)
        factors.append(row)
    return Backward(number, outside, factors)


@dataclass
class Recomputed:
    """Recomputed gradients of an optimizer's parameters, by id. `parts`: the same by backward, in order. `excluded`: id
    of a parameter -> why its gradient cannot be recomputed. `distance`: how far repeated outputs are from those of
    training."""

    parts: list[dict[int, Tensor]]
    excluded: dict[int, str]
    distance: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def total(self, weights: Sequence[float] | None = None) -> dict[int, Tensor]:
        """Return the sum over backwards, weighted."""
        total: dict[int, Tensor] = {}
        for part, weight in zip(self.parts, weights or [1.0] * len(self.parts), strict=True):
            for key, gradient in part.items():
                value = gradient if weight == 1.0 else gradient * weight
                total[key] = total[key] + value if key in total else value
        return total


def recomputed(calls: Sequence[ModuleCall], backwards: Sequence[Backward], parameters: Sequence[Tensor]) -> Recomputed:
    """Recompute the gradients of `parameters` from the calls that took part in the backwards."""
    trained = {id(p): p for p in parameters if p.requires_grad}
    excluded: dict[int, str] = {}
    reasons: list[str] = []
    for key, p in trained.items():
        if getattr(p, "_backward_hooks", None) or getattr(p, "_post_accumulate_grad_hooks", None):
            excluded[key] = "it has a hook on its gradient"
        elif any(key in b.outside for b in backwards):
            excluded[key] = "the loss uses it outside of the model's calls"
    result = Recomputed([], excluded, reasons=reasons)
    for backward in backwards:
        part: dict[int, Tensor] = {}
        for call in calls:
            own = [p for p in call.module.parameters() if id(p) in trained]
            if not own or not (
                backward.number in call.seeds or any(backward.number in o.gradients for o in call.outputs)
            ):
                continue
            try:
                added = _of_call(call, backward, result)
            except NotRecomputable as error:
                reasons.append(str(error))
                excluded |= {id(p): str(error) for p in own}
                continue
            for key, gradient in added.items():
                if key in trained:
                    part[key] = part[key] + gradient if key in part else gradient
        result.parts.append(part)
    return result


def _of_call(call: ModuleCall, backward: Backward, result: Recomputed) -> dict[int, Tensor]:
    if backward.reason:
        raise NotRecomputable(backward.reason)
    if any(call.versions.get(id(p)) != written(p) for p in call.module.parameters()):
        raise NotRecomputable("weights were written between the forward and the optimizer's step")
    added, distance = replay.gradients(replay.copied(call), call, backward.number)
    result.distance = max(result.distance, distance)
    if distance > replay.rounding_of(call):
        how = (
            "the compiled model draws different random numbers or rounds differently"
            if replay.is_compiled(call.module)
            else "the forward depends on more than its inputs, buffers and random numbers"
        )
        raise NotRecomputable(f"repeated outputs differ from those of training by {distance:.2g}: {how}")
    return added


Gradients = dict[int, Tensor]


def accumulation(calls: Sequence[ModuleCall], backwards: Sequence[Backward], own: set[int]) -> list[dict[str, Any]]:
    """Compare the gradient of all micro-batches with that of one batch of their examples. `own`: ids of the optimizer's
    parameters. Returns nothing for a step of one micro-batch."""
    parts = [(b, _call_of(b, calls, own)) for b in backwards]
    if len(parts) < 2:
        return []
    first = parts[0][1]
    if any(call.module is not first.module for _, call in parts):
        raise NotRecomputable("micro-batches go through different models")
    if any(isinstance(m, placement.BATCH_NORM) and m.training for m in first.module.modules()):
        raise NotRecomputable("batch norm: each micro-batch has its own statistics")
    for _, call in parts:
        if not replay.is_compiled(call.module):
            replay.require_reproduced(call)
    sizes = [batch_of(call, least=1) for _, call in parts]
    union = _joined([(call.args, call.kwargs) for _, call in parts], sizes)
    if exactly(*(replay.run(quiet(first, True), union, first, seed=seed) for seed in (1, 2))) > 0:
        raise NotRecomputable("the model draws random numbers with dropout off, or is not deterministic")
    separate: Gradients = {}
    outputs: list[list[Tensor]] = []
    for backward, call in parts:
        result, gradients = _gradients(call, (call.args, call.kwargs), _arrived(call, backward.number))
        outputs.append(result)
        separate = {k: separate[k] + g if k in separate else g for k, g in (separate | gradients).items() if k in own}
    seeds = _together([_arrived(call, b.number) for b, call in parts], outputs, sizes)
    together_outputs, together = _gradients(first, union, seeds)
    return [_compared(first, union, sizes, (outputs[0], together_outputs), (separate, together), own)]


def _call_of(backward: Backward, calls: Sequence[ModuleCall], own: set[int]) -> ModuleCall:
    if backward.reason:
        raise NotRecomputable(backward.reason)
    rows = [c for c in calls if any(backward.number in o.gradients for o in c.outputs)]
    rows = [c for c in rows if any(id(p) in own for p in c.module.parameters())]
    if len(rows) != 1:
        raise NotRecomputable(f"a loss is computed from {len(rows)} calls of models")
    return rows[0]


def _arrived(call: ModuleCall, number: int) -> dict[int, Tensor]:
    fired, seeds = replay.arrived_at(call, number)
    return {i: fired[i] for i in seeds}


def _joined(inputs: list[Any], sizes: list[int]) -> Any:
    flat = [list(tensors(each)) for each in inputs]
    if len({len(each) for each in flat}) != 1:
        raise NotRecomputable("micro-batches have different inputs")
    joined: dict[int, Tensor] = {}
    for same in zip(*flat, strict=True):
        one = same[0]
        rows = all(t.dim() and t.shape[0] == n for t, n in zip(same, sizes, strict=True))
        if rows and len({(t.shape[1:], t.dtype) for t in same}) == 1:
            joined[id(one)] = torch.cat([t.detach() for t in same]).requires_grad_(one.requires_grad)
        elif rows:
            raise NotRecomputable("micro-batches are padded to different lengths, and cannot be joined as they are")
        elif all(t.shape == one.shape and torch.equal(t, one) for t in same):
            joined[id(one)] = one
        else:
            raise NotRecomputable("an input without rows differs between micro-batches")
    values = [repr(list(_values(each))) for each in inputs]
    if len(set(values)) != 1:
        raise NotRecomputable("an option of the call differs between micro-batches")
    return mapped(inputs[0], lambda t: joined[id(t)])


def _values(value: Any) -> Any:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _values(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values(inner)
    elif not isinstance(value, Tensor):
        yield value


def _gradients(call: ModuleCall, inputs: Any, arrived: Mapping[int, Tensor]) -> tuple[list[Tensor], Gradients]:
    twin = quiet(call, True)
    result = replay.run(twin, inputs, call, gradients=True, seed=1)
    roots = [(result.floats[i], g) for i, g in arrived.items() if i < len(result.floats)]
    roots = [(t, g.to(t.dtype)) for t, g in roots if t.requires_grad]
    if len(roots) != len(arrived) or any(t.shape != g.shape for t, g in roots):
        raise NotRecomputable("the repeated forward returned different outputs")
    own = [p for p in replay.unwrapped(call.module).parameters() if p.requires_grad]
    twins = [p for p in twin.parameters() if p.requires_grad]
    parts = torch.autograd.grad([t for t, _ in roots], twins, [g for _, g in roots], allow_unused=True)
    named = {id(p): g.detach() for p, g in zip(own, parts, strict=True) if g is not None}
    return [t.detach() for t in result.floats], named


def _together(arrived: list[dict[int, Tensor]], outputs: list[list[Tensor]], sizes: list[int]) -> dict[int, Tensor]:
    if len({tuple(each) for each in arrived}) != 1:
        raise NotRecomputable("the losses of micro-batches are computed from different outputs")
    together = {}
    for i in arrived[0]:
        parts = [each[i] for each in arrived]
        if all(t.dim() and t.shape[0] == n for t, n in zip(parts, sizes, strict=True)):
            if len({t.shape[1:] for t in parts}) != 1:
                raise NotRecomputable("outputs of micro-batches have different shapes")
            together[i] = torch.cat(parts)
        elif all(t.numel() == 1 for t in parts):
            together[i] = torch.stack([t.reshape(()) for t in parts]).sum().reshape(outputs[0][i].shape)
        else:
            raise NotRecomputable("an output has no row for each example")
    return together


def _compared(
    call: ModuleCall,
    union: Any,
    sizes: list[int],
    outputs: tuple[list[Tensor], list[Tensor]],
    gradients: tuple[Gradients, Gradients],
    own: set[int],
) -> dict[str, Any]:
    separate, together = gradients
    keys = [key for key in together if key in own]
    ones = [separate[k].double().flatten() if k in separate else torch.zeros(together[k].numel()) for k in keys]
    vectors = torch.cat(ones), torch.cat([together[k].double().flatten() for k in keys])
    rows = [o for o in outputs[1] if o.dim() and o.shape[0] == sum(sizes)]
    observation: dict[str, Any] = {"reference": "accumulation", "micro": len(sizes), "loss": not rows}
    limit = max((limit_of(call, o) for o in outputs[0]), default=1e-4)
    observation["apart"] = distance = distance_between(*vectors)
    if distance <= 10 * limit:
        return observation | {"result": "same"}

    def differ(a: Tensor, b: Tensor) -> bool:
        if a.dim() and b.dim() and a.shape[0] == sizes[0] and b.shape == (sum(sizes), *a.shape[1:]):
            return distance_between(a, b[: sizes[0]]) > limit_of(call, a)
        return False

    pair = (quiet(call, True), (call.args, call.kwargs)), (quiet(call, True), union)
    module, operation = first_difference(*pair, call, differ, seed=1)
    return observation | {"result": "differs", "module": module, "operation": operation}


HALF = (torch.bfloat16, torch.float16)


@dataclass
class Update:
    """Expected results of a step. `twins`: id of a parameter -> copy with the formula's result; empty with `reason`."""

    before: dict[int, Tensor]
    twins: dict[int, Tensor]
    reason: str | None = None


def before_update(optimizer: Any, scale: Tensor | None = None) -> Update:
    """Compute the step on copies, before the optimizer makes it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = all(type(p) in (torch.nn.Parameter, Tensor) for p in parameters)
    weights = {id(p): p.detach().clone() for p in parameters} if plain else {}
    step = getattr(type(optimizer).step, "__wrapped__", None)  # without the hooks of all optimizers
    if not plain:
        return Update({}, {}, "parameters are sharded")
    if step is None or not type(optimizer).__module__.startswith("torch.optim"):
        return Update(weights, {}, f"{type(optimizer).__name__} is not an optimizer of torch")
    if type(optimizer).__name__ == "LBFGS" or scale is not None:
        return Update(weights, {}, "its step evaluates a closure, or divides by a loss scale")
    memo: dict[int, Any] = {}
    for p in parameters:
        twin = p.detach().clone().requires_grad_(p.requires_grad)
        twin.grad = None if p.grad is None else p.grad.detach().clone()
        memo[id(p)] = twin
    twins = {key: twin for key, twin in memo.items() if isinstance(twin, Tensor)}
    try:
        twin_optimizer = copy.deepcopy(optimizer, memo)
        with torch.no_grad():
            step(twin_optimizer)
    except Exception as error:  # a state may hold anything
        return Update(weights, {}, f"the step cannot be repeated: {type(error).__name__}: {str(error)[:200]}")
    return Update(weights, twins)


def after_update(optimizer: Any, expected: Update, names: dict[int, str]) -> dict[str, Any]:
    """Return the comparison after the step: `formula`: name -> difference from the formula's result, relative to the
    update (only differing ones); `lost`: name -> share of elements with a gradient that did not change."""
    formula: dict[str, float] = {}
    lost: dict[str, float] = {}
    elements = unchanged = 0
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if id(p) not in expected.before:
            continue
        name, old = names.get(id(p), f"?{i}"), expected.before[id(p)]
        twin = expected.twins.get(id(p))
        if twin is not None and not torch.equal(twin, p.detach()):
            size = max(float((twin.detach() - old).norm()), float((p.detach() - old).norm()))
            formula[name] = float((twin.detach() - p.detach()).norm()) / size if size else 0.0
        if p.dtype in HALF and p.grad is not None and not p.grad.is_sparse:
            nonzero = p.grad != 0
            count, same = int(nonzero.sum()), int((nonzero & (p.detach() == old)).sum())
            elements, unchanged = elements + count, unchanged + same
            if count:
                lost[name] = same / count
    return {
        "formula": {n: d for n, d in formula.items() if d > 1e-3},
        "reason": expected.reason,
        "lost": dict(sorted(lost.items(), key=lambda row: -row[1])[:8]),
        "lost_share": unchanged / elements if elements else None,
    }
