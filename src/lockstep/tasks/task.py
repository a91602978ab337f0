"""The interface of a task: what is trained, on what, and how well it does.

In: the run and what `prepare` left in the cache. Out: a model, micro-batches, losses and scores as sums over examples.
A task knows nothing of ranks: it never imports `torch.distributed`. Nothing here imports torch at the top, so that a
run file can be checked without it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import BaseModel

from lockstep.config.run import Run, RunError
from lockstep.data import micro_batches, streamed
from lockstep.data.stream import Stream
from lockstep.data.streaming_source import Make
from lockstep.data.tokens import Columns, Prepared

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.data.batch import MicroBatch, Sums
    from lockstep.tasks.models.decoding import Decoding


class Task(ABC):
    """One file a task; `Options` types its keys in the run file."""

    plugin: ClassVar[str] = "tasks"
    Options: ClassVar[type[BaseModel]]
    display_keys: ClassVar[tuple[str, ...]] = ()  # its keys that decide what evaluations write and score, and no weight
    collates_ahead: ClassVar[bool | None] = None
    """Whether `collate` may run in a thread beside training. What it draws from Python's, numpy's and torch's own
    generators would then hang on the thread's timing, so by default (None) only lockstep's own tasks do, which draw
    nothing. A task of your own that draws nothing, and whose `collate` takes long, sets it to True."""

    own_model: ClassVar[bool] = False
    """Whether model and data are made by code of the user's, and not described by `model`, `tokenizer` and `data`."""

    head: ClassVar[str | None] = None  # of its model of transformers, as `models.HEADS` calls it
    streams: ClassVar[bool] = False  # whether `data.stream` goes with it: it has the two methods about it
    not_streamed_reason: ClassVar[str] = "it has no `stream` and no `example_maker`"  # why not, where it does not
    row_is_example: ClassVar[bool] = False  # whether example i of a split is made of its row i alone
    functions: ClassVar[tuple[str, ...]] = ()  # its keys that name functions of the user's
    library: ClassVar[str] = "transformers"  # what loads the export
    loader: ClassVar[str] = "from_pretrained"  # by which function
    unit: ClassVar[str | None] = "tokens"  # what the length of an example counts; None: every example counts the same

    per_example_outputs: tuple[str, ...] = ()
    """Names among what `score` gives that are no sums, but [B, ...], a row for each example: `metrics` and `tables` get
    them as [N, ...], in the order of the split, each example once."""

    metric_inputs: ClassVar[tuple[str, ...]] = ()
    """What is `gathered` besides where the run file names functions in `metrics`, for `predictions`."""

    no_metric_inputs_reason: ClassVar[str] = "a task says what they are in gathered, predictions and dummy_predictions"
    """Why such functions can be given nothing, where `dummy_predictions` gives nothing."""

    pipeline: ClassVar[str]  # the Hub's and transformers' name for what the model does

    @property
    def usage(self) -> str:
        """Lines of Python for the model card: how the exported model is used."""
        return (
            "from transformers import pipeline\n\n"
            f'ask = pipeline("{self.pipeline}", model="PATH_OR_REPO")\nask("some text")'
        )

    def __init__(self, run: Run, prepared: Prepared) -> None:
        self.run, self.prepared = run, prepared
        if run.metrics:
            self.per_example_outputs = (*self.per_example_outputs, *self.metric_inputs)
        self.reference_outputs: dict[str, np.ndarray] = {}  # by split, where it `reference_size`

        def how() -> tuple[Stream, Make]:
            return self.stream(run), self.example_maker(run, prepared.tokenizer, prepared.facts)

        self.splits = {name: streamed.opened(path, how) for name, path in prepared.splits.items()}

    def sources(self, columns: Columns) -> dict[str, range]:
        """The rows of each source in a split, where there are several."""
        told = self.prepared.facts.get("sources")
        split = next((name for name, known in self.splits.items() if known is columns), None)
        if told is None or split is None:
            return {}
        rows = told["rows"][split]
        ends = np.cumsum([0, *rows, *[0] * (len(told["names"]) - len(rows))]).tolist()  # the last may have none
        return {name: range(*ends[i : i + 2]) for i, name in enumerate(told["names"])}

    @property
    def origin(self) -> str:
        """What the model is, in the run's opening lines."""
        return self.run.model.source or f"{self.run.model.type} from scratch"

    @property
    def summary_lines(self) -> dict[str, str]:
        """More opening lines: a word and what is said of it."""
        return {}

    @property
    def padded_because(self) -> str | None:
        """Why padding is computed; None: its model is given no padding."""
        if self.head is None:
            return "the task pads"
        from lockstep.tasks.models import padding

        return padding.unsupported_reason(self.run, self.head)

    @property
    def warnings(self) -> list[str]:
        """What may make the result another one: in the user's own code by the number of processes, as far as was found;
        a tokenizer that is not trained alike twice."""
        drawn = [
            "tokenizer.train: unigram is not trained alike twice (ties are broken at random): with another cache, or "
            "on another machine, tokens and weights are others. For the same ones give tokenizer.source the export of "
            "this run"
        ]
        return [*self.prepared.facts.get("doubts", []), *drawn * (self.run.tokenizer.train == "unigram")]

    @classmethod
    def unsupported_keys(cls, run: Run) -> dict[str, str]:
        """Keys of the run file, outside of its own section, that this task cannot use: key -> why."""
        return {}

    @classmethod
    def fingerprint(cls, run: Run) -> str:
        """Of what its data hold, where neither the run file nor code says it all: asked in every process, before
        anything is taken from the cache."""
        return ""

    @classmethod
    def collates_in_thread(cls) -> bool:
        """Whether batches are collated ahead of time, beside training."""
        if cls.collates_ahead is not None:
            return cls.collates_ahead
        return cls.__module__.split(".")[0] == __name__.split(".")[0]

    @classmethod
    @abstractmethod
    def prepare(cls, run: Run) -> Prepared:
        """Read, check and tokenise all splits. Called before any process group exists, by one process a machine.

        Errors: `RunError` for bad data, columns, labels, tokenizers and models.
        """

    @classmethod
    def stream(cls, run: Run) -> Stream:
        """Which rows of a streamed training split are used, without its files."""
        raise NotImplementedError

    @classmethod
    def example_maker(cls, run: Run, folder: str, facts: Mapping[str, Any]) -> Make:
        """What makes examples of rows of a stream, with the tokenizer of a folder and the facts of `Prepared`."""
        raise NotImplementedError

    @abstractmethod
    def model(self, empty: bool = False) -> nn.Module:
        """The model, float32 on the CPU, in the state training starts from; the same bits in every process.

        `empty`: on the meta device, shapes without memory, for ranks that receive their weights from another one.
        """

    @abstractmethod
    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        """The examples at `rows`, padded to the longest; for no rows, one example whose every target is ignored.

        What it draws from Python's, numpy's and torch's own generators is the same at any number of processes."""

    def collate_at(self, columns: Columns, rows: np.ndarray, index: int, step: int) -> MicroBatch:
        """The same for a step of training, where what is drawn depends on the step and the examples alone."""
        return self.collate(columns, rows, index)

    def in_workers(self, columns: Columns, jobs: Iterable[tuple[int, int, np.ndarray]]) -> Iterator[MicroBatch] | None:
        """`collate_at` of (step, index, rows), in this order, in processes of their own; None: no workers."""
        return None

    @abstractmethod
    def count_targets(self, columns: Columns, rows: np.ndarray) -> float:
        """Targets of these examples: what their losses are summed over; where they have weights, the sum of these."""

    def sides(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        """Tokens of the examples at `rows` that are padded together, for each of the texts that an example has in a
        micro-batch: source and target, or the one."""
        return [side[rows] for side in columns.sides]

    def targets_in_batch(self, targets: Tensor) -> Tensor | float:
        """How many of a micro-batch's targets count, as `count_targets` does of its examples, with their weights: a
        scalar. `lockstep verify` asks whether all went through the model."""
        return (targets >= 0).sum()

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """What the model was asked in one of `samples`, as `lockstep predict` takes it; empty: nothing that it does."""
        return next(iter(sample.values()), "")

    @property
    def reference_size(self) -> int:
        """How many numbers of each example the model is asked for before it is trained; `first` gives them."""
        return 0

    @property
    def reference_batch_size(self) -> int | None:
        """Examples that the model is asked about together then. Their number decides bits, so it comes from the keys of
        the task; None: as many as an evaluation takes unless `evaluate` says otherwise."""
        return None

    def reference_scores(self, forward: Callable[[Mapping[str, Tensor]], Tensor], batch: MicroBatch) -> Tensor:
        """What the model says of the examples of a batch before it is trained: float64 [B, `reference_size`]."""
        raise NotImplementedError

    def reference_for(self, columns: Columns, rows: np.ndarray) -> np.ndarray | None:
        """The reference outputs of the examples at `rows` of a split, float64 [rows, `reference_size`]; None before the
        reference pass."""
        split = next((name for name, known in self.splits.items() if known is columns), None)
        return self.reference_outputs[split][rows] if split in self.reference_outputs else None

    def count_targets_at(self, columns: Columns, rows: np.ndarray, step: int) -> float:
        """The same for a step of training, where it depends on the step which tokens are targets."""
        return self.count_targets(columns, rows)

    def cut(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        """The micro-batches of a step that has these rows: places in `rows`, [M]. A function of its arguments and the
        run file alone. The default suits losses that are sums over examples: any cut has the same gradient."""
        return micro_batches.cut(columns.lengths[rows], self.run.micro_batches)

    def padded(self, columns: Columns, rows: np.ndarray, groups: Sequence[np.ndarray]) -> int:
        """Tokens that go through the model, padding among them, where each of these `groups` (places in `rows`) is
        collated, and padded."""
        return sum(micro_batches.padded_cost(side, list(groups)) for side in self.sides(columns, rows))

    @abstractmethod
    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        """The sum (never the mean) of the losses over targets: float32 scalar."""

    def loss_each(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """`loss_sum`, and the losses of the examples that it is the sum of: [B], without a gradient; None where they
        are not known one by one. Of a mixture of sources each then has a training loss."""
        return self.loss_sum(outputs, targets), None

    @property
    def reports_example_losses(self) -> bool:
        """Whether `loss_each` may stand for `loss_sum`: not where a class of the user's overrides the latter alone, or
        somebody listens to it."""
        if "loss_sum" in vars(self):
            return False
        classes = type(self).__mro__
        each, whole = (next(i for i, c in enumerate(classes) if name in vars(c)) for name in ("loss_each", "loss_sum"))
        return each <= whole

    @abstractmethod
    def score(self, forward: Callable[[Mapping[str, Tensor]], Tensor], batch: MicroBatch) -> Sums:
        """Sums over the examples of a batch, `examples` among them, that `metrics` is a function of; and what is
        `gathered` of them."""

    def score_at(
        self,
        forward: Callable[[Mapping[str, Tensor]], Tensor],
        batch: MicroBatch,
        columns: Columns,
        rows: np.ndarray,
    ) -> Sums:
        """The same, where it takes more than the batch: which `rows` it was collated from, none where it is blank. All
        sums have the same shapes for any rows."""
        return self.score(forward, batch)

    def score_texts(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        batch: MicroBatch,
        columns: Columns,
        rows: np.ndarray,
    ) -> Sums:
        """More sums, over the examples at `rows` as texts: what they hold, and what the model writes for them. No rows:
        a blank batch, the same sums with nothing in them. `generate` is collective: call it as often on every rank."""
        return {}

    def score_split(
        self, forward: Callable[[Mapping[str, Tensor]], Tensor], columns: Columns, rows: np.ndarray, device: Any
    ) -> Sums:
        """More sums, over all the examples at `rows` at once, beside those of `score_texts`: the same on every rank.
        `forward` is collective: call it as often on every rank."""
        return {}

    @classmethod
    def decodes_greedily(cls, run: Run) -> bool:
        """Whether all that evaluations write is the likeliest token each time: nothing is searched, nothing drawn."""
        return True

    def shown_rows(self, columns: Columns, count: int) -> np.ndarray:
        """At most `count` rows of a split, evenly spread, each once: int64."""
        return np.unique(np.linspace(0, len(columns) - 1, count).astype(np.int64))

    def samples(
        self,
        generate: Callable[[Mapping[str, Tensor], Decoding], Tensor],
        forward: Callable[[Mapping[str, Tensor]], Tensor],
    ) -> list[dict[str, str]]:
        """What the model makes of a few validation examples, for a person to read, after each evaluation: text by
        column, such as source, written, reference; the same columns in each, and the same on every rank. Collective."""
        return []

    @classmethod
    def input_columns(cls, run: Run) -> tuple[str, ...]:
        """The columns that a prediction is made from: of one text, or of the two of a pair."""
        return ("text",)

    @classmethod
    def predict(cls, run: Run, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """What the exported model in `folder` makes of each row of texts (as many as `asked` has columns): JSON by
        name, as it comes, in the order of the rows. Errors: `RunError`."""
        raise RunError(f"the task {run.task.name} predicts nothing from texts alone")

    @classmethod
    def predicts(cls) -> bool:
        """Whether there is a `predict` for it."""
        return getattr(cls.predict, "__func__", None) is not getattr(Task.predict, "__func__", None)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        """An answer of `predict` as a line for a person."""
        return json.dumps(answer, ensure_ascii=False)

    @abstractmethod
    def metrics(self, sums: Sums) -> dict[str, float]:
        """Metrics of a split from its sums, `loss` among them."""

    def tables(self, sums: Sums) -> dict[str, Any]:
        """What a report shows of a split beside its metrics, from the same sums: JSON by name. `confusion` is
        `{labels, counts}`, a row for each true label; `plots` are drawn, each `{title, x, lines}`, where `lines` has
        points [x, y] by name; of `labels`, `reliability` and `scatter` see `track/report/predictions.py`."""
        return {}

    def predictions(self, sums: Sums, columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What functions of `metrics` in the run file are given of the examples at `rows` of a split: predictions and
        labels, a row for each, from what was gathered, which has their order."""
        raise NotImplementedError

    metric_names: tuple[str, ...] = ()  # of its own, which those functions cannot have

    def dummy_predictions(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The same of a few examples that nobody has seen, to try such functions on; None: it gathers nothing."""
        return None

    # -- what the validation split decides ---------------------------------------------------------------------------

    @property
    def needs_calibration(self) -> bool:
        """Whether something is still to be chosen on the validation split before another one is scored."""
        return False

    def calibrate(self, scores: Mapping[str, float]) -> None:
        """Take over what was chosen there, such as a threshold, from what the model scored that is to be exported. From
        now on it holds, for other splits and for `write`."""
        return

    @classmethod
    def calibration_in(cls, folder: Path) -> dict[str, float]:
        """The scores that `settle` needs, as `write` has kept them in an export."""
        return {}

    @abstractmethod
    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the export: what `from_pretrained` needs."""

    def best_possible(self, split: str) -> dict[str, float]:
        """Metrics that nothing can beat on this split, where they are known."""
        return dict(self.prepared.facts.get("best_possible", {}).get(split, {}))
