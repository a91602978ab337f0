"""Optional abilities of tasks, one class each: a task inherits from `Task` and from the classes of its abilities.

In: a task or its class. Out: whether it streams, predicts, generates, calibrates, uses a reference or passes
predictions to user functions: test with `isinstance`, or `issubclass` for a class.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lockstep.data import stream, streamed
from lockstep.data.arrow_cache import Columns, Make, Prepared
from lockstep.data.batch import MicroBatch, Sums
from lockstep.data.stream import Stream
from lockstep.tasks.task import Forward, Generate, Task

if TYPE_CHECKING:
    from torch import Tensor


class Streams(Task):
    """A task whose training split may be larger than the cache and is read during training (`data.stream`)."""

    plugin = "tasks"  # a base: it has no name in a run file

    streams = True

    @abstractmethod
    def stream(self) -> Stream:
        """The selection of usable rows for a streamed training split, without its files."""

    @abstractmethod
    def example_maker(self, folder: str, facts: Mapping[str, Any]) -> Make:
        """Return the function that turns rows into examples, given a tokenizer folder and the facts of `Prepared`."""

    def open_split(self, path: str) -> Columns:
        """Open a prepared split: memory-mapped, or read through its index if streamed."""
        if not path.endswith(stream.ENDING):
            return super().open_split(path)
        prepared = self.prepared
        return streamed.Streamed(path, lambda: (self.stream(), self.example_maker(prepared.tokenizer, prepared.facts)))


class Predicts(Task):
    """A task whose exported model `lockstep predict` can run."""

    plugin = "tasks"  # a base: it has no name in a run file
    example_input: ClassVar[str] = "some text"  # for the command line, if there is no sample
    input_keys: ClassVar[tuple[str, ...]] = ()  # option keys that name the input columns
    answer_name: ClassVar[str | None] = None  # entry of a prediction to display; None: all entries
    reads_conversations: ClassVar[bool] = False  # by the tokenizer's chat template, also if it was trained on texts
    scores_answers: ClassVar[bool] = False  # whether a conversation ends with the answer

    def input_columns(self) -> tuple[str, ...]:
        """Columns that a prediction is computed from: one text, or the two of a pair."""
        options = self.options
        return tuple(getattr(options, key) for key in self.input_keys) or ("text",)

    def conversation_columns(self) -> tuple[str, ...]:
        """Columns of a conversation, and of its tools if it may have any, that are read in place of a text."""
        return ()

    def input_rows(self, word: str) -> list[tuple[str, ...]] | None:
        """Rows denoted by a command-line argument; None if it is a text or a file of rows with columns. Errors:
        `RunError`."""
        return None

    @abstractmethod
    def predict(self, folder: Path, rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
        """Yield the prediction of the exported model in `folder` for each row, in row order: JSON by name. A row has
        one text per `input_columns`, or, if the task reads conversations, one `Question`. Errors: `RunError`."""

    @classmethod
    def format_prediction(cls, row: Sequence[Any], answer: Mapping[str, Any]) -> str:
        """Format a prediction as one line of text."""
        return json.dumps(answer, ensure_ascii=False) if cls.answer_name is None else str(answer[cls.answer_name])

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """The input of one of `samples` in the form that `lockstep predict` takes; empty if it takes none."""
        return next(iter(sample.values()), "")


class Generates(Task):
    """A task whose model generates text that evaluations score."""

    plugin = "tasks"  # a base: it has no name in a run file
    greedy_by: ClassVar[str]  # a phrase: the keys by which its evaluations decode greedily, or generate nothing
    greedy_option: ClassVar[tuple[str, Any] | None] = None  # an option and its value with which they decode greedily

    @abstractmethod
    def score_texts(self, generate: Generate, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        """Additional sums over the texts of the examples at `rows`: references and generated texts.

        If `rows` is empty (a padding batch), returns the same sums, all zero. `generate` is collective: every rank must
        call it equally often."""

    @abstractmethod
    def decodes_greedily(self) -> bool:
        """Whether evaluations decode greedily, without beam search or sampling."""


class Calibrates(Task):
    """A task that chooses a value, such as a threshold, on the validation split after training."""

    plugin = "tasks"  # a base: it has no name in a run file

    @property
    @abstractmethod
    def needs_calibration(self) -> bool:
        """Whether a value must still be chosen on the validation split before another split is scored."""

    @abstractmethod
    def calibrate(self, scores: Mapping[str, float]) -> None:
        """Adopt the value chosen in the validation `scores` of the model to export. It then applies to other splits and
        to `write`."""

    @classmethod
    @abstractmethod
    def calibration_in(cls, folder: Path) -> dict[str, float]:
        """The scores that `calibrate` needs, as `write` stored them in an export."""


class UsesReference(Task):
    """A task whose loss compares with the outputs of the model before training."""

    plugin = "tasks"  # a base: it has no name in a run file

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        self.reference_outputs: dict[str, np.ndarray] = {}  # by split, float64 [N, `reference_size`]

    @property
    @abstractmethod
    def reference_size(self) -> int:
        """Number of reference outputs per example; 0: none."""

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        """Whether there are reference outputs."""
        return self.reference_size > 0

    @property
    def reference_batch_size(self) -> int | None:
        """Batch size of the reference pass; None: evaluation's default. It affects the results bitwise, so it comes
        from the task's own keys."""
        return None

    @abstractmethod
    def reference_scores(self, forward: Forward, batch: MicroBatch) -> Tensor:
        """Reference outputs of a batch, computed with the model before training: float64 [B, `reference_size`]."""

    def reference_for(self, columns: Columns, rows: np.ndarray) -> np.ndarray | None:
        """Reference outputs of the examples at `rows` of a split, float64 [rows, `reference_size`]; None before the
        reference pass."""
        split = self.split_of(columns)
        return self.reference_outputs[split][rows] if split in self.reference_outputs else None


class GivesPredictions(Task):
    """A task that passes predictions and labels of a whole split to the functions of `metrics`."""

    plugin = "tasks"  # a base: it has no name in a run file

    metric_inputs: ClassVar[tuple[str, ...]] = ()  # additional `per_example_outputs` if `metrics` is set
    metric_names: tuple[str, ...] = ()  # built-in metrics, whose names those functions cannot use

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        if self.run.metrics:
            self.per_example_outputs = (*self.per_example_outputs, *self.metric_inputs)

    def score_names(self) -> tuple[str, ...] | None:
        return ("loss", *self.metric_names) if self.built_in() else None  # a plug-in may not list all

    @abstractmethod
    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and labels of the examples at `rows` of a split, one row each, from `per_example_outputs` in the
        same order."""

    @abstractmethod
    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        """Dummy predictions and labels used to validate metric functions."""
