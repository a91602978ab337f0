"""Output of `record`, `diff` and `verify`: the summary of a trace, the table of a comparison, its first difference.
Also runs a command with the tracer in each of its Python processes, by a folder `inject/` in PYTHONPATH.

In: commands, folders, and where to print. Out: lines, and exit statuses. `compare_traces.py` compares.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

from lockstep_trace import operations, streams
from lockstep_trace.causes import few
from lockstep_trace.coded import TraceError, quantity
from lockstep_trace.compare_traces import COLUMNS, Comparison, compare_traces, match, row_cells, window
from lockstep_trace.findings import Finding, findings, likely, proved
from lockstep_trace.ranks import merged_start
from lockstep_trace.read import ABOUT, Trace, about, read
from lockstep_trace.redaction import printable, redact, redact_words
from lockstep_trace.report import write
from lockstep_trace.rules import SUSPICIOUS, WRONG
from lockstep_trace.tracer import Settings

LINES = 15  # last lines of a failed command's output that `verify` prints
ROWS = 6  # max. steps in the table of a comparison: the first three and the last three


class Output(Protocol):
    """Destination of lines and tables."""

    def say(self, text: str, *, whole: bool = False) -> None:
        """Print one line or more. `whole`: never wrap, for a command to copy."""

    def note(self, text: str) -> None:
        """Print a note about the result's validity."""

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], key: str) -> None:
        """Print a table. `key`: its key in machine-readable output."""


class PlainOutput:
    """Lines and tables on standard output, without colours or borders."""

    def say(self, text: str, *, whole: bool = False) -> None:
        print(text if whole else "\n".join(wrapped(line, sys.stdout) for line in text.split("\n")), flush=True)

    def note(self, text: str) -> None:
        print(wrapped(f"note: {text}", sys.stdout), flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], key: str) -> None:
        lines = [list(columns), *(list(row) for row in rows)]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        for line in [*([[title]] if title else []), *lines]:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip())


def record(command: Sequence[str], folder: Path, options: Mapping[str, Any], verbose: bool = False) -> int:
    """Run a command and trace it. Messages go to standard error; standard output belongs to the command. Returns the
    command's exit status. `verbose`: also print unproved findings. Errors: `TraceError` if it cannot be started."""
    if options.get("level") == "operations" and options.get("step") is None:
        step = step_of_difference(folder, command)
        options = {**options, "step": step or 0}
        if step is not None:
            text = f"records the operations of step {step}, in which `diff` saw the first difference"
            print_to_stderr(text)
    status = run(command, folder, **options)
    for line in summary(folder, verbose, bool(options.get("check"))):
        print_to_stderr(line)
    return status


def print_to_stderr(text: str) -> None:
    """Print a line to standard error, below the prefix of this command."""
    print(wrapped(f"lockstep trace: {text}", sys.stderr), file=sys.stderr)


def wrapped(text: str, stream: TextIO) -> str:
    """Wrap a line at words to the width of a terminal; other streams get it unchanged, so that it can be searched."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # not a terminal, or without a descriptor
        return text
    hang = " " * (len(text) - len(text.lstrip()) + 4)
    lines = textwrap.wrap(text, columns or 80, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def summary(folder: Path, verbose: bool = False, checked: bool = False) -> list[str]:
    """Return the summary of a trace with its proved findings; with `checked`, also suspicions from recomputed steps;
    with `verbose`, all findings."""
    try:
        trace = read(folder)
    except TraceError as error:
        return [str(error)]
    steps = ", ".join(f"{len(trace.steps(o))} steps of {_optimizer(trace, o)}" for o in trace.optimizers)
    lines = [f"{steps} on {trace.world} process{'es' if trace.world > 1 else ''}, in {folder}"]
    if trace.others:
        lines.append(f"{trace.others} other processes also trained, as another job; they are ignored")
    lines += [f"rank {r.number}: internal error of the tracer: {e['text']}" for r in trace.ranks for e in r.errors[:1]]
    lines += operations.summary_lines(trace)
    rows = findings(trace)
    printed = [each for each in rows if verbose or each.level == WRONG or (checked and suspicious_check(each))]
    looks = suspected(rows, printed)
    every = [*printed, *(each for each in likely(rows) if each not in printed)]
    return [*lines, counted(rows, every), *finding_lines(printed), *looks]


def suspected(rows: Sequence[Finding], printed: Sequence[Finding]) -> list[str]:
    """Return lines of the likely suspicions that were not printed yet: a neutral heading, then the evidence and other
    explanations of each."""
    rows = [each for each in likely(rows) if each not in printed]
    return ["to look at; it may be intended:", *finding_lines(rows, levels=False)] if rows else []


def suspicious_check(finding: Finding) -> bool:
    """Whether a recomputed step (`--check`) made this finding, and it is more than information."""
    return finding.code.startswith("check-") and finding.level == SUSPICIOUS


def counted(rows: Sequence[Finding], printed: Sequence[Finding]) -> str:
    """Describe the number of findings, and how to show the other ones."""
    certain, rest = len(proved(rows)), len(rows) - len(proved(rows))
    head = quantity(certain, "finding") if certain else "no finding"
    if not rest:
        return head
    hidden = len(rows) - len(printed)
    which = "" if hidden == rest else f"{hidden} more "
    return f"{head}, {rest} unproved" + (f" ({which}with --verbose, or on the page of `report`)" if hidden else "")


def _optimizer(trace: Trace, number: int) -> str:
    step = next(s for rank in trace.ranks for s in rank.steps.get(number, {}).values())
    return f"{step.layout.optimizer}" + (f" (optimizer {number})" if len(trace.optimizers) > 1 else "")


def diff(
    a: Path,
    b: Path,
    output: Output,
    exact: bool = False,
    perturbed: Path | None = None,
    align: bool = False,
    verbose: bool = False,
) -> int:
    """Compare two traces; return 0 if they agree within rounding (`exact`: bitwise), else 1.

    `align`: if steps have different examples, also compare the first window of steps over the same examples.
    `verbose`: also print unproved findings of each trace. Errors: `TraceError`."""
    return int(any(v.first is not None for v in compared(a, b, output, exact, perturbed, align, verbose)))


def compared(
    a: Path,
    b: Path,
    output: Output,
    exact: bool,
    perturbed: Path | None,
    align: bool = False,
    verbose: bool = False,
    temporary: bool = False,
) -> list[Comparison]:
    """Compare two traces; print and return a verdict for each optimizer. `temporary`: the traces are removed
    afterwards. Errors: `TraceError`."""
    one, other = read(a), read(b)
    third = read(perturbed) if perturbed is not None else None
    shared = [o for o in one.optimizers if o in other.optimizers]
    if not shared:
        raise TraceError("LS9032", f"{a} and {b} have no optimizer in common; check that both trace the same training")
    verdicts = [compare_traces(one, other, third, exact, o) for o in shared]
    for trace in (one, other):
        if lacking := [n for o in shared for n, whole in merged_start(trace, o).items() if whole.missing]:
            output.note(f"{trace.folder}: no rank has written all of {few(lacking)}: the file of a rank is missing")
        for alone in (o for o in trace.optimizers if o not in shared):
            output.note(f"{_optimizer(trace, alone)} takes steps only in {trace.folder}, so it is not compared")
    for verdict in verdicts:
        _say(output, verdict, f"{_optimizer(one, verdict.optimizer)}: " if len(verdicts) > 1 else "")
        if align and verdict.first == "examples":
            output.say(_aligned(one, other, verdict.optimizer))
    for line in _of_operations(one, other, verdicts, temporary):
        output.say(line, whole=line.startswith("  lockstep-trace "))
    _say_findings((one, other), output, verbose)
    return verdicts


def _say_findings(traces: Sequence[Trace], output: Output, verbose: bool) -> None:
    folders: dict[tuple[str, ...], list[str]] = {}
    for trace in traces:
        rows = findings(trace)
        folders.setdefault(tuple(finding_lines(rows if verbose else proved(rows))), []).append(str(trace.folder))
    for lines, names in folders.items():
        if lines:
            output.say(f"findings in {' and in '.join(dict.fromkeys(names))}:")
        for line in lines:
            output.say(f"  {line}")


def _of_operations(one: Trace, other: Trace, verdicts: Sequence[Comparison], temporary: bool) -> list[str]:
    step = next((v.step for v in verdicts if v.optimizer == 0 and v.first in operations.MADE_BY_OPERATIONS), None)
    if step is not None and temporary:
        return ["to see the first operation that differs, run this again with -o FOLDER, which keeps the traces"]
    if step is not None:
        for trace in (one, other):
            note_difference(trace.folder, step)
    if lines := operations.comparison_lines(one, other):
        return lines
    return [] if step is None else operations.advice(one, other, step)


def _aligned(one: Trace, other: Trace, optimizer: int) -> str:
    aligned = window(one, other, optimizer, match(one, other, optimizer))
    if aligned is None:
        return "--align: the runs have not seen equal sets of examples after any step"
    losses = "" if aligned.losses is None else f"; mean loss {aligned.losses[0]:.6g} and {aligned.losses[1]:.6g}"
    change = "" if aligned.change is None else f"; the change of the weights differs by {aligned.change:.2g}"
    steps = f"after {aligned.a} and {aligned.b} steps both have seen the same {aligned.examples} examples"
    return f"--align: {steps}{losses}{change}"


def _say(output: Output, verdict: Comparison, name: str) -> None:
    say_numbers(output, verdict)
    output.say(f"{name}tolerance: {verdict.tolerance}")
    if verdict.first is None:
        how = "the same bits" if verdict.exact else "the same training, within rounding,"
        measured = sum(row.gradient is not None for row in verdict.rows)
        of = "" if measured == len(verdict.rows) else f"; gradients and changes were measured in {measured} of them"
        output.say(f"{name}{how} in all {len(verdict.rows)} common steps{of}")
    for i, line in enumerate(lines_of(verdict)):
        output.say(line if i else f"{name}{line}")


def verify(
    reference: Sequence[str],
    job: Sequence[str],
    folder: Path | None,
    steps: int | None,
    output: Output,
    exact: bool = False,
) -> int:
    """Trace both commands and, once more, the reference with perturbed weights, and compare. `folder`: keeps the
    traces, the commands' output and a page; None: they are removed. If a command fails, the end of its output is
    printed. Returns 0 if the traces agree, 1 if they differ, or a command's own status. Errors: `TraceError`."""
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-", ignore_cleanup_errors=True) as aside:
        root = folder or Path(aside)
        commands = {"reference": reference, "job": job} | ({} if exact else {"perturbed": reference})
        for name, command in commands.items():
            label = "reference with the weights' last bits changed" if name == "perturbed" else name
            output.say(f"{label}: {' '.join(redact_words(command))}")
            log = root / f"{name}.log"
            root.mkdir(parents=True, exist_ok=True)
            status = run(command, root / name, log, steps=steps, perturb=name == "perturbed")
            if status:
                for line in log.read_text(errors="replace").splitlines()[-LINES:]:
                    output.say(f"  {line}")
                output.say(f"{label}: the command ended with status {status}")
                return status
        perturbed, temporary = None if exact else root / "perturbed", folder is None
        verdicts = compared(root / "reference", root / "job", output, exact, perturbed, temporary=temporary)
        if folder is not None:
            try:
                output.say(str(write(root / "job", root / "reference", verdicts)))
            except TraceError as error:  # without the extra `report`, too, the verdict is what counts
                output.say(str(error))
        return int(any(v.first is not None for v in verdicts))


# -- output of a comparison ------------------------------------------------------------------------------------------


def say_numbers(output: Output, verdict: Comparison, title: str = "") -> None:
    """Print the table of compared steps, up to the first difference, and the parameters with the largest
    differences."""
    rows = verdict.rows
    rows_shown = rows if len(rows) <= ROWS else (*rows[: ROWS // 2], *rows[-ROWS // 2 :])
    if not rows_shown:
        return
    cells = [row_cells(row) for row in rows_shown]
    if title or any(any(row[1:]) for row in cells):  # without examples in common, only the step is known
        output.table(title, COLUMNS, cells, key="steps")
    for what, of in (("gradient", "gradient_of"), ("update", "update_of")):
        row = max(rows, key=lambda r: _size(getattr(r, what)))
        if getattr(row, of):
            output.say(f"largest difference of {what}s: {getattr(row, of)} (step {row.step})")


def _size(value: float | None) -> float:
    if value is None:
        return -1.0
    return math.inf if math.isnan(value) else value


def lines_of(verdict: Comparison) -> list[str]:
    """Return the lines of the first difference and its likely cause; empty if all is within the tolerance."""
    if verdict.first is None:
        return []
    at = "before the first step" if verdict.step is None else f"step {verdict.step}"
    head = f"first difference: {at}, {verdict.first}:"
    return [head, *(f"  {line}" for line in verdict.lines), f"  likely: {verdict.cause}"]


def finding_lines(findings: Sequence[Finding], levels: bool = True) -> list[str]:
    """Return lines for findings: the evidence, the change to make, and for unproved ones the alternatives. `levels`:
    unproved ones begin with their level."""
    lines = []
    for each in findings:
        level = "" if each.level == WRONG or not levels else f"{each.level}: "
        lines += [f"[{each.code}] {level}{each.what}", f"    {each.cause}"]
        if each.otherwise:
            lines.append(f"    other explanation: {each.otherwise}. To decide: {each.decides}")
    return lines


# -- running a command with the tracer -------------------------------------------------------------------------------

INJECT = "inject"
SOURCES = Path(__file__).parent
JOIN_S = 1.0  # wait for the last output; a process that outlives the command keeps the pipe open


def run(command: Sequence[str], folder: Path, log: Path | None = None, **settings: Any) -> int:
    """Trace a command into a new folder and return its exit status.

    The status is 128 + N if signal N ended the command, 127 if it cannot be started. The command inherits the standard
    streams. `log`: file for its standard output and errors instead; a terminal shows their last line while it runs.
    `settings`: fields of `Settings`, except `folder`. Errors: `TraceError`."""
    folder = folder.absolute()
    prepare(folder, command, Settings(str(folder), **settings))
    began = time.time()
    environment = environment_of(folder)
    stdout, stderr = (subprocess.PIPE, subprocess.STDOUT) if log is not None else (None, None)
    try:
        process = subprocess.Popen(list(command), env=environment, stdout=stdout, stderr=stderr)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise TraceError("LS9030", f"{command[0]!r} cannot be started: {error.strerror or error}") from None
    copier = threading.Thread(target=_copy, args=(process, log), daemon=True)
    if log is not None:
        copier.start()
    status = _wait(process)
    if log is not None:
        copier.join(JOIN_S)
        if sys.stderr.isatty():
            streams.put(sys.stderr, streams.CLEAR, flush=True)
    _note(folder, ended=time.time(), seconds=time.time() - began, status=status)
    return status


def prepare(folder: Path, command: Sequence[str], settings: Settings) -> None:
    """Create the trace's folder, replacing an older trace. Errors: `TraceError` if it holds anything else."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not (folder / ABOUT).is_file():
            raise TraceError("LS9031", f"{folder} exists and is not a trace; give another folder with -o")
        shutil.rmtree(folder)  # an older trace
    inject = folder / INJECT
    inject.mkdir(parents=True)
    shutil.copy(SOURCES / "injected" / "sitecustomize.py", inject)
    shutil.copytree(SOURCES / "tracer", inject / "tracer", ignore=shutil.ignore_patterns("__pycache__"))
    settings.save(inject / "settings.json")
    values = {"format": 1, "command": redact_words(command), "began": time.time(), "cwd": os.getcwd()}
    values |= {"every": settings.every, "steps": settings.steps, "level": settings.level, "perturbed": settings.perturb}
    if settings.level == "operations":
        values["step"] = settings.step or 0
    (folder / ABOUT).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def note_difference(folder: Path, step: int) -> None:
    """Note in a trace the step in which a comparison saw the first difference. A trace recorded without the command, or
    in a folder that cannot be written, stays as it is."""
    if (folder / ABOUT).is_file():
        with suppress(OSError):
            _note(folder, first_difference=step)


def step_of_difference(folder: Path, command: Sequence[str]) -> int | None:
    """Return the step of `note_difference` if a folder holds a trace of the same command."""
    values = about(folder) if folder.is_dir() else {}
    step = values.get("first_difference")
    return step if isinstance(step, int) and values.get("command") == redact_words(command) else None


def environment_of(folder: Path) -> dict[str, str]:
    """Return this process's environment with the tracer first on PYTHONPATH, without an outer trace's folder."""
    path = [str(folder / INJECT)]
    path += [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).name != INJECT]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def _wait(process: subprocess.Popen[bytes]) -> int:
    passed = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda n, _: process.send_signal(n))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = process.wait()
    finally:
        for number, handler in passed.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _copy(process: subprocess.Popen[bytes], log: Path) -> None:
    """Copy the output of a command to a file, without secrets, and show its last line on a terminal."""
    assert process.stdout is not None
    live, line = sys.stderr.isatty(), b""
    with log.open("w", encoding="utf-8") as file:
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            *complete, line = (line + chunk).split(b"\n")
            file.writelines(f"{redact(text.decode(errors='replace'))}\n" for text in complete)
            file.flush()
            texts = [text for text in [*complete[-1:], *line.split(b"\r")] if text.strip()] if live else []
            for text in texts[-1:]:
                fitting = printable(text.decode(errors="replace"))[: shutil.get_terminal_size().columns - 1]
                streams.put(sys.stderr, f"{streams.CLEAR}{fitting}", flush=True)
        file.write(redact(line.decode(errors="replace")))


def _note(folder: Path, **values: Any) -> None:
    text = json.dumps(about(folder) | values, indent=1)
    (folder / ABOUT).write_text(text + "\n", encoding="utf-8")
