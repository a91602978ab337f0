"""The lines `repeat` and `best` at the end of a run are commands that can be pasted and do what they say."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lockstep.cli import main
from lockstep.config.model_selection import Best
from lockstep.config.run import Run, RunError, load
from lockstep.data import builtin
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.world import World
from lockstep.launchers.start import planned
from lockstep.training import evaluate_export
from lockstep.training.summary import better_step, padding_ratio, precisions, score_tables, the_same_elsewhere
from lockstep.training.train_state import Counts
from support.harness import TINY, tiny
from support.messages import mentions


@pytest.mark.parametrize("output", ["out", "my runs/a $HOME 'run'", "2024", "a: b"])
@pytest.mark.parametrize(
    ("overrides", "now", "then"),
    [
        (["strategy.name=ddp", "launch.processes=2"], 2, ("ddp", 1)),
        (["strategy.name=ddp", "launch.processes=1", "strategy.options={bucket_cap_mb: 5}"], 1, ("ddp", 2)),
        (["strategy.name=single", "launch.processes=1"], 1, ("ddp", 2)),
        (["strategy.name=pipeline", "strategy.options={stages: 2}", "launch.processes=2"], 2, ("pipeline", 4)),
        (["strategy.name=fsdp2", "launch.processes=4"], 4, ("fsdp2", 1)),
    ],
)
def test_the_same_weights_on_another_number_of_processes(
    output: str, overrides: list[str], now: int, then: tuple[str, int], here: Path
) -> None:
    elsewhere = {"hub": {"push_to": "somebody/model"}, "remote_dir": "s3://bucket/run"}
    run = tiny(*overrides, "max_time=1h", output=output, **elsewhere)
    found, said = pasted(run, now)
    assert (found.strategy.name, found.launch.processes) == then
    assert said == f"gives the same weights on {'1 process' if then[1] == 1 else f'{then[1]} processes'}"
    assert arithmetic_of(found) == arithmetic_of(run)
    assert found.folder == Path(f"{output}-{then[1]}")
    assert (found.max_time, found.hub.push_to, found.remote_dir) == (None, None, None)
    assert planned(found)[1].processes == then[1]


def test_jobs_whose_bits_depend_on_the_number_of_processes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = pasted(tiny("strategy.exact=false", "launch.processes=2", output="out"), 2, "verify")
    assert "on a single process" in said
    run = tiny("launch.name=slurm", output="my out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert the_same_elsewhere(Job.of(run), World(run))[0] == "lockstep evaluate 'my out'"


def pasted(run: Run, processes: int, command: str = "train") -> tuple[Run, str]:
    """Return the run that the command loads from the output folder's run.yaml, and its description."""
    run.folder.mkdir(parents=True)
    (run.folder / "run.yaml").write_text(run.dump())
    world = World(run)
    world.size = processes
    words, said = the_same_elsewhere(Job.of(run), world)
    name, verb, *rest = shlex.split(words)
    assert (name, verb) == ("lockstep", command)
    path, overrides = rest[0], rest[1:]
    return load(path, overrides), said


def best_of(by: str | None, **values: float) -> Best:
    best = Best(by)
    for name, value in values.items():
        best.update(int(name.removeprefix("at")), {best.name: value})
    return best


def test_a_better_step_is_named_with_what_would_export_it() -> None:
    run = tiny(output="out", hub={"push_to": "somebody/model"})
    scores = {"validation": {"loss": 4.29, "accuracy": 0.5}}
    found = better_step(Job.of(run), best_of(None, at34=1.55, at1020=4.29), 1020, scores)
    assert found["better"] == "step 34: validation loss 1.55; the export (step 1,020) has loss 4.29"
    assert "export=best output=out-best hub.push_to=null" in found["best"]
    both = Best()
    both.update(34, {"loss": 1.55, "accuracy": 0.6})
    found = better_step(Job.of(run), both, 1020, scores)
    assert found["better"].endswith("loss 1.55, accuracy 0.6; the export (step 1,020) has loss 4.29, accuracy 0.5")
    assert "best" in found
    both = Best()
    both.update(34, {"loss": 1.55, "accuracy": 0.4})  # only its loss is better
    found = better_step(Job.of(run), both, 1020, scores)
    assert set(found) == {"lower loss"}
    assert found["lower loss"].endswith("accuracy 0.5; export=best exports that step")
    by_score = tiny("checkpoint.best=accuracy", "export=last", output="out")
    found = better_step(Job.of(by_score), best_of("accuracy", at34=0.75, at1020=0.5), 1020, scores)
    assert "accuracy 0.75" in found["better"]


def test_better_step_with_a_checkpoint_is_not_trained_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000034").mkdir(parents=True)
    job, scores = Job.of(tiny(output=str(tmp_path))), {"validation": {"loss": 4.29}}
    found = better_step(job, best_of(None, at34=1.55, at1020=4.29), 1020, scores)
    assert found["best"].startswith(f"lockstep train {tmp_path}/run.yaml export=best  # writes the export again")
    found = better_step(job, best_of(None, at35=1.55, at1020=4.29), 1020, scores)
    assert "trains again" in found["best"]


def test_better_step_is_named_only_if_it_exists() -> None:
    job, scores = Job.of(tiny(output="out")), {"validation": {"loss": 4.29}}
    assert better_step(job, best_of(None, at34=5.0, at1020=4.29), 1020, scores) == {}  # the last step is the best
    assert better_step(job, best_of(None, at34=4.29), 34, scores) == {}  # it is exported
    assert better_step(job, best_of(None, at34=4.2900001), 1020, {"validation": {"loss": 4.2900002}}) == {}
    assert better_step(job, best_of(None), 1020, scores) == {}  # no evaluation during training
    assert better_step(job, best_of(None, at34=1.0), 1020, {"train": {"loss": 2.0}}) == {}
    mean = Job.of(tiny("average.last=2", "checkpoint.every=2", output="out"))  # no single step is exported
    assert set(better_step(mean, best_of(None, at34=1.0), 1020, scores)) == {"better"}


@pytest.mark.processes
def test_the_closing_lines_name_it_and_its_command_exports_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = TINY | {
        "task": {"samples": 0},
        "data": {"source": "builtin/emotion", "max_length": 32, "limit": 40},
        "steps": 30,
        "batch_size": 20,
        "micro_batches": 2,
        "output": str(tmp_path / "out"),
        "optim": {"learning_rate": 5e-2, "warmup_steps": 2, "max_grad_norm": 0.5},
        "strategy": "single",
        "launch": {"processes": 1, "device": "cpu", "threads": 1},
        "evaluate": {"every": "epoch"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    lines = capfd.readouterr().out.splitlines()
    better = next(line for line in lines if line.startswith("better"))
    step = int(re.search(r"step ([\d,]+):", better)[1])
    words = shlex.split(next(line for line in lines if line.startswith("best  ")).partition("  # ")[0])
    assert main(words[2:]) == 0
    scores = json.loads((tmp_path / "out-best" / "scores.json").read_text())
    assert scores["step"] == step != 30
    assert not any(line.startswith("better") for line in capfd.readouterr().out.splitlines())
    files_are_evaluated_with_the_exports_labels(tmp_path, capfd)


def files_are_evaluated_with_the_exports_labels(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file replaces the test split; other training data do not change the labels of the model's outputs, which are in
    another order than sorted, or its tokens."""
    splits = builtin.emotion(load(folder / "out" / "run.yaml", []).seed, train=12_000)
    for split in ("train", "test"):
        pairs = zip(splits[split]["text"][:40], splits[split]["label"][:40], strict=True)
        rows = (json.dumps({"text": text, "label": builtin.LABELS[code]}) for text, code in pairs)
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    (folder / "others.jsonl").write_text("".join(f'{{"text": "a {i}", "label": "{"pq"[i % 2]}"}}\n' for i in range(40)))
    out, test = str(folder / "out"), str(folder / "test.jsonl")
    expected = json.loads((folder / "out" / "scores.json").read_text())["splits"]["test"]["loss"]
    for words in ([test], [f"data.test={test}"], [f"data.source={folder / 'train.jsonl'}", test, "--split", "test"]):
        assert main(["evaluate", out, *words, "--json"]) == 0
        result = json.loads(capfd.readouterr().out)
        (row,) = (row for row in result["tables"]["scores"] if row["name"] == "loss")
        assert float(row["test"]) == pytest.approx(expected, rel=1e-4)
        assert "validation" not in row
        assert result["facts"]["data"] == test
    assert main(["evaluate", out, f"data.source={folder / 'others.jsonl'}"]) == 2
    assert mentions(capfd.readouterr().err, "LS5055", "others.jsonl", "p, q", "sadness")
    run_file = folder / "out" / "run.yaml"
    run_file.write_text(run_file.read_text().replace("builtin/emotion", "gone.jsonl"))  # the training data are gone
    assert main(["evaluate", out, test, "--json"]) == 0
    printed = capfd.readouterr()
    (row,) = (row for row in json.loads(printed.out)["tables"]["scores"] if row["name"] == "loss")
    assert float(row["test"]) == pytest.approx(expected, rel=1e-4)
    assert mentions(printed.err, "LS2250", "gone.jsonl")
    assert main(["evaluate", out, str(folder / "others.jsonl")]) == 2  # has not the model's labels
    assert mentions(capfd.readouterr().err, "LS2250", "gone.jsonl", "others.jsonl", "its labels are p, q")


def test_only_lost_training_data_are_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of the files to score is not followed by another try, if the run's own data can be read."""
    run: Any = Run.model_validate(TINY | {"launch": {"processes": 1, "device": "cpu"}})
    asked: list[Any] = []

    def prepare(alone: Any, world: Any, data: Any) -> None:
        asked.append(data.data.test)
        if data.data.test is not None:
            raise RunError("LS2207", "data.test: no such file: far.jsonl")

    monkeypatch.setattr(evaluate_export, "finished", lambda output, others: (run, tmp_path))
    monkeypatch.setattr(evaluate_export, "of_export", lambda run, export, output: run)
    monkeypatch.setattr(evaluate_export, "for_rank", prepare)
    (tmp_path / "tokenizer_config.json").touch()
    scored = run.model_copy(update={"data": run.data.model_copy(update={"test": "far.jsonl"})})
    with pytest.raises(RunError, match=r"far\.jsonl"):
        evaluate_export._prepared_for(tmp_path, scored, scored, World(run), tmp_path, {"data.test": "far.jsonl"})
    assert asked == ["far.jsonl", None]


def test_little_padding_is_reported() -> None:
    task: Any = SimpleNamespace(unit="tokens")
    texts = {(1000, 1000): "; no padding", (1003, 1200): "; <1% padding (random micro-batches: 20%)"}
    texts[1000, 1004] = "; no padding (random micro-batches: <1%)"
    for (padded, chance), text in texts.items():
        assert padding_ratio(task, Counts(tokens=1000, padded=padded, padded_by_chance=chance)) == text


def test_frozen_weights_in_bfloat16_are_not_called_float32() -> None:
    wide, narrow = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))

    def described(*weights: torch.nn.Parameter) -> str:
        run = SimpleNamespace(precision="fp32", model=SimpleNamespace(quantization=None))
        update = SimpleNamespace(optimizer=SimpleNamespace(state={}))
        strategy: Any = SimpleNamespace(run=run, update=update, model=SimpleNamespace(parameters=lambda: weights))
        return precisions(strategy)

    assert described(wide) == "weights and compute in float32"
    assert described(wide, narrow) == "compute in fp32, weights in bfloat16 and float32"


@pytest.mark.parametrize("width", [40, 60, 80, None])
def test_the_closing_table_fits_the_terminal(width: int | None) -> None:
    names = ("loss", "accuracy", "macro_f1", "roc_auc", "ece", "examples", "coverage", "precision")
    tables = score_tables({"validation": dict.fromkeys(names, 0.5)}, width)
    assert all(
        len("validation  ") + sum(max(map(len, c)) + 2 for c in list(zip(*t, strict=True))[1:]) - 2 <= (width or 80)
        for t in tables
    )
    shown = [name for table in tables for name in table[0][1:]]
    assert shown == list(names) if width is None else shown == list(names[: len(shown)])
