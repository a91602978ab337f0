"""Cache keys: whatever goes into cached data is changed, and nothing outdated is used.

A run is prepared, something is changed, and it is prepared again, with the same cache and with an empty one: both must
give the same files, byte for byte.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import plugins
from lockstep.config.run import Run, RunError, load
from lockstep.data.cache import cache_folder
from lockstep.data.prepare import prepare
from lockstep.data.tokenizer import load as tokenizer_of
from lockstep.tasks.models import padding
from lockstep.tasks.models.model_configs import ModelChoice
from support.marks import long, slow
from support.task_runs import BERT, TASKS, TEMPLATE, make, write

# Task keys -> values to change them to, where they are not numbers or yes and no.
pytestmark = pytest.mark.slow  # prepares data for each key

OTHERS: dict[str, list[Any]] = {
    "chat_template": [TEMPLATE.replace("<", "["), None],
    "turns": ["each"],
    "prompt": ["answer", "chosen", None],
    "response": ["question"],
    "template_arguments": [{"m": 1}],
    "prefix": ["translate: "],
    "target_length": [5],
    "negative": [None],
    "score": ["score"],
    "text": ["text"],
    "loss": ["ipo"],
    "chosen": ["rejected"],
    "conversations": [True],
    "source": ["de"],
    "target": ["en"],
    "question": ["context"],
    "attend_across_documents": [False],
    "packing": [True, False],
}
KEYS: list[tuple[str, Any]] = [
    ("seed", 3),
    ("data.limit", 12),
    ("data.max_length", 9),
    ("data.deduplicate", True),
    ("data.decontaminate", True),
    ("data.drop_missing", True),
    ("data.validation_fraction", 0.3),
    ("data.test_fraction", 0.3),
    ("tokenizer.vocab_size", 270),
    ("tokenizer.train", "wordpiece"),
    ("model.config.layer_norm_epsilon", 0.1),
]


def files_of(run: Run) -> dict[str, bytes | str]:
    """Return every file of the prepared data by split and name, and its summary."""
    found = prepare(run, plugins.find("tasks", run.task.name))  # type: ignore[type-abstract]
    told: dict[str, bytes | str] = {"key": found.key, "facts": json.dumps(found.facts, sort_keys=True)}
    for name, place in {**found.splits, "tokenizer": found.tokenizer}.items():
        root = Path(place)
        for file in [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file()):
            if file.suffix != ".seal":
                told[f"{name}/{file.relative_to(root)}"] = file.read_bytes()
    return told


def same_as_anew(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes | str]:
    """Check that preparing with the existing cache gives the files of an empty one, except for trials of models, whose
    keys are tested below."""
    found = files_of(run)
    empty = cache / f"empty-{len([*cache.glob('empty-*')])}"
    empty.mkdir()
    if (trials := cache / "cache/padding").exists():
        (empty / "padding").symlink_to(trials)
    with monkeypatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(empty))
        wanted = files_of(run)
    assert found.keys() == wanted.keys()
    assert [name for name in found if found[name] != wanted[name]] == []
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(padding, "cache_folder", cache_folder)  # verdicts of the session's other tests do not count
    return tmp_path


def changes(run: Run) -> list[tuple[str, Any]]:
    """Return a run's keys with other values for them."""
    found = list(KEYS)
    task: Any = plugins.find("tasks", run.task.name)
    for key, value in run.task.options.items():
        others = OTHERS.get(key, [])
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int | float):
            others = [value // 2 + 1 if isinstance(value, int) else value / 2]
        found += [(f"task.{key}", other) for other in others if other != value and key not in task.display_keys]
    return found


# Three kinds of columns: texts, pairs of texts, tags of words. The others are read by the same functions.
EACH_TIME = ("preference", "token_classification")


@pytest.mark.parametrize(
    "kind", [kind if kind == "documents" else (slow if kind in EACH_TIME else long)(kind) for kind in TASKS]
)
def test_every_key_of_a_run_and_its_data(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(cache, kind, count=30)
    first = same_as_anew(plain, cache, monkeypatch)
    differ = set()
    for key, value in changes(plain):
        try:
            run = load(None, {key: value}, plain.model_dump())
            found = same_as_anew(run, cache, monkeypatch)
        except RunError:
            continue  # not supported with this task or its data
        if found != first:
            differ.add(key)
    assert {"data.limit", "tokenizer.train"} <= differ
    assert "tokenizer.vocab_size" in differ or kind in (
        "preference",
        "reward",
    )  # prompts are too long in smaller pieces
    data = cache / kind / "train.jsonl"
    data.write_text(data.read_text().replace("dog", "hen").replace("cat", "owl"))
    assert same_as_anew(plain, cache, monkeypatch) != first


@pytest.mark.parametrize("kind", ["masked", *map(slow, ["pairs", "translation", "token_classification"])])
def test_another_length_has_other_tokens(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(cache, kind, count=12)
    first = same_as_anew(plain, cache, monkeypatch)
    shorter = load(None, {"data.max_length": 7}, plain.model_dump())
    assert same_as_anew(shorter, cache, monkeypatch) != first


def edited_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<", "["))


def edited_options(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation_side": "left"}))


def edited_types(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))


def edited_words(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"normalizer": null', '"normalizer": {"type": "Lowercase"}'))


@pytest.mark.parametrize("edit", [edited_template, edited_options, edited_types, edited_words])
@pytest.mark.parametrize("kind", ["classification", *map(slow, ["messages", "reward"])])
def test_every_file_of_a_tokenizer(
    edit: Callable[[Path], None], kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes files that its saved state does not reflect: its template, its truncation side."""
    made = make(cache, "messages", count=30)
    tok = tokenizer_of(prepare(made, plugins.find("tasks", made.task.name)).tokenizer)  # type: ignore[type-abstract]
    tok.chat_template = TEMPLATE
    tok.save_pretrained(folder := cache / "tok")
    if kind == "classification":
        rows = [{"text": f"The dog sees {'a cat ' * (i % 9)}{i}", "label": i % 2} for i in range(40)]
        write(cache / "rows.jsonl", rows)
        values: dict[str, Any] = made.model_dump() | {"task": {"name": kind}, "model": BERT}
        values["data"] = {"source": str(cache / "rows.jsonl"), "max_length": 8}
    else:
        values = make(cache, kind, count=30).model_dump()
        values["task"] |= {"chat_template": None} | ({"conversations": True} if kind == "reward" else {})
        values["data"]["max_length"] = 300
        values["model"]["config"] |= {"n_positions": 300} if kind == "messages" else {"max_position_embeddings": 300}
    run = load(None, [], values | {"tokenizer": {"source": str(folder)}})
    first = same_as_anew(run, cache, monkeypatch)
    edit(folder)
    assert same_as_anew(run, cache, monkeypatch) != first


def test_every_key_of_a_stream(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make(cache, "documents", "data.stream=true", "data.validation=validation.jsonl", count=60)
    first = same_as_anew(plain, cache, monkeypatch)
    for key, value in {
        "task.block_size": 11,
        "data.filter": {"text": {"min_words": 4}},
        "data.decontaminate": True,
        "tokenizer.train": "wordpiece",
        "task.packing": True,
    }.items():
        run = load(None, {key: value}, plain.model_dump())
        assert same_as_anew(run, cache, monkeypatch) != first or key == "data.decontaminate"
    data = cache / "documents/train.jsonl"
    data.write_text(data.read_text().replace("dog", "hen"))
    assert same_as_anew(plain, cache, monkeypatch) != first


def test_the_key_depends_on_parsing_options(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of `data` that say how bytes are parsed."""
    rows = "".join(f"a dög sees {i} cat,text {i} of ä,{i % 2}\n" for i in range(60))
    (cache / "rows.csv").write_bytes(rows.encode())
    values: dict[str, Any] = make(cache, "masked").model_dump()
    values["data"] = {"source": str(cache / "rows.csv"), "max_length": 16, "columns": ["text", "other", "label"]}
    plain = load(None, [], values)
    first = same_as_anew(plain, cache, monkeypatch)
    for key, value in {
        "data.encoding": "latin-1",
        "data.columns": ["other", "text", "label"],
        "task.text": "other",
        "data.filter": {"label": 1},
    }.items():
        assert same_as_anew(load(None, {key: value}, plain.model_dump()), cache, monkeypatch) != first


def test_the_key_depends_on_library_versions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library version tokenizes again, under the same names."""
    run = make(cache, "documents", count=30)
    first = prepare(run, plugins.find("tasks", run.task.name))  # type: ignore[type-abstract]
    monkeypatch.setattr("lockstep.data.prepare.version", lambda package: "0.0.1")
    found = prepare(run, plugins.find("tasks", run.task.name))  # type: ignore[type-abstract]
    assert found.key == first.key
    assert found.splits["train"] != first.splits["train"]
    assert Path(found.splits["train"]).name == Path(first.splits["train"]).name


@pytest.mark.parametrize("key", ["data.padding=batch", "model.config.n_layer=1", "torch", "transformers"])
def test_trials_of_padding(key: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Run] = []
    run = make(cache, "documents")
    monkeypatch.setattr(padding, "trial", lambda run, head, config: tried.append(run))
    padding.trial.__name__ = "tried"
    for _ in range(2):
        padding.unsupported_reason(ModelChoice.of(run), "causal")
    assert len(tried) == 1
    if key == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0.1")
    elif key == "transformers":
        monkeypatch.setattr(padding, "_transformers", lambda: "0.0.1")
    else:
        run = make(cache, "documents", key)
    padding.unsupported_reason(ModelChoice.of(run), "causal")
    assert len(tried) == (1 if key == "data.padding=batch" else 2)  # with padding, nothing is tried


def test_files_at_an_old_cache_path_are_not_used(cache: Path) -> None:
    """A file written in place of another one is detected by its time and size."""
    run = make(cache, "documents", count=30)
    first = files_of(run)
    data = cache / "documents/train.jsonl"
    before = data.stat()
    data.write_text(data.read_text().replace("dog", "hen"))
    assert data.stat().st_size == before.st_size
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert files_of(run) != first
