"""A run trains with the options that `lockstep plan --suggest` prints, and its ranks take the planned memory."""

import re
from pathlib import Path

import pytest

from lockstep_plan.devices import load as device_of
from lockstep_plan.fake_world import Simulated
from lockstep_plan.planner import candidates
from support.command import LOCKSTEP, ended, start_anew, step_of, write
from support.harness import run_on, tiny
from support.planned_memory import DEEP, NEAR, measure_memory, planned

PROCESSES, BATCH = 2, 5
CHOSEN = re.compile(r"^choose +(strategy\.name=.*)$", re.MULTILINE)


@pytest.mark.processes
@pytest.mark.timeout(3600)  # eight plans
@pytest.mark.slow
@pytest.mark.long
def test_a_suggested_job_trains_in_the_planned_memory(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, model=DEEP, batch_size=BATCH)
    words = ["plan", "run.yaml", "--suggest", "--processes", f"{PROCESSES}", "--device", "h100"]
    # anew: what simulates ranks is started from several threads, and from a process that has imported everything
    status, out, err = ended(start_anew([*LOCKSTEP, *words], tmp_path, cache), 2500)
    assert status == 0, err + out
    found = CHOSEN.search(out)
    assert found is not None, out
    chosen = found[1].split()
    run = tiny(*chosen, model=DEEP, batch_size=BATCH)
    assert run.micro_batches in {each.micro_batches for each in candidates(run, PROCESSES)}
    assert out.count("ddp") >= len({each.micro_batches for each in candidates(run, PROCESSES)})  # others were compared

    status, _, err = ended(
        start_anew(
            [*LOCKSTEP, "train", "run.yaml", *chosen, f"launch.processes={PROCESSES}", "steps=3"], tmp_path, cache
        )
    )
    assert status == 0, err + out
    assert step_of(tmp_path) == 3

    real = run_on(PROCESSES, measure_memory, run, timeout_s=600)
    plan: Simulated = run_on(1, planned, run, PROCESSES, 0, joined=False, timeout_s=600)[0]
    assert plan.peak == pytest.approx(max(each.peak for each in real), rel=NEAR)
    assert plan.peak < device_of("h100").memory_bytes
