"""Recompute a step of a run and record it: the rank side of `lockstep replay` and `lockstep diff`.

In: the run to replay, the OUTPUT of the trained run, and a step. Out: a folder with `records.jsonl`: for `replay`, a
record of each recomputed step at the level `losses`, and the facts of the target step, with the weights before that
step and its gradient beside it; for `diff`, one record of the target step at the level `modules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.checkpoint.shard_files import StateHash
from lockstep.config.errors import DONE
from lockstep.config.run import RunError
from lockstep.config.schedules import learning_rate
from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.data.job import Job
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.torch_internals import local
from lockstep.distributed.world import World
from lockstep.strategies.observer import GradientRecorder, StepObserver, WholeGradient, listening
from lockstep.strategies.strategy import NotFinite, Strategy
from lockstep.track.busy import ACTIVITY
from lockstep.training import fingerprints
from lockstep.training.errors import not_finite
from lockstep.training.plain_sides import save_on_main
from lockstep.training.session import Session, build_session, join_ranks
from lockstep.training.step_record import (
    MicroBatchValue,
    StepRecord,
    TensorPrint,
    by_step,
    print_of,
    prints_of,
    write_records,
)

if TYPE_CHECKING:
    from lockstep.strategies.engines.region import Region

RECORDS, WEIGHTS, GRADIENTS = "records.jsonl", "before.safetensors", "gradient.safetensors"


def replay(job: Job, world: World, output: str, target_step: str, begin: str) -> int:
    """Replay from the newest checkpoint of at most `begin` updates to the step that completes update `target_step`.
    Collective. Errors: `RunError`."""
    step = int(target_step)
    run = job.run
    join_ranks(job, world)
    session = build_session(job, world)
    strategy, feed = session.strategy, session.feed
    if not 1 <= step <= feed.total:
        raise RunError("LS5120", f"--step: {step} is not a step of this run; expected 1 to {feed.total}")
    checkpoints = Checkpoints(job.into(Path(output)), world, feed.total)
    ACTIVITY.set("looking for a checkpoint")
    done, notes = checkpoints.take_before(strategy.state, min(int(begin), step - 1))
    trained_steps = by_step(fingerprints.recorded(Path(output)))
    hashes = StateHash(world)

    def hashed(record: StepRecord) -> StepRecord:
        of_state = hashes.of(strategy.state.sharded_state_dict())
        weights, optimizer = of_state["weights"], of_state["optimizer"]
        return replace(record, weights=weights, optimizer=optimizer, finite=finite(strategy, world))

    def was_hashed(number: int) -> bool:
        known = trained_steps.get(number, StepRecord(number))
        return known.weights is not None or known.optimizer is not None

    records = [hashed(StepRecord(done))] if was_hashed(done) else []  # the loaded state
    step_facts: dict[str, Any] = {}
    try:
        for batch in feed.steps(after=done):
            number = batch.step + 1
            ACTIVITY.set(f"replaying step {number}")
            rate = learning_rate(run.optim, batch.step, feed.total)
            inspector = _StepInspector(session, batch) if number == step else None
            result = strategy.train_step(batch, rate)
            record = StepRecord.of_numbers(number, float(result.loss), float(result.grad_norm))
            records.append(hashed(record) if was_hashed(number) or number == step else record)
            if inspector is not None:
                step_facts = inspector.step_facts(batch, rate, record)
                break
    except NotFinite as caught:
        raise not_finite(caught, feed, feed.order.step(caught.step)) from caught
    strategy.close()
    if world.is_main:
        about = {"from": done, "notes": notes, "step": step_facts, "total": feed.total}
        write_records(run.folder / RECORDS, about, records)
    return DONE


def finite(strategy: Strategy, world: World) -> bool:
    """Whether all trained weights are finite. Collective."""
    mine = all(bool(torch.isfinite(local(tensor)).all()) for _, tensor in strategy.weights.updated_parts())
    return all(world.all_gather(mine))


class _StepInspector:
    """Collect the facts of one step. The gradient is observed during the step, everything else before it."""

    def __init__(self, session: Session, batch: StepBatch) -> None:
        """Collective."""
        self._session = session
        self._losses = _losses(session, batch.ids)
        strategy, world = session.strategy, session.world
        state = strategy.state.state_dict()
        weights = {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
        save_on_main(session.run.folder / WEIGHTS, weights, world)
        strategy.observer = self._recorder = GradientRecorder(world)

    def step_facts(self, batch: StepBatch, rate: float, record: StepRecord) -> dict[str, Any]:
        """Facts of the computed step. Only rank 0 has the norms."""
        run, feed, gradients = self._session.run, self._session.feed, self._recorder.gradients
        save_on_main(run.folder / GRADIENTS, gradients, self._session.world)
        norms = {name: float(g.double().norm()) for name, g in gradients.items()}
        norm, limit = record.grad_norm, run.optim.max_grad_norm
        return {
            "step": record.step,
            "learning_rate": rate,
            "rows": batch.ids.tolist(),
            "micro_batches": [group.tolist() for group in feed.task.split_micro_batches(feed.columns, batch.ids)],
            "tokens": feed.columns.lengths[batch.ids].tolist(),
            "losses": self._losses.tolist(),
            "norms": norms,
            "layers": layers(norms),
            "clipped": bool(limit and norm is not None and norm > limit),
            "clip": limit,
        }


def layers(norms: Mapping[str, float]) -> dict[str, float]:
    """Gradient norms by layer: parameter names are grouped by their prefix up to the first number."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        layer = numbered.group() if numbered else name.rpartition(".")[0] or name
        squares[layer] = squares.get(layer, 0.0) + norm**2
    return {layer: square**0.5 for layer, square in squares.items()}


def _losses(session: Session, rows: np.ndarray) -> np.ndarray:
    """Per-example loss per target, without dropout, with the weights before the step: float64 [rows]. Ranks take turns;
    one rank fills in each example. Collective."""
    run, world, task, strategy = session.run, session.world, session.task, session.strategy
    columns = task.splits["train"]
    losses = torch.zeros(len(rows), dtype=torch.float64, device=world.device)
    share = strategy.data_parallel
    for turn in range(0, len(rows), share.size):
        mine = turn + share.rank
        chosen = rows[mine : mine + 1]
        seed_everything(run.seed, -1, mine)
        sums = task.score(strategy.forward, task.collate(columns, chosen, 0).to(world.device))
        if len(chosen):
            losses[mine] = sums["loss"].double() / max(1, task.count_targets(columns, chosen))
    return share.all_reduce(losses).cpu().numpy()


def record_modules(job: Job, world: World, output: str, target_step: str) -> int:
    """Record the step that completes update `target_step`. Collective. Errors: `RunError`."""
    step = int(target_step)
    run = job.run
    join_ranks(job, world)
    session = build_session(job, world)
    strategy, feed = session.strategy, session.feed
    checkpoints = Checkpoints(job.into(Path(output)), world, feed.total)
    ACTIVITY.set("looking for a checkpoint")
    done, notes = checkpoints.take_before(strategy.state, step - 1)
    record: StepRecord | None = None
    for batch in feed.steps(after=done):
        ACTIVITY.set(f"replaying step {batch.step + 1}")
        rate = learning_rate(run.optim, batch.step, feed.total)
        if batch.step + 1 == step:
            record = _recorded(strategy, world, batch, rate)
            break
        strategy.train_step(batch, rate)
    strategy.close()
    if world.is_main and record is not None:
        write_records(run.folder / RECORDS, {"from": done, "notes": notes, "total": feed.total}, [record])
    return DONE


def _recorded(strategy: Strategy, world: World, batch: StepBatch, rate: float) -> StepRecord:
    """Run a step and return its record, on rank 0 with the values of all ranks, by micro-batch. Collective."""
    before = _weights(strategy, world)
    region: Region | None = getattr(strategy, "region", None)
    if region is not None:
        region.graphs = None  # a CUDA graph has the same bits, but calls no module
    observer = _ModuleRecorder(strategy, batch)
    with observer.hooked(), listening(strategy, observer):
        result = strategy.train_step(batch, rate)
    every = [replace(c, rank=rank) for rank, own in enumerate(world.all_gather(observer.computed)) for c in own]
    return StepRecord.of_numbers(
        batch.step + 1,
        float(result.loss),
        float(result.grad_norm),
        rate=float(rate),
        examples=print_of(torch.from_numpy(batch.ids)),
        before=before,
        computed=tuple(sorted(every, key=lambda computed: computed.micro_batch)),
        gradients=observer.gradients,
        after=_weights(strategy, world),
    )


def _weights(strategy: Strategy, world: World) -> dict[str, TensorPrint]:
    """Weights and buffers, then optimizer state, by name, on rank 0. Collective."""
    whole = strategy.state.state_dict()
    state = whole if world.size > 1 else {n: local(t) for n, t in whole.items()}
    names = sorted(state, key=lambda name: (not name.startswith("model."), name))
    return prints_of({name.removeprefix("model."): state[name] for name in names})


class _ModuleRecorder(StepObserver):
    """Record every value that a step computes on this rank."""

    def __init__(self, strategy: Strategy, batch: StepBatch) -> None:
        self.computed: list[MicroBatchValue] = []
        self.gradients: dict[str, TensorPrint] = {}  # on rank 0
        self._batch, self._strategy = batch, strategy
        self._micro: int = -1  # micro-batch of the most recent forward

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which module outputs are recorded too, in addition to the observer's calls by the strategy."""
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
        self._add("loss", "", [loss], index)

    def gradient(self, index: int, name: str, gradient: Tensor) -> None:
        self._add("leaf gradient", name, [gradient], index)

    def reduced(self, gradient: WholeGradient) -> None:
        whole = gradient.whole(self._strategy.world)
        self.gradients = prints_of({name: local(tensor) for name, tensor in whole.items()})

    def _add(self, kind: str, name: str, tensors: Iterable[Tensor], micro: int) -> None:
        if local_tensors := [local(t) for t in tensors]:
            self.computed.append(MicroBatchValue(kind, name, micro, print_of(*local_tensors)))

    def _begin(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        tensors = [t for t in (*args, *(kwargs[k] for k in sorted(kwargs))) if isinstance(t, Tensor)]
        self._micro = next((m.index for m in self._batch.micro_batches if _same(m, kwargs)), -1)
        if self._micro >= 0:
            self._add("inputs", "", tensors, self._micro)

    def _module(self, name: str) -> Any:
        def forward(module: nn.Module, args: Any, output: Any) -> None:
            if self._micro < 0:
                return
            self._add("output", name, floats := _floats(output), self._micro)
            for place, tensor in enumerate(each for each in floats if each.requires_grad):
                # on the tensor: a module hook would add a node to the graph
                tensor.register_hook(
                    partial(self._record_gradient, f"{name}{f' ({place})' if place else ''}", self._micro)
                )

        return forward

    def _record_gradient(self, name: str, micro: int, gradient: Tensor) -> None:
        self._add("output gradient", name, [gradient], micro)


def _same(micro: MicroBatch, kwargs: Mapping[str, Any]) -> bool:
    """Whether a model's arguments are the inputs of a micro-batch."""
    return all(
        name in kwargs and kwargs[name].shape == tensor.shape and torch.equal(kwargs[name], tensor)
        for name, tensor in micro.inputs.items()
    )


def _floats(value: Any) -> list[Tensor]:
    """Floating-point tensors in a module's output, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for each in value for t in _floats(each)] if isinstance(value, list | tuple) else []
