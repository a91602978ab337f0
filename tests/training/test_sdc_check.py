"""`sdc_check`: a repeated computation has the same bits; a difference is found in its step, before the update is
kept."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.training.data_loader import StepLoader
from lockstep.training.errors import CorruptionDetected
from lockstep.training.resolve import resolve_strategy
from lockstep.training.sdc_check import SdcCheck, drawn
from support.harness import TINY, build, digest, run_on, tiny
from support.marks import long
from support.messages import raises
from support.sdc_runs import STEPS, Fault, Planted, Wrong, flipped, guarded, wrong_gradient

# -- no false alarm --------------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_checked_runs_have_the_same_bits_and_no_findings() -> None:
    for more in ([], ["precision=bf16"]):
        run = tiny("strategy.name=single", *more)
        alone = run_on(1, guarded, run)[0]["digest"]
        jobs = [("single", 1), ("allreduce", 2), ("ddp", 3), ("hf_accelerate", 2), ("hf_trainer", 2), ("fsdp2", 2)]
        for name, ranks in jobs if not more else jobs[2:3]:
            options = ["strategy.options.gather=step"] if name == "fsdp2" else []
            run = tiny(f"strategy.name={name}", *more, *options, "sdc_check.every=1")
            for rank in run_on(ranks, guarded, run):
                assert rank["found"] == {}, (name, ranks)
                assert rank["digest"] in (None, alone), (name, ranks)


# -- detection -------------------------------------------------------------------------------------------------------


def wrong_activation(strategy: Any, now: Callable[[], bool]) -> None:
    def flip(module: Any, given: Any, output: Tensor) -> Tensor:
        return output + (flipped(output, 21) - output).detach() if now() else output

    strategy.model.transformer.h[0].mlp.register_forward_hook(flip)


@pytest.mark.processes
@pytest.mark.parametrize("wrong", [wrong_activation, wrong_gradient])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_wrong_bit_is_found_when_its_micro_batch_is_checked(wrong: Wrong, ranks: int) -> None:
    run = tiny(f"strategy.name={'single' if ranks == 1 else 'allreduce'}", "sdc_check.every=1", "seed=4")
    sampled = {step: drawn(Job.of(run), step) for step in range(STEPS)}
    micro_batch = sampled[2]
    results = run_on(ranks, guarded, run, Planted(micro_batch, wrong))
    for rank in results:
        assert set(rank["found"]) == {step for step, each in sampled.items() if each == micro_batch}
        told = rank["found"][2]
        assert f"computed different gradients for micro-batch {micro_batch}" in told
        owner = next(r for r in range(ranks) if micro_batch in range(r * 8 // ranks, (r + 1) * 8 // ranks))
        assert f"a third computation shows that rank {owner} on" in told
    assert results[0]["digest"] is not None


class WrongWitness:
    """Only the rank that repeats the computation computes wrongly."""

    def __call__(self, strategy: Any, world: World, step: int) -> None:
        if world.rank == 2 and step == 0:
            strategy.model.transformer.h[0].mlp.register_forward_hook(
                lambda module, given, output: output + (flipped(output, 21) - output).detach()
            )


def test_one_process_finds_a_gradient_that_does_not_repeat() -> None:
    run = tiny("strategy.name=single", "sdc_check.every=1")
    task, strategy = build(run, World(run))
    feed = StepLoader(task, strategy.own_micro_batches(), strategy.world.device)
    session: Any = SimpleNamespace(job=strategy.job, run=run, world=strategy.world, feed=feed, strategy=strategy)
    guard, seen = SdcCheck(session), list[int]()
    guard.train_step(feed.make(0), 1e-3)  # control: no difference

    def hear(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(0)
        return gradient if len(seen) == 1 else gradient * (1 + 2**-22)

    strategy.weights.named["transformer.h.1.mlp.c_fc.weight"].register_hook(hear)
    before = digest(strategy.state.state_dict())
    with raises("LS5152", error=CorruptionDetected):
        guard.train_step(feed.make(1), 1e-3)
    assert digest(strategy.state.state_dict()) == before
    strategy.close()


@pytest.mark.processes
def test_wrong_recomputation_by_another_rank_is_named() -> None:
    def owner(run: Run, step: int) -> int:
        return next(r for r in range(3) if drawn(Job.of(run), step) in range(r * 8 // 3, (r + 1) * 8 // 3))

    runs = (tiny("strategy.name=allreduce", "sdc_check.every=1", f"seed={seed}") for seed in range(100))
    run = next(r for r in runs if {owner(r, step) for step in range(STEPS)} == {0, 1, 2})
    owners = {step: owner(run, step) for step in range(STEPS)}
    for rank in run_on(3, guarded, run, WrongWitness()):
        assert set(rank["found"]) == {step for step, owner in owners.items() if owner in (1, 2)}
        for told in rank["found"].values():
            assert "a third computation shows that rank 2 on" in told


class WrongRank:
    """Rank 2 flips a bit in every gradient of a weight, in first and repeated computations."""

    def __call__(self, strategy: Any, world: World, step: int) -> None:
        if world.rank == 2 and step == 0:
            weight = dict(strategy.model.named_parameters())["transformer.h.1.mlp.c_fc.weight"]
            weight.register_hook(flipped)


@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize("more", [(), long(("precision=bf16",))])
@pytest.mark.parametrize("name", [long("zero1"), long("zero2"), "zero3"])
def test_zero_finds_a_faulty_rank_and_accuses_no_healthy_one(name: str, more: tuple[str, ...]) -> None:
    """ZeRO's ranks compute a micro-batch together. A step passes if its owner and witness are the two right ranks: only
    if these differ is there a third computation."""
    few = ("micro_batches=4", "batch_size=11", *more)
    run, single = tiny(f"strategy.name={name}", "sdc_check.every=1", *few), tiny("strategy.name=single", *few)
    alone = run_on(1, guarded, single)[0]["digest"]
    first, *_ = results = run_on(3, guarded, run)
    assert [rank["found"] for rank in results] == [{}] * 3
    assert first["digest"] == alone
    turns = name != "zero1"
    owners = {
        step: m % 3 if turns else next(r for r in range(3) if m in range(r * 4 // 3, (r + 1) * 4 // 3))
        for step, m in ((step, drawn(Job.of(run), step)) for step in range(STEPS))
    }
    for rank in run_on(3, guarded, run, WrongRank()):
        assert set(rank["found"]) == {step for step, owner in owners.items() if 2 in (owner, (owner + 1) % 3)}
        for told in rank["found"].values():
            assert "a third computation shows that rank 2 on" in told


class WrongMessage:
    """One rank receives a wrong sum, in one number of one weight, in one step."""

    def __call__(self, strategy: Any, world: World, step: int) -> None:
        if world.rank == 1 and step == 3:
            plain = strategy.reduce
            strategy.reduce = lambda: [flipped(g, 23) if i == 4 else g for i, g in enumerate(plain())]
        elif world.rank == 1 and step == 4:
            del strategy.reduce


class WrongWeight:
    """A bit of a weight changes between two steps."""

    def __call__(self, strategy: Any, world: World, step: int) -> None:
        if world.rank == 1 and step == 4:
            with torch.no_grad():
                weight = strategy.parameters[5]
                weight.copy_(flipped(weight))


@pytest.mark.processes
@pytest.mark.parametrize("fault", [WrongMessage(), WrongWeight()], ids=lambda fault: type(fault).__name__)
def test_a_rank_that_drifts_is_named_before_the_next_step(fault: Fault) -> None:
    run = tiny("strategy.name=allreduce", "sdc_check.every=1")
    for rank in run_on(3, guarded, run, fault):
        assert set(rank["found"]) == {4}
        assert "before step 5 the ranks hold different weights: rank 1 on" in rank["found"][4]


# -- in a run --------------------------------------------------------------------------------------------------------

ONE = ("launch.processes=1", "steps=9", "checkpoint.every=4", "fingerprint.every=1")


def trained(folder: Path, *overrides: str) -> tuple[int, Path]:
    run = load(None, [*ONE, *overrides], TINY | {"output": str(folder / "out")})
    (folder / "run.yaml").write_text(run.dump())
    return main(["train", str(folder / "run.yaml")]), folder / "out"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    status, output = trained(tmp_path_factory.mktemp("untouched"), "strategy.name=single")
    assert status == 0
    return (output / "export/model.safetensors").read_bytes()


@pytest.mark.processes
def test_a_run_stops_before_the_update_and_resumes_there(
    untouched: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, output = trained(tmp_path, "strategy.name=support.planted_mistakes.BitFlip", "sdc_check.every=1")
    assert status == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "sdc_check: step 6: rank" in said
    assert "No weight was updated" in said
    assert json.loads((output / "checkpoints/latest/manifest.json").read_text())["step"] == 5
    assert "guard" in (output / "events.jsonl").read_text()
    assert trained(tmp_path, "strategy.name=allreduce", "sdc_check.every=1")[0] == 0
    assert (output / "export/model.safetensors").read_bytes() == untouched


@pytest.mark.processes
def test_a_transient_fault_is_recomputed(untouched: bytes, tmp_path: Path) -> None:
    status, output = trained(
        tmp_path,
        "strategy.name=support.planted_mistakes.BitFlipOnce",
        "sdc_check.every=1",
        "sdc_check.on_difference=retry",
    )
    assert status == 0
    assert (output / "export/model.safetensors").read_bytes() == untouched


@pytest.mark.parametrize(
    "words",
    [
        ["strategy.name=zero2", "strategy.exact=false"],
        ["strategy.name=zero3", "precision=bf16", "strategy.options={bf16: {enabled: true}}"],
        ["strategy.name=pipeline"],
        ["strategy.name=fsdp2", "strategy.options.gather=micro_batch"],
    ],
)
def test_sharded_strategies_are_refused(words: list[str]) -> None:
    with raises("LS5133"):
        resolve_strategy(load(None, ["sdc_check.every=5", *words], TINY), 2)
