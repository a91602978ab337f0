"""The run file: typed, validated, overridable, and written beside the results with every default filled in.

In: a YAML file and `key=value` overrides. Out: one frozen `Run`, or a `RunError` naming key, value, file and line.
From top to bottom: `Run`, `load`, overrides, local paths (found from the run file's folder, where something is there),
the output folder and its run.yaml, the JSON Schema for editors, and the quick start, which runs without a run file.
Nothing here imports torch: the machine you submit from may have none.
"""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from lockstep.config import error_messages as messages
from lockstep.config import key_aliases, model_selection, plugins, processor, redaction, written
from lockstep.config.data_sources import Mirror, PathText, is_address
from lockstep.config.errors import InvalidValue, coded
from lockstep.config.errors import RunError as RunError
from lockstep.config.model_selection import AverageSection, EvaluateSection, choose_best
from lockstep.config.optim import OptimSection
from lockstep.config.quick_start import QUICK_START as QUICK_START
from lockstep.config.quick_start import quick_start_for
from lockstep.config.sections import (
    BEFORE,
    ONE_ORIGIN,
    PRECISIONS,
    SHORT,
    CheckpointSection,
    DataSection,
    FingerprintSection,
    GuardSection,
    HubSection,
    LaunchSection,
    ModelSection,
    Names,
    PluginSection,
    Positive,
    Precision,
    ProfileSection,
    Section,
    StrategySection,
    TaskSection,
    TokenizerSection,
    TrackSection,
    VerifySection,
    at_length,
)

_FREE = (
    *("name", "output", "remote_dir", "max_time", "launch", "metrics", "evaluate", "checkpoint"),
    *("fingerprint", "sdc_check", "verify"),
    *("track", "profile", "export", "hub"),
)


MICRO_BATCHES = 8


class Run(Section):
    """One training job, complete: everything that decides its arithmetic, and how and where it runs."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the output folder")
    output: PathText | None = Field(None, pattern=r"^[^\x00-\x1f\x7f]*$", description="default: outputs/NAME")
    remote_dir: Mirror | None = Field(
        None,
        description="address in an object store (s3://, gs:// or az://, BUCKET/FOLDER) that checkpoints and the export "
        "are copied to; a start whose OUTPUT has none as new goes on from the newest whole one there",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of weights, data order and dropout")
    task: TaskSection = Field(default_factory=TaskSection)  # type: ignore[arg-type]
    data: DataSection = Field(default_factory=DataSection)  # type: ignore[arg-type]
    model: ModelSection = Field(default_factory=ModelSection)  # type: ignore[arg-type]
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection)  # type: ignore[arg-type]
    epochs: float | None = Field(None, gt=0, description="passes over the training split; or give steps")
    steps: Positive | None = Field(None, description="optimizer steps; or give epochs")
    max_time: str | None = Field(
        None,
        pattern=r"^(\d+(\.\d+)?[dhms])+$",
        description="time after which to stop as if asked to, for example 3h50m; counted from each start",
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="what to do with a step whose loss or gradient is not finite; skip: leave its update out"
    )
    batch_size: Positive = Field(128, description="examples per optimizer step over the whole job")
    micro_batches: Positive = Field(
        MICRO_BATCHES,
        description="micro-batches a step is cut into; defines the arithmetic, whatever the number of processes; "
        "default: 8, or batch_size if that is less",
    )
    precision: Precision = Field(
        "fp32", description="bf16, fp16: autocast; fp16 scales the loss, for GPUs without bf16"
    )
    optim: OptimSection = Field(default_factory=OptimSection)  # type: ignore[arg-type]
    strategy: StrategySection = Field(default_factory=StrategySection)  # type: ignore[arg-type]
    launch: LaunchSection = Field(default_factory=LaunchSection)  # type: ignore[arg-type]
    metrics: Names = Field(
        default_factory=list,
        description="functions of yours, of all predictions and labels of a split, as my_file.function",
    )
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)  # type: ignore[arg-type]
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)  # type: ignore[arg-type]
    sdc_check: GuardSection = Field(default_factory=GuardSection)  # type: ignore[arg-type]
    fingerprint: FingerprintSection = Field(default_factory=FingerprintSection)  # type: ignore[arg-type]
    verify: VerifySection = Field(default_factory=VerifySection)  # type: ignore[arg-type]
    average: AverageSection = Field(default_factory=AverageSection)  # type: ignore[arg-type]
    track: TrackSection = Field(default_factory=TrackSection)  # type: ignore[arg-type]
    profile: ProfileSection = Field(default_factory=ProfileSection)  # type: ignore[arg-type]
    export: Literal["best", "last"] | None = Field(
        None,
        description="the best evaluated model, by checkpoint.best, or that of the last step; default: best where "
        "checkpoint.best or evaluate.patience is given, else last",
    )
    hub: HubSection = Field(default_factory=HubSection)  # type: ignore[arg-type]

    _written: written.WrittenKeys | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Whether all values are equal, whoever wrote them."""
        return isinstance(other, Run) and dict(self) == dict(other)

    def wrote(self, key: str) -> bool:
        """Whether a person wrote a dotted key, or one within it: it is not there by default. Of a run that does not say
        so, such as one of OUTPUT/run.yaml, which has every default, whether its value is another than the default."""
        return self.written_keys.has(key)

    @property
    def written_keys(self) -> written.WrittenKeys:
        """The dotted keys that a person wrote."""
        return written.changed(self) if self._written is None else self._written

    def as_written(self, keys: Iterable[str]) -> Run:
        """The run with other keys that count as written by a person."""
        run = self.model_copy()
        run._written = written.WrittenKeys(keys)
        return run

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = {key: at_length(key, value) for key, value in values.items()}
            if values.get("epochs") is None and values.get("steps") is None:
                values["epochs"] = 3
            if values.get("output") is None:
                values["output"] = f"outputs/{values.get('name', 'run')}"
            if values.get("micro_batches") is None and values.get("batch_size") in range(1, MICRO_BATCHES):
                values["micro_batches"] = values["batch_size"]  # each needs an example
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
            raise InvalidValue("LS1144", f"max_time: {self.max_time} is no time to train in; leave it out for no limit")
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
        """The run of a file, or of a mapping of the same keys, and overrides as dotted key -> value.

        Errors: `RunError` with key, value, what is allowed, file and line.
        """
        if isinstance(source, Mapping):
            return load(None, overrides or {}, source, "the mapping")
        return load(source, overrides or {})

    @property
    def folder(self) -> Path:
        """OUTPUT: where everything this run writes goes."""
        return Path(str(self.output))

    @property
    def max_time_s(self) -> float | None:
        """`max_time` in seconds."""
        units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
        parts = re.findall(r"([\d.]+)([dhms])", self.max_time or "")
        return sum(float(number) * units[unit] for number, unit in parts) or None

    def dump(self, filtered: Callable[[str], str] = str) -> str:
        """The resolved run as YAML that can be run again. Errors: `RunError` for one that holds a secret: however it
        was put together, none is written down or sent anywhere. `filtered`: what is done with each text before."""
        values = self.model_dump(mode="json")
        if (hidden := messages.secret(values)) is not None:
            raise secret_in(hidden)
        return messages.dump_yaml(redaction.redact_all(values, filtered), sort_keys=False, width=110)

    def arithmetic(self) -> dict[str, Any]:
        """The keys that decide the weights, flat: a resume must not change any of them. With `strategy.exact` neither
        the strategy nor the number of processes is among them."""
        values = self.model_dump(mode="json")
        for key in _FREE:
            del values[key]
        del values["average"]["last"]  # of checkpoints that are there, once training is over
        if self.average.ema is None:
            del values["average"]
        for key in ("trust_remote_code", "checkpoint_activations", "offload_activations"):
            del values["model"][key]
        task: Any = plugins.find("tasks", self.task.name)
        pads = ("padding",) if task.own_model else ()  # its own collate does
        for key in ("follow_links", "workers", "stream_cache_gb", *pads):
            del values["data"][key]
        for key in task.display_keys:
            values["task"].pop(key, None)
        if self.strategy.exact:
            exact = self.strategy.exact
            values["strategy"] = {"exact": exact, "tensor_leaves": self.strategy.tensor_leaves}
        return messages.flat(values)

    def check_shared(self, processes: int, source: str) -> None:
        """Errors: `RunError` when a process would have no micro-batch. `source`: the key, and how many it makes."""
        if processes > self.micro_batches:
            default = "" if self.wrote("micro_batches") else " (the default of micro_batches)"
            raise RunError(
                "LS1104",
                f"{source} cannot share {self.micro_batches} micro-batches{default}, because each process needs at "
                "least one; use fewer processes or raise micro_batches",
            )

    def default(self, key: str) -> Any:
        """What a key of `arithmetic` was before there was one, as JSON has it; None where it must be given."""
        name, _, inner = key.partition(".")
        section: Any = getattr(self, name) if inner else self
        kind, fields = {"task": "tasks", "optim": "optimizers"}.get(name), dict(type(section).model_fields)
        if kind is not None:
            fields |= plugins.find(kind, section.name).Options.model_fields  # type: ignore[attr-defined]
        field = fields.get(inner or name)
        value = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
        return BEFORE.get(key, list(value) if isinstance(value, tuple) else value)


def load(
    path: str | Path | None,
    overrides: Sequence[str] | Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    origin: str = "the command line",
    imports: bool = True,
    trains: bool = False,
) -> Run:
    """The run of a file and overrides (`key=value` words, or dotted key -> value); `defaults` is the mapping used where
    there is no file, and `origin` what messages call it. Without `imports` modules that the file names are not
    imported: keys of such plug-ins stay as they were written. With `trains` a processor that cannot compute what the
    run asks for is refused, before any library is imported that may not start on it; an export is read on any machine.

    Errors: `RunError` with key, value, what is allowed, file and line.
    """
    lines: dict[str, int] = {}
    values: Any = dict(defaults or {})
    if path is not None:
        origin = str(path)
        values, lines = _read_file(path)
        values = relative_to_file({key: at_length(key, value) for key, value in values.items()}, Path(path))
        values.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem))
    overridden = overrides_of(overrides)
    chosen: dict[str, Any] = {}  # by the overrides
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
            values.pop(replaced, None)  # the command line's length replaces the file's, whichever way each is given
    if (hidden := messages.secret(values)) is not None:
        raise secret_in(f"{hidden} ({messages.where(hidden, origin, {}, overridden)})")
    strategy: Any = values.get("strategy")
    portable = isinstance(strategy, dict) and strategy.get("exact") == "portable"
    processor.pin(portable)
    if portable and trains and _ranks_are_here(values.get("launch")):
        processor.refuse()
    try:
        run = _validated(values, origin, lines, overridden, imports, by_person if quick else None)
        filled_in = written.is_resolved(values, Run.model_fields)
        return run.as_written(written.changed(run) | written.keys_of(chosen) if filled_in else by_person)
    except RunError as error:
        try:
            _validated(alone, origin, lines, {}, imports)
        except RunError as of_file:
            raise RunError.read(messages.fair(str(error), str(of_file))) from None
        raise


def _read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a run file, and dotted key -> line. Errors: `RunError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values, lines = messages.read_yaml_with_lines(text)
    except OSError as error:
        raise RunError("LS1105", f"cannot read the run file {path}: {error.strerror}{_instead(Path(path))}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError("LS1106", f"{path} is not valid YAML: {messages.yaml_fault(error)}") from error
    if not isinstance(values, dict):
        raise RunError(
            "LS1107",
            f"{path} must contain a mapping of keys (see `lockstep schema`), but contains {messages.kind(values)}",
        )
    return values, lines


def _ranks_are_here(launch: Any) -> bool:
    """Whether the ranks of a run run on this machine, as far as its file says."""
    return not isinstance(launch, dict) or launch.get("name", "local") == "local"


def _validated(
    values: dict[str, Any],
    origin: str,
    lines: dict[str, int],
    overridden: dict[str, Any],
    imports: bool,
    quick: written.WrittenKeys | None = None,
) -> Run:
    """`quick`: the keys that were written beside the quick start, whose others give way. Errors: `RunError`."""
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
    """Resolve the names of plug-ins and type the keys of their own; only torch-free plug-ins are imported. Errors:
    `RunError`."""
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
    """Key -> why it is missing or of no use to the task: where the model and the data come from, and what a stream
    cannot have. `task`: its class."""
    streamed: dict[str, str] = {}
    if run.data.stream and not task.streams:
        streamed["data.stream"] = f"the task {run.task.name} cannot: {task.not_streamed_reason}; leave it out"
    elif run.data.stream and run.model.compile:
        streamed["model.compile"] = "it looks for the shortest of all examples first, which a stream does not know"
    if run.data.drop_unusable and not task.own_model and not task.has_unusable_rows(task.options_of(run)):
        streamed["data.drop_unusable"] = f"the task {run.task.name} can use every row, as it is set; leave it out"
    if task.own_model:
        return dict(task.unsupported_keys(run)) | streamed
    missing = {key: "missing, and it has no default" for key in ("data", "model") if key not in run.model_fields_set}
    if not missing and run.model.source is None and run.model.type is None:
        missing["model"] = ONE_ORIGIN
    if run.data.workers:
        missing["data.workers"] = (
            f"the task {run.task.name} reads prepared tokens and has no use for workers; set it to 0"
        )
    return missing or {**task.unsupported_keys(run), **streamed}


@dataclass(frozen=True)
class _Source:
    """Where a run was read from, which is what messages about its plug-ins name."""

    origin: str
    lines: dict[str, int]
    overridden: dict[str, Any]
    imports: bool = True  # modules of the user's own that it names

    def where(self, key: str) -> str:
        return messages.where(key, self.origin, self.lines, self.overridden)

    def known(self, key: str, kind: str, name: str) -> None:
        if name not in plugins.names(kind):
            raise RunError("LS1121", f"{key}: {plugins.unknown(kind, name)} ({self.where(key)})")

    def typed(self, key: str, kind: str, section: PluginSection) -> PluginSection:
        """The section with the keys of its plug-in, defaults filled in."""
        allowed = (type(section),)
        own = self.options(key, f"{key}.name", kind, section.name, section.options, allowed)
        return type(section)(**{k: getattr(section, k) for k in type(section).model_fields}, **own)

    def trackers(self, section: TrackSection) -> TrackSection:
        """The section with the keys of every tracker that it names or has keys of."""
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
        """A plug-in's own keys, defaults filled in; `allowed_sections` are those that may stand with them."""
        if "." in name and not self.imports:
            return dict(values)
        try:
            options: type[Section] = plugins.find(kind, name).Options  # type: ignore[attr-defined]
        except plugins.PluginError as error:
            raise RunError(error.code, f"{named_by}: {error.message} ({self.where(named_by)})") from None
        try:
            return options.model_validate(values).model_dump()
        except ValidationError as error:
            allowed = (*allowed_sections, options)
            raise messages.explain(error, Run, self.origin, self.lines, self.overridden, key, allowed) from None


def secret_in(key: str) -> RunError:
    """The error of a run that holds a secret."""
    return RunError(
        "LS1118",
        f"{key} looks like a secret. Secrets come from the environment only (HF_TOKEN, WANDB_API_KEY, ...): remove it, "
        "and revoke it if the file was shared",
    )


KEY = re.compile(r"\w+(\.\w+)*")  # of a run file, dotted


def overrides_of(values: Sequence[str] | Mapping[str, Any]) -> messages.Overrides:
    """Overrides as dotted key -> value. Errors: `RunError` for what is no key, or no `key=value`."""
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
    """The `key=value` that gives a key this text, where YAML might read a number, a date or a mapping."""
    return f"{key}={text if messages.read_yaml(text) == text else json.dumps(text)}"


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not equals or not KEY.fullmatch(key):
        raise RunError("LS1113", f"{text!r} is not key=value, for example optim.learning_rate=3e-5")
    try:
        return key, messages.read_yaml(value)
    except yaml.YAMLError as error:
        raise RunError("LS1114", f"the value of {key} is not valid YAML: {messages.yaml_fault(error)}") from None


def copied(values: Any) -> Any:
    return {k: copied(v) for k, v in values.items()} if isinstance(values, dict) else values


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. What stands for a section (`strategy=fsdp2`) sets its main key, and leaves its others."""
    if (long := at_length(key, value)) is not value:
        key, value = f"{key}.{SHORT[key]}", long[SHORT[key]]
    *parents, last = key.split(".")
    for parent in parents:
        inner = at_length(parent, values.get(parent))
        values[parent] = values = inner if isinstance(inner, dict) else {}
    values[last] = value


# Section -> its keys that may name local files or folders.
PATHS = {
    "data": ("source", "train", "validation", "test"),
    "model": ("source",),
    "tokenizer": ("source",),
}


def relative_to_file(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """A new mapping. OUTPUT/run.yaml, whose paths were found before, stays as it is."""
    folder = file.parent
    output = values.get("output")
    if folder == Path() or (isinstance(output, str) and folder.resolve() == Path(output).expanduser().resolve()):
        return values
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
    """Those of the keys that name what is there."""
    if content.get("source") is not None:
        keys = ("source",)  # what else there is are splits of it, or files in it
    return {key: _placed(content[key], folder) for key in keys if key in content}


def _placed(value: Any, folder: Path) -> Any:
    """A path, or a list of them."""
    if isinstance(value, list):
        return [_placed(each, folder) for each in value]
    if not isinstance(value, str) or not value or value.startswith("~") or os.path.isabs(value):
        return value
    path = folder / value
    try:
        there = path.exists() or (any(mark in value for mark in "*?[") and glob.glob(str(path)))
    except (OSError, ValueError):  # too long for a path, or with characters that none has: the section says so
        return value
    return os.path.normpath(path) if there else value


def _instead(path: Path) -> str:
    """What a person may have meant by a run file that is not there."""
    with suppress(OSError):
        names = [file.name for file in path.absolute().parent.glob("*.y*ml")]
        if near := difflib.get_close_matches(path.name, names, 1):
            return f"; did you mean {path.with_name(near[0])}?"
    return "; `lockstep init` writes one" if not path.exists() else ""


def require_output(output: Path) -> None:
    """Refuse a folder that no run wrote. Errors: `RunError`."""
    if not output.is_dir():
        raise RunError(
            "LS1122", f"{output}: no such folder; give the output folder of a run (`output` in its run file)"
        )
    if not (output / "run.yaml").is_file():
        raise RunError(
            "LS1123",
            f"{output} is not the output folder of a run: it has no run.yaml. Give the "
            "folder that `output` in the run file "
            "names",
        )


def check_output(run: Run) -> None:
    """OUTPUT is there or can be made. Errors: `RunError`."""
    there = next(path for path in (run.folder, *run.folder.parents) if path.exists())
    if not there.is_dir():
        raise RunError(
            "LS1115",
            f"output: cannot write to {run.folder}: {there} is a file, not a folder; choose another output",
        )
    if not os.access(there, os.W_OK):
        raise RunError(
            "LS1116",
            f"output: cannot write to {run.folder}: this user has no permission to write to {there}; choose "
            "another output",
        )


def keep(run: Run) -> None:
    """OUTPUT/run.yaml, every default filled in. Errors: `RunError` when OUTPUT cannot be written."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        replace_text(run.folder / "run.yaml", run.dump())
    except OSError as error:
        raise RunError("LS1117", f"output: cannot write to {run.folder}: {error.strerror}") from error


def led_away(folder: Path) -> str | None:
    """Why nothing is written any more into a folder that was `resolve`d before: it, or one above it, is a link now, to
    another folder than that in which rank 0, this process, began; else None."""
    if (now := folder.resolve()) == folder:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads((now / "launch.json").read_bytes())["main"]["pid"] == os.getpid():
            return None  # it was moved, and a link put in its place
    return f"{folder} was replaced by a link to {now}, where nothing is written"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context in which a file is written aside, at the path that it yields; afterwards that is renamed. Errors:
    `OSError`; then what was there is there, and nothing else."""
    aside = path.with_name(aside_of(path.name))
    try:
        yield aside
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """A small file, aside and then renamed. Errors: `OSError`; then what was there is there, and nothing else."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def aside_of(name: str) -> str:
    """Where a small file of OUTPUT is written before it is renamed: machines may share OUTPUT."""
    return f".{name}.{socket.gethostname()}-{os.getpid()}.partial"


def schema() -> dict[str, Any]:
    """The JSON Schema of a run file."""
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
    return json_schema
