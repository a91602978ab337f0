"""`guard` of streams and of several sources: a second computation reads its examples again, wherever training is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import stream_runs
from support.harness import TINY, run_on
from test_guard import STEPS, Planted, guarded, wrong_gradient

from lockstep.config.run import Run, load
from lockstep.training.sdc_check import drawn

pytestmark = pytest.mark.processes


def mixture(folder: Path) -> dict[str, Any]:
    files = [stream_runs.write(folder / f"{name}.jsonl", stream_runs.rows_of(60, ord(name))) for name in "ab"]
    held = stream_runs.write(folder / "held.jsonl", stream_runs.rows_of(20, 9))
    sources = [{"source": str(file), "weight": [[0, 2], [3, 1 + place]]} for place, file in enumerate(files)]
    return {"sources": [sources[0] | {"validation": str(held)}, sources[1]], "max_length": 32}


def run_of(kind: str, folder: Path, *words: str) -> Run:
    if kind == "stream":  # windows of 24 examples, steps of 22: a window more with each step
        return stream_runs.streamed(stream_runs.shards(folder / "shards"), *words)
    return load(None, list(words), TINY | {"data": mixture(folder)})


@pytest.mark.parametrize("kind", ["stream", "sources"])
def test_nothing_is_found_where_nothing_is_wrong_and_a_fault_is(kind: str, tmp_path: Path) -> None:
    alone = run_on(1, guarded, run := run_of(kind, tmp_path, "strategy.name=single"), run=run)[0]["digest"]
    words = ("strategy.name=allreduce", "sdc_check.every=1")
    for rank in run_on(3, guarded, run := run_of(kind, tmp_path, *words), run=run):
        assert rank["found"] == {}
        assert rank["digest"] in (None, alone)
    sampled = {step: drawn(run, step) for step in range(STEPS)}
    for rank in run_on(3, guarded, run, Planted(sampled[4], wrong_gradient), run=run):
        assert set(rank["found"]) == {step for step, each in sampled.items() if each == sampled[4]}
