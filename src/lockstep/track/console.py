"""What a person sees: the opening lines, a progress bar, and the closing table. One voice for all ranks.

In: facts and numbers. Out: text on the terminal, with a bar where it is one, in plain lines where it is not (a pipe, a
job's log); and the same lines in a log file, for `lockstep logs`.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lockstep.config.errors import with_addresses
from lockstep.config.redaction import printable
from lockstep.config.run import led_away
from lockstep.track.best import Best
from lockstep.track.busy import ECHO, Busy
from lockstep_trace import streams

LOG = "log.txt"  # in OUTPUT: what rank 0 said, and what any rank said of a failure
Voice = Literal["normal", "quiet", "verbose"]
PLAIN_LINES = 4  # of training, where there is no bar, in a run of minutes
LAST_SAMPLES = 2  # shown at the end
_SHELL_WORDS = re.compile(r""" #.*|(?:'[^']*'|"[^"]*"|\\.|[^\s'"])+""")  # and a comment behind them
LEAST_S, MOST_S = 5.0, 60.0  # between two of them


class Terminal:
    """Standard output as it is at the time of each write, which raises no error: what it cannot show is replaced, and
    what nobody reads is dropped. Training continues, and the log has everything."""

    @property
    def rich_proxied_file(self) -> Terminal:
        """What rich's progress bars write to; they put themselves in the place of `sys.stdout`."""
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
        with suppress(AttributeError, ValueError):  # there is none, or it is closed
            return self._file.isatty()  # type: ignore[union-attr]
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@dataclass
class Record:
    """What consoles say while a command is asked for JSON: nothing is printed."""

    facts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_table(self, key: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table by its key, as an object a row; numbers are numbers as far as they were printed."""
        names = [name or "name" for name in columns]
        listed = [dict(zip(names, map(value_of, row), strict=True)) for row in rows]
        self.tables.setdefault(key, []).extend(listed)


RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


def value_of(cell: str) -> Any:
    """The value of a table's cell: a number if it is one, None if it is empty."""
    plain = cell.strip()
    if not plain:
        return None
    for kind in (int, float):
        with suppress(ValueError):
            return kind(plain.replace(",", ""))
    return plain


class Console:
    """Speaks on rank 0; on every other rank it is silent. Trackers' threads may call `say` and `note` too."""

    def __init__(self, loud: bool, log: Path | None = None, voice: Voice = "normal") -> None:
        """`log` is a file that gets the lines too, if this rank is the one that speaks. `voice`: quiet says notes only;
        verbose says every line of the log."""
        self.rich = RichConsole(file=cast(TextIO, Terminal()), quiet=not loud, highlight=False, soft_wrap=True)
        self._record = RECORD.get() if loud else None
        if self._record is not None:
            self.rich.quiet = True
        self._loud, self._voice = loud, voice
        self._log = log if loud else None
        self._bar: _Bar | None = None
        self._memory = ""
        self._last_line, self._line_step = -math.inf, 0  # when the last plain line was written, and of which step
        self._best, self._per_epoch, self._done = Best(), 0, 0
        self.samples: list[Mapping[str, str]] = []  # the last that were shown

    def take_over(self, log: Path) -> None:
        """Speak from now on: the rank that did is gone."""
        self.rich.quiet, self._loud, self._log = False, True, log

    def facts(self, rows: Mapping[str, str], whole: bool = False) -> None:
        """`name  value` lines. `whole`: a value is to be pasted into a shell; where it is too long for a terminal it
        goes on behind a backslash."""
        for name, value in rows.items():
            if self._record is not None:
                self._record.facts[name] = value
            if self._voice != "quiet":
                self.rich.print(
                    f"[bold]{name:<10}[/bold] {_plain(self._continued(value) if whole else self._hung(value, 11))}"
                )
            append(self._log, f"{name:<10} {value}")

    def detail(self, rows: Mapping[str, str]) -> None:
        """Facts for the log file, and for a terminal that is told everything."""
        if self._voice == "verbose":
            self.facts(rows)
        for name, value in rows.items() if self._voice != "verbose" else ():
            append(self._log, f"{name:<10} {value}")

    def say(self, text: str, hang: int | None = None, whole: bool = False) -> None:
        """One line or more. `hang`: on a terminal, where a line that is too long goes on; by default two columns
        further in than it begins. `whole`: it is to be pasted, and is never cut into lines."""
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
        """A text in lines that fit the terminal, all but the first `hang` columns in; `ahead` of these columns are part
        of the text. Elsewhere a line stays one line, for whoever searches there."""
        if not self.rich.is_terminal:
            return text
        first, rest = text[:ahead], text[ahead:]
        parts = [part for line in rest.split("\n") for part in _parts(line, self.rich.width - hang)]
        return first + f"\n{' ' * hang}".join(parts)

    def _continued(self, command: str) -> str:
        """A command in lines of a terminal, which a shell reads as one."""
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
            comment = line.lstrip().startswith("#")  # a line of its own, which needs no command to go on
            text += f"\n{' ' * 11}{line.lstrip()}" if comment else f" \\\n{' ' * 11}{line}"
        return text

    def busy(self, place: Callable[[], str]) -> AbstractContextManager[object]:
        """For `with`: what is going on while nothing else is said. `place` says what that is."""
        if not self._loud or self._voice == "quiet" or self._record is not None:
            return nullcontext()
        return Busy(self.rich, lambda text: self.facts({"preparing": text}), place)

    def tracker(self, text: str) -> None:
        """Where a tracker shows the run."""
        self.facts({"tracker": text})

    def note(self, text: str) -> None:
        """Something that a person should know, also one who asked for quiet."""
        if self._record is not None:
            self._record.notes.append(f"note: {text}")
        self.rich.print(f"[yellow]note:[/yellow] {_plain(self._hung(text, 6))}")
        append(self._log, f"note: {text}")

    def start(
        self, total: int, done: int, place: Callable[[], str] = str, per_epoch: int = 0, best: Best | None = None
    ) -> None:
        """Show progress over `total` steps, `done` of them finished. `place` says what the program does outside of a
        step. `per_epoch`: steps of an epoch, where epochs are counted. `best`: the metric of the best evaluation, and
        the best one so far."""
        self._total, self._done = total, done
        self._last_line, self._line_step = -math.inf, done
        self._per_epoch, self._best = per_epoch, best or Best()
        if self._loud and self._voice != "quiet" and self.rich.is_interactive:
            self._bar = _Bar(self.rich, total, done, place)
            self._bar.start()

    def advance(self, step: int) -> None:
        """A step is done; costs the host microseconds."""
        if self._bar is not None:
            self._bar.update(self._bar.row, completed=step)

    def log(self, step: int, split: str, numbers: Mapping[str, float], closing: bool = False) -> None:
        """Numbers of a split after `step` updates; those of `system` are what ranks take of their machines. `closing`:
        a table of them follows, and the log file alone gets this line."""
        if split == "system":
            self._system(step, numbers)
        elif split == "train":
            self._train(step, numbers)
        else:
            better = split == "validation" and self._best.update(step, numbers)
            self._scores(step, split, {k: v for k, v in numbers.items() if k != "examples"}, better, closing)

    def _scores(self, step: int, split: str, numbers: Mapping[str, float], better: bool, closing: bool) -> None:
        """An evaluation. On a terminal a line of as many metrics as fit, what it is judged by first; the log file has
        all of them, and so has a terminal that is told everything."""
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
            self.note(f"step {step}: {numbers['skipped_steps']:.0f} step(s) skipped: not finite")
        if "overflowed_steps" in numbers:
            many, scale = numbers["overflowed_steps"], numbers["loss_scale"]
            self.note(f"step {step}: {many:.0f} step(s) skipped: fp16 overflowed; the loss scale is {scale:,.0f} now")
        if "spike" in numbers:
            self.note(f"step {step}: the loss jumped to {numbers['loss']:.4g}")
        parts = [
            f"loss {numbers['loss']:.4f}{_of_sources(numbers)}",
            f"epoch {step / self._per_epoch:.2f}/{round(self._total / self._per_epoch, 2):g}"
            if self._per_epoch
            else "",
            self._best.text,
            f"rate {numbers['learning_rate']:.2e}",
            f"{numbers['examples_per_s']:,.0f} examples/s",
            f"{numbers['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in numbers else "",
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
            line += f"  {rest} left" if self._done + 1 < step < self._total else ""  # a first step is no measure
            if self._bar is None:
                self.say(line)
            else:
                append(self._log, line)

    def _is_time(self, step: int) -> bool:
        """Whether another plain line is due: the first step, then after a quarter of the steps, but not before
        `LEAST_S`, and after `MOST_S` in any case."""
        now = time.monotonic()
        passed, steps = now - self._last_line, step - self._line_step
        if passed < MOST_S and (passed < LEAST_S or steps * PLAIN_LINES < self._total):
            return False
        self._last_line, self._line_step = now, step
        return True

    def show(self, step: int, samples: Iterable[Mapping[str, str]]) -> None:
        """What the model makes of a few examples after `step` updates. The log has all of them; the terminal the last
        ones, by `last_samples`, unless it is told everything."""
        self.samples = list(samples)
        for sample in self.samples:
            text = f"step {step:>6}  sample: " + joined(sample).replace("\n", "\n" + " " * 13)
            if self._voice == "verbose":
                self.say(text)
            else:
                append(self._log, text)

    def last_samples(self) -> None:
        """What the model made of some examples at last, each cut to a line; samples.jsonl and the report have all."""
        room = max(40, self.rich.width if self.rich.is_terminal else 120) - 11
        for place, sample in enumerate(self.samples[:LAST_SAMPLES] if self._voice == "normal" else ()):
            self.rich.print(f"[bold]{'' if place else 'samples':<10}[/bold] {_plain(on_a_line(sample, room))}")

    def stop(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def columns(self, title: str, rows: Sequence[Sequence[str]], cut: bool = False) -> None:
        """Print rows below a title, in columns without lines between them. On a terminal the last column wraps below
        itself if it is too long, or is shortened to one line with `cut`."""
        if self._record is not None:
            head, body = (("name", "value", "more"), rows) if title else (rows[0], rows[1:])
            self._record.add_table(title, head[: len(rows[0])], body)
        widths = [max(map(cell_len, column)) + 2 for column in zip(*rows, strict=True)]
        if title and self._voice != "quiet":
            self.rich.print(f"[bold]{_plain(title)}[/bold]")
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
        """A small table: columns with a number in them are set right, the first one and those of words left. `key`: of
        its rows in what `--json` prints."""
        lines, columns = [list(row) for row in rows], list(columns)
        if self._record is not None:
            self._record.add_table(key, columns, lines)
        table = Table(title=title, title_justify="left", title_style="bold")
        cells = [[_plain(cell) for cell in row] for row in lines]
        for i, column in enumerate(columns):
            numbers = any(row[i].lstrip("+-")[:1].isdigit() for row in cells)
            table.add_column(column, justify="right" if numbers and i > 0 else "left")
        for row in cells:
            table.add_row(*row)
        plain = RichConsole(file=io.StringIO(), width=120, highlight=False)
        plain.print(table)
        append(self._log, plain.file.getvalue().rstrip())  # type: ignore[attr-defined]
        if self._voice == "quiet":
            return
        if Measurement.get(self.rich, self.rich.options.update(width=1000), table).maximum > self.rich.width:
            for head in table.columns:
                head.header = str(head.header).replace("_", "_\n")  # else names would be cut off
        self.rich.print(table)


class _Bar(progress.Progress):
    """How far it is and how long it will take, and the last numbers below, in as many lines as the terminal needs."""

    def __init__(self, console: RichConsole, total: int, done: int, place: Callable[[], str]) -> None:
        self.numbers: list[str] = []
        self._rich = console
        self._place = place
        super().__init__(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=max(4, min(30, console.width - 50))),
            progress.MofNCompleteColumn(),
            progress.TaskProgressColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
            console=console,
            transient=True,  # what it came to is told below
            refresh_per_second=2,  # drawing costs a core's time that training could use
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
    """The parts in lines of at most `width` columns, two blanks between them; a longer part has a line of its own."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + 2 + cell_len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _of_sources(numbers: Mapping[str, float]) -> str:
    """The losses of the sources of a mixture, of many the least and the most."""
    losses = sorted((v, k.removeprefix("loss_")) for k, v in numbers.items() if k[:5] == "loss_" and k != "loss_scale")
    labels = [f"{name} {loss:.4f}" for loss, name in (losses if len(losses) < 4 else [losses[0], losses[-1]])]
    return f" ({'...'.join(labels) if len(losses) > 3 else ', '.join(labels)})" if labels else ""


def _listed(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def _highest(numbers: Mapping[str, float], kind: str) -> float | None:
    """The highest of all ranks' numbers of a kind, `KIND/rank0` and so on."""
    return max((value for name, value in numbers.items() if name.startswith(f"{kind}/")), default=None)


def error(text: str, log: Path | None = None) -> None:
    """A message for the user on standard error, and in the run's log file where there is one."""
    streams.put(sys.stderr, f"{_folded(f'lockstep: {printable(with_addresses(text))}')}\n", flush=True)
    append(log, f"lockstep: {text}")


def _folded(text: str) -> str:
    """A text in lines that end between words where standard error is a terminal."""
    try:
        if not sys.stderr.isatty():
            return text
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):  # a stream that is no file, is closed, or is not there
        return text
    lines = []
    for line in text.split("\n"):
        inner = len(line) - len(line.lstrip()) + 4
        parts = _parts(line, width - inner) if len(line) >= width else [line]
        lines.append(f"\n{' ' * inner}".join(parts))
    return "\n".join(lines)


def _parts(line: str, room: int) -> list[str]:
    """A line in parts that end between words, of at most `room` characters; one at least."""
    return textwrap.wrap(line, max(20, room), break_long_words=False, break_on_hyphens=False) or [""]


def append(log: Path | None, text: str) -> None:
    """A line, or more, at the end of a log file, whose folder was `resolve`d. A disk that is full ends no training
    because of it."""
    if log is not None and led_away(log.absolute().parent) is None:
        with suppress(OSError), open(log, "a", encoding="utf-8") as file:
            file.write(f"{printable(text)}\n")


def strike_tracebacks() -> None:
    """What Python prints of an error that nobody caught, here or in a thread, comes without secrets from now on."""
    sys.excepthook = _traceback
    if threading.excepthook is threading.__excepthook__:  # else somebody listens
        threading.excepthook = _traceback_of_thread


def _traceback(kind: type[BaseException], caught: BaseException | None, where: TracebackType | None) -> None:
    streams.put(sys.stderr, printable("".join(traceback.format_exception(kind, caught, where))))


def _traceback_of_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_type is not SystemExit:
        streams.put(sys.stderr, f"in thread {failed.thread.name if failed.thread else '?'}:\n")
        _traceback(failed.exc_type, failed.exc_value, failed.exc_traceback)


def clock(seconds: float) -> str:
    """1:05 or 2:01:05."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _plain(text: str) -> str:
    return escape(printable(text))


# -- samples: what the model makes of an example, as a text or cut to one line ---------------------------------------


def joined(sample: Mapping[str, str]) -> str:
    """The whole sample: the first column, what the model makes of it, the others: `text ⟶ predicted (label: true)`."""
    return _joined(list(sample), list(sample.values()))


def on_a_line(sample: Mapping[str, str], room: int) -> str:
    """The sample on one line of at most `room` columns, for which the longest of its texts are cut (to no less than
    eight columns each)."""
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
    """At most so many columns, with an ellipsis where something is left out."""
    return text if cell_len(text) <= most else set_cell_size(text, most - 1).rstrip() + "\u2026"
