"""Every task under the promise: the same bits on one process or many, scores and samples the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.single import ReplicatedStrategy
from lockstep.tasks.task import make_task
from lockstep.training.data_loader import StepLoader
from support import task_runs
from support.harness import build, rank_0_of, run_on
from support.marks import long
from support.task_runs import TASKS, trained

pytestmark = pytest.mark.processes


KINDS = sorted(TASKS)


def make(folder: Path, kind: str, *overrides: str) -> Run:
    """A run with so few examples that the third step, the last of its epoch, is short."""
    return task_runs.make(folder, kind, *overrides, count=45)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for kind in KINDS:
        run = make(folder, kind, "strategy.name=single")
        found[kind] = run_on(1, trained, run)[0]
    return found


# Ranks that hold a part of the weights: every kind. Ranks that differ in nothing but examples: three.
WHOLE = ("pairs", "packed", "translation")
SAME = [("fsdp2", 2, kind) for kind in KINDS] + [("ddp", 3, kind) for kind in WHOLE]
SAME += [long("ddp", 2, kind) for kind in KINDS] + [long("ddp", 3, kind) for kind in KINDS if kind not in WHOLE]


@pytest.mark.parametrize(("name", "ranks", "kind"), SAME)
def test_the_same_bits_on_any_number_of_processes(kind: str, name: str, ranks: int, folder: Path, alone: dict) -> None:
    run = make(folder, kind, f"strategy.name={name}")
    first = rank_0_of(ranks, trained, run, alike=("loss", "norm", "scores", "samples", "targets"))
    for key in ("digest", "loss", "norm", "scores", "samples", "targets"):
        assert first[key] == alone[kind][key], key


@pytest.mark.parametrize("kind", KINDS)
def test_targets_are_counted_without_looking_at_the_micro_batches(kind: str, alone: dict) -> None:
    for counts, targets in zip(alone[kind]["counts"], alone[kind]["targets"], strict=True):
        assert sum(counts) == targets
    if kind != "packed":
        assert any(len(set(counts)) > 1 for counts in alone[kind]["counts"])  # unequal, or this tests nothing


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_reported_as_it_is(kind: str, folder: Path) -> None:
    run = make(folder, kind, "data.padding=batch")
    feed = StepLoader(make_task(Job.of(run).with_data()), range(run.micro_batches), torch.device("cpu"))
    for batch in map(feed.make, range(2)):  # the epoch's last step has blank micro-batches, which are not reported
        read = [v for m in batch.micro_batches for name, v in m.inputs.items() if name.endswith("input_ids")]
        assert batch.padded == sum(map(torch.numel, read))


ALL_OF = ("pipeline", "zero3")  # which cut the model or gather its weights: every task; the others a task each
PAIRS = [(name, kind) for name in ALL_OF for kind in ("prompts", "translation", "token_classification")]
PAIRS += [("allreduce", "token_classification"), ("hf_accelerate", "translation"), ("hf_trainer", "prompts")]
PAIRS += [("zero1", "translation"), ("zero2", "token_classification")]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_strategy_trains_every_task(kind: str, name: str, folder: Path, alone: dict) -> None:
    """To the bit where it promises that, else to rounding; what a model writes may then differ after a near tie."""
    strategy: Any = plugins.find("strategies", name)
    for package in strategy.needs:
        pytest.importorskip(package)
    stages = ("strategy.options.stages=2",) if name == "pipeline" else ()
    greedy = ("task.temperature=0",) if kind == "prompts" else ()
    run = make(folder, kind, f"strategy.name={name}", *stages, *greedy)
    first = rank_0_of(2, trained, run, alike=("scores", "samples"))
    if Job.of(run).same_bits:
        assert (first["loss"], first["norm"]) == (alone[kind]["loss"], alone[kind]["norm"])
        assert first["digest"] == alone[kind]["digest"]
        assert first["scores"] == alone[kind]["scores"]
    else:
        assert first["loss"] == pytest.approx(alone[kind]["loss"], rel=1e-3)
        assert first["scores"]["loss"] == pytest.approx(alone[kind]["scores"]["loss"], rel=1e-2)


class MeanOfMeans(ReplicatedStrategy):
    """The classic mistake: every micro-batch divided by its own targets, and the mean taken of those."""

    check = classmethod(lambda cls, run, processes: None)

    def reduce(self) -> list[torch.Tensor]:
        return self.leaves.tree.root

    def backward(self, micro: Any, targets: int, last: bool) -> torch.Tensor:
        return super().backward(micro, max(1, int((micro.targets >= 0).sum())) * self.run.micro_batches, last)


def mean_of_means(world: World, run: Run) -> float:
    task, _ = build(run, world)
    strategy = MeanOfMeans(Job.of(run), world)
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    return float(strategy.train_step(feed.make(0), 5e-3).grad_norm)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "packed"])
def test_the_control_a_mean_of_micro_batch_means_is_another_gradient(kind: str, folder: Path, alone: dict) -> None:
    run = make(folder, kind, "strategy.name=single")
    wrong = run_on(1, mean_of_means, run)[0]
    assert abs(wrong / alone[kind]["norm"][0] - 1) > 1e-4  # and not 0.0, as above
