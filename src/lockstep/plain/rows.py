"""Reads the rows of a run's splits: files or the Hub, filters, missing values, held-out splits.

In: a run file as a mapping. Out: rows by split as mappings, in the order of the files, which is the order of examples.
"""

import glob
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
Splits = dict[str, list[Row]]
# task -> keys of text columns | of label columns, Auto class of transformers, task of peft
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
SPLIT_NAMES = {"train": ["train", "training"], "validation": ["validation", "valid", "val", "dev"], "test": ["test"]}
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
SOURCE = "number of its source"  # a column of rows in a mixture
UNFILTERED_TRAIN = "train before any is left out"  # the rows that determine the label set


class NotCovered(Exception):
    """The plain reference does not support a setting; the message names the key."""


def read_splits(run: dict, tokenizer: Any = None) -> Splits:
    """Return the rows of all splits, after filtering and splitting. Several sources are concatenated. `tokenizer`:
    needed if `data.filter` counts tokens. Errors: `NotCovered`."""
    data, (texts, labels), first = run["data"], columns(run["task"]), dict[str, Row]()
    sources = [read_source(data | each, run["task"], tokenizer) for each in data["sources"] or [{}]]
    whole = [row for rows in sources for row in rows["train"]]
    if data["drop_unusable"] and labels and "classification" in run["task"]["name"]:
        known = {each for row in whole for each in _listed(get(row, labels[0]))}
        known |= {*range(len(run["task"].get("label_names") or ()))}
        for rows in sources:
            rows |= {s: [r for r in rows[s] if known >= {*_listed(get(r, labels[0]))}] for s in rows if s != "train"}
    for rows in sources:
        if data["deduplicate"]:
            rows["train"] = [row for row in rows["train"] if first.setdefault(row_key(row, texts + labels), row) is row]
    for rows in sources:
        test = 0.0 if "test" in rows else data["test_fraction"]
        if test:
            rows["train"], rows["test"] = split_off(run, rows["train"], test, [run["seed"], 1])
        if "validation" not in rows:
            share = data["validation_fraction"] / (1 - test)
            rows["train"], rows["validation"] = split_off(run, rows["train"], share, run["seed"])
    numbered = list(enumerate(sources))
    splits = {s: [row | {SOURCE: n} for n, rows in numbered for row in rows.get(s, ())] for s in SPLIT_NAMES}
    if data["decontaminate"]:
        elsewhere = {row_key(row, texts) for row in splits["validation"] + splits["test"]}
        splits["train"] = [row for row in splits["train"] if row_key(row, texts) not in elsewhere]
    return splits | {UNFILTERED_TRAIN: whole}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_source(data: dict, task: dict, tokenizer: Any) -> Splits:
    """Return the usable rows of one source, with columns renamed to the task's."""
    splits = read(data, task)
    for split, rows in splits.items():
        rows = [
            row for row in rows if all(meets_condition(get(row, c), w, tokenizer) for c, w in data["filter"].items())
        ]
        splits[split] = [row | {our: get(row, their) for our, their in data.get("rename", {}).items()} for row in rows]
    if column := data["split_column"]:
        named = [(str(get(row, column)).strip().lower(), row) for row in splits["train"]]
        splits = {
            s: rows for s, words in SPLIT_NAMES.items() if (rows := [row for name, row in named if name in words])
        }
    splits = {split: rows[: data["limit"]] for split, rows in splits.items()}
    drops = [(data["drop_missing"], has_missing_value), (data["drop_unusable"], has_no_signal)]
    return {s: [r for r in rows if not any(drop and of(r, task) for drop, of in drops)] for s, rows in splits.items()}


def columns(task: dict) -> tuple[list[str], list[str]]:
    """Return the text columns and the label columns of a task. Errors: `NotCovered`."""
    if task["name"] not in TASKS:
        raise NotCovered(f"task.name: plain has no reference for {task['name']}")
    texts, labels = (keys.split() for keys in TASKS[task["name"]][0].split("|"))
    if task["name"] == "language_modeling" and (task["prompt"] or task["messages"]):
        texts.remove("text")
    named = [[task[key] for key in keys if task[key]] for keys in (texts, labels)]
    read = [[c for name in names for c in (name if isinstance(name, list) else [name])] for names in named]
    return read[0], read[1]


def get(row: Any, path: str) -> Any:
    """Return the value of a column, of a language in `translation`, or at a dotted path; None if missing."""
    if path not in row and isinstance(row.get("translation"), dict):
        row = row["translation"]
    for part in [path] if path in row else path.split("."):
        try:
            row = row[int(part)] if isinstance(row, list) else row[part]
        except (KeyError, IndexError, TypeError):
            return None
    return row


def meets_condition(value: Any, condition: Any, tokenizer: Any) -> bool:
    """Return whether a value meets a condition of `data.filter`; a missing value meets none."""
    measures = {
        "": lambda: value,
        "characters": lambda: len(value),
        "words": lambda: len(value.split() if isinstance(value, str) else value),
        "tokens": lambda: len(tokenizer(value)["input_ids"]),
    }
    if value is None or value != value:
        return False
    if not isinstance(condition, dict):
        return value in (condition if isinstance(condition, list) else [condition])
    bounds = [(*key.partition("_"), limit) for key, limit in condition.items() if key != "none_of"]
    fits = [measures[w]() >= limit if end == "min" else measures[w]() <= limit for end, _, w, limit in bounds]
    return all(fits) and value not in condition.get("none_of", [])


def has_missing_value(row: Row, task: dict) -> bool:
    """Return whether a row lacks a text or label that the task reads."""
    texts, labels = columns(task)
    values = [get(row, column) for column in [*texts, *labels]]
    if task["name"] == "token_classification":
        values += [word for words in values for word in words or [None]]
    if task["name"] == "question_answering":
        answers = values.pop(2)
        answers = answers.get("text") if isinstance(answers, dict) else answers
        values += [] if task["unanswerable"] else [answers or None]
    if task.get("multi_label"):  # an example may have no label
        values = [each for value in values for each in (value if isinstance(value, list) else [value])]
    if any(value in (None, [], {}) or value != value or not str(value).strip() for value in values):
        return True
    turns = values[0] if task.get("messages") else [{"role": "assistant", "content": ""}]
    spoken = any(turn.get("role", turn.get("from")) in ("assistant", "gpt") for turn in turns)
    return not spoken or any(t.get("content", t.get("value")) is None and not t.get("tool_calls") for t in turns)


def has_no_signal(row: Row, task: dict) -> bool:
    """Return whether a row cannot be trained on: equal answers, a negative equal to the row's anchor or positive, or
    unequal numbers of words and tags."""
    texts, labels = columns(task)
    if task["name"] == "token_classification":
        return len(get(row, texts[0])) != len(get(row, labels[0]))
    if task["name"] in ("preference", "reward"):
        return bool(get(row, task["chosen"]) == get(row, task["rejected"]))
    own = {row_key(row, [text]) for text in texts[:2]}
    return task["name"] == "embedding" and any(row_key(row, [text]) in own for text in texts[2:])


def row_key(row: Row, read: list[str]) -> str:
    """Return a key that is equal for rows with equal columns `read`, up to whitespace."""
    return repr([_spaced(get(row, column)) for column in read])


def _spaced(value: Any) -> Any:
    if isinstance(value, dict | list):
        if isinstance(value, dict):  # ignore the order of keys, and keys with null
            value = sorted((key, inner) for key, inner in value.items() if inner is not None)
        return [_spaced(each) for each in value]
    return " ".join(value.split()) if isinstance(value, str) else value


def split_off(run: dict, rows: list[Row], share: float, seed: Any) -> tuple[list[Row], list[Row]]:
    """Return (rest, held-out share) of train, drawn with the seed. Single-label classification is stratified by label;
    of a single text, the end is held out."""
    (texts, labels), task, random = columns(run["task"]), run["task"], np.random.default_rng(seed)
    if len(rows) == 1 and task["name"].endswith("language_modeling") and texts == [task["text"]]:
        text = get(rows[0], texts[0])
        at = int(len(text) * (1 - share))
        return [{texts[0]: text[:at]}], [{texts[0]: text[at:]}]
    strata: list[Any] = [0] * len(rows)
    classes = task["name"] in ("classification", "image_classification")
    if classes and not (task.get("multi_label") or task.get("regression")):
        strata = [get(row, labels[0]) for row in rows]
    places = [[i for i, label in enumerate(strata) if label == value] for value in sorted(set(strata))]
    held_out = {int(i) for each in places for i in random.permutation(each)[: round(len(each) * share)]}
    return [r for i, r in enumerate(rows) if i not in held_out], [r for i, r in enumerate(rows) if i in held_out]


# -- files -------------------------------------------------------------------------------------------------------------


def read(data: dict, task: dict) -> Splits:
    """Return the rows of the splits that the run file names, or of those with usual names. Errors: `NotCovered`."""
    source, named = data["source"] or "", {split: data[split] for split in SPLIT_NAMES if data[split] is not None}
    root, files = Path(source).expanduser(), dict[str, list[Path]]()
    if data["layout"] == "class_folders" and not named:
        return _classes(root, task, data["encoding"])
    if data["layout"] != "rows" or "://" in source or source.startswith("builtin/"):
        raise NotCovered("data: plain supports only files of rows, folders of classes, and the Hub")
    if source and (root.is_file() or root.suffix in ENDINGS or set("*?[") & set(source)):
        files["train"] = _files(source, Path())
    elif source and root.is_dir():
        for split, words in SPLIT_NAMES.items():
            patterns = [pattern for word in words for pattern in (f"{word}.*", f"{word}[-_]*", f"{word}/*")]
            there = [sorted(f for f in root.glob(pattern) if f.suffix in ENDINGS) for pattern in patterns]
            files[split] = next(filter(None, there), [])
        if not any([*files.values(), *named]):
            files["train"] = sorted(f for f in root.iterdir() if f.suffix in ENDINGS)
    elif source:
        import datasets

        hub = datasets.load_dataset(source, data["config"], revision=data["revision"])
        names = {s: next((w for w in [named.get(s), *words] if w in hub), None) for s, words in SPLIT_NAMES.items()}
        if {rows.info.builder_name for rows in hub.values()} & {"json", "csv"}:
            return _untyped(data, task, {split: name for split, name in names.items() if name}, hub)
        return {split: list(hub[name]) for split, name in names.items() if name}
    files |= {split: _files(value, root) for split, value in named.items()}
    read = {s: [(file, row) for file in some for row in _rows(file, data, task)] for s, some in files.items() if some}
    _number_labels([pair for pairs in read.values() for pair in pairs], data, task)
    return {split: [_declared(row, data["types"] or {}) for _, row in pairs] for split, pairs in read.items()}


def _untyped(data: dict, task: dict, names: dict[str, str], hub: Any) -> Splits:
    """Read JSON and CSV files of the Hub as local files, because `datasets` would guess the types of their columns.
    Errors: `NotCovered` if the data set's card declares types or files."""
    import datasets
    from huggingface_hub import constants, hf_hub_download, snapshot_download

    source, revision = data["source"], data["revision"]
    if offline := constants.HF_HUB_OFFLINE:
        source = snapshot_download(source, repo_type="dataset", revision=revision, local_files_only=True)
    with tempfile.TemporaryDirectory() as cache:
        how = {} if offline else {"revision": revision}
        builder = datasets.load_dataset_builder(source, data["config"], cache_dir=cache, **how)
    if builder.info.features is not None:
        raise NotCovered(f"data.source: the page of {data['source']} declares column types")
    if getattr(builder.config, "sep", ",") != ",":
        data = data | {"separator": builder.config.sep}
    pairs: dict[str, list[tuple[Path, Row]]] = {split: [] for split in names}
    for split, name in names.items():
        for address in {str(key): value for key, value in builder.config.data_files.items()}[name]:
            repository, _, place = str(address).removeprefix("hf://datasets/").partition("@")
            commit, _, path = place.partition("/")
            file = address if offline else hf_hub_download(repository, path, repo_type="dataset", revision=commit)
            pairs[split] += [(Path(file), row) for row in _rows(Path(file), data, task)]
        if len(pairs[split]) != len(hub[name]):
            raise NotCovered(f"data.source: the page of {data['source']} declares how to read its files")
    _number_labels([pair for each in pairs.values() for pair in each], data, task)
    return {split: [_declared(row, data["types"] or {}) for _, row in each] for split, each in pairs.items()}


def _number_labels(pairs: list[tuple[Path, Row]], data: dict, task: dict) -> None:
    """Convert text labels of CSV and text files to integers, in place, if each is a canonically written integer."""
    names = columns(task)[1]
    several = task.get("multi_label") or not task["name"].endswith("classification") or "tags" in task
    if several or names[0] in (data["types"] or {}):
        return
    label = names[0]
    loose = [row for file, row in pairs if file.suffix in (".csv", ".tsv", ".txt") and isinstance(row.get(label), str)]
    texts = {row[label].strip() for row in loose} - {""}
    typed = [row.get(label) for file, row in pairs if file.suffix not in (".csv", ".tsv", ".txt")]
    wholes = {text.removesuffix(".0") for text in texts} if all(text.endswith(".0") for text in texts) else texts
    ways = {text for text in wholes if text.lstrip("-").isdecimal() and str(int(text)) == text}
    if ways == wholes and not any(isinstance(value, str) for value in typed):
        for row in loose:
            row[label] = int(row[label].strip().removesuffix(".0")) if row[label].strip() else None


def _declared(row: Row, types: dict[str, str]) -> Row:
    """Convert the columns of a row to their types in `data.types`."""
    make = {"text": lambda v: v if isinstance(v, str) else json.dumps(v), "integer": lambda v: int(float(v))}

    def of(value: Any, kind: str) -> Any:
        if value is None or (kind != "text" and isinstance(value, str) and not value.strip()):
            return None
        return [of(each, kind) for each in value] if isinstance(value, list) else make.get(kind, float)(value)

    return row | {name: of(row[name], kind) for name, kind in types.items() if name in row}


def _classes(root: Path, task: dict, encoding: str) -> Splits:
    """Read a folder per label, with one text or image per file."""
    splits, images = dict[str, list[Row]](), task["name"] == "image_classification"
    folders = {split: root / word for split, words in SPLIT_NAMES.items() for word in words if (root / word).is_dir()}
    for split, folder in (folders or {"train": root}).items():
        files = [file for file in sorted(folder.glob("*/*")) if not file.name.startswith(".")]
        read = [{"image": f.read_bytes()} if images else {"text": f.read_text(encoding).strip()} for f in files]
        splits[split] = [row | {"label": file.parent.name} for row, file in zip(read, files, strict=True)]
    return splits


def _files(names: Any, root: Path) -> list[Path]:
    """Return the files that paths or patterns name, relative to the working directory or to `root`."""
    files: list[Path] = []
    for name in names if isinstance(names, list) else [names]:
        path = Path(name).expanduser()
        path = path if path.exists() else root / path
        files += [path] if path.is_file() else sorted(map(Path, glob.glob(str(path))))
    return files


def _rows(file: Path, data: dict, task: dict) -> list[Row]:
    from pyarrow import csv, parquet

    if file.suffix not in ENDINGS or data["quote"] is not None:
        raise NotCovered(f"data: {file.name}: plain supports only {', '.join(ENDINGS)}, without data.quote")
    if file.suffix == ".parquet":
        return parquet.read_table(file).to_pylist()
    if file.suffix in (".csv", ".tsv"):
        mark = {None: "\t" if file.suffix == ".tsv" else ",", "tab": "\t"}.get(data["separator"], data["separator"])
        how = csv.ReadOptions(column_names=data["columns"], encoding=data["encoding"])
        read, labels = columns(task)
        as_text = [*read, *(data["types"] or {}), *([] if _of_numbers(task) else labels)]
        texts = csv.ConvertOptions(column_types=dict.fromkeys(as_text, "string"))
        return csv.read_csv(file, how, csv.ParseOptions(delimiter=mark, newlines_in_values=True), texts).to_pylist()
    text = file.read_text(encoding=data["encoding"]).removeprefix("\ufeff")
    lines = [line for line in text.split("\n") if line.strip()]
    if file.suffix != ".txt":
        return json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    if task["name"].endswith("language_modeling"):
        return [{"text": each} for each in (lines if task["document"] == "line" else [text]) if each.strip()]
    pairs = [line.rpartition(";") for line in lines]
    numbers = _of_numbers(task)
    return [{"text": t, "label": float(label) if numbers else label.strip()} for t, _, label in pairs]


def _of_numbers(task: dict) -> bool:
    """Return whether the label columns hold numbers, or flags 0 and 1."""
    return bool(task.get("regression") or task.get("multi_label") or "score" in task)
