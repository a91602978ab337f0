"""The rows of a run's splits, read as the run file says: files or the Hub, filters, what is missing, what is cut off.

In: a run file as a mapping. Out: rows by split as mappings, in the order of the files, which is the order of examples.
"""

import glob
import json
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
Splits = dict[str, list[Row]]
# task -> keys of columns that are read | of labels, Auto class of transformers, task of peft
TASKS: dict[str, tuple[str, str, str | None]] = {
    "classification": ("text text_pair | label", "ForSequenceClassification", "SEQ_CLS"),
    "image_classification": ("image | label", "ForImageClassification", None),
    "token_classification": ("words | tags", "ForTokenClassification", "TOKEN_CLS"),
    "language_modeling": ("text prompt response messages |", "ForCausalLM", "CAUSAL_LM"),
    "masked_language_modeling": ("text |", "ForMaskedLM", "FEATURE_EXTRACTION"),
    "translation": ("source target |", "ForSeq2SeqLM", "SEQ_2_SEQ_LM"),
    "summarization": ("source target |", "ForSeq2SeqLM", "SEQ_2_SEQ_LM"),
    "question_answering": ("question context | answers", "ForQuestionAnswering", "QUESTION_ANS"),
    "embedding": ("anchor positive negative | score", "", "FEATURE_EXTRACTION"),
    "preference": ("prompt chosen rejected |", "ForCausalLM", "CAUSAL_LM"),
    "reward": ("prompt chosen rejected |", "ForSequenceClassification", "SEQ_CLS"),
}
USUAL = {"train": ["train", "training"], "validation": ["validation", "valid", "val", "dev"], "test": ["test"]}
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
SOURCE = "number of its source"  # a column of rows that are of a mixture


class NotCovered(Exception):
    """The run file asks for something that plain does not compute; the message names the key."""


def read_splits(run: dict, tokenizer: Any = None) -> Splits:
    """The rows of all splits as they are trained or evaluated on; those of several sources follow each other.
    `tokenizer`: counts tokens for `data.filter`. Errors: `NotCovered`."""
    data, (texts, labels) = run["data"], columns(run["task"])
    sources = [read_source(data | (each or {}), run["task"], tokenizer) for each in data["sources"] or [None]]
    if data["deduplicate"]:
        first: dict[str, Row] = {}
        for row in [row for part in sources for row in part["train"]]:
            first.setdefault(same(row, texts + labels), row)
        for part in sources:
            part["train"] = [row for row in part["train"] if first[same(row, texts + labels)] is row]
    for number, part in enumerate(sources):
        share = 0.0 if "test" in part else data["test_fraction"]
        if share:
            part["train"], part["test"] = cut(run, part["train"], share, [run["seed"], 1])
        if "validation" not in part:
            rest = data["validation_fraction"] / (1 - share)
            part["train"], part["validation"] = cut(run, part["train"], rest, run["seed"])
        if data["sources"]:
            sources[number] = {split: [row | {SOURCE: number} for row in rows] for split, rows in part.items()}
    known = [split for split in USUAL if any(split in part for part in sources)]
    splits = {split: [row for part in sources for row in part.get(split, ())] for split in known}
    if data["decontaminate"]:
        elsewhere = {same(row, texts) for split in splits if split != "train" for row in splits[split]}
        splits["train"] = [row for row in splits["train"] if same(row, texts) not in elsewhere]
    return splits


def read_source(data: dict, task: dict, tokenizer: Any) -> Splits:
    """The rows of one source that lack nothing, their columns called as the task calls them."""
    splits = read(data, task)
    for split, rows in splits.items():
        rows = [row for row in rows if all(holds(get(row, c), w, tokenizer) for c, w in data["filter"].items())]
        splits[split] = [row | {our: get(row, their) for our, their in data.get("rename", {}).items()} for row in rows]
    if data["split_column"]:
        known = {word: split for split, words in USUAL.items() for word in words}
        each = [(known[str(get(row, data["split_column"])).strip().lower()], row) for row in splits["train"]]
        splits = {split: rows for split in USUAL if (rows := [row for of, row in each if of == split])}
    splits = {split: rows[: data["limit"]] for split, rows in splits.items()}
    if data["drop_missing"]:
        splits = {split: [row for row in rows if not lacks(row, task)] for split, rows in splits.items()}
    return splits


def columns(task: dict) -> tuple[list[str], list[str]]:
    """The columns of texts that a task reads, and those of labels."""
    if task["name"] not in TASKS:
        raise NotCovered(f"task.name: {task['name']} is code of yours, or no task that plain knows")
    texts, labels = (keys.split() for keys in TASKS[task["name"]][0].split("|"))
    if task["name"] == "language_modeling" and (task["prompt"] or task["messages"]):
        texts.remove("text")
    named = [[task[key] for key in keys if task[key]] for keys in (texts, labels)]
    read = [[c for name in names for c in (name if isinstance(name, list) else [name])] for names in named]
    return read[0], read[1]


def get(row: Any, path: str) -> Any:
    """What a row holds in a column, in a language of its translation, or along a dotted path into a column."""
    if path not in row and isinstance(row.get("translation"), dict):
        row = row["translation"]
    for part in [path] if path in row else path.split("."):
        try:
            row = row[int(part)] if isinstance(row, list) else row[part]
        except (KeyError, IndexError, TypeError):
            return None
    return row


def holds(value: Any, wanted: Any, tokenizer: Any) -> bool:
    """Whether a condition of `data.filter` holds for a value; none holds where there is nothing."""
    measures = {
        "": lambda: value,
        "characters": lambda: len(value),
        "words": lambda: len(value.split() if isinstance(value, str) else value),
        "tokens": lambda: len(tokenizer(value)["input_ids"]),
    }
    if value is None or value != value:
        return False
    if not isinstance(wanted, dict):
        return value in (wanted if isinstance(wanted, list) else [wanted])
    bounds = [(*key.partition("_"), limit) for key, limit in wanted.items() if key != "none_of"]
    fits = [measures[w]() >= limit if end == "min" else measures[w]() <= limit for end, _, w, limit in bounds]
    return all(fits) and value not in wanted.get("none_of", [])


def lacks(row: Row, task: dict) -> bool:
    """Whether a row has no text or no label where the task reads one."""
    texts, labels = columns(task)
    read = [get(row, column) for column in [*texts, *labels]]
    words = [word for each in read for word in each or [None]] if task["name"] == "token_classification" else []
    if any(value is None or value != value or not str(value).strip() for value in [*read, *words]):
        return True
    if task["name"] == "question_answering":
        return not task["unanswerable"] and not (read[2]["text"] if isinstance(read[2], dict) else read[2])
    if task["name"] != "language_modeling" or not task["messages"]:
        return False
    spoken = any(turn.get("role", turn.get("from")) in ("assistant", "gpt") for turn in read[0])
    silent = [t for t in read[0] if t.get("content", t.get("value")) is None and not t.get("tool_calls")]
    return not spoken or bool(silent)


def same(row: Row, read: list[str]) -> str:
    """What is equal for rows that hold the same in these columns, up to white space."""
    return repr([_spaced(get(row, column)) for column in read])


def _spaced(value: Any) -> Any:
    if isinstance(value, dict | list):
        return [_spaced(each) for each in (value.items() if isinstance(value, dict) else value)]
    return " ".join(value.split()) if isinstance(value, str) else value


def cut(run: dict, rows: list[Row], share: float, seed: Any) -> tuple[list[Row], list[Row]]:
    """A share of train, drawn with the seed: of each label in proportion, where a text has one; of a single text its
    end."""
    (texts, labels), task, random = columns(run["task"]), run["task"], np.random.default_rng(seed)
    if len(rows) == 1 and task["name"].endswith("language_modeling") and texts == [task["text"]]:
        text = get(rows[0], texts[0])
        at = int(len(text) * (1 - share))
        return [{texts[0]: text[:at]}], [{texts[0]: text[at:]}]
    of: list[Any] = [0] * len(rows)
    classes = task["name"] in ("classification", "image_classification")
    if classes and not (task.get("multi_label") or task.get("regression")):
        of = [get(row, labels[0]) for row in rows]
    places = [[i for i, label in enumerate(of) if label == value] for value in sorted(set(of))]
    held = {int(i) for each in places for i in random.permutation(each)[: round(len(each) * share)]}
    return [r for i, r in enumerate(rows) if i not in held], [r for i, r in enumerate(rows) if i in held]


# -- files -------------------------------------------------------------------------------------------------------------


def read(data: dict, task: dict) -> Splits:
    """The rows of the splits that the run file names or that are called by their usual names. Errors: `NotCovered`."""
    named, root = {s: data[s] for s in USUAL if data[s] is not None}, Path(data["source"] or "").expanduser()
    files = {split: _files(value, root) for split, value in named.items()}
    if data["layout"] == "class_folders" and not named:
        return _classes(root, task, data["encoding"])
    if data["layout"] != "rows":
        raise NotCovered("data.layout: plain reads files of rows, and folders of classes")
    if data["source"] and root.is_dir():
        for split, words in USUAL.items():
            patterns = [pattern for word in words for pattern in (f"{word}.*", f"{word}[-_]*", f"{word}/*")]
            there = [sorted(f for f in root.glob(pattern) if f.suffix in ENDINGS) for pattern in patterns]
            files.setdefault(split, next(filter(None, there), []))
        if not any(files.values()):
            files["train"] = sorted(f for f in root.iterdir() if f.suffix in ENDINGS)
    elif data["source"] and (root.is_file() or root.suffix in ENDINGS or set("*?[") & set(data["source"])):
        files = {"train": _files(data["source"], Path())} | files
    elif data["source"] and ("://" in data["source"] or data["source"].startswith("builtin/")):
        raise NotCovered(f"data.source: {data['source']} is neither files nor of the Hub")
    elif data["source"]:
        import datasets

        found = datasets.load_dataset(data["source"], data["config"], revision=data["revision"])
        names = {s: next((w for w in [named.get(s), *words] if w in found), None) for s, words in USUAL.items()}
        return {split: list(found[name]) for split, name in names.items() if name}
    return {s: [row for file in some for row in _rows(file, data, task)] for s, some in files.items() if some}


def _classes(root: Path, task: dict, encoding: str) -> Splits:
    """A folder for each label, with a text or an image a file."""
    folders = {split: root / word for split, words in USUAL.items() for word in words if (root / word).is_dir()}
    images, splits = task["name"] == "image_classification", dict[str, list[Row]]()
    for split, folder in (folders or {"train": root}).items():
        files = [file for file in sorted(folder.glob("*/*")) if not file.name.startswith(".")]
        read = [{"image": f.read_bytes()} if images else {"text": f.read_text(encoding).strip()} for f in files]
        splits[split] = [row | {"label": file.parent.name} for row, file in zip(read, files, strict=True)]
    return splits


def _files(value: Any, root: Path) -> list[Path]:
    found: list[Path] = []
    for text in value if isinstance(value, list) else [value]:
        path = Path(text).expanduser()
        path = root / path if not path.exists() and not path.is_absolute() else path
        found += [path] if path.is_file() else sorted(map(Path, glob.glob(str(path))))
    return found


def _rows(file: Path, data: dict, task: dict) -> list[Row]:
    from pyarrow import csv, parquet

    if file.suffix not in ENDINGS or data["quote"] is not None:
        raise NotCovered(f"data: {file.name} is none of {', '.join(ENDINGS)}, or data.quote says how it is quoted")
    if file.suffix == ".parquet":
        return parquet.read_table(file).to_pylist()
    if file.suffix in (".csv", ".tsv"):
        mark = data["separator"] or ("\t" if file.suffix == ".tsv" else ",")
        how = csv.ReadOptions(column_names=data["columns"], encoding=data["encoding"])
        options = csv.ParseOptions(delimiter="\t" if mark == "tab" else mark, newlines_in_values=True)
        texts = csv.ConvertOptions(column_types=dict.fromkeys(columns(task)[0], "string"))
        return csv.read_csv(file, how, options, texts).to_pylist()
    text = file.read_text(encoding=data["encoding"]).removeprefix("\ufeff")
    lines = [line for line in text.split("\n") if line.strip()]
    if file.suffix != ".txt":
        return json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    if task["name"].endswith("language_modeling"):
        return [{"text": each} for each in (lines if task["document"] == "line" else [text]) if each.strip()]
    pairs = [line.rpartition(";") for line in lines]
    whole = all(label.strip().lstrip("-").isdigit() for _, _, label in pairs)
    return [{"text": t, "label": int(label) if whole else label.strip()} for t, _, label in pairs]
