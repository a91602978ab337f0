"""A run is resolved once: `Job` holds every decision, and ranks receive them instead of deciding again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.run import Run, RunError
from lockstep.data.job import Job, Scope
from lockstep.launchers import start
from lockstep.strategies.ddp import DDP
from lockstep.strategies.pipeline import Pipeline
from lockstep.training import resolve
from lockstep.training.resolve import Machine, for_rank
from support.harness import tiny
from support.messages import raises


def of(*overrides: str, processes: int = 2, scope: Scope = Scope.DATA) -> Job:
    return resolve.resolve(tiny(*overrides), Machine(), processes, scope)


def test_a_job_has_all_decisions_and_is_frozen() -> None:
    job = of("strategy.name=ddp")
    assert (job.strategy, job.processes, job.same_bits, job.padding) == (DDP, 2, True, None)
    assert job.attention == "lockstep_unpadded"
    assert "; attention without padding; computes" in job.summary()
    assert not of("strategy.name=ddp", "strategy.exact=false").same_bits
    padded = of("data.padding=batch", "model.attention=eager", "precision=bf16")
    assert (padded.padding, padded.attention) == ("data.padding is batch", "eager")
    assert "computes in bf16 with float32 weights;" in padded.summary()
    lora = ("model.adapter={r: 2}", "model.dtype=bfloat16")
    for keys, weights in (
        (lora, "fp32 with float32 weights of the adapter over a base in bfloat16"),
        ((*lora, "model.quantization=nf4"), "fp32 with float32 weights of the adapter over a base in 4 bits"),
        (("model.dtype=bfloat16", "precision=bf16"), "bf16 with bfloat16 weights and float32 master weights"),
        (("model.dtype=bfloat16", "precision=bf16", "optim.master_weights=false"), "bf16 with bfloat16 weights"),
    ):
        assert f"computes in {weights};" in Job.of(tiny(*keys)).summary()
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.processes = 3  # type: ignore[misc]


def test_ranks_are_sent_the_same_job() -> None:
    job = of("strategy.name=pipeline", "strategy.exact=false")
    sent = Job.load(job.dump())
    assert sent == job
    assert (sent.strategy, sent.task) == (Pipeline, job.task)
    assert Job.load(job.into(Path("elsewhere")).dump()).run.output == "elsewhere"


def world(size: int, rank: int = 0, joining: bool = False) -> Any:
    return SimpleNamespace(size=size, rank=rank, joining=joining, device=SimpleNamespace(type="cpu"))


def test_ranks_do_not_repeat_decisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = of()
    calls: list[int] = []

    def again(run: Run, machine: Machine, processes: int, **how: Any) -> Job:
        calls.append(processes)
        return job

    monkeypatch.setattr(resolve, "resolve", again)
    assert for_rank(job, world(2)) is job
    assert for_rank(job, world(1, joining=True)) is job  # a replacement that has not met the others
    assert calls == []
    # a rank checks only what its machine alone knows: the number of ranks, and whether the data is still complete there
    for_rank(job, world(3))
    gone = dataclasses.replace(job.data, splits=job.data.splits | {"train": str(tmp_path / "gone")})
    for_rank(dataclasses.replace(job, prepared=gone), world(2))
    for_rank(job.run, world(2))  # the run was not resolved
    assert calls == [3, 2, 2]


def test_a_rank_that_resolves_refuses_what_the_command_refuses() -> None:
    run = tiny("strategy.name=single")
    for refuse in (lambda: for_rank(run, world(2)), lambda: resolve.resolve(run, Machine(), 2)):
        with raises("LS4260"):
            refuse()
    assert for_rank(run, world(1)).processes == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_has_trackers(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.track.tensorboard import TensorBoard

    def missing() -> None:
        raise RunError("track.to: tensorboard is not installed")

    monkeypatch.setattr(TensorBoard, "check", missing)
    run = tiny("track.to=[tensorboard]")
    if rank:
        assert for_rank(run, world(2, rank))
    else:
        with pytest.raises(RunError, match="tensorboard is not installed"):
            for_rank(run, world(2, rank))


def test_every_command_calls_the_same_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands are `train`, `plan`, `verify`, `bench`, `replay`, `diff` and `branch`; `init` and `sweep` resolve
    options only."""
    from lockstep.lab import bench
    from lockstep.lab.init import init
    from lockstep.lab.sweep import sweep

    scopes: list[Scope] = []
    right = resolve.resolve

    def seen(run: Run, machine: Machine, processes: int, scope: Scope = Scope.DATA, *rest: Any) -> Job:
        scopes.append(scope)
        return right(run, machine, processes, scope, *rest)

    monkeypatch.setattr(start, "resolve", seen)
    run = tiny(f"output={tmp_path / 'out'}", "launch.processes=1")
    launcher = start.launcher_of(run.launch)
    plan = launcher.plan(run)
    console: Any = SimpleNamespace(facts=lambda rows: None, detail=lambda rows: None, note=lambda text: None)
    ready, steps = start.ready(launcher, plan, console)
    assert steps is None
    examined = start.preview(launcher, plan)
    assert isinstance(examined, Job)
    assert ready.job == dataclasses.replace(examined, scope=Scope.START)
    start.resolved(run)  # verify, replay, diff, branch
    bench.resolved(run)
    init.plan(run)
    start.refuse_options(run)
    assert sweep.start is start
    assert scopes == [Scope.START, Scope.OUTPUT, Scope.DATA, Scope.DATA, Scope.OPTIONS, Scope.OPTIONS]


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        (["strategy.name=ddp"], 2),
        (["strategy.name=allreduce"], 2),
        (["strategy.name=ddp", "strategy.exact=false"], 1),
        (["strategy.name=fsdp2"], 1),
    ],
)
def test_gloo_has_two_threads_without_functional_collectives(
    overrides: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.training import consistency_check, session

    seen: list[int] = []
    joined = world(2)
    joined.join = lambda: seen.append(joined.gloo_threads)  # set before the ranks meet
    monkeypatch.setattr(consistency_check, "agree", lambda *what: None)
    session.join_ranks(of(*overrides), joined)
    assert seen == [threads]
