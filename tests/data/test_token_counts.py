"""`min_tokens` and `max_tokens` of `data.filter`: counted with the run's tokenizer, once per text."""

import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.run import Run
from lockstep.data import tokenizer, usable_rows
from lockstep.data.arrow_cache import Columns
from lockstep.data.cache import locked
from support.caches import prepared
from support.harness import tiny
from support.messages import raises
from support.task_runs import MARIAN, sentence, write


def texts(count: int = 60) -> list[str]:
    draw = random.Random(3)
    return [sentence(draw) for _ in range(count)]


def tokenizer_of(*overrides: str) -> str:
    """Return the folder of a tokenizer that exists before the run."""
    with locked("a tokenizer"):
        return str(
            tokenizer.prepare(tokenizer.TokenizerChoice.of(tiny(*overrides)), iter([texts()]), "".join(overrides))
        )


def saved(folder: Path, **columns: list[Any]) -> Path:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    folder.mkdir(exist_ok=True)
    write(folder / "data.jsonl", rows)
    return folder / "data.jsonl"


def run_of(path: Path, wanted: dict[str, Any], source: str, **values: Any) -> Run:
    data = {"source": str(path), "max_length": 32, "filter": wanted}
    return tiny(data=data, tokenizer={"source": source}, **values)


def rows_left(run: Run) -> int:
    found = prepared(run)
    return sum(len(Columns(path)) for path in found.splits.values())


def test_rows_are_filtered_by_token_count(tmp_path: Path) -> None:
    said = texts()
    path = saved(
        tmp_path, text=said, title=[*said[30:], None, *said[:29]], n=[*range(60)], label=[i % 2 for i in range(60)]
    )
    source = tokenizer_of()
    tok: Any = tokenizer.load(source)
    lengths = [len(tok(text)["input_ids"]) for text in said]
    wanted = [5 <= length <= 12 for length in lengths]
    assert 5 < sum(wanted) < 55
    run = run_of(path, {"text": {"min_tokens": 5, "max_tokens": 12}}, source)
    assert rows_left(run) == sum(wanted)
    assert prepared(run).facts["filtered"] == {"train": 60 - sum(wanted)}
    both = run_of(
        path, {"text": {"max_tokens": 12, "min_words": 3}, "title": {"min_tokens": 1}, "n": {"max": 49}}, source
    )
    some = [w <= 12 and len(s.split()) >= 3 for w, s in zip(lengths, said, strict=True)][:50]
    some[30] = False  # without a title
    assert rows_left(both) == sum(some)
    other = tokenizer_of("tokenizer.train=character")  # another run: nothing is read from the cache
    letters = [len(text) + 1 for text in said]
    run = run_of(path, {"text": {"max_tokens": 30}}, other)
    assert rows_left(run) == sum(length <= 30 for length in letters)


def test_the_same_texts_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, text=texts(), label=[i % 2 for i in range(60)])
    source = tokenizer_of()
    rows_left(run_of(path, {"text": {"max_tokens": 12}}, source))
    monkeypatch.setattr(usable_rows, "encode", lambda rows, encoder, features, key: pytest.fail(key))
    with pytest.raises(pytest.fail.Exception):
        rows_left(run_of(path, {"text": {"max_tokens": 11}}, source))
    monkeypatch.undo()
    counted: list[str] = []
    whole = usable_rows.encode

    def spied(rows: Any, encoder: Any, features: Any, key: str) -> str:
        def counting(batch: dict[str, list]) -> Any:
            counted.extend(batch["text"])
            return encoder(batch)

        return whole(rows, counting, features, key)

    monkeypatch.setattr(usable_rows, "encode", spied)
    assert 0 < rows_left(run_of(path, {"text": {"max_tokens": 11}}, source)) < 60
    assert counted == []


@pytest.mark.parametrize(
    ("values", "wanted", "told"),
    [
        (
            {},
            {"label": {"min_tokens": 3}},
            ("LS2316", "int64"),
        ),
        ({}, {"words": {"max_tokens": 3}}, ("LS2316",)),
        (
            {},
            {"text": {"min_tokens": 99}},
            ("LS2317", "60", "{min_tokens", "99}", "'text'", "0"),
        ),
        (
            {"tokenizer": {"train": "bpe", "vocab_size": 400}},
            {"text": {"min_tokens": 3}},
            ("LS2315",),
        ),
    ],
)
def test_columns_without_tokens_are_named(values: dict, wanted: dict, told: tuple[str, ...], tmp_path: Path) -> None:
    said = texts()
    path = saved(tmp_path, text=said, words=[t.split() for t in said], label=[i % 2 for i in range(60)])
    run = run_of(path, wanted, tokenizer_of())
    with raises(*told):
        prepared(tiny(**(run.model_dump(include={"data", "tokenizer"}) | values)))


def test_bounds_that_drop_every_row_are_refused() -> None:
    with raises("LS1026", "text", "min_tokens", "9", "max_tokens", "3"):
        tiny("data.filter={text: {min_tokens: 9, max_tokens: 3}}")


def test_a_translation_s_target_is_counted_by_its_own_tokenizer(tmp_path: Path) -> None:
    said = texts()
    path = saved(tmp_path, en=said, de=[text[::-1] for text in said])
    words, letters = tokenizer_of("tokenizer.train=wordlevel"), tokenizer_of("tokenizer.train=character")
    with locked("a pair"):
        pair = str(tokenizer.pair(Path(words), Path(letters)))
    task = {"name": "translation", "source": "en", "target": "de", "tokenizers": "separate", "bleu": False}
    model = MARIAN | {"config": MARIAN["config"] | {"share_encoder_decoder_embeddings": False}}
    tok: Any = tokenizer.load(letters)
    short = [len(tok(text[::-1])["input_ids"]) <= 40 for text in said]
    run = run_of(path, {"de": {"max_tokens": 40}}, pair, task=task, model=model)
    assert rows_left(run) == sum(short) < 60
    renamed = saved(tmp_path / "other", english=said, german=[text[::-1] for text in said])
    entry = {
        "source": str(renamed),
        "rename": {"en": "english", "de": "german"},
        "filter": {"german": {"max_tokens": 40}},
    }
    values = {"task": task, "model": model, "tokenizer": {"source": pair}}
    assert rows_left(tiny(data={"sources": [entry], "max_length": 64}, **values)) == sum(short)
