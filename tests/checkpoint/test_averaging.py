"""Weight averages: the bits of a plain loop, independent of how weights are sharded, stored in checkpoints, and
exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lockstep.checkpoint.manifest import averaged
from lockstep.checkpoint.shard_files import Mean
from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.sharded import WholeState
from lockstep.distributed.world import World
from lockstep.strategies.exact.training_state import Averaged
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from lockstep.training.model_stats import memory
from lockstep.training.resolve import resolve_strategy
from support.best import losses_by_step
from support.command import CommandJob, train
from support.harness import TINY, build, build_with_feed, digest, run_on, tiny
from support.marks import needs, slow
from support.messages import mentions, raises

STEPS = 3
EMA = "average.ema=0.9"


# -- the arithmetic --------------------------------------------------------------------------------------------------


def test_the_decay_warms_up_to_its_value() -> None:
    section = tiny("average.ema=0.5").average
    assert [section.decay(t) for t in (1, 7, 8, 100)] == [2 / 11, 8 / 17, 0.5, 0.5]
    assert tiny("average.ema=0.5", "average.ema_warmup=false").average.decay(1) == 0.5


def test_averaging_keeps_unchanged_tensors() -> None:
    torch.manual_seed(0)
    frozen, counts = torch.randn(999), torch.arange(5)
    states = [
        {"model.w": torch.randn(999), "model.f": frozen, "model.n": counts + i, "o": counts * i} for i in range(7)
    ]
    found = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    mean = Mean([WholeState(state) for state in states])
    assert "o" in mean
    mean.read(found)
    assert torch.equal(found["model.f"], frozen)
    assert torch.equal(found["model.n"], counts + 6)  # a buffer is copied from the last step, not averaged
    assert torch.equal(found["o"], counts * 6)
    assert torch.allclose(found["model.w"], torch.stack([s["model.w"] for s in states]).mean(0), atol=1e-6)
    for cut in (slice(0, 7), slice(7, 999)):  # a slice has the bits that it has in the full tensor
        part = {"model.w": torch.zeros_like(states[0]["model.w"][cut])}
        Mean([WholeState({"model.w": state["model.w"][cut]}) for state in states]).read(part)
        assert torch.equal(part["model.w"], found["model.w"][cut])


def test_which_checkpoints_are_averaged_does_not_depend_on_stops() -> None:
    run = tiny("average.last=3")
    assert averaged(run.average.last, 10, 3) == [6, 9, 10]
    assert averaged(run.average.last, 9, 3) == [3, 6, 9]
    assert averaged(run.average.last, 5, 3) == [3, 5]
    assert averaged(run.average.last, 5, 0) == [5]


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ([EMA, "optim.name=schedule_free"], "LS4150"),
        (["average.last=2", "optim.name=schedule_free"], "LS4150"),
        ([EMA, "strategy.name=zero2"], "LS4151"),
        ([EMA, "model.dtype=bfloat16", "precision=bf16", "optim.master_weights=false"], "LS4152"),
    ],
)
def test_averages_of_unsupported_runs_are_refused(overrides: list[str], code: str) -> None:
    if "zero" in overrides[-1]:
        needs("deepspeed")
    with raises(code):
        resolve_strategy(tiny(*overrides), 2)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["average.ema=0.9", "average.last=2"], ("LS1061",)),
        (["average.ema_warmup=false"], ("LS1062",)),
        (["average.last=2", "checkpoint.every=0"], ("LS1066",)),
        (["average.last=2", "export=best", "evaluate.every=2"], ("LS1065",)),
        (["average.last=1"], ("LS1002", "2")),
        (["average.ema=1"], ("LS1002", "1")),
    ],
)
def test_averages_without_effect_are_refused(overrides: list[str], wanted: tuple[str, ...]) -> None:
    with raises(*wanted):
        tiny(*overrides)


def test_an_average_is_part_of_the_arithmetic_where_training_keeps_it() -> None:
    assert arithmetic_of(tiny()) == arithmetic_of(tiny("average.last=3"))
    assert arithmetic_of(tiny()).items() < arithmetic_of(tiny(EMA)).items()
    assert tiny("average.last=3", "evaluate.patience=2", "evaluate.every=2").export == "last"


def test_planned_memory_includes_the_average() -> None:
    for name, share in (("ddp", 1), ("fsdp2", 2), ("pipeline", 2)):
        run = load(None, [f"strategy.name={name}", "strategy.options={gather: step}"] if name == "fsdp2" else [], TINY)
        run = run.model_copy(update={"strategy": run.strategy.model_copy(update={"name": name})})
        with_it = run.model_copy(update={"average": tiny(EMA).average})
        assert "average" not in memory(Job.of(run, 2), 10**6, 10**6)
        assert f"average {4 / share:.1f} MB" in memory(Job.of(with_it, 2), 10**6, 10**6)


# -- the bits --------------------------------------------------------------------------------------------------------


def by_hand(world: World, run: Run) -> dict[str, Any]:
    """Train a few steps; return the average, the weights that an evaluation uses, and the weights afterwards."""
    task, strategy = build(run, world)
    kept = Averaged(strategy)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    for t in range(STEPS):
        strategy.train_step(feed.make(t), 5e-3)
        kept.follow(t + 1)
    before = digest(strategy.state.state_dict())
    with kept.in_place():
        score = evaluate(world, task, strategy, task.splits["validation"], texts=False)["loss"]
        exported = strategy.state.export()
        average = digest(exported) if exported is not None else None
    raw = evaluate(world, task, strategy, task.splits["validation"], texts=False)["loss"]
    unchanged = digest(strategy.state.state_dict()) == before
    strategy.train_step(feed.make(STEPS), 5e-3)
    after = digest(strategy.state.state_dict())
    found = {"score": score, "raw": raw, "unchanged": unchanged, "after": after, "average": average}
    strategy.close()
    return found


def loop(world: World, run: Run) -> dict[str, Any]:
    """Compute the same average in a plain loop."""
    _, strategy, feed = build_with_feed(run, world)
    mean = {name: p.detach().clone() for name, p in strategy.model.named_parameters()}
    for t in range(STEPS):
        strategy.train_step(feed.make(t), 5e-3)
        decay = min(0.9, (2 + t) / (11 + t))
        for name, p in strategy.model.named_parameters():
            mean[name] += (p.detach() - mean[name]) * (1 - decay)
    after = strategy.train_step(feed.make(STEPS), 5e-3)
    with torch.no_grad():
        for name, p in strategy.model.named_parameters():
            p.copy_(mean[name])
    exported = strategy.state.export()
    assert exported is not None
    found = {"average": digest(exported), "loss": float(after.loss)}
    strategy.close()
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    run = tiny("strategy.name=single", EMA)
    return run_on(1, by_hand, run)[0]


@pytest.mark.processes
def test_the_average_matches_a_plain_loop(alone: dict[str, Any]) -> None:
    run = tiny("strategy.name=single", EMA)
    plain = run_on(1, loop, run)[0]
    assert alone["average"] == plain["average"]
    assert alone["unchanged"]
    assert alone["score"] != alone["raw"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("ddp", 2, []),
        ("fsdp2", 2, ["strategy.options.gather=step"]),
        ("fsdp2", 3, ["strategy.options.gather=micro_batch"]),
        ("fsdp2", 2, ["strategy.options={gather: micro_batch, reshard_after_forward: false}"]),
        ("pipeline", 2, []),
        slow("hf_accelerate", 2, []),
        slow("hf_trainer", 2, []),
        slow("allreduce", 3, []),
    ],
)
def test_the_average_has_the_same_bits_for_any_sharding(
    name: str, ranks: int, words: list[str], alone: dict[str, Any]
) -> None:
    run = tiny(f"strategy.name={name}", EMA, *words)
    first, *others = run_on(ranks, by_hand, run)
    assert first == alone
    assert all(other["score"] == first["score"] and other["unchanged"] for other in others)


@pytest.mark.processes
def test_master_weights_are_averaged() -> None:
    words = ("model.dtype=bfloat16", "precision=bf16", EMA)
    run = tiny("strategy.name=single", *words)
    alone = run_on(1, by_hand, run)[0]
    assert alone["unchanged"]
    for options in ("{gather: step}", "{gather: micro_batch}"):
        run = tiny("strategy.name=fsdp2", f"strategy.options={options}", *words)
        assert run_on(2, by_hand, run)[0] == alone


# -- from training to export -----------------------------------------------------------------------------------------


JOB = TINY | {
    "task": {"samples": 0},
    "data": {"source": "builtin/emotion", "max_length": 32, "limit": 40},
    "model": {"type": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}},
    "steps": 7,
    "batch_size": 20,
    "micro_batches": 2,
    "output": "out",
    "strategy": "single",
    "evaluate": {"every": 2},
    "checkpoint": {"every": 2, "keep": 1},
}


def trained(folder: Path, *words: str) -> int:
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(JOB))
    return main(["train", str(folder / "run.yaml"), f"output={folder / 'out'}", *words])


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out/export/model.safetensors")


def saved(folder: Path, step: int, of: str) -> dict[str, torch.Tensor]:
    """Return the `model.` or `ema.` tensors of a one-process checkpoint."""
    held = load_file(folder / f"out/checkpoints/step-{step:06d}/shard-00001-of-00001.safetensors")
    return {name.removeprefix(of): tensor for name, tensor in held.items() if name.startswith(of)}


def the_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return bool(one) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture(scope="module")
def averaged_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ema")
    assert trained(folder, EMA) == 0
    return folder


@pytest.fixture(scope="module")
def plain_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    assert trained(folder, "checkpoint.keep=9") == 0
    return folder


def test_the_average_is_evaluated_and_exported_and_changes_no_training(
    averaged_job: Path, plain_job: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert the_same(saved(averaged_job, 7, "model."), saved(plain_job, 7, "model."))
    assert losses_by_step(averaged_job / "out", "train") == losses_by_step(plain_job / "out", "train")
    assert the_same(saved(averaged_job, 7, "ema."), exported(averaged_job))
    assert not the_same(exported(averaged_job), exported(plain_job))
    scores = json.loads((averaged_job / "out/scores.json").read_text())["splits"]
    assert (
        losses_by_step(averaged_job / "out")[7] == scores["validation"]["loss"] != losses_by_step(plain_job / "out")[7]
    )
    assert main(["evaluate", str(averaged_job / "out"), "--split", "validation"]) == 0
    assert f"{scores['validation']['loss']:,.6g}" in capfd.readouterr().out
    assert main(["evaluate", str(averaged_job / "out/checkpoints/step-000007"), "--split", "validation"]) == 0
    assert f"{scores['validation']['loss']:,.6g}" in capfd.readouterr().out
    card = (averaged_job / "out/export/README.md").read_text()
    assert "The weights are the moving average of the weights (decay 0.9, with a warm-up)" in card


@pytest.mark.processes
@pytest.mark.parametrize(("name", "processes"), [("fsdp2", 2), slow("pipeline", 2), slow("ddp", 2)])
def test_the_average_resumes_on_another_strategy(
    name: str, processes: int, averaged_job: Path, tmp_path: Path, job: CommandJob
) -> None:
    """Ranks of another strategy resume from step 2's checkpoint and load their shards of its full average."""
    assert trained(tmp_path, EMA, "steps=7", "max_time=null", "checkpoint.keep=9") == 0
    for step in (4, 6, 7):
        shutil.rmtree(tmp_path / f"out/checkpoints/step-{step:06d}")
    shutil.rmtree(tmp_path / "out/export")
    status, _, err = job.train(f"strategy={name}", f"launch.processes={processes}", EMA)
    assert status == 0, err
    assert the_same(exported(tmp_path), exported(averaged_job))
    assert losses_by_step(tmp_path / "out") == losses_by_step(averaged_job / "out")


def test_the_best_of_the_averaged_models_is_exported(tmp_path: Path) -> None:
    words = (EMA, "optim.learning_rate=0.2", "export=best", "steps=12", "checkpoint.keep=9")
    assert trained(tmp_path, *words) == 0
    scores, losses = json.loads((tmp_path / "out/scores.json").read_text()), losses_by_step(tmp_path / "out")
    best = min(losses, key=losses.__getitem__)
    assert scores["step"] == best
    assert scores["splits"]["validation"]["loss"] == losses[best]
    if best < 12:
        assert the_same(saved(tmp_path, best, "ema."), exported(tmp_path))


def test_an_average_cannot_be_added_at_a_resume(
    plain_job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(plain_job, tmp_path / "copy", symlinks=True))
    shutil.rmtree(folder / "out/checkpoints/step-000007")
    assert trained(folder, EMA) == 2
    assert "average.ema: not set in the checkpoint, 0.9 now" in " ".join(capfd.readouterr().err.split())


# -- retention of checkpoints ----------------------------------------------------------------------------------------


def test_the_mean_of_the_last_checkpoints_is_exported(
    plain_job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "average.last=3") == 0
    assert "the mean of the weights after steps 4, 6, 7 is exported" in capfd.readouterr().out
    kept = sorted(path.name for path in (tmp_path / "out/checkpoints").glob("step-*"))
    assert kept == ["step-000004", "step-000006", "step-000007"]  # kept regardless of `keep`
    each = [saved(plain_job, step, "model.") for step in (4, 6, 7)]
    found = exported(tmp_path)
    for name, tensor in found.items():
        mean = each[0][name]
        for number, other in enumerate(each[1:], 2):
            mean = mean + (other[name] - mean) / number
        assert torch.equal(tensor, mean)
    scores = json.loads((tmp_path / "out/scores.json").read_text())
    assert scores["export"] == "mean of 3"
    assert (
        losses_by_step(tmp_path / "out")[7]
        == scores["splits"]["validation"]["loss"]
        != losses_by_step(plain_job / "out")[7]
    )
    assert trained(tmp_path) == 0  # a finished run exports another model on request
    out = capfd.readouterr().out
    assert "was written with export: mean of 3; it is written again with export: last" in out
    assert the_same(exported(tmp_path), exported(plain_job))
    assert trained(tmp_path) == 0
    assert "is finished (7 steps)" in capfd.readouterr().out


def test_a_checkpoint_that_is_missing_from_the_mean_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert trained(tmp_path, "average.last=3") == 0
    shutil.rmtree(tmp_path / "out/checkpoints/step-000006")
    shutil.rmtree(tmp_path / "out/export")
    assert trained(tmp_path, "average.last=3") == 1
    err = capfd.readouterr().err
    assert mentions(err, "LS6003", "4", "6", "7", "step-000006")
    assert trained(tmp_path, "average.last=null") == 0


def test_more_checkpoints_than_a_run_writes_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "train"):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(JOB))
        assert main([command, str(tmp_path / "run.yaml"), f"output={tmp_path / 'out'}", "average.last=5"]) == 2
        assert mentions(capfd.readouterr().err, "LS5060", "5", "7", "2", "4")


@pytest.mark.processes
def test_the_mean_on_another_strategy(plain_job: Path, tmp_path: Path, cache: Path) -> None:
    assert trained(one := tmp_path / "one", "average.last=3") == 0
    trained(tmp_path / "two", "average.last=3", "checkpoint.keep=9")
    for step in (6, 7):
        shutil.rmtree(tmp_path / f"two/out/checkpoints/step-{step:06d}")
    shutil.rmtree(tmp_path / "two/out/export")
    words = ("strategy=fsdp2", "strategy.options.gather=micro_batch", "launch.processes=2", "average.last=3")
    status, _, err = train(tmp_path / "two", cache, *words)
    assert status == 0, err
    assert the_same(exported(tmp_path / "two"), exported(one))
