"""The interface of a task: what is trained, on what, and how well it does.

In: the run and what `prepare` left in the cache. Out: a model, micro-batches, losses and scores as sums over examples.
A task knows nothing of ranks: it never imports `torch.distributed`. Nothing here assumes texts or tokens; tasks of
texts begin with `text_task.py`. Abilities of some tasks are classes of `abilities.py`: `Streams`, `Predicts`,
`Generates`, `Calibrates`, `UsesReference`, `GivesPredictions`. Nothing here imports torch at the top, so that a run
file can be checked without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import BaseModel

from lockstep.config.run import Run, RunError
from lockstep.data import order
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.batch import MicroBatch, Sums

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.tasks.models.inference import Decoding

Forward = Callable[[Mapping[str, "Tensor"]], "Tensor"]  # inputs of the model -> its logits. Collective
Generate = Callable[[Mapping[str, "Tensor"], "Decoding"], "Tensor"]  # inputs -> new tokens int64 [B, N]. Collective


class Task(ABC):
    """One file a task; `Options` types its keys in the run file."""

    plugin: ClassVar[str] = "tasks"
    Options: ClassVar[type[BaseModel]]
    display_keys: ClassVar[tuple[str, ...]] = ()  # keys that decide what evaluations write and score, and no weight
    collates_ahead: ClassVar[bool | None] = None
    """Whether `collate` may run in a thread beside training. What it draws from Python's, numpy's and torch's own
    generators would then hang on the thread's timing, so by default (None) only lockstep's own tasks do, which draw
    nothing. A task of your own that draws nothing, and whose `collate` takes long, sets it to True."""

    own_model: ClassVar[bool] = False
    """Whether model and data are made by code of the user's, and not described by `model`, `tokenizer` and `data`."""

    column_keys: ClassVar[tuple[str, ...]] = ()  # its keys that name columns: `init` asks for them
    column_aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """What columns are called by which `init` finds them: key -> names in lower case, the likeliest first. A task that
    has them for each of its `column_keys` needs nothing else to be found."""

    default_model: ClassVar[str | None] = None  # on the Hub: `init` fine-tunes it unless a person names another
    small_model: ClassVar[str] = "gpt2"  # a model type of transformers that `init` builds small, from scratch
    usual_rate: ClassVar[float] = 5e-5  # the learning rate that `init` writes for a pretrained model
    head: ClassVar[str | None] = None  # of its model of transformers: one of `models/heads.py`, or a `Head` of its own
    chunks_loss: ClassVar[bool] = False  # whether it has the key `loss_chunk`
    streams: ClassVar[bool] = False  # whether `data.stream` goes with it: see `abilities.Streams`
    not_streamed_reason: ClassVar[str] = "it has no `stream` and no `example_maker`"
    row_is_example: ClassVar[bool] = False  # whether example i of a split is made of its row i alone
    functions: ClassVar[tuple[str, ...]] = ()  # its keys that name functions of the user's
    library: ClassVar[str] = "transformers"  # what loads the export
    loader: ClassVar[str] = "from_pretrained"  # by which function
    unit: ClassVar[str | None] = None  # what the length of an example counts; None: every example counts the same
    no_metric_inputs_reason: ClassVar[str] = "a task that gives them is a `GivesPredictions` (tasks/abilities.py)"
    """Why functions of `metrics` can be given nothing, where a task gives them nothing."""

    pipeline: ClassVar[str]  # the Hub's and transformers' name for what the model does
    needs_reference: bool = False  # whether it needs outputs of the model before training: see `UsesReference`

    per_example_outputs: tuple[str, ...] = ()
    """Names among what `score` gives that are no sums, but [B, ...], a row for each example: `metrics` and `tables` get
    them as [N, ...], in the order of the split, each example once."""

    @property
    def usage(self) -> str:
        """Lines of Python for the model card: how the exported model is used."""
        return f'from transformers import pipeline\n\nask = pipeline("{self.pipeline}", model="PATH_OR_REPO")'

    def __init__(self, run: Run, prepared: Prepared) -> None:
        self.run, self.prepared = run, prepared
        self.options = self.options_of(run)
        self.splits = {name: self.open_split(path) for name, path in prepared.splits.items()}

    @classmethod
    def options_of(cls, run: Run) -> Any:
        """The task's own keys in the run file, checked."""
        return cls.Options.model_validate(run.task.options)

    def open_split(self, path: str) -> Columns:
        """A prepared split, memory-mapped."""
        return Columns(path)

    def sources(self, columns: Columns) -> dict[str, range]:
        """The rows of each source in a split, where there are several."""
        mixture, split = self.prepared.facts.get("sources"), self.split_of(columns)
        if mixture is None or split is None:
            return {}
        rows = mixture["rows"][split]
        ends = np.cumsum([0, *rows, *[0] * (len(mixture["names"]) - len(rows))]).tolist()  # the last may have none
        return {name: range(*ends[i : i + 2]) for i, name in enumerate(mixture["names"])}

    def split_of(self, columns: Columns) -> str | None:
        """The name of a split; None: it is none of this task's."""
        return next((name for name, split in self.splits.items() if split is columns), None)

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
        return "the task pads"

    @property
    def warnings(self) -> list[str]:
        """What may make the result another one: in the user's own code by the number of processes, as far as
        preparation saw."""
        return [*self.prepared.facts.get("doubts", [])]

    @classmethod
    def unsupported_keys(cls, run: Run) -> dict[str, str]:
        """Keys of the run file, outside of its own section, that this task cannot use: key -> why."""
        return {}

    @classmethod
    def fit_defaults(cls, run: Run) -> tuple[Run, list[str]]:
        """The run with defaults that the model has no room for replaced by what it has room for, and a note for each.
        A key that a person wrote (`run.wrote`) stays as it is: `prepare` refuses it."""
        return run, []

    @classmethod
    def idle_keys(cls, run: Run, facts: Mapping[str, Any]) -> list[str]:
        """Notes on keys that have no effect beside others, or on these data (`Prepared.facts`). Each begins with its
        key; those on keys that nobody wrote are not shown."""
        return []

    @classmethod
    def has_unusable_rows(cls, options: Any) -> bool:
        """Whether there may be rows that lack nothing, and of which nothing can be learned or scored."""
        return False

    @classmethod
    def fingerprint(cls, run: Run) -> str:
        """A hash of the data's content, where neither the run file nor code determines it. Every process asks for it
        before it takes anything from the cache."""
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
        """Read, check and encode all splits. Called before any process group exists, by one process a machine.

        Errors: `RunError` for bad data, columns, labels, tokenizers and models. It is not called where the cache has
        what it would make: by `seed` and the sections `task`, `data`, `model` and `tokenizer` alone.
        """

    @classmethod  # noqa: B027 - some have nothing to refuse
    def check_prepared(cls, run: Run, prepared: Prepared) -> None:
        """Refuse what the data and keys of other sections decide together. Called where `prepare` is, also for data
        from the cache. Errors: `RunError`."""

    @abstractmethod
    def model(self, empty: bool = False) -> nn.Module:
        """The model, float32 on the CPU, in the state training starts from; the same bits in every process.

        `empty`: on the meta device, shapes without memory, for ranks that receive their weights from another one.
        """

    # -- micro-batches -------------------------------------------------------------------------------------------------

    @abstractmethod
    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        """The examples at `rows`, padded to the longest; for no rows, one example whose every target is ignored.

        What it draws from Python's, numpy's and torch's own generators is the same at any number of processes."""

    def collate_at(self, columns: Columns, rows: np.ndarray, index: int, step: int) -> MicroBatch:
        """`collate` for a step of training, where what is drawn depends on the step and the examples alone."""
        return self.collate(columns, rows, index)

    def in_workers(self, columns: Columns, jobs: Iterable[tuple[int, int, np.ndarray]]) -> Iterator[MicroBatch] | None:
        """`collate_at` of (step, index, rows), in this order, in processes of their own; None: no workers."""
        return None

    @abstractmethod
    def count_targets(self, columns: Columns, rows: np.ndarray) -> float:
        """Targets of these examples: what their losses are summed over; where they have weights, the sum of these."""

    def count_targets_at(self, columns: Columns, rows: np.ndarray, step: int) -> float:
        """`count_targets` for a step of training, where it depends on the step which tokens are targets."""
        return self.count_targets(columns, rows)

    def targets_in_batch(self, targets: Tensor) -> Tensor | float:
        """How many of a micro-batch's targets count, as `count_targets` does of its examples, with their weights: a
        scalar. `lockstep verify` asks whether all went through the model."""
        return (targets >= 0).sum()

    def sides(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        """Lengths of the examples at `rows`, for each of the parts of an example that are padded by themselves: source
        and target, or the one."""
        return [side[rows] for side in columns.sides]

    def cut(self, columns: Columns, rows: np.ndarray) -> list[np.ndarray]:
        """The micro-batches of a step that has these rows: places in `rows`, [M]. A function of its arguments and the
        run file alone. The default suits losses that are sums over examples: any cut has the same gradient."""
        return order.cut(columns.lengths[rows], self.run.micro_batches)

    def padded(self, columns: Columns, rows: np.ndarray, groups: Sequence[np.ndarray]) -> int:
        """What goes through the model, counted in `unit`s, padding among them, where each of these `groups` (places in
        `rows`) is collated, and padded."""
        return sum(order.padded_cost(side, list(groups)) for side in self.sides(columns, rows))

    # -- loss and scores -----------------------------------------------------------------------------------------------

    @abstractmethod
    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        """The sum (never the mean) of the losses over targets: float32 scalar."""

    def loss_each(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """`loss_sum`, and the losses of the examples that it is the sum of: [B], without a gradient; None where they
        are not known one by one. Of a mixture of sources each then has a training loss."""
        return self.loss_sum(outputs, targets), None

    @property
    def reports_example_losses(self) -> bool:
        """Whether `loss_each` may stand for `loss_sum`: not where a class of the user's overrides the latter alone."""
        classes = type(self).__mro__
        each, whole = (next(i for i, c in enumerate(classes) if name in vars(c)) for name in ("loss_each", "loss_sum"))
        return each <= whole

    @abstractmethod
    def score(self, forward: Forward, batch: MicroBatch) -> Sums:
        """Sums over the examples of a batch, `examples` among them, that `metrics` is a function of; and the
        `per_example_outputs` of them."""

    def score_at(self, forward: Forward, batch: MicroBatch, columns: Columns, rows: np.ndarray) -> Sums:
        """`score`, where it takes more than the batch: which `rows` it was collated from, none where it is blank. All
        sums have the same shapes for any rows."""
        return self.score(forward, batch)

    def score_split(self, forward: Forward, columns: Columns, rows: np.ndarray, device: Any) -> Sums:
        """More sums, over all the examples at `rows` at once, beside those of batches: the same on every rank.
        `forward` is collective: call it as often on every rank."""
        return {}

    @abstractmethod
    def metrics(self, sums: Sums) -> dict[str, float]:
        """Metrics of a split from its sums, `loss` among them."""

    def tables(self, sums: Sums) -> dict[str, Any]:
        """What a report shows of a split beside its metrics, from the same sums: JSON by name. `confusion` is
        `{labels, counts}`, a row for each true label; `plots` are drawn, each `{title, x, lines}`, where `lines` has
        points [x, y] by name; of `labels`, `reliability` and `scatter` see `track/report/panels.py`."""
        return {}

    def samples(self, generate: Generate, forward: Forward) -> list[dict[str, str]]:
        """What the model makes of a few validation examples, for a person to read, after each evaluation: text by
        column, such as source, written, reference; the same columns in each, and the same on every rank. Collective."""
        if not (count := self.sample_count):
            return []
        columns = self.splits["validation"]
        rows = spread_rows(columns, count)
        return self.sample_texts(columns, rows, self.collate(columns, rows, 0), generate, forward)

    @property
    def sample_count(self) -> int:
        """Examples that `samples` shows."""
        return int(getattr(self.options, "samples", 0))

    def sample_texts(
        self, columns: Columns, rows: np.ndarray, batch: MicroBatch, generate: Generate, forward: Forward
    ) -> list[dict[str, str]]:
        """`samples` for the examples at `rows` of a split; `batch` is made of them."""
        return []

    def best_possible(self, split: str) -> dict[str, float]:
        """Metrics that nothing can beat on this split, where they are known."""
        return dict(self.prepared.facts.get("best_possible", {}).get(split, {}))

    @abstractmethod
    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the export: what `from_pretrained` needs."""


def refuse_lone_examples(run: Run, examples: int, forward: Callable[[], object]) -> None:
    """Refuse a model that cannot be trained on one example, where a micro-batch of the run has only one: batch
    normalisation of one number a channel. `examples`: of an epoch, all equally long. `forward`: of one example, in
    training mode. Errors: `RunError`."""
    whole, rest = divmod(examples, run.batch_size)
    reached = order.total_steps(run.epochs, run.steps, whole + (rest > 0)) > whole
    sizes = {"a step": run.batch_size} if whole else {}
    sizes |= {"the last step of an epoch": rest} if rest and reached else {}
    for step, size in sizes.items():
        groups = order.cut(np.ones(size, dtype=np.int64), run.micro_batches)
        if all(len(group) != 1 for group in groups):
            continue
        try:
            forward()
        except Exception as error:
            if "more than 1 value per channel" not in str(error):
                return  # what else fails is told where it is needed
            raise RunError(
                "LS3007",
                f"micro_batches: one of the {run.micro_batches} micro-batches of {step} ({size} examples) has a single "
                "example, and this model's batch normalisation needs more than one value of a channel; set fewer "
                "micro_batches, or another batch_size",
            ) from None
        return


def spread_rows(columns: Columns, count: int) -> np.ndarray:
    """At most `count` rows of a split, evenly spread, each once: int64."""
    return np.unique(np.linspace(0, len(columns) - 1, count).astype(np.int64))
