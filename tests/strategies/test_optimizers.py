"""Every optimizer under every exact strategy has the bits of `single`, and a state that any other strategy can load."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config import plugins
from lockstep.config.run import Run, load
from lockstep.config.schedules import learning_rate
from lockstep.distributed.world import World
from lockstep.strategies.exact import training_state
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import resolve_strategy
from support.harness import TINY, build, build_with_feed, digest, run_on
from support.marks import long, needs, slow
from support.messages import raises
from support.saving import job_of

pytestmark = pytest.mark.processes

# Odd sizes: on two and on three ranks, no shard's rows or columns divide by a CPU's vector width.
MODEL = {"type": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 38, "n_positions": 16, "n_inner": 50}}
GROUPS = (
    "optim.groups=[{match: 'score.*', learning_rate: 2e-2, weight_decay: 0.5}, {match: '*.mlp.*', weight_decay: 0}]"
)
OPTIMIZERS = [n for n in plugins.names("optimizers") if n != "adamw"]  # adamw is in all other tests
CASES: dict[str, tuple[str, ...]] = {
    **{name: (f"optim={name}",) for name in OPTIMIZERS},
    "groups": (GROUPS, "optim.layerwise_lr_decay=0.7", "model.freeze=['*.wpe.*', '*.h.0.attn.*']"),
    "muon in groups": ("optim=muon", GROUPS, "optim.layerwise_lr_decay=0.7"),
    "muon, bfloat16": ("optim=muon", "precision=bf16", "model.dtype=bfloat16"),
    "schedule_free, bfloat16": ("optim=schedule_free", "precision=bf16", "model.dtype=bfloat16"),
    "adafactor, bfloat16 alone": (
        "optim=adafactor",
        "precision=bf16",
        "model.dtype=bfloat16",
        "optim.master_weights=false",
    ),
}
BRIEFLY = ("muon", "schedule_free", "groups")
RATES = {"adafactor": 5e-2, "sgd": 1e-1, "lion": 1e-3}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "single": ("strategy=single",),
    "allreduce": ("strategy=allreduce",),
    "ddp": ("strategy=ddp",),
    "hf_accelerate": ("strategy=hf_accelerate",),
    "hf_accelerate fsdp": ("strategy=hf_accelerate", "strategy.options={fsdp: {}}"),
    "hf_trainer": ("strategy=hf_trainer",),
    "fsdp2 step": ("strategy=fsdp2", "strategy.options.gather=step"),
    "fsdp2 micro_batch": ("strategy=fsdp2", "strategy.options.gather=micro_batch"),
    "pipeline": ("strategy=pipeline", "strategy.options.stages=2"),
    "zero2": ("strategy=zero2",),
    "zero3": ("strategy=zero3",),
}
NO_BFLOAT16 = ("pipeline", "hf_accelerate fsdp")
NO_BARE_BFLOAT16 = (*NO_BFLOAT16, "fsdp2 micro_batch")


def takes(name: str, case: str) -> bool:
    refused = {"bfloat16": NO_BFLOAT16, "bfloat16 alone": NO_BARE_BFLOAT16}.get(case.partition(", ")[2], ())
    run = run_of(name, case, Path())
    found: Any = plugins.find("optimizers", run.optim.name)
    flat = name.startswith("zero") and (not found.any_part or found.averages or run.model.trained_in_bfloat16)
    return name not in refused and not flat and all(map(installed, found.packages))


def installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def run_of(name: str, case: str, folder: Path) -> Run:
    rate = RATES.get(case.partition(",")[0], 1e-2)
    values = TINY | {
        "data": TINY["data"] | {"max_length": 16, "limit": 24},
        "model": MODEL,
        "output": str(folder / name.replace(" ", "-") / case.replace(" ", "-").replace(",", "")),
        "batch_size": 8,
        "micro_batches": 4,
        "optim": {"learning_rate": rate, "warmup_steps": 1, "max_grad_norm": 0.5, "weight_decay": 0.1},
    }
    return load(None, [*STRATEGIES[name], *CASES[case]], values)


def trained(world: World, runs: list[Run], others: list[Run | None]) -> list[dict[str, Any]]:
    """For each run, train two steps, save, evaluate, export and train a third step; then repeat the third step from
    another strategy's checkpoint."""
    found = []
    for run, other in zip(runs, others, strict=True):
        resolve_strategy(run, world.size)
        task, strategy, feed = build_with_feed(run, world)
        strategy.dry_run(feed.longest())
        for t in range(2):
            strategy.train_step(feed.make(t), learning_rate(run.optim, t, 6))
        checkpoints = Checkpoints(job_of(run), world, 6)
        checkpoints.save(2, strategy.state)
        checkpoints.settle()
        exported = training_state.export_averaged(strategy)
        rows = feed.make(0).ids
        answer: dict[str, Any] = {
            "saved": digest(strategy.state.state_dict()),
            "scores": evaluate(world, task, strategy, task.splits["train"], rows),
            "exported": digest(exported) if exported else "",
        }
        result = strategy.train_step(feed.make(2), learning_rate(run.optim, 2, 6))
        answer |= {"loss": float(result.loss), "after": digest(strategy.state.state_dict())}
        if other is not None:
            there = run.model_copy(update={"output": other.output})
            step, notes = Checkpoints(job_of(there), world, 6).resume(strategy.state)
            assert (step, len(notes)) == (2, 0 if strategy.job.same_bits else 1)
            strategy.train_step(feed.make(2), learning_rate(run.optim, 2, 6))
            answer["gone on"] = digest(strategy.state.state_dict())
        found.append(answer)
        strategy.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


@cache
def of(folder: Path, name: str, ranks: int, saver: str | None, brief: bool = False) -> dict[str, dict[str, Any]]:
    """Return rank 0's results of each case that the strategy supports, or of a few if `brief`."""
    folder = folder / "brief" if brief else folder
    cases = [case for case in (BRIEFLY if brief else CASES) if takes(name, case)]
    runs = [run_of(name, case, folder / str(ranks)) for case in cases]
    others = [run_of(saver, case, folder / "1") if saver else None for case in cases]
    first, *rest = run_on(ranks, trained, runs, others, timeout_s=600)
    for rank in rest:
        assert [(a["loss"], a["scores"]) for a in rank] == [(a["loss"], a["scores"]) for a in first]
    return dict(zip(cases, first, strict=True))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        long("fsdp2 step", 2),
        long("fsdp2 micro_batch", 2),
        long("fsdp2 step", 3),
        slow("fsdp2 micro_batch", 3),
        long("fsdp2 micro_batch", 1),
        long("allreduce", 2),
        slow("ddp", 2),
        long("hf_accelerate", 2),
        long("hf_accelerate fsdp", 2),
        long("hf_trainer", 2),
        slow("pipeline", 2),
    ],
)
def test_every_optimizer_has_the_bits_of_single(folder: Path, name: str, ranks: int) -> None:
    alone = of(folder, "single", 1, None)
    for case, found in of(folder, name, ranks, "single").items():
        for key, value in alone[case].items():
            assert found[key] == value, f"{name} at {ranks}, {case}: {key}"
        assert found["gone on"] == found["after"], f"single -> {name} at {ranks}, {case}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        long("fsdp2 micro_batch", 1),
        long("fsdp2 step", 3),
        long("allreduce", 2),
        long("hf_accelerate", 2),
        long("hf_accelerate fsdp", 2),
        ("hf_trainer", 2),
    ],
)
def test_some_optimizers_have_the_bits_of_single(folder: Path, name: str, ranks: int) -> None:
    """These strategies share the updates of `ddp` and `fsdp2`, which run all cases, so they run only a few."""
    alone, found = of(folder, "single", 1, None, True), of(folder, name, ranks, "single", True)
    assert [{k: v for k, v in found[case].items() if k != "gone on"} for case in alone] == list(alone.values())
    assert [each["gone on"] for each in found.values()] == [each["after"] for each in alone.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [long("zero2"), "zero3"])
def test_deepspeeds_optimizers_are_equal_within_rounding(folder: Path, name: str) -> None:
    needs("deepspeed")
    alone = of(folder, "single", 1, None)
    for case, found in of(folder, name, 2, "single").items():
        assert found["loss"] == pytest.approx(alone[case]["loss"], rel=2e-3), case
        assert found["gone on"] != found["saved"], case


@pytest.mark.slow
def test_the_control_optimizers_give_different_weights(folder: Path) -> None:
    """Control: each optimizer gives different weights, and keeps changing them."""
    alone = of(folder, "single", 1, None)
    assert len({found["after"] for found in alone.values()}) == len(alone)
    for case, found in alone.items():
        assert found["saved"] != found["after"], case


def gone_on(world: World, runs: list[Run], others: list[Run]) -> list[str]:
    """Return the third step, resumed from another strategy's checkpoint."""
    found = []
    for run, other in zip(runs, others, strict=True):
        _, strategy, feed = build_with_feed(run, world)
        there = run.model_copy(update={"output": other.output})
        assert Checkpoints(job_of(there), world, 6).resume(strategy.state) == (2, [])
        strategy.train_step(feed.make(2), learning_rate(run.optim, 2, 6))
        found.append(digest(strategy.state.state_dict()))
        strategy.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("saver", [long("fsdp2 step"), "fsdp2 micro_batch"])
def test_single_resumes_a_sharded_state(folder: Path, saver: str) -> None:
    shared, alone = of(folder, saver, 3, "single"), of(folder, "single", 1, None)
    runs = [run_of("single", case, folder / "1") for case in shared]
    others = [run_of(saver, case, folder / "3") for case in shared]
    for case, after in zip(shared, run_on(1, gone_on, runs, others, timeout_s=300)[0], strict=True):
        assert after == alone[case]["after"], case


def built(world: World, run: Run) -> None:
    build(run, world)


@pytest.mark.slow
def test_a_stage_with_nothing_to_train_is_refused(folder: Path) -> None:
    run = run_of("pipeline", "lion", folder)
    model = run.model.model_copy(update={"freeze": ["*.wte.*", "*.wpe.*", "*.h.0.*"]})
    run = run.model_copy(update={"model": model})
    with raises("LS4247", "model.freeze: stage 0 of 2 ", error=AssertionError):
        run_on(2, built, run)
