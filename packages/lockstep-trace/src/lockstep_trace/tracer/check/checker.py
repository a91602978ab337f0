"""Chooses the steps that `--check` recomputes, records their calls, and writes `check` records for `rules/checks.py`.

In: calls from hooks. Out: one `check` record per optimizer and checked step. Everything is computed on copies before
the optimizer's step; `_preserved` restores the process's random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import placement
from ..fingerprint import measure, whole
from ..inputs import wrapped
from ..records import packed
from .gradients import Backward, Recomputed, Update, accumulation, after_update, before_update, observed, recomputed
from .replay import CALLS, ModuleCall, NotRecomputable, RandomState, observe_output, recorded
from .rows import REFERENCES, seed

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
            "excluded_count": len(excluded),
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
