"""`lockstep train` under every strategy, killed in the middle and started again: the weights of an untouched job."""

import random
import signal
import sys
from pathlib import Path

import pytest

from support.command import (
    LOCKSTEP,
    STEPS,
    bits,
    ended,
    finish,
    kill,
    lines,
    processes_in,
    saved,
    start,
    step_of,
    until,
    write,
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
        long("allreduce", 3),  # which test_replay.py and test_killed.py kill
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
    cache: Path,
    untouched: Path,
) -> None:
    options = [f"strategy.name={name}", f"launch.processes={processes}"]
    write(tmp_path)
    process = start([*LOCKSTEP, "train", "run.yaml", *options], tmp_path, cache)
    moment = random.Random(name).randrange(11, STEPS - 20)
    until(lambda: step_of(tmp_path) >= moment and saved(tmp_path) >= 10, f"step {moment}", process)
    kill(*processes_in(tmp_path))
    ended(process)
    assert "resuming after step" in finish(tmp_path, cache, *options)
    if name.startswith("zero"):
        (ours, theirs) = (lines(folder)[-1]["loss"] for folder in (tmp_path, untouched))
        assert ours == pytest.approx(theirs, rel=1e-2)  # AdamW's drift
    else:
        assert bits(tmp_path) == bits(untouched)


def test_a_run_may_move_from_strategy_to_strategy(tmp_path: Path, cache: Path, untouched: Path) -> None:
    """Stopped under each, and gone on with under the next."""
    write(tmp_path)
    for name, processes, until_step in (("ddp", 2, 6), ("pipeline", 2, 14), ("fsdp2", 3, 24)):
        options = [f"strategy.name={name}", f"launch.processes={processes}"]
        process = start([*LOCKSTEP, "train", "run.yaml", *options], tmp_path, cache)
        until(lambda least=until_step: step_of(tmp_path) >= least, f"step {until_step}", process)
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 75
    finish(tmp_path, cache, "strategy.name=hf_trainer", "launch.processes=2")
    assert bits(tmp_path) == bits(untouched)
