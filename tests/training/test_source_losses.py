"""Training loss per source of a mixture: computed from its examples alone, equal for any number of processes and
strategy, reported wherever losses are, and without effect on the weights."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.run import Run
from lockstep.data.batch import IGNORED, TARGETS, MicroBatch, StepBatch, StepResult
from lockstep.distributed.world import World
from lockstep.tasks.classification import Classification
from lockstep.track.console import _of_sources
from lockstep.training.data_loader import StepLoader
from lockstep.training.train_state import Meter, SourceLosses
from support.command import CommandJob
from support.harness import build, build_with_feed, digest, run_on, tiny
from support.marks import slow
from support.messages import raises
from support.mixtures import mixed
from support.task_runs import TASKS, make

CALM = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_SOURCE = "data.source=null"


def of_kind(kind: str, folder: Path, *overrides: str) -> Run:
    """Return a mixture of three sources without dropout, with unequal numbers of targets."""
    if kind == "classification":
        gpt2 = {"type": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32} | CALM}
        return mixed(folder, *overrides, model=gpt2)
    sources = []
    for name, count in (("a", 40), ("b", 20), ("c", 30)):
        make(folder / name, kind, count=count)
        sources.append({"name": name, "source": str(folder / name / kind)})
    calm = CALM if TASKS[kind]["model"]["type"] == "gpt2" else {"dropout": 0.0}
    if TASKS[kind]["model"]["type"] == "bert":
        calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = {**TASKS[kind]["model"], "config": TASKS[kind]["model"]["config"] | calm}
    values = {"task": TASKS[kind]["task"], "model": model, "tokenizer": {"train": "bpe", "vocab_size": 400}}
    return tiny(*overrides, data={"sources": sources, "max_length": 32}, **values)


def alone(micro: MicroBatch, source: int) -> MicroBatch:
    """Return the micro-batch with targets only in this source's examples."""
    assert micro.sources is not None
    targets = micro.targets.clone()
    targets[micro.sources != source] = IGNORED
    inputs = {k: targets if k == TARGETS else v for k, v in micro.inputs.items()}
    return MicroBatch(micro.index, inputs, targets)


KINDS = [
    ("classification", ()),
    ("packed", ()),
    ("prompts", ("task.loss_chunk=7",)),
    slow("documents", ("precision=bf16",)),
    slow("translation", ("task.label_smoothing=0.1",)),
    slow("translation", ("task.label_smoothing=0.1", "task.loss_chunk=8")),
    slow("token_classification", ()),
]


@pytest.mark.parametrize(("kind", "overrides"), KINDS)
def test_each_source_has_its_loss_and_no_bit_changes(kind: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = of_kind(kind, tmp_path, "strategy.name=single", "micro_batches=3", *overrides)
    world = World(run)
    weights = []
    for told in (True, False):
        _, strategy, feed = build_with_feed(run, world)
        for step in range(3):
            batch = feed.make(step)
            assert batch.targets_of is not None
            assert batch.targets_of.sum() == batch.targets
            if told and step == 0:  # at learning rate 0, without dropout
                sums = strategy.train_step(batch, 0.0).loss_sums_of
                assert sums is not None
                for source in range(3):
                    mine = [alone(m, source) for m in batch.micro_batches]
                    found = strategy.train_step(replace(batch, micro_batches=mine, step=0), 0.0)
                    assert float(found.loss) * batch.targets == pytest.approx(float(sums[source]), rel=1e-6)
                    assert found.loss_sums_of is None
                _, strategy = build(run, world)
            if not told:
                batch = replace(batch, micro_batches=[replace(m, sources=None) for m in batch.micro_batches])
            result = strategy.train_step(batch, 5e-3)
            assert (result.loss_sums_of is not None) is told
            if result.loss_sums_of is not None:
                assert float(result.loss_sums_of.sum()) == pytest.approx(float(result.loss) * batch.targets, rel=1e-6)
        weights.append(digest(strategy.state.export() or {}))
    assert weights[0] == weights[1]


def test_a_task_class_with_its_own_loss_is_included(tmp_path: Path) -> None:
    class Weighted(Classification):
        def loss_sum(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
            return 2 * super().loss_sum(outputs, targets)

    class Both(Weighted):
        def loss_each(self, outputs: Any, targets: torch.Tensor) -> Any:
            loss, each = super().loss_each(outputs, targets)
            return 2 * loss, None if each is None else 2 * each

    run = mixed(tmp_path, "strategy.name=single")
    task, strategy = build(run, World(run))
    for kind, told in ((Classification, True), (Weighted, False), (Both, True)):
        strategy.task = kind(task.run).opened(task.prepared)  # type: ignore[attr-defined]
        feed = StepLoader(strategy.task, range(8), torch.device("cpu"))  # type: ignore[attr-defined]
        result = strategy.train_step(feed.make(0), 0.0)
        assert (result.loss_sums_of is not None) is told
        assert float(result.loss) == pytest.approx((1 if kind is Classification else 2) * 0.6931, rel=0.05)


# -- every strategy --------------------------------------------------------------------------------------------------

EXACT = ("allreduce", "ddp", "fsdp2", "hf_accelerate", "hf_trainer", "pipeline")


def trained(world: World, runs: list[Run]) -> list[list[list[float]]]:
    """Return, for each run, the sources' loss sums per step."""
    found = []
    for run in runs:
        _, strategy, feed = build_with_feed(run, world)
        sums = [strategy.train_step(feed.make(step), 5e-3).loss_sums_of for step in range(3)]
        found.append([each.tolist() for each in sums if each is not None])
        strategy.close()
    return found


@pytest.mark.processes
def test_losses_are_equal_under_every_strategy_and_number_of_processes(tmp_path: Path) -> None:
    def run_of(name: str) -> Run:
        return mixed(tmp_path, f"strategy.name={name}", "data.group_by_length=4", weights=(3, 1, [[0, 1], [2, 5]]))

    (single,) = trained(World(run_of("single")), [run_of("single")])
    assert np.shape(single) == (3, 3)
    runs = [run_of(name) for name in EXACT]
    for rank in run_on(2, trained, runs):
        for name, found in zip(EXACT, rank, strict=True):
            assert found == single, name
    (first, _) = run_on(2, trained, [run_of("zero1")], run=run_of("zero1"))
    assert np.allclose(first[0], single, rtol=1e-4)


# -- where they are reported -----------------------------------------------------------------------------------------


def step_of(sums: list[float], targets: list[int]) -> tuple[StepBatch, StepResult]:
    batch = StepBatch(0, [], 8, 4, sum(targets), 10, 10, 10, np.arange(4), targets_of=np.array(targets))
    loss = torch.tensor(sum(sums) / sum(targets), dtype=torch.float64)
    return batch, StepResult(loss, torch.tensor(1.0), True, torch.tensor(sums, dtype=torch.float64))


def test_losses_are_means_since_the_last_line() -> None:
    meter = Meter(sources=["web", "book", "chat"])
    for sums, targets in (([6.0, 1.0, 0.0], [2, 2, 0]), ([2.0, 0.0, 0.0], [4, 0, 0])):
        batch, result = step_of(sums, targets)
        meter.add(batch, result)
    state = json.loads(json.dumps(meter.state()))
    line = meter.line(result, 0.1)
    assert {k: v for k, v in line.items() if k.startswith("loss_")} == {"loss_web": 8 / 6, "loss_book": 0.5}
    resumed = Meter(state, ["web", "book", "chat"])
    for each in (meter, resumed):  # values from a checkpoint are in the next line, once
        each.add(*step_of([3.0, 0.0, 1.0], [1, 0, 1]))
    assert meter.line(result, 0.1)["loss_web"] == 3.0
    found = resumed.line(result, 0.1)
    assert (found["loss_web"], found["loss_book"], found["loss_chat"]) == (11 / 7, 0.5, 1.0)
    other = Meter(state, ["web", "chat"])  # the run file now has other sources
    other.add(*step_of([3.0, 1.0], [1, 1]))
    assert other.line(result, 0.1)["loss_web"] == 3.0


def test_nan_step_does_not_hide_other_steps() -> None:
    losses = SourceLosses(["a", "b"])
    for sums in ([1.0, 2.0], [math.nan, 1.0], [3.0, 2.0]):
        losses.add(*step_of(sums, [1, 2]))
    assert losses.take() == {"loss_a": 2.0, "loss_b": 1.0}
    assert losses.take() == {}


def test_the_console_shortens_many_sources() -> None:
    assert _of_sources({"loss": 1.0, "loss_scale": 2.0}) == ""
    assert _of_sources({"loss": 1.0, "loss_web": 2.0, "loss_book": 1.5}) == " (book 1.5000, web 2.0000)"
    many = {f"loss_{name}": value for name, value in zip("abcd", (3.0, 1.0, 4.0, 2.0), strict=True)}
    assert _of_sources(many) == " (b 1.0000...c 4.0000)"


def test_a_source_name_must_not_equal_another_metric() -> None:
    with raises("LS1029", "data.sources"):
        tiny(NO_SOURCE, "data.sources=[scale.jsonl, b.jsonl]")


@pytest.mark.processes
def test_losses_are_in_metrics_log_and_report(tmp_path: Path, job: CommandJob) -> None:
    run = mixed(tmp_path, "steps=6", "track.every=2", f"output={tmp_path / 'out'}", "launch.processes=1")
    (tmp_path / "run.yaml").write_text(run.dump())
    status, told, errors = job.train()
    assert status == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == [1, 2, 4, 6]
    names = {key for line in lines if line["split"] == "train" for key in line if key.startswith("loss_")}
    assert names == {"loss_web", "loss_book", "loss_chat"}
    assert re.search(r"loss \d\.\d{4} \(\w+ \d\.\d{4}, \w+ \d\.\d{4}", told)
    page = (tmp_path / "out/report.html").read_text()
    chart = page[page.index("loss chat") :][:4000]
    assert "train" in chart
    assert "validation" in chart
