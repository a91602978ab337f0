"""A stand-in for CUDA graphs on a CPU: it records each operation with its tensors, and repeats the operations on them.

Like a graph, it repeats at the recorded addresses and with the recorded numbers, runs no Python again, and leaves
results without values until it is replayed. Like a stream that is recorded, it refuses to tell the host a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}


class Recording(TorchDispatchMode):
    """Records what runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Repeat the calls."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                if not func._schema.is_mutable:
                    for tensor, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                        if isinstance(tensor, torch.Tensor):
                            tensor.copy_(new)


class CpuRecorder:
    """Records on a CPU, as `CudaRecorder` does on a GPU. `events`: what was recorded and replayed, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        number, recording = sum(event.startswith("record") for event in self.events), Recording()
        self.events.append(f"record {number}")
        work()
        with recording:
            result = work()
        with torch.no_grad():  # recorded, but not computed
            for func, _, _, outputs in recording.calls:
                for tensor in tree_leaves(outputs):
                    if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not func._schema.is_mutable:
                        tensor.fill_(float("nan"))

        def replay() -> None:
            self.events.append(f"replay {number}")
            recording.replay()

        return result, replay


class RerunRecorder:
    """Runs the function again at every replay: torch.compile does not work in a `Recording`."""

    def __init__(self, device: torch.device) -> None:
        pass

    def __call__(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        result = work()

        def replay() -> None:
            again = work()
            with torch.no_grad():
                for tensor, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(tensor, torch.Tensor):
                        tensor.copy_(new)

        return result, replay
