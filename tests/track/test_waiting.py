"""A status line on standard error shows what a command is doing, on a terminal only; output appears above it."""

import io
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from lockstep.track import busy
from support.consoles import screen

CODE = """
import subprocess, sys, time
from lockstep.track import busy
from lockstep.track.console import Console
busy.FIRST_S = 0.0
with busy.CommandNote(lambda: "evaluation, 3 of 20 batches"):
    time.sleep(0.6)
    print("a row")
    with Console(True).busy(lambda: "importing"):  # one line shows the activity, not two
        time.sleep(0.4)
    print("another row")
    if sys.argv[1:] == ["fails"]:
        raise KeyboardInterrupt
"""


def on_a_terminal(*words: str) -> tuple[str, int]:
    """Return what the terminal receives, and the exit status."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    found = b""
    while select.select([ours], [], [], 60)[0]:
        try:
            block = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        found += block
    os.close(ours)
    return found.decode(), process.wait()


@pytest.mark.processes
def test_command_note_moves_and_vanishes() -> None:
    text, status = on_a_terminal()
    assert status == 0
    assert text.count("evaluation, 3 of 20 batches 0:0") > 2
    assert [line for line in screen(text) if line] == ["a row", "another row"]


@pytest.mark.processes
def test_an_interrupt_leaves_no_line() -> None:
    text, status = on_a_terminal("fails")
    assert status != 0
    assert screen(text)[:2] == ["a row", "another row"]


@pytest.mark.processes
def test_without_a_terminal_there_is_no_progress_line() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a row\nanother row\n", "")


def test_the_line_is_not_drawn_during_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            events.append("begin")
            time.sleep(0.5)  # longer than the pause between two frames
            events.append("end")
            return len(text)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            events.append("frame")
            return len(text)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(busy, "FIRST_S", 0.0)
    monkeypatch.setattr(sys, "stdout", Output())
    monkeypatch.setattr(sys, "stderr", Terminal())
    with busy.CommandNote(lambda: "training"):
        time.sleep(0.1)
        sys.stdout.write("a row\n")
    assert "frame" in events[: events.index("begin")]
    assert events[events.index("begin") + 1] == "end"
