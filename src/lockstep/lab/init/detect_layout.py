"""Detect the layout of local files, and merge several sources into one `data` section.

In: the `data` section given by the user. Out: `layout` and `columns` of the files: rows with or without a header,
folders of labels, parallel files. An ambiguity is a question, or a note without a terminal. Several sources, each with
a look at its columns, become one `data.sources` with renamed columns, or a `RunError` that names the source.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.data_sources import OWN, OneSource
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import annotated, file_formats, row_files, source
from lockstep.lab.init import columns
from lockstep.lab.init.columns import DatasetProfile, Fit, fit, is_known, task_named
from lockstep.lab.init.questions import Prompter

_TABLES = set(file_formats.SEPARATORS)
_ANNOTATED = {
    "conll": "lines of a word and its tags, with blank lines between sentences",
    "squad": "questions as SQuAD has them",
    "columns": "a list of values for each column",
    "records": "a document with a list of rows",
}
_ROWS = 500  # rows sampled per file
_WORDS = {word for words in source.USUAL.values() for word in words}  # names of split folders


def recognised(data: DataSection, talk: Prompter) -> DataSection:
    """Detect layout and format. Errors: `RunError` if files are missing or ambiguous."""
    if data.source == source.BUILTIN:
        return data
    if data.layout == "rows" and "layout" not in data.model_fields_set:
        train = data.train[0] if isinstance(data.train, list) else data.train
        if (place := data.source or train) is not None:
            root = Path(place).expanduser()
            data = _annotated(data, root, talk) or (_layout(data, root, talk) if data.source is not None else data)
    if data.layout != "rows":
        return data
    local = source.local_splits(data)
    if local is None or data.columns is not None:
        return data
    tables = {s: files for s, files in local.items() if files and {*map(row_files.format_of, files)} <= _TABLES}
    return _header(data, tables, talk) if tables.get("train") else data


def looked(data: DataSection, talk: Prompter) -> tuple[DataSection, DatasetProfile]:
    """Look at the rows. Sets `split_column` if a column names the split, and looks at nested columns if the others fit
    no task. Errors: `RunError`."""
    look = columns.look(data)
    if look.split_column is not None and list(look.sizes) == ["train"] and data.split_column is None:
        talk.console.say(
            f"column {look.split_column} names the split of each row: data.split_column={look.split_column}"
        )
        data = data.model_copy(update={"split_column": look.split_column})
        look = columns.look(data)
    if look.nearly_apart is not None and data.split_column is None:
        column, odd = look.nearly_apart
        words = ", ".join(odd)
        talk.note(
            f"column {column} names the split, except in rows with {words}: all are used as train. "
            f"To leave those out: data.split_column={column}, and data.filter: {{{column}: {{none_of: [{words}]}}}}"
        )
    if look.deep:
        deep = columns.look(data, deep=True)
        if _fits(deep) > _fits(look):
            look = deep
    return data, look


def _fits(look: DatasetProfile) -> int:
    """Rate how well columns fit a task: 0 not at all, 1 as texts only, 2 with labels or answers."""
    try:
        return 1 if set(columns.guess(look)[1].keys) == {"text"} else 2
    except RunError:
        return 0


def _annotated(data: DataSection, root: Path, talk: Prompter) -> DataSection | None:
    """Set the layout that the first file seems to have, unless it is plain rows."""
    for layout in annotated.ENDINGS:
        files = [root] if root.is_file() else []
        if root.is_dir():
            files = source.in_folder(root, "train", layout)
            files = files or sorted(f for f in root.iterdir() if source.is_rows(f, layout))
        if files and annotated.layout_of(files[0], data.encoding) == layout:
            talk.console.say(f"{files[0].name}: {_ANNOTATED[layout]}: data.layout={layout}")
            return data.model_copy(update={"layout": layout})
    return None


def _layout(data: DataSection, root: Path, talk: Prompter) -> DataSection:
    """Detect folders of labels and parallel files by name."""
    if root.is_file() and row_files.format_of(root) is None:
        stem, _ = row_files.named(root)
        files = row_files.parallel_in(root.parent).get(stem, [])
        if root not in files:
            return data
        talk.console.say(f"{root} goes with {', '.join(str(f) for f in files if f != root)}: a file for each language")
        return data.model_copy(update={"source": None, "train": [str(f) for f in files], "layout": "parallel"})
    if not root.is_dir() or any(_is_rows(file) for file in root.iterdir()):
        return data
    splits = {
        split: next((root / w for w in words if (root / w).is_dir()), root) for split, words in source.USUAL.items()
    }
    classes = row_files.classes_in(splits["train"])
    if len(classes) > 1 and not (splits["train"] == root and {c.name for c in classes} & _WORDS):
        _say_classes(splits, root, talk)
        return data.model_copy(update={"layout": "class_folders"})
    if row_files.parallel_in(root) or row_files.parallel_in(splits["train"]):
        return data.model_copy(update={"layout": "parallel"})
    return data


def _is_rows(file: Path) -> bool:
    """Return whether a file in a folder shows that the folder holds rows: train.jsonl, any.csv, test.txt."""
    ending = row_files.format_of(file) if file.is_file() else None
    return ending is not None and (ending != ".txt" or file_formats.plain(file).stem in _WORDS)


def _say_classes(splits: dict[str, Path], root: Path, talk: Prompter) -> None:
    names = {
        split: [c.name for c in row_files.classes_in(folder)]
        for split, folder in splits.items()
        if split == "train" or folder != root
    }
    talk.console.say(f"{root}: a folder for each label: {', '.join(names['train'])}")
    for split, there in names.items():
        if there and (more := sorted(set(names["train"]) - set(there))):
            talk.note(
                f"{', '.join(more)}: texts in train, none in {split}. Is it a label? If not, name the others: "
                f"data.train=[{', '.join(str(splits['train'] / name) for name in there)}]"
            )


# -- headers ---------------------------------------------------------------------------------------------------------


def _header(data: DataSection, local: dict[str, list[Path]], talk: Prompter) -> DataSection:
    """Detect whether the first row of a table names its columns."""
    file = local["train"][0]
    file_formats.check(file, "data.source", data.encoding)
    data = _dialect(data, file, talk)
    table = file_formats.scanned(file, "data.train", data)
    rows = [row for _, row in itertools.islice(file_formats.rows(file, data.encoding, table.dialect), _ROWS)]
    if not rows:
        return data  # its reader reports an empty file
    first = rows[0]
    with_header = has_header(rows)
    first_cells = " | ".join(cell if len(cell) <= 40 else f"{cell[:37]}..." for cell in first)
    if with_header is None:
        with_header = talk.sure(f"The first row of {file.name} is: {first_cells}. Does it name the columns?", True)
        if talk.ask is None:
            talk.note(
                f"the first row of {file.name} ({first_cells}) is taken as column names; if it is an example, "
                f"name the columns: data.columns=[{', '.join(_numbered(len(first)))}]"
            )
    if with_header:
        return data
    talk.console.say(f"{file.name} has no header; its first row is: {first_cells}")
    test = local.get("test")
    if test and len(file_formats.scanned(test[0], "data.test", data).names) < len(first) and data.test is None:
        data = without_test(data, talk)
    return data.model_copy(update={"columns": _names(data, len(first), talk)})


def without_test(data: DataSection, talk: Prompter) -> DataSection:
    """Return `data` with the files of all splits but test, which lacks a column."""
    local = source.local_splits(data) or {}
    talk.note(
        f"the test split ({', '.join(map(str, local['test']))}) lacks a column: it is not scored, and left out here; "
        "`lockstep predict` reads it"
    )
    file_names = {split: [str(f) for f in files] for split, files in local.items() if files and split != "test"}
    return data.model_copy(update={"source": None, "test": None, **file_names})


def has_header(rows: list[list[str]]) -> bool | None:
    """Return whether the first row names columns; None if unclear."""
    first, rest = [cell.strip() for cell in rows[0]], rows[1:]
    below = [[row[i].strip() for row in rest if i < len(row)] for i in range(len(first))]
    names = sum(is_known(cell) or row_files.is_language(cell) for cell in first)
    again = any(cell and cell in column for cell, column in zip(first, below, strict=True))
    if again or len(set(first)) < len(first):
        return None if names == len(first) else False
    if any(_is_number(cell) or _is_sentence(cell) for cell in first):
        return False if not names else None
    if names:
        return True
    if any(cell and column and all(map(_is_number, column)) for cell, column in zip(first, below, strict=True)):
        return True
    return None


def _dialect(data: DataSection, file: Path, talk: Prompter) -> DataSection:
    """Set `separator` and `quote` if they differ from the default for the file's extension."""
    if data.separator is not None and data.quote is not None:
        return data
    ways = file_formats.detected(file, data, lambda name: is_known(name) or row_files.is_language(name))
    chosen = ways[0] if ways else {}
    if not chosen:
        return data
    if "separator" in chosen:
        mark = chosen["separator"]
        talk.console.say(f"{file.name} is separated by {file_formats.NAMES[mark]}: data.separator={mark!r}")
    if "quote" in chosen:
        talk.console.say(f"{file.name}: data.quote={chosen['quote']}")
    return data.model_copy(update=chosen)


def _names(data: DataSection, count: int, talk: Prompter) -> list[str]:
    """Name unnamed columns by their content. Errors: `RunError` if it is ambiguous."""
    numbered = _numbered(count)
    look = columns.look(data.model_copy(update={"columns": numbered, "limit": None}))
    labels = sorted(
        (c for c in look.few if look.kinds[c] in ("text", "number", "true/false")), key=lambda c: look.few[c]
    )
    texts = sorted((c for c in look.texts if c not in labels), key=lambda c: -look.characters[c])
    names_of: dict[str, str] = {}
    if texts and labels:
        names_of = {texts[0]: "text", labels[0]: "label"}
    elif len(texts) == 1:
        names_of = {texts[0]: "text"}
    elif talk.ask is None:
        raise RunError(
            "LS8280",
            f"the columns of {look.source} have no names, and their values do not determine them; name them in order: "
            "data.columns=[text,label], [source,target] for translations, [prompt,response] for instructions",
        )
    rest = [c for c in texts if c not in names_of]
    if talk.ask is None and (rest or len(labels) > 1):
        others = ", ".join([*rest, *labels[1:]])
        talk.note(f"which column is the text and which the label is guessed ({others} might be): see data.columns")

    def check(answer: str) -> list[str]:
        names = [name.strip() for name in answer.split(",")]
        if len(names) != count or len(set(names)) < count or not all(names):
            raise RunError("LS8281", f"expected {count} different names, separated by commas")
        return names

    return talk.answer("Names of its columns, in order", ",".join(names_of.get(c, c) for c in numbered), check)


def _numbered(count: int) -> list[str]:
    return [f"column_{i + 1}" for i in range(count)]


def _is_sentence(cell: str) -> bool:
    return len(cell.split()) > 6 or len(cell) > 60 or (" " in cell and cell[-1:] in (".", "!", "?", "\u3002"))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


_BY_HAND = "write it by hand: data.sources: [{source: ..., rename: {...}}, ...] (reference/run-file on the site)"


def together(
    parts: Sequence[tuple[DataSection, DatasetProfile]], task: dict[str, Any], talk: Prompter
) -> tuple[DataSection, DatasetProfile, dict[str, Any]]:
    """Merge sources into one `data` section, a look at all of them, and the task. Errors: `RunError`."""
    first = parts[0][1]
    kind = task_named(task["name"])
    for _, look_of in parts:  # text lines, in any of the files
        if "document" in kind.Options.model_fields and look_of.plain and "document" not in task:
            task = task | {"document": "line" if look_of.sizes["train"] > 1 else "file"}
    columns = _columns(task, first)
    entries, characters = [], dict(first.characters)
    for name, (section, look_of) in zip(_names_multi_source([section for section, _ in parts]), parts, strict=True):
        rename = _rename(columns, task, look_of, talk)
        for ours in columns:
            theirs = look_of.characters.get(rename.get(ours, ours), 0)
            characters[ours] = max(characters.get(ours, 0), theirs)
        options = {key: getattr(section, key) for key in OWN if key in section.model_fields_set}
        keys_set = {key: value for key, value in options.items() if value not in (None, {})}
        entries.append(OneSource.model_validate({"name": name, **keys_set} | ({"rename": rename} if rename else {})))
    sizes: Counter[str] = Counter()
    for _, look_of in parts:
        sizes.update(look_of.sizes)
    source = ", ".join(entry.name for entry in entries)
    look = replace(first, source=source, sizes=dict(sizes), characters=characters, lacking={})
    return DataSection.model_validate({"sources": entries}), look, task


def _columns(task: dict[str, Any], first: DatasetProfile) -> list[str]:
    """Columns that the task reads, by the first source's names."""
    if first.plain:
        return ["text"]
    there = {*first.kinds, *first.languages}
    return [value for key, value in task.items() if key not in ("name", "document") and value in there]


def _rename(columns: list[str], task: dict[str, Any], look: DatasetProfile, talk: Prompter) -> dict[str, str]:
    """Return the renamed columns of a source. Errors: `RunError` if one is missing."""
    there = {"text"} if look.plain else {*look.kinds, *look.languages}
    if not (missing := [column for column in columns if column not in there]):
        return {}
    fitted = fit(task["name"], look) or Fit({})
    key_of = {value: key for key, value in task.items() if key != "name"}
    known: dict[str, str] = {}
    for ours in missing:
        theirs = "text" if look.plain else fitted.keys.get(key_of.get(ours, "text"))
        if theirs is not None and theirs not in columns:
            known[ours] = theirs
    # the direction of a translation cannot be inferred
    if task_named(task["name"]).language_keys or len(known) < len(missing):
        raise RunError(
            "LS8282",
            f"--data: {look.source} has no column {missing[0]!r}, and no other column can be identified with "
            f"it; it has {look.described()}. Rename the column, or {_BY_HAND}",
        )
    renamed = ", ".join(f"{ours} is called {theirs}" for ours, theirs in known.items())
    talk.console.say(f"{look.source}: {renamed}")
    for key, why in fitted.doubts.items():
        talk.note(f"{look.source}: task.{key}: {fitted.keys.get(key)}; {why}")
    return known


def _names_multi_source(sections: Sequence[DataSection]) -> list[str]:
    """Names of sources in metrics: file names, with folders if needed to distinguish them."""
    places = []
    for section in sections:
        train = section.train[0] if isinstance(section.train, list) else section.train
        places.append(Path(section.source or train or "source"))
    plain = [_word(place.name.split(".")[0]) for place in places]
    names = [
        name if plain.count(name) == 1 else _word(f"{place.absolute().parent.name}_{name}")
        for place, name in zip(places, plain, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(names, 1)]


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_") or "source"
