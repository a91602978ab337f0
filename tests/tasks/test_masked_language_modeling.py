"""Masked language modelling: BERT's recipe, masks that depend on seed, step and example alone, whole words, the
export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.config.run import Run, RunError
from lockstep.data import masking
from lockstep.data.batch import IGNORED
from lockstep.data.job import Job
from lockstep.tasks.masked_language_modeling import MaskedLanguageModeling
from support.task_runs import make

WORDPIECE = "tokenizer={train: wordpiece, vocab_size: 60}"  # words fall into pieces


def task_of(run: Run) -> MaskedLanguageModeling:
    return MaskedLanguageModeling(run).opened(Job.of(run).with_data().data)


def known(size: int = 1000, **more: Any) -> masking.Vocabulary:
    return masking.Vocabulary(size, 4, np.array([0, 1, 2, 4]), more.get("begins"), more.get("joins"))


def drawn(step: int, rows: int = 400, width: int = 100) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, what is read and the targets, of examples of one length."""
    ids = np.random.default_rng(0).integers(5, 1000, (rows, width))
    ids[:, 0], ids[:, -1] = 1, 2
    real, numbers = np.ones_like(ids), np.arange(rows)
    picked = masking.chosen(ids, real, numbers, (7, step), 0.15, known(), False)
    return ids, *masking.masked(ids, picked, numbers, (7, step), known())


def test_the_shares_equal_those_of_bert() -> None:
    ids, read, targets = drawn(0)
    picked = targets != IGNORED
    assert (picked.sum(1) == round(0.15 * 98)).all()  # of each example, special tokens aside
    assert not picked[:, [0, -1]].any()
    assert (targets[picked] == ids[picked]).all()
    assert (read[~picked] == ids[~picked]).all()
    total = picked.sum()
    assert (read[picked] == 4).sum() / total == pytest.approx(0.8, abs=0.02)
    same = (read[picked] == ids[picked]).sum() / total
    assert same == pytest.approx(0.1, abs=0.015)
    others = read[picked & (read != 4) & (read != ids)]
    assert len(others) / total == pytest.approx(0.1, abs=0.015)
    assert len(np.unique(others)) > 250  # any token
    places = picked.mean(0)[1:-1]
    assert places.std() == pytest.approx(math.sqrt(0.15 * 0.85 / 400), rel=0.3)  # anywhere


def test_masks_differ_between_steps_and_examples() -> None:
    _, _, first = drawn(0)
    _, _, second = drawn(1)
    assert not (first == second).all(1).any()
    together = ((first != IGNORED) & (second != IGNORED)).sum() / (first != IGNORED).sum()
    assert together == pytest.approx(0.15, abs=0.02)  # by chance


def test_a_mask_does_not_depend_on_the_micro_batch(tmp_path: Path) -> None:
    """It depends neither on padding nor on other random draws."""
    task = task_of(make(tmp_path, "masked", "task.packing=false"))
    columns = task.splits["train"]
    whole = task.collate_at(columns, np.array([3, 8, 11]), 0, 5)
    torch.manual_seed(9)
    np.random.seed(9)
    alone = task.collate_at(columns, np.array([8]), 4, 5)
    width = alone.targets.shape[1]
    assert torch.equal(whole.targets[1, :width], alone.targets[0])
    assert torch.equal(whole.inputs["input_ids"][1, :width], alone.inputs["input_ids"][0])
    assert task.count_targets_at(columns, np.array([3, 8, 11]), 5) == int((whole.targets >= 0).sum())
    other = make(tmp_path, "masked", "task.packing=false", "seed=1")
    assert not torch.equal(task_of(other).collate_at(columns, np.array([8]), 4, 5).targets, alone.targets)


def test_evaluations_mask_the_same_tokens_every_time(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "masked"))
    columns = task.splits["validation"]
    one, other = (task.collate(columns, np.arange(len(columns)), 0) for _ in range(2))
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
    assert (one.targets >= 0).any(1).all()


def test_an_example_of_special_tokens_alone_has_a_target() -> None:
    ids, real = np.array([[1, 2, 0], [2, 0, 0]]), np.array([[1, 1, 0], [1, 0, 0]])
    picked = masking.chosen(ids, real, np.arange(2), (0, 0), 0.15, known(), False)
    assert picked.sum(1).tolist() == [1, 1]
    assert not picked[real == 0].any()


@pytest.mark.parametrize("tokenizer", [WORDPIECE, "tokenizer={train: bpe, vocab_size: 290}"])
def test_whole_words_are_masked(tokenizer: str, tmp_path: Path) -> None:
    share = "task.mlm_probability=0.4"  # words of several tokens fit
    run = make(tmp_path, "masked", "task.whole_word_mask=true", "task.packing=false", share, tokenizer)
    task = task_of(run)
    columns, known = task.splits["train"], task.tokenizer
    several = 0
    for row in range(30):
        batch = task.collate_at(columns, np.array([row]), 0, 1)
        ids = columns.ragged("input_ids").row(row)
        text = known.decode(ids, skip_special_tokens=True)
        words = np.array([-1 if word is None else word for word in known(text).word_ids()])
        if known(text)["input_ids"] != ids.tolist():  # a part of a long text, which begins within a word
            continue
        picked = batch.targets[0].numpy() >= 0
        for word in set(words[picked].tolist()):
            assert word >= 0
            assert picked[words == word].all()
            several += (words == word).sum() > 1
        assert picked.any()
        most = max(1, round(0.4 * int((words >= 0).sum())))
        assert picked.sum() <= most or len(set(words[picked].tolist())) == 1
        assert task.count_targets_at(columns, np.array([row]), 1) == picked.sum()
    assert several > 5
    plain = task_of(make(tmp_path, "masked", "task.packing=false", share, tokenizer))
    batch = plain.collate_at(plain.splits["train"], np.arange(30), 0, 1)
    assert not torch.equal(batch.targets, task.collate_at(columns, np.arange(30), 0, 1).targets)


def test_packed_blocks_are_full_and_unpacked_texts_are_not(tmp_path: Path) -> None:
    packed, apart = (task_of(make(tmp_path, "masked", f"task.packing={p}")) for p in ("true", "false"))
    assert set(packed.splits["train"].lengths[:-1].tolist()) == {32}
    begin = apart.tokenizer.cls_token_id
    lengths = np.asarray(apart.splits["train"].lengths)
    assert lengths.max() <= 32
    assert len(set(lengths.tolist())) > 5
    assert all(apart.splits["train"].ragged("input_ids").row(i)[0] == begin for i in range(len(lengths)))
    short = task_of(make(tmp_path, "masked", "task.packing=false", "data.max_length=8"))
    assert len(short.splits["train"]) > len(lengths)  # a long text is several examples, and none is left out
    kept = {len(t.splits["train"]): sum(t.splits["train"].lengths) - 2 * len(t.splits["train"]) for t in (apart, short)}
    assert len(set(kept.values())) == 1


def test_the_loss_in_chunks_is_the_loss(tmp_path: Path) -> None:
    whole, chunked = (task_of(make(tmp_path, "masked", f"task.loss_chunk={size}")) for size in ("null", "7"))
    found = []
    for task in (whole, chunked):
        batch = task.collate_at(task.splits["train"], np.arange(4), 0, 0)
        model = task.model().train()
        torch.manual_seed(0)
        loss = task.loss_sum(model(**batch.inputs), batch.targets)
        loss.backward()
        found.append((loss.item(), [p.grad for p in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one is None or torch.allclose(one, other, atol=1e-5)


BAD = {
    "no such column": (["task.text=words"], ["task.text", "'words'"]),
    "no mask token": (["tokenizer={source: TOKENIZER}"], ["tokenizer", "no mask token"]),
    "unknown words": (
        ["task.whole_word_mask=true", "tokenizer={train: character}"],
        ["task.whole_word_mask", "LS3063"],
    ),
    "a model that looks back": (["model={type: gpt2}"], ["no masked language model", "gpt2"]),
    "too long": (["data.max_length=65"], ["data.max_length", "positions for 64"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_one_message(case: str, tmp_path: Path) -> None:
    overrides, wanted = BAD[case]
    if case == "no mask token":
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        bare = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="[PAD]").save_pretrained(tmp_path / "bare")
        overrides = [f"tokenizer={{source: {tmp_path / 'bare'}}}"]
    with pytest.raises(RunError) as caught:
        task_of(make(tmp_path, "masked", *overrides))
    for part in wanted:
        assert part in str(caught.value)


@pytest.mark.processes
def test_export_can_be_trained_further_and_fills_masks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one = ("launch.processes=1", "strategy.name=single", "steps=30", "micro_batches=2", "evaluate.every=15")
    run = make(tmp_path, "masked", *one, count=200)
    path = tmp_path / "run.yaml"
    path.write_text(run.dump())
    assert main(["train", str(path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    first, last = (line for line in lines if line["split"] == "validation")
    assert last["loss"] < first["loss"]
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    samples = json.loads((tmp_path / "out" / "samples.jsonl").read_text().splitlines()[-1])["samples"]
    assert all(list(sample) == ["text", "filled in", "right"] for sample in samples)
    assert any("[MASK]" in sample["text"] for sample in samples)
    assert not any("[MASK]" in sample["right"] for sample in samples)
    from transformers import AutoModelForMaskedLM

    export = tmp_path / "out" / "export"
    weights = AutoModelForMaskedLM.from_pretrained(export).state_dict()
    capfd.readouterr()
    assert main(["predict", str(tmp_path / "out"), "the [MASK] runs .", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert "[MASK]" not in found["filled"]
    assert len(found["masks"]) == 1
    assert found["masks"][0][0]["score"] >= found["masks"][0][1]["score"]
    assert main(["predict", str(tmp_path / "out"), "the dog runs ."]) == 2
    assert "text 1 has no [MASK] to fill in" in capfd.readouterr().err
    again = make(tmp_path, "masked", f"model={{source: {export}}}", "tokenizer={}")
    begun = task_of(again).model().state_dict()
    assert all(torch.equal(weights[name], begun[name]) for name in weights)
