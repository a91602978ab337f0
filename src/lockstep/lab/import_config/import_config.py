"""`lockstep init --from FILE`: convert another system's file into a commented run file.

In: its path, the data if given, overrides. Out: a run file that loads and can be planned, and a list of what was read,
what was not understood and what has no counterpart, with reasons. A file that would train another model is written only
with `--partial`. To add a system, add a row to `KEY_FILES` (a file of keys) or to `SCRIPTS` (a Python file, which is
parsed and never run).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.config import error_messages as messages
from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.config.sections import DataSection, LaunchSection
from lockstep.lab.import_config import (
    axolotl,
    branch_values,
    command_line,
    decided_branches,
    library_names,
    loops,
    notebooks,
    project_files,
    saved_files,
    switches,
    torchtune,
    trainer,
    trainer_script,
)
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import FILL_IN, NAMES, Gap, RunDraft, decides, only_its_own, read_keys
from lockstep.lab.init import columns, detect_layout, init, questions
from lockstep.lab.init.columns import DatasetProfile
from lockstep.lab.init.questions import Ask, Prompter
from lockstep.launchers.start import launcher_of
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console
from lockstep_trace.coded import quantity

_INTERVALS = ("evaluate.every", "checkpoint.every")
_COLUMNS = ("task.text", "task.prompt", "task.response", "task.messages", "task.label", "task.source", "task.target")
# columns of a language model: conversations, pairs or whole texts
_LM_COLUMNS = tuple(map(frozenset, (("task.messages",), ("task.prompt", "task.response"), ("task.text",))))
_PROMPTS = ("input", "context", "system")  # columns of instruction data that the prompt also needs
_PLACES = ("data.source", "data.train", "data.validation", "data.test", "model.source", "tokenizer.source")


def move(
    path: Path,
    origin: Path,
    flags: dict[str, str | None],
    overrides: list[str],
    force: bool,
    ask: Ask | None,
    partial: bool = False,
) -> int:
    """Run the whole command. `partial`: write the file even if it would train another model. Errors: `RunError`; then
    nothing was written."""
    init.free(path, force)
    talk, overridden = Prompter(ask, Console(True)), init.keys_of(overrides)
    names = {"data": "data.source", "task": "task.name", "model": "model.source"}
    by_hand = {**{names[flag]: text for flag, text in flags.items() if text is not None}, **overridden}
    for key, value in by_hand.items():
        _check_value(key, value)
    draft, processes = RunDraft(by_hand=by_hand, folder=origin.parent), overridden.get("launch.processes")
    try:
        source = read(origin)
        source.move(draft, processes if isinstance(processes, int) else None)
        _deepspeed(draft)
    except (RecursionError, MemoryError):  # MemoryError: from Python's own parser
        nested = "elif, brackets, or functions that call each other): remove code that does not train"
        if origin.suffix.lower() == ".json":
            nested = "lists or objects within each other): remove the keys that hold them"
        raise RunError(
            "LS8550",
            f"--from: {origin} is nested too deeply to be read ({nested}, or write the run file without --from",
        ) from None
    only_its_own(draft)
    talk.console.say(f"{origin}: {source.called}")
    for line in draft.read:
        talk.console.say(f"read: {line}")
    for key, value in by_hand.items():
        draft.set(key, value, "")
    _replace_columns(draft)
    looked = _look(draft, flags["data"] is not None, talk)
    if looked is not None and ("validation" in looked.sizes or "data.validation" in draft.keys):  # nothing is held out
        draft.rows = looked.sizes.get("train")
    _fit(draft, looked, talk)
    for check in draft.at_end:
        check(draft)
    if draft.keys.get("model.source") == questions.SCRATCH:
        _from_scratch(draft, looked)
    _settle(path, draft, looked, talk)
    _note_unread(draft, partial, talk)
    text = _text(path, origin, source.called, draft, talk)
    refused = [] if partial else draft.deciding()  # which the error lists
    for gap in sorted(draft.gaps, key=lambda gap: bool(draft.replacing(gap))):  # the open ones first
        if gap not in refused:
            by = draft.replacing(gap)
            talk.console.say(f"replaced by {by}: {gap.name} ({gap.why})" if by else str(gap))
    if refused:
        raise _incomplete(origin, refused, draft.unread)
    listed = "; the file lists what was left out" if draft.gaps else ""
    fault = _write(path, text, partial, looked is not None, talk, listed)
    talk.console.say(f"next: {_first(draft, fault)}lockstep plan {path}; lockstep train {path}")
    return 0


def _first(draft: RunDraft, fault: str) -> str:
    """Say what has to be done to the written file before it can be planned. `fault`: the key that `plan` refuses."""
    empty = [key for key, value in draft.keys.items() if value == FILL_IN]
    steps = [f"fill in {' and '.join(empty)}"] if empty else []
    steps += [f"correct {fault}, as the note says"] if fault else []
    return f"{'; '.join(steps)}; then " if steps else ""


def _note_unread(draft: RunDraft, partial: bool, talk: Prompter) -> None:
    """Name the files that a script imports; an error for lost parts names them itself."""
    if draft.unread and (partial or not draft.deciding()):
        talk.note(f"not read: {', '.join(draft.unread)}, which may change what the script does")


def _replace_columns(draft: RunDraft) -> None:
    """Remove the file's columns of a language model if the command line gives those of another form."""
    form = next((columns for columns in _LM_COLUMNS if draft.by_hand.keys() & columns), frozenset())
    for key in frozenset().union(*_LM_COLUMNS) - form if form else ():
        if key not in draft.by_hand:
            draft.keys.pop(key, None)


def _deepspeed(draft: RunDraft) -> None:
    """Apply the DeepSpeed settings that the file names; they override its own. Errors: `RunError`."""
    if isinstance(draft.deepspeed, Mapping):
        command_line.move_deepspeed(draft.deepspeed, draft, None, completed=True)
    elif draft.deepspeed is not None:
        if (file := draft.file_named(str(draft.deepspeed))) is None:
            why = "the file is missing, and may also set an optimizer: add it, or give strategy.name"
            draft.unclear(f"deepspeed: {draft.deepspeed}", why, "strategy.name")
            return
        values = read_keys(file, file.read_text(encoding="utf-8"))
        command_line.move_deepspeed(values, draft, None, completed=True)
        draft.read.append(f"{file} -> strategy")


def _incomplete(origin: Path, deciding: Sequence[Gap], unread: Sequence[str]) -> RunError:
    """The error for gaps that decide the training. `unread`: files that the script imports."""
    keys = list(dict.fromkeys(key for gap in deciding for key in gap.by))
    hint = f"give a replacement ({', '.join(f'{key}=...' for key in keys[:6])}), or " if keys else ""
    return RunError(
        "LS8209",
        "\n".join(
            [
                f"--from: {origin} was not converted, because these parts would be lost:",
                *([f"  not read: {_unfollowed(unread)}"] if unread else ()),
                *(f"  {gap}" for gap in deciding),
                f"To go on, {hint}write the rest with --partial",
            ]
        ),
    )


def _write(path: Path, text: str, partial: bool, with_data: bool, talk: Prompter, listed: str) -> str:
    """Write the file and plan it, `with_data` if its data are here: with `partial` in this order, otherwise only a file
    that can be planned is written. Requirements that only this machine lacks become notes. Returns the key that `plan`
    refuses, empty if there is none. Errors: `RunError`."""
    run, fault = init.loaded(path, text), ""
    wrote = f"wrote {path}: {run.task.name}{listed}"
    if partial:
        init.checked(path, text, planned=False)
        talk.console.say(wrote)
    ACTIVITY.set("checking the run file as lockstep plan does")
    try:
        filled = run.model.source != FILL_IN
        with talk.console.busy(lambda: ACTIVITY.name):
            lacks = init.plan(run if filled else init.with_small_model(run), with_data and filled)
        for lacking in lacks:
            talk.console.note(f"on this machine lockstep plan refuses it: {lacking}")
    except RunError as error:
        if not partial:
            raise RunError(
                error.code,
                f"--from: nothing was written, because lockstep plan would refuse the run file: {error.message}. "
                "Give another value, as key=value, or write it anyway with --partial",
            ) from None
        talk.console.note(f"lockstep plan refuses it: {error}")
        key = error.message.partition(":")[0]
        fault = key if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", key) else path.name
    if not partial:
        init.checked(path, text, planned=False)
        talk.console.say(wrote)
    return fault


def _look(draft: RunDraft, by_flag: bool, talk: Prompter) -> DatasetProfile | None:
    """Look at the data, if they are on this machine. Errors: `RunError` for data given on the command line."""
    data_keys = {key.partition(".")[2]: value for key, value in draft.keys.items() if key.startswith("data.")}
    source = data_keys.get("source")
    if source is None and "train" not in data_keys:
        return None
    files = data_keys.get("train", ()) if source is None else source
    places = files if isinstance(files, list | tuple) else [files]
    if not by_flag and not (places and all(Path(str(place)).expanduser().exists() for place in places)):
        return None
    try:
        given_section = DataSection(**data_keys)
    except ValidationError as error:
        explained = messages.explain(error, Run, "in the file", {}, {}, "data", (DataSection,))
        raise RunError(explained.code, f"--from: {explained.message}") from None
    whole = given_section.model_copy(update={"stream": False})  # so that its rows are counted
    section = detect_layout.recognised(whole, talk)
    looked = columns.look(section)
    for key in ("source", "train", "validation", "test", "layout", "columns", "separator", "quote"):
        value = getattr(section, key)
        if value is None:
            draft.keys.pop(f"data.{key}", None)
        elif key in section.model_fields_set or value != DataSection.model_fields[key].default:
            draft.set(f"data.{key}", value, draft.comments.get(f"data.{key}", ""))
    return looked


def _check_value(key: str, value: Any) -> None:
    """Check a value of the command line without the run file's other keys; plug-ins check their own. Errors:
    `RunError`."""
    values: dict[str, Any] = {"model": {"type": "gpt2"}, "data": {}}
    init.set_key(values, key, value)
    try:
        Run.model_validate(values)
    except ValidationError as error:
        if any(".".join(map(str, each["loc"])).startswith(key) for each in error.errors()):
            raise messages.explain(error, Run, "", {}, messages.Overrides({key: value})) from None


def _fit(draft: RunDraft, looked: DatasetProfile | None, talk: Prompter) -> None:
    """Set the task and its columns, from the file or else from the data."""
    if "task.name" not in draft.keys:
        if looked is None:
            draft.set("task.name", columns.tasks()[0], "(to be filled in, with its columns)")
            talk.note("the task is unknown: classification is a placeholder")
        else:
            name, fit = columns.guess(looked)
            draft.set("task.name", name, "(by the columns of the data)")
            _columns(draft, fit, looked, talk)
    elif looked is not None and draft.keys["task.name"] in columns.tasks():
        there = list(looked.languages or looked.kinds)
        if not any(k.startswith("task.") and str(v) in there for k, v in draft.keys.items()):
            for key in [key for key in _COLUMNS if isinstance(draft.by_hand.get(key), str)]:
                raise RunError(
                    "LS8210",
                    f"{key}: {looked.source} has no column {draft.by_hand[key]!r}; it has {looked.described()}. Name "
                    "another column, or give the file that has it with --data",
                )
            if (other := columns.fit(draft.keys["task.name"], looked)) is None:
                raise RunError(
                    "LS8201",
                    f"--data: {looked.source} has no columns that fit {draft.keys['task.name']}; it has "
                    f"{looked.described()}. Name the columns (task.text=... task.label=...), or give another --task",
                )
            for key in _COLUMNS:
                if (named := draft.keys.pop(key, None)) is not None:
                    talk.note(f"{key}: {named} is no column of {looked.source}, so columns are chosen that it has")
            _columns(draft, other, looked, talk)
    if "." in (task := str(draft.keys["task.name"])):
        return
    _drop_names_of_texts(draft, looked)
    task_keys = {"name", *plugins.options_of("tasks", task).model_fields}
    lengths = ("data.max_length", "task.block_size")  # one setting; language modelling calls it block_size
    theirs, ours = lengths if "block_size" in task_keys else lengths[::-1]
    if theirs in draft.keys:
        value, origin = draft.keys.pop(theirs), draft.comments.pop(theirs, "")
        if ours not in draft.keys:
            draft.set(ours, value, origin)
    for key in [k for k in draft.keys if k.startswith("task.") and k.partition(".")[2] not in task_keys]:
        why, named = f"the task {task} has no such key", draft.comments.get(key) or key
        named = f"{key} of {named}" if named.startswith("line ") else named
        draft.drop(named, draft.keys.pop(key), why, decides(key) and key not in _COLUMNS)


def _drop_names_of_texts(draft: RunDraft, looked: DatasetProfile | None) -> None:
    """Leave out `task.label_names`, which name integers, if the labels of the data are texts."""
    key, column = "task.label_names", str(draft.keys.get("task.label", "label"))
    if key in draft.keys and key not in draft.by_hand and looked is not None and looked.kinds.get(column) == "text":
        why = "the labels of the data are texts, and the model's outputs have these names"
        draft.drop(draft.comments.get(key) or key, draft.keys.pop(key), why)


def _columns(draft: RunDraft, fit: columns.Fit, looked: DatasetProfile, talk: Prompter) -> None:
    for key, column in fit.keys.items():
        draft.keys.setdefault(f"task.{key}", column)
    for key, why in fit.doubts.items():
        talk.note(f"task.{key}: {fit.keys.get(key)}; {why}")
    more = [name for name in _PROMPTS if name in looked.kinds and name not in draft.keys.values()]
    if "task.prompt" in draft.keys and more and draft.keys["task.prompt"] not in draft.by_hand.values():
        why = f"lockstep reads one prompt column, {draft.keys['task.prompt']}: join both, or set task.prompt=..."
        draft.lacks(f"column {more[0]} of {looked.source}", why, "task.prompt")


def _from_scratch(draft: RunDraft, looked: DatasetProfile | None) -> None:
    """Replace the pretrained model by a small one from scratch."""
    del draft.keys["model.source"]
    if "model.adapter" in draft.keys:
        draft.drop("adapter", draft.keys.pop("model.adapter"), "a model from scratch is trained as a whole")
    length = int(draft.keys.get("task.block_size") or draft.keys.get("data.max_length") or 128)
    rows = looked.sizes["train"] if looked is not None else 0
    for section, values in questions.scratch(str(draft.keys["task.name"]), length, rows).items():
        for key, value in values.items():
            draft.keys.setdefault(f"{section}.{key}", value)


def _settle(path: Path, draft: RunDraft, looked: DatasetProfile | None, talk: Prompter) -> None:
    """Set what depends on other keys: names, paths, lengths, and intervals given as shares of an epoch or of the
    run."""
    if draft.task == "question_answering" and "batch_size" in draft.keys:
        talk.note(
            "lockstep's batch_size counts questions, each with all windows of its context; the original counts "
            "windows. If contexts are longer than data.max_length, a step here has more windows, and an epoch fewer "
            "steps"
        )
    for note in draft.notes:
        talk.note(note)
    _fill_in(draft)
    for key in draft.keys.keys() & set(_PLACES):
        draft.keys[key] = init.local(path, draft.keys[key])
    draft.keys.setdefault("name", path.stem)
    draft.keys["name"] = re.sub(r"[^A-Za-z0-9._-]", "-", str(draft.keys["name"])).lstrip("._-") or "run"
    if draft.keys.get("steps") is not None:
        draft.keys.pop("epochs", None)
    batch = int(draft.keys.get("batch_size", 128))
    if int(draft.keys.get("micro_batches", 8)) > batch:
        draft.set("micro_batches", batch, "at most the examples of a step")
    _settle_intervals(draft, looked, batch, talk)
    for key in ("checkpoint.best", "evaluate.patience"):
        if draft.keys.get(key) and not draft.keys.get("evaluate.every"):
            draft.drop(key, draft.keys.pop(key), "it needs evaluations: set evaluate.every", True, ("evaluate.every",))
    if draft.keys.get("strategy.name") == "zero3" and draft.keys.get("task.name") == "language_modeling":
        draft.keys.setdefault("task.temperature", 0.0)
        draft.comments.setdefault("task.temperature", "(zero3 writes its samples greedily)")
    if "evaluate.patience" not in draft.keys:
        draft.keys.pop("evaluate.min_delta", None)
    if not {"data.validation", "data.validation_fraction"} & draft.keys.keys():
        talk.note("if the data have no validation split, a tenth of train is held out: data.validation_fraction")


def _fill_in(draft: RunDraft) -> None:
    """Fill in data and model if nothing names them; the task `module` has its own placeholders."""
    if draft.keys.get("task.name") == "module":
        return
    for keys in (("data.source", "data.train"), ("model.source", "model.type")):
        if not draft.keys.keys() & set(keys):
            draft.set(keys[0], FILL_IN, "(to be filled in: the file does not contain it)")


def _settle_intervals(draft: RunDraft, looked: DatasetProfile | None, batch: int, talk: Prompter) -> None:
    epoch = total = None
    if looked is not None:
        rows = looked.sizes["train"] * (0.9 if "validation" not in looked.sizes else 1)
        epoch, total = questions.steps_of({"batch_size": batch, **draft.keys}, round(rows))
    total = total if total is not None else draft.keys.get("steps")
    for key in _INTERVALS:
        _interval(draft, key, epoch, total)
        origin = draft.comments.get(key, "")
        every = draft.keys.get(key) if not origin.endswith("by default") else None
        if total is not None and isinstance(every, int) and every > total:
            talk.note(f"{origin or f'{key} {every}'}: the run has about {total} steps, so it never happens")


def _interval(draft: RunDraft, key: str, epoch: int | None, total: int | None) -> None:
    """Convert an interval to steps; for a share of an epoch or of the run, the number of steps must be known."""
    value = draft.keys.get(key)
    if isinstance(value, float) and value < 1:
        share, whole = value, total
    elif isinstance(value, str) and value.endswith(" epoch"):  # 1/4 epoch
        share, whole = 1 / int(value.partition("/")[2].split()[0]), epoch
    else:
        return
    origin = draft.comments.get(key, "")
    if whole is None:
        del draft.keys[key]
        draft.drop(origin, None, f"{key} is a number of steps; with --data, init computes it")
    else:
        draft.set(key, max(1, round(whole * share)), f"{origin}, about: of {whole} steps")


def _text(path: Path, origin: Path, called: str, draft: RunDraft, talk: Prompter) -> str:
    """Return the text of the run file; an invalid value becomes a gap. Errors: `RunError`."""
    while True:
        filled: dict[str, Any] = {}
        for key, value in draft.keys.items():
            init.set_key(filled, key, value)
        comments = {
            key: f"+{text}" if text[:1] == "(" else f"+from {text}" for key, text in draft.comments.items() if text
        }
        filled = {key: _name_first(filled[key]) for key in Run.model_fields if filled.get(key) not in (None, {})}
        text = init.write(filled, _header(origin, called, draft, talk), comments)
        try:
            init.loaded(path, text)
            return text
        except RunError as error:
            wrong = [line for line in str(error).splitlines() if draft.comments.get(line.partition(":")[0])]
            if not wrong:
                message = f"--from: the converted run file would be invalid: {error.message}"
                raise RunError(error.code, message) from None
            for line in wrong:
                key, _, why = line.partition(": ")
                name = draft.comments.pop(key) or key
                draft.drop(name, draft.keys.pop(key), why, decides(key), (key,))


def _name_first(value: Any) -> Any:
    return {k: value[k] for k in sorted(value, key=lambda k: k != "name")} if isinstance(value, dict) else value


def _header(origin: Path, called: str, draft: RunDraft, talk: Prompter) -> list[str]:
    lines = [f"From {origin.name} ({called}), by `lockstep init --from`.", *(f"Note: {note}." for note in talk.notes)]
    for title, understood in (("No counterpart here:", True), ("Not understood:", False)):
        if gaps := [gap for gap in draft.gaps if gap.understood is understood and not draft.replacing(gap)]:
            lines += ["", title, *(f"  {gap.name} ({gap.why})" for gap in gaps)]
    if closed := [gap for gap in draft.gaps if draft.replacing(gap)]:
        lines += ["", "Replaced by keys of the command line:"]
        lines += [f"  {gap.name}: by {draft.replacing(gap)}" for gap in closed]
    return [*lines, "", "All keys: `lockstep schema`. The tables: how-to/coming-from on the site."]


Move = Callable[[Mapping[str, Any], RunDraft, int | None], None]
Mover = Callable[[RunDraft, int | None], None]


@dataclass(frozen=True)
class KeyFile:
    """A system whose files of keys (YAML, JSON) can be read; Python files are read by `SCRIPTS`."""

    called: str
    table: frozenset[str]  # its keys
    marks: frozenset[str]  # keys that no other system has: any of them identifies it
    move: Move


KEY_FILES = {
    "accelerate": KeyFile(
        "accelerate config",
        frozenset(command_line.ACCELERATE),
        frozenset({"compute_environment", "distributed_type"}),
        command_line.move_accelerate,
    ),
    "deepspeed": KeyFile(
        "DeepSpeed",
        frozenset(command_line.DEEPSPEED),
        frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}),
        command_line.move_deepspeed,
    ),
    "axolotl": KeyFile("axolotl", frozenset(axolotl.TABLE), frozenset({"base_model"}), axolotl.move),
    "llama_factory": KeyFile(
        "LLaMA-Factory",
        frozenset(axolotl.LLAMA_FACTORY),
        frozenset({"finetuning_type", "stage", "cutoff_len", "dataset_dir"}),
        axolotl.move_llama_factory,
    ),
    "trl": KeyFile(
        "TRL",
        frozenset(trainer.TRL),
        frozenset({"use_peft", "dataset_train_split", "dataset_test_split"}.union(*trainer.MARKS.values())),
        trainer.move_trl,
    ),
    "trainer": KeyFile(
        "TrainingArguments",
        frozenset(trainer.TABLE),
        frozenset({"per_device_train_batch_size", "num_train_epochs", "output_dir", "learning_rate"}),
        trainer.move,
    ),
}


def _of_sagemaker(script: Script) -> tuple[str, Mover] | None:
    """Read a script that creates a SageMaker estimator; the launcher parses it. Errors: `RunError` if the launcher is
    not installed."""
    if not any(call.name in NAMES["estimators"] and call.origin.startswith("sagemaker.") for call in script.calls):
        return None
    try:
        launcher: Any = launcher_of(LaunchSection.model_validate({"name": "sagemaker"}))
    except RunError as error:
        raise RunError(error.code, f"--from: {script.path}: {error.message}") from None
    result: tuple[str, Mover] | None = launcher.read_script(script)
    return result


# Readers of Python files (SageMaker's, Trainer's, hand-written loops), tried in order; each returns None if the script
# is not of its kind.
SCRIPTS: tuple[Callable[[Script], tuple[str, Mover] | None], ...] = (_of_sagemaker, trainer_script.read, loops.read)


@dataclass(frozen=True)
class Read:
    """The kind of a file, and the function that converts it."""

    called: str
    mover: Mover
    unread: Sequence[str] = ()  # files that a script imports
    rebound: Sequence[str] = ()  # statements that may set any name anew
    shadowed: Sequence[str] = ()  # definitions that replace built-in functions of Python
    script: Script | None = None  # whose switches of libraries are named at the end
    unknown: Sequence[tuple[str, str]] = ()  # names whose value or library is not known
    imports: Callable[[RunDraft], None] | None = None  # adds gaps for what the script imports
    constants: Sequence[str] = ()  # imports of constants that are read
    added: Callable[[RunDraft], None] | None = None  # adds what a notebook holds besides its script

    def move(self, draft: RunDraft, processes: int | None) -> None:
        """Fill the draft. `processes`: their number if given by hand."""
        draft.unread = [*draft.unread, *self.unread]
        draft.read += [f"{each} -> its constants" for each in self.constants]
        for each in self.rebound:
            draft.unclear(each, "it may set any name of the script to another value: write the values into the script")
        for each in self.shadowed:
            draft.unclear(each, "it replaces a built-in function of Python that init reads by its name: rename it")
        for name, why in self.unknown:
            draft.unclear(name, why)
        for add in filter(None, (self.imports, self.added)):
            add(draft)
        self.mover(draft, processes)
        if self.script is not None:
            draft.at_end.append(functools.partial(switches.note, self.script))
            draft.at_end.append(functools.partial(saved_files.note, self.script))


def read(path: Path, more: Mapping[str, Any] | None = None) -> Read:
    """Identify and read a file. `more`: keys of a command line, which override those of the file. Errors:
    `RunError`."""
    if path.suffix in (".bin", ".pt", ".pkl"):
        raise RunError(
            "LS8202",
            f"--from: {path} is a pickle, which could run code, so it is not opened. Add to the script that "
            'wrote it: open("training_args.json", "w").write(args.to_json_string()); then --from '
            "training_args.json",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError("LS8203", f"--from: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if path.suffix == ".toml":
        raise RunError(
            "LS8552",
            f"--from: {path} is a TOML file: init reads Python scripts, notebooks, command lines, JSON and YAML, so "
            "convert it first",
        )
    if path.suffix == ".ipynb":
        notebook = notebooks.read(path, text)
        of_cells = script(Script(path, notebook.text))
        return replace(of_cells, called=f"a notebook: {of_cells.called}", added=notebook.add)
    if path.suffix == ".py":
        return script(Script(path, text))
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or text.startswith("#!"):
        return Read("a command line", command_line.read(path, text, read, script))
    keys = read_keys(path, text)
    source = _source_of(path, keys)
    keys |= more or {}
    return Read(
        f"{source.called}, {quantity(len(keys), 'key')}", lambda draft, processes: source.move(keys, draft, processes)
    )


def script(of: Script) -> Read:
    """Find the reader of a script. Errors: `RunError` if there is none."""
    imports = functools.partial(project_files.refuse, of)
    unread, rebound, constants = project_files.imported(of), project_files.rebound(of), of.constants
    of = decided_branches.taken(trainer_script.written_out(of))
    for reader in SCRIPTS:
        if (result := reader(of)) is not None:
            if reader is _of_sagemaker:
                return Read(*result, unread, rebound, project_files.shadowed(of), of)
            names = [*library_names.unknown(of), *branch_values.undecided(of)]
            return Read(*result, unread, rebound, project_files.shadowed(of), of, names, imports, constants)
    hint = "for a custom model and loss see how-to/own-module on the site"
    raise RunError(
        "LS8207",
        f"--from: {of.path} has no Trainer of transformers, TRL or Lightning, and no known form of training "
        f"loop; {_unfollowed(unread) if unread else hint}",
    )


def _unfollowed(files: Sequence[str]) -> str:
    return (
        f"init does not follow imports, and the script imports {', '.join(files)}: put the training code into one file"
    )


def _source_of(path: Path, keys: Mapping[str, Any]) -> KeyFile:
    """Return the system that one of these keys identifies. Errors: `RunError` if there is none, or torchtune's."""
    if torchtune.is_recipe(keys):  # it has output_dir, too
        raise torchtune.refusal(path, keys)
    for source in KEY_FILES.values():
        if source.marks & keys.keys():
            return source
    source_names = ", ".join(source.called for source in KEY_FILES.values())
    raise RunError("LS8208", f"--from: {path} has no key that identifies it as a file of {source_names}")
