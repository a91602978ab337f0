"""ROUGE of sums is that of the library, and summaries are written as translations are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.data.job import Job
from lockstep.data.prepare import prepare
from lockstep.tasks.summarization import NAMES, Rouge, Summarization, f_measures, words
from support.messages import raises
from support.task_runs import MARIAN, sentence, write


def texts(count: int) -> tuple[list[str], list[str]]:
    draw = random.Random(0)
    references = [sentence(draw) for _ in range(count)] + ["", "Ein Mann, der \u201etanzt\u201c. 3 x", "a"]
    written = [
        " ".join(w for w in r.split() if draw.random() < 0.7) + draw.choice(["", " big .", "!"]) for r in references
    ]
    return written, references


def test_rouge_by_hand() -> None:
    one, other = words("The cat sat on a mat."), words("the mat, a cat")
    first, second, longest = f_measures(one, other)
    assert first == pytest.approx(2 * (4 / 6) * (4 / 4) / (4 / 6 + 1))
    assert second == 0.0
    assert longest == pytest.approx(2 * (2 / 6) * (2 / 4) / (2 / 6 + 2 / 4))  # "a mat", or "the cat"
    assert f_measures(words("a b c d"), words("a x b c"))[1] == pytest.approx(1 / 3)


@pytest.mark.parametrize("parts", [1, 4])
def test_scores_of_sums_do_not_depend_on_the_parts(parts: int) -> None:
    written, references = texts(40)
    rouge = Rouge()
    sums: dict[str, torch.Tensor] = {}
    for part in range(parts + 1):  # the last one is blank
        mine = slice(part, None, parts) if part < parts else slice(0, 0)
        for name, value in rouge.sums(written[mine], references[mine]).items():
            rounded = torch.round(torch.from_numpy(value).double() * 2**20) / 2**20
            sums[name] = sums[name] + rounded if name in sums else rounded
    wanted = sum(f_measures(words(a), words(b)) for a, b in zip(written, references, strict=True)) / len(written)
    assert [rouge.scores(sums)[name] for name in NAMES] == pytest.approx([100 * each for each in wanted], abs=1e-9)


@pytest.mark.extras
def test_rouge_matches_rouge_score() -> None:
    library = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = library.RougeScorer(list(NAMES), use_stemmer=False)
    for one, other in zip(*texts(200), strict=True):
        theirs = scorer.score(other, one)
        assert f_measures(words(one), words(other)) == pytest.approx([theirs[name].fmeasure for name in NAMES])


def run_of(folder: Path, *overrides: str):
    draw = random.Random(1)
    for split, count in (("train", 60), ("validation", 9)):
        rows = [{"text": (text := sentence(draw)), "summary": " ".join(text.split()[:3])} for _ in range(count)]
        write(folder / f"{split}.jsonl", rows)
    values = {
        "task": {"name": "summarization"},
        "data": {"source": str(folder), "max_length": 32},
        "model": MARIAN,
        "tokenizer": {"train": "bpe", "vocab_size": 400},
        "steps": 12,
        "batch_size": 16,
        "micro_batches": 2,
        "output": str(folder / "out"),
        "launch": {"device": "cpu", "threads": 1, "processes": 1},
        "strategy": {"name": "single"},
    }
    return load(None, list(overrides), values)


def test_target_length_limits_targets(tmp_path: Path) -> None:
    run = run_of(tmp_path, "task.target_length=4")
    task = Summarization(run).opened(Job.of(run).with_data().data)
    columns = task.splits["train"]
    assert columns.ragged("target_ids").lengths.max() == 4
    assert columns.ragged("input_ids").lengths.max() > 4
    assert task._decoding().new_tokens == 4
    with raises("LS3142", "task.target_length", "65", "64"):
        prepare(run_of(tmp_path, "task.target_length=65"), Summarization)
    with raises("LS2312", "task.target", "'headline'"):
        prepare(run_of(tmp_path, "task.target=headline"), Summarization)


@pytest.mark.processes
def test_training_writes_summaries(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(run_of(tmp_path).dump())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    last = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert {*NAMES, "perplexity"} <= set(last)
    capfd.readouterr()
    assert main(["predict", str(tmp_path / "out"), "the dog runs .", "--json"]) == 0
    assert set(json.loads(capfd.readouterr().out)) == {"text", "summary"}
