"""Extractive question answering: windows, where the answer stands in them, the best span, SQuAD's scores."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from lockstep.cli import main
from lockstep.config.run import Run
from lockstep.data import qa_features
from lockstep.data.batch import IGNORED
from lockstep.data.job import Job
from lockstep.data.qa_features import TokenWindow
from lockstep.tasks.models import qa_spans
from lockstep.tasks.question_answering import QuestionAnswering
from support.messages import raises
from support.task_runs import WORDS, make, write


def task_of(run: Run) -> QuestionAnswering:
    return QuestionAnswering(run).opened(Job.of(run).with_data().data)


def rows_in(folder: Path, split: str = "train") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "questions" / f"{split}.jsonl").read_text().splitlines()]


def test_windows_cover_the_context_and_share_the_stride(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "questions"))
    columns = task.splits["train"]
    several = 0
    for row, told in enumerate(rows_in(tmp_path)[:30]):
        (parts,) = qa_features.parts_of(columns, [row])
        spans_of = [{(w.begins[p], w.ends[p]) for p in range(w.first, w.last + 1)} for w in parts]
        assert all(len(w.ids) <= 32 for w in parts)
        assert all(w.ids[0] == task.tokenizer.cls_token_id for w in parts)
        assert max(end for _, end in spans_of[-1]) == len(told["context"])
        for one, other in pairwise(spans_of):
            assert len(one & other) == 6
            several += 1
    assert several > 5


def test_default_stride_shrinks_with_a_short_window(tmp_path: Path) -> None:
    """max_length and stride are both 128 by default: every row was refused, with keys that nobody wrote."""
    run = make(tmp_path, "questions")
    options = run.task.model_copy(update={"stride": 128})
    bare = run.model_copy(update={"task": options}).as_written(run.written_keys - {"task.stride"})
    fitted, notes = QuestionAnswering(bare).fit_defaults()
    assert QuestionAnswering(fitted).options.stride == run.data.max_length // 2
    assert notes[-1].startswith("task.stride is ")
    assert notes[-1].endswith("its default is 128")
    assert QuestionAnswering(run).fit_defaults()[0] == run  # a value that was written stays


def test_default_stride_shrinks_for_a_long_question(tmp_path: Path) -> None:
    """The row was refused, for a stride that nobody wrote. Every other row keeps the stride."""
    make(tmp_path, "questions")
    rows = rows_in(tmp_path)
    rows[3]["question"] = "where " * 22
    write(tmp_path / "questions" / "train.jsonl", rows)
    run = make(tmp_path, "questions")
    run = run.model_copy(update={"task": run.task.model_copy(update={"stride": 128})})
    task = QuestionAnswering(QuestionAnswering(run.as_written(run.written_keys - {"task.stride"})).fit_defaults()[0])
    task = task.opened(prepared := Job.of(task.run).with_data().data)
    columns = task.splits["train"]
    shared = columns.flat("shared")[np.arange(len(rows))]
    assert set(np.delete(shared, 3)) == {16}
    assert 0 < shared[3] < 8
    assert prepared.facts["notes"][-1].startswith(f"task.stride is down to {shared[3]} for 1 of {len(rows)} train")
    (parts,) = qa_features.parts_of(columns, [3])
    for one, other in pairwise(parts):
        spans = [{(w.begins[p], w.ends[p]) for p in range(w.first, w.last + 1)} for w in (one, other)]
        assert len(spans[0] & spans[1]) == shared[3]


def test_an_answer_is_a_target_only_in_windows_that_contain_it(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "questions"))
    columns = task.splits["train"]
    nowhere = 0
    for row, told in enumerate(rows_in(tmp_path)[:40]):
        batch = task.collate(columns, np.array([row]), 0)
        (parts,) = qa_features.parts_of(columns, [row])
        assert len(batch.targets) == len(parts)
        assert task.count_targets(columns, np.array([row])) == 2 * len(parts)
        start, text = told["answers"]["answer_start"][0], told["answers"]["text"][0]
        held = 0
        for window, (first, last) in zip(parts, batch.targets.tolist(), strict=True):
            inside = window.begins[window.first] <= start and window.ends[window.last] >= start + len(text)
            assert ((first, last) != (0, 0)) == inside
            if inside:
                assert told["context"][window.begins[first] : window.ends[last]] == text
            held += inside
            nowhere += not inside
        assert held
    assert nowhere > 5


def window(count: int, first: int, last: int) -> TokenWindow:
    """Tokens of three characters each."""
    return TokenWindow([9] * count, [], first, last, [3 * i for i in range(count)], [3 * i + 3 for i in range(count)])


def test_the_best_span_is_the_best_of_all_allowed_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 12, 2, generator=draw)
    windows = [[window(12, 3, 10), window(9, 4, 8)], [window(12, 2, 11)], [window(7, 3, 5), window(12, 3, 11)]]
    for tokens in (1, 3, 30):
        found = qa_spans.best(logits, windows, tokens, False)
        at = 0
        for each, span in zip(windows, found, strict=True):
            every = {
                (3 * a, 3 * b + 3): float(logits[at + i, a, 0] + logits[at + i, b, 1])
                for i, w in enumerate(each)
                for a in range(w.first, w.last + 1)
                for b in range(a, min(w.last, a + tokens - 1) + 1)
            }
            assert (span.start, span.end) in every
            same = [value for key, value in every.items() if key == (span.start, span.end)]
            assert max(every.values()) == pytest.approx(max(same), abs=1e-6) or len(each) > 1
            at += len(each)


def test_no_answer_is_chosen_if_every_window_prefers_it() -> None:
    logits = torch.zeros(3, 6, 2)
    logits[:2, 0] = 5.0  # both windows of the first question point at their first token, one of the second's alone
    logits[1, 3] = 2.0
    both, one = [window(6, 2, 5), window(6, 2, 5)], [window(6, 2, 5)]
    assert qa_spans.best(logits, [both, one], 30, True)[0] == qa_spans.Span()
    assert qa_spans.best(logits, [both, one], 30, False)[0] == qa_spans.Span(9, 12)
    assert qa_spans.best(logits[1:], [both], 30, True)[0] == qa_spans.Span(9, 12)


CASES = [
    ("The Dog!", ["dog"], (1.0, 1.0)),
    ("a big red dog", ["the red cat", "dog"], (0.0, 0.5)),
    ("", ["dog"], (0.0, 0.0)),
    ("", [], (1.0, 1.0)),
    ("dog", [], (0.0, 0.0)),
    ("dog dog", ["dog"], (0.0, 2 / 3)),
]


@pytest.mark.parametrize(("answer", "right", "wanted"), CASES)
def test_scores_match_squad(answer: str, right: list[str], wanted: tuple[float, float]) -> None:
    assert qa_spans.scores(answer, right) == pytest.approx(wanted)


@pytest.mark.extras
def test_scores_match_torchmetrics() -> None:
    theirs = pytest.importorskip("torchmetrics.functional.text")
    draw = random.Random(0)
    words = [*WORDS, "The", "an", "dog,", "(big)", "it's"]
    for _ in range(300):
        one, other, third = (" ".join(["old", *draw.choices(words, k=draw.randint(0, 5))]) for _ in range(3))
        right = {"answers": {"answer_start": [0, 0], "text": [other, third]}, "id": "0"}
        found = theirs.squad([{"prediction_text": one, "id": "0"}], [right])
        assert qa_spans.scores(one, [other, third]) == pytest.approx(
            (float(found["exact_match"]) / 100, float(found["f1"]) / 100)
        )


def test_the_loss_matches_transformers_without_padding(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "questions"))
    model = task.model().eval()
    columns = task.splits["train"]
    row = next(i for i in range(40) if columns.flat("windows")[i] == 1)
    batch = task.collate(columns, np.array([row]), 0)
    with torch.no_grad():
        ours = float(task.loss_sum(model(**batch.inputs), batch.targets))
        for hook in list(model._forward_hooks):
            del model._forward_hooks[hook]
        start, end = batch.targets[:, 0], batch.targets[:, 1]
        theirs = float(model(**batch.inputs, start_positions=start, end_positions=end).loss)
    assert ours / task.count_targets(columns, np.array([row])) == pytest.approx(theirs, rel=1e-5)
    padded = task.collate(columns, np.arange(12), 0)
    model = task.model().eval()
    with torch.no_grad():
        logits = model(**padded.inputs).logits
    assert (logits[padded.inputs["attention_mask"] == 0] < -1e30).all()


def test_a_padding_micro_batch_has_no_loss(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "questions"))
    whole = task.collate(task.splits["train"], np.arange(4), 0)
    model = task.model().eval()
    for batch in (task.collate(task.splits["train"], np.arange(0), 0), whole.blank()):
        assert (batch.targets == IGNORED).all()
        assert task.loss_sum(model(**batch.inputs), batch.targets).item() == 0.0


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"answers": {"text": ["cat"], "answer_start": [1]}}, ("LS2161", "row 3", "'cat'")),
        ({"answers": {"text": ["dog"], "answer_start": []}}, ("LS2160", "row 3", "answer_start")),
        ({"answers": {"text": [], "answer_start": []}}, ("LS2323", "task.answers", "'answers'", "1", "9")),
        ({"context": " "}, ("LS2323", "task.context", "'context'")),
        ({"question": "where " * 40}, ("LS2162", "0", "32")),
        ({"question": "where " * 24}, ("LS2162", "5", "32", "task.stride=6")),
    ],
)
def test_bad_rows_are_refused(change: dict[str, Any], wanted: tuple[str, ...], tmp_path: Path) -> None:
    good = {"question": "where?", "context": "the dog runs", "answers": {"text": ["dog"], "answer_start": [4]}}
    (tmp_path / "questions").mkdir()
    rows = [good | {"question": f"where {i}?"} for i in range(8)]
    write(tmp_path / "questions" / "train.jsonl", [*rows[:3], rows[3] | change, *rows[3:]])
    with raises(*wanted):
        task_of(make(tmp_path, "questions"))


def test_unanswerable_questions_are_trained_if_allowed(tmp_path: Path) -> None:
    good = {"question": "where?", "context": "the dog runs", "answers": {"text": ["dog"], "answer_start": [4]}}
    none = {"question": "who?", "context": "the dog runs", "answers": {"text": [], "answer_start": []}}
    (tmp_path / "questions").mkdir()
    for split in ("train", "validation"):
        write(tmp_path / "questions" / f"{split}.jsonl", [good, none])
    task = task_of(make(tmp_path, "questions", "task.unanswerable=true"))
    assert task.collate(task.splits["train"], np.array([1]), 0).targets.tolist() == [[0, 0]]
    assert task.collate(task.splits["train"], np.array([0]), 0).targets.tolist() != [[0, 0]]


@pytest.mark.processes
def test_training_answers_questions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = ("launch.processes=1", "strategy.name=single", "steps=30", "micro_batches=2", "evaluate.every=15")
    run = make(tmp_path, "questions", *one)
    path = tmp_path / "run.yaml"
    path.write_text(run.dump())
    assert main(["train", str(path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    learned = [line["loss"] for line in lines if line["split"] == "train"]
    assert learned[-1] < learned[0] - 0.3
    last = lines[-1]
    assert 0 <= last["exact_match"] <= last["f1"] <= 100
    samples = json.loads((tmp_path / "out" / "samples.jsonl").read_text().splitlines()[-1])["samples"]
    assert all(list(sample) == ["question", "answer", "right"] for sample in samples)
    rows = rows_in(tmp_path, "validation")
    capfd.readouterr()
    assert main(["predict", str(tmp_path / "out"), str(tmp_path / "questions" / "validation.jsonl"), "--json"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    exact = [qa_spans.scores(each["answer"], row["answers"]["text"])[0] for each, row in zip(found, rows, strict=True)]
    assert 100 * np.mean(exact) == pytest.approx(last["exact_match"], abs=1e-4)
    assert all(row["context"][e["start"] : e["end"]] == e["answer"] for e, row in zip(found, rows, strict=True))


@pytest.mark.parametrize("more", [0, 1, 2])
def test_windows_must_be_longer_than_the_stride(more: int) -> None:
    """Beside all special tokens of a pair, of which one text alone has fewer: tokenizers panic where there is none."""
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"])}
    core = Tokenizer(WordLevel(words, "[UNK]"))
    core.pre_tokenizer = Whitespace()
    core.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    most = 2 + 3 + 2 + more  # the question's tokens, special ones, those that windows share
    stride = qa_features.Stride(2, gives_way=False)
    if not more:
        with pytest.raises(ValueError, match="leaves 2 of"):
            stride.for_question(tokenizer, "a b", most)
        return
    shared = stride.for_question(tokenizer, "a b", most)
    parts = qa_features.windows(tokenizer, "a b", "c d e f g h", most, shared)
    assert parts[0].ids[4:-1] == [words[word] for word in "cdefgh"[: 2 + more]]
