"""Schedule-free training evaluates and exports the averaged weights, without effect on training."""

from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.shard_files import Files
from lockstep.strategies.exact import training_state
from lockstep.training.checkpoint_model import evaluated
from lockstep.training.errors import EvaluationInterrupted
from lockstep.training.evaluation import evaluate, evaluate_with_tables, generate_samples
from support.harness import digest
from support.saving import Job, job_of, run_in

WORDS = ("optim=schedule_free", "optim.learning_rate=1e-2")


def test_the_export_is_the_average_also_of_a_checkpoint(tmp_path: Path) -> None:
    run = run_in(tmp_path / "out", *WORDS)
    job = Job(run)
    job.step()
    job.saved()
    exported = training_state.export_averaged(job.strategy) or {}
    trained = dict(job.strategy.state.export() or {})
    assert digest(exported) != digest(trained)
    assert exported["transformer.wte.weight"].data_ptr() != trained["transformer.wte.weight"].data_ptr()
    names = [p.name for p in (tmp_path / "out/checkpoints/step-000002").glob("*.safetensors")]
    files = Files(tmp_path / "out/checkpoints/step-000002", [*names, ".metadata"])
    weights = {name: files.whole(f"model.{name}") for name, _ in job.strategy.model.named_parameters()}
    found = evaluated(job_of(run).rule, files, weights)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], exported[name]) for name in found)
    assert all(torch.equal(weights[name], trained[name]) for name in weights)


def test_evaluations_do_not_change_training(tmp_path: Path) -> None:
    """Training does not change after an evaluation, whether it ended or was interrupted."""
    straight, other = (Job(run_in(tmp_path / name, *WORDS)) for name in ("straight", "other"))
    for _ in range(2):
        straight.step()
        other.step()
    rows = other.feed.make(0).ids
    columns = other.task.splits["validation"]
    scores = evaluate(other.world, other.task, other.strategy, columns, rows)
    again = evaluate(other.world, other.task, other.strategy, columns, rows)
    assert scores == again
    generate_samples(other.task, other.strategy, other.world)
    with pytest.raises(EvaluationInterrupted):
        evaluate_with_tables(other.world, other.task, other.strategy, columns, stop=lambda: True)
    training_state.export_averaged(other.strategy)
    with training_state.optimizer_average(straight.strategy):
        inside = evaluate(straight.world, straight.task, straight.strategy, columns, rows)
    assert inside != scores  # control: averaging the average again gives other scores
    assert straight.step() == other.step()
