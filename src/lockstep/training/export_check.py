"""Check the export at the end of a run: compare a few examples' losses with the run's own.

In: a strategy that holds the exported model, and later the export. Out: the outcome, for a message. The export is
loaded with transformers' `from_pretrained` and the saved tokenizer; examples start from raw rows kept by data
preparation, and `lockstep.plain` computes their losses. It compares losses and scores of two models, within rounding,
and no steps, so `training/step_record.py` does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lockstep.config.lazy import lazy
from lockstep.data.raw_rows import RawRows
from lockstep.distributed.system_metrics import capacity
from lockstep.plain.examples import Plain
from lockstep.plain.losses import batch_loss
from lockstep.plain.rows import NotCovered
from lockstep.plain.scores import scores
from lockstep.strategies.exact.training_state import optimizer_average
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.models import heads, model_configs
from lockstep.tasks.task import Task
from lockstep.track.busy import ACTIVITY
from lockstep.training import plain_check, plain_sides
from lockstep.training.evaluation import evaluate

if TYPE_CHECKING:
    from lockstep.tasks.models import adapters
else:
    (adapters,) = lazy("lockstep.tasks.models", "adapters")

EXAMPLES = 3
# Allowed relative differences of a loss. Both in float32; docs/how-to/verify.md has typical values.
SAME_PRECISION = 1e-4
ROUNDED_BASE = 1e-2  # an adapter's base is loaded wholly in bfloat16; in the run only its linear layers are
ROUNDING, DRAWS = 1e-6, 8  # noise relative to the largest output; number of draws that test which scores it changes
LOW_PRECISION = 2e-3  # both in half precision; or FACTOR times its effect on the export's own losses


@dataclass(frozen=True)
class Evaluated:
    """The run's own losses of a few examples."""

    places: list[int]  # indices into the examples of the raw rows
    losses: list[float]  # per example, mean over its targets
    why_not: str = ""  # why nothing is compared; empty if it is
    scores: dict[str, float] = field(default_factory=dict)  # all examples together; empty in half precision


@dataclass(frozen=True)
class ExportComparison:
    """Outcome of the comparison for the user, and whether it is an error."""

    text: str
    agrees: bool = True


def evaluated(task: Task, strategy: Strategy) -> Evaluated:
    """Evaluate a few examples with the exported model, as evaluations do. Collective."""
    why = _why_not(task)
    raw_rows = RawRows.of(task.prepared.facts)
    if why or raw_rows is None:
        return Evaluated([], [], why or "no raw rows of its data were stored")
    ACTIVITY.set("evaluating a few examples, to compare the export with")
    columns = task.splits[raw_rows.split] if raw_rows.examples is None else raw_rows.examples
    lengths = columns.lengths[raw_rows.at]
    places = np.argsort(lengths, kind="stable")[:: max(1, len(raw_rows.at) // EXAMPLES)][:EXAMPLES].tolist()
    device, losses = strategy.world.device, []
    with optimizer_average(strategy):
        for place in places:
            rows = raw_rows.at[[place]]
            micro = task.collate(columns, rows, 0).to(device)
            logits = strategy.forward(micro.inputs)
            loss = (
                logits[..., 0].sum() if task.run.task.options.get("loss_chunk") else _loss(task, logits, micro.targets)
            )
            losses.append(float(loss) / task.count_targets(columns, rows))
    scored: dict[str, float] = {}
    if raw_rows.examples is None and not low_precision(task):
        # as a split of their own: tasks score only evenly spread rows of a large split
        few = columns.select(raw_rows.at[places])
        # in one batch, as the export: padding changes the outputs of models without a mask (FNet)
        scored = evaluate(strategy.world, task, strategy, few, texts=False, at_once=len(places))
    return Evaluated(places, losses, scores=scored)


def low_precision(task: Task) -> bool:
    """Whether the run computes in bfloat16 or float16, whose rounding may change an answer."""
    run = task.run
    return run.precision != "fp32" or run.model.trained_in_bfloat16


def _loss(task: Task, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return task.loss_sum(SimpleNamespace(logits=logits), targets)


def _why_not(task: Task) -> str:
    """Explain why the export is not compared; empty if it is."""
    run = task.run
    if not run.verify.plain:
        return "verify.plain is false"
    if task.own_model or not task.built_in() or run.model.trust_remote_code:
        return "the model or the task is your own code, or code from the Hub"
    if task.draws_targets:
        return "its targets are drawn at random for every evaluation"
    if task.needs_reference:
        return "its loss needs the model from before training"
    if run.model.quantization is not None and run.model.adapter.get("export") == "adapter":
        return "the adapter is exported alone, and was trained with a 4-bit base model"
    return ""


def compare_export(task: Task, expected: Evaluated, folder: Path, device: torch.device) -> ExportComparison:
    """Compare the export in a folder with the evaluated losses. Rank 0 only."""
    if expected.why_not:
        return ExportComparison(f"the export was not compared: {expected.why_not}")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if 2 * size > capacity(torch.device("cpu"), 1):
        return ExportComparison("the export was not compared: this machine has too little memory to load it")
    ACTIVITY.set("comparing the export with the run")
    try:
        job, model = loaded_job(task, folder), loaded(task, folder).to(device)
    except NotCovered as caught:
        return ExportComparison(f"the export was not compared: {caught}")
    except Exception as caught:
        return ExportComparison(
            f"{folder} is written, but from_pretrained does not load it correctly: {_line(caught)}", False
        )
    try:
        losses, rounding = exported_losses(task, job, model, expected.places)
        scored = _scored(job, model, expected)
    except NotCovered as caught:
        return ExportComparison(f"the export was not compared: {caught}")
    except OtherExamples as caught:
        return ExportComparison(f"{folder} is written, but {caught}", False)
    except Exception as caught:
        return ExportComparison(
            f"{folder} is written and loads, but the plain computation of its losses failed: {_line(caught)}. "
            "verify.plain=false exports without it",
            False,
        )
    within = max(LOW_PRECISION, plain_check.FACTOR * rounding) if low_precision(task) else SAME_PRECISION
    if task.run.model.adapter and task.run.model.dtype == "bfloat16" and adapters.is_adapter(folder):
        within = max(within, ROUNDED_BASE)
    pairs = list(zip(expected.losses, losses, strict=True))
    wrong = [
        f"{own:.7g} in this run, {theirs:.7g} by the export"
        for own, theirs in pairs
        if not plain_check.relative(theirs, own) <= within and not abs(theirs - own) <= within * _scale(pairs)
    ]
    if wrong:
        return ExportComparison(
            f"{folder} was written, but loaded by from_pretrained with its own tokenizer, its losses differ from "
            f"this run's: {'; '.join(wrong)}. The checkpoints are sound, but the export is not the trained model: "
            "do not use it before the cause is known. The same command writes it again",
            False,
        )
    others = _other_scores(job, model, expected, scored)
    if others:
        return ExportComparison(
            f"{folder} is written, and has the losses of this run for {len(pairs)} examples, but other scores: "
            f"{'; '.join(others)}. Either this run's evaluations are wrong, or the library's scores of the export",
            False,
        )
    also = f", and all together its {', '.join(name for name, _, _ in scored)}" if scored else ""
    return ExportComparison(
        f"the export, loaded by from_pretrained with its own tokenizer, has this run's losses for {len(pairs)} examples"
        f"{also}"
    )


def _scored(job: Plain, model: nn.Module, expected: Evaluated) -> list[tuple[str, float, float]]:
    """(name, the run's score, the export's score) of all examples together."""
    if not expected.scores:
        return []
    examples = job.encode(job.splits["train"])
    theirs = scores(job, model, [examples[place] for place in expected.places], writes=False)
    names = sorted(theirs.keys() & expected.scores.keys() - {"loss"})
    pairs = [(name, float(expected.scores[name]), float(theirs[name])) for name in names]
    return [pair for pair in pairs if math.isfinite(pair[1]) and math.isfinite(pair[2])]


def _other_scores(
    job: Plain, model: nn.Module, expected: Evaluated, scored: list[tuple[str, float, float]]
) -> list[str]:
    """Describe scores that differ by more than rounding."""
    others = {
        name: f"{name} {own:.7g} in this run, {theirs:.7g} by the export"
        for name, own, theirs in scored
        if abs(own - theirs) > SAME_PRECISION * max(1.0, abs(own))
    }
    unstable = _unstable_scores(job, model, expected) if others else set()
    return [line for name, line in others.items() if name not in unstable]


def _unstable_scores(job: Plain, model: nn.Module, expected: Evaluated) -> set[str]:
    """Names of scores that rounding of the outputs changes: rankings of examples with near-equal scores, correlations
    of near-constant values."""
    draw = torch.Generator().manual_seed(0)

    def round_(module: nn.Module, inputs: Any, output: Any) -> None:
        for name, value in list(output.items()):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                noise = torch.randn(value.shape, generator=draw).to(value)
                output[name] = value + ROUNDING * value.abs().amax() * noise

    exact = {name: theirs for name, _, theirs in _scored(job, model, expected)}
    hook = model.register_forward_hook(round_)
    try:
        several = [_scored(job, model, expected) for _ in range(DRAWS)]
    finally:
        hook.remove()
    return {
        name for each in several for name, _, theirs in each
        if not abs(theirs - exact[name]) <= SAME_PRECISION * max(1.0, abs(exact[name]))
    }  # fmt: skip


def _scale(pairs: Sequence[tuple[float, float]]) -> float:
    """Scale relative to which small losses are compared: their mean, at least 0.01."""
    return max(1e-2, sum(abs(own) for own, _ in pairs if math.isfinite(own)) / max(1, len(pairs)))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class OtherExamples(Exception):
    """The tokenizer of an export gives different examples than training used."""


def loaded_job(task: Task, folder: Path) -> Plain:
    """The run for `lockstep.plain`, with the export's tokenizer. Errors: `NotCovered`, and whatever loading raises."""
    raw_rows = RawRows.of(task.prepared.facts)
    assert raw_rows is not None
    values = plain_sides.plain_file(task)
    if task.run.task.options.get("loss_chunk"):
        values["task"] |= {"label_smoothing": 0.0}  # not used in evaluations
    return Plain(values, str(folder), {"train": task.plain_rows(raw_rows.rows)}, plain_sides.labels_of(task))


def exported_losses(task: Task, job: Plain, model: nn.Module, places: Sequence[int]) -> tuple[list[float], float]:
    """Losses of the examples at `places`, each a mean over its targets, by the export alone; and the largest relative
    difference from float32. A model trained in bfloat16 stays in bfloat16. Errors: `NotCovered`, `OtherExamples`, and
    whatever the model raises."""
    run = task.run
    raw_rows = RawRows.of(task.prepared.facts)
    assert raw_rows is not None
    examples: list[dict[str, Any]] = job.encode(job.splits["train"])[: len(raw_rows.at)]
    if len(examples) != len(raw_rows.at):
        raise OtherExamples(f"its tokenizer makes {len(examples)} examples of texts that were {len(raw_rows.at)}")
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.precision)
    device, losses = next(model.parameters()).device, dict[bool, list[float]]()
    for narrow in (False, True) if low_precision(task) else (False,):
        if narrow and run.model.trained_in_bfloat16:  # as in the run: autocast keeps more in float32
            model.bfloat16()
        with torch.no_grad(), torch.autocast(device.type, low or torch.bfloat16, narrow and low is not None):
            pairs = [batch_loss(job, model, [examples[place]]) for place in places]
            losses[narrow] = [float(total) / count for total, count in pairs]
    both = list(zip(losses.get(True, losses[False]), losses[False], strict=True))
    return [a for a, _ in both], max((abs(a - b) / max(abs(b), _scale(both)) for a, b in both), default=0.0)


def loaded(task: Task, folder: Path) -> nn.Module:
    """Load the export with transformers, in float32 and evaluation mode."""
    import transformers

    run = task.run
    auto = getattr(transformers, heads.of(str(task.head)).auto)
    if not (run.model.adapter and adapters.is_adapter(folder)):
        try:
            return _without_cache(auto.from_pretrained(folder))
        except ValueError:  # not known to an Auto class, e.g. the text part of a larger model
            kind = transformers.AutoConfig.from_pretrained(folder)
            return _without_cache(getattr(transformers, kind.architectures[0]).from_pretrained(folder))
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = {"dtype": torch.bfloat16} if run.model.dtype == "bfloat16" else {}
    base = auto.from_pretrained(
        model_configs.local_or_id(run.model), config=config, ignore_mismatched_sizes=True, **kind
    )
    return _without_cache(adapters.load_onto(base, folder))


def _without_cache(model: Any) -> nn.Module:
    """Convert to float32 and evaluation mode. Without the cache, because with it transformers does not detect packed
    texts."""
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
    evaluating: nn.Module = model.float().eval()
    return evaluating
