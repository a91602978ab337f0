"""Replays a sequence of faults that once duplicated lines, left files behind and reported a finished run as failed."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from support.command import (
    LOCKSTEP,
    bits,
    each_step_once,
    ended,
    finish,
    kill,
    processes_in,
    ranks_of,
    start,
    step_of,
    until,
    write,
)
from support.marks import long
from support.signalling_strategies import state_of, variables

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
]
TRAIN = [*LOCKSTEP, "train", "run.yaml"]


def told(folder: Path, cache: Path) -> dict[str, Any]:
    """Return what `status` and launch.json say, without times and numbers of processes."""
    record = json.loads((folder / "out" / "launch.json").read_text())
    kept = {name: record[name] for name in ("launcher", "processes", "steps", "status", "job", "facts")}
    state = state_of(folder, cache)
    names = ("state", "status", "finished", "step", "steps", "launcher", "processes", "resumable_from")
    return kept | {f"status.{name}": state.get(name) for name in names}


def files(folder: Path) -> set[str]:
    """Return all files of OUTPUT, including hidden ones, except kept checkpoints."""
    return {str(p.relative_to(folder)) for p in (folder / "out").rglob("*") if "/step-" not in str(p)}


def as_untouched(folder: Path, cache: Path, untouched: Path) -> None:
    assert bits(folder) == bits(untouched)
    each_step_once(folder, untouched)
    assert told(folder, cache) == told(untouched, cache)
    assert files(folder) == files(untouched)


def test_ctrl_c_then_a_killed_rank_then_all_killed(tmp_path: Path, cache: Path, untouched: Path) -> None:
    write(tmp_path)
    process = start(TRAIN, tmp_path, cache)
    until(lambda: step_of(tmp_path) >= 5, "a step", process)
    os.killpg(process.pid, signal.SIGINT)
    status, out, err = ended(process)
    assert status == 75, (out, err)

    process = start(TRAIN, tmp_path, cache)
    until(lambda: step_of(tmp_path) >= 14, "a step", process)
    os.kill(ranks_of(process, tmp_path)[-1], signal.SIGKILL)
    status, out, err = ended(process)
    assert status == 1, (out, err)

    process = start(TRAIN, tmp_path, cache)
    until(lambda: step_of(tmp_path) >= 24, "a step", process)
    kill(process.pid, *processes_in(tmp_path))
    assert ended(process)[0] == -signal.SIGKILL
    until(lambda: not processes_in(tmp_path), "the ranks to end")

    finish(tmp_path, cache)
    as_untouched(tmp_path, cache, untouched)


@pytest.mark.parametrize("moment", [long("export"), "delivered"])
def test_killed_in_the_export_and_twice_started_again(
    moment: str, tmp_path: Path, cache: Path, untouched: Path
) -> None:
    write(tmp_path)
    killed = variables(moment, signal.SIGKILL, "rank")
    status, out, err = ended(
        start([*TRAIN, "strategy.name=support.signalling_strategies.Signalled"], tmp_path, cache, **killed)
    )
    assert status == 1, (out, err)
    for _ in range(2):
        finish(tmp_path, cache)
    as_untouched(tmp_path, cache, untouched)


@pytest.mark.parametrize("torn", [True, False])
def test_a_finished_run_s_record_is_recreated(torn: bool, tmp_path: Path, cache: Path, untouched: Path) -> None:
    write(tmp_path)
    shutil.copytree(untouched / "out", tmp_path / "out", symlinks=True)
    path = tmp_path / "out" / "launch.json"
    os.truncate(path, 40) if torn else path.unlink()
    finish(tmp_path, cache)
    as_untouched(tmp_path, cache, untouched)
