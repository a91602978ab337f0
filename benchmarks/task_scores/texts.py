"""The rows that both sides are given, made from the data folder: emotion, multi30k, tinyshakespeare.

In: the folder. Out: folders with train, validation and test as JSON lines (or .txt), the same each time.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
NOUNS = ["Ball", "Frau", "Gruppe", "Hemd", "Hund", "Junge", "Kind", "Mann", "Männer", "Mädchen", "Straße", "Wasser"]


def read(path: Path, most: int | None = None) -> Rows:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for _, line in zip(range(most or 10**9), file, strict=False)]


def write(folder: Path, **splits: Rows) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
    return folder


def captions(data: Path, split: str, most: int | None = None) -> Rows:
    """`en` and `de` of Multi30k."""
    return [row["translation"] for row in read(data / "multi30k" / f"{split}.jsonl", most)]


def translations(data: Path, room: Path, rows: int) -> Path:
    return write(
        room,
        train=captions(data, "train", rows),
        validation=captions(data, "validation", 64),
        test=captions(data, "test_2016_flickr", 400),
    )


def alike(data: Path, room: Path, rows: int) -> Path:
    """Pairs of English captions with a score from 0 to 1, which says how alike their German translations are: chrF
    of the one against the other, both ways. Half are with the caption of most words in common of 300, half with any."""
    from sacrebleu.metrics import CHRF

    chrf, draw = CHRF(), random.Random(0)

    def score(a: str, b: str) -> float:
        return (chrf.sentence_score(a, [b]).score + chrf.sentence_score(b, [a]).score) / 200

    def pairs(held: Rows, count: int) -> Rows:
        words = [set(row["en"].lower().split()) for row in held]
        found: Rows = []
        for n in range(count):
            one = draw.randrange(len(held))
            among = [i for i in draw.sample(range(len(held)), 300) if held[i]["en"] != held[one]["en"]]
            other = max(among, key=lambda i: len(words[one] & words[i])) if n % 2 else among[0]
            told = score(held[one]["de"], held[other]["de"])
            found.append({"first": held[one]["en"], "second": held[other]["en"], "score": round(told, 4)})
        return found

    test = captions(data, "test_2016_flickr")
    return write(
        room,
        train=pairs(captions(data, "train", 5000), rows),
        validation=pairs(captions(data, "validation"), 64),
        test=pairs(test, 500),
    )


def feelings(data: Path, room: Path, rows: int) -> Path:
    """emotion, with the names of its labels."""

    def some(split: str, most: int) -> Rows:
        found = read(data / "emotion" / f"{split}.jsonl", most)
        return [{"text": row["text"], "label": row["label_name"]} for row in found]

    return write(room, train=some("train", rows), validation=some("validation", 100), test=some("test", 300))


def topics(data: Path, room: Path, rows: int) -> Path:
    """English captions, and which of the most frequent nouns stand in what a person has translated them to."""

    def some(split: str, most: int) -> Rows:
        found = [(row["en"], {*re.findall(r"\w+", row["de"])}) for row in captions(data, split, most)]
        return [{"text": text, "label": [noun for noun in NOUNS if noun in words]} for text, words in found]

    return write(
        room, train=some("train", rows), validation=some("validation", 100), test=some("test_2016_flickr", 300)
    )


def questions(data: Path, room: Path, rows: int) -> Path:
    """Three captions that say who "is" or "are" doing something, one after the other; the question is what one of them
    says after these words, the answer what it says before."""

    def some(split: str, most: int) -> Rows:
        parts = [re.fullmatch(r"(.{3,60}?) (is|are) (.{10,}?)\.?", row["en"].strip()) for row in captions(data, split)]
        told = [found.groups() for found in parts if found and not re.match("(there|it|this)\\b", found[1].lower())]
        draw, made = random.Random(split), []
        for place, (answer, verb, rest) in enumerate(told[:most]):
            others = draw.sample([other for other in told if other[2] != rest], 2)
            at = draw.randrange(3)
            several = [*others[:at], told[place], *others[at:]]
            context = " ".join(f"{a} {v} {r}." for a, v, r in several)
            start = len("".join(f"{a} {v} {r}. " for a, v, r in several[:at]))
            made.append(
                {"question": f"Who {verb} {rest}?", "context": context}
                | {"answers": {"text": [answer], "answer_start": [start]}}
            )
        return made

    return write(room, train=some("train", rows), validation=some("validation", 64), test=some("test_2016_flickr", 300))


def spoken(data: Path) -> list[tuple[str, str]]:
    """Speaker and speech, in the order of the plays."""
    text = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    parts = [part.partition(":\n") for part in text.split("\n\n")]
    return [(who, said.strip()) for who, _, said in parts if said.strip()]


def cut(found: Rows, rows: int, test: int) -> dict[str, Rows]:
    """The last of them to be scored on."""
    return {"train": found[: -2 * test][:rows], "validation": found[-2 * test :][:64], "test": found[-test:]}


def names(data: Path, room: Path, rows: int) -> Path:
    """Speeches of Tiny Shakespeare with names, in lower case. A name: words with a capital letter that begin neither a
    line nor a sentence, but for `I` and its like."""
    found: Rows = []
    for _, said in spoken(data):
        words, tags = [], []
        for line in said.split("\n"):
            begins = True
            for word, mark in re.findall(r"('?[A-Za-z]+(?:'[a-z]+)?)|([^\sA-Za-z])", line):
                capital = re.match("'?[A-Z]", word) and not begins and not re.match("(I|O)\\b", word)
                tags.append(("I-NAME" if tags and tags[-1] != "O" else "B-NAME") if capital else "O")
                words.append((word or mark).lower())
                begins = mark in (".", "!", "?", ":", ";", "-", '"') if mark else False
        if len(words) <= 50 and "B-NAME" in tags:
            found.append({"tokens": words, "tags": tags})
    return write(room, **cut(found, rows, 300))


def speeches(data: Path, room: Path, rows: int) -> Path:
    """Four speeches of Tiny Shakespeare that follow each other, as a conversation: user, assistant, user, assistant."""
    every = [said for _, said in spoken(data)]
    found: Rows = []
    for start in range(0, len(every) - 3, 2):
        some = every[start : start + 4]
        if max(map(len, some)) <= 220:
            roles = zip(("user", "assistant") * 2, some, strict=True)
            found.append({"messages": [{"role": role, "content": said} for role, said in roles]})
    return write(room, **cut(found, rows, 150))


def plays(data: Path, room: Path) -> Path:
    """Tiny Shakespeare: the first nine tenths to learn from, the rest to be scored on."""
    text = (data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    room.mkdir(parents=True, exist_ok=True)
    cut = text.rindex("\n\n", 0, len(text) * 9 // 10)
    (room / "train.txt").write_text(text[:cut], encoding="utf-8")
    (room / "test.txt").write_text(text[cut:], encoding="utf-8")
    (room / "validation.txt").write_text(text[cut : cut + 20_000], encoding="utf-8")
    return room


def endings(data: Path, room: Path, rows: int) -> Path:
    """A caption's first four words as the prompt; chosen: how it goes on; rejected: the same words in another order."""

    def pairs(split: str, most: int) -> Rows:
        draw, found = random.Random(split), []
        for row in captions(data, split):
            words = row["en"].split()
            rest = words[4:]
            other = draw.sample(rest, len(rest))
            if len(rest) > 3 and other != rest and len(found) < most:
                answers = {"chosen": f" {' '.join(rest)}", "rejected": f" {' '.join(other)}"}
                found.append({"prompt": " ".join(words[:4]), **answers})
        return found

    return write(
        room, train=pairs("train", rows), validation=pairs("validation", 64), test=pairs("test_2016_flickr", 400)
    )
