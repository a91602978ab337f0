"""The run file: typed, validated, overridable, and written beside the results with every default filled in.

In: a YAML file and `key=value` overrides. Out: one frozen `Run`, or a `RunError` naming key, value, file and line.
Nothing here imports torch: the machine you submit from may have none.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lockstep import messages, plugins


class RunError(Exception):
    """Bad usage or a bad run file: one message for the user, exit status 2, before any process starts."""


Steps = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A mapping of the run file: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class PluginSection(Section):
    """A section whose further keys belong to the plug-in it names (`your.module.Class` for your own)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class TaskSection(PluginSection):
    name: str = Field(
        "classification",
        description="classification | language_modeling | translation | token_classification, or your.module.Class; "
        "its other keys are the task's",
    )


class DataSection(Section):
    source: str | None = Field(None, description="Hub id, local folder, file or glob, or builtin/emotion")
    config: str | None = Field(None, description="configuration of a Hub data set")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub data set")
    train: str | list[str] | None = Field(None, description="split name or path(s); default: the split called train")
    validation: str | list[str] | None = Field(
        None, description="split name or path(s); default: found by its usual names, or cut from train"
    )
    test: str | list[str] | None = Field(
        None, description="split name or path(s); default: the split called test, if any"
    )
    validation_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="share of train cut off, seeded and stratified, where no validation split is given",
    )
    limit: Positive | None = Field(None, description="use at most this many examples of each split")
    max_length: Positive = Field(128, description="tokens an example is truncated to")


class ModelSection(Section):
    source: str | None = Field(None, description="Hub id or local folder of a pretrained model")
    revision: str | None = Field(None, description="branch, tag or commit of a Hub model")
    type: str | None = Field(None, description="model type of transformers (gpt2, bert, ...) to train from scratch")
    config: dict[str, Any] = Field(default_factory=dict, description="entries of the model's config to set")
    attention: str | None = Field(None, description="attn_implementation of transformers (sdpa, eager, ...)")
    adapter: dict[str, Any] = Field(
        default_factory=dict,
        description="train an adapter of peft (type: lora, r, ...) and nothing else; export: merged | adapter",
    )
    trust_remote_code: bool = Field(False, description="run code that comes with a Hub model; read it first")

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSection:
        if (self.source is None) == (self.type is None):
            raise ValueError("give either source (pretrained) or type (from scratch), and not both")
        return self


class TokenizerSection(Section):
    source: str | None = Field(None, description="Hub id or local folder; default: the model's own")
    train: Literal["bpe", "wordpiece", "wordlevel", "unigram", "character"] | None = Field(
        None, description="train one of this kind on the training texts"
    )
    vocab_size: Positive = Field(8000, description="entries of a trained tokenizer, at most")

    @model_validator(mode="after")
    def _one_origin(self) -> TokenizerSection:
        if self.source is not None and self.train is not None:
            raise ValueError("give either source or train, and not both")
        return self


class OptimSection(Section):
    name: Literal["adamw", "sgd"] = Field("adamw", description="AdamW or SGD with momentum, both fused")
    learning_rate: float = Field(5e-5, gt=0, description="the highest rate of the schedule")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="after warm-up: to 0 at the last step"
    )
    warmup_steps: Steps = Field(0, description="steps of linear warm-up from 0")
    warmup_fraction: float = Field(0.0, ge=0, le=1, description="the same as a share of all steps")
    weight_decay: float = Field(0.01, ge=0, description="not applied to biases and norms")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's moment decays")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum")
    clip: float | None = Field(1.0, ge=0, description="largest gradient norm; 0 or null: no clipping")

    @model_validator(mode="after")
    def _one_warmup(self) -> OptimSection:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError("give warmup_steps or warmup_fraction, and not both")
        return self


class StrategySection(Section):
    name: str = Field(
        "ddp",
        description="single | allreduce | ddp | hf_accelerate | hf_trainer | zero1 | zero2 | zero3 | fsdp2 | pipeline, "
        "or your.module.Class",
    )
    exact: bool = Field(
        True,
        description="the same bits at every number of processes, where the strategy can; false: the engine's own "
        "reduction",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="passed to the engine untouched")


class LaunchSection(Section):
    name: str = Field("local", description="local | tcp, or your.module.Class")
    processes: Positive | Literal["auto"] = Field(
        "auto", description="processes a machine; auto: one a GPU, else one a core, at most micro_batches"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    threads: Positive | Literal["auto"] = Field(
        "auto", description="threads a process; auto: cores / micro_batches if exact, else its share"
    )
    max_restarts: Steps = Field(0, description="times a job whose rank died starts again from its last checkpoint")
    timeout_s: float = Field(600.0, gt=0, description="seconds a collective may wait for the other ranks")
    hang_s: float = Field(
        300.0,
        ge=0,
        description="seconds a rank may be silent, or in one place, before it is named and the job ends; 0: any",
    )
    master: str | None = Field(None, description="tcp: tcp://host:port of rank 0")
    rank: Steps | None = Field(None, description="tcp: this process's rank")
    world_size: Positive | None = Field(None, description="tcp: number of processes in all")


class EvaluateSection(Section):
    every: Steps = Field(0, description="steps between evaluations; 0: only at the end")
    batch_size: Positive | None = Field(
        None, description="examples per evaluation batch on a rank; default: 4 micro-batches"
    )


class CheckpointSection(Section):
    every: Steps = Field(200, description="steps between checkpoints; 0: only at a stop and at the end")
    keep: Positive = Field(2, description="newest checkpoints kept")
    best: str | None = Field(
        None,
        pattern=r"^-?\w+$",
        description="metric by which the best evaluated checkpoint is saved and kept too: accuracy, or -loss (less is "
        "better)",
    )
    on_failure: Literal["continue", "stop"] = Field(
        "continue", description="when a checkpoint cannot be written: train on, or stop with status 1"
    )


class TrackSection(Section):
    to: list[str] = Field(default_factory=list, description="tensorboard, ...; console and jsonl always")
    every: Positive = Field(10, description="steps between lines of metrics.jsonl")


class HubSection(Section):
    push_to: str | None = Field(None, description="USER/REPO the export is uploaded to at the end")
    private: bool = Field(True, description="create the repository private")


class Run(Section):
    """One training job, complete: everything that decides its arithmetic, and how and where it runs."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the output folder")
    output: str | None = Field(None, description="default: outputs/NAME")
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, data order and dropout")
    task: TaskSection = Field(default_factory=TaskSection)  # type: ignore[arg-type]
    data: DataSection
    model: ModelSection
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection)  # type: ignore[arg-type]
    epochs: float | None = Field(None, gt=0, description="passes over the training split; or give steps")
    steps: Positive | None = Field(None, description="optimizer steps; or give epochs")
    stop_after: str | None = Field(
        None,
        pattern=r"^(\d+(\.\d+)?[dhms])+$",
        description="time after which to stop as if asked to, for example 3h50m; counted from each start",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="what to do with a step whose loss or gradient is not finite; skip: leave its update out"
    )
    batch_size: Positive = Field(128, description="examples per optimizer step over the whole job")
    micro_batches: Positive = Field(
        8, description="pieces a step is cut into; defines the arithmetic, whatever the number of processes"
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="bf16: autocast; weights and moments stay fp32")
    optim: OptimSection = Field(default_factory=OptimSection)  # type: ignore[arg-type]
    strategy: StrategySection = Field(default_factory=StrategySection)  # type: ignore[arg-type]
    launch: LaunchSection = Field(default_factory=LaunchSection)  # type: ignore[arg-type]
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)  # type: ignore[arg-type]
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)  # type: ignore[arg-type]
    track: TrackSection = Field(default_factory=TrackSection)  # type: ignore[arg-type]
    hub: HubSection = Field(default_factory=HubSection)  # type: ignore[arg-type]

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = dict(values)
            if values.get("epochs") is None and values.get("steps") is None:
                values["epochs"] = 3
            if values.get("output") is None:
                values["output"] = f"outputs/{values.get('name', 'run')}"
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Run:
        if self.checkpoint.best and not self.evaluate.every:
            raise ValueError("checkpoint.best needs evaluations to choose from: set evaluate.every")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give either epochs or steps, and not both")
        if self.micro_batches > self.batch_size:
            raise ValueError(
                f"micro_batches ({self.micro_batches}) must not be more than batch_size ({self.batch_size}): "
                "every piece of a step needs an example"
            )
        return self

    @property
    def folder(self) -> Path:
        """OUTPUT: where everything this run writes goes."""
        return Path(str(self.output))

    @property
    def stop_after_s(self) -> float | None:
        """`stop_after` in seconds."""
        units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        parts = re.findall(r"([\d.]+)([dhms])", self.stop_after or "")
        return sum(float(number) * units[unit] for number, unit in parts) or None

    def dump(self) -> str:
        """The resolved run as YAML that can be run again."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)

    def arithmetic(self) -> dict[str, Any]:
        """The keys that decide the weights, flat: a resume must not change any of them.

        With `strategy.exact` neither the strategy nor the number of processes is among them.
        """
        values = self.model_dump(mode="json")
        for key in ("name", "output", "stop_after", "launch", "evaluate", "checkpoint", "track", "hub"):
            del values[key]
        values["model"].pop("trust_remote_code")
        if self.strategy.exact:
            values["strategy"] = {"exact": True}
        return messages.flat(values)


def load(path: str | Path | None, overrides: list[str], defaults: dict[str, Any] | None = None) -> Run:
    """The run of a file and `key=value` overrides; `defaults` is the mapping used where there is no file.

    Errors: `RunError` with key, value, what is allowed, file and line.
    """
    text, origin = "", "the command line"
    values: Any = defaults or {}
    if path is not None:
        origin = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
            values = yaml.safe_load(text)
        except OSError as error:
            raise RunError(f"cannot read the run file {path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RunError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise RunError(
                f"{path} must hold a mapping of keys (see `lockstep schema`), it holds {messages.kind(values)}"
            )
        values.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem))
    overridden = dict(map(_override, overrides))
    for key, value in overridden.items():
        _set(values := _copied(values), key, value)
    for given, replaced in (("steps", "epochs"), ("epochs", "steps")):
        if overridden.get(given) is not None and replaced not in overridden:
            values.pop(replaced, None)  # the command line's length replaces the file's, whichever way each is given
    if (hidden := messages.secret(values)) is not None:
        raise RunError(
            f"{hidden} in {origin} looks like a secret. Secrets come from the environment only "
            "(HF_TOKEN, WANDB_API_KEY, ...): remove it, and revoke it if the file was shared"
        )
    lines = messages.lines_of(text) if text else {}
    try:
        run = Run.model_validate(values)
    except ValidationError as error:
        raise RunError(messages.explain(error, Run, origin, lines, overridden)) from None
    return check_plugins(run, origin, lines, overridden)


def check_plugins(run: Run, origin: str, lines: dict[str, int], overridden: dict[str, Any]) -> Run:
    """Resolve the task's and the launcher's name and type the task's own keys; only torch-free plug-ins are
    imported."""

    def where(key: str) -> str:
        return messages.where(key, origin, lines, overridden)

    try:
        task = plugins.find("tasks", run.task.name)
        options = task.Options.model_validate(run.task.options)  # type: ignore[attr-defined]
    except plugins.PluginError as error:
        raise RunError(f"task.name: {error} ({where('task.name')})") from None
    except ValidationError as error:
        raise RunError(messages.explain(error, Run, origin, lines, overridden, "task", task.Options)) from None  # type: ignore[attr-defined]
    for key, kind, names in (
        ("strategy.name", "strategies", [run.strategy.name]),
        ("launch.name", "launchers", [run.launch.name]),
        ("track.to", "track", run.track.to),
    ):
        for name in names:
            if "." not in name and name not in plugins.names(kind):
                known = plugins.names(kind)
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise RunError(f"{key}: unknown name {name!r}; {hint}known are {', '.join(known)} ({where(key)})")
    return run.model_copy(update={"task": TaskSection(name=run.task.name, **options.model_dump())})


def keep(run: Run) -> None:
    """OUTPUT/run.yaml, every default filled in. Errors: `RunError` when OUTPUT cannot be written."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        aside = run.folder / ".run.yaml.partial"
        aside.write_text(run.dump(), encoding="utf-8")
        os.replace(aside, run.folder / "run.yaml")
    except OSError as error:
        raise RunError(f"output: cannot write to {run.folder}: {error.strerror}") from error


def schema() -> dict[str, Any]:
    """The JSON Schema of a run file, for editors."""
    return Run.model_json_schema()


# -- reading ---------------------------------------------------------------------------------------------------------


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise RunError(f"{text!r} is not key=value, for example optim.learning_rate=3e-5")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RunError(f"the value of {key} is not valid YAML: {' '.join(str(error).split())}") from None


def _copied(values: Any) -> Any:
    return {k: _copied(v) for k, v in values.items()} if isinstance(values, dict) else values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(values.get(parent), dict):
            values[parent] = {}
        values = values[parent]
    values[last] = value
