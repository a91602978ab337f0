"""A resolved run: the run file, the classes that it names, and all decisions.

In: a run and the number of processes; `training/resolve.py` makes the decisions and refuses what cannot work. Out: a
frozen `Job`, which ranks receive as text. `TaskRules`, `StrategyRules` and `OptimizerRules` are the parts of these
plug-ins that make decisions before a process group exists. This module depends on none of the plug-ins, which are
all built from a job. Imports no torch at the top: a machine that only submits jobs may not have it.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Flag, IntEnum, auto
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from lockstep.config import error_messages, plugins
from lockstep.config.run import Run, load
from lockstep.config.sections import LaunchSection, Section, StrategySection

if TYPE_CHECKING:
    from lockstep.data.arrow_cache import Prepared

OWN_ATTENTION = "the model's own"
FREE = (  # keys and sections that affect no weight
    *("name", "output", "remote_dir", "max_time", "launch", "metrics", "evaluate", "checkpoint"),
    *("fingerprint", "sdc_check", "verify"),
    *("track", "profile", "export", "hub"),
)


class Scope(IntEnum):
    """Extent to which a run is resolved. Each scope includes those before it."""

    CLASSES = 0  # nothing is refused yet
    OPTIONS = 1  # the run file and the installed packages: `init`, `sweep`
    DATA = 2  # the data and the model: `verify`, `bench`, `replay`, `diff`, `branch`, and ranks
    OUTPUT = 3  # OUTPUT and the object store beside it: `plan`
    START = 4  # the Hub: `train`


class WeightFormats(Flag):
    """Weight formats, besides float32, that a strategy can train."""

    NONE = 0
    BFLOAT16 = auto()  # weights in bfloat16 with float32 master weights
    BFLOAT16_ALONE = auto()  # weights in bfloat16 without master weights
    FOUR_BITS = auto()  # frozen weights in 4 bits with an adapter


class TaskRules(ABC):
    """Class-level interface of a task: decisions about a run before a task exists. `tasks/task.py` has the rest."""

    plugin: ClassVar[str] = "tasks"
    Options: ClassVar[type[BaseModel]]
    display_keys: ClassVar[tuple[str, ...]] = ()  # keys that affect evaluation output and scores, but no weights
    own_model: ClassVar[bool] = False
    """Whether the user's code creates model and data, in place of the keys `model`, `tokenizer` and `data`."""

    head: ClassVar[str | None] = None  # transformers head: one of `models/heads.py`, or a `Head` of its own
    chunks_loss: ClassVar[bool] = False  # whether it has the key `loss_chunk`

    def __init__(self, run: Run) -> None:
        """A task before its data are prepared: see `Task.open`."""
        self.run = run

    @cached_property
    def options(self) -> Any:
        """The task's own keys in the run file, validated."""
        return self.Options.model_validate(self.run.task.options)

    def fit_defaults(self) -> tuple[Run, list[str]]:
        """Lower defaults that exceed what the model supports; return the run and a note for each change. Keys that the
        user wrote (`run.wrote`) are left alone: `prepare` refuses them."""
        return self.run, []

    def idle_keys(self, facts: Mapping[str, Any]) -> list[str]:
        """Notes on keys that have no effect with the other keys or with these data (`Prepared.facts`). Each note begins
        with its key; notes on keys that the user did not write are not shown."""
        return []

    def plain_options(self) -> dict[str, Any]:
        """Own keys whose default depends on other keys or on the model's files, as the plain reference needs them."""
        return {}

    def fingerprint(self) -> str:
        """A hash of the data's content, for data that neither the run file nor code determines. Every process computes
        it before it reads the cache."""
        return ""

    @classmethod
    def built_in(cls) -> bool:
        """Whether the class is lockstep's own, about which more is known than the interface says."""
        return cls.__module__.split(".")[0] == __name__.split(".")[0]

    @abstractmethod
    def prepare(self) -> Prepared:
        """Read, check and encode all splits. One process per machine calls it, before any process group exists.

        Skipped if the cache already holds the result, which depends only on `seed` and the sections `task`, `data`,
        `model` and `tokenizer`. Errors: `RunError` for bad data, columns, labels, tokenizers and models.
        """

    def score_names(self) -> tuple[str, ...] | None:
        """Names that scores may have, except those of `metrics` and of a mixture's sources; None: unknown."""
        return None

    def check_prepared(self, prepared: Prepared) -> None:  # noqa: B027 - some have nothing to refuse
        """Refuse combinations of the data with keys of other sections. Called wherever `prepare` is, and also for data
        from the cache. Errors: `RunError`."""


class OptimizerRules:
    """Class-level interface of an optimizer, before weights exist. `strategies/optimizers/optimizer.py` has the
    rest."""

    plugin: ClassVar[str] = "optimizers"
    packages: ClassVar[tuple[str, ...]] = ()  # import names of packages beyond the core
    enlarges_rounding: ClassVar[bool] = False  # whether an update enlarges a last bit, as steps in bfloat16 do
    selective: ClassVar[bool] = False  # whether its rule is for some weights only: `check_weights`
    averages: ClassVar[bool] = False  # whether evaluation and export use other weights than training: `evaluated`

    class Options(Section):
        """No own keys."""

    def __init__(self, options: Any) -> None:
        """`options`: an instance of its `Options`."""
        self.options = options

    def bytes_held(self) -> float:
        """Return the approximate bytes of optimizer state per trained parameter."""
        return 8.0


class MemoryEstimate:
    """The memory of a process under a strategy, by a formula, and an option whose default depends on it."""

    choice: str = ""  # the option chosen, shown after the strategy's name at the start of a run

    def bytes_held(self, job: Job, state: float | None = None) -> dict[str, float]:
        """Return the bytes per model parameter that a process holds between two micro-batches: `weights`, and for
        trained parameters `gradients`, `optimizer`, `average`. Values are means over processes;
        docs/reference/strategies.md derives them.
        `state`: bytes of optimizer state, if known more precisely than from the optimizer's rule.
        """
        run, state = job.run, job.rule.bytes_held() if state is None else state
        bytes_of = {"weights": 4.0, "gradients": 4.0, "optimizer": state}
        if run.model.trained_in_bfloat16:
            bytes_of |= {"weights": 2.0, "optimizer": bytes_of["optimizer"] + 4.0 * run.optim.master_weights}
        return bytes_of if run.average.ema is None else bytes_of | {"average": 4.0}

    def partial_sums(self, job: Job) -> float:
        """Return the peak of additional bytes per trained parameter that a process holds while it sums a step's
        micro-batches over the tree."""
        return 0.0

    def needs_choice(self, job: Job) -> bool:
        """Whether the run leaves an option open that depends on the memory of the machines."""
        return False

    def choose(self, job: Job, parameters: int, trained: int, memory: int) -> Run:
        """Return the run with that option set. `parameters`, `trained`: counts of the model; `memory`: bytes per
        process on the device with the least. The choice never changes results."""
        return job.run


@dataclass(frozen=True)
class StrategyFacts:
    """How a strategy works, for modules that adapt to it: constants of its class."""

    weight_formats: WeightFormats = WeightFormats.NONE
    chooses_links: bool = True  # whether `strategy.all_reduce` applies to its exact sums
    runs_whole_model: bool = False  # whether a rank's forward runs the whole model, with all its weights
    engine_casts: bool = False  # whether an engine puts its own autocast into the model's forward
    accelerate_type: str = ""  # what shards its state, as `accelerate config` calls it: fsdp or deepspeed
    flat_parts: bool = False  # whether an engine passes flattened parts of tensors to the optimizer
    waits_inside: tuple[str, ...] = ("reduction", "overlapped")
    """Phases of a step (`StepTimer`) in which a rank also waits for other ranks."""

    bench_options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Own options, and the values that `lockstep bench` tries."""


class StrategyRules(ABC):
    """Class-level interface of a strategy, before a process group exists. `strategy.py` has the rest."""

    plugin: ClassVar[str] = "strategies"
    exact: ClassVar[bool] = False  # whether it can be bitwise equal to `single` at every number of processes
    # Import names of packages beyond the core (pip extras have the same names), or a core package and its minimum.
    needs: ClassVar[tuple[str, ...]] = ()
    facts: ClassVar[StrategyFacts] = StrategyFacts()
    memory: ClassVar[MemoryEstimate] = MemoryEstimate()

    @classmethod
    @abstractmethod
    def check(cls, job: Job) -> None:
        """Refuse options that cannot work, before any process starts. Errors: `RunError`."""

    @classmethod  # noqa: B027 - most have nothing to refuse
    def check_prepared(cls, job: Job) -> None:
        """Refuse problems that only a trial of the model with the data reveals, before any process starts. Errors:
        `RunError`."""

    @classmethod
    def resolve_class(cls, section: StrategySection, launch: LaunchSection) -> type[StrategyRules]:
        """Return the class that implements these options, for a name that covers several engines."""
        return cls

    @classmethod
    def inexact_options(cls, section: StrategySection) -> list[str]:
        """Return the keys of options that make results differ from `single`; `strategy.exact` refuses them."""
        return []

    @classmethod
    def rounding(cls, job: Job) -> float:
        """Return the relative tolerance of loss, norm and gradients against `single`, for runs that are not bitwise
        reproducible. float32 sums in two different orders differ by much less."""
        return 1e-4

    @classmethod
    def stages_of(cls, section: StrategySection, processes: int) -> int:
        """Number of pipeline stages that the model is split into, each on its own rank; 1 without a pipeline."""
        return 1


@dataclass(frozen=True)
class Job:
    """A run with the classes that it names and the decisions made for it. `dump` and `load` carry it to ranks on the
    same machine."""

    run: Run
    processes: int  # ranks over all machines; 0: unknown, as for a rank that joins a running job
    scope: Scope
    task: type[TaskRules]
    strategy: type[StrategyRules]  # the resolved class; one name may stand for several
    optimizer: type[OptimizerRules]
    prepared: Prepared | None = None  # from `Scope.DATA` on
    padding: str | None = None  # why padding is computed; None if it is not
    attention: str = OWN_ATTENTION
    newest: Any = None  # `Manifest` of the checkpoint to resume from, if searched for; not sent to ranks
    notes: tuple[str, ...] = ()  # for the user; not sent to ranks

    @classmethod
    def of(cls, run: Run, processes: int = 0) -> Job:
        """Find the classes that a run names. Refuses nothing else. Errors: `RunError` for a name that is unknown or
        whose class cannot be imported."""
        return cls(
            run,
            processes,
            Scope.CLASSES,
            task_class(run.task.name),
            strategy_class(run),
            optimizer_class(run.optim.name),
        )

    def having(self, run: Run) -> Job:
        """Return the job with other options, and the strategy's class that implements them."""
        return replace(self, run=run, strategy=strategy_class(run))

    @property
    def same_bits(self) -> bool:
        """Whether the result is bitwise equal to that of a single process, and not just equal within rounding."""
        strategy, section = self.strategy, self.run.strategy
        return bool(strategy.exact and section.exact and not strategy.inexact_options(section))

    @property
    def data(self) -> Prepared:
        """Prepared data."""
        assert self.prepared is not None, "resolved without its data"
        return self.prepared

    @property
    def rule(self) -> OptimizerRules:
        """The optimizer, with its options."""
        return self.optimizer(self.optimizer.Options.model_validate(self.run.optim.options))

    def with_data(self, fresh: bool = False) -> Job:
        """Return the job with its data prepared, and with defaults that fit its model. `fresh`: ask the Hub again.
        Errors: `RunError`."""
        from lockstep.data.prepare import prepare

        task: Any = self.task
        run, _ = task(self.run).fit_defaults()
        return replace(self, run=run, prepared=prepare(run, task, fresh))

    def into(self, output: Path) -> Job:
        """Return the job with another output folder."""
        return replace(self, run=self.run.into(output))

    def arithmetic(self) -> dict[str, Any]:
        """Return the keys that affect the weights, with their values: those of the function `arithmetic`."""
        return arithmetic(self.run, self.task)

    def default(self, key: str) -> Any:
        """Return the default (JSON) of a key of `arithmetic`; None if it has none."""
        return default(self.run, key, self.task, self.optimizer)

    def summary(self) -> str:
        """Describe the strategy with the resolved options on one line."""
        parts = [
            self.run.strategy.name,
            f"attention {'without padding' if self.padding is None else self.attention}",
            f"computes in {self.run.precision} with {self._weights()}",
            *([f"computes padding ({self.padding})"] if self.padding is not None else []),
            "same bits as one process" if self.same_bits else "equal to one process within rounding",
        ]
        return "; ".join(parts)

    def _weights(self) -> str:
        """Describe the formats of the weights."""
        run, model = self.run, self.run.model
        if model.trained_in_bfloat16:
            return f"bfloat16 weights{' and float32 master weights' * run.optim.master_weights}"
        if not model.adapter:
            return "float32 weights"
        return f"float32 weights of the adapter over a base in {'4 bits' if model.quantization else model.dtype}"

    def dump(self) -> str:
        """Serialize the job as JSON. Errors: `RunError` for a run that contains a secret."""
        self.run.dump()
        names = ("processes", "scope", "padding", "attention")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values["run"] = self.run.model_dump(mode="json")
        values["written"] = sorted(self.run.written_keys)
        values["strategy"] = [self.strategy.__module__, self.strategy.__qualname__]
        values["prepared"] = asdict(self.data)
        return json.dumps(values)

    @classmethod
    def load(cls, text: str) -> Job:
        """Read a job written by `dump`. Errors: `RunError` if its classes cannot be imported."""
        from lockstep.data.arrow_cache import Prepared

        values: dict[str, Any] = json.loads(text)
        run = load(None, [], values["run"], "the job").as_written(values.pop("written"))
        task = task_class(run.task.name)
        # user modules have their own import rules
        plugins.of_key("strategy.name", "strategies", run.strategy.name)
        module, name = values["strategy"]
        strategy: Any = getattr(importlib.import_module(module), name)
        own = {"run": run, "task": task, "strategy": strategy, "optimizer": optimizer_class(run.optim.name)}
        own["prepared"] = Prepared(**values["prepared"])
        return cls(**values | own | {"scope": Scope(values["scope"])})


def task_class(name: str) -> type[TaskRules]:
    """Return the class of the task with this `task.name`. Errors: `RunError`."""
    cls: Any = plugins.of_key("task.name", "tasks", name)
    return cls


def strategy_class(run: Run) -> type[StrategyRules]:
    """Return the class of a run's strategy. Errors: `RunError`."""
    cls: Any = plugins.of_key("strategy.name", "strategies", run.strategy.name)
    return cls.resolve_class(run.strategy, run.launch)


def optimizer_class(name: str) -> type[OptimizerRules]:
    """Return the class of the optimizer with this `optim.name`. Errors: `RunError`."""
    cls: Any = plugins.of_key("optim.name", "optimizers", name)
    return cls


def arithmetic_of(run: Run) -> dict[str, Any]:
    """Return `arithmetic`, for a command that has no job and may have no torch. Errors: `RunError`."""
    return arithmetic(run, task_class(run.task.name))


def arithmetic(run: Run, task: type[TaskRules]) -> dict[str, Any]:
    """Return the keys that affect the weights, flat: a resume must not change any of them. With `strategy.exact` they
    exclude the strategy and the number of processes."""
    values = run.model_dump(mode="json")
    for key in FREE:
        del values[key]
    del values["average"]["last"]  # applied to existing checkpoints after training
    if run.average.ema is None:
        del values["average"]
    for key in ("trust_remote_code", "checkpoint_activations", "offload_activations", "cuda_graphs"):
        del values["model"][key]
    if run.model.compile == "auto":  # not decided yet
        del values["model"]["compile"]
    if run.model.fixed_lengths is None:
        del values["model"]["compile_lengths"]
    pads = ("padding",) if task.own_model else ()  # its own collate function pads
    for key in ("follow_links", "workers", "stream_cache_gb", *pads):
        del values["data"][key]
    for key in task.display_keys:
        values["task"].pop(key, None)
    if run.strategy.exact:
        values["strategy"] = {"exact": run.strategy.exact, "tensor_leaves": run.strategy.tensor_leaves}
    return error_messages.flat(values)


def default(run: Run, key: str, task: type[TaskRules], optimizer: type[OptimizerRules]) -> Any:
    """Return the default (JSON) of a key of `arithmetic`; None if it has none."""
    name, _, inner = key.partition(".")
    section: Any = getattr(run, name) if inner else run
    fields: dict[str, Any] = dict(type(section).model_fields)
    if name == "task":
        fields |= task.Options.model_fields
    elif name == "optim":
        fields |= optimizer.Options.model_fields
    field = fields.get(inner or name)
    value = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value
