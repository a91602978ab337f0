"""A status line on standard error shows what a command is doing, on a terminal only; output appears above it."""

import os
import pty
import select
import subprocess
import sys

import pytest

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
