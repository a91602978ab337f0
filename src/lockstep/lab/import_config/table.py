"""Conversion tables with a row per key of another system, and the draft of a run file that they fill.

In: a table in `config/foreign_keys/` (foreign key -> `KeyTranslation`) and the keys of a file. Out: `RunDraft`: keys of
a run file, their comments, and the gaps: keys without a counterpart or not understood, with reasons, and whether they
affect training. docs/reference/coming-from shows the same tables; a test compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import error_messages as messages
from lockstep.config import plugins
from lockstep.config.key_aliases import foreign_keys
from lockstep.config.run import RunError
from lockstep_trace import redaction
from lockstep_trace.coded import quantity

EIGHT_BITS = "the base of an adapter can be in 4 bits (model.quantization: nf4 or fp4), but not in 8"
FILL_IN = "FILL-IN"  # placeholder for an unknown data source, model or function
_OFF = (None, False, "", "no", "none", "off", "NO", "None", 0, -1)


@dataclass(frozen=True)
class KeyTranslation:
    """Conversion of one key."""

    here: str = ""  # dotted keys of a run file, separated by commas; empty: no counterpart
    how: str = ""  # conversion of the value, or why there is no counterpart
    values: Mapping[Any, Any] | None = None  # foreign value -> ours; other values have no counterpart
    joined: bool = False  # combined with other keys by a function of the source
    default: Any = None  # of a key without a counterpart: a value that is not reported
    decides: bool = False  # for a key without a counterpart: whether another model would be trained
    by: tuple[str, ...] = ()  # keys of a run file that replace it, any one of them given by hand


Table = dict[str, KeyTranslation]


def _with_enumeration(values: Mapping[str, str], name: str) -> dict[str, str]:
    """Add each value also in the spelling of transformers' enumeration."""
    return {**values, **{f"{name}.{theirs}": ours for theirs, ours in values.items()}}


SCHEDULES = _with_enumeration(foreign_keys("values")["schedules"], "schedulertype")
OPTIMIZERS = _with_enumeration(foreign_keys("values")["optimizers"], "optimizernames")
_SHARED = {"schedules": SCHEDULES, "optimizers": OPTIMIZERS}


def read_table(system: str) -> Table:
    """Read the rows of `config/foreign_keys/SYSTEM.yaml`."""
    return {
        name: KeyTranslation(
            here=row.get("to", ""),
            how=row.get("how", row.get("none", "")),
            values=_SHARED[values] if isinstance(values := row.get("values"), str) else values,
            by=tuple(row.get("by", ())),
            **{key: row[key] for key in ("joined", "default", "decides") if key in row},
        )
        for name, row in foreign_keys(system).items()
    }


def read_keys(path: Path, text: str) -> dict[str, Any]:
    """Read the keys of a JSON or YAML file. Errors: `RunError`."""
    try:
        keys = json.loads(text) if path.suffix == ".json" else messages.read_yaml(text)
    except json.JSONDecodeError as error:
        raise RunError("LS8204", f"--from: {path}, line {error.lineno}: {error.msg}") from None
    except yaml.YAMLError as error:
        raise RunError("LS8205", f"--from: {path} is not valid YAML: {messages.yaml_fault(error)}") from None
    if not isinstance(keys, dict):
        raise RunError("LS8206", f"--from: {path} must contain a mapping of keys, but contains {messages.kind(keys)}")
    return {str(name): value for name, value in keys.items()}


NAMES: Mapping[str, Any] = foreign_keys("scripts")  # names in scripts and command lines, by their role in a training
# Keys of a run file that never affect the final weights, or only their bits.
_OUTWARD = (
    "name",
    "output",
    "seed",
    "launch",
    "track",
    "hub",
    "profile",
    "strategy",
    "metrics",
    "evaluate",
    "remote_dir",
)
_OUTWARD_KEYS = {
    *("checkpoint.every", "checkpoint.keep", "task.samples", "task.bleu", "task.rouge", "task.beams"),
    *("model.checkpoint_activations", "model.trust_remote_code", "model.compile", "data.workers"),
}


def decides(key: str) -> bool:
    """Return whether a key of a run file affects training."""
    if key == "evaluate.patience":
        return True
    return key.partition(".")[0] not in _OUTWARD and key not in _OUTWARD_KEYS


@dataclass(frozen=True)
class Gap:
    """A setting of the other system that the run file does not have."""

    name: str
    why: str
    decides: bool = False  # without it, another model would be trained
    by: tuple[str, ...] = ()  # keys of a run file that replace it, any one of them given by hand
    understood: bool = True  # False: could not be read, so a counterpart may exist

    def __str__(self) -> str:
        return f"{'no counterpart' if self.understood else 'not understood'}: {self.name} ({self.why})"


_NAMED = re.compile(r"(?P<keep>(?:.*\s)?(?P<name>-{0,2}[\w.-]+)(?:: | ))\S.*")


def _without_secret(name: str) -> str:
    """Return the name of a gap without a secret value: `hub_token: VALUE`, `line 3: --token VALUE`."""
    match = _NAMED.fullmatch(name)
    if match is not None and redaction.names_secret(match["name"].lstrip("-")):
        return f"{redaction.redact(match['keep'])}{redaction.STRUCK}"
    return redaction.redact(name)


@dataclass
class RunDraft:
    """The content of a file as keys of a run file."""

    keys: dict[str, Any] = field(default_factory=dict)  # dotted
    comments: dict[str, str] = field(default_factory=dict)  # dotted key -> its comment
    gaps: list[Gap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # assumptions
    read: list[str] = field(default_factory=list)  # for scripts: each line that was read, and its meaning
    by_hand: dict[str, Any] = field(default_factory=dict)  # dotted keys given on the command line
    folder: Path = Path()  # folder of the file, searched for other files
    rows: int | None = None  # rows that are trained on; None if the data were not looked at, or a share is held out
    unread: list[str] = field(default_factory=list)  # files of the project that a script imports
    deepspeed: Any = None  # a DeepSpeed file that it names, or the settings themselves
    at_end: list[Callable[[RunDraft], object]] = field(default_factory=list)  # once the data were looked at

    def set(self, key: str, value: Any, comment: str) -> None:
        self.keys[key] = value
        self.comments[key] = comment

    def drop(self, name: str, value: Any, why: str, decides: bool = False, by: tuple[str, ...] = ()) -> None:
        """Record a setting without a counterpart. `value`: None if the name is sufficient."""
        text = "" if value is None else f": {value}"
        self._gap(Gap(name + (text if len(text) <= 60 else f"{text[:57]}..."), why, decides, by))

    def lacks(self, name: str, why: str, *by: str) -> None:
        """Record a setting without a counterpart that would train another model."""
        self.drop(name, None, why, True, by)

    def unclear(self, name: str, why: str, *by: str, decides: bool = True) -> None:
        """Record a setting that is not understood."""
        self._gap(Gap(name, why, decides, by, understood=False))

    def _gap(self, gap: Gap) -> None:
        gap = replace(gap, name=_without_secret(gap.name))
        same = [each for each in self.gaps if (each.name, each.by) == (gap.name, gap.by)]
        if gap not in self.gaps and not any(each.decides >= gap.decides for each in same):
            self.gaps.append(gap)

    def file_named(self, name: str) -> Path | None:
        """Find a file that the file names, relative to its folder or the current one; None if it does not exist."""
        places = (self.folder / Path(name).expanduser(), Path(name).expanduser())
        return next((place for place in places if place.is_file()), None)

    @property
    def task(self) -> str | None:
        """The task, if known; one given by hand comes first."""
        return self.by_hand.get("task.name") or self.keys.get("task.name")

    def deciding(self) -> list[Gap]:
        """The gaps that would train another model, except those closed by a key given by hand."""
        return [gap for gap in self.gaps if gap.decides and not any(map(self.is_given, gap.by))]

    def is_given(self, key: str) -> bool:
        """Return whether a key, or one within it, was given on the command line."""
        return any(each == key or each.startswith(f"{key}.") for each in self.by_hand)

    def replacing(self, gap: Gap) -> str:
        """Name the keys given on the command line that close a gap; empty if it is open."""
        return " and ".join(sorted(key for key in gap.by if self.is_given(key)))


def apply(table: Table, theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Apply every row that converts a single key; rows marked `joined` are left to a function of the source."""
    for name, value in theirs.items():
        row = table.get(name)
        if row is None:
            draft.drop(name, value, "unknown key", decides=not _is_off(value))
        elif row.joined:
            continue
        elif not row.here:
            if not _is_off(value) and value != row.default:
                draft.drop(name, value, row.how, row.decides, row.by)
        elif value is None:
            continue
        elif row.values is None:
            draft.set(row.here, value, name)
        elif isinstance(value, Hashable) and (word := _of(value)) in row.values:
            if (ours := row.values[word]) is not None:
                draft.set(row.here, ours, f"{name} {value}")
        elif not _is_off(value):
            choices = ", ".join(dict.fromkeys(str(v) for v in row.values.values() if v is not None))
            draft.drop(
                name, value, f"{row.here} is one of {choices}; the default is used", decides(row.here), (row.here,)
            )


def number(value: Any) -> float | None:
    """Convert a number, also one that YAML has read as text (1e-4)."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def whole(value: Any, otherwise: int = 1) -> int:
    count = number(value)
    return otherwise if count is None else int(count)


def _of(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _is_off(value: Any) -> bool:
    return value in _OFF if not isinstance(value, list | dict) else not value


# -- shared by several sources -----------------------------------------------------------------------------------------


def batches(draft: RunDraft, each: int, accumulated: int, processes: int | None, names: tuple[str, str]) -> None:
    """Set the examples per step: batch per process and forward pass, times passes, times processes."""
    comment = f"{names[0]} {each} x {names[1]} {accumulated} x {quantity(processes or 1, 'process')}"
    draft.set("batch_size", each * accumulated * (processes or 1), comment)
    draft.set(
        "micro_batches",
        accumulated * (processes or 1),
        f"{names[1]} {accumulated} x {quantity(processes or 1, 'process')}",
    )
    if processes is None:
        draft.notes.append(
            "assumed one process, because the file does not name their number. If the original ran on N, rerun with "
            "launch.processes=N, or multiply batch_size and micro_batches by N"
        )


def schedule(draft: RunDraft, theirs: Mapping[str, Any], steps: str, share: str, kind: Any = None) -> None:
    """Set a warm-up in steps or as a share. `kind`: name of the schedule in transformers; `constant` ignores a warm-up,
    but an optimizer without a schedule uses the steps for its own."""
    fraction, count = number(theirs.get(share)), number(theirs.get(steps))
    kind, own = str(kind).rpartition(".")[2].lower(), draft.keys.get("optim.name") == "schedule_free"
    name, value = (steps, theirs.get(steps)) if count else (share, theirs.get(share))
    if own and (count or fraction) and (kind == "constant_with_warmup" or not count or count < 1):
        why = "Trainer warms up twice, in the optimizer and by lr_scheduler_type: constant leaves it to the optimizer"
        if kind != "constant_with_warmup":
            why = "Trainer passes a share to schedule_free as a number of steps; give steps"
        draft.drop(name, value, why, True, ("optim.warmup_steps", "optim.warmup_fraction"))
    elif kind == "constant" and (count or fraction) and not own:
        draft.drop(name, value, "transformers' schedule constant ignores a warm-up, and so does the run file")
    elif count and count >= 1:
        draft.set("optim.warmup_steps", int(count), f"{steps} {int(count)}")
    elif count or fraction:
        name, value = (steps, count) if count else (share, fraction)
        draft.set("optim.warmup_fraction", value, f"{name} {value}")


def length(draft: RunDraft, epochs: Any, steps: Any, names: tuple[str, str]) -> None:
    """Set the length of training: steps, if given, override epochs."""
    if (count := number(steps)) is not None and count > 0:
        draft.set("steps", int(count), names[1])
    elif (passes := number(epochs)) is not None:
        draft.set("epochs", int(passes) if passes == int(passes) else passes, names[0])


def only_its_own(draft: RunDraft) -> None:
    """Drop keys of moments that the optimizer does not have."""
    options = plugins.options_of("optimizers", draft.keys.get("optim.name", "adamw"))
    for key in ("betas", "eps", "momentum"):
        if key not in options.model_fields:
            draft.keys.pop(f"optim.{key}", None)


_ENDS = {key: key for key in ("min_lr_ratio", "power")} | {
    "min_lr_rate": "min_lr_ratio",
    "num_decay_steps": "decay_steps",
}


def schedule_ends(draft: RunDraft, kind: str, options: Mapping[str, Any], rate: float, name: str) -> None:
    """Set the end of a transformers schedule from `lr_scheduler_kwargs` and its defaults."""
    kind, options = kind.rpartition(".")[2], {key: value for key, value in options.items() if value is not None}
    if kind == "polynomial":
        options.setdefault("lr_end", 1e-7)
    if kind == "warmup_stable_decay":
        shape = str(options.pop("decay_type", "cosine"))
        draft.set("optim.decay_shape", {"1-sqrt": "sqrt"}.get(shape, shape), f"{name}: decay_type {shape}")
    for key, value in options.items():
        if key in _ENDS:
            draft.set(f"optim.{_ENDS[key]}", value, f"{name}: {key}")
        elif key in ("min_lr", "lr_end") and (least := number(value)) is not None:
            draft.set("optim.min_lr_ratio", least / rate, f"{name}: {key} {least:g} of {rate:g}")
        elif (kind, key, value) != ("cosine", "num_cycles", 0.5):  # the default of half a wave
            draft.drop(f"{name}: {key}", value, "optim has no such key", True, ("optim.schedule",))


ADAFACTOR = (
    "Trainer's takes the rate as an absolute one; here, as in torch's, it is relative to the size of the weights: "
    "give optim.learning_rate, such as 1e-2"
)


def optimizer(draft: RunDraft, name: str, value: Any) -> None:
    """Record how Trainer's optimizer differs from ours of the same name, and defaults that only Trainer has."""
    kind = str(value).rpartition(".")[2].lower()
    if kind == "adafactor":
        draft.lacks(f"{name}: the rate of adafactor", ADAFACTOR, "optim.learning_rate")
    elif kind == "sgd":
        draft.set("optim.momentum", 0.0, f"{name} sgd: by torch's default")
    elif "lion" in kind:
        draft.set("optim.betas", [0.9, 0.999], f"{name} {kind}: by Trainer's default")


def decays_all(draft: RunDraft, decay: float | None) -> None:
    """Record the weight decay of an optimizer that decays all weights."""
    if decay:
        draft.notes.append(f"difference: the original decays biases and norms by {decay:g}, lockstep does not")


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def trackers(draft: RunDraft, name: str, value: Any) -> None:
    """Set one tracker or a list of them."""
    trackers_named = [str(each) for each in (value if isinstance(value, list) else [value]) if each]
    if supported := [each for each in trackers_named if each in TRACKERS]:
        draft.set("track.to", supported, f"{name} {', '.join(supported)}")
    for each in trackers_named:
        if each not in (*TRACKERS, "none", "all"):
            draft.drop(name, each, f"trackers here are {', '.join(TRACKERS)}, or a class of your own")
    if "all" in trackers_named:
        draft.drop(name, "all", f"name them: track.to=[...] of {', '.join(TRACKERS)}")


def quantized(draft: RunDraft, kind: Any, nested: Any, origin: str) -> None:
    """Set the 4-bit quantization of an adapter's base: nf4 or fp4."""
    kind = str(kind).lower()
    if kind not in ("nf4", "fp4"):
        draft.drop(origin, kind, "model.quantization is nf4 or fp4", True, ("model.quantization",))
        return
    draft.set("model.quantization", kind, origin)
    if nested and not draft.is_given("model.quantization"):
        draft.notes.append("lockstep keeps the scales of 4-bit weights in float32 (no double quantization)")


def numbers(draft: RunDraft, theirs: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Set keys that are plain numbers of the file, if it has them. `names`: our key -> theirs."""
    for key, name in names.items():
        if (value := number(theirs.get(name))) is not None:
            draft.set(key, value, name)


def share(draft: RunDraft, theirs: Mapping[str, Any], name: str) -> None:
    """Set the share of train that is held out for validation."""
    if value := number(theirs.get(name)):
        if value < 1:
            draft.set("data.validation_fraction", value, name)
        else:
            why = "data.validation_fraction is a share, below 1"
            draft.drop(name, theirs[name], why, True, ("data.validation_fraction",))


def adapter_entries(table: Table, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of peft's config by peft's names, which the table has as `how`."""
    rows = ((name, row) for name, row in table.items() if row.here == "model.adapter" and row.how.isidentifier())
    return {row.how: theirs.get(name) for name, row in rows}


def lora(draft: RunDraft, entries: Mapping[str, Any], origin: str) -> None:
    """Set an adapter of peft; entries that were not given are left out."""
    adapter = {key: value for key, value in entries.items() if value is not None}
    draft.set("model.adapter", {"type": "lora", **adapter}, origin)
