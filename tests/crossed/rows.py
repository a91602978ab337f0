"""Rows of every task, in every shape that has caused a failure, written to files that a run file can read.

In: a recipe: kind of rows, shape of their texts, how they are read, a seed. Out: files in a folder, the same for the
same recipe.
"""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

from crossed.families import words
from crossed.images import image_of

WORDS = words("a the dog cat bird runs sees likes big small red old house near over")
SAME_LENGTH = words("able bird calm door easy fish gold hand idea join kind lamp")
ODD = (
    *("naïve", "naïve", "ﬁne", "Ⅷ", "日本語", "ภาษาไทย", "שלום", "مرحبا", "😀👩‍👩‍👧", "\u200b", "x\u00a0y", "\ufeffz"),
    *(
        "\uff26\uff35",
        "ß",
        "İ",
        "ǅ",
        "a\u0301\u0316",
        "\U0001d518\U0001d52b",
        "--",
        "'\"",
        "<s>",
        "[MASK]",
        "\\n",
        "\u2028",
        "{}",
        "%s",
    ),
)
SHAPES = ("varied", "equal", "one_token", "long", "ragged", "unicode", "blank")
TRAIN, HELD_OUT = 22, 7  # rows: three steps of 8, the last of them short

# Kinds of rows -> the columns of texts in them.
KINDS: dict[str, tuple[str, ...]] = {
    "labelled": ("text",),
    "paired": ("text", "second"),
    "multi_label": ("text",),
    "numbers": ("text",),
    "tagged": (),
    "texts": ("text",),
    "prompts": ("question", "answer"),
    "messages": (),
    "questions": (),
    "pairs": ("anchor", "positive", "negative"),
    "scored": ("anchor", "positive"),
    "preferences": ("prompt", "chosen", "rejected"),
    "translations": (),
    "summaries": ("text", "summary"),
    "images": (),
}
FLAT = ("labelled", "paired", "numbers", "texts", "prompts", "pairs", "scored", "preferences", "summaries")


def words_of(draw: random.Random, shape: str, place: int) -> list[str]:
    """Draw the words of one text."""
    if shape == "equal":
        return draw.choices(SAME_LENGTH, k=5)
    if shape == "one_token":
        return [draw.choice(WORDS)]
    if shape == "long":
        return draw.choices(WORDS, k=draw.randint(30, 60))
    if shape == "ragged":
        return draw.choices(WORDS, k=50 if place % 3 == 0 else 1)
    if shape == "unicode":
        return [draw.choice((*ODD, *WORDS)) for _ in range(draw.randint(1, 8))]
    return draw.choices(WORDS, k=draw.randint(1, 10))


def text_of(draw: random.Random, shape: str, place: int) -> str | None:
    """Draw one text. With the shape `blank` one in five is empty: None, "", or blanks."""
    if shape == "blank" and draw.random() < 0.2:
        return draw.choice(("", "  ", "\t\n", "\u00a0", None))
    return " ".join(words_of(draw, shape, place))


def row_of(kind: str, shape: str, labels: str, draw: random.Random, place: int) -> dict[str, Any]:
    """Draw one row of a kind."""
    text = text_of(draw, shape, place)
    words = words_of(draw, shape, place)
    few = ["yes", "no", "perhaps"]
    names = {"few": few, "two": few[:2]}.get(labels) or [f"class {n}" for n in range(11)]
    label = f"class {place}" if labels == "one_each" else names[place] if place < len(names) else draw.choice(names)
    if kind in ("labelled", "paired"):
        row: dict[str, Any] = {"text": text, "label": label}
        return row | ({"second": text_of(draw, shape, place + 1)} if kind == "paired" else {})
    if kind == "images":
        return {"image": image_of(draw, shape, place), "label": label}
    if kind == "multi_label":
        return {"text": text, "label": sorted(draw.sample(few, draw.randint(0, 3)))}
    if kind == "numbers":
        return {"text": text, "label": round(draw.gauss(0, 1), 3)}
    if kind == "tagged":
        words = [word for word in words if word.strip()] or ["dog"]
        tags = ["B-ANIMAL" if word in ("dog", "cat", "bird") else "O" for word in words]
        return {"tokens": words, "tags": tags}
    if kind == "messages":
        said = [("user", text or ""), ("assistant", "yes ."), ("user", "why"), ("assistant", " ".join(words[:4]))]
        turns = [{"role": role, "content": content} for role, content in said[: draw.choice((2, 4))]]
        return {"messages": turns}
    if kind == "questions":
        at = draw.randrange(len(words))
        answer = {"text": [words[at]], "answer_start": [len(" ".join(words[:at])) + (at > 0)]}
        return {"question": f"where is {words[at]}", "context": " ".join(words), "answers": answer}
    if kind == "translations":
        return {"translation": {"en": text, "de": None if text is None else " ".join(w[::-1] for w in text.split(" "))}}
    row = {name: text_of(draw, shape, place + i) for i, name in enumerate(KINDS[kind])}
    if kind == "preferences":
        row |= {"chosen": " ".join([*words[:3], "yes"]), "rejected": " ".join([*words[:2], "no"])}
    if kind == "pairs" and row["negative"] is not None:
        row["negative"] = f"not {row['negative']}"
    return row | ({"score": round(draw.random(), 2)} if kind == "scored" else {})


def rows_of(recipe: dict[str, Any], split: str, count: int) -> list[dict[str, Any]]:
    """The rows of one split. All have a column `lang` and a number `size`, which filters read."""
    draw = random.Random(f"{recipe['seed']}/{split}/{recipe['kind']}/{recipe['shape']}")
    found = []
    for place in range(count):
        row = row_of(recipe["kind"], recipe["shape"], recipe.get("labels", "few"), draw, place)
        found.append(row | {"lang": "en" if place % 4 else "fr", "size": place % 5})
        if recipe.get("repeated") and place % 4 == 1:
            found.append(found[-1])
    return found


def write(folder: Path, recipe: dict[str, Any]) -> None:
    """The files of a recipe. `files`: how they are laid out: jsonl, csv, parquet, one (a column says which split),
    shards, two (sources `a` and `b`), or folders (of labels); `splits`: those that are written.
    Images are in parquet."""
    files, splits = recipe.get("files", "jsonl"), recipe.get("splits", ["train", "validation"])
    made = {split: rows_of(recipe, split, TRAIN if split == "train" else HELD_OUT) for split in splits}
    if recipe.get("overlapping") and "validation" in made:
        made["train"] += made["validation"][:3]
    folder.mkdir(parents=True, exist_ok=True)
    lines, ending = (
        (_images if recipe["seed"] else _parquet, "parquet") if recipe["kind"] == "images" else (_jsonl, "jsonl")
    )
    if files == "folders":
        for split, rows in made.items():
            for place, row in enumerate(rows):
                (of := folder / split / str(row["label"])).mkdir(parents=True, exist_ok=True)
                if row["image"] is not None:
                    (of / f"{place}.png").write_bytes(row["image"])
    elif files == "one":
        lines(folder / f"all.{ending}", [row | {"part": split} for split, rows in made.items() for row in rows])
    elif files == "two":
        for name in ("a", "b"):
            (folder / name).mkdir()
            for split, rows in made.items():
                part = rows[::2] if name == "a" else rows[1::2]
                if split == "train" and recipe.get("sharded"):
                    _jsonl(folder / name / f"{split}-0.jsonl", part[: len(part) // 2])
                    _jsonl(folder / name / f"{split}-1.jsonl", part[len(part) // 2 :])
                else:
                    lines(folder / name / f"{split}.{ending}", part)
    else:
        for split, rows in made.items():
            if files == "shards" and split == "train":
                for place in range(3):
                    _jsonl(folder / f"train-{place}.jsonl", rows[place * 8 : (place + 1) * 8 if place < 2 else None])
            elif files == "csv":
                _csv(folder / f"{split}.csv", rows)
            elif files == "parquet":
                _parquet(folder / f"{split}.parquet", rows)
            else:
                lines(folder / f"{split}.{ending}", rows)


def _jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _images(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write images to parquet as on the Hub: bytes and a file name per image."""
    pairs = [None if row["image"] is None else {"bytes": row["image"], "path": "image"} for row in rows]
    _parquet(path, [row | {"image": pair} for row, pair in zip(rows, pairs, strict=True)])


def _parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
