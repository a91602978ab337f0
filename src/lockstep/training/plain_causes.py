"""Which option makes a run compute something else than transformers alone: they are switched off one by one.

In: both sides of a comparison that has failed. Out: a line for the user, which names the option, or says that it is
none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from lockstep.config.run import Run
from lockstep.strategies.engines import blocks
from lockstep.strategies.exact.param_groups import make_model
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.task import Task
from lockstep.training import plain_sides
from lockstep.training.plain_check import differences
from lockstep.training.plain_sides import Sides

_NEW_WEIGHTS = ("model.adapter", "model.quantization")  # without them the model has others


def cause(sides: Sides, strategy: Strategy) -> str:
    """Describe the option that makes the difference."""
    if sides.task.own_model:
        return (
            "Your own functions, called as they are written, compute something else than the run: look at task.loss "
            "(a mean or a sum over targets?), task.targets and task.collate"
        )
    if (text := _of_examples(sides)) is not None:
        return text
    try:
        anew = not differences(_sides(sides, "", sides.run.model_dump(mode="json")), strategy)
    except Exception:  # a model that cannot be built a second time
        anew = False
    if anew:
        return (
            "A model that is built anew from the same run file computes what transformers does: something has changed "
            "this one since it was built"
        )
    tried = []
    for key, values in _without(sides.run, sides.task):
        try:
            agrees = not differences(_sides(sides, key, values), strategy)
        except Exception:  # the run cannot be without it
            continue
        tried.append(key)
        if agrees:
            return f"The option that makes the difference is {key}: without it both are equal"
    rest = f" It is none of {', '.join(tried)}: each was switched off by itself." if tried else ""
    return f"No option of the run file makes the difference.{rest} Look at the loss, the labels and the model's family"


def _of_examples(sides: Sides) -> str | None:
    """Where the tokens of an example are others already; None: they are not."""
    if len(sides.examples) != len(sides.at):
        return f"The examples are others: {len(sides.at)} here, {len(sides.examples)} by the model's tokenizer alone"
    if "input_ids" not in sides.columns.names:
        return None
    tokens = sides.columns.ragged("input_ids")
    for place, example in zip(sides.at.tolist(), sides.examples, strict=True):
        own, plain = tokens.row(place).tolist(), example.get("input_ids")
        if isinstance(plain, list) and plain and isinstance(plain[0], int) and own != plain:
            return (
                f"The tokens of example {place} are others already: {str(own[:12])[:-1]}, ...] here, "
                f"{str(plain[:12])[:-1]}, ...] by the model's tokenizer alone (data.max_length, tokenizer, the cache)"
            )
    return None


def _without(run: Run, task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys that may make a difference, each with the run file without it."""

    def other(section: str, key: str, value: Any) -> tuple[str, dict[str, Any]]:
        values: dict[str, Any] = run.model_dump(mode="json")
        values[section][key] = value
        return f"{section}.{key}", values

    if run.data.padding != "batch" and task.padded_because is None:
        yield other("data", "padding", "batch")
    if run.task.options.get("loss_chunk") is not None:
        yield other("task", "loss_chunk", None)
    for key in blocks.KEYS:
        if getattr(run.model, key):
            yield other("model", key, False)
    if run.model.quantization is not None:
        yield other("model", "quantization", None)
    if run.model.adapter:
        yield other("model", "adapter", {})
    if run.model.dtype != "float32":
        yield other("model", "dtype", "float32")
    yield other("model", "attention", None if run.model.attention else "eager")


def _sides(sides: Sides, key: str, values: dict[str, Any]) -> Sides:
    """Both sides of the run without an option. Its weights are the same, where the option leaves them alone."""
    run = Run.model_validate(values)
    task = type(sides.task)(run, sides.task.prepared)
    if key in _NEW_WEIGHTS or sides.run.model.dtype != "float32":
        model: nn.Module = make_model(task).to(plain_sides.device_of(sides.model))
    else:
        model = task.model(empty=True)
        plain_sides.with_tensors_of(model, sides.model)
    blocks.prepare(run, model)
    job = plain_sides.job_of(run, task)
    plain = plain_sides.plain_model(job, model.train()) if key in _NEW_WEIGHTS else sides.plain
    job.reference = plain
    return replace(sides, run=run, task=task, model=model, plain=plain, job=job)
