"""Losses and gradients that are no numbers, memory that does not suffice, losses that jump."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import bits, lines, train, write
from harness import build, digest, run_on, tiny

from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.distributed.world import World
from lockstep.strategies.allreduce import AllReduce
from lockstep.strategies.strategy import NotFinite, strategy_class
from lockstep.training.feed import Feed
from lockstep.training.spikes import Spikes

HERE = str(Path(__file__).parent)
BAD_STEP = 7


class Exploding(AllReduce):
    """The loss of one micro-batch is infinite in step 7."""

    def backward(self, micro: Any, targets: int, last: bool) -> Any:
        if self.step == BAD_STEP and micro.index == 3:
            loss = super().backward(micro, targets, last)
            return loss * float("inf")
        return super().backward(micro, targets, last)

    def train_step(self, batch: Any, learning_rate: float) -> Any:
        self.step = batch.step if learning_rate else -1
        return super().train_step(batch, learning_rate)


class Hungry(AllReduce):
    """No memory for the longest examples, on the last rank."""

    def dry_run(self, batch: Any, *then: Any) -> None:
        if self.world.rank == self.world.size - 1:
            raise torch.OutOfMemoryError("wanted 3 GiB more")
        super().dry_run(batch, *then)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_is_not_finite_ends_the_job_and_names_the_examples(
    processes: int, tmp_path: Path, cache: Path
) -> None:
    write(tmp_path)
    options = ["strategy.name=test_nonfinite.Exploding", f"launch.processes={processes}"]
    status, _, err = train(tmp_path, cache, *options, PYTHONPATH=HERE)
    assert status == 1
    assert "step 7: the loss is not a finite number; nothing was updated" in err
    assert "micro-batch 3: rows " in err
    assert err.count("micro-batch 3") == 1
    assert "Traceback" not in err
    assert max(line["step"] for line in lines(tmp_path)) == BAD_STEP


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_a_step_may_be_skipped_on_all_ranks_alike(tmp_path: Path, cache: Path) -> None:
    ends = []
    for processes in (1, 3):
        folder = tmp_path / str(processes)
        write(folder)
        options = ["strategy.name=test_nonfinite.Exploding", "on_nonfinite=skip", f"launch.processes={processes}"]
        status, out, err = train(folder, cache, *options, PYTHONPATH=HERE)
        assert status == 0, err
        assert "1 step(s) skipped: not finite" in out
        told = [line for line in lines(folder) if line["split"] == "train" and line.get("skipped_steps")]
        assert [(line["step"], line["loss"]) for line in told] == [(BAD_STEP + 1, None)]
        for line in (folder / "out" / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        ends.append(bits(folder))
    assert ends[0] == ends[1]


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_memory_that_does_not_suffice_is_told_before_the_first_step(tmp_path: Path, cache: Path) -> None:
    write(tmp_path)
    options = ["strategy.name=test_nonfinite.Hungry", "launch.max_restarts=3"]
    status, _, err = train(tmp_path, cache, *options, PYTHONPATH=HERE)
    assert status == 2
    assert err.count("memory does not suffice for the longest examples") == 1
    assert "more micro_batches" in err
    assert "restarting" not in err
    assert lines(tmp_path) == []


def dry_run(world: World, run: Run) -> tuple[str, str]:
    """The state after two steps, with a dry run before them and without."""
    digests = []
    for tried in (True, False):
        task, strategy = build(run, world)
        feed = Feed(run, task, strategy.own_micro_batches(), world.device)
        if tried:
            longest = feed.longest()
            assert longest.tokens >= max(feed.make(t).tokens for t in range(4))
            strategy.dry_run(longest)
        for t in range(2):
            strategy.train_step(feed.make(t), 1e-3)
        digests.append(digest(strategy.state_dict()))
        strategy.close()
    return digests[0], digests[1]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "{}") for name in plugins.names("strategies")),
        ("hf_accelerate", "{deepspeed: {zero_stage: 2}}"),
        ("hf_accelerate", "{fsdp: {}}"),
        ("zero1", "{bf16: {enabled: true}}"),
        ("zero3", "{bf16: {enabled: true}}"),
    ],
)
def test_a_dry_run_leaves_no_trace(name: str, options: str) -> None:
    precision = "bf16" if "bf16" in options else "fp32"
    run = tiny(f"strategy.name={name}", f"strategy.options={options}", f"precision={precision}")
    for with_one, without in run_on(1 if name == "single" else 2, dry_run, run, run=run):
        assert with_one == without


def poisoned(world: World, run: Run) -> tuple[int, list[int] | None]:
    """The last loss of the last rank (in a pipeline only it has any) is poisoned: its micro-batch, and those found
    bad."""
    task, strategy = build(run, world)
    feed = Feed(run, task, strategy.own_micro_batches(), world.device)
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
def test_every_strategy_finds_it_on_every_rank(name: str) -> None:
    run = tiny(f"strategy.name={name}")
    found = run_on(1 if name == "single" else 2, poisoned, run, run=run)
    bad = found[-1][0]
    assert [micro_batches for _, micro_batches in found] == [[bad]] * len(found)


def bad_at_step_1(run: Run, late: bool, steps: int) -> tuple[list[str], list[bool]]:
    """Digests after each step, and whether each was used; the losses of step 1 are no numbers."""
    task, strategy = build(run, World(run))
    strategy.asks_late = late  # as on CUDA
    feed = Feed(run, task, strategy.own_micro_batches(), torch.device("cpu"))
    real, digests, used = task.loss_sum, [], []
    for t in range(steps):
        task.loss_sum = lambda outputs, targets, t=t: real(outputs, targets) * (float("nan") if t == 1 else 1.0)
        used.append(strategy.train_step(feed.make(t), 1e-3).used)
        digests.append(digest(strategy.state_dict()))
    strategy.settle()
    return digests, [bool(each) for each in used]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_that_is_skipped_on_the_device_leaves_what_one_does_that_the_host_skips(optimizer: str) -> None:
    run = tiny("strategy.name=single", "on_nonfinite=skip", f"optim.name={optimizer}")
    found = bad_at_step_1(run, late=True, steps=4)
    assert found == bad_at_step_1(run, late=False, steps=4)
    assert found[1] == [True, False, True, True]
    assert found[0][0] == found[0][1] != found[0][2]


def test_a_bad_step_is_told_in_the_next_one_and_nothing_was_updated() -> None:
    run = tiny("strategy.name=single")
    with pytest.raises(NotFinite, match=r"step 1: micro-batches \[0, 1, 2, 3, 4, 5, 6, 7\]") as caught:
        bad_at_step_1(run, late=True, steps=2)  # by `settle`, before anything is saved
    assert caught.value.step == 1
    with pytest.raises(NotFinite, match="step 1"):
        bad_at_step_1(run, late=True, steps=3)


def test_deepspeed_cannot_skip() -> None:
    run = tiny("strategy.name=zero2", "on_nonfinite=skip")
    with pytest.raises(RunError, match="on_nonfinite"):
        strategy_class(run).check(run, 2)


def test_a_jump_is_told_from_a_wander() -> None:
    random = np.random.default_rng(0)
    spikes = Spikes()
    losses = 2 + 0.1 * random.standard_normal(200) - np.linspace(0, 1, 200)
    assert not any(spikes.seen(float(loss)) for loss in losses)
    assert spikes.seen(4.0)
    assert spikes.seen(float("nan"))
    assert not spikes.seen(1.0)
