"""Evaluation during training, model selection and weight averaging: `evaluate`, `average`, `export`.

In: mappings read from YAML. Out: frozen values, with defaults that depend on other keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from lockstep.config.errors import InvalidValue
from lockstep.config.sections import Interval, Positive, Section

# lockstep's own metrics where lower is better: losses (also per source), perplexities, errors.
_LESS = re.compile(r"(\w+_)?(loss|perplexity|mse|mae|rmse|ece)|loss_\w+|bits_per_byte")
_MORE = re.compile(r"(\w+_)?(accuracy|f1|precision|recall|bleu|chrf)")


def higher_is_better(name: str) -> bool:
    """Return whether a metric is one of lockstep's own where higher is better."""
    return _MORE.fullmatch(name) is not None


class EvaluateSection(Section):
    every: Interval = Field("epoch", description="steps between evaluations, or epoch; 0: only at the end")
    patience: Positive | None = Field(
        None, description="end training after this many evaluations in a row without an improvement of checkpoint.best"
    )
    min_delta: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="improvement over the best evaluation that resets evaluate.patience",
    )
    limit: Positive | None = Field(
        None,
        description="validation examples used by each evaluation, the same ones every time, drawn with the "
        "seed; default: all. A test split is always used whole",
    )
    batch_size: Positive | None = Field(
        None, description="examples per evaluation batch on a rank; default: 4 micro-batches"
    )

    @model_validator(mode="after")
    def _delta_of_something(self) -> EvaluateSection:
        if self.min_delta and self.patience is None:
            raise InvalidValue(
                "LS1060",
                "min_delta has an effect only with evaluate.patience; set evaluate.patience, or remove min_delta",
            )
        return self


class AverageSection(Section):
    ema: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="keep an exponential moving average of the weights with this decay (0.999), and evaluate and "
        "export it in place of the weights",
    )
    ema_warmup: bool = Field(
        True, description="warm-up of ema: after update t the decay is (1 + t) / (10 + t), until that exceeds ema"
    )
    last: int | None = Field(
        None, ge=2, description="export the mean of the weights at the last N checkpoints of checkpoint.every"
    )

    @model_validator(mode="after")
    def _one_average(self) -> AverageSection:
        if self.ema is not None and self.last is not None:
            raise InvalidValue("LS1061", "ema and last are both set; remove one of them")
        if not self.ema_warmup and self.ema is None:
            raise InvalidValue(
                "LS1062", "ema_warmup has an effect only with average.ema; set average.ema, or remove ema_warmup"
            )
        return self

    @property
    def summary(self) -> str:
        """Description of the averaged weights that are exported; empty without averaging."""
        if self.ema is not None:
            return f"the moving average of the weights (decay {self.ema:g}{', with a warm-up' * self.ema_warmup})"
        return "" if self.last is None else f"the mean of the weights at the last {self.last} checkpoints"

    def decay(self, updates: int) -> float:
        """Return the decay of the moving average after `updates` updates."""
        assert self.ema is not None
        return min(self.ema, (1 + updates) / (10 + updates)) if self.ema_warmup else self.ema


def choose_best(values: dict[str, Any]) -> None:
    """Fill in the defaults of `export` and `checkpoint.best` in the top-level mapping of a run file."""
    sections = {key: values.get(key) or {} for key in ("evaluate", "checkpoint", "average")}
    sections = {key: entry.model_dump() if isinstance(entry, Section) else entry for key, entry in sections.items()}
    if not all(isinstance(entry, dict) for entry in sections.values()):
        return  # validation reports it
    needs_best = sections["checkpoint"].get("best") is not None or sections["evaluate"].get("patience") is not None
    if values.get("export") is None:
        values["export"] = "best" if needs_best and sections["average"].get("last") is None else "last"
    if sections["checkpoint"].get("best") is None and (needs_best or values["export"] == "best"):
        values["checkpoint"] = sections["checkpoint"] | {"best": "-loss"}


def check(best: str | None, evaluated: bool, every: Any, average: AverageSection, export: str | None) -> None:
    """Reject incompatible `checkpoint.best`, `evaluate.every`, `checkpoint.every`, `average` and `export`.

    `evaluated`: whether `evaluate.every` is set. `every`: `checkpoint.every`. Errors: `ValueError`."""
    if best is not None and not evaluated:
        raise InvalidValue(
            "LS1063",
            "evaluations during training select the best model, and there are none; set evaluate.every "
            "to a number of steps, or to epoch",
        )
    if best is not None and (_LESS if best[0] != "-" else _MORE).fullmatch(name := best.removeprefix("-")):
        less = best[0] != "-"
        raise InvalidValue(
            "LS1064",
            f"checkpoint.best: {best!r} selects the {'highest' if less else 'lowest'} {name}, but "
            f"{'lower' if less else 'higher'} is better; write {'-' * less}{name}",
        )
    if average.last is not None and export == "best":
        raise InvalidValue(
            "LS1065",
            "average.last exports the mean of the last checkpoints, but export: best exports a single "
            "checkpoint; remove one of the two",
        )
    if average.last is not None and not every:
        raise InvalidValue(
            "LS1066",
            "average.last is the mean of checkpoints written during training, and there are none; set "
            "checkpoint.every to a number of steps, or to epoch",
        )


class Best:
    """The best evaluation of a run so far, by the metric `by`; a leading `-` (`-loss`) means lower is better."""

    def __init__(self, by: str | None = None) -> None:
        self.name = (by or "-loss").removeprefix("-")
        self._less = (by or "-loss").startswith("-")
        self.step: int | None = None
        self.value = 0.0
        self.numbers: Mapping[str, Any] = {}  # all metrics of that evaluation

    def update(self, step: int, numbers: Mapping[str, Any]) -> bool:
        """Add an evaluation and return whether it is better than all earlier ones."""
        value = numbers.get(self.name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return False
        if self.step is not None and not self._beats(value, self.value):
            return False
        self.step, self.value, self.numbers = step, float(value), dict(numbers)
        return True

    def beats(self, value: float) -> bool:
        """Return whether the best evaluation is better than `value`."""
        return self.step is not None and self._beats(self.value, value)

    def _beats(self, value: float, other: float) -> bool:
        return value < other if self._less else value > other

    @property
    def text(self) -> str:
        """`best validation loss 0.5 (step 200)`; empty before the first evaluation."""
        return f"best validation {self.name} {self.value:.4g} (step {self.step})" if self.step is not None else ""
