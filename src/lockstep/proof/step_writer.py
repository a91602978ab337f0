"""Writes a trace of steps computed without a torch optimizer, from one process for all ranks, with full tensors.

In: names and tensors of each step, and the data of each rank. Out: a folder in the tracer's format, for `read`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lockstep_trace.read import ABOUT
from lockstep_trace.tracer import width_of
from lockstep_trace.tracer.fingerprint import measure, subtracted, whole
from lockstep_trace.tracer.placement import dtype_name
from lockstep_trace.tracer.records import FORMAT, packed

EMPTY = {"fp": "", "sq": "", "sk": ""}


@dataclass(frozen=True)
class RankStep:
    """Data of one rank in a step: number, loss and targets of each micro-batch; hashes of examples."""

    micro_batches: Mapping[int, float] = field(default_factory=dict)
    targets: Sequence[float] = ()
    sizes: Sequence[int] = ()  # examples of each micro-batch
    examples: Sequence[str] = ()


@dataclass(frozen=True)
class WholeStep:
    """A step of all ranks. `loss`: as reported. `rates`: options of the update, such as `lr`. `clips`: (limit of the
    gradient norm, reported norm)."""

    number: int
    loss: float
    gradients: Mapping[str, Tensor]  # before clipping
    weights: Mapping[str, Tensor]  # after the step, frozen ones and buffers included
    rates: Mapping[str, Any]
    clips: tuple[float | None, float] | None
    ranks: Sequence[RankStep]
    targets: float | None = None  # number of targets of the step
    autocast: str = ""


class StepWriter:
    """Appends steps to a trace's folder. Not collective: one process writes for all ranks."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor], optimizer: str, about: Mapping[str, Any]) -> None:
        """`weights`: before the first step. `about`: `command`, and values for comparisons, such as `scores`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.optimizer = folder, optimizer
        self._before = _measured(weights)
        self._files: list[IO[str]] = []
        self._layout: dict[str, Any] = {}
        values = {"format": FORMAT, "began": time.time(), "level": "gradients", **about}
        (folder / ABOUT).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def step(self, step: WholeStep, stochastic: bool = False) -> None:
        if not self._files:
            self._open(len(step.ranks), stochastic)
        after = _measured(step.weights)
        names = [n for n in step.gradients if n in after]
        self._write_layout(names, step)
        tensors = self._vectors(names, step, after)
        for rank, own in enumerate(step.ranks):
            self._write(rank, "step", **self._record(step, own), **(tensors if rank == 0 else {"weights": EMPTY}))
        self._before = after

    def close(self) -> None:
        for rank, file in enumerate(self._files):
            self._write(rank, "end", steps=[self._layout["steps"]], backwards=0)
            file.close()

    # -- records in the format of tracer/recorder.py -----------------------------------------------------------------

    def _open(self, world: int, stochastic: bool) -> None:
        for rank in range(world):
            self._files.append((self.folder / f"rank-{rank:05d}.jsonl").open("w", encoding="utf-8"))
            head = {"format": FORMAT, "rank": rank, "world": world, "torch": torch.__version__, "time": time.time()}
            self._write(rank, "process", **head)
            model = {"name": "model", "wrappers": [], "fsdp": False, "training": True, "stochastic": stochastic}
            self._write(rank, "model", **model)

    def _write(self, rank: int, kind: str, /, **values: Any) -> None:
        self._files[rank].write(json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n")
        self._files[rank].flush()

    def _write_layout(self, names: Sequence[str], step: WholeStep) -> None:
        self._layout["steps"] = step.number + 1
        if self._layout.get("names") == list(names):
            return
        first = "names" not in self._layout
        self._layout |= {"names": list(names), "id": self._layout.get("id", -1) + 1}
        rows = [_row(name, step.weights[name]) for name in names]
        for rank in range(len(step.ranks)):
            self._write(
                rank,
                "layout",
                id=self._layout["id"],
                opt=0,
                optimizer=self.optimizer,
                parameters=rows,
                ties=[],
                untied=False,
                mesh=None,
                models=["model"],
            )
        if first:
            vectors = [self._before[name] for name in names]
            self._write(0, "start", opt=0, step=step.number, layout=self._layout["id"], weights=packed(vectors))

    def _record(self, step: WholeStep, own: RankStep) -> dict[str, Any]:
        limit, norm = step.clips or (None, None)
        ranks, total = len(step.ranks), sum(sum(r.targets) for r in step.ranks) or 1
        losses = [x / total * ranks for x in own.micro_batches.values()]  # their mean over ranks is the step's loss
        return {
            "opt": 0,
            "step": step.number,
            "layout": self._layout["id"],
            "forwards": len(losses),
            "backwards": len(losses),
            "loss": step.loss,
            "losses": [[x, None] for x in losses or [step.loss]],
            "micro_batches": own.micro_batches,
            "targets": list(own.targets),
            "targets_of_step": step.targets,
            "micro": list(own.sizes),
            "examples": list(own.examples),
            "clips": [] if step.clips is None else [{"how": "norm", "limit": limit, "norm": norm, "whole": True}],
            "groups": [dict(step.rates)],
            "training": True,
            "autocast": step.autocast,
            "schedulers": {},
            "notes": [],
            "outside": {},
        }

    def _vectors(self, names: Sequence[str], step: WholeStep, after: Mapping[str, Tensor]) -> dict[str, Any]:
        gradients = _measured({name: step.gradients[name] for name in names})
        buffers = {n: v for n, v in after.items() if n not in step.gradients}
        return {
            "grads": packed(list(gradients.values())),
            "before": packed([self._before[n][:2] for n in names]),
            "weights": packed([after[n][:2] for n in names]),
            "updates": packed(subtracted([after[n] for n in names], [self._before[n] for n in names])),
            "buffers": packed(list(buffers.values())),
            "buffers_of": [(n, list(step.weights[n].shape), dtype_name(step.weights[n])) for n in buffers],
        }


def _measured(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Measure tensors and return their vectors on the CPU, without empty tensors."""
    detached = {name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()}
    vectors = measure(list(detached.values()), [whole(t) for t in detached.values()])
    return {name: vector.cpu() for name, vector in zip(detached, vectors, strict=True)}


def _row(name: str, tensor: Tensor) -> dict[str, Any]:
    shape = list(tensor.shape)
    return {
        "name": name,
        "held": True,
        "shape": shape,
        "offset": [0] * len(shape),
        "size": shape,
        "width": width_of(shape),
        "dtype": dtype_name(tensor),
        "device": tensor.device.type,
        "group": 0,
        "trained": True,
        "partial": "",
    }
