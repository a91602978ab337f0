"""Tags of words, and answers that stand in a text, beside Trainer; both models are scored by seqeval and by
torchmetrics' SQuAD.

In: the data folder, a folder with MiniLM, whose heads are new on both sides. Out: scores of the test split, of both
sides, and lockstep's own of its export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import texts
import torch
from sides import Recipe, ours, settings

TAGGED = Recipe(rows=512, batch=16, rate=3e-4, micro_batches=2, length=64)
ASKED = Recipe(rows=384, batch=16, rate=3e-4, micro_batches=2, length=96)
IGNORED = -100


def trained(model: Any, tokenizer: Any, rows: list[dict], collator: Any, room: Path, recipe: Recipe, seed: int) -> Any:
    import transformers

    arguments = transformers.TrainingArguments(**settings(room, recipe, seed))
    transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator).train()
    return model.eval()


def batches(rows: list[Any], size: int = 50) -> list[list[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# -- tags ------------------------------------------------------------------------------------------------------------


def firsts(encoded: Any, row: int) -> dict[int, int]:
    """Word -> its first token."""
    found: dict[int, int] = {}
    for place, word in enumerate(encoded.word_ids(row)):
        if word is not None:
            found.setdefault(word, place)
    return found


def tagged(model: Any, tokenizer: Any, rows: list[dict]) -> dict[str, float]:
    """seqeval's scores; words that are cut off have O."""
    from seqeval import metrics

    said, true = [], []
    for some in batches(rows):
        words = [row["tokens"] for row in some]
        batch = tokenizer(
            words,
            is_split_into_words=True,
            truncation=True,
            max_length=TAGGED.length,
            padding=True,
            return_tensors="pt",
        )
        with torch.no_grad():
            best = model.eval()(**batch).logits.argmax(-1)
        for at, row in enumerate(some):
            places = firsts(batch, at)
            said.append([model.config.id2label[int(best[at, p])] for p in places.values()])
            true.append(row["tags"][: len(places)])
    return {name: float(getattr(metrics, f"{name}_score")(true, said)) for name in ("precision", "recall", "f1")}


def names(data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    """Which words of a speech are names, from the words in lower case."""
    import transformers

    folder = texts.names(data, room / "data", TAGGED.rows)
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    mine = ours(room / "ours", TAGGED, seed, {"name": "token_classification"}, {"source": str(model)}, folder)
    tokenizer, kinds = (
        transformers.AutoTokenizer.from_pretrained(model),
        sorted({t for row in train for t in row["tags"]}),
    )
    encoded = tokenizer(
        [r["tokens"] for r in train], is_split_into_words=True, truncation=True, max_length=TAGGED.length
    )
    rows = []
    for at, row in enumerate(train):
        wanted = [IGNORED] * len(encoded["input_ids"][at])
        for word, place in firsts(encoded, at).items():
            wanted[place] = kinds.index(row["tags"][word])
        rows.append({"input_ids": encoded["input_ids"][at], "labels": wanted})
    transformers.set_seed(seed)
    head = {"id2label": dict(enumerate(kinds)), "label2id": {kind: i for i, kind in enumerate(kinds)}}
    learned = transformers.AutoModelForTokenClassification.from_pretrained(model, num_labels=len(kinds), **head)
    collator = transformers.DataCollatorForTokenClassification(tokenizer)
    other = trained(learned, tokenizer, rows, collator, room / "theirs", TAGGED, seed)
    export = transformers.AutoModelForTokenClassification.from_pretrained(mine["export"])
    return {
        "lockstep": tagged(export, tokenizer, test),
        "Trainer": tagged(other, tokenizer, test),
        "lockstep, as it says": mine["scores"],
    }


# -- answers ---------------------------------------------------------------------------------------------------------


def answered(model: Any, tokenizer: Any, rows: list[dict]) -> dict[str, float]:
    """SQuAD's scores, of the best span of at most 30 tokens."""
    from torchmetrics.text import SQuAD

    score = SQuAD()
    for some in batches(rows):
        batch = tokenizer(
            [row["question"] for row in some], [row["context"] for row in some], truncation="only_second",
            max_length=ASKED.length, padding=True, return_offsets_mapping=True, return_tensors="pt",
        )  # fmt: skip
        offsets = batch.pop("offset_mapping")
        with torch.no_grad():
            found = model.eval()(**batch)
        both = found.start_logits[:, :, None] + found.end_logits[:, None, :]  # [B, T, T]
        width = both.shape[1]
        ahead = torch.arange(width)[None] - torch.arange(width)[:, None]
        for at, row in enumerate(some):
            inside = torch.tensor([which == 1 for which in batch.sequence_ids(at)])
            whole = inside[:, None] & inside[None] & (ahead >= 0) & (ahead < 30)
            first, last = divmod(int(both[at].masked_fill(~whole, -torch.inf).argmax()), width)
            text = row["context"][int(offsets[at, first, 0]) : int(offsets[at, last, 1])]
            told = {"prediction_text": text, "id": str(at)}
            score.update([told], [{"answers": row["answers"], "id": str(at)}])
    found = score.compute()
    return {name: float(found[name]) for name in ("exact_match", "f1")}


def who(data: Path, model: Path, room: Path, seed: int) -> dict[str, Any]:
    """Who does what in one of three captions."""
    import transformers

    folder = texts.questions(data, room / "data", ASKED.rows)
    train, test = texts.read(folder / "train.jsonl"), texts.read(folder / "test.jsonl")
    task = {"name": "question_answering", "stride": 16}
    mine = ours(room / "ours", ASKED, seed, task, {"source": str(model)}, folder)
    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(model), []
    for row in train:
        found = tokenizer(row["question"], row["context"], truncation="only_second", max_length=ASKED.length)
        start = row["answers"]["answer_start"][0]
        end = start + len(row["answers"]["text"][0]) - 1
        ends = [found.char_to_token(place, sequence_index=1) for place in (start, end)]
        first, last = ends if None not in ends else (0, 0)
        rows.append({**found, "start_positions": first, "end_positions": last})
    transformers.set_seed(seed)
    learned = transformers.AutoModelForQuestionAnswering.from_pretrained(model)
    other = trained(
        learned, tokenizer, rows, transformers.DataCollatorWithPadding(tokenizer), room / "theirs", ASKED, seed
    )
    export = transformers.AutoModelForQuestionAnswering.from_pretrained(mine["export"])
    return {
        "lockstep": answered(export, tokenizer, test),
        "Trainer": answered(other, tokenizer, test),
        "lockstep, as it says": mine["scores"],
    }


RECIPES = {"tags": names, "answers": who}
