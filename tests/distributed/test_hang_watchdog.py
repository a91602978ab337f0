"""Ranks that stop answering: frozen, or busy with something else while the others wait. Named, and the job goes on."""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.distributed.hang_watchdog import Watchdog, verdict
from lockstep.distributed.world import World
from support.command import STEPS, CommandJob, bits, ended, until
from support.harness import tiny
from support.marks import slow
from support.messages import mentions
from support.places import TESTS_PATH

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
]
HANG_S = 12  # a job is held for some seconds here, and a busy machine takes its time to start ranks again


@pytest.mark.processes
@pytest.mark.parametrize("rank", [1, slow(0)])  # rank 0 holds the store that the others beat in
def test_a_hanging_rank_is_named_and_the_job_restarts(
    rank: int, tmp_path: Path, job: CommandJob, untouched: Path
) -> None:
    job.write()
    options = [
        "launch.max_restarts=1",
        f"launch.hang_timeout_s={HANG_S}",
        "strategy.name=support.waiting_strategy.Held",
    ]
    process = job.start(*options, PYTHONPATH=TESTS_PATH)
    until(lambda: job.saved() >= 20 and len(list(tmp_path.glob("held-*"))) == 2, "both in a step that waits", process)
    time.sleep(
        3 * Watchdog(World(tiny()), HANG_S).interval_s
    )  # each beats, the other one reads it, and one more for a busy machine
    main = json.loads((tmp_path / "out" / "launch.json").read_text())["main"]["pid"]
    (frozen,) = (pid for pid in job.ranks(process) if (pid == main) is (rank == 0))
    os.kill(frozen, signal.SIGSTOP)
    (tmp_path / "go").touch()
    status, out, err = ended(process)
    assert status == 0, err
    assert err.count(f"no heartbeat for {HANG_S} s") == 1
    assert f"rank {rank} (pid {frozen})" in err
    assert re.search(r"on \S+, (step|saving after step) \d+\b", err)  # where it was
    assert "restarting from the last checkpoint" in err
    assert "resuming after step" in out
    assert job.bits() == bits(untouched)


@pytest.mark.processes
def test_a_diverging_rank_is_named_with_its_stack(job: CommandJob, untouched: Path) -> None:
    job.write()
    options = ["launch.max_restarts=1", f"launch.hang_timeout_s={HANG_S}", "strategy.name=support.misbehaving.Dawdling"]
    process = job.start(*options, PYTHONPATH=TESTS_PATH)
    status, _, err = ended(process)
    assert status == 0, err
    assert err.count(f"no progress for {HANG_S} s") == 1
    held_up = err.partition("Held up by:")[2].partition("waiting for it:")[0]
    assert "rank 1" in held_up
    assert "rank 0" not in held_up
    assert "step 20" in held_up
    assert "time.sleep(0.1)" in held_up
    assert re.search(r"waiting for it: .*, in gloo:\w+ number \d+ of default_pg \(Float \[\d+\]", err)
    assert job.bits()["export"] == bits(untouched)["export"]
    assert job.step() == STEPS


class Gone:
    """A store whose holder has ended."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("asked", [True, False])
def test_a_single_rank_ends_on_request(
    asked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends: list[int] = []
    monkeypatch.setattr("lockstep.distributed.hang_watchdog.os._exit", ends.append)
    monkeypatch.setattr("lockstep.distributed.hang_watchdog.LEFT_S", 0.1)
    world = World(tiny())
    watch = Watchdog(world, 0.5)
    watch._store, watch._main = Gone(), threading.get_ident()
    world.stop.came = asked  # as its signal handler notes it
    threading.Timer(1.0, watch._over.set).start()  # or it comes to its end by itself
    watch._run()
    assert ends == [1] * asked
    assert mentions(capsys.readouterr().err, "LS7061", "rank 0")


def test_the_verdict_names_the_rank_that_is_behind() -> None:
    def beat(progress: int, *stack: str) -> dict[str, Any]:
        return {"pid": 7, "host": "h", "place": f"step {progress}", "progress": progress, "stack": list(stack)}

    waiting, busy = 'File "site-packages/torch/distributed/c10d.py"', 'File "own.py"'
    said = verdict({0: beat(4, waiting), 1: beat(3, waiting), 2: beat(4, waiting)}, [], 9)
    assert "rank 1 (pid 7) on h, step 3; its stack" in said
    assert "waiting for it: rank 0" in said
    said = verdict({0: beat(4, waiting), 1: beat(4, busy)}, [], 9)
    assert said.index("rank 1") < said.index("waiting for it: rank 0")
    for goes_on, then in ((False, "This process ends"), (True, "It counts as failed")):
        said = verdict({0: beat(4), 1: beat(4)}, [1], 9, goes_on)
        assert said.startswith("no heartbeat for 9 s from rank 1")
        assert said.endswith(then)
