"""The `lockstep` command: parses arguments and runs the module of the subcommand. Imports no torch at the top, so that
`lockstep --help` is fast.

In: arguments. Out: an exit status: 0 done, 1 failed, 2 bad usage or run file, 75 stopped on request and resumable.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType

from lockstep import commands
from lockstep._version import __version__
from lockstep.config import plugins
from lockstep.config.errors import OF_DISKS, REMEDIES, RunError, coded, reason_of
from lockstep.distributed.process_limits import lacking_threads, no_memory, no_space, no_threads
from lockstep_trace import streams
from lockstep_trace.coded import VERBOSE, TraceError

_starved: list[str] = []  # commands that ended for lack of threads or memory
_RESUMED = ("train", "branch")  # commands that go on from a checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Run the `lockstep` command and return its exit status."""
    streams.make_safe()
    if arguments is None:
        atexit.register(_leave)  # the last one
        atexit.register(gc.freeze)  # skip a slow collection over thousands of modules at exit
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status = _answer_words(words)
    except SystemExit as ended:  # argparse has printed help, or a message
        if ended.code == 0 and _output_is_incomplete():
            return 1
        raise
    return 1 if status == 0 and not commands.of(words[0]).writes and _output_is_incomplete() else status


def _leave() -> None:
    """End a process that had too few threads without the exit functions of native libraries, which may wait for
    threads that could not be started."""
    if _starved:
        sys.stderr.flush()
        os._exit(2)


def _output_is_incomplete() -> bool:
    """Report printed output that could not be written. Returns whether there is any."""
    if (lost := streams.unwritten()) is None:
        return False
    from lockstep.track.console import error

    text = f"standard output: {lost.strerror}; the printed output is incomplete"
    error(coded("LS0230", "; ".join([text, *([REMEDIES[lost.errno]] if lost.errno in REMEDIES else [])])))
    return True


def _answer_words(words: list[str]) -> int:
    if words[:1] == ["--version"]:
        print(f"lockstep {__version__}")
        return 0
    if not words:
        print(commands.first_visit())
        return 2
    if words[0] in ("-h", "--help"):
        print(commands.overview())
        return 0
    if words[0] == "--completion":
        return _completion(words[1:])
    if (text := commands.unknown(words[0])) is not None:
        print(f"lockstep: {text}", file=sys.stderr)
        return 2
    return _command(words[0], words[1:])


def _completion(words: list[str]) -> int:
    from lockstep.commands import completion
    from lockstep.track.console import error

    try:
        return completion.run_completion(words)
    except RunError as caught:
        error(str(caught))
        return 2


def _command(name: str, words: list[str]) -> int:
    """Run one command. Its modules are imported here, so that `lockstep --help` does not import them."""
    from lockstep.track.console import error, strike_tracebacks

    strike_tracebacks()
    if commands.of(name).models and (text := _no_models()) is not None:
        error(text)
        return 2
    _drop_leftovers(name)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its socket warnings print C++ stack traces
    if commands.of(name).imports:
        gc.set_threshold(1_000_000, 100, 100)
    known = argparse.Namespace()
    try:
        modules = commands.modules_of(name)
        _parse(name, modules, words, known)
        return _answer(name, modules, known)
    except (RunError, TraceError) as caught:
        if os.environ.get("RANK", "0") == "0":
            error(str(caught))
        if getattr(known, "debug", False):
            raise
        return 2
    except (OSError, UnicodeEncodeError) as caught:
        if (text := _unusable_path(caught)) is None and (text := _used_up(caught)) is None:
            raise
        error(text)
        if getattr(known, "debug", False):
            raise
        return 2
    except (RuntimeError, MemoryError) as caught:
        if (text := _used_up(caught)) is None or getattr(known, "debug", False):
            raise
        error(text)
        _starved.append(name)
        return 2
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            streams.put(sys.stderr, streams.CLEAR, flush=True)
        resumes = "; the same command resumes from the newest checkpoint, if there is one" * (name in _RESUMED)
        error(coded("LS0012", f"interrupted{resumes}"))
        return 130


def _no_models() -> str | None:
    """Return why no model can be built in this process, or None."""
    if sys.flags.optimize > 1:
        return coded(
            "LS0210",
            "python -OO (PYTHONOPTIMIZE=2) removes docstrings, which transformers reads to build models; unset "
            "PYTHONOPTIMIZE, or set it to 1",
        )
    if (text := no_space()) is not None:
        return coded("LS0234", text)
    return None if (text := lacking_threads()) is None else coded("LS0236", text)


def _used_up(caught: Exception) -> str | None:
    """Return the message for an error by a limit of threads or memory, or None for other errors."""
    if isinstance(caught, MemoryError):
        return coded("LS0235", no_memory())
    return None if (text := no_threads(caught)) is None else coded("LS0233", text)


def _parse(name: str, modules: Sequence[ModuleType], words: list[str], known: argparse.Namespace) -> None:
    """Write a command's arguments into `known`. Errors: `RunError`."""
    parser = argparse.ArgumentParser(prog=f"lockstep {name}", description=commands.description(name))
    for module in reversed(modules):
        getattr(module, f"{name.replace('-', '_')}_arguments")(parser)
    for word in words:
        refuse_missing(name, parser, word.partition("=")[0])
    if takes_run_file(parser):
        commands.refuse_option_for_file(name, words)
        words = commands.with_overrides_first(parser, words)
    _, rest = parser.parse_known_args(words, known)
    if getattr(known, "verbose", False):
        os.environ[VERBOSE] = "1"
    if hasattr(known, "overrides") and all("=" in word and not word.startswith("-") for word in rest):
        known.overrides, rest = [*known.overrides, *rest], []  # argparse accepts none after another option
    if hasattr(known, "words") and not any(word.startswith("-") for word in rest):
        known.words, rest = [*known.words, *rest], []  # same for these
    if rest:
        raise RunError("LS0010", commands.unknown_option(name, rest[0], takes_run_file(parser)))


def _drop_leftovers(name: str) -> None:
    """Remove torchrun's variables that another job has left in this terminal: a rank has both RANK and WORLD_SIZE."""
    left = [variable for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if variable in os.environ]
    if not left or {"RANK", "WORLD_SIZE"} <= set(left):
        return
    if name == "train":
        values = " ".join(f"{variable}={os.environ[variable]}" for variable in left)
        lacking = " and ".join(each for each in ("RANK", "WORLD_SIZE") if each not in left)
        print(f"note: {values} in the environment is ignored, because {lacking} is not set", file=sys.stderr)
    for variable in left:
        del os.environ[variable]


def _unusable_path(caught: OSError | UnicodeEncodeError) -> str | None:
    """Return the message for a file or path that cannot be used, or for too few open files; None for other errors."""
    if isinstance(caught, UnicodeEncodeError):
        if caught.encoding != sys.getfilesystemencoding() or caught.encoding == "utf-8":
            return None
        return coded(
            "LS0231",
            f"{caught.object!r}: this locale ({caught.encoding}) has no name for such a file; set PYTHONUTF8=1, or a "
            "UTF-8 locale such as LC_ALL=C.UTF-8",
        )
    if caught.errno == errno.EMFILE:
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return coded("LS0232", f"too many open files: ulimit -n allows {most}; set ulimit -n 1024")
    if caught.errno == errno.ENAMETOOLONG:
        start, length = str(caught.filename)[:40], len(str(caught.filename))
        return coded("LS0011", f"{start!r}... has {length:,} characters; a path cannot be that long")
    if caught.errno not in REMEDIES or (caught.filename is None and caught.errno not in OF_DISKS):
        return None
    where = "" if caught.filename is None else f"{os.fsdecode(caught.filename)}: "
    return coded("LS0260", f"{where}{reason_of(caught).lower()}; {REMEDIES[caught.errno]}")


def _answer(name: str, modules: Sequence[ModuleType], known: argparse.Namespace) -> int:
    """Call the command's functions until one returns an exit status, and return that status. With `--json`, print an
    object in place of the command's output, unless the command prints its own."""
    from lockstep.track.busy import ACTIVITY, CommandNote

    answers = (getattr(module, f"run_{name.replace('-', '_')}")(known) for module in modules)
    with ExitStack() as stack:
        finish: Callable[[int], int] = int
        if getattr(known, "answer_json", False):
            from lockstep.track import json_output

            finish = stack.enter_context(json_output.recording(name))
        if commands.of(name).computes and getattr(known, "reference", None) is None:  # commands print below each other
            ACTIVITY.set("importing torch and transformers")
            stack.enter_context(CommandNote(lambda: ACTIVITY.name))
        return finish(next(int(answer) for answer in answers if answer is not None))


def refuse_missing(name: str, command: argparse.ArgumentParser, option: str) -> None:
    """Reject an option whose distribution (of this repository) is not installed. Errors: `RunError`."""
    known = any(option in action.option_strings for action in command._actions)
    if not known and (what := plugins.missing(f"lockstep {name}", option)) is not None:
        raise RunError("LS0014", f"lockstep {name} {option} needs {what}")


def takes_run_file(command: argparse.ArgumentParser) -> bool:
    """Return whether a command takes `RUN.yaml [key=value ...]`, so that `--key value` sets a key of the run file."""
    return any(action.metavar == "RUN.yaml" for action in command._actions)


if __name__ == "__main__":
    sys.exit(main())
