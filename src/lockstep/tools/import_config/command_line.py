"""A command line that starts a training, as it stands in a shell script.

In: the text of a .sh file. Out: what moves it: the launcher's options (torchrun, accelerate, deepspeed), and the
program's own: those of the examples of transformers and TRL by their names, of any other script that is here by the
script. Nothing is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import error_messages as messages
from lockstep.config.run import RunError
from lockstep.tools.import_config import engines, trainer, trl
from lockstep.tools.import_config.script import Script
from lockstep.tools.import_config.table import CACHED, Imported, Row, Table, number

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "trl", "llamafactory-cli", "axolotl")
# The examples of transformers and TRL, by what their names begin with.
TASKS = {
    "run_glue": "classification",
    "run_classification": "classification",
    "run_xnli": "classification",
    "run_ner": "token_classification",
    "run_clm": "language_modeling",
    "run_mlm": "masked_language_modeling",
    "run_qa": "question_answering",
    "run_translation": "translation",
    "run_summarization": "summarization",
    "sft": "language_modeling",
    "dpo": "preference",
    "cpo": "preference",
    "reward_modeling": "reward",
    "reward": "reward",
}
_TRL = ("sft", "dpo", "cpo", "reward_modeling", "reward")
# GLUE's columns; the label is called label.
_GLUE = {
    "cola": ("sentence",),
    "sst2": ("sentence",),
    "mrpc": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
    "rte": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "qnli": ("question", "sentence"),
    "mnli": ("premise", "hypothesis"),
}
# Options of those examples, beside the fields of `TrainingArguments`.
EXAMPLES: Table = {
    "text_column": Row("task.source", "of summarization"),
    "summary_column": Row("task.target", "of summarization"),
    "source_lang": Row("task.source", "of translation"),
    "target_lang": Row("task.target", "of translation"),
    "max_target_length": Row("task.target_length"),
    "mlm_probability": Row("task.mlm_probability", "of masked language modelling"),
    "doc_stride": Row("task.stride", "of question answering"),
    "max_answer_length": Row("task.answer_tokens", "of question answering"),
    "version_2_with_negative": Row("task.unanswerable", "of question answering"),
    "max_eval_samples": Row("evaluate.limit"),
    "torch_dtype": Row(
        "model.dtype", "float32, bfloat16", values={"float32": "float32", "bfloat16": "bfloat16", "auto": None}
    ),
    "attn_implementation": Row("model.attention"),
    "pad_to_max_length": Row("", "what is padded changes nothing", default=True),
    "line_by_line": Row("", "task.packing: false", joined=True),
    "max_predict_samples": Row("", "a test split is always used whole"),
    "preprocessing_num_workers": Row("", CACHED),
    "overwrite_cache": Row("", CACHED),
    "cache_dir": Row("", "HF_HOME says where downloads are kept"),
    "token": Row("", "secrets come from the environment: HF_TOKEN"),
    "use_fast_tokenizer": Row("", "a fast tokenizer is used where there is one", default=True),
    "ignore_mismatched_sizes": Row("", "a head of another size is drawn anew"),
    "low_cpu_mem_usage": Row("", "weights are loaded once a process"),
    "return_entity_level_metrics": Row("", "a task has its own scores"),
}
_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
_SWITCHES = {  # of the launchers, which take no value
    *(
        "multi_gpu",
        "use_deepspeed",
        "use_fsdp",
        "cpu",
        "standalone",
        "no_python",
        "module",
        "m",
        "same_network",
        "debug",
    ),
    *("quiet", "dynamo_use_dynamic", "dynamo_use_fullgraph", "use_megatron_lm", "no_local_rank", "u"),
}


@dataclass
class Command:
    """One command of a shell script."""

    line: int
    launcher: dict[str, Any] = field(default_factory=dict)  # options of torchrun and its kin
    program: str = ""  # the script, or the word after trl
    options: dict[str, Any] = field(default_factory=dict)  # of the program
    files: list[str] = field(default_factory=list)  # words that are no options
    starter: str = ""


def read(
    path: Path, text: str, read_file: Callable[[Path], Any], read_script: Callable[[Script], Any]
) -> Callable[[Imported, int | None], None]:
    """Errors: `RunError` for a file with no such command, or with several."""
    commands = [each for each in _commands(text) if each.program]
    if len(commands) != 1:
        lines = ", ".join(str(each.line) for each in commands)
        raise RunError(
            f"--from: {path} "
            + (
                f"starts several programs, on lines {lines}; leave one"
                if commands
                else "starts no training that is known"
            )
            + f": a command of {', '.join(LAUNCHERS)}"
        )
    return lambda moved, processes: _move(path, commands[0], moved, processes, read_file, read_script)


# -- the shell ---------------------------------------------------------------------------------------------------------


def _commands(text: str) -> list[Command]:
    """Commands that start something, with the variables that were set before them."""
    variables: dict[str, str] = {}
    found = []
    number_of = 0
    for whole in re.sub(r"\\\r?\n", "\x00", text).splitlines():
        number_of += 1
        line, here = whole.replace("\x00", " "), number_of
        number_of += whole.count("\x00")
        try:
            words = shlex.split(_filled(line, variables), comments=True)
        except ValueError:
            continue
        while words and (match := re.fullmatch(r"(?:export\s+)?(\w+)=(.*)", words[0], re.S)):
            variables[match[1]] = match[2]
            words = words[1:]
        if words[:1] == ["export"]:
            for word in words[1:]:
                name, equals, value = word.partition("=")
                if equals:
                    variables[name] = value
            continue
        while words and words[0] in ("srun", "nohup", "time", "exec", "uv", "run", "env"):
            words = words[1:]
        if words and Path(words[0]).name in LAUNCHERS:
            found.append(_command(words, here))
    return found


def _filled(line: str, variables: Mapping[str, str]) -> str:
    """`$NAME`, `${NAME}` and `${NAME:-other}`; those that are not known stay."""

    def value(match: re.Match[str]) -> str:
        name, other = match[1] or match[2], match[3]
        return variables.get(name, other if other is not None else match[0])

    return re.sub(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})", value, line)


def _command(words: list[str], line: int) -> Command:
    starter = Path(words[0]).name
    rest = words[1:]
    command = Command(line, starter=starter)
    if starter == "accelerate" and rest[:1] == ["launch"]:
        rest = rest[1:]
    elif starter == "accelerate":
        return command
    if starter.startswith("python") and rest[:1] == ["-m"] and rest[1:2] and rest[1].startswith("torch.distributed"):
        rest = rest[2:]  # torch's launcher as a module
    if starter in ("trl", "llamafactory-cli", "axolotl"):
        command.program, rest = (rest[0], rest[1:]) if rest else ("", [])
    else:
        while rest and not rest[0].endswith(".py"):
            if not rest[0].startswith("-") and {"m", "module"} & command.launcher.keys():
                break  # python -m package.module
            rest = _option(rest, command.launcher, _SWITCHES)
        command.program, rest = (rest[0], rest[1:]) if rest else ("", [])
    while rest:
        if rest[0] in ("|", "2>&1", "&", ">", ">>", "&&", ";", "||"):
            break
        if rest[0].startswith("--"):
            rest = _option(rest, command.options, set())
        else:
            command.files.append(rest[0])
            rest = rest[1:]
    command.options = _negated(command.options)
    return command


def _negated(options: Mapping[str, Any]) -> dict[str, Any]:
    """`--no_NAME` of HfArgumentParser as NAME: false, where NAME is an option that is known."""
    known = trainer.TABLE.keys() | EXAMPLES.keys() | trl.TABLE.keys()
    found: dict[str, Any] = {}
    for name, value in options.items():
        plain = name.removeprefix("no_")
        found |= {plain: False} if value is True and name not in known and plain in known else {name: value}
    return found


def _option(rest: list[str], into: dict[str, Any], switches: set[str]) -> list[str]:
    """Take one option, with its values."""
    word, rest = rest[0], rest[1:]
    if not word.startswith("-"):
        return rest
    name, equals, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if equals:
        into[name] = messages.read_yaml(value)
        return rest
    values = []
    while rest and name not in switches and not rest[0].startswith("--") and not rest[0].endswith(".py"):
        if rest[0] in ("|", "2>&1", "&", ">", ">>", "&&", ";", "||"):
            break
        values.append(messages.read_yaml(rest[0]) if rest[0] else "")
        rest = rest[1:]
        if switches:  # a launcher's option takes one value
            break
    into[name] = True if not values else values[0] if len(values) == 1 else values
    return rest


# -- what it comes to --------------------------------------------------------------------------------------------------


def _move(
    path: Path,
    command: Command,
    moved: Imported,
    processes: int | None,
    read_file: Callable[[Path], Any],
    read_script: Callable[[Script], Any],
) -> None:
    moved.read.append(f"line {command.line}: {command.starter} ... {command.program}")
    for options in (command.launcher, command.options):
        for name, value in options.items():
            if isinstance(value, str) and "$" in value:
                moved.unclear(f"line {command.line}: {name}={value}", "the variable is known when the command runs")
    count = _launched(path, command, moved, read_file)
    count = processes or count
    file = next(
        (f for f in (*command.files, str(command.options.get("config", ""))) if f.endswith((".yaml", ".yml", ".json"))),
        None,
    )
    program = path.parent / command.program
    stem = Path(command.program).stem
    task = next((task for name, task in TASKS.items() if stem == name or stem.startswith(f"{name}_")), None)
    if file is not None and (path.parent / file).is_file():
        read_file(path.parent / file).move(moved, count)
        moved.read.append(f"line {command.line}: {file}")
    elif command.starter == "trl" or task is not None:
        _example(command, stem, task, moved, count)
    elif program.is_file():
        script = Script(program, program.read_text(encoding="utf-8"), command.options)
        read = read_script(script)
        moved.read.append(f"{command.program}: {read.called}")
        read.move(moved, count)
    else:
        theirs = {k: v for k, v in command.options.items() if k in trainer.TABLE}
        if not theirs:
            raise RunError(
                f"--from: {path}, line {command.line}: {program} is not there, so its options cannot be read"
            )
        moved.unclear(
            command.program,
            "the script is not here: what it does besides these options is not known",
            by=("task.name",),
        )
        trainer.move(command.options, moved, count)


def _launched(path: Path, command: Command, moved: Imported, read_file: Callable[[Path], Any]) -> int | None:
    """Processes, machines and precision, as the launcher is told. Returns the processes of all machines."""
    options = command.launcher
    file = options.get("config_file")
    if file is not None:
        if (path.parent / str(file)).is_file():
            read_file(path.parent / str(file)).move(moved, None)
            for key in ("batch_size", "micro_batches"):
                moved.keys.pop(key, None)
        else:
            moved.unclear(
                f"line {command.line}: --config_file {file}", "the file is not here", by=("launch.processes",)
            )
    each = next((number(options[name]) for name in _PROCESSES if name in options), None)
    machines = int(number(options.get("nnodes", options.get("num_machines"))) or 1)
    if each is None:
        each = moved.keys.get("launch.processes")
        machines = int(moved.keys.get("launch.machines", machines))
    elif "num_processes" in options:
        each = max(1, int(each) // machines)
    if each is not None:
        moved.set("launch.processes", int(each), f"line {command.line}")
    if machines > 1:
        moved.set("launch.name", "torchrun", f"line {command.line}")
        moved.set("launch.machines", machines, f"line {command.line}")
    if kind := options.get("mixed_precision"):
        moved.set("precision", {"no": "fp32", False: "fp32"}.get(kind, kind), f"mixed_precision, line {command.line}")
    if options.get("use_fsdp"):
        moved.set("strategy.name", "fsdp2", f"use_fsdp, line {command.line}")
    if options.get("use_deepspeed") or options.get("zero_stage"):
        stage = int(number(options.get("zero_stage")) or 2)
        moved.set("strategy.name", f"zero{stage}" if stage else "ddp", f"use_deepspeed, line {command.line}")
    config = command.options.get("deepspeed")
    if isinstance(config, str) and (path.parent / config).is_file():
        values = messages.read_yaml((path.parent / config).read_text(encoding="utf-8"))
        engines.move_deepspeed({k: v for k, v in values.items() if not _left_open(v)}, moved, None)
        command.options.pop("deepspeed")
    return None if each is None else int(each) * machines


def _left_open(value: Any) -> bool:
    """Whether a value is `auto`, or a mapping of such: what the Trainer's own settings say."""
    if isinstance(value, Mapping):
        return bool(value) and all(_left_open(each) for name, each in value.items() if name not in ("type", "enabled"))
    return value == "auto"


def _example(command: Command, stem: str, task: str | None, moved: Imported, processes: int | None) -> None:
    """One of the examples of transformers or TRL, whose options are known."""
    if command.starter == "trl" or stem in _TRL:
        task = TASKS.get(command.program if command.starter == "trl" else stem)
        if task is None:
            raise RunError(
                f"--from: line {command.line}: trl {command.program} has no counterpart: sft, dpo and reward have"
            )
        moved.set("task.name", task, f"trl {stem}")
        trl.move(command.options, moved, processes)
        return
    moved.set("task.name", task, command.program)
    options = dict(command.options)
    glue = options.pop("task_name", None) if task == "classification" else None
    trainer.move(options, moved, processes, trainer.TABLE | EXAMPLES)
    if not options.get("do_train"):
        moved.notes.append(f"line {command.line}: without --do_train it trains nothing")
    if glue is not None:
        _glue(str(glue).lower(), moved)
    if task in ("language_modeling", "masked_language_modeling"):
        moved.keys.setdefault("task.packing", not options.get("line_by_line"))
        key = "task.block_size" if task == "language_modeling" else "data.max_length"
        if key not in moved.keys:
            moved.unclear("block_size", "it is the tokenizer's own length, at most 1024", by=(key,))
    elif "data.max_length" not in moved.keys:
        defaults = {"classification": 128, "question_answering": 384, "translation": 1024, "summarization": 1024}
        if task in defaults:
            moved.set("data.max_length", defaults[task], f"by default of {command.program}")
        else:
            moved.unclear("max_seq_length", "it is the tokenizer's own length", by=("data.max_length",))


def _glue(name: str, moved: Imported) -> None:
    if name not in _GLUE:
        moved.drop("task_name", name, f"of GLUE are known {', '.join(_GLUE)}", True, ("data.source",))
        return
    moved.set("data.source", "nyu-mll/glue", "task_name")
    moved.set("data.config", name, "task_name")
    for key, column in zip(("text", "text_pair"), _GLUE[name], strict=False):
        moved.set(f"task.{key}", column, f"task_name {name}")
    if name == "mnli":
        moved.set("data.validation", "validation_matched", "task_name mnli")
    if name == "stsb":
        moved.set("task.regression", True, "task_name stsb")
