"""Limits of threads and processes: a message before any library is loaded, and no fork server that outlives its
launcher."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config.errors import BAD, FAILED
from lockstep.config.run import RunError
from lockstep.distributed import process_limits
from lockstep.launchers import local
from lockstep.launchers.processes import elastic_agent, machine_limits
from support.harness import tiny
from support.messages import mentions

# `local.prestart`, with a server that is still importing when its launcher is killed
LAUNCHER = """
import time
from multiprocessing.context import BaseContext
from lockstep.config.sections import LaunchSection
from lockstep.distributed import process_limits
from lockstep.launchers import local
preload = BaseContext.set_forkserver_preload
BaseContext.set_forkserver_preload = lambda self, names: preload(self, [*names[:-1], "slow"])
local.prestart(LaunchSection(device="cpu"), 2, loopback=False)
time.sleep(60)
"""
SLOW = """
import os, time
os.write(1, b"%d\\n" % os.getpid())
time.sleep(120)
"""
STARVED = """
from lockstep.distributed import process_limits
process_limits.lacking_threads = lambda: "no further thread can be started"
from lockstep.launchers.processes import fork_server_guard
"""


def _permit(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let a process start at most `most` further threads."""
    before, start = threading.active_count(), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if threading.active_count() - before >= most:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_too_few_threads_are_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    running = threading.active_count()
    _permit(monkeypatch, 5)
    assert process_limits.lacking_threads(5) is None
    assert "the limit of processes and threads" in (process_limits.lacking_threads(6) or "")
    assert threading.active_count() == running
    with pytest.raises(RunError, match="2 ranks on a machine need at least"):
        machine_limits.check_threads(2)
    monkeypatch.setattr(process_limits, "threads_of_imports", lambda: 6)
    for command in ("plan", "train", "predict", "evaluate", "verify", "sweep"):
        assert main([command]) == 2
        assert mentions(capsys.readouterr().err, "LS0236", "raise it")


def test_a_process_that_cannot_be_forked_does_not_blame_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_fork() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", no_fork)
    monkeypatch.setattr("multiprocessing.forkserver.set_forkserver_preload", lambda names: None)
    monkeypatch.setattr(
        "lockstep.cli._answer", lambda *_: local.prestart(tiny(launch={"device": "cpu"}).launch, 1, loopback=False)
    )
    assert main(["list"]) == 2
    assert mentions(capsys.readouterr().err, "LS0233", "raise it")


def test_a_fork_server_that_has_ended_is_a_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run() -> None:
        raise EOFError("unexpected EOF")

    agent: Any = SimpleNamespace(run=run)
    rendezvous: Any = None
    assert elastic_agent._seen_to_end(tmp_path, agent, rendezvous) == FAILED
    assert mentions(capsys.readouterr().err, "LS7325", "forked")


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_fork_server_ends_with_its_launcher_even_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-c", LAUNCHER]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    server = int(launcher.stdout.readline())
    launcher.kill()
    killed = time.monotonic()
    assert launcher.stdout.read() == ""  # ends with the server, which has the other end of this pipe
    assert time.monotonic() - killed < 60, f"process {server} ended by itself"
    assert launcher.wait() == -signal.SIGKILL
    starved = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, check=False)
    assert starved.returncode == BAD
    assert mentions(starved.stderr, "LS7512", "no further thread")
