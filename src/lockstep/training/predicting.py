"""`lockstep predict`: apply an exported model, or a checkpoint, to texts.

In: OUTPUT, and texts, text pairs, or files of them. Out: one answer per input, as data or as a printed line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from lockstep.config.run import Run, RunError, replacing
from lockstep.config.sections import DataSection
from lockstep.data import annotated, file_formats, row_files, source
from lockstep.data.conversations import Question
from lockstep.distributed.activity import ACTIVITY
from lockstep.strategies.job import Job
from lockstep.tasks.abilities import Predicts
from lockstep.track.console import Console
from lockstep.training.evaluate_export import finished, note_edited
from lockstep_trace import streams

# A text; the texts of a pair, or the messages of a conversation; texts by column
PredictionInput = str | Sequence[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


def predictions(
    output: Path, inputs: Sequence[PredictionInput], overrides: Sequence[str] | Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield one dict per input: its texts by column, and the answer by name, as JSON values. Errors: `RunError`."""
    run, export = finished(output, overrides)
    task = _task(run)
    reads = task.input_columns(run), task.conversation_columns(run)
    rows = [row_of(each, reads[0], f"text {place}", reads[1]) for place, each in enumerate(inputs, 1)]
    yield from (_whole(task.input_columns(run), row, answer) for row, answer in _answered(task, run, export, rows))


def predict(
    output: Path,
    words: list[str],
    overrides: list[str],
    as_json: bool = False,
    out: Path | None = None,
    texts: bool = False,
) -> int:
    """Print one line per text (or JSON, or write JSON to `out`). Without `words`, reads lines from standard input. A
    word that names a file is read as a file, unless `texts` is set. Returns the exit status."""
    run, export = finished(output, overrides)  # report its errors before reading input
    note_edited(output)
    task = _task(run)
    columns, talks = task.input_columns(run), task.conversation_columns(run)
    if texts:
        rows = [row_of(word, columns, repr(word[:40])) for word in words]
    else:
        rows = [row for word in words for row in task.input_rows(run, word) or rows_of(run, word, columns, talks)]
    if not words:
        rows = [row_of(line.rstrip("\n"), task.input_columns(run), f"line {n}") for n, line in enumerate(sys.stdin, 1)]
    if not rows:
        raise RunError(
            "LS5070",
            'predict: no text given; use lockstep predict OUTPUT "some text", a file, or lines on standard input',
        )
    answers = _answered(task, run, export, rows)
    if out is not None:
        _written(out, task.input_columns(run), answers)
        Console(True).say(f"{out}: {len(rows):,} predictions")
    elif as_json:
        _dump(sys.stdout, task.input_columns(run), answers)
    else:
        console = Console(True)
        for row, answer in answers:
            console.say(task.format_prediction(row, answer), hang=4)
    return 0


def row_of(value: PredictionInput, columns: Sequence[str], place: str, talks: Sequence[str] = ()) -> tuple[str, ...]:
    """Texts of one row, in the order of the columns, or a conversation. `place` locates the row in error messages.
    `talks`: `conversation_columns`. Errors: `RunError`."""
    by_name = value if isinstance(value, Mapping) else dict.fromkeys(talks[:1], value)
    some = [by_name.get(column) for column in talks]
    if talks and (question := Question.of(some[0], talks[0], next(iter(some[1:]), None), place)):
        return (question,)
    if isinstance(value, Mapping):
        if missing := [column for column in columns if column not in value]:
            raise RunError(
                "LS5071",
                f"predict: {place} has no column {missing[0]!r}, which this model reads; it has "
                f"{', '.join(map(str, value))}" + "".join(f". A conversation is read from {t!r}" for t in talks[:1]),
            )
        row = tuple(_text(value[column], column, place) for column in columns)
    elif isinstance(value, str):
        row = tuple(value.split("\t")) if len(columns) > 1 else (value,)
    else:
        row = tuple(_text(each, f"text {n}", place) for n, each in enumerate(value, 1))
    if len(row) != len(columns):
        reads = "one text" if len(columns) == 1 else f"two texts ({' and '.join(columns)}), with one tab between them"
        raise RunError(
            "LS5072",
            f"predict: this model reads {reads}, as in $'first text\\tsecond text' or on a line of standard input; "
            f"{place} is {' | '.join(row)[:60]!r}",
        )
    row = tuple(map(_as_utf8, row))
    for text in row:
        if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
            raise RunError("LS5073", f"predict: {place} is {text[:60]!r}, which is not valid UTF-8; convert it")
    return row


def _as_utf8(text: str) -> str:
    """Decode text from the command line or standard input as UTF-8 in a locale that cannot (LC_ALL=C without UTF-8
    mode)."""
    try:
        return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        return text


def rows_of(run: Run, word: str, columns: Sequence[str], talks: Sequence[str] = ()) -> list[tuple[str, ...]]:
    """Rows of a command-line word: the file's rows if it names a file, else the word itself. Errors: `RunError`, also
    for a word that can only be a file name, if that file does not exist."""
    path = Path(word)
    if not os.path.isfile(word):  # accepts any text; Path.is_file raises for long ones
        one_name = len(word.split()) == 1 or (os.sep in word and _is_folder(path.parent))
        if one_name and (row_files.format_of(path) or _is_folder(path)):
            what = "is a folder; name its files" if _is_folder(path) else "looks like a file, and there is none"
            raise RunError("LS5074", f"predict: {word} {what}. To predict this text itself, add --texts")
        return [row_of(word, columns, repr(word[:40]))]
    ending, layout = row_files.format_of(path), run.data.layout
    if layout not in annotated.ENDINGS or annotated.layout_of(path, run.data.encoding) != layout:
        layout = "rows"
    if ending is None and layout == "rows":
        raise RunError("LS5075", f"predict: {word} is a file of an unknown type; supported are {row_files.READ}")
    if ending == ".txt" and layout == "rows":
        try:
            lines = b"".join(file_formats.blocks(path, "predict")).decode(run.data.encoding).splitlines()
        except UnicodeError as error:
            raise RunError("LS5076", f"predict: {word} cannot be read as {run.data.encoding}: {error}") from None
        return [row_of(line, columns, f"{word}, line {n}") for n, line in enumerate(lines, 1)]
    reading = ["encoding"]
    if layout != "rows":
        reading += ["layout", "columns"]
    elif ending in file_formats.SEPARATORS:
        reading += ["separator", "quote"]
    section = DataSection.model_validate({"train": word} | {key: getattr(run.data, key) for key in reading})
    data = source.load(section, run.seed).splits["train"]
    return [row_of(_flat(row, columns), columns, f"{word}, row {n}", talks) for n, row in enumerate(data)]


def _is_folder(path: Path) -> bool:
    """Whether a word with a slash names a folder; a word without one may be a text."""
    return len(path.parts) > 1 and os.path.isdir(path)


def _flat(row: Mapping[str, Any], columns: Sequence[str]) -> Mapping[str, Any]:
    """Flatten a row whose texts are by language in a `translation` column."""
    inner = row.get("translation")
    return inner if isinstance(inner, Mapping) and not set(columns) <= row.keys() else row


def _text(value: Any, column: str, place: str) -> str:
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return " ".join(value)  # words
    if not isinstance(value, str):
        raise RunError("LS5077", f"predict: {place}: {column!r} holds {value!r}; expected a text")
    return value


def _task(run: Run) -> type[Predicts]:
    """Class of the run's task. Errors: `RunError` if the task does not support prediction."""
    task = Job.of(run).task
    if not issubclass(task, Predicts):
        raise RunError(
            "LS5078",
            f"predict: the task {run.task.name} cannot predict from texts alone; call the model of "
            "lockstep.load(OUTPUT)",
        )
    return task


def _answered(
    task: type[Predicts], run: Run, export: Path, rows: list[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    ACTIVITY.set("loading the model")
    for count, pair in enumerate(zip(rows, task.predict(run, export, rows), strict=True), 1):
        ACTIVITY.set(f"predicting, {count:,} of {len(rows):,} texts")
        yield pair


def _whole(columns: Sequence[str], row: Sequence[str], answer: dict[str, Any]) -> dict[str, Any]:
    inputs = {row[0].column: row[0].messages} if isinstance(row[0], Question) else dict(zip(columns, row, strict=True))
    return {**{column: value for column, value in inputs.items() if column not in answer}, **answer}


def _dump(file: TextIO, columns: Sequence[str], answers: Iterator[tuple[tuple[str, ...], dict[str, Any]]]) -> None:
    for row, answer in answers:
        values = _whole(columns, row, answer)
        line = json.dumps(values, ensure_ascii=False)
        file.write((line if streams.encodes(file, line) else json.dumps(values)) + "\n")


def _written(out: Path, columns: Sequence[str], answers: Iterator[tuple[tuple[str, ...], dict[str, Any]]]) -> None:
    """Write JSON lines to a file, atomically. Errors: `RunError`."""
    try:
        with replacing(out) as aside, open(aside, "w", encoding="utf-8") as file:
            _dump(file, columns, answers)
    except OSError as error:
        raise RunError("LS5079", f"predict: {out} cannot be written: {error.strerror or error}") from error
