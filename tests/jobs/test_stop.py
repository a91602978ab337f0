"""Stopping by time limit, and immediately."""

import signal
import sys
import time
from pathlib import Path

import pytest

from lockstep.distributed.signals import AGAIN_S
from support.command import CommandJob, bits, ended, until
from support.harness import tiny
from support.messages import raises
from support.places import TESTS_PATH

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
]


@pytest.mark.processes
@pytest.mark.parametrize("processes", [1, 2])
def test_max_time_has_status_75_and_the_same_command_resumes(processes: int, job: CommandJob, untouched: Path) -> None:
    job.write()
    option = f"launch.processes={processes}"
    process = job.start(option, "max_time=0.001s")
    status, out, err = ended(process)
    assert status == 75, err
    assert "stopped on request after step" in out
    job.finish(option)  # without the limit: it is no part of the arithmetic
    assert job.bits() == bits(untouched)


@pytest.mark.processes
def test_the_second_interrupt_does_not_wait(job: CommandJob) -> None:
    job.write()
    options = ["strategy.name=support.misbehaving.Endless", "launch.processes=1"]
    process = job.start(*options, PYTHONPATH=TESTS_PATH)
    until(lambda: job.step() >= 15, "step 15", process)
    process.send_signal(signal.SIGINT)
    time.sleep(AGAIN_S / 2)
    process.send_signal(signal.SIGINT)  # as torchrun passes on what the terminal has sent already
    time.sleep(AGAIN_S)
    assert process.poll() is None  # it waits for the end of the step
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


@pytest.mark.parametrize(("text", "seconds"), [("3h50m", 13800), ("90s", 90), ("1d", 86400), ("1.5h", 5400)])
def test_durations(text: str, seconds: float) -> None:
    assert tiny(f"max_time={text}").max_time_s == seconds


@pytest.mark.parametrize("text", ["soon", "3 hours", "'90'"])
def test_invalid_durations_are_refused(text: str) -> None:
    with raises("LS1002", "max_time"):
        tiny(f"max_time={text}")
