"""Recompute a step of a run and record its intermediate values: the rank side of `lockstep replay` and `lockstep diff`.

In: the run to replay, the OUTPUT of the trained run, and a step. Out, for `replay`: a folder with `replay.json` (the
steps on the way, compared with the recorded fingerprints, and the facts of the target step), the weights before that
step and its gradient. For `diff`: `anatomy.json`, a list of hashes in order of computation: the weights before; the
rows; for every micro-batch its inputs, each module's forward output, the loss, each module's backward input, and each
parameter's gradient; then the sum of the gradients, its norm, the learning rate, and the weights after. Two lists are
compared entry by entry.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.checkpoint.storage import StateHash
from lockstep.config.errors import DONE
from lockstep.config.run import RunError
from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.sharded import local
from lockstep.distributed.world import World
from lockstep.strategies.exact import optim
from lockstep.strategies.job import Job
from lockstep.strategies.observer import GradientRecorder, StepObserver, WholeGradient, listening
from lockstep.strategies.strategy import NotFinite, Strategy
from lockstep.track.report.history import lines_of
from lockstep.training import fingerprints
from lockstep.training.errors import not_finite
from lockstep.training.plain_sides import save_on_main
from lockstep.training.session import Session, build_session, join_ranks

REPLAY, WEIGHTS, GRADIENTS = "replay.json", "before.safetensors", "gradient.safetensors"
_HASHED = ("weights", "optimizer")


def replay(job: Job, world: World, output: str, target_step: str, begin: str) -> int:
    """Replay from the newest checkpoint of at most `begin` updates to the step that completes update `target_step`.
    Collective. Errors: `RunError`."""
    step = int(target_step)
    run, prepared = job.run, job.data
    join_ranks(job, world)
    session = build_session(job, world)
    strategy, feed = session.strategy, session.feed
    if not 1 <= step <= feed.total:
        raise RunError("LS5120", f"--step: {step} is not a step of this run; expected 1 to {feed.total}")
    trained = run.model_copy(update={"output": output})
    checkpoints = Checkpoints(trained, world, prepared, feed.total)
    ACTIVITY.at("looking for a checkpoint")
    done, notes = checkpoints.take_before(strategy, min(int(begin), step - 1))
    written = {line["step"]: line for line in lines_of(Path(output) / fingerprints.FILE, ("step", "hash"))}
    hashes = StateHash(world)

    def hashed(strategy: Strategy) -> dict[str, Any]:
        return {**hashes.of(strategy.sharded_state_dict()), "finite": finite(strategy, world)}

    compared: list[dict[str, Any]] = []
    if any(name in (known := written.get(done, {})) for name in _HASHED):  # check the loaded state
        compared.append({"now": {"step": done, **hashed(strategy)}, "then": known})
    step_facts: dict[str, Any] = {}
    try:
        for batch in feed.steps(after=done):
            number = batch.step + 1
            ACTIVITY.at(f"replaying step {number}")
            rate = optim.learning_rate(run.optim, batch.step, feed.total)
            looker = _Looker(session, batch) if number == step else None
            result = strategy.train_step(batch, rate)
            line = fingerprints.line(number, float(result.loss), float(result.grad_norm))
            known = written.get(number, {})
            if any(name in known for name in _HASHED) or number == step:
                line |= hashed(strategy)
            compared.append({"now": line, "then": known})
            if looker is not None:
                step_facts = looker.step_facts(batch, rate, line)
                break
    except NotFinite as caught:
        raise not_finite(caught, feed, feed.order.step(caught.step)) from caught
    strategy.close()
    if world.is_main:
        report = {"from": done, "notes": notes, "steps": compared, "step": step_facts, "total": feed.total}
        (run.folder / REPLAY).write_text(json.dumps(report), encoding="utf-8")
    return DONE


def finite(strategy: Strategy, world: World) -> bool:
    """Whether all trained weights are finite. Collective."""
    mine = all(bool(torch.isfinite(local(tensor)).all()) for _, tensor in strategy.updated_parts())
    return all(world.all_gather(mine))


class _Looker:
    """Collect the facts of one step. The gradient is observed during the step, everything else before it."""

    def __init__(self, session: Session, batch: StepBatch) -> None:
        """Collective."""
        self._session = session
        self._losses = _losses(session, batch.ids)
        strategy, world = session.strategy, session.world
        state = strategy.state_dict()
        weights = {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
        save_on_main(session.run.folder / WEIGHTS, weights, world)
        strategy.observer = self._recorder = GradientRecorder(world)

    def step_facts(self, batch: StepBatch, rate: float, line: dict[str, Any]) -> dict[str, Any]:
        """Facts of the computed step. Only rank 0 has the norms."""
        run, feed, gradients = self._session.run, self._session.feed, self._recorder.gradients
        save_on_main(run.folder / GRADIENTS, gradients, self._session.world)
        norms = {name: float(g.double().norm()) for name, g in gradients.items()}
        norm, limit = line["grad_norm"], run.optim.max_grad_norm
        return {
            "step": line["step"],
            "learning_rate": rate,
            "rows": batch.ids.tolist(),
            "micro_batches": [group.tolist() for group in feed.task.cut(feed.columns, batch.ids)],
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
    return share.sum(losses).cpu().numpy()


ANATOMY = "anatomy.json"
# In order of computation.
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
    """A recorded value of a step."""

    kind: str  # one of KINDS
    name: str  # name of the tensor, module or parameter
    hash: str
    micro_batch: int = -1  # -1: the whole step
    rank: int = 0
    norm: float | None = None  # for gradients
    value: float | None = None  # for scalars


def take_apart(job: Job, world: World, output: str, target_step: str) -> int:
    """Record the step that completes update `target_step`. Collective. Errors: `RunError`."""
    step = int(target_step)
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
        (run.folder / ANATOMY).write_text(json.dumps(report), encoding="utf-8")
    return DONE


def read_anatomy(folder: Path) -> tuple[list[Entry], dict[str, Any]]:
    """Read the entries, and the rest of the report."""
    report = json.loads((folder / ANATOMY).read_text(encoding="utf-8"))
    return [Entry(**values) for values in report.pop("entries")], report


def hash_of(*tensors: Tensor) -> str:
    """Hash of the bits, dtypes and shapes of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        plain = (tensor.to_dense() if tensor.is_sparse else tensor).detach().cpu().contiguous()
        digest.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _looked_at(strategy: Strategy, world: World, batch: StepBatch, rate: float) -> list[Entry]:
    """Run a step and return, on rank 0, all ranks' entries in the order of KINDS and micro-batches. Collective."""
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
    computed = ("inputs", "forward", "loss", "backward", "leaf")  # grouped by micro-batch

    def when(entry: Entry) -> tuple[int, int, int]:
        kind = KINDS.index("inputs" if entry.kind in computed else entry.kind)
        return kind, entry.micro_batch, places[id(entry)]

    return sorted(every, key=when) if world.is_main else []


def _weights(strategy: Strategy, world: World) -> Mapping[str, Tensor]:
    """Weights, buffers and optimizer state by name, on rank 0. Collective."""
    return strategy.state_dict() if world.size > 1 else {n: local(t) for n, t in strategy.state_dict().items()}


def _tensors(kind: str, state: Mapping[str, Tensor]) -> list[Entry]:
    names = sorted(state, key=lambda name: (not name.startswith("model."), name))
    return [Entry(kind, name.removeprefix("model."), hash_of(state[name])) for name in names]


class _Tracer(StepObserver):
    """Record every value that a step computes on this rank."""

    def __init__(self, strategy: Strategy, batch: StepBatch) -> None:
        self.entries: list[Entry] = []
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
        self._add("loss", "", [loss], index, value=float(loss.detach()))

    def gradient(self, index: int, name: str, gradient: Tensor) -> None:
        self._add("leaf", name, [gradient], index)

    def reduced(self, gradient: WholeGradient) -> None:
        for name, tensor in gradient.whole(self._strategy.world).items():
            self._add("gradient", name, [tensor], -1, norm=float(local(tensor).double().norm()))

    def _add(self, kind: str, name: str, tensors: Iterable[Tensor], micro: int, **more: Any) -> None:
        if local_tensors := [local(t) for t in tensors]:
            self.entries.append(Entry(kind, name, hash_of(*local_tensors), micro, **more))

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
                # on the tensor: a module hook would add a node to the graph
                tensor.register_hook(
                    partial(self._record_gradient, f"{name}{f' ({place})' if place else ''}", self._micro)
                )

        return forward

    def _record_gradient(self, name: str, micro: int, gradient: Tensor) -> None:
        self._add("backward", name, [gradient], micro)


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
