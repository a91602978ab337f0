"""Table of commands, the texts of `lockstep` and `lockstep --help`, and the arguments that several commands share. One
file per purpose holds the commands.

For a command NAME, its file has `NAME_arguments(parser)` and `run_NAME(args)`, which returns the exit status. `lockstep
--help` prints the table without importing any command. To add a command, write these two functions and add a line here;
or give another distribution an entry point `NAME` in the group `lockstep.commands`, whose module has the two functions.
For an existing command, `NAME_arguments` adds options, and `run_NAME` returns None if none of them was given.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

from lockstep.config import plugins
from lockstep.config.errors import RunError, coded

if TYPE_CHECKING:
    from lockstep.config.run import Run


@dataclass(frozen=True)
class Subcommand:
    """A command of the table."""

    text: str  # what it does
    models: bool = False  # builds models of transformers, which need docstrings: `python -OO` is refused
    computes: bool = False  # may run for long without output: on a terminal a line shows the current activity
    imports: bool = False  # mostly imports: garbage collection of new modules would take a tenth of its time
    writes: bool = False  # writes its results to files: incomplete standard output is not a failure


# Purpose -> command -> what it does, in the order of `lockstep --help`.
PURPOSES = {
    "First steps": {
        "init": Subcommand(
            "write a commented run file for your data, after a few questions", models=True, imports=True, writes=True
        ),
        "train": Subcommand(
            "train or resume a run file; without one, the built-in quick start", models=True, writes=True
        ),
        "predict": Subcommand(
            "apply a run's exported model, or one of its checkpoints, to texts", models=True, computes=True
        ),
        "verify": Subcommand(
            "compare a job with one process, or any two training commands", models=True, computes=True
        ),
        "trace": Subcommand("record each optimizer step of any training command, unchanged"),
    },
    "Before a run": {
        "plan": Subcommand(
            "check a run file as train does; show model, steps and memory", models=True, computes=True, imports=True
        ),
        "doctor": Subcommand("show what this machine can run; with --processes, measure the links between processes"),
        "list": Subcommand(
            "list the tasks, strategies, optimizers, launchers and trackers that a run file can name", imports=True
        ),
        "schema": Subcommand("print the JSON Schema of run files", imports=True),
        "bench": Subcommand(
            "measure throughput and memory of a job by processes, strategy and micro-batches", models=True
        ),
    },
    "While it runs": {
        "status": Subcommand("show the state and the progress of a run, and whether it can be resumed", imports=True),
        "logs": Subcommand("print the log of a run"),
        "stop": Subcommand("ask a run to save a checkpoint and end with status 75"),
        "report": Subcommand("write the report page of a run or a trace, or one that compares several runs"),
    },
    "Afterwards": {
        "evaluate": Subcommand(
            "score the exported model of a run, or one of its checkpoints", models=True, computes=True
        ),
        "push": Subcommand("upload the exported model to the Hub (token from HF_TOKEN)", writes=True),
        "sweep": Subcommand(
            "train a run file under several values of its keys and compare the results",
            models=True,
            computes=True,
            writes=True,
        ),
    },
    "What was computed": {
        "diff": Subcommand(
            "name the first step and the first value in which two runs or traces differ", models=True, computes=True
        ),
        "replay": Subcommand(
            "recompute a step of a run and compare it with its fingerprints", models=True, computes=True
        ),
        "branch": Subcommand("start a run from the first N steps of another one", models=True, writes=True),
        "attest": Subcommand(
            "record the hashes of a finished run's inputs, steps and results, optionally signed", writes=True
        ),
        "audit": Subcommand(
            "verify an attested run: check hashes and signature, recompute random steps", models=True, computes=True
        ),
    },
    "Between machines": {
        "rendezvous": Subcommand("serve the rendezvous of torchrun jobs from a machine that does not train")
    },
}
HELP = {name: command.text for commands in PURPOSES.values() for name, command in commands.items()}


def of(name: str) -> Subcommand:
    """Return the table's entry of a command; a default one for a command of another distribution."""
    return next((commands[name] for commands in PURPOSES.values() if name in commands), Subcommand(""))


def file_of(name: str) -> str:
    """Name of the file that holds a command: its purpose."""
    return next(purpose for purpose, commands in PURPOSES.items() if name in commands).lower().replace(" ", "_")


# Purpose -> a command line, for new users.
FIRST = {
    "prepare": "lockstep init run.yaml --data FOLDER",
    "check": "lockstep plan run.yaml",
    "train": "lockstep train run.yaml",
    "verify": "lockstep verify run.yaml",
    "use": "lockstep predict outputs/NAME 'a text'",
}


def names() -> list[str]:
    """Names of all commands, including those of other distributions."""
    return [*HELP, *(name for name in plugins.entries("commands") if name not in HELP)]


_GOES_ON = (
    "the same `lockstep train` resumes from the newest checkpoint; `lockstep branch OUTPUT@N` starts from an older one"
)
# Names in other programs -> the equivalent here.
ELSEWHERE = {
    **dict.fromkeys(("resume", "restart", "continue"), _GOES_ON),
    **dict.fromkeys(("fit", "run", "finetune", "fine_tune", "pretrain", "launch"), "use `lockstep train`"),
    **dict.fromkeys(("eval", "test", "score"), "use `lockstep evaluate`"),
    **dict.fromkeys(("infer", "inference", "generate", "pipeline", "chat"), "use `lockstep predict`"),
    **dict.fromkeys(("validate", "dry_run", "check"), "`lockstep plan` checks a run file, `lockstep doctor` a machine"),
    **dict.fromkeys(("upload", "publish"), "use `lockstep push`"),
    **dict.fromkeys(("export", "save"), "`lockstep train` writes OUTPUT/export"),
    **dict.fromkeys(("env", "info"), "use `lockstep doctor`"),
    **dict.fromkeys(("kill", "cancel", "terminate"), "use `lockstep stop`"),
    **dict.fromkeys(("tune", "search", "optimize", "hpo"), "use `lockstep sweep`"),
    **dict.fromkeys(("convert", "import", "migrate", "from"), "use `lockstep init RUN.yaml --from FILE`"),
    **dict.fromkeys(("new", "create", "configure"), "use `lockstep init`"),
    **dict.fromkeys(("config", "keys"), "`lockstep schema` prints every key of a run file"),
    **dict.fromkeys(
        ("compare", "reproduce"), "`lockstep diff` compares two runs, `lockstep verify` a job with one process"
    ),
    **dict.fromkeys(("ps", "progress", "watch"), "use `lockstep status`"),
    "ls": "use `lockstep list`",
    "help": "`lockstep COMMAND --help` shows a command's options",
    **dict.fromkeys(("version", "_v", "_V"), "use `lockstep --version`"),
}


def unknown_option(command: str, option: str, takes_keys: bool = False) -> str:
    """Message for an unknown option of a command. `takes_keys`: the command reads a run file and keys of it."""
    name = option.lstrip("-")
    hint = _GOES_ON if name.startswith("resume") else ""
    if takes_keys and not hint and option.startswith("--"):
        hint = _hint_of_key(name) or _elsewhere(name) or ""
    return f"unknown argument {option!r}; {f'{hint}; ' if hint else ''}see lockstep {command} --help"


def _hint_of_key(name: str) -> str | None:
    """Explain an option without a value that is a key, or close to one. None if it is neither."""
    from lockstep.config import error_messages, key_aliases
    from lockstep.config.run import Run

    ours = error_messages.keys_of(Run)
    if (home := key_aliases.place(name, ours)) is not None:
        return home
    key = name.replace("-", "_")
    if key not in ours:
        key = next(iter(difflib.get_close_matches(key, ours, 1, cutoff=key_aliases.CLOSE)), "")
    return f"a key of the run file takes a value: {key}=VALUE" if key else None


def _elsewhere(name: str) -> str | None:
    """Equivalent of another program's command or option; None if unknown."""
    return ELSEWHERE.get(name.replace("-", "_"), ELSEWHERE.get(name.lower().replace("-", "_")))


def refuse_option_for_file(command: str, words: list[str]) -> None:
    """Refuse `--config RUN.yaml`: the run file has no option. Errors: `RunError`."""
    for option, value in pairwise([part for word in words for part in word.split("=", 1)]):
        if option in ("-c", "-f", "--config", "--config-file", "--config_file", "--file") and _is_yaml(value):
            raise RunError(
                "LS8421",
                f"unknown argument {option!r}; the run file stands without an option: lockstep {command} {value}",
            )


def _is_yaml(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def unknown(name: str) -> str | None:
    """Message for an unknown command; None if the command exists."""
    if name in HELP or name in (added := plugins.entries("commands")):
        return None
    near = difflib.get_close_matches(name, [*HELP, *added], 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    if (what := _elsewhere(name)) is not None:
        hint = f"{what}. "
    elif _is_yaml(name):
        hint = f"use `lockstep train {name}`. "
    return coded("LS8420", f"unknown command {name!r}; {hint}`lockstep --help` lists them all")


def modules_of(name: str) -> list[ModuleType]:
    """Import the modules of a command: those of distributions that add options to it, then its own. Errors: `RunError`
    if one cannot be imported."""
    try:
        if name not in HELP:
            entry = plugins.entry_of("commands", name, "command")
            return [] if entry is None else [plugins.load_entry(entry, "command")]
        more = [plugins.load_entry(entry, "command") for entry in plugins.entries("commands").get(name, [])]
    except plugins.PluginError as error:
        raise RunError(error.code, error.message) from error
    return [*more, importlib.import_module(f"lockstep.commands.{file_of(name)}")]


def description(name: str) -> str:
    """One-line description of a command."""
    if name in HELP:
        return HELP[name]
    return plugins.summary_of(plugins.entries("commands")[name][0])


def first_visit() -> str:
    """Text of plain `lockstep`: five commands by purpose, and the names of the others."""
    first = {line.split()[1]: purpose for purpose, line in FIRST.items()}
    lines = ["Train transformers: the same weights on one process or many, bit for bit.", ""]
    for name, purpose in first.items():
        lines += [f"  {purpose:<9}{FIRST[purpose]}", *_wrapped(" " * 11, HELP[name])]
    lines += ["", "`lockstep train` alone trains the built-in quick start. Further commands:"]
    for purpose, commands in PURPOSES.items():
        if others := [name for name in commands if name not in first]:
            lines.append(f"  {purpose:<19}{'  '.join(others)}")
    if added := [name for name in names() if name not in HELP]:
        lines.append(f"  {'Other packages':<19}{'  '.join(added)}")
    return "\n".join([*lines, "", "`lockstep --help` describes each, `lockstep COMMAND --help` its options."])


def _wrapped(first: str, text: str) -> list[str]:
    """Wrap a text behind `first` for a terminal of 80 columns."""
    return textwrap.wrap(text, 79, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)


def overview() -> str:
    """Text of `lockstep --help`."""
    added = {name: entries[0] for name, entries in plugins.entries("commands").items() if name not in HELP}
    lines = [
        "usage: lockstep COMMAND ...",
        "",
        "Train transformers: the same weights on one process or many, bit for bit.",
    ]
    for purpose, commands in PURPOSES.items():
        lines += [
            "",
            f"{purpose}:",
            *(line for name in commands for line in _wrapped(f"  {name:<12}", HELP[name])),
        ]
    if added:
        lines += ["", "Commands of other distributions:"]
        lines += [f"  {name:<12}{plugins.summary_of(e)} ({plugins.distribution_of(e)})" for name, e in added.items()]
    lines += ["", "`lockstep COMMAND --help` shows its options, `lockstep --version` the version,"]
    return "\n".join([*lines, "`lockstep --completion bash|zsh|fish` a completion script."])


# -- arguments that commands share: `[RUN.yaml] [key=value ...]`, also as `--key value`, and `--json` ------------------


def run_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all commands with a run file share."""
    parser.add_argument("run", nargs="?", metavar="RUN.yaml", help="the run file; default: the quick start")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override keys, for example optim.learning_rate=3e-5"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json` to a command that prints facts or a table on a console; `lockstep.cli` records them."""
    parser.add_argument("--json", dest="answer_json", action="store_true", help="print one JSON object instead of text")


def run_of(args: argparse.Namespace) -> Run:
    """Load the requested run; without a file, the quick start."""
    from lockstep.config.run import QUICK_START, load

    return load(*file_and_overrides(args), QUICK_START, trains=True)


def file_and_overrides(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Split words into the run file, if given, and the overrides."""
    words = [word for word in (args.run, *args.overrides) if word is not None]
    path = next((word for word in words if "=" not in word), None)
    if path is not None:
        words.remove(path)
    return path, words


def with_overrides_first(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Rewrite `--key value` and `--key=value` as `key=value`, which argparse accepts in any order. The command's own
    options come last, so that an option with several values cannot consume the run file."""
    own = {name: action for action in parser._actions for name in action.option_strings}
    paths, options, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if name in own:
            options.append(word)
            if own[name].nargs in ("+", "*"):  # takes several values
                while rest and not rest[0].startswith("-") and "=" not in rest[0]:
                    options.append(rest.pop(0))
            elif own[name].nargs != 0 and not equals and rest:
                options.append(rest.pop(0))
        elif word.startswith("--") and (equals or rest):
            paths.append(word[2:] if equals else f"{word[2:]}={rest.pop(0)}")
        else:
            paths.append(word)
    return [*paths, *options]
