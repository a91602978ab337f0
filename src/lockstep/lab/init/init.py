"""`lockstep init`: write a commented run file for the user's data, after a few questions.

In: a data source, and answers or flags. Out: a run file that loads, plans and trains unchanged: its data were prepared
as in training. Other values follow from the data and this machine; an uncertain one is a question, or a note without a
terminal. The file has a header, then one key per line with an explaining comment.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import plugins
from lockstep.config.data_sources import OWN
from lockstep.config.error_messages import dump_yaml
from lockstep.config.run import PATHS, Run, RunError, load, overrides_of
from lockstep.config.sections import DataSection, at_length
from lockstep.data import prepare
from lockstep.data.hub import unreached
from lockstep.data.job import Job
from lockstep.data.source import BUILTIN, local_splits
from lockstep.lab.init import columns, detect_layout, questions
from lockstep.lab.init.columns import DatasetProfile
from lockstep.lab.init.questions import CHAT, SCRATCH, Ask, MachineInfo, NoAnswerMends, Prompter, one_of
from lockstep.track.console import Console
from lockstep_trace.redaction import visible

_RETRIES = 5  # fixes tried on one run file
_LACKS_VALUES, _NO_CHAT_TEMPLATE, _TOO_LONG = "LS2323", "LS3351", "LS3142"
_LOADS_MODEL = ("LS2303", "LS3131")  # loading the tokenizer, or the config


@dataclass(frozen=True)
class Trial:
    """Result of preparing the data with a run file."""

    examples: int  # size of the training split in training
    held_out: bool  # whether validation examples were taken from it
    exact: bool  # False: with another tokenizer than the run's, which may give another number of blocks
    warnings: tuple[str, ...] = ()  # data warnings that training will print


def init(
    path: Path,
    flags: dict[str, str | None],
    overrides: list[str],
    force: bool,
    ask: Ask | None,
    more: Sequence[str] = (),
) -> int:
    """Run the whole command. `flags`: data, task and model from the command line. `ask`: asks the user, None without a
    terminal. `more`: data sources besides the first.

    Errors: `RunError`; then nothing was written."""
    free(path, force)
    console = Console(True)
    talk, overridden = Prompter(ask, console), keys_of(overrides)
    data, look = _data(flags.get("data") or overridden.get("data.source"), overridden, talk)
    parts = [(data, look), *(_data(each, overridden, talk) for each in more)]
    for _, each in parts:
        console.say(f"{each.source}: {_sizes(each)}; columns {each.described()}")
    task = _task(look, flags.get("task") or overridden.get("task.name"), overridden, talk)
    if more:
        data, look, task = detect_layout.together(parts, task, talk)
    else:
        data = _without_test(data, task, look, talk)
    keys = ", ".join(f"{key}: {scalar([value])[1:-1]}" for key, value in task.items())
    console.say(f"task: {{{keys}}}{_unread(look, task)}")
    here = MachineInfo.look()
    filled, trial = _tried_with_model(path, data, task, look, here, flags.get("model"), overridden, talk)
    for text in trial.warnings:
        talk.note(text)
    filled = questions.with_steps(filled, trial.examples, here, overridden)
    run = checked(path, write(filled, _header(filled, path.name, look, here, trial, talk), {}))
    console.say(f"wrote {path}: {run.task.name} with {run.model.source or run.model.type} on {here.described()}")
    console.say(f"next: lockstep plan {path}; lockstep train {path}")
    return 0


def keys_of(overrides: list[str]) -> dict[str, Any]:
    """Overrides as dotted key -> value; a text for a section sets its main key. Errors: `RunError`."""
    keys: dict[str, Any] = {}
    for key, value in overrides_of(overrides).items():
        whole = at_length(key, value)
        keys |= {f"{key}.{inner}": each for inner, each in whole.items()} if isinstance(whole, dict) else {key: value}
    return keys


def free(path: Path, force: bool) -> None:
    """Check that the run file can be created. Errors: `RunError` if it exists, or its folder does not."""
    if path.exists() and not force:
        raise RunError("LS8290", f"{path} exists; choose another name, or add --force to replace it")
    if not path.absolute().parent.is_dir():
        raise RunError("LS8291", f"{path}: no such folder: {path.absolute().parent}")


@contextmanager
def _aside(path: Path, text: str) -> Iterator[Path]:
    """Context with a temporary run file beside `path`. Errors raised inside cite no line, as the file is gone."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        yield aside
    except OSError as error:
        raise RunError("LS8292", f"cannot write {path}: {error.strerror}") from error
    except RunError as error:
        message = re.sub(rf" \({re.escape(str(aside))}[^()]*\)", "", error.message)
        raise RunError(error.code, message.replace(str(aside), str(path))) from error
    finally:
        aside.unlink(missing_ok=True)


def checked(path: Path, text: str, planned: bool = True) -> Run:
    """Write the run file if it loads and, with `planned`, passes `plan`. Errors: `RunError`; then nothing was
    written."""
    with _aside(path, text) as aside:
        run = load(aside, [])
        if planned:
            plan(run)
        os.replace(aside, path)
    return run


def loaded(path: Path, text: str) -> Run:
    """Load a run file of this text at this path, without writing it. Errors: `RunError`."""
    with _aside(path, text) as aside:
        return load(aside, [])


# -- questions ---------------------------------------------------------------------------------------------------------


def _data(given_source: str | None, overridden: dict[str, Any], talk: Prompter) -> tuple[DataSection, DatasetProfile]:
    more = {key.partition(".")[2]: value for key, value in overridden.items() if key.startswith("data.")}

    def read(source: str | None) -> tuple[DataSection, DatasetProfile]:
        try:
            section = DataSection(**({**more, "source": source} if source is not None else more))
        except ValueError:  # errors in a key's value are reported as for a run file
            load(None, {f"data.{key}": value for key, value in more.items()}, {"model": {"type": "gpt2"}, "data": {}})
            raise
        return detect_layout.looked(detect_layout.recognised(section, talk), talk)

    if given_source is not None or "train" in more:
        talk.console.say(f"reading {given_source or more['train']}")
        try:
            return read(given_source)
        except RunError as error:
            if "source" in more or "train" in more:
                raise
            raise RunError(error.code, re.sub(r"^data\.source(?=:)", "--data", error.message)) from error
    if talk.ask is None:
        raise RunError("LS8293", "no data given; add --data FOLDER, FILE, HUB-ID or builtin/emotion")
    return talk.answer(f"Data (a folder, a file, a Hub id, or {BUILTIN})", BUILTIN, read)


def _task(look: DatasetProfile, name: str | None, overridden: dict[str, Any], talk: Prompter) -> dict[str, Any]:
    """The `task` section: the guessed or requested task, with the columns that fit it."""
    task_keys = {
        key.partition(".")[2]: value
        for key, value in overridden.items()
        if key.startswith("task.") and key != "task.name"
    }
    guessed: tuple[str, columns.Fit] | None = None
    if name is None:
        try:
            guessed = columns.guess(look)
        except RunError as error:
            if talk.ask is None:
                raise
            talk.console.say(str(error))
        default = guessed[0] if guessed else columns.tasks()[0]
        if talk.ask is not None:
            name = talk.answer(f"Task ({', '.join(columns.tasks())})", default, one_of(columns.tasks(), "task"))
    name = name or default
    if name not in columns.tasks() and "." not in name:  # a class of the user
        raise RunError("LS8294", f"--task: invalid value {name!r}; expected one of {', '.join(columns.tasks())}")
    fitted = columns.fit(name, look)
    if fitted is None and not task_keys and talk.ask is None:
        raise RunError(
            "LS8295",
            f"--task: {look.source} has no columns that fit {name}; it has {look.described()}. Name the "
            "columns: task.text=... task.label=... (see `lockstep schema`)",
        )
    keys = dict(fitted.keys) if fitted else {}
    doubts = fitted.doubts if fitted else dict.fromkeys(columns.task_named(name).column_keys, "")
    for key, why in doubts.items():
        if key not in task_keys:
            keys |= _column(key, why, keys, look, talk)
    return {"name": name, **keys, **task_keys}


def _column(key: str, why: str, keys: dict[str, Any], look: DatasetProfile, talk: Prompter) -> dict[str, Any]:
    """Choose a column that might be another one. In a translation with two languages, the other side follows."""
    there = list(look.languages or look.kinds)
    if talk.ask is None:
        talk.note(f"task.{key}: {keys.get(key)}; {why}")
        return {}
    question = f"Column of task.{key}{f' ({why})' if why else ''}"
    chosen = talk.answer(question, str(keys.get(key) or ""), one_of(there, "column"))
    if key == "source" and chosen == keys.get("target"):
        return {"source": chosen, "target": keys["source"]}
    return {key: chosen}


def _without_test(data: DataSection, task: dict[str, Any], look: DatasetProfile, talk: Prompter) -> DataSection:
    """Leave out a test split that lacks labels."""
    learned = task.get("label")
    labels = {*learned} if isinstance(learned, list) else {learned}
    lacking = set(look.lacking.get("test", ())) & {str(value) for value in (*task.values(), *labels)}
    if not lacking or data.test is not None or data.split_column is not None or local_splits(data) is None:
        return data
    if columns.task_named(task["name"]).drops_unlabeled_test and lacking == labels:  # training leaves it out itself
        talk.note(f"the test split has no column {learned}: it is not scored; `lockstep predict` reads it")
        return data
    return detect_layout.without_test(data, talk)


def _tried_with_model(
    path: Path,
    data: DataSection,
    task: dict[str, Any],
    look: DatasetProfile,
    here: MachineInfo,
    flag: str | None,
    overridden: dict[str, Any],
    talk: Prompter,
) -> tuple[dict[str, Any], Trial]:
    """Return the keys with a model for which the data can be prepared."""
    given_model = flag or overridden.get("model.source") or (SCRATCH if "model.type" in overridden else None)
    default = questions.model_for(task["name"], look, here)

    def tried(model: str) -> tuple[dict[str, Any], Trial]:
        filled = questions.values(path, _from(path, "data", data), task, local(path, model), look, here)
        if "model.type" in overridden and not any(key.startswith("model.config") for key in overridden):
            length = filled["task"].get("block_size") or filled["data"].get("max_length", 0)
            filled["model"]["config"] = questions.small_config(str(overridden["model.type"]), length)
        for key, value in overridden.items():
            section, _, inner = key.partition(".")
            if not (section == "data" and inner in (PATHS["data"] if data.sources is None else OWN)):
                set_key(filled, key, value)
        if filled["task"].get("bleu") is False and "task.bleu" not in overridden:
            talk.note("sacrebleu is not installed, so task.bleu is false: pip install 'lockstep-train[translation]'")
        talk.console.say("tokenizing the data (cached for training)")
        try:
            return filled, _trial(path, filled, look, here, talk, overridden)
        except RunError as error:
            if str(error).startswith(("model", "tokenizer", "data.max_length", "task.block_size")):
                raise
            raise NoAnswerMends(error.code, error.message) from None

    if given_model is not None or talk.ask is None:
        return tried(given_model or default)
    return talk.answer(f"Model (Hub id, folder, or {SCRATCH})", default, tried)


# -- trial preparation -------------------------------------------------------------------------------------------------


def _trial(
    path: Path,
    filled: dict[str, Any],
    look: DatasetProfile,
    here: MachineInfo,
    talk: Prompter,
    overridden: Mapping[str, Any],
) -> Trial:
    """Prepare the data as training will; `filled` gets the keys needed for that. Errors: `RunError`, as in training."""
    for _ in range(_RETRIES):
        try:
            return _prepared(path, filled, look, True)
        except RunError as error:
            if error.code == _LACKS_VALUES and talk.ask is not None:
                talk.console.say(str(error))
                if not talk.sure("Leave such rows out?", True):
                    raise
                filled["data"]["drop_missing"] = True
            elif error.code == _TOO_LONG and (key := error.message.partition(":")[0]) not in overridden:
                from lockstep.tasks.models import models  # imports torch

                with _aside(path, write(filled, [], {})) as aside:
                    fits = models.most_tokens(load(aside, []).model)
                if fits is None:
                    raise
                set_key(filled, key, fits)
                talk.note(f"{key} is {fits}, because the model has positions for {fits} tokens")
            elif error.code == _NO_CHAT_TEMPLATE:
                filled["task"]["chat_template"] = CHAT
            elif error.code in _LOADS_MODEL and not _is_folder(filled) and (not here.hub or unreached(error)):
                talk.note(
                    f"the model {filled['model'].get('source')} cannot be downloaded from here, so its existence and "
                    "requirements were not checked"
                )
                small = filled | {"task": {key: value for key, value in filled["task"].items() if key != "prefix"}}
                exact = not columns.task_named(filled["task"]["name"]).cuts_blocks
                length = filled["task"].get("block_size") or filled["data"].get("max_length", 0)
                small |= questions.scratch(filled["task"]["name"], length, look.sizes["train"])
                if filled["task"].get("messages"):
                    small["task"].setdefault("chat_template", CHAT)
                return _prepared(path, small, look, exact)
            else:
                raise
    raise RunError("LS8296", f"{look.source}: the run file cannot be derived from this data; write it by hand")


def _is_folder(filled: dict[str, Any]) -> bool:
    """Return whether the model is, or is meant to be, a local folder."""
    source = str(filled["model"].get("source") or "")
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or Path(source).is_dir()


def _prepared(path: Path, filled: dict[str, Any], look: DatasetProfile, exact: bool) -> Trial:
    """Prepare the data of a run. Errors: `RunError`."""
    from lockstep.data.arrow_cache import examples_in

    with _aside(path, write(filled, [], {})) as aside:
        prepared = Job.of(load(aside, [])).with_data().data
    held_out = "validation" not in look.sizes
    return Trial(examples_in(prepared.splits["train"]), held_out, exact, tuple(prepare.warnings(prepared.facts)))


# -- paths -----------------------------------------------------------------------------------------------------------


def _from(path: Path, section: str, values: DataSection) -> DataSection:
    """Write local paths relative to the run file's folder."""

    def local_paths(entry: Any) -> dict[str, Any]:
        return {key: local(path, value) for key in PATHS[section] if (value := getattr(entry, key)) is not None}

    if values.sources is not None:
        return values.model_copy(
            update={"sources": [each.model_copy(update=local_paths(each)) for each in values.sources]}
        )
    return values.model_copy(update=local_paths(values))


def local(path: Path, value: Any) -> Any:
    """Rewrite a path relative to the run file's folder, if it exists from the current one."""
    if isinstance(value, list):
        return [local(path, each) for each in value]
    folder = path.absolute().parent
    if not isinstance(value, str) or os.path.isabs(value) or value.startswith("~") or folder == Path.cwd():
        return value
    pattern = any(mark in value for mark in "*?[")
    there = Path(value).exists() or (pattern and any(Path().glob(value)))
    return os.path.relpath(value, folder) if there else value


# -- the file --------------------------------------------------------------------------------------------------------


def _header(
    filled: dict[str, Any], name: str, look: DatasetProfile, here: MachineInfo, trial: Trial, talk: Prompter
) -> list[str]:
    """Header of the file: origin, arithmetic and assumptions."""
    epoch, total = questions.steps_of(filled, trial.examples)
    micro, about = filled["micro_batches"], "" if trial.exact else "about "
    cut = f" (after {filled['data'].get('validation_fraction', 0.1):.0%} for validation)" if trial.held_out else ""
    blocks = "blocks of tokens" if columns.task_named(filled["task"]["name"]).cuts_blocks else "examples"
    return [
        f"{look.source}: {_sizes(look)}. Written by `lockstep init`.",
        f"Columns: {look.described()}.",
        *(f"Note: {note}." for note in talk.notes),
        "",
        f"  lockstep plan {name}      # what would be started",
        f"  lockstep train {name}     # run it, or resume it",
        f"  lockstep train {name} epochs=1 data.limit=200     # a short try",
        "",
        f"Arithmetic: {about}{trial.examples:,} {blocks}{cut} / {filled['batch_size']} a step = {about}{epoch:,} steps "
        f"an epoch, {about}{total:,} in all; a step is cut into {micro} micro-batches.",
        f"Written for {here.described()}; any number of processes up to {micro} gives the same weights.",
        "Paths are relative to this file's folder. All keys: `lockstep schema`.",
    ]


def _sizes(look: DatasetProfile) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in look.sizes.items()) + " examples"


def _unread(look: DatasetProfile, task: dict[str, Any]) -> str:
    """Columns that the task does not read, by its keys or their defaults."""
    values = [
        task.get(key, field.default) for key, field in columns.task_named(task["name"]).Options.model_fields.items()
    ]
    used = {str(one) for value in values for one in (value if isinstance(value, list) else [value])}
    rest = [] if look.plain or look.languages else [name for name in look.kinds if name not in used]
    return f"; not read: {', '.join(rest)}" if rest else ""


def set_key(filled: dict[str, Any], key: str, value: Any) -> None:
    """Set a key given by the user in place of the guess."""
    *sections, last = key.split(".")
    for section in sections:
        if not isinstance(filled.get(section), dict):
            filled[section] = {}
        filled = filled[section]
    if last in ("steps", "epochs"):
        filled.pop("epochs", None)
    if last == "warmup_steps":
        filled.pop("warmup_fraction", None)
    filled[last] = value


# Comments for keys whose description refers to a key that is not in the file.
_ABOUT = {
    "task.name": "what is trained; the other keys of this section are the task's",
    "model.config": "entries of the model's config: a small model, to begin with",
    "optim.warmup_fraction": "share of all steps in which the rate rises from 0",
    "strategy.name": "how processes share a step; see `lockstep list`",
    "data.layout": "what the files are: reference/run-file on the site",
}
_WIDTH = 44  # column at which comments begin


def write(filled: Mapping[str, Any], header: list[str], comments: Mapping[str, str]) -> str:
    """Format the run file. `comments`: dotted key -> text that replaces the key's description, or (with a leading `+`)
    follows it."""
    rows: list[tuple[str, str]] = []
    for key, value in filled.items():
        if not isinstance(value, dict):
            # The whole is refused if a key is unknown.
            about = Run.model_fields[key].description if key in Run.model_fields else ""
            rows.append((f"{key}: {scalar(value)}", _comment(key, comments, about)))
            continue
        rows.append((f"{key}:", comments.get(key, "")))
        fields = _known(key, value) if key in Run.model_fields else {}
        for inner, each in value.items():
            about = fields[inner].description if inner in fields else ""
            rows.append((f"  {inner}: {scalar(each)}", _comment(f"{key}.{inner}", comments, about)))
    width = min(_WIDTH, max(len(left) for left, _ in rows))
    lines = [f"# {line}".rstrip() for text in header for line in _wrapped(text)]
    text = "\n".join([*lines, *(f"{left:<{width}}  # {about}" if about else left for left, about in rows)]) + "\n"
    return visible(text)  # comments may quote the data; `dump_yaml` has escaped values


def _known(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a section, including those of its plug-in."""
    base: Any = Run.model_fields[section].annotation
    fields = dict(base.model_fields)
    if (kind := {"task": "tasks", "launch": "launchers"}.get(section)) is not None:
        name = str(values.get("name", fields["name"].default))
        if "." not in name:
            fields |= plugins.options_of(kind, name).model_fields
    return fields


def _comment(key: str, comments: Mapping[str, str], about: str | None) -> str:
    text = comments.get(key, "")
    about = _ABOUT.get(key, about or "")
    return "; ".join(filter(None, (about, text[1:]))) if text.startswith("+") else text or about


def _wrapped(text: str) -> list[str]:
    """Wrap a header line; indented text continues at its indentation."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, 108, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def scalar(value: Any) -> str:
    """Format a value on one line of YAML."""
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.15g}".partition("e")
        if not power:
            return digits
        return f"{digits}e{power}" if "." in digits else f"{digits}.0e{power}"
    dumped = dump_yaml(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return json.dumps(value) if "\n" in dumped else dumped  # YAML of a text with line breaks has several lines


# messages of `plan` about this machine (packages, GPUs) rather than the run file
_OF_MACHINE = {"LS0500", "LS1120", "LS2139", "LS3070", "LS3129", "LS3171", "LS3373", "LS4045", "LS7202"}
_OF_MACHINE |= {"LS7215", "LS7361", "LS3127", "LS7070", "LS7290", "LS4041"}


def plan(run: Run, with_data: bool = False) -> list[str]:
    """Run the checks of `lockstep plan`, those of the data only `with_data`. Returns what this machine lacks for the
    run; the rest is then checked with a small model in place of its own. Errors: `RunError` for a fault of the run
    file."""
    from lockstep.launchers import start

    lacking: list[str] = []
    for each in (run, with_small_model(run)):
        try:
            start.refuse_options(each)
            if with_data and not lacking:
                launcher = start.launcher_of(each.launch)
                start.preview(launcher, start.plan_of(each, launcher))
            break
        except RunError as error:
            if error.code not in _OF_MACHINE and not unreached(error):
                raise
            lacking.append(str(error))
    return list(dict.fromkeys(lacking))


def with_small_model(run: Run) -> Run:
    """Replace the model of a run by a small one from scratch; a user's own model stays."""
    task = Job.of(run).task
    if task.own_model or not task.built_in():
        return run
    small = questions.scratch(run.task.name, 128, 0)["model"]
    model = {"source": None, "adapter": {}, "quantization": None, "dtype": "float32", "attention": None, **small}
    return run.with_keys("model", **model)
