"""The terminal output of a run: header lines, progress bar and final tables. Only one rank prints.

In: facts and numbers. Out: text on the terminal, with a progress bar, or plain lines if standard output is a pipe or a
job's log; the same lines go to a log file, for `lockstep logs`.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO, cast

from rich import progress
from rich.cells import cell_len, set_cell_size
from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lockstep.config.errors import with_addresses
from lockstep.config.model_selection import Best
from lockstep.config.output_files import open_file, redirected
from lockstep.track import busy
from lockstep.track.busy import ECHO, ProgressNote
from lockstep_trace import streams
from lockstep_trace.coded import quantity
from lockstep_trace.redaction import printable

LOG = "log.txt"  # in OUTPUT: output of rank 0, and errors of all ranks
Voice = Literal["normal", "quiet", "verbose"]
PLAIN_LINES = 4  # training lines without a bar, in a run of minutes
LAST_SAMPLES = 2  # samples shown at the end of a run
_SHELL_WORDS = re.compile(r""" #.*|(?:'[^']*'|"[^"]*"|\\.|[^\s'"])+""")  # with a trailing comment
_DETAIL = re.compile(r"(; [^;()]*| \([^()]*\))$")  # at the end of a value
LEAST_S, MOST_S = 5.0, 60.0  # interval between plain training lines


class Terminal:
    """Standard output, looked up at each write, that never raises: unencodable characters are replaced, and output to a
    closed pipe is dropped, so training continues. The log file has everything."""

    @property
    def rich_proxied_file(self) -> Terminal:
        """The stream for rich's progress bars, which replace `sys.stdout` by themselves."""
        return self

    def write(self, text: str) -> int:
        streams.put(self._file, text)
        return len(text)

    def flush(self) -> None:
        streams.put(self._file, "", flush=True)

    @property
    def _file(self) -> TextIO | None:
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def isatty(self) -> bool:
        with suppress(AttributeError, ValueError):  # missing or closed
            return self._file.isatty()  # type: ignore[union-attr]
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@dataclass
class Record:
    """Console output recorded for `--json` instead of printed."""

    facts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_table(self, key: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table under `key`, one object per row, with cells converted by `value_of`."""
        names = [name or "name" for name in columns]
        listed = [dict(zip(names, map(value_of, row), strict=True)) for row in rows]
        self.tables.setdefault(key, []).extend(listed)


RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


def value_of(cell: str) -> Any:
    """Convert a table cell: a number if possible, None if empty, else the text."""
    plain = cell.strip()
    if not plain:
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(plain.replace(",", ""))
    return plain


class Console:
    """Prints on rank 0 and is silent on other ranks. Trackers' threads may also call `say` and `note`."""

    def __init__(self, loud: bool, log: Path | None = None, voice: Voice = "normal") -> None:
        """`loud`: whether this rank prints. `log`: file that also gets the lines, if `loud`. `voice`: quiet prints only
        notes; verbose prints every line of the log."""
        self.rich = RichConsole(file=cast(TextIO, Terminal()), quiet=not loud, highlight=False, soft_wrap=True)
        self._record = RECORD.get() if loud else None
        if self._record is not None:
            self.rich.quiet = True
        self._loud, self._voice = loud, voice
        self._log = log if loud else None
        self._bar: _Bar | None = None
        self._memory = ""
        self._last_line, self._line_step = -math.inf, 0  # time and step of the last plain line
        self._best, self._per_epoch, self._done = Best(), 0, 0
        self.samples: list[Mapping[str, str]] = []  # the most recent ones

    def take_over(self, log: Path) -> None:
        """Start to print on this rank, after the rank that printed has failed."""
        self.rich.quiet, self._loud, self._log = False, True, log

    def facts(self, rows: Mapping[str, str], whole: bool = False, cut: Collection[str] = ()) -> None:
        """Print `name  value` lines. `whole`: values are shell commands; long ones continue after a backslash. `cut`:
        names whose last details a terminal too narrow for them omits (`_without_details`); the log file has them."""
        for name, value in rows.items():
            if self._record is not None:
                self._record.facts[name] = value
            if self._voice != "quiet":
                short = name in cut and self.rich.is_terminal
                fitting = _without_details(value, self.rich.width - 11) if short else value
                text = self._continued(value) if whole else self._hung(fitting, 11)
                self.rich.print(Text(f"{name:<10}", "bold") + _plain(f" {text}"))
            append(self._log, f"{name:<10} {value}")

    def detail(self, rows: Mapping[str, str]) -> None:
        """Write facts to the log file, and with voice `verbose` also to the terminal."""
        if self._voice == "verbose":
            self.facts(rows)
        for name, value in rows.items() if self._voice != "verbose" else ():
            append(self._log, f"{name:<10} {value}")

    def say(self, text: str, hang: int | None = None, whole: bool = False) -> None:
        """Print one or more lines. `hang`: indentation of wrapped lines on a terminal; default: two columns more than
        the line's own. `whole`: never wrap, for text to copy."""
        if self._record is not None:
            self._record.notes.append(text)
        if self._voice != "quiet":
            self.rich.print(_plain(text if whole else self._folded(text, hang)))
        append(self._log, text)

    def _folded(self, text: str, hang: int | None) -> str:
        if hang is not None:
            return self._hung(text, hang, hang)
        lines = []
        for line in text.split("\n"):
            inner = len(line) - len(line.lstrip()) + 2
            lines.append(line if cell_len(line) <= self.rich.width else self._hung(line, inner, inner))
        return "\n".join(lines)

    def _hung(self, text: str, hang: int, ahead: int = 0) -> str:
        """Wrap a text to the terminal's width, with lines after the first indented by `hang`. The first `ahead`
        characters are never split. Without a terminal, lines are not wrapped, so that they can be searched."""
        if not self.rich.is_terminal:
            return text
        first, rest = text[:ahead], text[ahead:]
        parts = [part for line in rest.split("\n") for part in _parts(line, self.rich.width - hang)]
        return first + f"\n{' ' * hang}".join(parts)

    def _continued(self, command: str) -> str:
        """Wrap a shell command to the terminal's width with backslashes."""
        words, lines = _SHELL_WORDS.findall(command), [""]
        fits = cell_len(command) <= self.rich.width - 11
        if fits or not self.rich.is_terminal or " ".join(words) != command:
            return command
        for word in words:
            longer = f"{lines[-1]} {word}" if lines[-1].strip() else lines[-1] + word
            if lines[-1].strip() and cell_len(longer) > self.rich.width - 13:
                lines.append(f"  {word}")
            else:
                lines[-1] = longer
        text = lines[0]
        for line in lines[1:]:
            comment = line.lstrip().startswith("#")  # a comment on its own line needs no backslash
            text += f"\n{' ' * 11}{line.lstrip()}" if comment else f" \\\n{' ' * 11}{line}"
        return text

    def busy(self, place: Callable[[], str], label: str = "preparing") -> AbstractContextManager[object]:
        """Return a context manager that shows the current activity, `place()`, while nothing else is printed. `label`:
        name of the plain lines that are printed without a terminal."""
        if not self._loud or self._voice == "quiet" or self._record is not None:
            return nullcontext()
        return ProgressNote(self.rich, lambda text: self.facts({label: text}), place)

    def tracker(self, text: str) -> None:
        """Print where a tracker shows the run."""
        self.facts({"tracker": text})

    def note(self, text: str) -> None:
        """Print a note, also with voice `quiet`."""
        if self._record is not None:
            self._record.notes.append(f"note: {text}")
        self.rich.print(Text("note:", "yellow") + _plain(f" {self._hung(text, 6)}"))
        append(self._log, f"note: {text}")

    def start(
        self, total: int, done: int, place: Callable[[], str] = str, per_epoch: int = 0, best: Best | None = None
    ) -> None:
        """Show progress over `total` steps, of which `done` are finished. `place`: returns the activity between steps.
        `per_epoch`: steps per epoch, 0 if epochs are not counted. `best`: the best evaluation so far."""
        self._total, self._done = total, done
        self._last_line, self._line_step = -math.inf, done
        self._per_epoch, self._best = per_epoch, best or Best()
        if self._loud and self._voice != "quiet" and self.rich.is_interactive:
            self._bar = _Bar(self.rich, total, done, place)
            self._bar.start()
            busy.add_display(self._bar.stop)

    def advance(self, step: int) -> None:
        """Advance the progress bar to `step`. Takes microseconds."""
        if self._bar is not None:
            self._bar.update(self._bar.row, completed=step)

    def log(self, step: int, split: str, numbers: Mapping[str, float], closing: bool = False) -> None:
        """Print the numbers of a split after `step` updates. The split `system` holds each rank's resource usage.
        `closing`: a table follows, so the line goes only to the log file."""
        if split == "system":
            self._system(step, numbers)
        elif split == "train":
            self._train(step, numbers)
        else:
            better = split == "validation" and self._best.update(step, numbers)
            self._scores(step, split, {k: v for k, v in numbers.items() if k != "examples"}, better, closing)

    def _scores(self, step: int, split: str, numbers: Mapping[str, float], better: bool, closing: bool) -> None:
        """Print an evaluation in one line: loss and the best-model metric, then as many metrics as fit. The log file,
        and voice `verbose`, get all metrics."""
        first, last = f"step {step:>6}  {split}: ", "; best yet" if better else ""
        line = f"{first}{_listed(numbers)}{last}"
        if self._voice == "verbose" or (not self.rich.is_terminal and not closing):
            self.say(line, hang=13)
            return
        append(self._log, line)
        if closing or self._voice == "quiet":
            return
        names = sorted(numbers, key=lambda name: name not in ("loss", self._best.name))
        while len(names) > 1 and len(line) > self.rich.width:
            names.pop()
            line = f"{first}{_listed({name: numbers[name] for name in numbers if name in names})}{last}"
        self.rich.print(_plain(self._hung(line, 13, 13)))

    def _system(self, step: int, numbers: Mapping[str, float]) -> None:
        memory = {kind: _highest(numbers, kind) for kind in ("memory_gb", "gpu_memory_gb")}
        self._memory = "".join(
            f"  {value:.2f} GB{' on the GPU' if kind.startswith('gpu') else ''}"
            for kind, value in memory.items()
            if value is not None
        )
        if self._voice == "verbose":
            self.say(f"step {step:>6}  system: {_listed(numbers)}", hang=13)

    def _train(self, step: int, numbers: Mapping[str, float]) -> None:
        if "skipped_steps" in numbers:
            self.note(f"step {step}: {quantity(numbers['skipped_steps'], 'step')} skipped: not finite")
        if "overflowed_steps" in numbers:
            many, scale = numbers["overflowed_steps"], numbers["loss_scale"]
            self.note(
                f"step {step}: {quantity(many, 'step')} skipped: fp16 overflowed; the loss scale is {scale:,.0f} now"
            )
        if "spike" in numbers:
            self.note(f"step {step}: the loss jumped to {numbers['loss']:.4g}")
        parts = [
            f"loss {numbers['loss']:.4f}{_of_sources(numbers)}",
            f"epoch {step / self._per_epoch:.2f}/{round(self._total / self._per_epoch, 2):g}"
            if self._per_epoch
            else "",
            self._best.text,
            _rate(step, numbers["learning_rate"]),
            f"{numbers['examples_per_s']:,.0f} examples/s",
            f"{numbers['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in numbers else "",
            f"MFU {100 * numbers['mfu']:.0f} %" if "mfu" in numbers else "",
            self._memory.strip(),
        ]
        parts = [part for part in parts if part]
        text = "  ".join(parts)
        if self._bar is not None:
            self._bar.numbers = parts
        if self._voice == "verbose":
            self.say(f"step {step:>6}  train: {_listed(numbers)}", hang=13)
        elif self._loud and self._is_time(step):
            rest = clock((self._total - step) * numbers["seconds_per_step"])
            line = f"step {step:>6}/{self._total}  {text}"
            line += f"  {rest} left" if self._done + 1 < step < self._total else ""  # first step: not typical
            if self._bar is None:
                self.say(line)
            else:
                append(self._log, line)

    def _is_time(self, step: int) -> bool:
        """Return whether to print a plain line: for the first step, then each quarter of the steps, at intervals from
        `LEAST_S` to `MOST_S` seconds."""
        now = time.monotonic()
        passed, steps = now - self._last_line, step - self._line_step
        if passed < MOST_S and (passed < LEAST_S or steps * PLAIN_LINES < self._total):
            return False
        self._last_line, self._line_step = now, step
        return True

    def show(self, step: int, samples: Iterable[Mapping[str, str]]) -> None:
        """Log the model's predictions for a few examples after `step` updates. The terminal shows only the last ones
        (`last_samples`), unless the voice is `verbose`."""
        self.samples = list(samples)
        for sample in self.samples:
            text = f"step {step:>6}  sample: " + joined(sample).replace("\n", "\n" + " " * 13)
            if self._voice == "verbose":
                self.say(text)
            else:
                append(self._log, text)

    def last_samples(self) -> None:
        """Print the last predictions, each shortened to a line; samples.jsonl and the report have them in full."""
        room = max(40, self.rich.width if self.rich.is_terminal else 120) - 11
        for place, sample in enumerate(self.samples[:LAST_SAMPLES] if self._voice == "normal" else ()):
            head = Text(f"{'' if place else 'samples':<10}", "bold")
            self.rich.print(head + _plain(f" {on_a_line(sample, room)}"))

    def stop(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            busy.remove_display(self._bar.stop)
            self._bar.stop()
            self._bar = None

    @property
    def width(self) -> int | None:
        """Number of columns of the terminal; None if standard output is not a terminal, or is recorded."""
        return int(self.rich.width) if self.rich.is_terminal and self._record is None else None

    def columns(self, title: str, rows: Sequence[Sequence[str]], cut: bool = False) -> None:
        """Print rows in columns without borders, below a title. On a terminal a long last column wraps within itself,
        or is shortened to one line with `cut`."""
        if self._record is not None:
            head, body = (("name", "value", "more"), rows) if title else (rows[0], rows[1:])
            self._record.add_table(title, head[: len(rows[0])], body)
        widths = [max(map(cell_len, column)) + 2 for column in zip(*rows, strict=True)]
        if title and self._voice != "quiet":
            self.rich.print(Text(printable(title), "bold"))
        if title:
            append(self._log, title)
        for row in rows:
            front = "  " * bool(title) + "".join(
                set_cell_size(cell, w) for cell, w in zip(row[:-1], widths, strict=False)
            )
            append(self._log, (front + row[-1]).rstrip())
            if self._voice == "quiet":
                continue
            room, last = self.rich.width - cell_len(front), row[-1]
            if cut and self.rich.is_terminal:
                last = shortened(last, max(8, room))
            self.rich.print(_plain(self._hung(front + last, cell_len(front), len(front)).rstrip()))

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], key: str = "table") -> None:
        """Print a small table. Columns with numbers are right-aligned, except the first. `key`: the table's key in
        `--json` output."""
        lines, columns = [list(row) for row in rows], list(columns)
        if self._record is not None:
            self._record.add_table(key, columns, lines)
        table = Table(title=_plain(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for i, column in enumerate(columns):
            numbers = any(row[i].lstrip("+-")[:1].isdigit() for row in lines)
            table.add_column(_plain(column), justify="right" if numbers and i > 0 else "left", overflow="fold")
        for row in lines:
            table.add_row(*map(_plain, row))
        plain = RichConsole(file=io.StringIO(), width=120, highlight=False)
        plain.print(table)
        append(self._log, plain.file.getvalue().rstrip())  # type: ignore[attr-defined]
        if self._voice == "quiet":
            return
        if Measurement.get(self.rich, self.rich.options.update(width=1000), table).maximum > self.rich.width:
            for head in table.columns:
                head.header = Text(str(head.header).replace("_", "_\n"))  # otherwise names would be truncated
        self.rich.print(table)


class _Bar(progress.Progress):
    """Progress bar with the remaining time, and the latest numbers in as many lines as needed."""

    def __init__(self, console: RichConsole, total: int, done: int, place: Callable[[], str]) -> None:
        self.numbers: list[str] = []
        self._rich = console
        self._place = place
        super().__init__(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=max(4, min(30, console.width - 50))),
            progress.MofNCompleteColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            console=console,
            transient=True,  # the final numbers are printed below
            refresh_per_second=2,  # redrawing takes CPU time from training
        )
        self.row: progress.TaskID = self.add_task("training", total=total, completed=done)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task in self.tasks:
            place = self._place()
            task.description = "training" if place.startswith("step ") or not place else place.partition(",")[0]
        yield from super().get_renderables()
        for line in _filled(self.numbers, self._rich.width - ECHO):
            yield Constrain(Text(line, no_wrap=True, overflow="ellipsis"), self._rich.width - ECHO)


def _filled(parts: Iterable[str], width: int) -> list[str]:
    """Join parts with two spaces into lines of at most `width` columns; a longer part has its own line."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + 2 + cell_len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _without_details(text: str, width: int) -> str:
    """Omit parentheses and clauses after a semicolon, the last ones first, until the text fits in `width` columns."""
    while cell_len(text) > width and (shorter := _DETAIL.sub("", text)) != text:
        text = shorter
    return text


def _rate(step: int, rate: float) -> str:
    """Format the learning rate. Only a warm-up, or rates given as points, can begin at 0."""
    return "rate 0 (warm-up)" if step == 1 and not rate else f"rate {rate:.2e}"


def _of_sources(numbers: Mapping[str, float]) -> str:
    """Format the losses of a mixture's sources; of four or more, only the lowest and the highest."""
    losses = sorted((v, k.removeprefix("loss_")) for k, v in numbers.items() if k[:5] == "loss_" and k != "loss_scale")
    if not losses:
        return ""
    several = len(losses) > 3
    labels = [f"{name} {loss:.4f}" for loss, name in ([losses[0], losses[-1]] if several else losses)]
    return f" ({('...' if several else ', ').join(labels)})"


def _listed(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _highest(numbers: Mapping[str, float], kind: str) -> float | None:
    """Return the maximum over ranks of a number, `KIND/rank0` and so on, or None."""
    return max((value for name, value in numbers.items() if name.startswith(f"{kind}/")), default=None)


def error(text: str, log: Path | None = None) -> None:
    """Print an error message on standard error, and append it to the log file, if given."""
    streams.put(sys.stderr, f"{_folded(f'lockstep: {printable(with_addresses(text))}')}\n", flush=True)
    append(log, f"lockstep: {text}")


def _folded(text: str) -> str:
    """Wrap a text at word boundaries if standard error is a terminal."""
    try:
        if not sys.stderr.isatty():
            return text
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):  # not a file, closed, or missing
        return text
    lines = []
    for line in text.split("\n"):
        inner = len(line) - len(line.lstrip()) + 4
        parts = _parts(line, width - inner) if len(line) >= width else [line]
        lines.append(f"\n{' ' * inner}".join(parts))
    return "\n".join(lines)


def _parts(line: str, room: int) -> list[str]:
    """Split a line at word boundaries into one or more parts of at most `room` characters."""
    return textwrap.wrap(line, max(20, room), break_long_words=False, break_on_hyphens=False) or [""]


def append(log: Path | None, text: str) -> None:
    """Append lines to a log file in a resolved folder. Errors such as a full disk are ignored."""
    if log is not None and redirected(log.absolute().parent) is None:
        with suppress(OSError), open_file(log, "a", encoding="utf-8") as file:
            file.write(f"{printable(text)}\n")


def strike_tracebacks() -> None:
    """Redact secrets in the tracebacks of uncaught exceptions, in the main thread and in others."""
    sys.excepthook = _traceback
    if threading.excepthook is threading.__excepthook__:  # keep a custom hook
        threading.excepthook = _traceback_of_thread


def _traceback(kind: type[BaseException], caught: BaseException | None, where: TracebackType | None) -> None:
    streams.put(sys.stderr, printable("".join(traceback.format_exception(kind, caught, where))))


def _traceback_of_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is not SystemExit:
        streams.put(sys.stderr, f"in thread {failed.thread.name if failed.thread else '?'}:\n")
        _traceback(failed.exc_type, failed.exc_value, failed.exc_traceback)


def clock(seconds: float) -> str:
    """Format seconds as 1:05 or 2:01:05."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _plain(text: str) -> Text:
    """Return text that rich prints unchanged. In a `str` it replaces `[bold]` and `:100:` (as in FILE:100: ...), and
    even after its escape() drops the backslash of `\\[1` and doubles one at the end."""
    return Text(printable(text))


# -- samples: predictions for single examples, in full or shortened to one line ---------------------------------------


def joined(sample: Mapping[str, str]) -> str:
    """Format a sample: first column, prediction, other columns: `text ⟶ predicted (label: true)`."""
    return _joined(list(sample), list(sample.values()))


def on_a_line(sample: Mapping[str, str], room: int) -> str:
    """Format a sample on one line of at most `room` columns, shortening its longest texts, to eight columns or more."""
    names, values = list(sample), [" ".join(value.split()) for value in sample.values()]
    for most in range(min(room, max(map(cell_len, values), default=0)), 7, -1):
        text = _joined(names, [shortened(value, most) for value in values])
        if cell_len(text) <= room:
            return text
    return _joined(names, [shortened(value, 8) for value in values])


def _joined(names: Sequence[str], values: Sequence[str]) -> str:
    text = "".join(values[:1])
    for place, (name, value) in enumerate(zip(names[1:], values[1:], strict=True)):
        text += f" ({name}: {value})" if place else f" \u27f6 {value}"
    return text


def shortened(text: str, most: int) -> str:
    """Shorten a text to at most `most` columns, with an ellipsis."""
    return text if cell_len(text) <= most else set_cell_size(text, most - 1).rstrip() + "\u2026"
