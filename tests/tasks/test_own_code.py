"""A task of one's own: what it draws, and running statistics of its model, are the same at any number of processes."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lockstep.config.run import Run
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import MicroBatch
from lockstep.distributed.randomness import own_generators
from lockstep.distributed.world import World
from lockstep.proof import recording
from lockstep.proof.verify import compare_recordings, findings
from lockstep.tasks.classification import Classification
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import for_rank
from support.harness import build_with_feed, digest, run_on, tiny
from support.marks import needs

dice = random.Random(5)  # for `own_generators`


class Noisy(nn.Module):
    """A layer with BatchNorm in the middle, which draws from all three generators."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(size)

    def forward(self, hidden: Tensor) -> Tensor:
        noise = random.random() + np.random.random() + torch.rand(())
        return self.norm(hidden.flatten(0, 1)).view_as(hidden) + 0.1 * noise


class Drawing(Classification):
    """Collates and computes with random numbers, in training and in evaluation."""

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        micro = super().collate(columns, rows, index)
        ids = micro.inputs["input_ids"].clone()
        ids[:, random.randrange(ids.shape[1])] = int(np.random.randint(5, 300))
        ids[:, int(torch.randint(ids.shape[1], ()))] = 7
        return MicroBatch(index, {**micro.inputs, "input_ids": ids}, micro.targets)

    def model(self, empty: bool = False) -> nn.Module:
        model = super().model(empty)
        with torch.device("meta" if empty else "cpu"):
            model.transformer.drop = Noisy(model.config.n_embd)
        return model


def counted(module: nn.Module, args: tuple, output: Any) -> None:
    module.count += module.training


class Counting(Drawing):
    """Its model counts in a buffer: nothing says what the count of two processes is."""

    def model(self, empty: bool = False) -> nn.Module:
        model = super().model(empty)
        model.register_buffer("count", torch.zeros((), device="meta" if empty else "cpu"))
        model.register_forward_hook(counted)
        return model


class Holding(Drawing):
    """Has generators of its own."""

    def model(self, empty: bool = False) -> nn.Module:
        self.draws = {"words": np.random.default_rng(3)}
        model = super().model(empty)
        model.dice = torch.Generator()
        return model


def trained(world: World, run: Run) -> dict[str, Any]:
    """Six steps as training makes them: the dry run, then the feed's steps; then an evaluation and the export."""
    task, strategy, feed = build_with_feed(run, world)
    before = digest(dict(strategy.model.named_buffers()))
    strategy.dry_run(feed.longest())
    untouched = before == digest(dict(strategy.model.named_buffers()))
    results = [strategy.train_step(batch, 1e-3) for batch in feed.steps(after=0)]
    scores = evaluate(world, task, strategy, task.splits["validation"])
    exported = strategy.state.export()
    found = {
        "digest": digest(strategy.state.state_dict()),
        "buffers": digest(dict(strategy.model.named_buffers())),
        "norm": [float(r.grad_norm) for r in results],
        "loss": [float(r.loss) for r in results],
        "scores": scores,
        "untouched": untouched,
        "exported": exported and digest({k: v for k, v in exported.items() if "running" in k}),
        "mean": strategy.model.transformer.drop.norm.running_mean.clone(),
    }
    strategy.close()
    return found


def of(name: str, ranks: int, task: str = "Drawing") -> list[dict[str, Any]]:
    run = tiny(f"strategy.name={name}", "evaluate.batch_size=3", task={"name": f"test_own_code.{task}"})
    return run_on(ranks, trained, run)


@pytest.fixture(scope="module")
def single() -> dict[str, Any]:
    return of("single", 1)[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("allreduce", 3), ("ddp", 2), ("fsdp2", 3), ("hf_accelerate", 2), ("hf_trainer", 2), ("fsdp2", 1)],
)
def test_own_random_numbers_and_statistics_are_the_same_at_any_number(name: str, ranks: int, single: dict) -> None:
    first, *others = of(name, ranks)
    for found in (first, *others):
        for key in ("loss", "norm", "scores", "buffers"):
            assert found[key] == single[key], key
    assert first["digest"] == single["digest"]
    assert first["exported"] == single["exported"]


@pytest.mark.processes
def test_the_dry_run_leaves_no_trace_and_the_steps_do(single: dict) -> None:
    assert single["untouched"]
    assert single["mean"].abs().max() > 0


@pytest.mark.processes
def test_zero_has_one_set_of_statistics() -> None:
    needs("deepspeed")
    first, second = of("zero1", 2)
    assert first["buffers"] == second["buffers"]
    assert first["untouched"]


def test_batch_statistics_count_a_step_as_one_batch() -> None:
    """The mean of what micro-batches of unequal size make of the statistics, weighted by examples; blank ones left
    out."""
    from lockstep.data.batch import IGNORED
    from lockstep.strategies.exact.step_totals import Statistics

    model = nn.Sequential(nn.BatchNorm1d(2, momentum=0.5))
    model[0].running_mean.fill_(1.0)
    statistics = Statistics(model)
    statistics.start(3)
    for index, (count, value) in enumerate([(3, 4.0), (2, 100.0), (1, 8.0)]):
        if count > 1:
            model(torch.full((count, 2), value))
        else:
            model[0].running_mean.mul_(0.5).add_(value * 0.5)
        targets = torch.full((count,), IGNORED if value == 100.0 else 1)
        statistics.take(MicroBatch(index, {}, targets))
        assert model[0].running_mean.tolist() == [1.0, 1.0]
    statistics.finish(lambda made: made)
    assert model[0].running_mean.tolist() == [(2.5 * 3 + 4.5) / 4] * 2


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_buffers_that_cannot_be_merged_are_refused(name: str) -> None:
    run = tiny(f"strategy.name={name}", task={"name": "test_own_code.Counting"})
    with pytest.raises(AssertionError, match=r"RunError: strategy\.name: training changes count of the model"):
        run_on(2, trained, run)


@pytest.mark.processes
def test_one_process_may_count() -> None:
    assert of("single", 1, "Counting")[0]["untouched"]


def recorded(world: World, run: Run, own: bool) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if own:  # as if nothing brought them together
            patch.setattr("lockstep.strategies.exact.step_totals.averaged_buffers", lambda model: {})
            patch.setattr("lockstep.strategies.strategy.DryRun.__call__", lambda *_: None)
        return recording.record(for_rank(run, world), world, "2")


@pytest.mark.processes
def test_verify_compares_buffers_and_names_generators(tmp_path: Any) -> None:
    found = {}
    for own, name, ranks in [(False, "single", 1), (False, "ddp", 2), (True, "ddp", 2)]:
        folder = tmp_path / f"{name}-{own}"
        run = tiny(f"strategy.name={name}", f"output={folder}", task={"name": "test_own_code.Holding"})
        run_on(ranks, recorded, run, own, joined=False)
        found[own, name] = folder
    alone = recording.read(found[False, "single"])
    assert alone.uncovered == [
        "task.draws['words'] (numpy's Generator)",
        "model.dice (torch's Generator)",
        "test_own_code.dice (random's Random)",
    ]

    def said(folder: Any) -> str:
        return "\n".join(findings(recording.read(folder), compare_recordings(folder, found[False, "single"])))

    assert said(found[False, "ddp"]) == ""
    assert "buffers differ after the step: transformer.drop.norm." in said(found[True, "ddp"])
    assert ", buffers:" in said(found[True, "ddp"])


def test_lockstep_s_own_tasks_hold_no_generators_and_run_ahead() -> None:
    class Plain:
        run: Mapping[str, Any]

    assert own_generators(Plain(), nn.Linear(1, 1)) == ["test_own_code.dice (random's Random)"]
    assert Classification.collates_in_thread()
    assert not Drawing.collates_in_thread()
