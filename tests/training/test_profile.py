"""`profile` writes a trace and a summary per rank, and does not change the weights."""

import gzip
import json
from pathlib import Path

import pytest

from lockstep.config.run import Run
from lockstep.data.job import arithmetic_of
from lockstep.distributed.step_timer import Profiler
from lockstep.distributed.world import World
from lockstep.track.report.report import write_report
from lockstep.training.loop import train
from lockstep.training.resolve import for_rank
from lockstep.training.session import build_session
from support.harness import digest, run_on, tiny
from support.messages import raises


def steps(world: World, run: Run, first: int, last: int) -> None:
    """Run steps `first` to `last`, each a matrix product."""
    import torch

    found = Profiler(run.profile, run.folder, world)
    for step in range(first, last + 1):
        torch.ones(64, 64) @ torch.ones(64, 64)
        found.advance(step)
    found.close()


def summaries(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("profile/*.summary.json"))]


@pytest.mark.processes
def test_each_rank_leaves_a_trace_and_a_summary(tmp_path: Path) -> None:
    run = tiny(f"output={tmp_path}", "profile.steps=2", "profile.after=1")
    run_on(2, steps, run, 11, 20)
    found = summaries(tmp_path)
    # one step is skipped, one is warmup
    assert [(s["rank"], s["first"], s["last"]) for s in found] == [(0, 13, 14), (1, 13, 14)]
    for summary in found:
        rows = {row["name"]: row for row in summary["operators"]}
        assert rows["aten::mm"]["calls"] == 2
        assert sum(row["share"] for row in rows.values()) <= 1.000001
        trace = json.loads(gzip.decompress((tmp_path / "profile" / summary["trace"]).read_bytes()))
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert names.count("aten::mm") == 2
    (tmp_path / "run.yaml").write_text(run.dump())
    page = write_report(tmp_path).read_text()
    assert "Rank 1, steps 13 to 14" in page
    assert "aten::mm" in page


@pytest.mark.processes
@pytest.mark.parametrize(("last", "seen"), [(3, [(3, 3)]), (2, [])])
def test_a_run_that_ends_early_keeps_a_partial_profile(last: int, seen: list, tmp_path: Path) -> None:
    run = tiny(f"output={tmp_path}", "profile.steps=5", "profile.after=1")
    run_on(1, steps, run, 1, last)
    assert [(s["first"], s["last"]) for s in summaries(tmp_path)] == seen


@pytest.mark.processes
def test_without_the_key_nothing_is_written(tmp_path: Path) -> None:
    run = tiny(f"output={tmp_path}")
    run_on(1, steps, run, 1, 10)
    assert not (tmp_path / "profile").exists()


def test_profile_keys_are_validated_and_do_not_affect_weights() -> None:
    assert arithmetic_of(tiny("profile.steps=5")) == arithmetic_of(tiny())
    with raises("LS1002", "profile.steps"):
        tiny("profile.steps=-1")
    with raises("LS1000", "step"):
        tiny("profile.step=1")


def weights(world: World, run: Run) -> str:
    """Return the weights of a job after the full training loop."""
    session = build_session(for_rank(run, world), world)
    train(session, session.new_state())
    found = digest(session.strategy.state.state_dict())
    session.strategy.close()
    return found


@pytest.mark.processes
def test_a_profiled_job_ends_with_the_same_weights(tmp_path: Path) -> None:
    plain, profiled = (tiny(f"output={tmp_path}/{n}", f"profile.steps={n}", "profile.after=0") for n in (0, 2))
    assert run_on(2, weights, plain)[0] == run_on(2, weights, profiled)[0]
    assert [(s["first"], s["last"]) for s in summaries(tmp_path / "2")] == [(2, 3)] * 2
