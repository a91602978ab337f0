"""The best model is exported: chosen by the metric alone, and the same under every strategy and after every stop."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from lockstep.checkpoint.manifest import Manifest, Progress, best_first, read_manifest
from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.data.job import arithmetic_of
from lockstep.lab.sweep.sweep import SweepTrial
from support.best import losses_by_step
from support.command import CommandJob, train
from support.harness import TINY
from support.marks import slow
from support.messages import raises

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

EPOCH = 2  # steps
# A learning rate at which the validation loss is best after a few epochs and then rises.
EARLY = TINY | {
    "task": {"samples": 0},
    "data": {"source": "builtin/emotion", "max_length": 32, "limit": 40},
    "model": {"type": "gpt2", "config": {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}},
    "steps": 30,
    "batch_size": 20,
    "micro_batches": 2,
    "output": "out",
    "optim": {"learning_rate": 5e-2, "warmup_steps": 2, "max_grad_norm": 0.5},
    "strategy": "single",
    "evaluate": {"every": "epoch", "patience": 3},
    "checkpoint": {"every": 0, "keep": 1},
}


def run_of(**values: Any) -> Run:
    return load(None, [], TINY | values)


def end_of(output: Path) -> tuple[dict[str, Any], bytes]:
    """Return the exported step and scores, and the exported weights."""
    return json.loads((output / "scores.json").read_text()), (output / "export/model.safetensors").read_bytes()


def trained(folder: Path, *words: str) -> int:
    return main(["train", str(folder / "run.yaml"), f"output={folder / 'out'}", *words])


def half_done(early: Path, tmp_path: Path) -> Path:
    """A run killed after its best checkpoint and before any later one."""
    folder = Path(shutil.copytree(early, tmp_path / "copy", symlinks=True))
    best = end_of(early / "out")[0]["step"]
    for path in (folder / "out/checkpoints").glob("step-*"):
        if path.name != f"step-{best:06d}":
            shutil.rmtree(path)
    shutil.rmtree(folder / "out/export")
    for name in ("export.json", "scores.json", "report.html", "tables.json"):
        (folder / "out" / name).unlink()
    return folder


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-process run that early stopping ended."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "run.yaml").write_text(yaml.safe_dump(EARLY))
    assert trained(folder) == 0
    return folder


# -- counting evaluations without improvement ------------------------------------------------------------------------


def test_patience_counts_evaluations_without_a_better_one() -> None:
    run = run_of(evaluate={"every": 1, "patience": 2}, checkpoint={"best": "accuracy"})
    progress = Progress.of(run.checkpoint.best, {})
    over = []
    for step, score in enumerate([0.5, 0.4, 0.6, 0.6, None, 0.7], 1):
        progress = progress.after(step, score)
        over.append(progress.over(run.evaluate.patience))
        stored = json.loads(json.dumps(progress.dump()))  # as in a manifest
        assert Progress.of(run.checkpoint.best, stored) == progress
    assert over == [False, False, False, False, True, False]
    assert (progress.best, progress.step, progress.since) == (0.7, 6, 0)
    other = run_of(evaluate={"every": 1, "patience": 1}, checkpoint={"best": "-loss"})
    # a count by another metric is dropped
    assert Progress.of(other.checkpoint.best, progress.dump()) == Progress("-loss")


def test_an_improvement_below_min_delta_does_not_count() -> None:
    run = run_of(evaluate={"every": 1, "patience": 2, "min_delta": 0.1}, checkpoint={"best": "accuracy"})
    progress, over = Progress.of(run.checkpoint.best, {}), []
    for step, score in enumerate([0.5, 0.55, 0.61, 0.65, 0.7], 1):
        progress = progress.after(step, score, run.evaluate.min_delta)
        over.append(progress.over(run.evaluate.patience))
    assert over == [False, False, False, False, True]  # 0.61 is better than 0.5 by more than 0.1, 0.7 than 0.61 is not
    assert (progress.best, progress.step, progress.since) == (0.61, 3, 2)
    with raises("LS1060"):
        run_of(evaluate={"every": 1, "min_delta": 0.1})


@pytest.mark.parametrize(
    ("best", "wanted"),
    [
        ("loss", "write -loss"),
        ("loss_web", "write -loss_web"),
        ("perplexity", "write -perplexity"),
        ("-accuracy", "write accuracy"),
        ("-macro_f1", "write macro_f1"),
    ],
)
def test_a_metric_with_the_wrong_sign_is_refused(best: str, wanted: str) -> None:
    with raises("LS1064", str(wanted)):
        run_of(evaluate={"every": 1}, checkpoint={"best": best})
    assert run_of(evaluate={"every": 1}, checkpoint={"best": wanted.removeprefix("write ")})
    # the name of a user's metric is accepted as it is
    assert run_of(evaluate={"every": 1}, checkpoint={"best": "mine"})


def test_the_earliest_of_equal_scores_is_best_and_nan_never() -> None:
    run = run_of(evaluate={"every": 1}, checkpoint={"best": "-loss"})
    scores = {3: {"loss": 2.0}, 2: {"loss": 1.0}, 4: {"loss": float("nan")}, 1: {"loss": 1.0}, 5: {}}
    assert [each.step for each in best_first(run.checkpoint.best, scores)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("values", "export", "by"),
    [
        ({}, "last", None),
        ({"evaluate": {"every": 5}}, "last", None),
        ({"evaluate": {"every": 5, "patience": 2}}, "best", "-loss"),
        ({"evaluate": {"every": "epoch"}, "checkpoint": {"best": "accuracy"}}, "best", "accuracy"),
        ({"evaluate": {"every": "epoch"}, "checkpoint": {"best": "accuracy"}, "export": "last"}, "last", "accuracy"),
        ({"evaluate": {"every": "epoch"}, "export": "best"}, "best", "-loss"),
    ],
)
def test_which_model_is_exported_by_default(values: dict[str, Any], export: str, by: str | None) -> None:
    run = run_of(**values)
    assert (run.export, run.checkpoint.best) == (export, by)
    assert load(None, [], yaml.safe_load(run.dump())) == run
    assert arithmetic_of(run) == arithmetic_of(run_of())  # a resumed run may change it


@pytest.mark.parametrize(
    "values", [{"export": "best"}, {"evaluate": {"every": 0, "patience": 2}}, {"checkpoint": {"best": "loss"}}]
)
def test_best_needs_evaluations(values: dict[str, Any]) -> None:
    with raises("LS1063"):
        run_of(**{"evaluate": {"every": 0}} | values)
    assert run_of(export="best").evaluate.every == "epoch"  # evaluation is on by default


# -- one process -----------------------------------------------------------------------------------------------------


def test_the_best_is_exported_and_training_ends_early(early: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses, (scores, _) = losses_by_step(early / "out"), end_of(early / "out")
    best, last = min(losses, key=losses.__getitem__), max(losses)
    assert 0 < best < last < EARLY["steps"]
    assert last == best + 3 * EPOCH
    assert list(losses) == list(range(EPOCH, last + 1, EPOCH))
    assert (scores["step"], scores["export"]) == (best, "best")
    trial = SweepTrial("a", {}, load(early / "out/run.yaml", []))  # as one trial of a sweep
    trial.look("validation")
    assert (trial.state, trial.scores["loss"]) == ("done", losses[best])
    assert scores["splits"]["validation"]["loss"] == losses[best]
    assert scores["splits"]["test"]["loss"] == losses_by_step(early / "out", "test")[last]
    folder = early / f"out/checkpoints/step-{best:06d}"
    held = load_file(folder / "shard-00001-of-00001.safetensors")
    weights = load_file(early / "out/export/model.safetensors")
    assert weights
    assert all(bool((held[f"model.{name}"] == tensor).all()) for name, tensor in weights.items())
    assert f"for {best} steps of 20 examples" in (early / "out/export/README.md").read_text()
    assert trained(early) == 0  # the same command again
    assert f"is finished ({last} steps)" in capfd.readouterr().out
    assert main(["evaluate", str(early / "out"), "--split", "validation"]) == 0
    assert f"{losses[best]:,.6g}" in capfd.readouterr().out
    assert main(["status", str(early / "out"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["facts"]["finished"]


def test_killed_run_ends_with_the_same_files(early: Path, tmp_path: Path) -> None:
    folder = half_done(early, tmp_path)
    assert trained(folder) == 0
    assert end_of(folder / "out") == end_of(early / "out")
    shutil.rmtree(folder / "out/export")  # killed after the last checkpoint
    assert trained(folder) == 0
    assert end_of(folder / "out") == end_of(early / "out")


def test_a_resume_keeps_the_count_of_patience(early: Path, tmp_path: Path) -> None:
    """The run is stopped in the middle of the evaluations without improvement."""
    folder = half_done(early, tmp_path)
    assert trained(folder, "checkpoint.every=1", "checkpoint.keep=100", "evaluate.patience=2") == 0
    last = max(losses_by_step(folder / "out"))
    newest = read_manifest(folder / f"out/checkpoints/step-{last:06d}")
    assert isinstance(newest, Manifest)
    assert newest.progress["since"] == 2
    assert trained(folder, "evaluate.patience=3") == 0  # with more patience the run goes on, and keeps its count
    assert end_of(folder / "out") == end_of(early / "out")


def test_the_last_model_can_be_exported(early: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    best = end_of(early / "out")[0]["step"]
    shutil.copy(early / "run.yaml", tmp_path)
    words = [f"steps={best}", "optim.schedule=constant", "evaluate.patience=null"]
    assert trained(tmp_path, *words, "export=best", "checkpoint.best=-loss") == 0
    scores, weights = end_of(tmp_path / "out")
    losses = losses_by_step(tmp_path / "out")
    assert scores["step"] == best == min(losses, key=losses.__getitem__)
    assert "no usable checkpoint" not in "".join(capfd.readouterr())  # of the step that was the best before the last
    folder = tmp_path / "last"
    folder.mkdir()
    shutil.copy(early / "run.yaml", folder)
    assert trained(folder, *words, "export=last") == 0
    assert end_of(folder / "out")[0]["step"] == best
    assert (end_of(folder / "out")[1] == weights) == (scores["step"] == best)


def test_a_damaged_best_one_is_named_and_the_next_is_taken(
    early: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(early, tmp_path / "copy", symlinks=True))
    best, last = end_of(early / "out")[0]["step"], max(losses_by_step(early / "out"))
    shard = folder / f"out/checkpoints/step-{best:06d}/shard-00001-of-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    shutil.rmtree(folder / "out/export")
    assert trained(folder) == 0
    assert f"step-{best:06d}, the best checkpoint, is damaged" in "".join(capfd.readouterr())
    assert end_of(folder / "out")[0]["step"] == last  # the only other checkpoint kept


def test_a_finished_run_exports_the_other_model_on_request(
    early: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(early, tmp_path / "copy", symlinks=True))
    last = max(losses_by_step(early / "out"))
    assert trained(folder, "export=last") == 0
    assert "was written with export: best; it is written again with export: last" in capfd.readouterr().out
    scores, weights = end_of(folder / "out")
    assert (scores["step"], scores["export"]) == (last, "last")
    assert weights != end_of(early / "out")[1]
    assert trained(folder, "export=last") == 0
    assert "is finished" in capfd.readouterr().out
    best = end_of(early / "out")[0]["step"]
    of_best = folder / f"out/checkpoints/step-{best:06d}"
    of_best.rename(tmp_path / of_best.name)
    assert trained(folder) == 0
    said = "".join(capfd.readouterr())
    assert f"there is no usable checkpoint of step {best}" in said  # the log says that the last step was the best
    assert "the best model of those with a checkpoint" in said
    (tmp_path / of_best.name).rename(of_best)
    assert trained(folder, "export=last") == 0
    assert trained(folder) == 0  # and back to the first setting
    assert end_of(folder / "out") == end_of(early / "out")


def test_limited_evaluations_use_the_same_examples(early: Path, tmp_path: Path) -> None:
    shutil.copy(early / "run.yaml", tmp_path)
    assert trained(tmp_path, "evaluate.limit=7", "evaluate.patience=null", "export=best", "steps=6") == 0
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    examples = {
        split: {line["examples"] for line in lines if line["split"] == split} for split in ("validation", "test")
    }
    assert examples == {"validation": {7}, "test": {40}}
    scores, losses = end_of(tmp_path / "out")[0], losses_by_step(tmp_path / "out")
    assert losses.keys() == {2, 4, 6}
    assert scores["splits"]["validation"]["loss"] == min(losses.values())
    assert scores["splits"]["validation"]["examples"] == 7
    assert all(losses[step] != losses_by_step(early / "out")[step] for step in (2, 4))
    assert "Validation metrics use at most 7 examples" in (tmp_path / "out/export/README.md").read_text()
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(early / "run.yaml", other)
    assert (
        trained(other, "evaluate.limit=7", "evaluate.patience=null", "export=best", "steps=6", "evaluate.every=3") == 0
    )
    assert losses_by_step(other / "out")[6] == losses[6]  # the same seven, regardless of earlier evaluations


# -- many processes --------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "processes"), [("fsdp2", 2), ("pipeline", 2), slow("ddp", 2), slow("hf_trainer", 2), ("zero3", 2)]
)
def test_resumed_on_another_strategy_the_same_model_is_exported(
    name: str, processes: int, early: Path, tmp_path: Path, cache: Path
) -> None:
    """The best checkpoint was written by one process; another strategy, with shards or stages, finishes the run."""
    folder = half_done(early, tmp_path)
    status, _, err = train(folder, cache, f"strategy={name}", f"launch.processes={processes}")
    assert status == 0, err
    (scores, weights), (wanted, bits) = end_of(folder / "out"), end_of(early / "out")
    assert scores["step"] == wanted["step"]
    assert weights == bits  # those of the checkpoint, whichever rank holds them
    if name != "zero3":
        assert scores == wanted
        assert losses_by_step(folder / "out") == losses_by_step(early / "out")


@pytest.mark.processes
def test_the_best_model_on_two_processes(early: Path, tmp_path: Path, job: CommandJob) -> None:
    shutil.copy(early / "run.yaml", tmp_path)
    status, _, err = job.train("strategy=fsdp2", "launch.processes=2")
    assert status == 0, err
    assert end_of(tmp_path / "out") == end_of(early / "out")
