"""The run file: typed, validated, overridable, and saved with the results with every default filled in.

In: a YAML file and `key=value` overrides. Out: one frozen `Run`, or a `RunError` naming key, value, file and line.
Order in this file: `Run`, `load`, overrides, the quick start, local paths (relative to the run file's folder, if they
exist there), OUTPUT/run.yaml, and the JSON Schema for editors. Imports no torch: the machine you submit from may have
none.
"""

from __future__ import annotations

import copy
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from lockstep.config import error_messages as messages
from lockstep.config import model_selection, plugins, processor, written
from lockstep.config.data_sources import Mirror, PathText, is_address
from lockstep.config.errors import InvalidValue, coded
from lockstep.config.errors import RunError as RunError
from lockstep.config.lazy import lazy
from lockstep.config.model_selection import AverageSection, EvaluateSection, choose_best
from lockstep.config.output_files import replace_text
from lockstep.config.redaction import redact_all
from lockstep.config.sections import (
    ALONE,
    DEVICES,
    ONE_ORIGIN,
    PRECISIONS,
    SHORT,
    CheckpointSection,
    DataSection,
    FingerprintSection,
    HubSection,
    LaunchSection,
    ModelSection,
    Names,
    OptimSection,
    PluginSection,
    Positive,
    Precision,
    ProfileSection,
    SdcCheckSection,
    Section,
    StrategySection,
    TaskSection,
    TokenizerSection,
    TrackSection,
    VerifySection,
    at_length,
    without_empty,
)

if TYPE_CHECKING:
    from lockstep.config import key_aliases
else:  # to suggest a key for an unknown one
    (key_aliases,) = lazy("lockstep.config", "key_aliases")

MICRO_BATCHES = 8


class Run(Section):
    """One complete training job: all settings that affect its arithmetic, and how and where it runs."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the output folder")
    output: PathText | None = Field(None, pattern=r"^[^\x00-\x1f\x7f]*$", description="default: outputs/NAME")
    remote_dir: Mirror | None = Field(
        None,
        description="address in an object store (s3://, gs:// or az://, BUCKET/FOLDER) that checkpoints and the export "
        "are copied to; a start resumes from the newest complete checkpoint there, unless OUTPUT has a newer "
        "one",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="random seed of weights, data order and dropout")
    task: TaskSection = Field(default_factory=TaskSection)  # type: ignore[arg-type]
    data: DataSection = Field(default_factory=DataSection)  # type: ignore[arg-type]
    model: ModelSection = Field(default_factory=ModelSection)  # type: ignore[arg-type]
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection)  # type: ignore[arg-type]
    epochs: float | None = Field(None, gt=0, description="passes over the training split; alternative: steps")
    steps: Positive | None = Field(None, description="optimizer steps; alternative: epochs")
    max_time: str | None = Field(
        None,
        pattern=r"^(\d+(\.\d+)?[dhms])+$",
        description="time after which to save and stop, for example 3h50m; counted from each start",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="for a step whose loss or gradient is not finite; skip: train on without its update"
    )
    batch_size: Positive = Field(128, description="examples per optimizer step, over all processes")
    micro_batches: Positive = Field(
        MICRO_BATCHES,
        description="pieces of a step, which the processes share; another number gives other bits; default: 8, or "
        "batch_size if that is less",
    )
    precision: Precision = Field(
        "fp32", description="bf16, fp16: autocast; fp16 scales the loss, for GPUs without bf16"
    )
    optim: OptimSection = Field(default_factory=OptimSection)  # type: ignore[arg-type]
    strategy: StrategySection = Field(default_factory=StrategySection)  # type: ignore[arg-type]
    launch: LaunchSection = Field(default_factory=LaunchSection)  # type: ignore[arg-type]
    metrics: Names = Field(
        default_factory=list,
        description="your metric functions, as my_file.function; each gets all predictions and labels of a split",
    )
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)  # type: ignore[arg-type]
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)  # type: ignore[arg-type]
    sdc_check: SdcCheckSection = Field(default_factory=SdcCheckSection)  # type: ignore[arg-type]
    fingerprint: FingerprintSection = Field(default_factory=FingerprintSection)  # type: ignore[arg-type]
    verify: VerifySection = Field(default_factory=VerifySection)  # type: ignore[arg-type]
    average: AverageSection = Field(default_factory=AverageSection)  # type: ignore[arg-type]
    track: TrackSection = Field(default_factory=TrackSection)  # type: ignore[arg-type]
    profile: ProfileSection = Field(default_factory=ProfileSection)  # type: ignore[arg-type]
    export: Literal["best", "last"] | None = Field(
        None,
        description="best: the best evaluated model, by checkpoint.best; last: that of the last step; default: best "
        "if checkpoint.best or evaluate.patience is set, else last",
    )
    hub: HubSection = Field(default_factory=HubSection)  # type: ignore[arg-type]

    _written: written.WrittenKeys | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal; written keys and defaults are compared alike."""
        return isinstance(other, Run) and dict(self) == dict(other)

    def wrote(self, key: str) -> bool:
        """Return whether the user wrote a dotted key, or a key inside it, explicitly.

        If this is not recorded, as for a run file with every default that was edited: whether the value differs from
        the default."""
        return self.written_keys.has(key)

    @property
    def written_keys(self) -> written.WrittenKeys:
        """The dotted keys that the user wrote."""
        return written.changed(self) if self._written is None else self._written

    def as_written(self, keys: Iterable[str]) -> Run:
        """Return a copy of the run with `keys` as its user-written keys."""
        run = self.model_copy()
        run._written = written.WrittenKeys(keys)
        return run

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = {key: at_length(key, value) for key, value in without_empty(cls, values).items()}
            if values.get("epochs") is None and values.get("steps") is None:
                values["epochs"] = 3
            if values.get("output") is None:
                values["output"] = f"outputs/{values.get('name', 'run')}"
            if values.get("micro_batches") is None and values.get("batch_size") in range(1, MICRO_BATCHES):
                values["micro_batches"] = values["batch_size"]  # a micro-batch needs an example
            choose_best(values)
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Run:
        for key, source in (("model", self.model.source), ("tokenizer", self.tokenizer.source)):
            if is_address(source):
                raise InvalidValue(
                    "LS1100", f"{key}.source: {source} cannot be loaded directly; copy the folder to this machine first"
                )
        if self.max_time is not None and not self.max_time_s:
            raise InvalidValue("LS1144", f"max_time: {self.max_time} leaves no time to train; remove it for no limit")
        if self.model.trust_remote_code and self.model.source is None and self.tokenizer.source is None:
            raise InvalidValue(
                "LS1108",
                "model.trust_remote_code has an effect only with model.source or tokenizer.source; remove it",
            )
        if is_address(self.output):
            raise InvalidValue(
                "LS1101",
                f"output must be a folder of this machine; to copy the results to {self.output}, set "
                f"remote_dir={self.output}",
            )
        model_selection.check(
            self.checkpoint.best, bool(self.evaluate.every), self.checkpoint.every, self.average, self.export
        )
        if self.epochs is not None and self.steps is not None:
            raise InvalidValue("LS1102", "epochs and steps are both set; remove one of them")
        if self.micro_batches > self.batch_size:
            default = ", its default" * ("batch_size" not in self.model_fields_set)
            raise InvalidValue(
                "LS1103",
                f"micro_batches ({self.micro_batches}) is greater than batch_size ({self.batch_size}{default}), but "
                "every micro-batch needs an example; lower micro_batches or raise batch_size",
            )
        return self

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Run:
        """Load a run from a file or a mapping of the same keys, with overrides as dotted key -> value.

        Errors: `RunError` with key, value, what is allowed, file and line.
        """
        if isinstance(source, Mapping):
            return load(None, overrides or {}, source, "the mapping")
        return load(source, overrides or {})

    @property
    def folder(self) -> Path:
        """OUTPUT: the folder for everything that this run writes."""
        return Path(str(self.output))

    @property
    def max_time_s(self) -> float | None:
        """Return `max_time` in seconds."""
        units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        parts = re.findall(r"([\d.]+)([dhms])", self.max_time or "")
        return sum(float(number) * units[unit] for number, unit in parts) or None

    def dump(self, filtered: Callable[[str], str] = str) -> str:
        """Return the resolved run as YAML that can be run again.

        `filtered`: applied to each text. Errors: `RunError` if the run contains a secret, so that none is stored or
        sent."""
        values = self.model_dump(mode="json")
        if (hidden := messages.secret(values)) is not None:
            raise messages.secret_in(hidden)
        body = messages.dump_yaml(redact_all(values, filtered), sort_keys=False, width=110)
        return written.header(body, map(filtered, self.written_keys)) + body

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step whose gradient is not finite is skipped, because of `on_nonfinite` or a loss scale."""
        return self.on_nonfinite == "skip" or self.precision == "fp16"

    def into(self, output: Path) -> Run:
        """Return the run with another output folder."""
        return self.model_copy(update={"output": str(output)})

    def with_keys(self, section: str, **values: Any) -> Run:
        """Return the run with other values of these keys of a section."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def as_one_process(self) -> Run:
        """Return the run as one process on this machine trains it, without a strategy's and a launcher's own keys."""
        values: dict[str, Any] = self.model_dump(mode="json")
        values["strategy"] |= {"name": ALONE, "options": {}}
        fields = type(self.launch).model_fields
        launch = {key: value for key, value in values["launch"].items() if key in fields}
        values["launch"] = launch | {"name": "local", "processes": 1}
        return Run.model_validate(values).as_written(self.written_keys)

    def check_shared(self, processes: int, source: str) -> None:
        """Check that each process gets a micro-batch. `source`: key and number of processes, for the message. Errors:
        `RunError`."""
        if processes > self.micro_batches:
            default = "" if self.wrote("micro_batches") else " (the default of micro_batches)"
            raise RunError(
                "LS1104",
                f"{source} cannot share {self.micro_batches} micro-batches{default}, because each process needs at "
                "least one; use fewer processes or raise micro_batches",
            )


def load(
    path: str | Path | None,
    overrides: Sequence[str] | Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    origin: str = "the command line",
    imports: bool = True,
    trains: bool = False,
) -> Run:
    """Load a run from a file and overrides (`key=value` words, or dotted key -> value).

    `defaults`: the mapping to use without a file. `origin`: its name in messages. `imports`: False does not import
    modules that the file names, and leaves the keys of such plug-ins unchecked. `trains`: reject a processor that
    cannot run a portable run, before importing libraries that may not start on it; loading an export works anywhere.

    Errors: `RunError` with key, value, what is allowed, file and line.
    """
    lines: dict[str, int] = {}
    values: Any = dict(defaults or {})
    listed, unchanged = written.WrittenKeys(), False
    if path is not None:
        origin = str(path)
        values, lines, text = _read_file(path)
        listed, unchanged = written.of_file(text)
        values = relative_to_file({key: at_length(key, value) for key, value in values.items()}, Path(path))
        values.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem))
    overridden = overrides_of(overrides)
    chosen: dict[str, Any] = {}  # from the overrides
    for key, value in overridden.items():
        set_key(chosen, key, value)
    by_person = written.keys_of(chosen)
    if quick := path is None and values == QUICK_START:
        values = quick_start_for(chosen)
    else:
        by_person = written.WrittenKeys(by_person | written.keys_of(values))
    alone = values
    for key, value in overridden.items():
        set_key(values := copied(values), key, value)
    for length_key, replaced in (("steps", "epochs"), ("epochs", "steps")):
        if overridden.get(length_key) is not None and replaced not in overridden:
            values.pop(replaced, None)  # the command line's length replaces the file's, in steps or epochs
    if (hidden := messages.secret(values)) is not None:
        raise messages.secret_in(f"{hidden} ({messages.where(hidden, origin, {}, overridden)})")
    strategy: Any = values.get("strategy")
    portable = isinstance(strategy, dict) and strategy.get("exact") == "portable"
    if portable or processor.replaced:  # by an earlier portable run of this process
        processor.pin(portable, trains and _ranks_are_here(values.get("launch")))
    try:
        run = _validated(values, origin, lines, overridden, imports, by_person if quick else None)
        if written.is_resolved(alone, Run.model_fields):  # before an override of steps removed epochs
            by_person = written.WrittenKeys(
                written.keys_of(chosen) | listed | (set() if unchanged else written.changed(run))
            )
        return run.as_written(by_person)
    except RunError as error:
        try:
            _validated(alone, origin, lines, {}, imports)
        except RunError as of_file:
            raise RunError.read(messages.fair(str(error), str(of_file))) from None
        raise


def _read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, int], str]:
    """Read a run file and return (values, dotted key -> line, text). Errors: `RunError`."""
    if (option := key_aliases.INIT_READS.get(Path(path).suffix.lower())) is not None and Path(path).is_file():
        raise RunError("LS1148", f"{path} is no run file; write one with lockstep init RUN.yaml {option} {path}")
    try:
        text = Path(path).read_text(encoding="utf-8")
        values, lines = messages.read_yaml_with_lines(text)
    except OSError as error:
        instead = _instead(Path(path))
        raise RunError("LS1105", f"cannot read the run file {path}: {error.strerror}{instead}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError("LS1106", f"{path} is not valid YAML: {messages.yaml_fault(error)}") from error
    if not isinstance(values, dict):
        raise RunError(
            "LS1107",
            f"{path} must contain a mapping of keys (see `lockstep schema`), but contains {messages.kind(values)}",
        )
    return values, lines, text


def _ranks_are_here(launch: Any) -> bool:
    """Return whether the section `launch` starts the ranks on this machine."""
    name = launch.get("name", "local") if isinstance(launch, dict) else "local"
    return bool(plugins.fact("launchers", name, "starts_all_ranks", False))


def _validated(
    values: dict[str, Any],
    origin: str,
    lines: dict[str, int],
    overridden: dict[str, Any],
    imports: bool,
    quick: written.WrittenKeys | None = None,
) -> Run:
    """Validate raw values. `quick`: keys that the user gave to the quick start, whose unusable other keys are dropped.
    Errors: `RunError`."""
    try:
        run = Run.model_validate(values)
        if quick is not None and (imports or "." not in run.task.name) and run.task.name in plugins.names("tasks"):
            of_no_use = unusable_keys(run, plugins.find("tasks", run.task.name))
            run = Run.model_validate(written.without(values, [key for key in of_no_use if not quick.has(key)]))
    except ValidationError as error:
        raise messages.explain(error, Run, origin, lines, overridden) from None
    return check_plugins(run, origin, lines, overridden, imports)


def check_plugins(
    run: Run, origin: str, lines: dict[str, int], overridden: dict[str, Any], imports: bool = True
) -> Run:
    """Resolve the names of plug-ins and type their keys. Imports only plug-ins without torch. Errors: `RunError`."""
    source = _Source(origin, lines, overridden, imports)
    if "." not in run.strategy.name:
        source.known("strategy.name", "strategies", run.strategy.name)
    for name in run.track.to:
        if "." not in name:
            source.known("track.to", "track", name)
    own = {
        "task": source.typed("task", "tasks", run.task),
        "launch": source.typed("launch", "launchers", run.launch),
        "optim": source.typed("optim", "optimizers", run.optim),
        "track": source.trackers(run.track),
    }
    if imports or "." not in run.task.name:
        task: Any = plugins.find("tasks", run.task.name)
        if wrong := unusable_keys(run, task):
            each = [coded("LS1119", f"{key}: {why} ({source.where(key)})") for key, why in wrong.items()]
            raise RunError.read("\n".join(each))
    return run.model_copy(update=own)


def unusable_keys(run: Run, task: Any) -> dict[str, str]:
    """Return key -> why it is missing or has no effect for the task: keys of model, data and streaming. `task`: its
    class."""
    streamed: dict[str, str] = {}
    own = task(run)
    if run.data.stream and not task.streams:
        streamed["data.stream"] = f"the task {run.task.name} does not support it: {task.not_streamed_reason}; remove it"
    elif run.data.stream and run.model.compiled:
        streamed["model.compile"] = "it needs the shortest of all examples, which a stream does not know"
    if run.data.drop_unusable and not task.own_model and not own.has_unusable_rows(own.options):
        streamed["data.drop_unusable"] = f"with these options the task {run.task.name} can use every row; remove it"
    if task.own_model:
        return dict(own.unsupported_keys()) | streamed
    missing = {key: "missing, and it has no default" for key in ("data", "model") if key not in run.model_fields_set}
    if not missing and run.model.source is None and run.model.type is None:
        missing["model"] = ONE_ORIGIN
    if run.data.workers:
        missing["data.workers"] = f"the task {run.task.name} reads prepared tokens and uses no workers; set it to 0"
    return missing or {**own.unsupported_keys(), **streamed}


@dataclass(frozen=True)
class _Source:
    """Origin of a run, for messages about its plug-ins."""

    origin: str
    lines: dict[str, int]
    overridden: dict[str, Any]
    imports: bool = True  # whether user modules may be imported

    def where(self, key: str) -> str:
        return messages.where(key, self.origin, self.lines, self.overridden)

    def known(self, key: str, kind: str, name: str) -> None:
        if name not in plugins.names(kind):
            raise RunError("LS1121", f"{key}: {plugins.unknown(kind, name)} ({self.where(key)})")

    def typed(self, key: str, kind: str, section: PluginSection) -> PluginSection:
        """Return the section with the keys of its plug-in validated and defaults filled in."""
        allowed = (type(section),)
        own = self.options(key, f"{key}.name", kind, section.name, section.options, allowed)
        return type(section)(**{k: getattr(section, k) for k in type(section).model_fields}, **own)

    def trackers(self, section: TrackSection) -> TrackSection:
        """Return the section with the keys of every tracker that it names or has keys for."""
        own = {k: getattr(section, k) for k in type(section).model_fields}
        for name in dict.fromkeys([*section.to, *section.options]):
            key, tracker_options = f"track.{name}", section.options.get(name, {})
            if name not in section.to and "." not in name and name not in (there := plugins.names("track")):
                known = [*type(section).model_fields, *there]
                hint = key_aliases.near(key, tracker_options, known, messages.keys_of(Run))
                raise RunError("LS1109", f"unknown key {key!r}: {hint} ({self.where(key)})")
            if not isinstance(tracker_options, dict):
                raise RunError(
                    "LS1110",
                    f"{key}: invalid value {tracker_options!r}; expected a mapping of the tracker's keys "
                    f"({self.where(key)})",
                )
            own[name] = self.options(key, "track.to", "track", name, tracker_options, ())
        return type(section)(**own)

    def options(
        self,
        key: str,
        named_by: str,
        kind: str,
        name: str,
        values: dict[str, Any],
        allowed_sections: tuple[type[Section], ...],
    ) -> dict[str, Any]:
        """Validate a plug-in's keys and fill in defaults. `allowed_sections`: models of the section's other keys."""
        if "." in name and not self.imports:
            return dict(values)
        try:
            options = plugins.options_of(kind, name)
        except plugins.PluginError as error:
            raise RunError(error.code, f"{named_by}: {error.message} ({self.where(named_by)})") from None
        try:
            return options.model_validate(values).model_dump()
        except ValidationError as error:
            allowed = (*allowed_sections, options)
            raise messages.explain(error, Run, self.origin, self.lines, self.overridden, key, allowed) from None


KEY = re.compile(r"\w+(\.\w+)*")  # dotted key of a run file


def overrides_of(values: Sequence[str] | Mapping[str, Any]) -> messages.Overrides:
    """Parse overrides into dotted key -> value. Errors: `RunError` for an invalid key or `key=value`."""
    if not isinstance(values, Mapping):
        return messages.Overrides(map(_override, values))
    for key in values:
        if not isinstance(key, str) or not KEY.fullmatch(key):
            raise RunError(
                "LS1112",
                f"{key!r} is not a key of the run file; write a key inside a section with a dot, such as "
                "optim.learning_rate",
            )
    overrides = messages.Overrides(values)
    overrides.place = "in the overrides"
    return overrides


def override_of(key: str, text: str) -> str:
    """Return the `key=value` word that sets a key to a text, quoted if YAML would read another type."""
    return f"{key}={text if messages.read_yaml(text) == text else json.dumps(text)}"


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not equals or not KEY.fullmatch(key):
        several = ""
        if not equals and Path(text).exists():
            is_run = Path(text).suffix in (".yaml", ".yml")
            key = "data.source" if Path(text).is_dir() else "data.test"
            several = "; a command takes one run file" if is_run else f"; data need a key, such as {key}={text}"
        elif not equals and Path(text).suffix:
            several = "; there is no such file"
        raise RunError("LS1113", f"{text!r} is not key=value, for example optim.learning_rate=3e-5{several}")
    try:
        return key, messages.read_yaml(value)
    except yaml.YAMLError as error:
        raise RunError("LS1114", f"the value of {key} is not valid YAML: {messages.yaml_fault(error)}") from None


def copied(values: Any) -> Any:
    return {k: copied(v) for k, v in values.items()} if isinstance(values, dict) else values


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. A section's short form (`strategy=fsdp2`) sets its main key and keeps the others."""
    if (long := at_length(key, value)) is not value:
        key, value = f"{key}.{SHORT[key]}", long[SHORT[key]]
    *parents, last = key.split(".")
    for parent in parents:
        inner = at_length(parent, values.get(parent))
        values[parent] = values = inner if isinstance(inner, dict) else {}
    values[last] = value


# The default run of a command without a run file.
QUICK_START: dict[str, Any] = {
    "name": "quickstart",
    "data": {"source": "builtin/emotion", "max_length": 64},
    "model": {
        "type": "gpt2",
        "config": {"n_layer": 2, "n_head": 8, "n_embd": 96, "n_positions": 64, "initializer_range": 0.04}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "tokenizer": {"train": "bpe", "vocab_size": 1000},
    "epochs": 3,
    "batch_size": 64,
    "micro_batches": 4,
    "optim": {"learning_rate": 1.5e-3, "schedule": "linear", "warmup_fraction": 0.1, "betas": [0.9, 0.98]},
    "launch": {"processes": 2, "processes_per_gpu": 2},  # also with one GPU
    "checkpoint": {"every": 100},
}

# If any of these keys is given -> keys of the quick start to drop.
_GIVES_WAY: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("data.source", "data.sources", "data.train", "data.validation", "data.test"), ("data.source",)),
    (("model.source",), ("model", "tokenizer", "optim", "data.max_length")),  # all are for the model from scratch
    (("model.type",), ("model.config",)),
    (("tokenizer.source",), ("tokenizer",)),
    (("optim.name",), ("optim.betas", "optim.schedule")),
    (("optim.warmup_steps",), ("optim.warmup_fraction",)),
    (("batch_size",), ("micro_batches",)),
]
_POINTS = ("optim.learning_rate", "optim.warmup_fraction")  # dropped for rates that are given point by point
_ONE_PROCESS = ("launch.processes", "launch.processes_per_gpu")  # dropped for a single-process strategy


def quick_start_for(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quick start without the keys that conflict with the nested values in `chosen`."""
    keys, left_out = written.keys_of(chosen), set[str]()
    for any_of, too in _GIVES_WAY:
        left_out.update(too if any(keys.has(key) for key in any_of) else ())
    strategy = chosen.get("strategy")
    if isinstance(strategy, Mapping) and strategy.get("name") == ALONE:
        left_out.update(_ONE_PROCESS)
    optim = chosen.get("optim")
    if isinstance(optim, Mapping) and isinstance(optim.get("schedule"), list):
        left_out.update(_POINTS)
    values = copy.deepcopy(QUICK_START)
    for key in sorted(left_out, key=len):  # a section before its keys
        section, _, name = key.partition(".")
        if name:
            values.get(section, {}).pop(name, None)
        else:
            values.pop(section, None)
    return values


# Section -> its keys that may name local files or folders.
PATHS = {"data": ("source", "train", "validation", "test"), "model": ("source",), "tokenizer": ("source",)}


def relative_to_file(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return a copy with local paths resolved from the run file's folder, if they exist there. Those of OUTPUT/run.yaml
    were resolved in training: from elsewhere they are resolved from the folder in which training was started, which
    `output` tells."""
    folder = file.parent
    output = values.get("output")
    if isinstance(output, str) and folder.resolve() == Path(output).expanduser().resolve():
        return values
    values = values if folder == Path() else _resolved(values, folder)
    started_in = _started_in(file, output) if isinstance(output, str) else None
    return values if started_in is None else _resolved(values, started_in)


def _started_in(file: Path, output: str) -> Path | None:
    """Return the folder in which the training of OUTPUT/run.yaml was started; None if the file is another one."""
    parts, there = Path(output).parts, file.parent.resolve().parts
    if file.name != "run.yaml" or not parts or os.path.isabs(output) or there[-len(parts) :] != parts:
        return None
    return Path(*there[: -len(parts)])


def _resolved(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy with local paths resolved from `folder`, if they exist there."""
    merged = dict(values)
    for section, keys in PATHS.items():
        if isinstance(content := at_length(section, values.get(section)), dict):
            there = _there(content, keys, folder)
            if isinstance(sources := content.get("sources"), list):  # of a mixture
                there["sources"] = [
                    each | _there(each, keys, folder) if isinstance(each, dict) else _placed(each, folder)
                    for each in sources
                ]
            if there != {key: content[key] for key in there}:
                merged[section] = content | there
    return merged


def _there(content: dict[str, Any], keys: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Return the path keys of a section, resolved from `folder`."""
    if content.get("source") is not None:
        keys = ("source",)  # the other keys name splits of the source, or files in it
    return {key: _placed(content[key], folder) for key in keys if key in content}


def _placed(value: Any, folder: Path) -> Any:
    """Resolve a path, or a list of paths, from `folder`, if it exists there."""
    if isinstance(value, list):
        return [_placed(each, folder) for each in value]
    if not isinstance(value, str) or not value or value.startswith("~") or os.path.isabs(value):
        return value
    path = folder / value
    try:
        there = path.exists() or (any(mark in value for mark in "*?[") and glob.glob(str(path)))
    except (OSError, ValueError):  # not a valid path: the section reports it
        return value
    return os.path.normpath(path) if there else value


def _instead(path: Path) -> str:
    """Return a suggestion for a run file that cannot be read."""
    output, mark, step = str(path).rpartition("@")
    with suppress(OSError):
        if (path / "run.yaml").is_file():
            return f"; the folder holds a run file: {path / 'run.yaml'}"
        if mark and step.isdigit() and Path(output).is_dir():
            return f"; OUTPUT@N comes first: lockstep branch {path} RUN.yaml"
        if (near := key_aliases.close_file(path, path.absolute().parent.glob("*.y*ml"))) is not None:
            return f"; did you mean {near}?"
    return "; `lockstep init` writes one" if not path.exists() else ""


def write_run_yaml(run: Run) -> None:
    """Write OUTPUT/run.yaml with every default filled in. Errors: `RunError` if OUTPUT is not writable."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        replace_text(run.folder / "run.yaml", run.dump())
    except OSError as error:
        raise RunError("LS1117", f"output: cannot write to {run.folder}: {error.strerror}; choose another") from error


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a run file."""
    json_schema = Run.model_json_schema()
    properties, sections = json_schema["properties"], json_schema["$defs"]
    to = sections["TrackSection"]["properties"]["to"]
    to |= {"anyOf": [{"type": "string"}, {"type": to.pop("type"), "items": to.pop("items")}]}
    for name in SHORT:
        texts = to["anyOf"] if name == "track" else [{"type": "string"}]
        properties[name] = {"anyOf": [{"$ref": properties[name]["$ref"]}, *texts]}
    precision = properties["precision"]
    precision["enum"] += [*PRECISIONS, 32, 16]
    del precision["type"]
    sections["LaunchSection"]["properties"]["device"]["enum"] += DEVICES
    return json_schema
