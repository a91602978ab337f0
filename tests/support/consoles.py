"""Content of a terminal."""

from __future__ import annotations

import io
import re

from rich.console import Console as RichConsole

from lockstep.track.console import Console, Voice

TRAIN = {
    "loss": 0.43211,
    "learning_rate": 3e-5,
    "grad_norm": 1.5,
    "examples_per_s": 1520.4,
    "tokens_per_s": 33461.0,
    "seconds_per_step": 0.5,
    "padding": 1.2,
}


def console(
    terminal: bool, voice: Voice = "normal", width: int = 100, loud: bool = True
) -> tuple[Console, io.StringIO]:
    """A console that writes into a buffer."""
    told, out = Console(loud, voice=voice), io.StringIO()
    told.rich = RichConsole(
        file=out,
        force_terminal=terminal,
        width=width,
        quiet=not loud,
        highlight=False,
        soft_wrap=True,
        color_system=None,
    )
    return told, out


def screen(text: str) -> list[str]:
    """The lines visible after a terminal has processed a text."""
    lines, row = [""], 0
    for piece in re.findall(r"\x1b\[[0-9?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0  # noqa: F841 - whatever follows is written from the left
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", piece):
            row -= int(piece[2:-1] or 1)
        elif not piece.startswith("\x1b"):
            lines[row] += piece
    return [line.rstrip() for line in lines]
