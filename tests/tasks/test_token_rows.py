"""Tokens that a pretrained model has no row for, and rows that a config would draw anew."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.config.plugins import find
from lockstep.config.run import Run
from lockstep.data import tokenizer as tokenizers
from lockstep.data.arrow_cache import Prepared
from lockstep.data.prepare import prepare, warnings
from lockstep.tasks.models import models
from lockstep.tasks.models.model_configs import ModelChoice
from support.command import LOCKSTEP, CommandJob, ended, start
from support.messages import mentions, raises
from support.token_folders import NEW, SPECIAL, WORDS, run_on, save, text_of, tokenizer_of

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

ROWS = len(WORDS) + len(SPECIAL)
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "classification": ("bert", {}),
    "token_classification": ("bert", {"words": "words"}),
    "question_answering": ("bert", {"stride": 2}),
    "embedding": ("bert", {}),
    "language_modeling": ("gpt2", {"block_size": 16}),
    "reward": ("gpt2", {}),
    "preference": ("gpt2", {}),
    "translation": ("t5", {"source": "text", "target": "other", "bleu": False}),
    "summarization": ("t5", {"source": "text", "target": "other", "rouge": False}),
}


def rows_with(*more: str, count: int = 24) -> list[dict[str, Any]]:
    """Rows for all tasks; every fifth text of one column ends with `more`."""
    rows = []
    for number in range(count):
        text = text_of(number, *more) if number % 5 == 1 else text_of(number)
        answers = {"text": [text.split()[0]], "answer_start": [0]}
        both = {"chosen": text, "rejected": text_of(number + 7)}
        row = {"text": text, "label": "ab"[number % 2], "words": text.split(), "tags": ["O"] * len(text.split())}
        row |= {"question": WORDS[number], "context": text, "answers": answers, "anchor": text}
        rows.append(row | {"positive": text_of(number + 3), "other": text, "prompt": WORDS[number]} | both)
    return rows


def prepared(run: Run) -> Prepared:
    return prepare(run, find("tasks", run.task.name))


@pytest.mark.parametrize("name", TASKS)
def test_a_token_of_the_data_without_a_row_is_refused(name: str, tmp_path: Path) -> None:
    kind, options = TASKS[name]
    save(tmp_path / "model", kind, NEW)
    with raises("LS3440", f"ids up to {ROWS + 1}", f"{ROWS} rows", f"'<new1>' (id {ROWS})", "train split"):
        prepared(run_on(tmp_path, rows_with("<new1>"), name=name, **options))


@pytest.mark.parametrize("name", TASKS)
def test_tokens_without_a_row_that_no_text_holds_are_noted(name: str, tmp_path: Path) -> None:
    """The control: a published tokenizer may have tokens of images that its texts never hold."""
    kind, options = TASKS[name]
    save(tmp_path / "model", kind, NEW)
    notes = " ".join(warnings(prepared(run_on(tmp_path, rows_with(), name=name, **options)).facts))
    assert f"{ROWS} rows: none for '<new1>' (id {ROWS}), '<new2>' (id {ROWS + 1})" in notes


def test_a_model_with_an_embedding_for_each_token_is_accepted(tmp_path: Path) -> None:
    """The message's remedy works: add rows, and save model and tokenizer together."""
    save(tmp_path / "model", "gpt2", NEW)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "resized")
    tokenizer.save_pretrained(tmp_path / "resized")
    task = {"name": "language_modeling", "block_size": 16}
    run = run_on(tmp_path, rows_with("<new1>"), "data.max_length=16", model="resized", **task)
    assert warnings(prepared(run).facts) == []


def test_masking_draws_from_tokens_without_a_row(tmp_path: Path) -> None:
    save(tmp_path / "model", "bert", NEW)
    with raises("LS3440", "masking", "'<new2>'"):
        prepared(run_on(tmp_path, rows_with(), name="masked_language_modeling"))


def test_validation_may_contain_a_token_without_an_embedding(tmp_path: Path) -> None:
    save(tmp_path / "model", "bert", NEW)
    rows = rows_with()
    rows[-1]["text"] += " <new2>"
    with raises("LS3440", "validation split", "'<new2>'"):
        prepared(run_on(tmp_path, rows))


def test_streamed_splits_are_checked_too(tmp_path: Path) -> None:
    save(tmp_path / "model", "bert", NEW)
    with raises("LS3440", "train split", "'<new1>'"):
        prepared(run_on(tmp_path, [*rows_with("<new1>")[:18], *rows_with()[18:]], "data.stream=true"))
    assert prepared(run_on(tmp_path, rows_with(), "data.stream=true")).splits


def test_adapter_message_names_the_key_that_trains_new_rows(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    save(tmp_path / "model", "bert", NEW)
    with raises("LS3440", "model.adapter.modules_to_save"):
        prepared(run_on(tmp_path, rows_with("<new1>"), "model.adapter={type: lora, r: 2}"))


def test_a_padding_token_without_a_row_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    save(tmp_path / "model", "gpt2", NEW)
    tokenizer = tokenizer_of(added=NEW)
    tokenizer.pad_token = "<new2>"
    tokenizer.save_pretrained(tmp_path / "model")
    with raises("LS3145", "'<new2>'", str(ROWS + 1), str(ROWS)):
        prepared(run_on(tmp_path, rows_with(), name="language_modeling", block_size=16))


def test_a_tokenizer_of_few_tokens_is_noted(tmp_path: Path) -> None:
    save(tmp_path / "model", "bert", rows=4 * ROWS)
    assert f"has {ROWS} tokens, and the model's embedding {4 * ROWS} rows" in " ".join(
        warnings(prepared(run_on(tmp_path, rows_with())).facts)
    )
    save(tmp_path / "near", "bert", rows=ROWS + 10)
    assert warnings(prepared(run_on(tmp_path, rows_with(), model="near")).facts) == []


def test_a_tokenizer_of_other_tokens_is_noted(tmp_path: Path) -> None:
    """Each id has a row, and what the row has learned is of another token."""
    save(tmp_path / "model", "bert")
    other = tokenizer_of([word.replace("w", "v") for word in WORDS])
    other.save_pretrained(tmp_path / "other")
    tokenizer_of(added=NEW).save_pretrained(tmp_path / "more")

    def notes(*overrides: str) -> list[str]:
        return warnings(prepared(run_on(tmp_path, rows_with(), *overrides)).facts)

    rows = [row | {"text": row["text"].replace("w", "v")} for row in rows_with()]
    said = warnings(prepared(run_on(tmp_path, rows, f"tokenizer.source={tmp_path / 'other'}")).facts)
    assert any(f"tokenizer.source: {len(WORDS)} of {ROWS} ids stand for other tokens" in note for note in said)
    assert not any("other tokens" in note for note in notes(f"tokenizer.source={tmp_path / 'more'}"))
    assert any("tokenizer.train: " in note for note in notes("tokenizer.train=wordlevel", "tokenizer.vocab_size=30"))
    assert notes() == []


def test_ids_with_gaps_get_rows_up_to_the_highest() -> None:
    class Gaps:
        def __len__(self) -> int:
            return 3

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "c": 9}

    tokenizer: Any = Gaps()
    assert tokenizers.highest_id(tokenizer) == 9


@pytest.mark.processes
def test_plan_train_and_predict_refuse_it(tmp_path: Path, job: CommandJob) -> None:
    def command(*words: str) -> str:
        status, out, err = ended(start([*LOCKSTEP, *words], job.folder, job.cache))
        assert status in (0, 2)
        assert "Traceback" not in out + err
        return "" if status == 0 else err

    save(job.folder / "model", "bert", NEW)
    run_on(job.folder, rows_with("<new1>"))
    data = {"train": "train.jsonl", "validation": "validation.jsonl", "max_length": 32}
    values = {"task": {"name": "classification"}, "model": {"source": "model"}, "data": data, "output": "out"}
    values |= {"steps": 2, "batch_size": 8, "micro_batches": 2}
    values |= {"launch": {"processes": 1, "device": "cpu", "threads": 1}}
    (job.folder / "run.yaml").write_text(yaml.safe_dump(values))
    mentions(command("plan", "run.yaml"), "LS3440", "'<new1>'")
    mentions(command("train", "run.yaml"), "LS3440", "'<new1>'")
    run_on(job.folder, rows_with())
    assert not command("train", "run.yaml")
    mentions(command("predict", "out", "w1 <new2>"), "LS3441", f"'<new2>' (id {ROWS + 1})", f"{ROWS} rows")
    assert not command("predict", "out", "w1 w2")
    run_on(job.folder, rows_with("<new1>"))
    mentions(command("evaluate", "out"), "LS3440", "'<new1>'")


@pytest.mark.parametrize(
    ("kind", "task", "entry", "weight"),
    [
        ("bert", {}, "vocab_size", "bert.embeddings.word_embeddings.weight"),
        ("bert", {}, "intermediate_size", "bert.encoder.layer.0.intermediate.dense"),
        ("gpt2", {"name": "language_modeling", "block_size": 16}, "vocab_size", "transformer.wte.weight"),
    ],
)
def test_an_entry_that_would_reinitialize_weights_is_refused(
    kind: str, task: dict[str, Any], entry: str, weight: str, tmp_path: Path
) -> None:
    save(tmp_path / "model", kind)
    run = run_on(tmp_path, rows_with(), f"model.config.{entry}={2 * ROWS}", **task)
    with raises("LS3442", weight, f"model.config ({entry})", str(2 * ROWS)):
        prepared(run)
    tokenizer: Any = tokenizer_of()
    with raises("LS3442", weight):  # and where its files are looked at for the first time
        models.build(ModelChoice.of(run), "causal" if task else "classification", tokenizer)


def test_a_config_file_that_disagrees_with_the_weights_is_refused(tmp_path: Path) -> None:
    """Somebody raised the number by hand, in place of resizing."""
    save(tmp_path / "model", "bert", NEW)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": ROWS + 2}))
    with raises("LS3442", "config.json", f"[{ROWS}, 16]", f"[{ROWS + 2}, 16]"):
        prepared(run_on(tmp_path, rows_with("<new1>")))
