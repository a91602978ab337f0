"""Tokenizers that produce no tokens, or few different ones, and limits that leave no tokens of a text."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.plugins import find
from lockstep.config.run import Run
from lockstep.data import splitting
from lockstep.data.prepare import prepare, warnings
from lockstep.tasks.models import models
from support.messages import raises
from support.token_folders import WORDS, run_on, save, text_of

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes


def notes_of(run: Run) -> list[str]:
    return warnings(prepare(run, find("tasks", run.task.name)).facts)


def labelled(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text, "second": text_of(n), "label": "ab"[n % 2]} for n, text in enumerate(texts)]


def unknown(count: int) -> list[str]:
    return [f"unheard{number} of things{number}"[: 12 + number] for number in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "model")
    save(tmp_path / "t5", "t5")
    save(tmp_path / "gpt2", "gpt2")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "source"),
    [
        ({}, "model"),
        ({"name": "masked_language_modeling"}, "model"),
        ({"name": "language_modeling", "block_size": 8}, "gpt2"),
        ({"name": "translation", "source": "text", "target": "second", "bleu": False}, "t5"),
        ({"name": "translation", "source": "second", "target": "text", "bleu": False}, "t5"),
    ],
)
def test_tokenizer_with_unknown_tokens_only_is_refused(task: dict[str, Any], source: str, folder: Path) -> None:
    with raises("LS2441", "'[UNK]'", "tokenizer", "train"):
        notes_of(run_on(folder, labelled(unknown(24)), model=source, **task))


def test_many_unknown_tokens_are_noted_with_their_number(folder: Path) -> None:
    texts = [f"{text_of(number)} x{number} y{number} z{number}" for number in range(24)]
    assert any(
        "54 of 126 tokens of train (43%) are '[UNK]'" in note for note in notes_of(run_on(folder, labelled(texts)))
    )
    few = [f"{text_of(number)} x{number}" for number in range(24)]
    assert notes_of(run_on(folder, labelled(few))) == []


def test_texts_that_all_become_the_same_tokens_are_refused(folder: Path) -> None:
    """The tokens are `[CLS] [UNK] w1 [SEP]` for any first word."""
    with raises("LS2442", "tokenizer", "18 different texts", "the same 4 tokens"):
        notes_of(run_on(folder, labelled([f"name{number} w1" for number in range(24)])))


def test_conversations_that_differ_in_unwritten_keys_do_not_blame_the_tokenizer(folder: Path) -> None:
    """Nulls and the order of keys do not make conversations different."""
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    task = LANGUAGE | {"block_size": 32, "messages": "messages", "chat_template": template, "packing": False}

    def talk(user: str, number: int, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": user}, {"content": "w2", "role": "assistant"} | more]}

    with raises("LS2411", "data: ", "18 different conversations", "'name'", "chat template"):
        notes_of(run_on(folder, [talk("w1", n, name=f"n{n}") for n in range(24)], **task))
    rows = [talk(text_of(n // 2), n) | {"id": n} for n in range(48)]
    for n, row in enumerate(rows):
        row["messages"][1] |= {"weight": n % 2}
    (note,) = [each for each in notes_of(run_on(folder, rows, **task)) if "sequences" in each]
    assert "they differ only in keys that the chat template does not write ('weight')" in note
    same = [talk("w1", n, name=None if n % 2 else "a") for n in range(4)]
    assert len(set(map(splitting.normalized, same))) == 2
    assert splitting.normalized({"a": 1, "b": None}) == splitting.normalized({"b": None, "a": 1} | {"c": None})
    with raises("LS3412", "task.chat_template", "'chat.jinja'"):
        notes_of(run_on(folder, rows, **(task | {"chat_template": "chat.jinja"})))


def test_a_limit_that_cuts_every_text_to_the_same_prefix_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"w1 w2 w3 w4 {text_of(number)}" for number in range(24)]
    with raises("LS2442", "data.max_length", "18 different texts", "the same 6 tokens", "raise data.max_length"):
        notes_of(run_on(folder, labelled(texts), "data.max_length=6"))
    with raises("LS2442", "use a model with positions for more than 6 tokens"):
        monkeypatch.setattr(models, "most_tokens", lambda run: 6)
        notes_of(run_on(folder, labelled(texts), "data.max_length=6"))
    assert notes_of(run_on(folder, labelled(texts), "data.max_length=8")) == []


@pytest.mark.parametrize(
    ("task", "source", "names"),
    [("preference", "gpt2", ("chosen", "rejected")), ("embedding", "model", ("anchor", "positive"))],
)
def test_limit_is_named_for_rows_with_several_texts(
    task: str, source: str, names: tuple[str, str], folder: Path
) -> None:
    beginnings = ("w1 w2 w3 w4 w5 w6", "w2 w3 w4 w5 w6 w7")
    rows = [{name: f"{some} {text_of(n)}" for name, some in zip(names, beginnings, strict=True)} for n in range(24)]
    more = {"prompt": None} if task == "preference" else {}
    with raises("LS2442", "data: ", "because every text is truncated to 6 tokens", "raise data.max_length"):
        notes_of(run_on(folder, rows, "data.max_length=6", model=source, name=task, **more))


def test_few_sequences_of_many_texts_are_noted(folder: Path) -> None:
    texts = [f"{WORDS[number % 3]} name{number} w5 w6 w7" for number in range(24)]
    notes = " ".join(notes_of(run_on(folder, labelled(texts))))
    assert "18 different texts of train give only 3 different sequences of tokens: the tokenizer does not" in notes


def test_a_constant_column_is_noted(folder: Path) -> None:
    notes = notes_of(run_on(folder, labelled(["w1 w2"] * 24)))
    assert any("all 18 rows of train hold the same text (text)" in note for note in notes)


LANGUAGE = {"model": "gpt2", "name": "language_modeling", "block_size": 8}


@pytest.mark.parametrize(
    ("rows", "overrides", "task", "wanted"),
    [
        ([{"text": "w1 w2 w3"}] * 24, (), LANGUAGE, "all 18 rows of train hold the same text (text)"),
        (
            [{"text": "w1 w2 w3"}] * 17 + [{"text": text_of(n)} for n in range(7)],
            (),
            LANGUAGE,
            "17 of 18 rows of train hold the same text (text)",
        ),
        (
            [{"text": "w1 w2 w3"}] * 24,
            ("data.stream=true",),
            LANGUAGE,
            "all of the first 18 rows of train hold the same text (text)",
        ),
        ([{"text": "w1 " * 40 + f"w{2 + n}"} for n in range(24)], (), LANGUAGE, "are 'w1'"),
        (
            [{"prompt": text_of(n), "response": "w1 w2"} for n in range(24)],
            (),
            LANGUAGE | {"block_size": 32, "prompt": "prompt", "response": "response"},
            "all 18 rows of train hold the same text in response",
        ),
        (
            [{"anchor": text_of(n), "positive": "w1 w2"} for n in range(24)],
            (),
            {"name": "embedding", "anchor": "anchor", "positive": "positive"},
            "all 18 rows of train hold the same text in positive",
        ),
        (
            [{"anchor": text_of(n), "positive": text_of(n)} for n in range(24)],
            (),
            {"name": "embedding", "anchor": "anchor", "positive": "positive"},
            "all 18 rows of train hold the same text in anchor as in positive",
        ),
        (
            [{"prompt": text_of(n), "chosen": "w1", "rejected": "w2"} for n in range(24)],
            (),
            {"model": "gpt2", "name": "preference"},
            "all 18 rows of train hold the same text in chosen",
        ),
    ],
)
def test_rows_that_nearly_all_hold_the_same_are_noted(
    rows: list[dict[str, Any]], overrides: tuple[str, ...], task: dict[str, Any], wanted: str, folder: Path
) -> None:
    assert any(wanted in note for note in notes_of(run_on(folder, rows, *overrides, **task)))


@pytest.mark.parametrize("stream", ["true", "false"])
def test_rows_that_differ_are_not_noted(stream: str, folder: Path) -> None:
    rows = [{"text": text_of(n)} for n in range(24)]
    assert not any("same text" in note for note in notes_of(run_on(folder, rows, f"data.stream={stream}", **LANGUAGE)))


def test_texts_of_one_token_are_noted(folder: Path) -> None:
    notes = notes_of(run_on(folder, labelled([" ".join(["w1"] * (number + 1)) for number in range(24)])))
    assert any("171 tokens of train are 'w1'" in note for note in notes)


@pytest.mark.parametrize(
    ("most", "least", "task", "source"),
    [
        (1, 3, {}, "model"),
        (2, 3, {}, "model"),
        (4, 5, {"text_pair": "second"}, "model"),
        (1, 3, {"name": "token_classification", "words": "words"}, "model"),
        (1, 3, {"name": "embedding", "anchor": "text", "positive": "second"}, "model"),
        (2, 3, {"name": "masked_language_modeling", "packing": False}, "model"),
        (2, 3, {"name": "translation", "source": "text", "target": "second", "bleu": False}, "t5"),
    ],
)
def test_a_limit_that_leaves_nothing_of_a_text_is_refused(
    most: int, least: int, task: dict[str, Any], source: str, folder: Path
) -> None:
    """The tokenizers library does not cut below the number of special tokens: 1 would train on whole texts."""
    rows = [
        row | {"words": row["text"].split(), "tags": ["O"] * 4} for row in labelled([text_of(n) for n in range(24)])
    ]
    with raises("LS2440", f"data.max_length: {most} token", f"expected {least} or more"):
        notes_of(run_on(folder, rows, f"data.max_length={most}", model=source, **task))
    notes_of(run_on(folder, rows, f"data.max_length={least + 2}", model=source, **task))


def test_a_limit_of_targets_is_named_by_its_own_key(folder: Path) -> None:
    task = {"name": "translation", "source": "text", "target": "second", "bleu": False, "target_length": 2}
    with raises("LS2440", "task.target_length: 2 tokens", "3 or more"):
        notes_of(run_on(folder, labelled([text_of(n) for n in range(24)]), model="t5", **task))
