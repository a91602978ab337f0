"""Run files that `lockstep init` writes for the data of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import Run, load
from lockstep.data.arrow_cache import examples_in
from lockstep.data.order import Order, total_steps
from lockstep.data.prepare import prepare
from lockstep.lab.init import questions

LAPTOP = questions.MachineInfo(cores=2, gpus=0, bf16=False, hub=False)


FEELINGS = ["sadness", "joy"]


EMOTION = [{"id": i, "text": f"i feel {FEELINGS[i % 2]} today {i}", "mood": FEELINGS[i % 2]} for i in range(120)]


def jsonl(folder: Path, rows: list[dict], name: str = "train.jsonl") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(map(json.dumps, rows)))


def written(*words: str, path: str = "run.yaml") -> Run:
    assert main(["init", path, "--yes", *words]) == 0
    return load(path, [])


def answering(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    asked: list[str] = []
    left = list(answers)

    def answer(question: str) -> str:
        asked.append(question)
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr(questions, "can_ask", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    return asked


def steps_in(run: Run) -> tuple[int, int, int]:
    """Examples, steps per epoch and in total, as in training."""
    examples = examples_in(prepare(run, plugins.find("tasks", run.task.name)).splits["train"])  # type: ignore[arg-type]
    epoch = Order(examples, run.batch_size, run.seed).steps_per_epoch
    return examples, epoch, total_steps(run.epochs, run.steps, epoch)


def check_arithmetic(path: Path) -> None:
    """Assert that the file's arithmetic is that of training, and its intervals occur before the end."""
    run = load(path, [])
    examples, epoch, total = steps_in(run)
    text = path.read_text().replace("\n# ", " ")
    assert f"{examples:,} " in text
    assert f"{epoch:,} steps an epoch, {total:,} in all" in text
    for every in (run.evaluate.every, run.checkpoint.every, run.track.every):
        assert 0 < (epoch if every == "epoch" else every) < total


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write to, on a laptop without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(questions.MachineInfo, "look", staticmethod(lambda: LAPTOP))
    return tmp_path
