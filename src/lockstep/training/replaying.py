"""A step of a run, computed again: what every rank of `lockstep replay` does.

In: the run as it is replayed, and the OUTPUT of the one that was trained. Out: a folder with `replay.json` (the steps
on the way, compared with the fingerprints that were written, and what the wanted step was made of), the weights before
that step and its gradient.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.checkpoint.state_hash import StateHash
from lockstep.config.errors import DONE
from lockstep.config.run import RunError
from lockstep.data.batch import StepBatch
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.sharded import local
from lockstep.distributed.world import World
from lockstep.strategies.exact import optim
from lockstep.strategies.observer import GradientRecorder
from lockstep.strategies.strategy import NotFinite, Strategy
from lockstep.track.report.history import lines_of
from lockstep.training import fingerprints
from lockstep.training.errors import not_finite
from lockstep.training.resolve import Job
from lockstep.training.session import Session, build_session, join_ranks

FOUND, WEIGHTS, GRADIENTS = "replay.json", "before.safetensors", "gradient.safetensors"
_HASHED = ("weights", "optimizer")


def replay(job: Job, world: World, output: str, wanted: str, begin: str) -> int:
    """From the newest checkpoint of at most `begin` updates on to the step after which `wanted` are done. Collective.
    Errors: `RunError`."""
    step = int(wanted)
    run, prepared = job.run, job.data
    join_ranks(job, world)
    session = build_session(job, world)
    strategy, feed = session.strategy, session.feed
    if not 1 <= step <= feed.total:
        raise RunError(f"--step: {step} is none of this run's steps, 1 to {feed.total}")
    trained = run.model_copy(update={"output": output})
    checkpoints = Checkpoints(trained, world, prepared, feed.total)
    ACTIVITY.at("looking for a checkpoint")
    done, notes = checkpoints.take_before(strategy, min(int(begin), step - 1))
    written = {line["step"]: line for line in lines_of(Path(output) / fingerprints.FILE, ("step", "hash"))}
    hashes = StateHash(world)

    def hashed(strategy: Strategy) -> dict[str, Any]:
        return {**hashes.of(strategy.sharded_state_dict()), "finite": finite(strategy, world)}

    compared: list[dict[str, Any]] = []
    if any(name in (known := written.get(done, {})) for name in _HASHED):  # what was loaded is what was trained
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
                step_facts = looker.found(batch, rate, line)
                break
    except NotFinite as caught:
        raise not_finite(caught, feed, feed.order.step(caught.step)) from caught
    strategy.close()
    if world.is_main:
        report = {"from": done, "notes": notes, "steps": compared, "step": step_facts, "total": feed.total}
        (run.folder / FOUND).write_text(json.dumps(report), encoding="utf-8")
    return DONE


def finite(strategy: Strategy, world: World) -> bool:
    """Whether all weights that are trained are. Collective."""
    mine = all(bool(torch.isfinite(local(tensor)).all()) for _, tensor in strategy.updated_parts())
    return all(world.all_gather(mine))


class _Looker:
    """The facts of one step. Everything is looked at before the step but its gradient, which it hears of."""

    def __init__(self, session: Session, batch: StepBatch) -> None:
        """Collective."""
        self._session = session
        self._losses = _losses(session, batch.ids)
        strategy, world = session.strategy, session.world
        state = strategy.state_dict()
        if world.is_main:
            weights = {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
            _save(weights, session.run.folder / WEIGHTS)
        strategy.observer = self._recorder = GradientRecorder(world)

    def found(self, batch: StepBatch, rate: float, line: dict[str, Any]) -> dict[str, Any]:
        """Of the step that was computed; rank 0 only has the norms."""
        run, feed, gradients = self._session.run, self._session.feed, self._recorder.gradients
        if self._session.world.is_main:
            _save(gradients, run.folder / GRADIENTS)
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
    """Gradient norms by layer: parameters up to the first number in their name belong together."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        layer = numbered.group() if numbered else name.rpartition(".")[0] or name
        squares[layer] = squares.get(layer, 0.0) + norm**2
    return {layer: square**0.5 for layer, square in squares.items()}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, path)


def _losses(session: Session, rows: np.ndarray) -> np.ndarray:
    """Of each example by itself, per target and without dropout, by the model as it is before the step: float64 [rows].
    Ranks take turns, and each is filled in by one of them. Collective."""
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
