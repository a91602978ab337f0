"""What only some tasks can do, an ability a class: a task inherits from `Task` and from those that it has.

In: the class of a task, or a task. Out: whether it streams, predicts, generates, calibrates, asks for a reference, or
gives predictions to functions of the user's: `isinstance`, or `issubclass` before there is a task.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lockstep.config.run import Run
from lockstep.data import streamed
from lockstep.data.arrow_cache import Columns, Make, Prepared
from lockstep.data.batch import MicroBatch, Sums
from lockstep.data.stream import Stream
from lockstep.tasks.task import Forward, Generate, Task

if TYPE_CHECKING:
    from torch import Tensor


class Streams(Task):
    """A training split that is larger than the cache (`data.stream`) is read while it is trained on."""

    plugin = "tasks"  # a base: it has no name in a run file

    streams = True

    @classmethod
    @abstractmethod
    def stream(cls, run: Run) -> Stream:
        """Which rows of a streamed training split are used, without its files."""

    @classmethod
    @abstractmethod
    def example_maker(cls, run: Run, folder: str, facts: Mapping[str, Any]) -> Make:
        """Function from rows to examples, with the tokenizer of a folder and the facts of `Prepared`."""

    def open_split(self, path: str) -> Columns:
        """A prepared split: memory-mapped, or read from its index where it is streamed."""
        run, prepared = self.run, self.prepared
        return streamed.opened(
            path, lambda: (self.stream(run), self.example_maker(run, prepared.tokenizer, prepared.facts))
        )


class Predicts(Task):
    """`lockstep predict` asks the exported model."""

    plugin = "tasks"  # a base: it has no name in a run file
    example_input: ClassVar[str] = "some text"  # for the command line, where there is no sample to show
    input_keys: ClassVar[tuple[str, ...]] = ()  # its keys that name the columns a prediction is made from
    answer_name: ClassVar[str | None] = None  # of what `predict` answers that a person reads; None: all of it

    @classmethod
    def input_columns(cls, run: Run) -> tuple[str, ...]:
        """The columns that a prediction is made from: of one text, or of the two of a pair."""
        options = cls.options_of(run)
        return tuple(getattr(options, key) for key in cls.input_keys) or ("text",)

    @classmethod
    def input_rows(cls, run: Run, word: str) -> list[tuple[str, ...]] | None:
        """The rows that a word of the command line stands for; None: it is a text, or a file of rows with columns.
        Errors: `RunError`."""
        return None

    @classmethod
    @abstractmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """The answer of the exported model in `folder` to each row (as many values as `input_columns`): JSON by name,
        one after the other, in the order of the rows. Errors: `RunError`."""

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        """An answer of `predict` as a line for a person."""
        return json.dumps(answer, ensure_ascii=False) if cls.answer_name is None else str(answer[cls.answer_name])

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """The input of one of `samples`, as `lockstep predict` takes it; empty: `predict` has no use for it."""
        return next(iter(sample.values()), "")


class Generates(Task):
    """The model writes: evaluations score what it writes."""

    plugin = "tasks"  # a base: it has no name in a run file

    @abstractmethod
    def score_texts(self, generate: Generate, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        """More sums, over the examples at `rows` as texts: what they hold, and what the model writes for them. No rows:
        a blank batch, the same sums with nothing in them. `generate` is collective: call it as often on every rank."""

    @classmethod
    @abstractmethod
    def decodes_greedily(cls, run: Run) -> bool:
        """Whether all that evaluations write is the likeliest token each time: nothing is searched, nothing drawn."""


class Calibrates(Task):
    """The validation split decides something after training, such as a threshold."""

    plugin = "tasks"  # a base: it has no name in a run file

    @property
    @abstractmethod
    def needs_calibration(self) -> bool:
        """Whether something is still to be chosen on the validation split before another one is scored."""

    @abstractmethod
    def calibrate(self, scores: Mapping[str, float]) -> None:
        """Take over what was chosen there from what the model scored that is to be exported. From now on it holds, for
        other splits and for `write`."""

    @classmethod
    @abstractmethod
    def calibration_in(cls, folder: Path) -> dict[str, float]:
        """The scores that `calibrate` needs, as `write` has kept them in an export."""


class UsesReference(Task):
    """The loss compares with what the model gave before training."""

    plugin = "tasks"  # a base: it has no name in a run file

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        self.reference_outputs: dict[str, np.ndarray] = {}  # by split, float64 [N, `reference_size`]

    @property
    @abstractmethod
    def reference_size(self) -> int:
        """Numbers of each example that the model is asked for before it is trained; 0: none."""

    @property
    def needs_reference(self) -> bool:  # type: ignore[override]
        """Whether there are any."""
        return self.reference_size > 0

    @property
    def reference_batch_size(self) -> int | None:
        """Examples that the model is asked about together then. Their number decides bits, so it comes from the keys of
        the task; None: as many as an evaluation takes unless `evaluate` says otherwise."""
        return None

    @abstractmethod
    def reference_scores(self, forward: Forward, batch: MicroBatch) -> Tensor:
        """The numbers of the examples of a batch, by the model before training: float64 [B, `reference_size`]."""

    def reference_for(self, columns: Columns, rows: np.ndarray) -> np.ndarray | None:
        """The reference outputs of the examples at `rows` of a split, float64 [rows, `reference_size`]; None before the
        reference pass."""
        split = self.split_of(columns)
        return self.reference_outputs[split][rows] if split in self.reference_outputs else None


class GivesPredictions(Task):
    """Functions that the run file names in `metrics` are given predictions and labels of a whole split."""

    plugin = "tasks"  # a base: it has no name in a run file

    metric_inputs: ClassVar[tuple[str, ...]] = ()  # more `per_example_outputs`, where there are such functions
    metric_names: tuple[str, ...] = ()  # metrics of the task's own, whose names those functions cannot have

    def __init__(self, run: Run, prepared: Prepared) -> None:
        super().__init__(run, prepared)
        if run.metrics:
            self.per_example_outputs = (*self.per_example_outputs, *self.metric_inputs)

    @abstractmethod
    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and labels of the examples at `rows` of a split, a row for each, from `per_example_outputs`,
        which have their order."""

    @abstractmethod
    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and labels of a few examples that nobody has seen, to try such functions on."""
