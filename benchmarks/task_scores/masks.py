"""Masked language modelling beside Trainer with `DataCollatorForLanguageModeling`: MiniLM reads Tiny Shakespeare.

In: the data folder, a folder with MiniLM, whose head for masks is new on both sides. Out: perplexity of masked tokens
of the test part, before and after; the same masks for all, drawn by the collator.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import texts
import torch
from sides import Recipe, ours, settings

MASKED = Recipe(rows=128, batch=8, rate=5e-4, micro_batches=2, length=128)  # rows: blocks


def blocks(path: Path, tokenizer: Any, length: int) -> list[list[int]]:
    """As run_mlm.py of transformers makes them: all tokens, cut; what is left over is dropped."""
    ids = tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    room = length - 2
    cut = [ids[i : i + room] for i in range(0, len(ids) - room + 1, room)]
    return [[tokenizer.cls_token_id, *part, tokenizer.sep_token_id] for part in cut]


def perplexity(model: Any, tokenizer: Any, rows: list[list[int]]) -> dict[str, float]:
    from transformers import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=0)
    model, lost, count, right = model.eval(), 0.0, 0, 0
    for start in range(0, len(rows), 16):
        batch = collator([{"input_ids": ids} for ids in rows[start : start + 16]])
        asked = batch["labels"] >= 0
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits[asked]
        wanted = batch["labels"][asked]
        lost += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
        count, right = count + len(wanted), right + int((logits.argmax(1) == wanted).sum())
    return {"perplexity": math.exp(lost / count), "accuracy": right / count}


def theirs(model: Path, rows: list[list[int]], room: Path, seed: int) -> tuple[Any, Any]:
    import transformers

    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    learned = transformers.AutoModelForMaskedLM.from_pretrained(model)
    before = perplexity(learned, tokenizer, rows_of_test(room, tokenizer))
    trainer = transformers.Trainer(
        learned, transformers.TrainingArguments(**settings(room / "theirs", MASKED, seed)),
        train_dataset=[{"input_ids": ids} for ids in rows],
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    )  # fmt: skip
    trainer.train()
    return learned, before


def rows_of_test(room: Path, tokenizer: Any) -> list[list[int]]:
    return blocks(room / "data" / "test.txt", tokenizer, MASKED.length)[:48]


def compared(data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder, tokenizer = texts.plays(data, room / "data"), AutoTokenizer.from_pretrained(model)
    task = {"name": "masked_language_modeling", "samples": 0}
    mine = ours(room / "ours", MASKED, seed, task, {"source": str(model)}, folder)
    test = rows_of_test(room, tokenizer)
    other, before = theirs(model, blocks(folder / "train.txt", tokenizer, MASKED.length), room, seed)
    return {
        "before": before,
        "lockstep": perplexity(AutoModelForMaskedLM.from_pretrained(mine["export"]), tokenizer, test),
        "Trainer": perplexity(other, tokenizer, test),
        "lockstep, as it says": mine["scores"],
    }


RECIPES = {"masked": compared}
