"""The user's own model, data and loss, given by the names of three functions.

In: `task: {name: module, model: my_file.build, data: my_file.data, loss: my_file.loss}`. Out: losses and metrics as
sums over examples, and an export that `lockstep.load` reads. `modules/loss_probe.py` infers whether losses and metrics
are sums or means.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from lockstep.config import user_code
from lockstep.config.lazy import lazy
from lockstep.config.sections import Section
from lockstep.data.arrow_cache import Columns, Prepared, digest
from lockstep.data.batch import MicroBatch, Sums
from lockstep.tasks.task import Forward, Generate, Task, spread_rows
from lockstep.track.busy import ACTIVITY

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.tasks.modules import dataset, loss_probe, wrapped_module
else:  # they import torch
    dataset, loss_probe, wrapped_module = lazy("lockstep.tasks.modules", "dataset", "loss_probe", "wrapped_module")

SEALED = 64  # items of each split in its hash
_NAMES = "a dotted name: my_file.{}"


class ModuleOptions(Section):
    """The task's own keys in the run file."""

    model: str = Field(description="function or class that returns the torch.nn.Module, as " + _NAMES.format("build"))
    data: str = Field(description="function that returns datasets by split, as " + _NAMES.format("data"))
    loss: str = Field(description="function (outputs, batch) -> sum, mean or one number per target, as my_file.loss")
    collate: str | None = Field(None, description="function of a list of items that makes a batch; default: torch's")
    length: str | None = Field(None, description="function of an item: its cost, an integer; default: 1")
    targets: str | None = Field(None, description="function of an item: its number of targets; default: 1")
    metrics: str | None = Field(None, description="function (outputs, batch) -> numbers by name, for evaluations")
    generate: str | None = Field(None, description="function (model, batch) -> generated texts, one per example")
    model_arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of task.model")
    data_arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of task.data")
    samples: int = Field(4, ge=0, description="validation examples shown with the output of task.generate")


class Module(Task):
    """The task of user-defined models, data and losses."""

    Options = ModuleOptions
    own_model = True
    not_streamed_reason = "your own data set reads its files"
    functions = ("model", "data", "loss", "collate", "length", "targets", "metrics", "generate")
    display_keys = ("samples", "generate", "metrics")
    collates_ahead = False  # items and model share random generators; workers have their own
    library = "lockstep"
    loader = "lockstep.load"
    pipeline = "other"
    unit = None
    no_metric_inputs_reason = "they are your model's outputs; task.metrics names a function of (outputs, batch)"

    @cached_property
    def code(self) -> dataset.OwnCode:
        """What the user's functions depend on."""
        return dataset.OwnCode.of(self.run)

    @property
    def usage(self) -> str:
        """Python code for the model card."""
        return 'import lockstep\n\nmodel = lockstep.load("PATH_OR_REPO")  # runs the code named in config.json'

    def unsupported_keys(self) -> dict[str, str]:
        """Keys that describe transformers models and text tables."""
        reasons = {"model": "task.model builds the model", "tokenizer": "task.data creates the items"}
        of_use = {"workers", "limit", "validation_fraction", "group_by_length"}
        return {
            key: f"has no effect with the task module, because {why}"
            for key, why in reasons.items()
            if getattr(self.run, key) != type(getattr(self.run, key))()
        } | {
            f"data.{key}": "has no effect with the task module, because task.data creates the data sets"
            for key in sorted({*self.run.data.changed_keys} - of_use)
        }

    def idle_keys(self, facts: Mapping[str, Any]) -> list[str]:
        return [] if self.run.task.options.get("generate") else ["task.samples has no effect without task.generate"]

    def fingerprint(self) -> str:
        """Hash of the number of items per split and the content of some items."""
        sets, _ = dataset.data_sets(self.code)
        return digest({s: dataset.seal(self.code, data, places, SEALED) for s, (data, places) in sets.items()})

    # -- before any process ------------------------------------------------------------------------------------------

    def prepare(self) -> Prepared:
        sets, cut = dataset.data_sets(self.code)
        with ACTIVITY.during("trying the model and the loss on a few examples"):
            classes = user_code.named(self.run.task, self.run.optim).values()
            probed = loss_probe.probe(self.code, classes, *sets["train"])
        files, key, length_inputs = {}, digest(self.fingerprint()), dataset.asked_lengths(self.code)
        for split, (data, places) in sets.items():
            further = [length_inputs, hashlib.sha256(places.tobytes()).hexdigest()] if length_inputs else []
            of = digest(key, split, asdict(probed), *further)
            files[split] = dataset.measured(self.code, data, places, probed.each, of)
        if length_inputs:  # covers all items; the rest of the key samples them
            key = digest(key, {split: dataset.content(file) for split, file in files.items()})
        facts = {"source": self.run.task.options["data"], "cut": cut, "examples": len(sets["train"][1])} | asdict(
            probed
        )
        if not cut:
            facts["own_validation"] = True
        return Prepared(key, files, "", facts)

    def check_prepared(self, prepared: Prepared) -> None:
        """Refuse single-example micro-batches that batch normalization cannot train on; skipped with `task.length`,
        where lengths decide the micro-batches."""
        if self.run.task.options.get("length") is None and (examples := prepared.facts.get("examples")) is not None:
            self.refuse_lone_examples(examples, lambda: loss_probe.trained_on_one(self.code))

    # -- in every process --------------------------------------------------------------------------------------------

    def open(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.sets, _ = dataset.data_sets(self.code)
        self.splits = {s: dataset.Items(*self.sets[s], path, s) for s, path in self.prepared.splits.items()}
        if self.options.length is not None:
            self.unit = "units"

    @property
    def origin(self) -> str:
        return self.options.model

    @property
    def summary_lines(self) -> dict[str, str]:
        facts, per = self.prepared.facts, "target" if self.options.targets else "example"
        each = "one number per target" + (f", {facts['each']} per example" if not self.options.targets else "")
        kinds = {
            "sum": f"a sum, divided by the {per}s of a step",
            "mean": f"a mean over {per}s (inferred from two batches): multiplied by their number, and divided by "
            "that of a step",
            "each": f"{each}; their sum is divided by the number of targets of a step",
        }
        cut = (
            {"validation": "split off from train, because task.data returns no validation split"}
            if facts["cut"]
            else {}
        )
        return {"loss": f"{self.options.loss}: {kinds[facts['loss']]}"} | cut

    def model(self, empty: bool = False) -> nn.Module:
        built = dataset.model(self.code, empty)
        if self.run.model.source is not None and not empty:  # an export, to be evaluated
            wrapped_module.fill(built, Path(self.run.model.source))
        loss, metrics, generate = (dataset.function(self.code, key) for key in ("loss", "metrics", "generate"))
        facts, names = self.prepared.facts, wrapped_module.names_of(built)
        calling = wrapped_module.Calling(self.code, loss, facts["loss"], metrics, facts["metrics"], generate, names)
        built.lockstep_called_once = facts["called_once"]  # candidates for an engine's blocks
        return wrapped_module.adapt(built, calling)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        return self.collate_at(columns, rows, index, -1)

    def collate_at(self, columns: Columns, rows: np.ndarray, index: int, step: int) -> MicroBatch:
        assert isinstance(columns, dataset.Items)
        return dataset.micro_batch(self.code, columns, rows, index, step)

    def in_workers(self, columns: Columns, jobs: Iterable[tuple[int, int, np.ndarray]]) -> Iterator[MicroBatch] | None:
        assert isinstance(columns, dataset.Items)
        workers = self.run.data.workers
        return dataset.in_workers(self.code, columns, jobs, workers) if workers else None

    def count_targets(self, columns: Columns, rows: np.ndarray) -> int:
        assert isinstance(columns, dataset.Items)
        return int(columns.targets[rows].sum())

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return outputs.loss  # zero for a padding micro-batch: see `modules/wrapped_module.py`

    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        import torch

        bundle = _bundle(batch)
        numbers = forward(batch.inputs).double()  # [1 + 2 x metrics]
        numbers = torch.zeros_like(numbers) if bundle.blank else numbers
        names = [f"{kind} {name}" for name in self.prepared.facts["metrics"] for kind in ("sum", "count")]
        counts = {"examples": bundle.examples, "targets": bundle.targets}
        return {
            **dict(zip(["loss", *names], numbers, strict=True)),
            **{k: torch.tensor(0.0 if bundle.blank else v, dtype=torch.float64) for k, v in counts.items()},
        }

    def metrics(self, sums: Sums) -> dict[str, float]:
        scores = {"loss": float(sums["loss"]) / max(1.0, float(sums["targets"]))}
        for name in self.prepared.facts["metrics"]:
            count = float(sums[f"count {name}"])
            scores[name] = float(sums[f"sum {name}"]) / count if count else float("nan")
        return scores

    def possible_scores(self) -> tuple[str, ...]:
        return ("loss", *self.prepared.facts["metrics"])

    def samples(self, generate: Generate, forward: Forward) -> list[dict[str, str]]:
        columns = self.splits["validation"]
        if self.options.generate is None or self.options.samples == 0:
            return []
        bundle = _bundle(self.collate(columns, spread_rows(columns, self.options.samples), 0))
        inputs: Any = {dataset.INPUT: replace(bundle, asks="generate")}
        rows = json.loads(bytes(forward(inputs).cpu().numpy()).decode())
        return [{str(key): str(value) for key, value in row.items()} for row in rows]

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        wrapped_module.write(folder, weights, self.options.model, self.options.model_arguments)


def _bundle(batch: MicroBatch) -> dataset.Bundle:
    bundle: Any = batch.inputs[dataset.INPUT]
    return bundle
