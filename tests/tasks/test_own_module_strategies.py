"""The task `module` under every strategy: the same bits, and checkpoints that any of them goes on from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.data.job import Job
from lockstep.strategies.engines import layers
from lockstep.tasks.module import Module
from lockstep.training.resolve import resolve_strategy
from support.harness import run_on, works
from support.marks import needs, slow
from support.messages import raises
from support.own_modules import MEAN, NET, NET_FUNCTIONS, job

pytestmark = pytest.mark.processes


def trained(
    module_folder: Path, code: str, name: str, ranks: int, *overrides: str, **values: Any
) -> dict[str, torch.Tensor]:
    """The exported weights."""
    functions = NET_FUNCTIONS if code is NET else ()
    strategy = {"name": name} | values.pop("strategy", {})
    folder = values.pop("output", f"{module_folder}/{name}-{ranks}{'-'.join(overrides)}")
    run = job(module_folder, code, *overrides, functions=functions, strategy=strategy, output=folder, **values)
    status = run_on(ranks, works, run, joined=False)
    assert status == [75 if run.max_time else 0] * ranks
    return {} if run.max_time else load_file(run.folder / "export/model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def lines(folder: Path, split: str) -> list[dict[str, Any]]:
    return [
        line
        for text in (folder / "metrics.jsonl").read_text().splitlines()
        if (line := json.loads(text))["split"] == split
    ]


def test_ddp_on_three_and_fsdp2_on_two_have_the_bits_of_one(module_folder: Path) -> None:
    alone = trained(module_folder, NET, "single", 1)
    assert "blocks.0.0.weight" in alone  # the user's own names
    for name, ranks, *overrides in (("ddp", 3, "data.workers=1"), ("fsdp2", 2)):
        assert same(trained(module_folder, NET, name, ranks, *overrides), alone), name
    scores = lines(module_folder / "single-1", "validation")[-1]
    assert scores["accuracy"] == scores["right"]
    assert scores["examples"] == 10
    assert '"guess"' in (module_folder / "single-1/samples.jsonl").read_text(), "task.generate writes it"


@pytest.mark.slow
@pytest.mark.parametrize("override", ["precision=bf16", "batch_size=4", "data.group_by_length=2"])
def test_own_module_has_the_same_bits_with_bf16_and_padding_micro_batches(override: str, module_folder: Path) -> None:
    """bf16; steps of an epoch's end with fewer examples than micro-batches, where ranks run blank ones."""
    words = (override, "steps=16") if override == "batch_size=4" else (override,)
    alone = trained(module_folder, NET, "single", 1, *words)
    for name, ranks in (("ddp", 3), ("fsdp2", 2)):
        assert same(trained(module_folder, NET, name, ranks, *words), alone), name


@pytest.mark.parametrize(("name", "ranks"), [("zero1", 2), slow("zero2", 2), slow("zero3", 2)])
def test_zero_agrees_to_rounding(name: str, ranks: int, module_folder: Path) -> None:
    needs("deepspeed")
    alone, ours = trained(module_folder, MEAN, "single", 1), trained(module_folder, MEAN, name, ranks)
    assert alone.keys() == ours.keys()
    for key, tensor in alone.items():
        torch.testing.assert_close(ours[key], tensor, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["hf_accelerate", slow("allreduce"), slow("hf_trainer")])
def test_other_engines_have_the_bits_of_one(name: str, module_folder: Path) -> None:
    pytest.importorskip("accelerate")
    assert same(trained(module_folder, NET, name, 2), trained(module_folder, NET, "single", 1))


def test_a_stopped_run_resumes_under_other_strategies(module_folder: Path) -> None:
    alone, folder = trained(module_folder, NET, "single", 1), str(module_folder / "resumed")
    for name, ranks in (("fsdp2", 2), ("allreduce", 3)):
        trained(module_folder, NET, name, ranks, output=folder, max_time="0.001s")
    resumed = trained(module_folder, NET, "single", 1, output=folder)
    starts = [
        e["step"]
        for e in map(json.loads, Path(folder, "events.jsonl").read_text().splitlines())
        if e["event"] == "start"
    ]
    assert starts[0] == 0 < starts[1] < starts[2] < 6
    assert same(resumed, alone)


def test_a_pipeline_cuts_a_row_of_modules(module_folder: Path) -> None:
    alone = trained(module_folder, MEAN, "single", 1)
    assert same(trained(module_folder, MEAN, "pipeline", 2), alone)
    with raises("LS4062", "Net"):
        resolve_strategy(job(module_folder, NET, strategy={"name": "pipeline"}), 2)
    with raises("LS4245", "strategy.name: ", "each of 3 processes", "2 layers", "set strategy.options.stages to 2"):
        resolve_strategy(job(module_folder, MEAN, strategy={"name": "pipeline"}), 3)
    with raises("LS4245", "strategy.options.stages: 3 stages", "lower it"):
        resolve_strategy(job(module_folder, MEAN, strategy={"name": "pipeline", "options": {"stages": 3}}), 3)


def test_blocks_are_found_by_size_or_named(module_folder: Path) -> None:
    run = job(module_folder, NET, strategy={"name": "fsdp2"})
    model = Module(run).opened(Job.of(run).with_data().data).model()
    assert {"blocks.0", "blocks.0.0", "head"} <= set(model.lockstep_called_once)  # type: ignore[arg-type]
    row: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)), nn.PReLU())
    row.lockstep_called_once = ["0", "1", "2", "4", "5", "6"]
    assert layers.blocks(row) == [row[i] for i in (0, 1, 2, 4, 5)]  # the last one is small
    assert layers.named_blocks(model, ["blocks.*.0", "head"]) == [*(block[0] for block in model.blocks), model.head]
    with raises("LS4101", "'blockz'", "blocks, head"):
        layers.named_blocks(model, ["blockz"])
    with raises("LS4102", "blocks.0"):
        layers.named_blocks(model, ["blocks", "blocks.0"])
