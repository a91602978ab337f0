"""Records the scores of known evaluators.

In: results of transformers' `Trainer.evaluate` and of `compute` of the library evaluate. Out: a record of the numbers.
"""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Mapping
from typing import Any

from .hooks import Hooks
from .recorder import Recorder

EVALUATORS = {"transformers.trainer": ("Trainer", "evaluate"), "evaluate.module": ("EvaluationModule", "compute")}
TIMES = ("runtime", "per_second", "compilation_time", "epoch")  # parts of names that are not scores


def install(hooks: Hooks, module: str) -> None:
    """Wrap the evaluator, after its module is imported."""
    name, method = EVALUATORS[module]
    kind = getattr(sys.modules[module], name)
    original = getattr(kind, method)

    @functools.wraps(original)
    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The library evaluate copies this function's code, and adds to the docstring that is in it."""
        scores = original(self, *args, **kwargs)
        if hooks.recorder is not None and isinstance(scores, Mapping):
            hooks.guarded(_write, hooks.recorder, f"{name}.{method}", scores)
        return scores

    setattr(kind, method, evaluate)


def _write(recorder: Recorder, by: str, scores: Mapping[str, Any]) -> None:
    named = {str(name): value for name, value in scores.items() if isinstance(value, numbers.Real)}
    values = {name: float(value) for name, value in named.items() if not any(part in name for part in TIMES)}
    if values:
        recorder.end_evaluation()
        recorder.write("scores", by=by, scores=values, steps=list(recorder.steps))
