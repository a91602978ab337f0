"""Files of annotated texts whose rows are not lines: CoNLL, SQuAD's own JSON, JSON that maps columns to values, and
JSON documents that hold a list of rows.

In: `data` of a run with `layout: conll`, `squad`, `columns` or `records`; files may be compressed. Out: their rows as a
`datasets.Dataset`, or a `RunError` that names key, file and location. `layout_of` detects the layout of a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import error_messages as messages
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import file_formats, row_files, row_reader, value_types
from lockstep.data.column_types import ALL, ColumnUse
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from datasets import Dataset

# layout -> file endings accepted in folders
ENDINGS = {
    "conll": (".conll", ".conllu", ".iob", ".iob2", ".bio", ".ner", ".txt", ".tsv"),
    "squad": (".json",),
    "columns": (".json",),
    "records": (".json",),
}
_DOCUMENTS = {  # layout -> description of a document
    "squad": "questions of SQuAD",
    "records": "rows within a document",
}
_ROW_LISTS = ("data", "rows", "records", "examples", "items", "samples", "instances")  # usual keys of lists of rows
_TURNS = ({"role", "content"}, {"from", "value"})  # keys of a chat message, which is not a row
_IDS = 10  # minimum number of rows in a mapping of ids to rows, unless the ids are numbers
_CONLLU = ("id", "tokens", "lemmas", "pos_tags", "xpos", "feats", "heads", "relations", "deps", "misc")
_CONLL_2003 = ("tokens", "pos_tags", "chunk_tags", "ner_tags")
_TAG = re.compile(r"O|[BIESLU]-\S+")
_LOOKED = 5000  # lines read to detect a layout
_SMALL = 2**19  # minimum characters of a block, except at the end of a file
_TAGS = 200  # maximum number of distinct tags in a file


def layout_of(file: Path, encoding: str) -> str | None:
    """Detect whether a file is conll, squad, columns or records; None for any other."""
    ending = file_formats.plain(file).suffix
    try:
        if ending == ".json":
            return _layout_of_json(_document(file, encoding))
        if (ending in ENDINGS["conll"] or row_files.format_of(file) is None) and _is_conll(
            _beginning(file, encoding), ending
        ):
            return "conll"
    except (ValueError, RunError, RecursionError):  # its reader reports the error
        pass
    return None


def _beginning(file: Path, encoding: str) -> str:
    """The first complete lines of a file."""
    start = next(file_formats.blocks(file, "data"), b"").decode(file_formats.codec(encoding), errors="ignore")
    whole = start.replace("\r\n", "\n").replace("\r", "\n")
    return whole[: whole.rfind("\n") + 1] if len(start) > _SMALL else whole


# -- CoNLL -----------------------------------------------------------------------------------------------------------


def read_conll(files: list[Path], key: str, data: DataSection) -> Dataset:
    """Read CoNLL files: one row per sentence, one list column per column of the files. Errors: `RunError`."""
    import datasets

    names: list[str] = []
    columns: dict[str, list[list[str]]] = {}
    for file in files:
        file_formats.check(file, key, data.encoding)
        sentences = list(_sentences(file_formats.text_of(file, data.encoding)))
        width = len(sentences[0][0][1]) if sentences else 0
        numbered = _is_numbered([[cells for _, cells in lines] for lines in sentences])
        if not names and sentences:
            names = data.columns or _named(width, numbered)
            columns = {name: [] for name in names}
        for lines in sentences:
            for number, cells in lines:
                if len(cells) != len(names):
                    raise RunError(
                        "LS2000",
                        f"{key}: {file}, line {number:,}: expected {quantity(len(names), 'column')} "
                        f"({', '.join(names)}), as in "
                        f"the lines before; this line has {len(cells)}: {' '.join(cells)[:80]!r}. Each line is a word "
                        "and its tags, with a tab or spaces between them; a blank line ends a sentence",
                    )
            words = [cells for _, cells in lines]
            if names == list(_CONLLU):  # multiword tokens (1-2) and empty nodes (1.1)
                words = [cells for cells in words if cells[0].isdigit()]
            for name, values in zip(names, zip(*words, strict=True), strict=True):
                columns[name].append(list(values))
    if not columns:
        raise RunError("LS2001", f"{key}: {', '.join(map(str, files))} is empty; expected at least one example")
    return datasets.Dataset.from_dict(columns)


def _sentences(text: str) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield each sentence as a list of (line number, cells) per word. Skips comments and document markers."""
    sentence: list[tuple[int, list[str]]] = []
    by_spaces = False  # whether spaces separate the previous word's cells
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            if sentence:
                yield sentence
            sentence = []
        elif not line.startswith("-DOCSTART-"):
            spaces = "\t" not in line.strip()
            cells = line.split() if spaces else line.rstrip().split("\t")
            alike = bool(sentence) and spaces and by_spaces and len(cells) == len(sentence[-1][1])
            if alike or not _is_comment(line):  # comments precede sentences
                sentence.append((number, cells))
                by_spaces = spaces
    if sentence:
        yield sentence


def _is_comment(line: str) -> bool:
    """Return whether a line is a comment (`# text = ...`) rather than the word #."""
    return line.startswith("# ") and "\t" not in line and not _TAG.fullmatch(line.split()[-1])


def _is_numbered(sentences: list[list[list[str]]]) -> bool:
    """Return whether the first column numbers the words of each sentence."""
    if not sentences or any(len(words[0]) < 3 for words in sentences):
        return False
    counts = ([int(cells[0]) for cells in words if cells[0].isdigit()] for words in sentences)
    return all(count and count == list(range(1, len(count) + 1)) for count in counts)


def _named(width: int, numbered: bool) -> list[str]:
    """Column names for files of this width: known formats by name, otherwise the last column holds the tags."""
    if numbered and width == len(_CONLLU):
        return list(_CONLLU)
    if numbered:
        return ["id", *_named(width - 1, False)] if width != 4 else ["id", "tokens", "tags", "column_4"]
    if width == len(_CONLL_2003):
        return list(_CONLL_2003)
    return ["tokens", *(f"column_{i}" for i in range(2, width)), *(["tags"] if width > 1 else [])]


def _is_conll(text: str, ending: str) -> bool:
    """Whether a text consists of sentences of tagged words: equal column counts and few distinct tags, which must look
    like tags unless the file's ending says CoNLL."""
    sentences = list(_sentences("\n".join(text.split("\n")[:_LOOKED])))
    words = [cells for lines in sentences for _, cells in lines]
    widths = {len(cells) for cells in words}
    if len(widths) != 1 or widths == {1} or len(words) == 0:
        return False
    tags = {cells[-1] for cells in words}
    if all(map(_TAG.fullmatch, tags)) and len(sentences) > 1:
        return True
    if ending not in ENDINGS["conll"][:-2]:  # tables have no blank lines, and punctuation is not a tag
        return len(sentences) > 2 and len(tags) <= min(_TAGS, len(words) // 4) and all(map(str.isupper, tags))
    return True


# -- JSON ------------------------------------------------------------------------------------------------------------


def check_rows(file: Path, key: str, encoding: str) -> None:
    """Refuse a .json file that is a single document, which would be read as one row. Errors: `RunError`."""
    if file_formats.plain(file).suffix != ".json":
        return
    try:
        document = _document(file, encoding)
        layout = _layout_of_json(document)
    except (ValueError, RunError, RecursionError):  # its reader reports the error
        return
    if layout in _DOCUMENTS:
        raise RunError(
            "LS2002",
            f"{key}: {file} is one document ({_DOCUMENTS[layout]}), which would be read as one row; set "
            f"data.layout: {layout}",
        )
    lists = [name for name, value in document.items() if _is_row_list(value)] if isinstance(document, Mapping) else []
    if len(lists) > 1:
        raise RunError(
            "LS2003",
            f"{key}: {file} is one document with several lists of rows ({', '.join(lists)}), which would be "
            "read as one row; write each list to its own file",
        )


def _document(file: Path, encoding: str) -> Any:
    """The mapping in a JSON file; None for a list of rows or one row per line. Errors: `ValueError`."""
    blocks = file_formats.blocks(file, "data")
    start = next(blocks, b"")
    beginning = start.decode(file_formats.codec(encoding), errors="ignore").lstrip()
    first, _, rest = beginning.partition("\n")
    if beginning[:1] != "{" or (rest.strip() and _is_json(first)):
        return None
    return json.loads(b"".join([start, *blocks]).decode(file_formats.codec(encoding)))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _layout_of_json(document: Any) -> str | None:
    if not isinstance(document, Mapping) or not document:
        return None
    articles = document.get("data")
    if isinstance(articles, list) and articles and isinstance(articles[0], Mapping) and "paragraphs" in articles[0]:
        return "squad"
    if _records_in(document) is not None:
        return "records"
    lists = [values for values in document.values() if isinstance(values, list)]
    if len(lists) == len(document):
        rows = all(isinstance(value, Mapping) for values in lists for value in values)
        return "columns" if len({*map(len, lists)}) == 1 and lists[0] and not rows else None
    maps = [values for values in document.values() if isinstance(values, Mapping)]
    places = {tuple(values) for values in maps}
    numbered = (
        len(maps) == len(document) and len(places) == 1 and all(place.isdigit() for each in places for place in each)
    )
    return "columns" if numbered else None


def _records_in(document: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Rows of a document; None if it holds none. Recognizes a single list of mappings, a mapping of ids to rows, and
    columns with a list of values per row (pandas' orients table, index and split)."""
    columns, data = document.get("columns"), document.get("data")
    if isinstance(columns, list) and isinstance(data, list):
        fits = [isinstance(row, list) and len(row) == len(columns) for row in data]
        if fits and all(fits):
            return [dict(zip(columns, row, strict=True)) for row in data]
    lists = {name: value for name, value in document.items() if _is_row_list(value)}
    if len(lists) == 1 and (len(document) == 1 or next(iter(lists)).lower() in _ROW_LISTS):
        return next(iter(lists.values()))
    values = list(document.values())
    if all(isinstance(value, Mapping) and value for value in values) and len({tuple(value) for value in values}) == 1:
        names = set(values[0])
        ids = len(values) >= _IDS or (len(values) > 1 and all(name.isdigit() for name in document))
        if ids and names not in _TURNS and not all(name.isdigit() for name in names):
            return values
    return None


def _is_row_list(value: Any) -> bool:
    """Return whether a value is a list of rows rather than of chat messages."""
    rows = isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)
    return bool(rows) and not any(turn <= set(value[0]) for turn in _TURNS)


def _read_document(file: Path, key: str, data: DataSection, layout: str) -> Any:
    """Parse a .json file of this layout. Errors: `RunError`."""
    file_formats.check(file, key, data.encoding)
    try:
        document = _document(file, data.encoding)
    except json.JSONDecodeError as error:
        raise RunError("LS2004", f"{key}: {file}, line {error.lineno}, column {error.colno}: {error.msg}") from None
    if _layout_of_json(document) != layout:
        contents = {
            "squad": 'SQuAD\'s JSON: {"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}',
            "columns": 'a mapping of columns to lists of equal length: {"text": [...], "label": [...]}',
            "records": 'a document with one list of rows, {"data": [{"text": ..., "label": ...}, ...]}, or ids with '
            "a row each",
        }
        raise RunError("LS2005", f"{key}: {file}: layout: {layout} expects {contents[layout]}")
    return document


def read_documents(files: list[Path], key: str, data: DataSection, use: ColumnUse = ALL) -> Dataset:
    """Read rows of JSON documents: lists of rows, or columns mapped to lists or to pandas' mappings of row numbers.
    Errors: `RunError`."""
    parts = []
    for file in files:
        document = _read_document(file, key, data, data.layout)
        if data.layout == "columns":
            columns = {n: each if isinstance(each, list) else list(each.values()) for n, each in document.items()}
        else:
            rows = _records_in(document)
            assert rows is not None  # guaranteed by the layout
            columns = row_reader.columns_of([dict(row) for row in rows])
        columns = {name: columns[name] for name in use.of(list(columns))}
        try:
            parts.append(value_types.dataset_of(columns))
        except RunError as error:
            raise RunError(error.code, f"{key}: {file}: {error.message}") from None
    typed = row_files.declared(list(zip(files, parts, strict=True)), key, data)
    return row_files.together(typed, key, use=use, lenient=data.drop_missing)


def read_squad(files: list[Path], key: str, data: DataSection) -> Dataset:
    """Read SQuAD files: one row per question with id, title, context, question, answers. Errors: `RunError`, which
    names the question."""
    import datasets

    text, place = datasets.Value("string"), datasets.Value("int64")
    answers = {"text": datasets.List(text), "answer_start": datasets.List(place)}
    features = datasets.Features({**dict.fromkeys(("id", "title", "context", "question"), text), "answers": answers})
    parts = []
    for file in files:
        rows = []
        for article in _read_document(file, key, data, "squad")["data"]:
            try:
                rows += list(_questions(article))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                title = article.get("title", "") if isinstance(article, Mapping) else messages.kind(article)
                raise RunError(
                    "LS2008", f"{key}: {file}: a question of the article {title!r} is not in SQuAD's format: {error}"
                ) from None
        parts.append(datasets.Dataset.from_list(rows, features=features))
    return row_files.together(list(zip(files, parts, strict=True)), key)


def _questions(article: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the questions of an article. Errors: Python's own if a key is missing."""
    for paragraph in article["paragraphs"]:
        for question in paragraph["qas"]:
            if "answers" not in question and not question.get("is_impossible"):
                raise ValueError(f"question {question.get('id')!r} has no answers")
            answers = [] if question.get("is_impossible") else question["answers"]
            yield {
                "id": str(question.get("id", "")),
                "title": str(article.get("title", "")),
                "context": paragraph["context"],
                "question": question["question"],
                "answers": {
                    "text": [each["text"] for each in answers],
                    "answer_start": [int(each["answer_start"]) for each in answers],
                },
            }
