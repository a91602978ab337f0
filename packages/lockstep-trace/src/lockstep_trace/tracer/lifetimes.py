"""Follows values between calls: loaded weights until they are used, states from one batch to the next, and updates.

In: loads, calls and steps. Out: `fact` records, written once, and notes as in `evidence.py`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import tensors_of
from .placement import is_plain_tensor

SAMPLE, ALIKE = 64, 0.5  # numbers of a matrix that are compared; correlation of a matrix with itself
PART = 4096  # numbers of a parameter whose updates are looked at
LARGE = 1 << 20  # numbers of a state
EVERY, LAST = 4, 40  # steps whose updates are looked at


def _sample(parameter: Any, most: int = SAMPLE) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // most)][:most].clone()


class LoadedWeights:
    """Matrices that a checkpoint wrote, until their model is called, and parameters that it did not have."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._loaded: list[tuple[weakref.ref[Any], Tensor]] = []
        self._new: list[tuple[weakref.ref[Any], str]] = []

    def loaded(self, module: nn.Module, missing: Iterable[str]) -> None:
        """Record that a state was loaded, without the names in `missing`."""
        absent, named = set(missing), dict(module.named_parameters())
        now = {id(p) for p in named.values()}
        rows = {n: p for n, p in named.items() if is_plain_tensor(p) and p.dim() > 1 and p.numel() >= SAMPLE}
        self._loaded = [row for row in self._loaded if id(row[0]()) not in now]
        self._new = [row for row in self._new if id(row[0]()) not in now]
        there = [p for n, p in rows.items() if n not in absent and p.device.type != "meta"]
        self._loaded += [(weakref.ref(p), _sample(p)) for p in there]
        if there:
            body = f"{getattr(module, 'base_model_prefix', '')}."
            self._new += [(weakref.ref(p), n) for n, p in rows.items() if n in absent and not n.startswith(body)]

    def called(self, module: nn.Module) -> None:
        """Record whether other numbers were written over the matrices of a model that is called."""
        if not self._loaded:
            return
        own = {id(p) for p in module.parameters()}
        rows = [(p, before) for ref, before in self._loaded if (p := ref()) is not None and id(p) in own]
        self._loaded = [row for row in self._loaded if id(row[0]()) not in own]
        over = [p for p, before in rows if _is_other(before, _sample(p))]
        if 2 * sum(p.numel() for p in over) > sum(p.numel() for p, _ in rows):
            self._write("fact", fact="load overwritten", argument=f"{len(over)} of {len(rows)}")

    def stepped(self, models: Sequence[nn.Module]) -> None:
        """Record the new parameters that are frozen."""
        rows = [(p, n) for ref, n in self._new if (p := ref()) is not None and not p.requires_grad]
        self._new = []
        for root in models if rows else ():
            own = {id(p): n for n, p in root.named_parameters()}
            names = [n for p, n in rows if id(p) in own and "original_module" not in own[id(p)]]
            if names:
                self._write("fact", fact="new and frozen", argument=", ".join(names[:3]))
                return


def _is_other(before: Tensor, after: Tensor) -> bool:
    one, other = (t.to("cpu", torch.float64) for t in (before, after))
    if len(one) != len(other) or torch.equal(one, other) or one.std() == 0:
        return False
    return bool(other.std() == 0 or torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < ALIKE)


def lost_updates(optimizer: Any, parameters: Sequence[Any], step: int) -> Callable[[], Tensor] | None:
    """Return a function to call after a step: whether most weights of half precision that have a gradient are
    unchanged. None if there are none, or the step is not looked at."""
    own = type(optimizer).__module__.startswith("torch.optim")
    half = [p for p in parameters if p.dtype in (torch.bfloat16, torch.float16) and is_plain_tensor(p)]
    half = [p for p in half if p.grad is not None and p.grad.layout == torch.strided and p.dim()]
    if not own or not half or step % EVERY != EVERY // 2 or step > LAST:
        return None
    if not all(float(group.get("lr") or 0) for group in optimizer.param_groups):
        return None
    before = [(_sample(p, PART), _sample(p.grad, PART) != 0) for p in half]

    def lost() -> Tensor:
        rows = [(there & (_sample(p, PART) == b), there) for p, (b, there) in zip(half, before, strict=True)]
        same, all_ = (torch.stack([row[i].sum() for row in rows]).sum() for i in (0, 1))
        return same > 0.5 * all_

    return lost


def accumulates() -> bool:
    """Return whether Accelerate is accumulating gradients: an optimizer that it knows makes no step then."""
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return (getattr(kind, "_shared_state", None) or {}).get("sync_gradients") is False


class Carried:
    """States that the last call of each module returned besides its output."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[tuple[str | None, int], list[Tensor]]] = {}

    def returned(self, module: nn.Module, result: Any, at: tuple[str | None, int]) -> None:
        """Keep the states of a result. `at`: pass and batch of the loader."""
        rest = result[1:] if isinstance(result, tuple | list) else ()
        states = [t.detach() for _, t in tensors_of(rest) if is_plain_tensor(t) and 0 < t.numel() < LARGE]
        self._states[id(module)] = at, [t for t in states if t.is_floating_point()]

    def taken(self, module: nn.Module, args: Any, at: tuple[str | None, int]) -> bool:
        """Return whether a call with another batch of the same pass takes a state of the module's last call."""
        before, states = self._states.pop(id(module), (at, []))
        addresses = {(t.data_ptr(), t.shape) for t in states}
        taken = any((t.data_ptr(), t.shape) in addresses for _, t in tensors_of(args))
        return taken and before[0] == at[0] is not None and before != at
