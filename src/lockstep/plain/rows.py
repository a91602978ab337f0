"""The rows of a run's splits, read as the run file says: files or the Hub, filters, what is missing, what is cut off.

In: a run file as a mapping. Out: rows by split as mappings, in the order of the files, which is the order of examples.
"""

import csv
import glob
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
READ = {  # the keys of a task that name columns of texts
    "classification": "text text_pair",
    "text": "text",
    "prompt": "prompt response",
    "messages": "messages",
    "masked_language_modeling": "text",
    "token_classification": "words",
    **dict.fromkeys(("translation", "summarization"), "source target"),
    **dict.fromkeys(("preference", "reward"), "prompt chosen rejected"),
    "question_answering": "question context",
    "embedding": "anchor positive negative",
}
USUAL = {"train": ["train", "training"], "validation": ["validation", "valid", "val", "dev"], "test": ["test"]}


NUMBERS = r"[+-]?\d+", r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"  # whole, and any


class NotCovered(Exception):
    """The run file asks for something that plain does not compute; the message names the key."""


def read_rows(run: dict, split: str, tokenizer: Any = None) -> list[Row]:
    """The rows of a split as they are trained or evaluated on. `tokenizer`: counts tokens for `data.filter`."""
    return read_splits(run, tokenizer)[split]


def read_splits(run: dict, tokenizer: Any = None) -> dict[str, list[Row]]:
    """The rows of all splits. Errors: `NotCovered`."""
    data, (texts, labels) = run["data"], columns(run["task"])
    for key, usual in (("stream", False), ("sources", None), ("layout", "rows")):
        if data.get(key, usual) != usual:
            raise NotCovered(f"data.{key}: plain reads files of rows, from first to last, of one source")
    splits = {
        split: [row for row in rows if all(holds(get(row, c), w, tokenizer) for c, w in data["filter"].items())]
        for split, rows in read(data, run["task"]).items()
    }
    if data["split_column"]:
        known = {word: split for split, words in USUAL.items() for word in words}
        each = [(known[str(get(row, data["split_column"])).strip().lower()], row) for row in splits["train"]]
        splits = {split: [row for of, row in each if of == split] for split in USUAL}
        splits = {split: rows for split, rows in splits.items() if rows}
    if data["limit"]:
        splits = {split: rows[: data["limit"]] for split, rows in splits.items()}
    if data["drop_missing"]:
        splits = {s: [row for row in rows if not lacks(row, run["task"])] for s, rows in splits.items()}
    if data["deduplicate"]:
        first = {same(row, [*texts, *labels]): row for row in reversed(splits["train"])}
        splits["train"] = list(reversed(first.values()))
    share = data["test_fraction"] if "test" not in splits else 0.0
    if share:
        splits["train"], splits["test"] = cut(run, splits["train"], share, [run["seed"], 1])
    if "validation" not in splits:
        rest = data["validation_fraction"] / (1 - share)
        splits["train"], splits["validation"] = cut(run, splits["train"], rest, run["seed"])
    if data["overlap"] == "drop":
        elsewhere = {same(row, texts) for split in splits if split != "train" for row in splits[split]}
        splits["train"] = [row for row in splits["train"] if same(row, texts) not in elsewhere]
    return splits


def columns(task: dict) -> tuple[list[str], list[str]]:
    """The columns of texts that a task reads, and those of labels."""
    kind = task["name"]
    if kind == "language_modeling":
        kind = next((key for key in ("messages", "prompt") if task[key]), "text")
    if kind not in READ:
        raise NotCovered(f"task.name: {kind} is no task that plain knows")
    read = READ[kind].split()
    named = [task[key] for key in read if task.get(key)]
    texts = [column for name in named for column in (name if isinstance(name, list) else [name])]
    of_task = {"classification": "label", "token_classification": "tags", "question_answering": "answers"}
    label = task.get(of_task.get(kind, "score")) or []
    return texts, label if isinstance(label, list) else [label]


def get(row: Row, path: str) -> Any:
    """What a row holds in a column, or along a dotted path into one."""
    if path in row or "." not in path:
        return row.get(path)
    value: Any = row
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def holds(value: Any, wanted: Any, tokenizer: Any) -> bool:
    """Whether a condition of `data.filter` holds for a value; none holds where there is nothing."""
    if value is None or value != value:
        return False
    if not isinstance(wanted, dict):
        return value in (wanted if isinstance(wanted, list) else [wanted])
    for key, limit in wanted.items():
        if key == "none_of":
            if value in limit:
                return False
            continue
        end, _, what = key.partition("_")
        if what == "tokens" and tokenizer is None:
            raise NotCovered(f"data.filter: {key} needs the tokenizer")
        count = {
            "": lambda: value,
            "characters": lambda: len(value),
            "words": lambda: len(value.split() if isinstance(value, str) else value),
            "tokens": lambda: len(tokenizer(value)["input_ids"]),
        }[what]()
        if count < limit if end == "min" else count > limit:
            return False
    return True


def lacks(row: Row, task: dict) -> bool:
    """Whether a row has no text or no label where the task reads one."""
    texts, labels = columns(task)
    read = [get(row, column) for column in [*texts, *labels]]
    if any(
        v is None or (isinstance(v, float) and math.isnan(v)) or (isinstance(v, str) and not v.strip()) for v in read
    ):
        return True
    if task["name"] == "language_modeling" and task.get("messages"):
        turns = get(row, task["messages"])
        spoken = any(turn.get("role", turn.get("from")) in ("assistant", "gpt") for turn in turns)
        return not spoken or any(turn.get("content", turn.get("value")) is None for turn in turns)
    return False


def same(row: Row, read: list[str]) -> str:
    """What is equal for rows that hold the same in these columns, up to white space."""
    return repr([_spaced(get(row, column)) for column in read])


def _spaced(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spaced(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_spaced(inner) for inner in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def cut(run: dict, rows: list[Row], share: float, seed: Any) -> tuple[list[Row], list[Row]]:
    """A share of train, drawn with the seed: of each label in proportion, where a text has one; of a single text its
    end."""
    texts, labels = columns(run["task"])
    task, random = run["task"], np.random.default_rng(seed)
    if len(rows) == 1 and task["name"].endswith("language_modeling") and texts == [task["text"]]:
        text = get(rows[0], texts[0])
        at = int(len(text) * (1 - share))
        return [{texts[0]: text[:at]}], [{texts[0]: text[at:]}]
    if task["name"] == "classification" and not task["multi_label"] and not task["regression"]:
        of = [get(row, labels[0]) for row in rows]
        places = [[i for i, label in enumerate(of) if label == value] for value in sorted(set(of))]
        held = {int(i) for each in places for i in random.permutation(each)[: round(len(each) * share)]}
    else:
        held = {int(i) for i in random.permutation(len(rows))[: round(len(rows) * share)]}
    return [r for i, r in enumerate(rows) if i not in held], [r for i, r in enumerate(rows) if i in held]


# -- files ------------------------------------------------------------------------------------------------------------


def read(data: dict, task: dict) -> dict[str, list[Row]]:
    """The rows of the splits that the run file names or that are called by their usual names."""
    named = {split: data[split] for split in USUAL if data[split] is not None}
    root = Path(data["source"]).expanduser() if data["source"] else Path()
    files = (
        {split: _files(value, root) for split, value in named.items()}
        if data["source"] is None or root.exists()
        else {}
    )
    if data["source"] and root.is_dir():
        for split, words in USUAL.items():
            patterns = [p for word in words for p in (f"{word}.*", f"{word}[-_]*", f"{word}/*")]
            there = [sorted(f for f in root.glob(pattern) if f.suffix in READERS) for pattern in patterns]
            files.setdefault(split, next(filter(None, there), []))
        if not any(files.values()):
            files["train"] = sorted(f for f in root.iterdir() if f.suffix in READERS)
    elif data["source"] and (root.is_file() or root.suffix in READERS or set("*?[") & set(data["source"])):
        files = {"train": _files(data["source"], Path())} | {s: _files(v, Path()) for s, v in named.items()}
    elif data["source"]:
        return _of_hub(data, named)
    return {s: [row for file in some for row in _rows(file, data, task)] for s, some in files.items() if some}


def _files(value: Any, root: Path) -> list[Path]:
    found: list[Path] = []
    for text in value if isinstance(value, list) else [value]:
        path = Path(text).expanduser()
        path = root / path if not path.exists() and not path.is_absolute() else path
        found += [path] if path.is_file() else sorted(map(Path, glob.glob(str(path))))
    return found


def _of_hub(data: dict, named: dict[str, str]) -> dict[str, list[Row]]:
    if data["source"].startswith("builtin/") or "://" in data["source"]:
        raise NotCovered(f"data.source: {data['source']} is neither files nor of the Hub")
    import datasets

    found = datasets.load_dataset(data["source"], data["config"], revision=data["revision"])
    names = {split: next((w for w in [named.get(split), *words] if w in found), None) for split, words in USUAL.items()}
    return {split: list(found[name]) for split, name in names.items() if name}


def _rows(file: Path, data: dict, task: dict) -> list[Row]:
    if file.suffix not in READERS:
        raise NotCovered(f"data: {file.name} is no {', '.join(READERS)}")
    if file.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(file).to_pylist()
    return READERS[file.suffix](file.read_text(encoding=data["encoding"]).removeprefix("\ufeff"), data, task)


def _json(text: str, data: dict, task: dict) -> list[Row]:
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _table(text: str, data: dict, task: dict, separator: str = ",") -> list[Row]:
    lines = text.splitlines(keepends=True)
    mark = {"tab": "\t"}.get(data["separator"], data["separator"]) or separator
    if data["quote"] is not None or (data["separator"] is None and data["columns"] is None and mark not in lines[0]):
        raise NotCovered("data.separator: plain reads tables with commas or tabs, quoted as the csv module does")
    found = [dict(row) for row in csv.DictReader(lines, data["columns"], delimiter=mark)]
    for column in found[0] if found else ():
        values = [row[column] or "0" for row in found]
        whole, number = (all(re.fullmatch(form, value) for value in values) for form in NUMBERS)
        kind: Any = str if column in columns(task)[0] or not number else int if whole else float
        for row in found:
            row[column] = kind(row[column]) if row[column] not in (None, "") else None
    return found


def _text(text: str, data: dict, task: dict) -> list[Row]:
    if task["name"].endswith("language_modeling"):
        texts = text.split("\n") if task["document"] == "line" else [text]
        return [{"text": each} for each in texts if each.strip()]
    pairs = [line.rpartition(";") for line in text.split("\n") if line.strip()]
    whole = all(label.strip().lstrip("-").isdigit() for _, _, label in pairs)
    return [{"text": t, "label": int(label) if whole else label.strip()} for t, _, label in pairs]


READERS: dict[str, Any] = {
    **dict.fromkeys((".jsonl", ".json"), _json),
    ".csv": _table,
    ".txt": _text,
    ".parquet": None,
    ".tsv": lambda text, data, task: _table(text, data, task, "\t"),
}
