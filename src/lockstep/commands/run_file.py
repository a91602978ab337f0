"""Arguments that commands share: `[RUN.yaml] [key=value ...]`, also as `--key value` and `--key=value`, and `--json`.

In: words of the command line. Out: a `Run`. Errors: `RunError`.
"""

from __future__ import annotations

import argparse

from lockstep.config.run import QUICK_START, Run, load


def arguments(parser: argparse.ArgumentParser) -> None:
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
    return load(*split(args), QUICK_START, trains=True)


def split(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Split words into the run file, if given, and the overrides."""
    words = [word for word in (args.run, *args.overrides) if word is not None]
    path = next((word for word in words if "=" not in word), None)
    if path is not None:
        words.remove(path)
    return path, words


def joined(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
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
