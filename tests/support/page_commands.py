"""The code blocks of the documents, parsed and run.

In: pages of Markdown. A comment before a fence says what a test does with the block; readers of the site do not see it:

    <!-- run -->                a block of sh or python is run, in one folder for the whole page, from top to bottom
    <!-- run status=1 -->       it ends with this status
    <!-- run quick -->          seconds: part of the quick tests, where all blocks that are run on the page say so
    <!-- run long -->           many minutes: the page is run by hand
    <!-- run hub -->            HF_ENDPOINT and HF_TOKEN are those of a small Hub on the loopback
    <!-- run needs=MODULE -->   the page is run where this module can be imported, with the tests of extras
    <!-- file NAME -->          the block is written to this file first
    <!-- output -->             the block is what the command before it printed; numbers, paths, times and lines of
                                progress may differ, and a line "..." stands for any lines
    <!-- drawing -->            a text that no command prints: a figure, the layout of a folder
    <!-- tested by FILE -->     a test of its own runs the block: this file names the page
    <!-- not run: REASON -->    a block that no test runs: what it needs that a test has not
    <!-- setup
    COMMANDS -->                run, but not shown: the data of the examples; with its level as "setup long"

A page runs once for each of its levels, with the blocks of this level and those before it. `pip install` is not run:
the extras it names are looked up.

Out: `blocks`; `problems`, what is wrong with a block that is not run: every `lockstep` command is parsed, its keys are
looked up, and scripts, targets and extras it names must exist; `unmarked`, those without a mark that need one; `run`,
which runs a page. `python -m support.page_commands PAGE ...` runs pages and writes what was printed into their blocks
of output.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep import commands
from lockstep.cli import takes_run_file
from lockstep.config.run import Run, RunError, load
from support.forked import FORK_TRACED, programs
from support.hub_server import Hub
from support.places import ROOT, TESTS_PATH

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEVELS = ("quick", "slow", "long")
# (comment, fence, language, code), or (comment of setup)
_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>(?:run|file|tested by|not run:) [^\n>]*|run|output|drawing) -->\n+)?"
    r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=fence)$"
    r"|^<!-- (?P<name>setup[^\n>]*)\n(?P<setup>.*?)-->$",
    re.M | re.S,
)
LIMIT_S = 1200
_SHELL = "pip() { :; }\n"
NEED_A_MARK = ("sh", "bash", "console", "python", "text", "")
# their number depends on time
_PROGRESS = re.compile(r"(preparing|finishing) |checks prepared |step (PATH|0 validation)")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    note: str  # as above, without comment marks; "" without a comment
    span: tuple[int, int]  # of the code, in the text of the page

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def level(self) -> str:
        return next((level for level in LEVELS if level in self.note.split()), LEVELS[self.note != "setup"])


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for each in _BLOCK.finditer(text):
        line = text.count("\n", 0, each.start()) + 1
        if each["setup"] is not None:
            found.append(Block(page, line, "sh", each["setup"], each["name"], each.span("setup")))
        else:
            language = each["language"].strip()
            found.append(Block(page, line, language, each["code"], each["note"] or "", each.span("code")))
    return found


def levels_of(page: Path) -> list[str]:
    """Levels at which the page can be run, shortest first; empty: nothing is run."""
    levels = {block.level for block in blocks(page) if block.note.startswith("run")}
    return sorted(levels, key=LEVELS.index)


def modules_of(page: Path) -> list[str]:
    """Modules that the page's commands need beyond a development environment."""
    words = {word for block in blocks(page) if block.note.startswith("run") for word in block.note.split()}
    return sorted(word.removeprefix("needs=") for word in words if word.startswith("needs="))


def unmarked(page: Path) -> list[str]:
    """Places of blocks that a command could run or print, without a mark that says so or why not."""
    return [block.where for block in blocks(page) if block.language in NEED_A_MARK and not block.note]


# -- blocks that are not run ------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"data": {"source": "builtin/emotion"}, "model": {"type": "gpt2"}}
STARTERS = ("torchrun", "accelerate", "srun")


def problems(block: Block) -> list[str]:
    """Problems of a block that can be found without running it."""
    if block.note.startswith("tested by "):
        test = ROOT / block.note.removeprefix("tested by ").strip()
        return [] if block.page.name in test.read_text(encoding="utf-8") else [f"{test.name} names no such page"]
    if block.language in ("sh", "bash", "console"):
        return [text for words in command_lines(block.code) for text in _of_command(words)]
    if block.language == "python":
        return _of_python(block.code)
    if block.language == "yaml":
        return _of_yaml(block.code)
    return []


def command_lines(code: str) -> Iterator[list[str]]:
    """Words of each command of a shell block; pipes and `&&` separate commands."""
    joined = re.sub(r"\\\n", " ", code)
    joined = re.sub(r"^\((.*)\)( &)?$", r"\1", joined, flags=re.M)
    joined = re.sub(r"<<'?(\w+)'?\n.*?\n\1\n", "\n", joined, flags=re.S)
    for line in joined.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # part of a multi-line text
        command: list[str] = []
        for word in [*words, "|"]:
            if word in ("|", "&&", "||", ";", "&", ">", ">>"):
                if command:
                    yield command
                command = [">"] if word in (">", ">>") else []
            else:
                command.append(word)


def _of_command(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"\w+=.*|nice|env|sudo|time|!", words[0]):
        words = words[1:]
    if not words or words[0] == ">":
        return []
    if words[0] == "lockstep":
        return _of_lockstep(words[1:])
    if words[0] in STARTERS and "lockstep" in words:
        return _of_lockstep(words[words.index("lockstep") + 1 :])
    if words[:2] == ["pip", "install"]:
        named = {name for word in words for part in re.findall(r"\[([\w,]+)\]", word) for name in part.split(",")}
        return [f"no extra {name!r}" for name in sorted(named - _extras())]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        return [f"no target {word!r}" for word in words[1:2] if "=" not in word and word not in targets]
    if words[0] in ("python", "python3") and words[1:2] and words[1].startswith(("benchmarks/", "docs/", "tests/")):
        return [] if (ROOT / words[1]).is_file() else [f"no file {words[1]}"]
    return []


def _extras() -> set[str]:
    return {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


class _Refused(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise _Refused(message)


def _of_lockstep(words: list[str]) -> list[str]:
    words = [word for word in words if word != "..." and not word.startswith("$")]
    if not words or words[0] in ("COMMAND", "--help", "-h", "--version"):
        return []
    name = words[0]
    if name not in commands.HELP:
        return [] if name in ("--version", "--help", "--completion") else [f"no command {name!r}"]
    if "--help" in words or "-h" in words:
        return []
    parser = _Parser(prog=name)
    for module in reversed(commands.modules_of(name)):
        getattr(module, f"{name}_arguments")(parser)
    rest = words[1:]
    try:
        if takes_run_file(parser):
            rest = commands.with_overrides_first(parser, rest)
        known, others = parser.parse_known_args(rest)
    except _Refused as refused:
        return [f"{shlex.join(words)}: {refused}"]
    overrides = [*getattr(known, "overrides", []), *others]
    if name in ("predict", "trace"):
        return []
    strange = [word for word in others if "=" not in word or word.startswith("-")]
    if strange and not hasattr(known, "words"):
        return [f"{shlex.join(words)}: unknown {strange[0]!r}"]
    return _of_keys(known, [word for word in overrides if "=" in word and not word.startswith("-")])


def _of_keys(known: argparse.Namespace, overrides: list[str]) -> list[str]:
    path = getattr(known, "run", None)
    if path and "=" in path:
        path, overrides = None, [path, *overrides]
    if path and not (ROOT / path).is_file():
        path = None
    try:
        load(ROOT / path if path else None, overrides, None if path else SMALL)
    except RunError as error:
        return [str(error)]
    return []


def _of_python(code: str) -> list[str]:
    """Parse as a module, the body of a function, or rows of a table."""
    inside = textwrap.indent(code, "    ")
    errors = []
    for text in (code, f"def body():\n{inside}", f"table = {{\n{code}}}"):
        try:
            compile(text, "block", "exec")
        except SyntaxError as error:
            errors.append(str(error))
        else:
            return []
    return errors[:1]


def _of_yaml(code: str) -> list[str]:
    """Load as a run file, or as some sections of one."""
    try:
        values = yaml.safe_load(code)
    except yaml.YAMLError as error:
        return [str(error)]
    if not isinstance(values, dict) or not values.keys() <= Run.model_fields.keys():
        return []
    own = isinstance(values.get("task"), dict) and values["task"].get("name") == "module"
    try:
        load(None, [], values if own else SMALL | values)
    except RunError as error:
        return [str(error)]
    return []


# -- blocks that are run ----------------------------------------------------------------------------------------------


def run(page: Path, folder: Path, cache: Path, level: str = LEVELS[-1], write: bool = False) -> None:
    """Run a page's blocks up to a level in a folder. Errors: `AssertionError` with the command and its output."""
    text = page.read_text(encoding="utf-8")
    with Hub() as hub:
        shown = _run(page, folder, environment(folder, cache), hub, level, write)
    if write:
        assert page.read_text(encoding="utf-8") == text, f"{page} was changed meanwhile"
        for (begin, end), printed in reversed(shown):
            for place, name in ((folder, "/home/me/job"), (cache, "~/.cache/lockstep"), (sys.executable, "python")):
                printed = printed.replace(str(place), name)
            printed = printed.replace(hub.address, "https://huggingface.co")
            text = text[:begin] + _shortened(_tidy(printed), text[begin:end]) + text[end:]
        page.write_text(text, encoding="utf-8")


def _run(
    page: Path, folder: Path, variables: dict[str, str], hub: Hub, level: str, write: bool
) -> list[tuple[tuple[int, int], str]]:
    """Printed output, by the place where the page shows it."""
    printed: str | None = ""
    shown = []
    for block in reversed(blocks(page)):  # a page may show a file after the command that reads it
        if block.note.startswith("file "):
            _save(folder, block)
    for at, block in enumerate(blocks(page)):
        if block.note.startswith(("run", "setup")) and LEVELS.index(block.level) > LEVELS.index(level):
            printed = None
        elif block.note.startswith("file "):
            _save(folder, block)
        elif block.note == "output" and printed is not None:
            shown.append((block.span, printed))
            if not write:
                assert same(block.code, printed), f"{block.where} shows\n{block.code}\nand printed was\n{printed}"
        elif block.note.startswith(("run", "setup")):
            wanted = int(next((w[7:] for w in block.note.split() if w.startswith("status=")), "0"))
            script = folder / f".block-{at}.{'py' if block.language == 'python' else 'sh'}"
            script.write_text((_SHELL if block.language != "python" else "") + block.code, encoding="utf-8")
            command = ["python", script] if block.language == "python" else ["bash", "-e", "-o", "pipefail", script]
            done = _ended(
                command,
                cwd=folder,
                env=variables | (hub.environment(folder / ".hub") if "hub" in block.note.split() else {}),
            )
            script.unlink()
            printed = done.stdout
            assert done.returncode == wanted, f"{block.where} ended with {done.returncode}:\n{block.code}\n{printed}"
    return shown


def _save(folder: Path, block: Block) -> None:
    target = folder / block.note.removeprefix("file ").strip()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(block.code, encoding="utf-8")


def _ended(command: list[str | Path], cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without leaving processes behind."""
    out = cwd / ".printed"
    with out.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out.read_text(encoding="utf-8"))


def _tidy(printed: str) -> str:
    """Remove all progress lines but the first: a fast machine prints fewer."""
    lines = printed.splitlines()
    steps = [at for at, line in enumerate(lines) if re.match(r"step +\d+/\d+ ", line)]
    scored = [at for at, line in enumerate(lines) if re.match(r"step +\d+ +validation", line)]
    left_out = {
        *steps[1:],
        *scored[1:],
        *(
            at
            for at, line in enumerate(lines)
            if re.match(r"(preparing|finishing) |checks prepared ", _plain_line(line))
        ),
    }
    return "\n".join(line for at, line in enumerate(lines) if at not in left_out) + "\n"


def _plain_line(line: str) -> str:
    return re.sub(r"\s+", " ", line)


def _shortened(printed: str, before: str) -> str:
    """Remove printed lines that the page leaves out at "..."."""
    if "..." not in before.splitlines() or before.strip() == "...":
        return printed.rstrip() + "\n"
    lines, kept = printed.rstrip().splitlines(), []
    parts = [part.strip("\n").splitlines() for part in re.split(r"^\.\.\.$", before, flags=re.M)]
    for place, part in enumerate(parts):
        kept += ["..."] if place else []
        starts = [_plain(line)[:12] for line in part]
        plain = [_plain(line) for line in lines]
        whole = [at for at in range(len(lines) - len(part) + 1) if all(map(str.startswith, plain[at:], starts))]
        first = [at for at, line in enumerate(plain) if starts and line.startswith(starts[0])]
        at = next(iter(whole or first), None) if part else None
        if at is not None:
            kept += lines[at : at + len(part)]
            lines = lines[at + len(part) :]
    return "\n".join(kept) + "\n"


def environment(folder: Path, cache: Path) -> dict[str, str]:
    """Environment of a page's commands: `lockstep`, `python` and `torchrun` of this interpreter."""
    return {
        **os.environ,
        FORK_TRACED: "1",
        "PATH": f"{programs(cache / 'programs')}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), TESTS_PATH]),
        "LOCKSTEP_CACHE": str(cache),
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "100",
        "TQDM_DISABLE": "1",
        "REPOSITORY": str(ROOT),
    }


def same(shown: str, printed: str) -> bool:
    """Whether a page's text equals the printed text, numbers ignored."""
    parts = [_plain(part) for part in re.split(r"^\.\.\.\n?", shown, flags=re.M)]
    pattern = r".*\n?".join(re.escape(part) for part in parts)
    return re.fullmatch(pattern, _plain(printed), re.S) is not None


def _plain(text: str) -> str:
    text = re.sub(r"\S*/[^\s,;:)]*", "PATH", text)  # paths and rates, which have units
    text = re.sub(r"\b[0-9a-f]{8,64}\b", "HASH", text)
    text = re.sub(r"[-+]?\d[\d.,:]*(?:[eE][-+]?\d+)?", "0", text)
    text = re.sub(r"[━─]+", "-", text)
    text = re.sub(r"[ \t]+", " ", text)
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(line for line in lines if not _PROGRESS.match(line))


def main() -> None:
    """Run pages, and write their commands' output into them."""
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
            run(Path(name).resolve(), Path(folder).resolve(), Path(cache).resolve(), write=True)
            print(f"{name}: run, and its outputs written")


if __name__ == "__main__":
    main()
