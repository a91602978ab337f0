"""The interface of a task: its model, data, loss and scores, and the optional abilities of tasks, one class each.

In: the job, with the data that `prepare` cached. Out: a model, micro-batches, and losses and scores as sums over
examples. Decisions of a task before its data are prepared are in `data/job.py` (`TaskRules`). A task knows nothing
of ranks: it never imports `torch.distributed`. Nothing here assumes texts or tokens; `text_task.py` is the base of text
tasks. A task inherits from `Task` and from the classes of its abilities: `Streams`, `Predicts`, `Generates`,
`Calibrates`, `UsesReference`, `GivesPredictions`; test with `isinstance`, or `issubclass` for a class. This module does
not import torch at the top, so a run file can be checked without it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.data import order, streamed
from lockstep.data.arrow_cache import Columns, Make, Prepared
from lockstep.data.batch import MicroBatch, Sums
from lockstep.data.cache import STREAM
from lockstep.data.job import Job, TaskRules
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lockstep.data import fixed_lengths
    from lockstep.data.stream import Stream
    from lockstep.tasks.models.inference import Decoding
else:  # for model.compile_lengths
    (fixed_lengths,) = lazy("lockstep.data", "fixed_lengths")


Forward = Callable[[Mapping[str, "Tensor"]], "Tensor"]  # inputs of the model -> its logits. Collective
Generate = Callable[[Mapping[str, "Tensor"], "Decoding"], "Tensor"]  # inputs -> new tokens int64 [B, N]. Collective


def make_task(job: Job) -> Task:
    """Return the job's task on its prepared data."""
    task: Any = job.task(job.run)
    return task.opened(job.data)


class Task(TaskRules):
    """Base class of tasks: one file per task; `Options` types its keys in the run file."""

    plugin: ClassVar[str] = "tasks"
    collates_ahead: ClassVar[bool | None] = None
    """Whether `collate` may run in a thread beside training. Random numbers drawn from Python's, numpy's and torch's
    generators would then depend on the thread's timing, so by default (None) only lockstep's own tasks do, which draw
    none. Set it to True for your own task with a slow `collate` that draws none."""

    column_keys: ClassVar[tuple[str, ...]] = ()  # option keys that name columns; `init` prompts for them
    column_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Usual names of columns, by which `init` recognizes the task: key -> names in lower case, the likeliest first.
    `init` recognizes a task that has them for each of its `column_keys`."""

    language_keys: ClassVar[tuple[str, ...]] = ()  # `column_keys` whose columns may be named after languages
    draws_targets: ClassVar[bool] = False  # whether collating draws targets at random
    plain_columns: ClassVar[Mapping[str, str]] = {}  # column key -> the column's name in the kept raw rows

    default_model: ClassVar[str | None] = None  # Hub model that `init` fine-tunes by default
    small_model: ClassVar[str] = "gpt2"  # transformers model type that `init` builds from scratch
    usual_rate: ClassVar[float] = 5e-5  # learning rate that `init` writes for a pretrained model
    streams: ClassVar[bool] = False  # whether it supports `data.stream`: see `abilities.Streams`
    not_streamed_reason: ClassVar[str] = "it has no `stream` and no `example_maker`"
    row_is_example: ClassVar[bool] = False  # whether example i depends on row i alone
    functions: ClassVar[tuple[str, ...]] = ()  # option keys that name the user's functions
    library: ClassVar[str] = "transformers"  # what loads the export
    loader: ClassVar[str] = "from_pretrained"  # function of `library` that loads it
    length_key: ClassVar[str | None] = None  # key of the maximum length of an example; None: there is none
    cuts_blocks: ClassVar[bool] = False  # whether examples are blocks of tokens, so that the tokenizer decides how many
    in_batch_negatives: ClassVar[bool] = False  # whether the other rows of a micro-batch are an example's negatives
    drops_unlabeled_test: ClassVar[bool] = False  # whether a test split without labels is left out
    t5_prefix: ClassVar[str] = ""  # prefix with which T5 was trained for this task
    targets_by_token: ClassVar[bool | None] = None
    """Whether a micro-batch has a target per token (True) or per text (False); None: it cannot be padded to fixed
    lengths (`model.compile_lengths`)."""

    unit: ClassVar[str | None] = None  # unit of an example's length; None: all examples have equal length
    no_metric_inputs_reason: ClassVar[str] = "only a task with the ability `GivesPredictions` (tasks/task.py) does"
    """Why the task passes no predictions to functions of `metrics`."""

    pipeline: ClassVar[str]  # the Hub's and transformers' name for what the model does
    needs_reference: bool = False  # needs outputs of the initial model: see `UsesReference`

    per_example_outputs: tuple[str, ...] = ()
    """Names in the result of `score` that are not sums but per-example values [B, ...]: `metrics` and `tables` get them
    as [N, ...], in the order of the split, each example once."""

    @property
    def usage(self) -> str:
        """Python code for the model card that loads and calls the exported model."""
        return f'from transformers import pipeline\n\nask = pipeline("{self.pipeline}", model="PATH_OR_REPO")'

    prepared: Prepared
    splits: dict[str, Columns]

    def open(self, prepared: Prepared) -> None:
        """Open the prepared splits, in every process that trains or evaluates; before that, a task knows its run."""
        self.prepared = prepared
        self.splits = {name: self.open_split(path) for name, path in prepared.splits.items()}

    def opened(self, prepared: Prepared) -> Self:
        """Return the task after `open`."""
        self.open(prepared)
        return self

    def open_split(self, path: str) -> Columns:
        """Open a prepared split, memory-mapped."""
        return Columns(path)

    def sources(self, columns: Columns) -> dict[str, range]:
        """Map each source of a mixture to its rows in a split; empty if there is only one source."""
        mixture, split = self.prepared.facts.get("sources"), self.split_of(columns)
        if mixture is None or split is None:
            return {}
        rows = mixture["rows"][split]
        ends = np.cumsum([0, *rows, *[0] * (len(mixture["names"]) - len(rows))]).tolist()  # the last may have none
        return {name: range(*ends[i : i + 2]) for i, name in enumerate(mixture["names"])}

    def split_of(self, columns: Columns) -> str | None:
        """Return the name of a split, or None if it is not one of this task's."""
        return next((name for name, split in self.splits.items() if split is columns), None)

    @property
    def origin(self) -> str:
        """Origin of the model, for the run's opening lines."""
        return self.run.model.source or f"{self.run.model.type} from scratch"

    @property
    def summary_lines(self) -> dict[str, str]:
        """Extra opening lines: label -> text."""
        return {}

    @property
    def padded_because(self) -> str | None:
        """The reason why padding is computed, or None if the model receives no padding."""
        return "the task pads"

    @property
    def warnings(self) -> list[str]:
        """Warnings from preparation that the user's own code may make results depend on the number of processes."""
        return [*self.prepared.facts.get("doubts", [])]

    def unsupported_keys(self) -> dict[str, str]:
        """Keys of the run file outside the task's own section that this task cannot use: key -> reason."""
        return {}

    def plain_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return kept raw rows in the form that the plain reference reads."""
        return rows

    @classmethod
    def has_unusable_rows(cls, options: Any) -> bool:
        """Whether complete rows may still yield nothing to learn or to score."""
        return False

    @classmethod
    def collates_in_thread(cls) -> bool:
        """Whether batches are collated ahead of time, in a thread beside training."""
        return cls.built_in() if cls.collates_ahead is None else cls.collates_ahead

    @property
    def config_entries(self) -> dict[str, Any]:
        """Entries that the task sets in the config of its model, such as the labels of its head."""
        return {}

    @abstractmethod
    def model(self, empty: bool = False) -> nn.Module:
        """Build the model: float32, on the CPU, in its initial training state, bitwise equal in every process.

        `empty`: build on the meta device (shapes only), for ranks that receive their weights from another rank.
        """

    # -- micro-batches -------------------------------------------------------------------------------------------------

    @abstractmethod
    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        """Collate the examples at `rows`, padded to the longest. If `rows` is empty, return one example whose targets
        are all ignored.

        Draws from Python's, numpy's and torch's generators must not depend on the number of processes."""

    def collate_at(self, columns: Columns, rows: np.ndarray, index: int, step: int) -> MicroBatch:
        """Collate the examples of a training step, by default as `collate`; override it if random draws depend on the
        step and the examples."""
        return self.collate(columns, rows, index)

    def first_inputs(self, device: torch.device) -> Mapping[str, Tensor]:
        """Return the model inputs of the first two training examples."""
        columns = self.splits["train"]
        return self.collate(columns, np.arange(min(2, len(columns))), 0).to(device).inputs

    def in_workers(self, columns: Columns, jobs: Iterable[tuple[int, int, np.ndarray]]) -> Iterator[MicroBatch] | None:
        """Run `collate_at` for each (step, index, rows) in worker processes and yield the results in order; None: no
        workers."""
        return None

    @abstractmethod
    def count_targets(self, columns: Columns, rows: np.ndarray) -> float:
        """Number of targets in these examples, over which their losses are summed; the sum of the weights if targets
        are weighted."""

    def count_targets_at(self, columns: Columns, rows: np.ndarray, step: int) -> float:
        """Count the targets of a training step, by default as `count_targets`; override it if the choice of targets
        depends on the step."""
        return self.count_targets(columns, rows)

    def targets_in_batch(self, targets: Tensor) -> Tensor | float:
        """Number of targets in a collated micro-batch (scalar), weighted as in `count_targets`. `lockstep verify` uses
        it to check that every target went through the model."""
        return (targets >= 0).sum()

    def padded_lengths(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        """Lengths of the examples at `rows`: one array for each part that is padded separately (source and target), or
        a single one."""
        return [side[rows] for side in columns.sides]

    def split_micro_batches(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        """Split the rows of a step into `micro_batches` micro-batches: indices into `rows`, [M].

        A function of its arguments and the run file alone. The default suits losses that are sums over examples, for
        which every split has the same gradient."""
        if self.run.model.fixed_lengths:
            return order.equal_micro_batches(columns.lengths[rows], self.run.micro_batches)
        return order.cut_micro_batches(columns.lengths[rows], self.run.micro_batches)

    def widened(self, micro: MicroBatch, lengths: Sequence[int]) -> MicroBatch:
        """Pad a micro-batch of texts, in host memory, to one of `lengths`. Only for tasks with `targets_by_token`."""
        raise NotImplementedError

    def padded(self, columns: Columns, rows: np.ndarray, groups: Sequence[np.ndarray]) -> int:
        """Number of `unit`s that go through the model, padding included, if each of `groups` (indices into `rows`) is
        collated separately."""
        sides = self.padded_lengths(columns, rows)
        if lengths := self.run.model.fixed_lengths:
            return sum(
                len(g) * fixed_lengths.fit(lengths, int(side[g].max())) for side in sides for g in groups if len(g)
            )
        return sum(order.padded_cost(side, list(groups)) for side in sides)

    # -- loss and scores -----------------------------------------------------------------------------------------------

    @abstractmethod
    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        """Sum (never the mean) of the losses over targets: float32 scalar."""

    def loss_each(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `loss_sum` and the per-example losses that it sums: [B], without gradient; None if they are unknown.
        With them, each source of a mixture gets its own training loss."""
        return self.loss_sum(outputs, targets), None

    @property
    def reports_example_losses(self) -> bool:
        """Whether `loss_each` may replace `loss_sum`: False if a user's class overrides only the latter."""
        classes = type(self).__mro__
        each, whole = (next(i for i, c in enumerate(classes) if name in vars(c)) for name in ("loss_each", "loss_sum"))
        return each <= whole

    @abstractmethod
    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        """Score a batch: sums over its examples, from which `metrics` are computed (`examples` is one of them), and the
        `per_example_outputs`."""

    def score_at(self, forward: Forward, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        """Score a batch, by default as `score`. Also receives the `rows` of the batch (empty if it is a padding
        micro-batch). All sums must have the same shapes for any rows."""
        return self.score(forward, batch)

    def score_split(self, forward: Forward, columns: Columns, rows: np.ndarray, device: Any) -> Sums:
        """Additional sums over all examples at `rows` at once, equal on every rank. `forward` is collective: every rank
        must call it equally often."""
        return {}

    @abstractmethod
    def metrics(self, sums: Sums) -> dict[str, float]:
        """Compute the metrics of a split, `loss` among them, from its sums."""

    def possible_scores(self) -> tuple[str, ...] | None:
        """Names of this run's metrics, including those that depend on its data; None if unknown."""
        return self.score_names()

    def tables(self, sums: Sums) -> dict[str, Any]:
        """Report content of a split beside its metrics, computed from the same sums: JSON by name.

        `confusion` is `{labels, counts}` with one row per true label. `plots` are `{title, x, lines}`, where `lines`
        maps names to points [x, y]. For `labels`, `reliability` and `scatter` see `track/report/panels.py`."""
        return {}

    def samples(self, generate: Generate, forward: Forward) -> list[dict[str, str]]:
        """Model outputs for a few validation examples, shown after each evaluation: text by column (source, written,
        reference). All rows have the same columns; all ranks return the same. Collective."""
        if not (count := self.sample_count):
            return []
        columns = self.splits["validation"]
        rows = spread_rows(columns, count)
        return self.sample_texts(columns, rows, self.collate(columns, rows, 0), generate, forward)

    @property
    def sample_count(self) -> int:
        """Number of examples that `samples` shows."""
        return int(getattr(self.options, "samples", 0))

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        """Rows of `samples` for the examples at `rows` of a split; `batch` is their collated micro-batch."""
        return []

    def best_possible(self, split: str) -> dict[str, float]:
        """Upper bounds of this split's metrics, where known."""
        return dict(self.prepared.facts.get("best_possible", {}).get(split, {}))

    def refuse_lone_examples(self, examples: int, forward: Callable[[], object]) -> None:
        """Refuse a micro-batch of one example if the model's batch normalization then sees one value per
        channel.

        `examples`: number of examples in an epoch, all of equal length. `forward`: runs one example in training mode.
        Errors: `RunError`."""
        run = self.run
        whole, rest = divmod(examples, run.batch_size)
        reached = order.total_steps(run.epochs, run.steps, whole + (rest > 0)) > whole
        sizes = {"a step": run.batch_size} if whole else {}
        sizes |= {"the last step of an epoch": rest} if rest and reached else {}
        for step, size in sizes.items():
            groups = order.cut_micro_batches(np.ones(size, dtype=np.int64), run.micro_batches)
            if all(len(group) != 1 for group in groups):
                continue
            try:
                forward()
            except Exception as error:
                if "more than 1 value per channel" not in str(error):
                    return  # other failures are reported where they matter
                raise RunError(
                    "LS3007",
                    f"micro_batches: one of the {run.micro_batches} micro-batches of {step} "
                    f"({quantity(size, 'example')}) has a single example, and this model's batch normalisation needs "
                    "more than one value per channel; set fewer micro_batches, or another batch_size",
                ) from None
            return

    @abstractmethod
    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the export: the files that `from_pretrained` needs."""


def spread_rows(columns: Columns, count: int) -> np.ndarray:
    """At most `count` distinct rows of a split, evenly spaced: int64."""
    return np.unique(np.linspace(0, len(columns) - 1, count).astype(np.int64))


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
        if not path.endswith(STREAM):
            return super().open_split(path)
        prepared = self.prepared
        return streamed.Streamed(path, lambda: (self.stream(), self.example_maker(prepared.tokenizer, prepared.facts)))


class Predicts(Task):
    """A task whose exported model `lockstep predict` can run."""

    plugin = "tasks"  # a base: it has no name in a run file
    input_keys: ClassVar[tuple[str, ...]] = ()  # option keys that name the input columns
    answer_name: ClassVar[str | None] = None  # entry of a prediction to display; None: all entries
    reads_conversations: ClassVar[bool] = False  # by the tokenizer's chat template, also if it was trained on texts
    scores_answers: ClassVar[bool] = False  # whether a conversation ends with the answer

    @property
    def example_input(self) -> str:
        """What a user enters at the command line, if there is no sample: one text, or two with a tab between them."""
        return "some text" if len(self.input_columns()) == 1 else "first text\tsecond text"

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
