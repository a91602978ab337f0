"""Tracks gradients between two steps: zeroed, modified after backward, clipped, or never read by an optimizer.

In: parameters and their gradients. Out: values for the record, from torch's version counters and object identity;
counts in `Since`. A gradient counts as cleared only if nothing holds the tensor any more, or `zero_grad` wrote
zeros into it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import clipping_factor, placement
from .graph import summands, walk

LOOKED_AT = 8  # first steps in which values are read, which synchronizes with the device
PROBED = 8  # elements of each gradient that are compared between clipping and step, on a CPU
ROUNDING = 1e-5  # relative, of a sum of squares after clipping
EXACT = (torch.float32, torch.float64)  # gradient dtypes precise enough to distinguish factors


class GradientHistory:
    """The gradients of a process's optimizers, by optimizer number."""

    def __init__(self) -> None:
        self.last: dict[int, list[GradientVersion]] = {}  # at each optimizer's last step
        self.after: list[GradientVersion] = []  # after the last backward or clipping
        self.clipped: list[tuple[dict[str, Any], list[GradientVersion]]] = []  # since the last backward
        self.zeroed: dict[int, bool] = {}  # since each optimizer's last step
        self.added: set[int] = set()  # optimizers to whose gradients a backward added since their last step
        self.in_backward = False
        self.inside: dict[int, tuple[weakref.ref[Any], list[GradientVersion]]] = {}  # optimizers that step in backward
        self.factors = ClippingFactors()
        self.outside: dict[int, tuple[weakref.ref[Any], int]] = {}  # gradients that no optimizer reads, by parameter

    def piles_up(self, parameter: Any, backwards: int, clips: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the gradient of a parameter in no optimizer still contains that of the last step: since then
        only backwards wrote to it, and clippings by norm, all of which covered it."""
        grad = parameter.grad
        ref, count = self.outside.pop(id(parameter), (None, 0))
        if grad is None or not placement.is_plain_tensor(grad):
            return False
        self.outside[id(parameter)] = weakref.ref(grad), version(grad)
        covered = all(c["how"] == "clip_grad_norm_" and c.get("outside") for c in clips)
        return covered and ref is not None and ref() is grad and version(grad) == count + backwards + len(clips)

    def covers(self, parameters: Iterable[Any]) -> bool:
        """Return whether parameters to clip include all that have a gradient and are in no optimizer."""
        return bool(self.outside) and self.outside.keys() <= {id(p) for p in parameters}

    def before_backward(self, steps: Sequence[int]) -> None:
        self._look_for_zeroed(steps)
        alive = {n: o for n, (ref, _) in self.inside.items() if (o := ref()) is not None}
        self.inside = {n: (weakref.ref(o), gradient_versions(parameters_of(o))) for n, o in alive.items()}
        self.in_backward = True
        self.clipped = [(clip, rows) for clip, rows in self.clipped if not touched(rows)]

    def _look_for_zeroed(self, steps: Sequence[int]) -> None:
        """Check whether gradients were zeroed since each optimizer's last step: they are None, new objects, or
        modified.

        torch does not count writes by `grad.data.zero_()`, so the first steps also read the values."""
        for number, grads in self.last.items():
            if self.zeroed.get(number, True):
                continue
            same = [g for row in grads if (g := untouched(row)) is not None]
            early = 0 < steps[number] <= LOOKED_AT
            if len(same) < len(grads) or not same or not early or not all(bool(g.count_nonzero()) for g in same[:3]):
                self.zeroed[number] = True

    def after_backward(self, roots: Iterable[nn.Module]) -> None:
        """Store the gradients' versions after backward, to detect later modifications."""
        self.in_backward = False
        for number, grads in self.last.items():
            if not self.zeroed.get(number, True):
                if touched(grads):  # copies of other weights keep their gradients while backward runs
                    self.added.add(number)
                self.last[number] = gradient_versions(p for ref, _, _ in grads if (p := ref()) is not None)
        for clip, rows in self.clipped:  # gradients clipped before this backward
            if any(has_gradient(row) and untouched(row) is None for row in rows):
                clip["early"] = True
        self.clipped = []
        self.after = gradient_versions(p for root in roots for p in root.parameters())

    def added_to(self, number: int) -> bool:
        """Return whether a backward, or a hook in it, added to the gradients of an optimizer's last step."""
        added = number in self.added or (self.in_backward and touched(self.last.get(number, [])))
        return added and not self.zeroed.get(number, True)

    def is_stale(self, number: int, optimizer: Any) -> bool:
        """Return whether an optimizer steps inside of backward before that has accumulated any of its gradients."""
        if not self.in_backward:
            return False
        known = self.inside.get(number)
        self.inside[number] = known or (weakref.ref(optimizer), [])
        if known is None:
            return False
        rows = known[1]
        now = [p for p in parameters_of(optimizer) if p.grad is not None]
        return bool(rows) and len(now) >= len(rows) and not any(untouched(row) is None for row in rows)

    def rewritten(self) -> bool:
        """Return whether gradients were modified since the last backward or clipping."""
        return touched(self.after)

    def has_clipped(self, clip: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Store the gradients' versions after clipping."""
        self.after = gradient_versions(ref for row in self.after if (ref := row[0]()) is not None)
        self.clipped.append((clip, gradient_versions(parameters)))
        self.factors.has_clipped(clip, parameters)

    def stepped(self, number: int, parameters: Iterable[Any]) -> None:
        """Store the gradients that an optimizer used."""
        self.last[number] = gradient_versions(parameters)
        self.zeroed[number] = not self.last[number]
        self.added.discard(number)


def parameters_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class ClippingFactors:
    """Decides whether the gradients of a step equal those before `clip_grad_norm_` times its factor.

    They do if nothing writes to them after clipping. Version counters show writes, except those through `grad.data`. So
    an optimizer is trusted only after a step in which both were measured and agreed, and a few elements of each
    gradient are compared (only on a CPU, where that needs no synchronization)."""

    def __init__(self) -> None:
        self.agreed: dict[int, bool] = {}  # by optimizer: whether its last measured step agreed
        self._clip: dict[str, Any] = {}
        self._after: dict[int, tuple[weakref.ref[Any], int]] = {}  # id of parameter -> (gradient, version)
        self._probe: Tensor | None = None

    def has_clipped(self, clip: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Remember the gradients after clipping."""
        if not any(self.agreed.values()) or clip["how"] != "clip_grad_norm_":
            self._clip = {}
            return
        self._clip = clip
        self._after = {id(p): (weakref.ref(p.grad), version(p.grad)) for p in parameters if p.grad is not None}
        self._probe = _probe([p.grad for p in parameters if p.grad is not None])

    def known(self, number: int, clips: Sequence[Mapping[str, Any]], parameters: Sequence[Any]) -> bool:
        """Return whether the gradients of `parameters` follow from those before clipping. `clips`: since the last
        step."""
        if not self.agreed.get(number) or len(clips) != 1 or clips[0] is not self._clip or clips[0].get("early"):
            return False
        if clips[0].get("scaled") or len(parameters) != len(self._after):
            return False
        if not all(self._unchanged(p) for p in parameters):
            return False
        probe = _probe([p.grad for p in parameters])
        return probe is None or (self._probe is not None and torch.equal(probe, self._probe))

    def _unchanged(self, parameter: Any) -> bool:
        grad: Any = parameter.grad
        ref, count = self._after.get(id(parameter), (None, -1))
        if placement.is_dtensor(grad) or grad.dtype not in EXACT:
            return False
        return ref is not None and ref() is grad and version(grad) == count

    def compare_unclipped(self, number: int, record: Mapping[str, Any], numbers: Mapping[str, list[Tensor]]) -> None:
        """Compare the gradients of a recorded step with those before clipping, by their sums of squares."""
        if "unclipped" not in numbers or "grads" not in numbers:
            return
        clips = record["clips"]
        norm = clips[0].get("norm") if len(clips) == 1 else None
        if norm is None or clips[0]["how"] != "clip_grad_norm_" or record["rewritten"]:
            self.agreed[number] = False
            return
        factor = clipping_factor(clips[0]["limit"], norm)
        before, after = (
            torch.stack([v[1] for v in numbers[name]]).view(torch.float64) for name in ("unclipped", "grads")
        )
        near = (after - before * factor**2).abs() <= ROUNDING * after
        self.agreed[number] = bool(near.all())


def _probe(grads: Sequence[Tensor]) -> Tensor | None:
    if any(g.device.type != "cpu" for g in grads):
        return None
    flats = [g.view(-1) for g in grads if g.layout == torch.strided and g.is_contiguous() and g.numel()]
    return torch.cat([f[:: f.numel() // PROBED + 1] for f in flats]) if flats else None


class GradientUse:
    """Tracks which gradients of this process are read by an optimizer."""

    def __init__(self) -> None:
        self.zeroed_before = self.zeroed = False  # `zero_grad` was called since the last backward
        self._late: list[tuple[dict[str, Any], list[GradientVersion]]] = []  # clipped before any backward of a step

    def before_backward(self, after: Sequence[GradientVersion]) -> bool:
        """Return whether all gradients of the last backward, `after`, were cleared. Forgets what was clipped."""
        for clip, rows in self._late:
            if "used" not in clip and all(self._cleared(row) for row in rows):
                clip["unused"] = True
        self._late = []
        cleared = bool(after) and all(self._cleared(row) for row in after)
        self.zeroed_before, self.zeroed = self.zeroed, False
        return cleared

    def _cleared(self, row: GradientVersion) -> bool:
        parameter, grad, _ = row[0](), row[1](), row[2]
        if parameter is None:
            return False
        if not has_gradient(row):
            return grad is None  # else the script keeps it
        return self.zeroed and parameter.grad is grad and untouched(row) is None

    def has_clipped(self, clip: dict[str, Any], parameters: Sequence[Any]) -> None:
        """Remember a clipping that follows a step, or that precedes any backward."""
        if not clip["backwards"]:
            clip["all"] = sum(1 for p in parameters if p.requires_grad)
            self._late.append((clip, gradient_versions(parameters)))

    def stepped(self, parameters: Sequence[Any]) -> None:
        """Mark clippings whose gradients a step reads."""
        if self._late:
            own = {id(p) for p in parameters}
            for clip, rows in self._late:
                if any(id(row[0]()) in own and has_gradient(row) for row in rows):
                    clip["used"] = True


class Terms:
    """Looks for a term of a loss whose gradients are in parameters of another optimizer alone, and are cleared before
    that one steps. The loss after it must reach the other optimizer alone, so that losses over both, of which each
    optimizer takes its share, do not count."""

    def __init__(self) -> None:
        self.stepped = set[int]()
        self._left: tuple[int, int, weakref.ref[Any]] | None = None  # optimizers: steps, is reached; a parameter

    def look(self, loss: Any, optimizers: Mapping[int, Any]) -> list[tuple[tuple[str, str], Tensor | None]]:
        """Return the note on the loss before this one."""
        left, stepped = self._left, self.stepped
        self._left, self.stepped = None, set()
        if len(optimizers) != 2:
            return []
        owners = {id(p): n for n, o in optimizers.items() for g in o.param_groups for p in g["params"]}
        terms = [{id(v): v for v in _variables(node) if id(v) in owners} for _, _, node in summands(loss, 1)]
        reached = [{owners[i] for i in term} for term in terms if term]
        parameter = left[2]() if left is not None and stepped == {left[0]} and reached else None
        if left is not None and parameter is not None and all(each == {left[1]} for each in reached):
            return [(("term cut", ""), None if parameter.grad is None else (parameter.grad == 0).all())]
        for own, term in zip(reached, (t for t in terms if t), strict=True) if len(reached) > 1 else ():
            others = [each for each in reached if each != own]
            if len(own) == 1 and others and all(not each & own for each in others):
                self._left = min(others[0]), min(own), weakref.ref(next(iter(term.values())))
        return []


def _variables(node: Any) -> list[Any]:
    return [v for n in walk([node], most=1024) if (v := getattr(n, "variable", None)) is not None]


class Leaks:
    """Gradients that one loss leaves in the parameters of an optimizer, while another optimizer steps by that loss."""

    def __init__(self) -> None:
        self.looks: float = LEAKS
        self._marks: dict[int, list[Any]] = {}  # by optimizer, before or after the last backward
        self._losses: dict[int, list[Loss]] = {}  # since its gradients were cleared
        self._left: dict[int, Tensor] = {}  # whether gradients before a backward are not zero
        self._notes: dict[int, tuple[str, Tensor]] = {}
        self._delayed: dict[
            int, tuple[int, Loss]
        ] = {}  # by optimizer: one that stepped by its first loss, its last one

    def before_backward(self, optimizers: Mapping[int, Any]) -> None:
        for number, optimizer in optimizers.items() if len(optimizers) > 1 and self.looks > 0 else ():
            now = _marks(optimizer)
            if self._marks.get(number) != now:  # cleared, or written to
                self._losses[number] = []
                self._notes.pop(number, None)
            self._marks[number] = now
            if any(loss.stepped for loss in self._losses.get(number, ())):
                self._left[number] = torch.stack([p.grad.any() for p in _with_gradients(optimizer)]).any()

    def after_backward(self, optimizers: Mapping[int, Any]) -> None:
        marks = {n: _marks(o) for n, o in optimizers.items()} if self._marks and self.looks > 0 else {}
        reached = {n for n, now in marks.items() if self._marks.get(n) != now}
        loss = Loss(reached)
        for number in reached:
            losses = self._losses.setdefault(number, [])
            others = next((each.stepped - reached for each in losses if each.stepped - reached), None)
            if others and number in self._left:
                self._notes[number] = f"leak {number} {min(others)}", self._left[number]
            losses.append(loss)
        self._marks, self._left = marks, {}
        self.looks -= 1 / OFTEN

    def stepped(self, number: int) -> list[tuple[str, Tensor]]:
        """Return notes on the gradients of an optimizer's step, and whether they hold."""
        for other, losses in self._losses.items():
            for loss in losses:
                if other != number and number in loss.reached:
                    loss.stepped.add(number)
        losses, self._losses[number] = self._losses.get(number, []), []
        note = self._notes.pop(number, None)
        for other, (by, last) in list(self._delayed.items()):
            if by == number and any(loss is last for loss in losses):
                del self._delayed[other]  # it steps by each loss, and the other one seldom
        row = self._delayed.pop(number, None)
        if note is None and row is not None and self.looks > 0:
            note = f"leak {number} {row[0]}", torch.ones(())
        if earlier := {o for loss in losses[:-1] for o in loss.stepped - losses[-1].stepped - {number}}:
            self._delayed[number] = min(earlier), losses[-1]
        self.looks -= note is not None
        return [] if note is None else [note]


@dataclass
class Loss:
    """A backward: the optimizers that it reached, and those stepped since."""

    reached: set[int]
    stepped: set[int] = field(default_factory=set)


LEAKS, OFTEN = 8, 64  # steps with such gradients that are looked at; backwards that count as one of them


def nonfinite(optimizers: Iterable[Any], losses: Sequence[tuple[Tensor, bool]]) -> Tensor | None:
    """Return how many gradients and weights are not finite, and how many of the last losses are; None if too few."""
    params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    rows = [(p.grad, p) for p in params if p.grad is not None and placement.is_plain_tensor(p.grad)]
    if not rows or len(losses) < LOOKED_AT:
        return None
    bad = [torch.stack([~t.isfinite().all() for t in tensors]).sum() for tensors in zip(*rows, strict=True)]
    return torch.stack([*bad, torch.stack([value.isfinite() for value, _ in losses[-LOOKED_AT:]]).sum()])


def _with_gradients(optimizer: Any) -> list[Any]:
    return [row[0]() for row in gradient_versions(p for g in optimizer.param_groups for p in g["params"])]


def _marks(optimizer: Any) -> list[Any]:
    rows = gradient_versions(p for group in optimizer.param_groups for p in group["params"])
    return [(id(p()), id(grad()), count) for p, grad, count in rows]


ACCUMULATED = ("momentum_buffer", "momentum", "velocity", "exp_avg", "exp_avg_sq", "sum", "square_avg", "m", "v")


def shared_with_gradients(optimizer: Any) -> bool:
    """Return whether a state that accumulates shares memory with the gradient of every parameter that has both."""
    rows: dict[str, list[bool]] = {}
    for parameter, state in optimizer.state.items():
        grad: Any = getattr(parameter, "grad", None)
        plain = isinstance(state, dict) and placement.is_plain_tensor(grad) and grad.layout == torch.strided
        for name in ACCUMULATED if plain else ():
            if placement.is_plain_tensor(value := state.get(name)) and value.shape == grad.shape:
                rows.setdefault(name, []).append(value.data_ptr() == grad.data_ptr() != 0)
    return any(map(all, rows.values()))


# -- versions ----------------------------------------------------------------------------------------------------------


FIRST = 8  # parameters to check

GradientVersion = tuple[weakref.ref[Any], weakref.ref[Any], int]  # (parameter, its gradient, version)


def gradient_versions(parameters: Iterable[Any]) -> list[GradientVersion]:
    """Return the gradient versions of the first `FIRST` parameters with gradients."""
    references = ((weakref.ref(p), weakref.ref(p.grad), version(p.grad)) for p in parameters if p.grad is not None)
    return list(itertools.islice(references, FIRST))


def untouched(row: GradientVersion) -> Tensor | None:
    """Return the gradient if it is the same, unmodified object, else None."""
    parameter, grad, count = row[0](), row[1](), row[2]
    alike = parameter is not None and grad is not None and parameter.grad is grad and version(grad) == count
    return grad if alike else None


def has_gradient(row: GradientVersion) -> bool:
    """Return whether a parameter still has a gradient."""
    parameter = row[0]()
    return parameter is not None and parameter.grad is not None


def touched(rows: Sequence[GradientVersion]) -> bool:
    """Return whether any of the gradients was modified or replaced."""
    return any(untouched(row) is None for row in rows)


def local_shape(parameter: Any) -> Any:
    """Return the shape of elementwise optimizer state for a parameter."""
    return parameter.tensor.shape if isinstance(parameter, placement.FlatPart) else parameter.shape


def version(tensor: Any) -> int:
    """Return torch's version counter of a tensor. Writes through `tensor.data` are not counted.

    A DTensor counts its own writes, and its local tensor those of FSDP. Neither counts writes of `_foreach` functions,
    which `watch_foreach` counts."""
    if not placement.is_dtensor(tensor):
        return int(getattr(tensor, "_version", 0))
    ref, writes = _WRITES.get(id(tensor), (None, 0))
    counted = sum(int(getattr(part, "_version", 0)) for part in (tensor, tensor.to_local()))
    return counted + (writes if ref is not None and ref() is tensor else 0)


_WRITES: dict[int, tuple[weakref.ref[Any], int]] = {}  # writes of `_foreach` functions to DTensors, by id


def watch_foreach() -> None:
    """Count writes of torch's `_foreach` functions to DTensors from now on."""
    for name in dir(torch):
        original = getattr(torch, name) if name.startswith("_foreach_") and name.endswith("_") else None
        if original is not None and not hasattr(original, "lockstep_wrapped"):
            setattr(torch, name, _counting(original))


def _counting(original: Any) -> Any:
    @functools.wraps(original)
    def write(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tensors, *args, **kwargs)
        if not torch.compiler.is_compiling():
            for tensor in tensors:
                if placement.is_dtensor(tensor):
                    _wrote(tensor)
        return result

    write.lockstep_wrapped = True  # type: ignore[attr-defined]
    return write


def _wrote(tensor: Any) -> None:
    key = id(tensor)
    ref, writes = _WRITES.get(key, (None, 0))
    if ref is None or ref() is not tensor:
        ref, writes = weakref.ref(tensor, lambda old: _forget(key, old)), 0
    _WRITES[key] = ref, writes + 1


def _forget(key: int, ref: Any) -> None:
    if key in _WRITES and _WRITES[key][0] is ref:
        del _WRITES[key]


def written(parameter: Any) -> tuple[int, int]:
    """Return (version, address) of a parameter, which change when its values are modified or replaced."""
    if isinstance(parameter, placement.FlatPart):
        parameter = parameter.tensor
    plain = isinstance(parameter, Tensor) and not placement.is_dtensor(parameter)
    return version(parameter), parameter.data_ptr() if plain else 0
