"""`lockstep train` under every strategy, killed and restarted, ends with the weights of an uninterrupted job."""

import random
import signal
import sys
from pathlib import Path

import pytest

from support.command import (
    STEPS,
    CommandJob,
    bits,
    ended,
    kill,
    lines,
    until,
)
from support.marks import long, slow

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
]


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        long("allreduce", 3),  # killed in test_replay.py and test_killed.py
        slow("hf_accelerate", 2),
        ("hf_trainer", 2),
        long("fsdp2", 2),
        ("fsdp2", 3),
        ("pipeline", 2),
        ("zero2", 2),
    ],
)
def test_killed_and_resumed_on_the_same_strategy(
    name: str,
    processes: int,
    tmp_path: Path,
    job: CommandJob,
    untouched: Path,
) -> None:
    options = [f"strategy.name={name}", f"launch.processes={processes}"]
    job.write()
    process = job.start(*options)
    moment = random.Random(name).randrange(11, STEPS - 20)
    until(lambda: job.step() >= moment and job.saved() >= 10, f"step {moment}", process)
    kill(*job.processes())
    ended(process)
    assert "resuming after step" in job.finish(*options)
    if name.startswith("zero"):
        (ours, theirs) = (lines(folder)[-1]["loss"] for folder in (tmp_path, untouched))
        assert ours == pytest.approx(theirs, rel=1e-2)  # AdamW amplifies rounding differences
    else:
        assert job.bits() == bits(untouched)


def test_a_run_may_move_from_strategy_to_strategy(job: CommandJob, untouched: Path) -> None:
    """A run stopped under each strategy and resumed under the next one ends with the weights of an uninterrupted
    job."""
    job.write()
    for name, processes, until_step in (("ddp", 2, 6), ("pipeline", 2, 14), ("fsdp2", 3, 24)):
        options = [f"strategy.name={name}", f"launch.processes={processes}"]
        process = job.start(*options)
        until(lambda least=until_step: job.step() >= least, f"step {until_step}", process)
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 75
    job.finish("strategy.name=hf_trainer", "launch.processes=2")
    assert job.bits() == bits(untouched)
