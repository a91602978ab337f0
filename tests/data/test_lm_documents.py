"""Long texts are tokenized in parts, with the same tokens, bytes and words as in one piece, and bounded memory."""

import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.data import arrow_cache, lm_documents, tokenizer
from lockstep.data.arrow_cache import examples_in
from lockstep.data.cache import locked
from support.harness import tiny

WORDS = [
    "the",
    "dog's",
    "naïve",
    "зима",
    "冬",
    "🎿🎿",
    "e\u0301te\u0301",
    "1999",
    "---",
    "  ",
    "\n\n",
    "aaaaaaaaaaaa",
    "x_y",
    ".",
]


def text_of(count: int) -> str:
    draw = random.Random(3)
    letters = "abcdefgh"
    return " ".join(
        draw.choice(WORDS) if draw.random() < 0.3 else "".join(draw.choices(letters, k=draw.randint(1, 9)))
        for _ in range(count)
    )


TEXT = text_of(4000)


def known(kind: str, texts: list[str]) -> Any:
    run = tiny(tokenizer={"train": kind, "vocab_size": 700})
    with locked("a test"):
        return tokenizer.load(
            str(
                tokenizer.prepare(
                    tokenizer.TokenizerChoice.of(run), iter([texts]), f"{kind} {len(texts)}", generative=True
                )
            )
        )


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "wordlevel", "unigram", "character"])
def test_chunked_tokenization_equals_tokenizing_the_whole_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tok = known(kind, [TEXT])
    whole = tok(TEXT, return_offsets_mapping=True, verbose=False)
    wanted = lm_documents.measured(
        [TEXT], whole["input_ids"], [len(whole["input_ids"])], lm_documents.ends_of(whole["offset_mapping"])
    )
    monkeypatch.setattr(lm_documents, "PART", 2500)
    monkeypatch.setattr(lm_documents, "_OVERLAP", 500)
    monkeypatch.setattr(lm_documents, "_WINDOW", 777)
    lengths: list[int] = []
    part = lm_documents._part
    monkeypatch.setattr(lm_documents, "_part", lambda *given: lengths.append(given[2]) or part(*given))
    ids, ends = lm_documents.tokenized(tok, TEXT)
    assert len(lengths) > 8  # it was cut
    assert ids.tolist() == whole["input_ids"]
    assert ends is not None
    found = lm_documents.measured([TEXT], ids, [len(ids)], ends)
    for name in ("ids", "scored", "bytes", "words"):
        assert (getattr(found, name) == getattr(wanted, name)).all(), name
    assert int(found.bytes.sum()) == len(TEXT.encode())
    assert int(found.words.sum()) == len(TEXT.split())


def test_a_text_without_a_safe_boundary_is_tokenized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one repeated letter, each token boundary depends on all before it."""
    text = "b" + "a" * 9001 + " end"
    tok = known("bpe", [TEXT])
    monkeypatch.setattr(lm_documents, "PART", 2501)
    monkeypatch.setattr(lm_documents, "_OVERLAP", 500)
    assert lm_documents.tokenized(tok, text)[0].tolist() == tok(text)["input_ids"]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "wordlevel", "unigram", "character"])
def test_a_tokenizer_trained_on_chunks_equals_that_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_documents, "_PIECE", 1000)
    pieces = list(lm_documents.pieces(TEXT))
    assert len(pieces) > 8
    assert "".join(pieces) == TEXT
    one, other = (known(kind, texts).backend_tokenizer for texts in ([TEXT], pieces))

    def words(texts: list[str]) -> Counter[str]:
        normal = [one.normalizer.normalize_str(text) if one.normalizer else text for text in texts]
        return Counter(word for text in normal for word, _ in one.pre_tokenizer.pre_tokenize_str(text))

    assert words(pieces) == words([TEXT])
    if kind not in ("wordpiece", "unigram"):  # their training breaks ties in the order of a hash table
        assert one.to_str() == other.to_str()


def test_the_tokenizer_gets_bounded_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(lm_documents, "PART", 2500)
    monkeypatch.setattr(lm_documents, "_OVERLAP", 500)
    tok = known("bpe", [TEXT])
    seen: list[int] = []

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(tok, name)

        def __call__(self, text: Any, **options: Any) -> Any:
            seen.append(len(text) if isinstance(text, str) else sum(map(len, text)))
            return tok(text, **options)

    texts = ["short", TEXT, *(f"a text of number {i}" for i in range(900)), TEXT[:3000]]
    data = datasets.Dataset.from_dict({"text": texts})
    found = list(lm_documents.of_texts(data, Spy(), "text", range(len(texts))))
    assert max(seen) <= 3000
    assert sum(rows for _, rows in found) == len(texts)
    ids = [part.tolist() for each, _ in found for part in np.split(each.ids, each.ends[:-1])]
    assert ids == [tok(text)["input_ids"] for text in texts]


def test_memory_of_preparation_does_not_grow_with_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty megabytes of files once took 5.4 GB: Python lists of numbers for every token of a thousand texts."""
    import datasets

    tok = known("bpe", [TEXT])
    monkeypatch.setattr(arrow_cache, "available_cores", lambda: 1)

    def most(key: str, texts: int) -> int:
        data = datasets.Dataset.from_dict({"text": [TEXT] * texts})

        def of(rows: range) -> lm_documents.EncodedDocuments:
            return lm_documents.of_texts(data, tok, "text", rows)

        with locked("a test"):
            tracemalloc.start()
            try:
                made = lm_documents.write([range(texts)], of, 512, True, f"{key} {texts}")
                assert examples_in(made) > 8 * texts
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    at_once = most("at once", 8)  # control: all are shorter than a part and than one write
    monkeypatch.setattr(lm_documents, "PART", 2500)
    monkeypatch.setattr(lm_documents, "_OVERLAP", 500)
    monkeypatch.setattr(lm_documents, "_TOKENS", 10_000)
    monkeypatch.setattr(lm_documents, "_SHARD", 10_000)
    few, many = (most("in parts", texts) for texts in (4, 12))
    assert many < 1.25 * few
    assert many < at_once / 3
