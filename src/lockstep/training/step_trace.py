"""One step of a run, taken apart: what every rank does for `lockstep diff`.

In: the run as it is replayed, the OUTPUT of the one that was trained, and a step. Out: `anatomy.json`, a list of hashes
in the order in which things are computed: the weights before, the rows, and of every micro-batch its inputs, what each
module gives in forward, the loss, what each module is given in backward, and each parameter's gradient; then the sum of
these, its norm, the rate, and the weights after. Two lists are compared entry by entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.errors import DONE
from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.sharded import local
from lockstep.distributed.world import World
from lockstep.strategies.exact import optim
from lockstep.strategies.observer import StepObserver, WholeGradient, listening
from lockstep.strategies.strategy import Strategy
from lockstep.training.resolve import Job
from lockstep.training.session import build_session, join_ranks

FOUND = "anatomy.json"
# In the order in which a step computes them.
KINDS = (
    "weights before",
    "rows",
    "inputs",
    "forward",
    "loss",
    "backward",
    "leaf",
    "gradient",
    "norm",
    "rate",
    "update",
)


@dataclass(frozen=True)
class Entry:
    """Something that was computed."""

    kind: str  # one of KINDS
    name: str  # of the tensor, module or parameter
    hash: str
    micro_batch: int = -1  # -1: of the whole step
    rank: int = 0
    norm: float | None = None  # of a gradient
    value: float | None = None  # of a number


def take_apart(job: Job, world: World, output: str, wanted: str) -> int:
    """The step after which `wanted` updates are done. Collective. Errors: `RunError`."""
    step = int(wanted)
    run, prepared = job.run, job.data
    join_ranks(job, world)
    session = build_session(job, world)
    strategy, feed = session.strategy, session.feed
    checkpoints = Checkpoints(run.model_copy(update={"output": output}), world, prepared, feed.total)
    ACTIVITY.at("looking for a checkpoint")
    done, notes = checkpoints.take_before(strategy, step - 1)
    entries: list[Entry] = []
    for batch in feed.steps(after=done):
        ACTIVITY.at(f"replaying step {batch.step + 1}")
        rate = optim.learning_rate(run.optim, batch.step, feed.total)
        if batch.step + 1 == step:
            entries = _looked_at(strategy, world, batch, rate)
            break
        strategy.train_step(batch, rate)
    strategy.close()
    if world.is_main:
        report = {"from": done, "notes": notes, "total": feed.total, "entries": [asdict(e) for e in entries]}
        (run.folder / FOUND).write_text(json.dumps(report), encoding="utf-8")
    return DONE


def read(folder: Path) -> tuple[list[Entry], dict[str, Any]]:
    """The entries, and the rest of what was written."""
    report = json.loads((folder / FOUND).read_text(encoding="utf-8"))
    return [Entry(**values) for values in report.pop("entries")], report


def hash_of(*tensors: Tensor) -> str:
    """Of the bits of tensors, their types and shapes."""
    seen = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        plain = (tensor.to_dense() if tensor.is_sparse else tensor).detach().cpu().contiguous()
        seen.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        seen.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def _looked_at(strategy: Strategy, world: World, batch: StepBatch, rate: float) -> list[Entry]:
    """On rank 0, all that the ranks have seen in the order of KINDS and micro-batches. Collective."""
    entries = _tensors("weights before", _weights(strategy, world))
    entries.append(Entry("rows", "", hash_of(torch.from_numpy(batch.ids))))
    tracer = _Tracer(strategy, batch)
    with tracer.hooked(), listening(strategy, tracer):
        result = strategy.train_step(batch, rate)
    entries += tracer.entries
    norm = float(result.grad_norm)
    entries.append(Entry("norm", "", norm.hex(), value=norm))
    entries.append(Entry("rate", "", float(rate).hex(), value=float(rate)))
    entries += _tensors("update", _weights(strategy, world))
    mine = entries if world.is_main else [e for e in entries if e.micro_batch >= 0]
    every = [replace(e, rank=rank) for rank, each in enumerate(world.all_gather(mine)) for e in each]
    places = {id(e): i for i, e in enumerate(every)}
    computed = ("inputs", "forward", "loss", "backward", "leaf")  # of one micro-batch after the other

    def when(entry: Entry) -> tuple[int, int, int]:
        kind = KINDS.index("inputs" if entry.kind in computed else entry.kind)
        return kind, entry.micro_batch, places[id(entry)]

    return sorted(every, key=when) if world.is_main else []


def _weights(strategy: Strategy, world: World) -> Mapping[str, Tensor]:
    """Weights, buffers and the optimizer's state by name, on rank 0. Collective."""
    return strategy.state_dict() if world.size > 1 else {n: local(t) for n, t in strategy.state_dict().items()}


def _tensors(kind: str, state: Mapping[str, Tensor]) -> list[Entry]:
    names = sorted(state, key=lambda name: (not name.startswith("model."), name))
    return [Entry(kind, name.removeprefix("model."), hash_of(state[name])) for name in names]


class _Tracer(StepObserver):
    """Writes down everything that a step computes on this rank."""

    def __init__(self, strategy: Strategy, batch: StepBatch) -> None:
        self.entries: list[Entry] = []
        self._batch, self._strategy = batch, strategy
        self._micro: int = -1  # the micro-batch whose forward came last

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """In here it hears of what modules compute, besides what a strategy tells its observer."""
        model = self._strategy.model
        hooks: list[Any] = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for name, module in model.named_modules():
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                hooks.append(module.register_forward_hook(self._module(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def hears(self, index: int) -> bool:
        return True

    def loss(self, index: int, loss: Tensor) -> None:
        self._add("loss", "", [loss], index, value=float(loss.detach()))

    def gradient(self, index: int, name: str, gradient: Tensor) -> None:
        self._add("leaf", name, [gradient], index)

    def reduced(self, gradient: WholeGradient) -> None:
        for name, tensor in gradient.whole(self._strategy.world).items():
            self._add("gradient", name, [tensor], -1, norm=float(local(tensor).double().norm()))

    def _add(self, kind: str, name: str, tensors: Iterable[Tensor], micro: int, **more: Any) -> None:
        if held := [local(t) for t in tensors]:
            self.entries.append(Entry(kind, name, hash_of(*held), micro, **more))

    def _begin(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        tensors = [t for t in (*args, *(kwargs[k] for k in sorted(kwargs))) if isinstance(t, Tensor)]
        self._micro = next((m.index for m in self._batch.micro_batches if _same(m, kwargs)), -1)
        if self._micro >= 0:
            self._add("inputs", "", tensors, self._micro)

    def _module(self, name: str) -> Any:
        def forward(module: nn.Module, args: Any, output: Any) -> None:
            if self._micro < 0:
                return
            self._add("forward", name, floats := _floats(output), self._micro)
            for place, tensor in enumerate(each for each in floats if each.requires_grad):
                # on the tensor: a hook on the module would put a node of its own into the graph
                tensor.register_hook(partial(self._given, f"{name}{f' ({place})' if place else ''}", self._micro))

        return forward

    def _given(self, name: str, micro: int, gradient: Tensor) -> None:
        self._add("backward", name, [gradient], micro)


def _same(micro: MicroBatch, kwargs: Mapping[str, Any]) -> bool:
    """Whether a model is given the inputs of a micro-batch."""
    return all(
        name in kwargs and kwargs[name].shape == tensor.shape and torch.equal(kwargs[name], tensor)
        for name, tensor in micro.inputs.items()
    )


def _floats(value: Any) -> list[Tensor]:
    """The tensors of floating point in what a module gives, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for each in value for t in _floats(each)] if isinstance(value, list | tuple) else []
