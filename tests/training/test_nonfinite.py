"""Losses and gradients that are not finite, too little memory, and loss spikes."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.checkpoint.manifest import Progress, best_first, score_of
from lockstep.config import plugins
from lockstep.config.model_selection import Best
from lockstep.config.run import Run
from lockstep.data.job import Job, strategy_class
from lockstep.distributed.world import World
from lockstep.lab.sweep import sweep
from lockstep.lab.sweep.sweep_file import read as read_sweep
from lockstep.proof import attest, diff, replay, verify
from lockstep.proof import recording as recordings
from lockstep.proof.recording import TRACE, Recording
from lockstep.proof.step_writer import RankStep, StepWriter, WholeStep
from lockstep.strategies.strategy import NotFinite
from lockstep.track.console import Console
from lockstep.training import fingerprints, startup
from lockstep.training.data_loader import StepLoader
from lockstep.training.resolve import for_rank
from lockstep.training.session import build_session
from lockstep.training.step_record import StepRecord, prints_of
from lockstep.training.train_state import Spikes
from lockstep_plan import calibrate
from support.command import CommandJob, bits, lines, train, write
from support.harness import build, build_with_feed, digest, run_on, tiny
from support.marks import long
from support.messages import raises
from support.misbehaving import BAD_STEP
from support.places import TESTS_PATH


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_is_not_finite_ends_the_job_and_names_the_examples(processes: int, job: CommandJob) -> None:
    job.write()
    options = ["strategy.name=support.misbehaving.Exploding", f"launch.processes={processes}"]
    status, _, err = job.train(*options, PYTHONPATH=TESTS_PATH)
    assert status == 1
    assert "step 7: the loss is not a finite number; nothing was updated" in err
    assert "micro-batch 3: rows " in err
    assert err.count("micro-batch 3") == 1
    assert "Traceback" not in err
    assert max(line["step"] for line in job.lines()) == BAD_STEP


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_all_ranks_may_skip_the_same_step(tmp_path: Path, cache: Path) -> None:
    ends = []
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        write(folder)
        options = ["strategy.name=support.misbehaving.Exploding", "on_nonfinite=skip", f"launch.processes={processes}"]
        status, out, err = train(folder, cache, *options, PYTHONPATH=TESTS_PATH)
        assert status == 0, err
        assert "1 step skipped: not finite" in out
        told = [line for line in lines(folder) if line["split"] == "train" and line.get("skipped_steps")]
        assert [(line["step"], line["loss"]) for line in told] == [(BAD_STEP + 1, None)]
        for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        ends.append(bits(folder))
    assert ends[0] == ends[1]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_insufficient_memory_is_reported_before_the_first_step(job: CommandJob) -> None:
    job.write()
    options = ["strategy.name=support.misbehaving.NoMemory", "launch.max_restarts=3"]
    status, _, err = job.train(*options, PYTHONPATH=TESTS_PATH)
    assert status == 2
    assert err.count("out of memory on the longest examples") == 1
    assert "more micro_batches" in err
    assert "restarting" not in err
    assert job.lines() == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for peaks")
@pytest.mark.parametrize(
    ("free", "tried"),
    [
        pytest.param(1 << 40, [8, 4, 4], id="plenty"),
        pytest.param(1 << 20, [8, 4, 4, 64, 64, 64], id="little"),
        pytest.param(0, [64, 64, 64], id="unknown"),
    ],
)
def test_the_dry_run_uses_few_examples_if_memory_surely_suffices(
    free: int, tried: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """16 examples in each of 4 micro-batches and 64 per split in an evaluation; all are tried if memory may not
    suffice."""
    run = tiny("strategy.name=single", "batch_size=64", "micro_batches=4", f"output={tmp_path}", "launch.device=cpu")
    world = World(run)
    session = build_session(for_rank(run, world), world)
    seen, evaluate, step = list[int](), startup.evaluate_with_tables, session.strategy.train_step

    def evaluated(*given: Any, **more: Any) -> Any:
        seen.append(len(given[4]))
        return evaluate(*given, **more)

    def trained(batch: Any, rate: float) -> Any:
        longest = session.feed.columns.longest(len(batch.ids))
        assert sorted(batch.ids) == sorted(longest)
        seen.append(len(batch.ids))
        return step(batch, rate)

    monkeypatch.setattr(startup, "free_memory", lambda sharing: free)
    monkeypatch.setattr(startup, "evaluate_with_tables", evaluated)
    monkeypatch.setattr(session.strategy, "train_step", trained)
    startup.try_before_training(session)
    world.close()
    assert seen == tried


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for peaks")
def test_memory_of_few_examples_bounds_that_of_all() -> None:
    """A few examples bound the memory of all: each takes 16 MiB, and the optimizer's state 64 MiB."""

    def took(examples: int) -> float:
        bound = startup.MemoryBound()
        held = [bytearray(b"x") * (64 << 20), *(bytearray(b"x") * (16 << 20) for _ in range(examples))]
        bound.end(1, 64 << 20)
        assert len(held) == examples + 1
        return bound.bytes

    few, every = took(2), took(16)
    assert every == pytest.approx((64 + 16 * 16) << 20, rel=0.1)
    bound = startup.MemoryBound()
    held = [bytearray(b"x") * (64 << 20), *(bytearray(b"x") * (16 << 20) for _ in range(2))]
    bound.end(8, 64 << 20)
    assert bound.bytes >= 0.95 * every > few
    assert len(held) == 3


def dry_run(world: World, run: Run) -> tuple[str, str]:
    """Return the state after two steps, with and without a dry run before them."""
    digests = []
    for tried in (True, False):
        _, strategy, feed = build_with_feed(run, world)
        if tried:
            longest = feed.longest()
            assert longest.tokens >= max(feed.make(t).tokens for t in range(4))
            strategy.dry_run(longest)
        for t in range(2):
            strategy.train_step(feed.make(t), 1e-3)
        digests.append(digest(strategy.state.state_dict()))
        strategy.close()
    return digests[0], digests[1]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "{}") for name in plugins.names("strategies")),
        ("hf_accelerate", "{deepspeed: {zero_stage: 2}}"),
        ("hf_accelerate", "{fsdp: {}}"),
        long("zero1", "{bf16: {enabled: true}}"),
        ("zero3", "{bf16: {enabled: true}}"),
    ],
)
def test_a_dry_run_changes_nothing(name: str, options: str) -> None:
    precision = "bf16" if "bf16" in options else "fp32"
    run = tiny(f"strategy.name={name}", f"strategy.options={options}", f"precision={precision}")
    for with_one, without in run_on(1 if name == "single" else 2, dry_run, run):
        assert with_one == without


def poisoned(world: World, run: Run) -> tuple[int, list[int] | None]:
    """Make the last rank's last loss NaN (in a pipeline only that rank has losses); return its micro-batch, and those
    reported."""
    task, strategy, feed = build_with_feed(run, world)
    batch = feed.make(0)
    real, micro_batch = task.loss_sum, batch.micro_batches[-1]
    left = iter(range(len(batch.micro_batches))[::-1])
    if world.rank == world.size - 1:
        task.loss_sum = lambda *given: real(*given) * (1.0 if next(left) else float("nan"))  # type: ignore[method-assign]
    try:
        strategy.train_step(batch, 1e-3)
    except NotFinite as caught:
        return micro_batch.index, caught.micro_batches
    return micro_batch.index, None


@pytest.mark.processes
@pytest.mark.parametrize("name", plugins.names("strategies"))
def test_every_strategy_detects_nonfinite_steps_on_every_rank(name: str) -> None:
    run = tiny(f"strategy.name={name}")
    found = run_on(1 if name == "single" else 2, poisoned, run)
    bad = found[-1][0]
    assert [micro_batches for _, micro_batches in found] == [[bad]] * len(found)


def bad_at_step_1(run: Run, late: bool, steps: int) -> tuple[list[str], list[bool]]:
    """Return the digest after each step and whether its update was used; the losses of step 1 are NaN."""
    task, strategy = build(run, World(run))
    strategy.update.finite.late = late  # as on CUDA
    feed = StepLoader(task, strategy.own_micro_batches(), torch.device("cpu"))
    real, digests, used = task.loss_sum, [], []
    for t in range(steps):
        task.loss_sum = lambda outputs, targets, t=t: real(outputs, targets) * (float("nan") if t == 1 else 1.0)
        used.append(strategy.train_step(feed.make(t), 1e-3).used)
        digests.append(digest(strategy.state.state_dict()))
    strategy.update.settle()
    return digests, [bool(each) for each in used]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_skipping_on_the_device_equals_skipping_on_the_host(optimizer: str) -> None:
    run = tiny("strategy.name=single", "on_nonfinite=skip", f"optim.name={optimizer}")
    found = bad_at_step_1(run, late=True, steps=4)
    assert found == bad_at_step_1(run, late=False, steps=4)
    assert found[1] == [True, False, True, True]
    assert found[0][0] == found[0][1] != found[0][2]


def test_a_nonfinite_step_is_reported_one_step_later_without_an_update() -> None:
    run = tiny("strategy.name=single")
    with pytest.raises(NotFinite, match=r"step 1: micro-batches \[0, 1, 2, 3, 4, 5, 6, 7\]") as caught:
        bad_at_step_1(run, late=True, steps=2)  # before anything is saved
    assert caught.value.step == 1
    with pytest.raises(NotFinite, match="step 1"):
        bad_at_step_1(run, late=True, steps=3)


def test_deepspeed_cannot_skip() -> None:
    run = tiny("strategy.name=zero2", "on_nonfinite=skip")
    with raises("LS4140"):
        strategy_class(run).check(Job.of(run, 2))


def test_loss_spikes_are_distinguished_from_drift() -> None:
    random = np.random.default_rng(0)
    spikes = Spikes()
    losses = 2 + 0.1 * random.standard_normal(200) - np.linspace(0, 1, 200)
    assert not any(spikes.is_spike(float(loss)) for loss in losses)
    assert spikes.is_spike(4.0)
    assert spikes.is_spike(float("nan"))
    assert not spikes.is_spike(1.0)


# -- no value that is not finite passes a comparison -----------------------------------------------------------------


def recording(folder: Path, weight: float, loss: float = 1.0, buffer: float = 0.0) -> Path:
    """Write the record of a one-step job for `lockstep verify`, with this last weight, loss and buffer."""
    folder.mkdir()
    gradients, weights = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, weight]), "b": torch.tensor([buffer])}
    tensors = {"gradients": prints_of(gradients), "after": prints_of(weights)}
    step = StepRecord.of_numbers(0, loss, 1.0, targets=(8.0, 8.0), **tensors)
    found = Recording("ddp", 2, True, 0.0, {"loss": 1.0, "r2": math.nan}, [step], {}, None, None, [])
    recordings.write(folder, found)
    before = {"w": torch.ones(2), "b": torch.zeros(1)}
    writer = StepWriter(folder / TRACE, before, "adamw", {"command": [], "scores": found.probe})
    writer.step(WholeStep(0, loss, gradients, weights, {"lr": 0.1}, (1.0, 1.0), [RankStep()], 8.0))
    writer.close()
    return folder


def output(folder: Path, *losses: float) -> Path:
    """Return the output folder of a run with a fingerprint of each step."""
    folder.mkdir()
    (folder / "run.yaml").write_text(tiny(f"output={folder}").dump())
    lines = [json.dumps(StepRecord.of_numbers(n + 1, loss, 1.0).to_json()) for n, loss in enumerate(losses)]
    (folder / fingerprints.FILE).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_fail_every_comparison(
    bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Non-finite values fail every comparison, even with equal bits on both sides. The finite controls pass."""
    console = Console(True)
    verified = [recording(tmp_path / f"finite-{i}", 2.0, buffer=-math.inf) for i in range(2)]
    assert verify.tell(console, *verified) == 0  # a mask may hold infinities
    assert "the same bits, as expected" in capsys.readouterr().out
    for case, values in enumerate([{"weight": bad}, {"weight": 2.0, "loss": bad}, {"weight": 2.0, "buffer": math.nan}]):
        folders = [recording(tmp_path / f"{case}-{i}", **values) for i in range(2)]
        assert verify.tell(console, *folders) == 1, values
        assert ", as expected" not in (said := capsys.readouterr().out)
        assert "not finite" in said
    faults = [recordings.read(folder).steps[0].fault() for folder in (verified[0], tmp_path / "1-0", tmp_path / "2-0")]
    assert faults[0] is None  # `verify --write` and `--against` refuse a step with one
    assert "loss or gradient norm is not finite" in str(faults[1])
    assert "b is not finite" in str(faults[2])

    a, b = (output(tmp_path / name, 1.0, bad) for name in "ab")
    assert diff.diff(a, b, [], look=False) == 1
    assert "step 2: loss or gradient norm is not finite" in " ".join(capsys.readouterr().out.split())
    assert diff.diff(*(output(tmp_path / name, 1.0, 2.0) for name in "cd"), [], look=False) == 0
    good, worse = (StepRecord.of_numbers(1, loss, 1.0) for loss in (1.0, bad))
    assert replay.first_mismatch([replace(good, finite=True)], [good]) is None
    assert "not finite" in str(replay.first_mismatch([worse], [worse]))  # audit uses this function, too
    assert "not finite" in str(replay.first_mismatch([replace(good, finite=False)], [good]))
    assert replay.first_mismatch([worse], [worse], skips=True) is None  # a loss scale skips such steps
    assert "not finite" in str(attest._of_numbers(a))
    assert attest._of_numbers(tmp_path / "c") is None

    with raises("LS8045", "links.latency_s"):
        calibrate.check_finite({"links": {"latency_s": bad}, "flops": [1e9]})

    run = tiny("checkpoint.best=-loss", "evaluate.every=1", "evaluate.patience=2")
    best = run.checkpoint.best
    progress = Progress.of(best, {}).after(1, score_of(best, {"loss": 2.0})).after(2, score_of(best, {"loss": bad}))
    assert (progress.step, progress.since, progress.over(run.evaluate.patience)) == (1, 1, False)
    assert progress.after(3, score_of(best, {"loss": bad})).over(run.evaluate.patience)
    assert [c.step for c in best_first(best, {1: {"loss": 2.0}, 2: {"loss": bad}})] == [1]
    assert not Best().update(1, {"loss": bad})

    values = tiny(f"output={tmp_path / 'out'}").model_dump(mode="json")
    options = dict.fromkeys(("parallel", "search", "out", "split")) | {"over": ["seed=1,2"], "metric": "-loss"}

    def done(trial: Any, split: str) -> None:
        trial.state, trial.scores = "done", {"loss": bad if trial.keys["seed"] == 2 else 1.0}

    monkeypatch.setattr(sweep.SweepTrial, "look", done)
    assert sweep.sweep(read_sweep(None, values, [], options)) == 1
    assert "loss is not a finite number in seed-2" in capsys.readouterr().out
    board = sweep.Leaderboard(read_sweep(None, values, [], options), console)
    assert [board.metric(trial) for trial in board.ranked()] == [1.0, None]
