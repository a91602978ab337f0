"""Command lines that start a training, as in shell scripts, and config files of launchers and engines.

In: the text of a .sh file, an `accelerate config` file or a DeepSpeed file. Out: a mover for it. It reads the
launcher's options (torchrun, accelerate, deepspeed) and the program's: known examples of transformers and TRL by option
name, any other script by parsing it. DeepSpeed settings without a key in the run file pass to the engine unchanged.
Nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lockstep.config import error_messages as messages
from lockstep.config.run import RunError
from lockstep.lab.import_config import deepspeed_schedules, shell, trainer
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import (
    NAMES,
    RunDraft,
    apply,
    batches,
    decays_all,
    number,
    read_keys,
    read_table,
    whole,
)
from lockstep.strategies.engines.zero_config import other_arithmetic
from lockstep_trace.coded import quantity

TASKS: Mapping[str, str] = NAMES["example_tasks"]  # name of an example script, or its prefix -> task
EXAMPLES = read_table("examples")  # their options, besides the fields of `TrainingArguments`
_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")


@dataclass
class Command:
    """One command of a shell script."""

    line: int
    launcher: dict[str, Any] = field(default_factory=dict)  # options of torchrun and other launchers
    program: str = ""  # the script, or the word after trl
    options: dict[str, Any] = field(default_factory=dict)  # of the program
    files: list[str] = field(default_factory=list)  # positional arguments
    starter: str = ""
    repeated: bool = False  # in a loop
    stray: list[str] = field(default_factory=list)  # options at the beginning of a line, which belong to no command


def read(
    path: Path, text: str, read_file: Callable[..., Any], read_script: Callable[[Script], Any]
) -> Callable[[RunDraft, int | None], None]:
    """Read the one command that starts a training. Errors: `RunError` if there is none, or more than one."""
    commands = [each for each in _commands(text) if each.program]
    if len(commands) != 1:
        lines = ", ".join(str(each.line) for each in commands)
        raise RunError(
            "LS8190",
            f"--from: {path} "
            + (f"starts several programs, on lines {lines}; keep only one" if commands else "starts no known training")
            + f": a command of {', '.join(NAMES['launchers'])}",
        )
    return lambda draft, processes: _move(path, commands[0], draft, processes, read_file, read_script)


# -- commands ----------------------------------------------------------------------------------------------------------


def _commands(text: str) -> list[Command]:
    """Return the commands that start a program."""
    started = []
    stray: list[str] = []
    for line in shell.commands(text):
        words = line.words
        while words and (words[0] in ("srun", "nohup", "time", "exec", "uv", "run", "env") or "=" in words[0]):
            words = words[1:]
        if line.words[0].startswith("--"):
            stray.append(f"line {line.number}: {line.words[0]}")
        elif words and Path(words[0]).name in NAMES["launchers"]:
            started.append(_command(words, line.number, line.repeated))
    for each in started:
        each.stray = stray
    return started


def _command(words: list[str], line: int, repeated: bool) -> Command:
    starter = Path(words[0]).name
    rest = words[1:]
    command = Command(line, starter=starter, repeated=repeated)
    if starter == "accelerate" and rest[:1] == ["launch"]:
        rest = rest[1:]
    elif starter == "accelerate":
        return command
    if starter.startswith("python") and rest[:1] == ["-m"] and rest[1:2] and rest[1].startswith("torch.distributed"):
        rest = rest[2:]  # the module of torch's launcher
    elif starter.startswith("python") and rest[:1] == ["-m"] and rest[1:2] and rest[1] in ("pip", "venv"):
        return command
    if starter in ("trl", "llamafactory-cli", "axolotl"):
        command.program, rest = (rest[0], rest[1:]) if rest else ("", [])
    else:
        while rest and not rest[0].endswith(".py"):
            if not rest[0].startswith("-") and {"m", "module"} & command.launcher.keys():
                break  # python -m package.module
            rest = _option(rest, command.launcher, NAMES["switches"])
        command.program, rest = (rest[0], rest[1:]) if rest else ("", [])
    while rest:
        if rest[0].startswith("--"):
            rest = _option(rest, command.options, set())
        else:
            command.files.append(rest[0])
            rest = rest[1:]
    command.options = _negated(command.options)
    return command


def _negated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `--no_NAME` of HfArgumentParser to NAME: false, if NAME is a known option."""
    names = trainer.TABLE.keys() | EXAMPLES.keys() | trainer.TRL.keys()
    values: dict[str, Any] = {}
    for name, value in options.items():
        plain = name.removeprefix("no_")
        values |= {plain: False} if value is True and name not in names and plain in names else {name: value}
    return values


def _option(rest: list[str], into: dict[str, Any], switches: Collection[str]) -> list[str]:
    """Parse one option with its values."""
    word, rest = rest[0], rest[1:]
    if not word.startswith("-"):
        return rest
    name, equals, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if equals:
        into[name] = _value(value)
        return rest
    values = []
    while rest and name not in switches and not rest[0].startswith("--") and not rest[0].endswith(".py"):
        values.append(_value(rest[0]) if rest[0] else "")
        rest = rest[1:]
        if switches:  # options of launchers take one value
            break
    if not values:
        into[name] = True
    else:
        into[name] = values[0] if len(values) == 1 else values
    return rest


def _value(text: str) -> Any:
    """Return the value of an option: a number, a switch, a list or mapping in JSON, else the text."""
    stripped = text.strip()
    try:
        value = messages.read_yaml(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, Mapping | list):
        return value if stripped[:1] in ("{", "[") else text
    if isinstance(value, bool | int | float) or stripped == "null":
        octal = isinstance(value, int) and stripped.lstrip("+-").startswith("0") and len(stripped.lstrip("+-")) > 1
        return text if octal or len(stripped.split()) > 1 else value
    return text


# -- result -----------------------------------------------------------------------------------------------------------


def _move(
    path: Path,
    command: Command,
    draft: RunDraft,
    processes: int | None,
    read_file: Callable[..., Any],
    read_script: Callable[[Script], Any],
) -> None:
    draft.read.append(f"line {command.line}: {command.starter} ... {command.program}")
    _unclear(command, draft)
    count = _launched(path, command, draft, read_file)
    count = processes or count
    file = next(
        (f for f in (*command.files, str(command.options.get("config", ""))) if f.endswith((".yaml", ".yml", ".json"))),
        None,
    )
    program = path.parent / command.program
    stem = Path(command.program).stem
    task = next((task for name, task in TASKS.items() if stem == name or stem.startswith(f"{name}_")), None)
    settings = path.parent / file if file is not None and (path.parent / file).is_file() else None
    options = {name: value for name, value in command.options.items() if value != file}
    options |= {name: _value(text) for name, mark, text in (f.partition("=") for f in command.files) if mark}
    if settings is not None:
        draft.read.append(f"line {command.line}: {file}")
    if command.starter == "trl" or task is not None:
        keys = {} if settings is None else read_keys(settings, settings.read_text(encoding="utf-8"))
        for word in (each for each in {*command.files, *([file] if file else [])} if "=" not in each):
            if settings is None or word != file:
                draft.unclear(f"line {command.line}: {word}", "it is no option, and no file of settings that is here")
        command.options = keys | options
        _example(command, stem, task, draft, count)
    elif settings is not None:
        read_file(settings, options).move(draft, count)
    elif program.is_file():
        script = Script(program, program.read_text(encoding="utf-8"), command.options)
        for name in script.unread_options():
            where = f"line {command.line}: --{name} {command.options[name]}"
            draft.unclear(where, "how the script uses it is unknown")
        for word in command.files:
            draft.unclear(f"line {command.line}: {word}", "how the script uses it is unknown")
        read = read_script(script)
        draft.read.append(f"{command.program}: {read.called}")
        read.move(draft, count)
    else:
        theirs = {k: v for k, v in command.options.items() if k in trainer.TABLE}
        if not theirs:
            raise RunError(
                "LS8191",
                f"--from: {path}, line {command.line}: {program} does not exist, so its options cannot be read",
            )
        draft.unclear(command.program, "the script is missing: its effect beyond these options is unknown", "task.name")
        trainer.move(command.options, draft, count)


def _unclear(command: Command, draft: RunDraft) -> None:
    """Add what the shell decides when it runs."""
    named = [each for options in (command.launcher, command.options) for each in options.items()]
    for name, value in [*named, *((each, each) for each in command.files)]:
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str) and "$" in each:
                where = f"line {command.line}: {name if name == each else f'{name}={each}'}"
                draft.unclear(where, "the variable is known only when the command runs")
    for each in command.stray:
        draft.unclear(each, "no command is before this option: a comment or a blank ends the line above")
    if command.repeated:
        draft.unclear(f"line {command.line}: {command.program}", "a loop of the shell repeats it")


def _launched(path: Path, command: Command, draft: RunDraft, read_file: Callable[..., Any]) -> int | None:
    """Set processes, machines and precision from the launcher's options. Returns the number of processes on all
    machines."""
    options = command.launcher
    file = options.get("config_file")
    if file is not None:
        if (path.parent / str(file)).is_file():
            read_file(path.parent / str(file)).move(draft, None)
            for key in ("batch_size", "micro_batches"):
                draft.keys.pop(key, None)
        else:
            draft.unclear(f"line {command.line}: --config_file {file}", "the file is missing", "launch.processes")
    each = next((number(options[name]) for name in _PROCESSES if name in options), None)
    machines = int(number(options.get("nnodes", options.get("num_machines"))) or 1)
    if each is None:
        each = draft.keys.get("launch.processes")
        machines = int(draft.keys.get("launch.machines", machines))
    elif "num_processes" in options:
        each = max(1, int(each) // machines)
    if each is not None:
        draft.set("launch.processes", int(each), f"line {command.line}")
    if machines > 1:
        draft.set("launch.name", "torchrun", f"line {command.line}")
        draft.set("launch.machines", machines, f"line {command.line}")
    if kind := options.get("mixed_precision"):
        draft.set("precision", {"no": "fp32", False: "fp32"}.get(kind, kind), f"mixed_precision, line {command.line}")
    if options.get("use_fsdp"):
        draft.set("strategy.name", "fsdp2", f"use_fsdp, line {command.line}")
    if options.get("use_deepspeed") or options.get("zero_stage"):
        stage = whole(options.get("zero_stage"), 2)
        draft.set("strategy.name", f"zero{stage}" if stage else "ddp", f"use_deepspeed, line {command.line}")
    for name, key in (("gradient_accumulation_steps", "micro_batches"), ("gradient_clipping", "optim.max_grad_norm")):
        if options.get(name) not in (None, 1):
            draft.lacks(f"line {command.line}: --{name} {options[name]}", f"{key} sets it", key)
    if file := options.get("deepspeed_config_file"):
        draft.deepspeed = file
    config = command.options.get("deepspeed")
    if isinstance(config, str) and (path.parent / config).is_file():
        draft.deepspeed = config
        command.options.pop("deepspeed")
    return None if each is None else int(each) * machines


def _left_open(value: Any) -> bool:
    """Return whether a value is `auto`, or a mapping of only such values: Trainer's arguments decide it."""
    if isinstance(value, Mapping):
        settings = [each for name, each in value.items() if name != "type"]
        return value.get("enabled") == "auto" or (bool(settings) and all(map(_left_open, settings)))
    return bool(value == "auto")


def _example(command: Command, stem: str, task: str | None, draft: RunDraft, processes: int | None) -> None:
    """Convert an example script of transformers or TRL, whose options are known."""
    if command.starter == "trl" or stem in NAMES["trl_examples"]:
        task = TASKS.get(command.program if command.starter == "trl" else stem)
        if task is None:
            raise RunError(
                "LS8192",
                f"--from: line {command.line}: trl {command.program} has no counterpart; expected sft, dpo or reward",
            )
        draft.set("task.name", task, f"trl {stem}")
        trainer.move_trl(command.options, draft, processes)
        return
    draft.set("task.name", task, command.program)
    options = dict(command.options)
    glue = options.pop("task_name", None) if task == "classification" else None
    trainer.move(options, draft, processes, trainer.TABLE | EXAMPLES)
    if not options.get("do_train"):
        draft.notes.append(f"line {command.line}: without --do_train it trains nothing")
    if glue is not None:
        _glue(str(glue).lower(), draft)
    if task in ("language_modeling", "masked_language_modeling"):
        draft.keys.setdefault("task.packing", not options.get("line_by_line"))
        key = "task.block_size" if task == "language_modeling" else "data.max_length"
        if key not in draft.keys:
            draft.unclear("block_size", "the tokenizer's own length, at most 1024", key)
    elif "data.max_length" not in draft.keys:
        defaults = {"classification": 128, "question_answering": 384, "translation": 1024, "summarization": 1024}
        if task in defaults:
            draft.set("data.max_length", defaults[task], f"by default of {command.program}")
        else:
            draft.unclear("max_seq_length", "it is the tokenizer's own length", "data.max_length")
    if task in ("translation", "summarization") and "task.target_length" not in draft.keys:
        draft.set("task.target_length", 128, f"max_target_length, by default of {command.program}")


def _glue(name: str, draft: RunDraft) -> None:
    if name not in NAMES["glue"]:
        draft.drop("task_name", name, f"supported tasks of GLUE: {', '.join(NAMES['glue'])}", True, ("data.source",))
        return
    draft.set("data.source", "nyu-mll/glue", "task_name")
    draft.set("data.config", name, "task_name")
    for key, column in zip(("text", "text_pair"), NAMES["glue"][name], strict=False):
        draft.set(f"task.{key}", column, f"task_name {name}")
    if name == "mnli":
        draft.set("data.validation", "validation_matched", "task_name mnli")
    if name == "stsb":
        draft.set("task.regression", True, "task_name stsb")


ACCELERATE = read_table("accelerate")
DEEPSPEED = read_table("deepspeed")


def move_accelerate(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None) -> None:
    """Convert a file of `accelerate config`: processes, machines and precision, but nothing of the training itself."""
    apply(ACCELERATE, theirs, draft)
    machines = whole(theirs.get("num_machines"))
    every = whole(theirs.get("num_processes"))
    draft.set(
        "launch.processes", max(1, every // machines), f"num_processes {every} on {quantity(machines, 'machine')}"
    )
    if machines > 1:
        draft.set("launch.name", "torchrun", f"num_machines {machines}")
        draft.set("launch.machines", machines, "num_machines")
        if theirs.get("main_process_ip"):
            place = f"{theirs['main_process_ip']}:{theirs.get('main_process_port') or 29500}"
            draft.set("launch.rendezvous", place, "main_process_ip and main_process_port")
    kind = str(theirs.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        _of_accelerate(theirs.get("deepspeed_config") or {}, draft, every)
    elif kind == "FSDP":
        draft.set("strategy.name", "fsdp2", "distributed_type FSDP")
    elif kind.startswith("MULTI_") or (kind == "NO" and every > 1):
        draft.set("strategy.name", "ddp", f"distributed_type {kind}")
    elif kind == "NO":
        draft.set("strategy.name", "single", "distributed_type NO")
    else:
        draft.drop("distributed_type", kind, "no strategy does this; `lockstep list` names them")
    accumulated = theirs.get("gradient_accumulation_steps")
    if accumulated is not None:
        draft.set("micro_batches", whole(accumulated) * every, f"gradient_accumulation_steps {accumulated} x {every}")
    if isinstance(config := theirs.get("dynamo_config"), Mapping):
        _compiled(config, draft)
    _at_least(draft, every)


def _compiled(config: Mapping[str, Any], draft: RunDraft) -> None:
    backend = str(config.get("dynamo_backend", "no")).lower()
    if backend == "inductor":
        draft.set("model.compile", True, "dynamo_config: dynamo_backend INDUCTOR")
    elif backend != "no":
        draft.drop("dynamo_config: dynamo_backend", backend, "model.compile compiles by inductor")
    for name, value in config.items() if backend == "inductor" else ():
        if name != "dynamo_backend" and value and value != "default":
            draft.drop(f"dynamo_config: {name}", value, "inductor compiles the layers, in its default mode")


def _of_accelerate(config: Mapping[str, Any], draft: RunDraft, processes: int) -> None:
    stage = whole(config.get("zero_stage"), 2)
    if (path := config.get("deepspeed_config_file")) not in (None, "none"):
        draft.deepspeed = path
    draft.set("strategy.name", f"zero{stage}" if stage else "ddp", f"zero_stage {stage}")
    if (clip := number(config.get("gradient_clipping"))) is not None:
        draft.set("optim.max_grad_norm", clip, "gradient_clipping")
    if (times := number(config.get("gradient_accumulation_steps"))) is not None:
        draft.set("micro_batches", int(times) * processes, f"gradient_accumulation_steps {int(times)} x {processes}")
    offload = {
        part: {"device": device}
        for part in ("offload_optimizer", "offload_param")
        if (device := str(config.get(f"{part}_device", "none")).lower()) != "none"
    }
    if offload:
        draft.set("strategy.options", {"zero_optimization": offload}, "offload_optimizer_device, offload_param_device")
    if config.get("zero3_save_16bit_model"):
        draft.drop("zero3_save_16bit_model", True, "the export is whole, and in fp32")


def move_deepspeed(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None, completed: bool = False) -> None:
    """Convert DeepSpeed settings. Values that only the run file can set are moved there; the rest goes into
    `strategy.options`. `completed`: `auto` values are in Trainer's arguments, which are read as well."""
    left_open = [name for name in theirs if name in DEEPSPEED and _left_open(theirs[name])]
    if left_open and not completed:
        why = "Trainer's arguments decide it: convert those with --from"
        draft.unclear(f"auto: {', '.join(left_open)}", why, "batch_size")
    rest = {name: value for name, value in theirs.items() if name not in DEEPSPEED and value != "auto"}
    zero = {name: value for name, value in (theirs.get("zero_optimization") or {}).items() if value != "auto"}
    stage = whole(zero.pop("stage", 0), 0)
    draft.set("strategy.name", f"zero{stage}" if stage else "ddp", f"zero_optimization: stage {stage}")
    if stage and zero:
        rest["zero_optimization"] = zero
    if stage and rest:
        draft.set("strategy.options", rest, "DeepSpeed's own, untouched")
        if reason := other_arithmetic(rest):
            draft.set(
                "strategy.exact", False, f"DeepSpeed's {reason[0]} changes the arithmetic compared to one process"
            )
    for name, value in {} if stage else rest.items():
        draft.drop(name, value, "without ZeRO DeepSpeed is not used")
    _steps(theirs, draft, processes)
    if (clip := number(theirs.get("gradient_clipping"))) is not None:
        draft.set("optim.max_grad_norm", clip, "gradient_clipping")
    if (every := number(theirs.get("steps_per_print"))) is not None and every < 10_000:
        draft.set("track.every", max(1, int(every)), "steps_per_print")
    if _enabled(theirs.get("bf16")):
        draft.set("precision", "bf16", "bf16 enabled")
    if _enabled(theirs.get("fp16")):
        draft.set("precision", "fp16", "fp16 enabled")
    _optimizer(theirs.get("optimizer"), draft)
    deepspeed_schedules.move(theirs.get("scheduler"), draft)


def _steps(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None) -> None:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole_, each, times = (number(theirs.get(name)) for name in ("train_batch_size", *names))
    if whole_ is not None:
        draft.set("batch_size", int(whole_), "train_batch_size")
        if each:
            draft.set("micro_batches", max(1, int(whole_ / each)), f"train_batch_size / {names[0]} {each:g}")
        elif times:
            draft.set("micro_batches", int(times) * (processes or 1), f"{names[1]} {times:g} x {processes or 1}")
    elif each is not None:
        batches(draft, int(each), whole(times), processes, names)


def _optimizer(section: Any, draft: RunDraft) -> None:
    if not isinstance(section, Mapping):
        return
    kind, values = str(section.get("type")), section.get("params") or {}
    kind = {"adamw": "AdamW", "lion": "Lion"}.get(kind.lower(), kind)  # DeepSpeed reads its own in any case
    adam = "AdamW" if kind.lower() == "adam" and values.get("adam_w_mode", True) else kind
    if adam not in NAMES["deepspeed_optimizers"]:
        draft.drop("optimizer", kind, "with DeepSpeed optim.name is adamw, sgd or lion", True, ("optim.name",))
        return
    draft.set("optim.name", NAMES["deepspeed_optimizers"][adam], f"optimizer {kind}")
    ours, defaults = NAMES["deepspeed_optimizer_options"], {"lr": 1e-3, "weight_decay": 0.0}
    defaults |= {"momentum": 0.0} if adam == "SGD" else {}
    decays_all(draft, number(values.get("weight_decay")))
    for name, value in (defaults | values).items():
        if name in ours and value != "auto":
            draft.set(f"optim.{ours[name]}", value if isinstance(value, list) else number(value), f"optimizer: {name}")
        elif name not in (*ours, "adam_w_mode", "torch_adam"):
            draft.drop(f"optimizer: {name}", value, "optim has no such key", True, ("optim.name",))


def _enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _at_least(draft: RunDraft, processes: int) -> None:
    """Make sure that there are at least as many micro-batches as processes."""
    if processes > draft.keys.get("micro_batches", 8):
        draft.set("micro_batches", processes, f"one for each of {processes} processes")
