"""What a person sees: the opening lines, a progress bar, and the closing table. One voice for all ranks.

In: facts and numbers. Out: text on the terminal; plain lines without a bar when it is not one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table


class Console:
    """Speaks on rank 0; on every other rank it is silent."""

    def __init__(self, loud: bool) -> None:
        self.rich = RichConsole(quiet=not loud, highlight=False, soft_wrap=True)
        self._loud = loud
        self._bar: Progress | None = None
        self._row: TaskID | None = None
        self._last_line = 0.0

    def facts(self, rows: Mapping[str, str]) -> None:
        """`name  value` lines."""
        for name, value in rows.items():
            self.rich.print(f"[bold]{name:<10}[/bold] {_plain(value)}")

    def say(self, text: str) -> None:
        """One line or more."""
        self.rich.print(_plain(text))

    def start(self, total: int, done: int) -> None:
        """Show progress over `total` steps, `done` of which lie behind."""
        self._total = total
        if self._loud and self.rich.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self.rich,
                refresh_per_second=2,  # drawing costs a core's time that training could use
            )
            self._row = self._bar.add_task("", total=total, completed=done, numbers="")
            self._bar.start()

    def advance(self, step: int) -> None:
        """A step is done; costs the host microseconds."""
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=step)

    def log(self, step: int, split: str, numbers: Mapping[str, float]) -> None:
        """Numbers of a split after `step` updates."""
        if split != "train":
            self.say(
                f"step {step:>6}  {split}: " + ", ".join(f"{k} {v:.4g}" for k, v in numbers.items() if k != "examples")
            )
            return
        text = f"loss {numbers['loss']:.4f}  {numbers['examples_per_s']:.0f} examples/s"
        if "skipped_steps" in numbers:
            self.say(f"step {step:>6}  {numbers['skipped_steps']:.0f} step(s) skipped: not finite")
        if "spike" in numbers:
            self.say(f"step {step:>6}  the loss jumped to {numbers['loss']:.4g}")
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, numbers=text)
        elif self._loud and (time.monotonic() - self._last_line > 5 or step == self._total):
            self._last_line = time.monotonic()
            left = (self._total - step) * numbers["seconds_per_step"]
            self.say(f"step {step:>6}/{self._total}  {text}  rate {numbers['learning_rate']:.2e}  {clock(left)} left")

    def show(self, step: int, samples: Iterable[str]) -> None:
        """Texts that the model wrote after `step` updates."""
        for text in samples:
            self.say(f"step {step:>6}  sample: " + text.replace("\n", "\n" + " " * 13))

    def stop(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """A small table."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*(_plain(cell) for cell in row))
        self.rich.print(table)


def error(text: str) -> None:
    """A message for the user on standard error."""
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """1:05 or 2:01:05."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
