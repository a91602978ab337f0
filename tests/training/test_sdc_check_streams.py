"""`sdc_check` with streams and several sources: a repeated computation reads its examples again at any position."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.training.sdc_check import drawn
from support import stream_runs
from support.harness import TINY, run_on
from support.sdc_runs import STEPS, Planted, guarded, wrong_gradient
from support.stream_runs import mixture

pytestmark = pytest.mark.processes


def run_of(kind: str, folder: Path, *words: str) -> Run:
    if kind == "stream":  # windows of 24 examples, steps of 22: each step reaches one window further
        return stream_runs.streamed(stream_runs.shards(folder / "shards"), *words)
    return load(None, list(words), TINY | {"data": mixture(folder)})


@pytest.mark.parametrize("kind", ["stream", "sources"])
def test_faults_are_found_and_sound_runs_pass(kind: str, tmp_path: Path) -> None:
    alone = run_on(1, guarded, run_of(kind, tmp_path, "strategy.name=single"))[0]["digest"]
    words = ("strategy.name=allreduce", "sdc_check.every=1")
    for rank in run_on(3, guarded, run := run_of(kind, tmp_path, *words)):
        assert rank["found"] == {}
        assert rank["digest"] in (None, alone)
    sampled = {step: drawn(Job.of(run), step) for step in range(STEPS)}
    for rank in run_on(3, guarded, run, Planted(sampled[4], wrong_gradient)):
        assert set(rank["found"]) == {step for step, each in sampled.items() if each == sampled[4]}
