"""`lockstep predict`: apply an exported model, or a checkpoint, to texts.

In: OUTPUT, and texts, text pairs, or files of them. Out: one answer per input, as data or as a printed line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lockstep.config.output_files import replacing
from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import annotated, file_formats, row_files, source
from lockstep.data.conversations import Question, is_talk
from lockstep.data.job import Job
from lockstep.tasks.task import Predicts
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console
from lockstep.training.evaluate_export import finished, note_edited
from lockstep_trace import streams

_MESSAGES = ("messages", "tools")  # columns of a conversation for a model that was trained on texts

# A text; the texts of a pair, or the messages of a conversation; texts by column
PredictionInput = str | Sequence[str] | Sequence[Mapping[str, Any]] | Mapping[str, Any]

Row = tuple[str | Question, ...]


@dataclass(frozen=True)
class Reads:
    """The columns that a model's task reads, and how."""

    columns: Sequence[str]  # of texts
    talks: Sequence[str] = ()  # of a conversation and its tools, in place of texts
    learned: bool = True  # whether it was trained on conversations
    answered: bool = False  # whether a conversation ends with the answer

    @classmethod
    def of(cls, task: Predicts) -> Reads:
        talks = tuple(task.conversation_columns())
        usual = _MESSAGES if task.reads_conversations else ()
        return cls(task.input_columns(), talks or usual, bool(talks), task.scores_answers)

    def question(self, value: PredictionInput, place: str) -> Question | None:
        """The conversation of a row; None if it has texts. Errors: `RunError`."""
        if not self.talks:
            return None
        by_name = value if isinstance(value, Mapping) else dict.fromkeys(self.talks[:1], value)
        if self.answered and (whole := self._joined(by_name)) is not None:
            return Question.of(whole, self.talks[0], None, place, True)
        if not self.learned and set(self.columns) <= by_name.keys():
            return None
        some = [by_name.get(column) for column in self.talks]
        return Question.of(some[0], self.talks[0], next(iter(some[1:]), None), place, self.answered)

    def _joined(self, by_name: Mapping[str, Any]) -> list[Any] | None:
        """A prompt and its answer, of which one is a list of messages, as one conversation."""
        if not set(self.columns) <= by_name.keys() or not any(is_talk(by_name[column]) for column in self.columns):
            return None
        roles = ("user", "assistant")[-len(self.columns) :]
        parts = [(role, by_name[column]) for role, column in zip(roles, self.columns, strict=True)]
        return [
            m for role, part in parts for m in ([{"role": role, "content": part}] if isinstance(part, str) else part)
        ]


def predictions(
    output: Path, inputs: Sequence[PredictionInput], overrides: Sequence[str] | Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield one dict per input: its texts by column, and the answer by name, as JSON values. Errors: `RunError`."""
    run, export = finished(output, overrides)
    task = _task(Job.of(run))
    reads = Reads.of(task)
    rows = [row_of(each, reads, f"text {place}") for place, each in enumerate(inputs, 1)]
    yield from (_whole(reads.columns, row, answer) for row, answer in _answered(task, export, rows))


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
    task = _task(Job.of(run))
    reads, rows = Reads.of(task), list[Row]()
    if texts:
        rows += [row_of(word, reads, repr(word[:40])) for word in words]
    else:
        rows += [row for word in words for row in task.input_rows(word) or rows_of(run.data, run.seed, word, reads)]
    if not words:
        rows = [row_of(line.rstrip("\n"), reads, f"line {n}") for n, line in enumerate(sys.stdin, 1)]
    if not rows:
        raise RunError(
            "LS5070",
            'predict: no text given; use lockstep predict OUTPUT "some text", a file, or lines on standard input',
        )
    if not reads.learned and any(isinstance(row[0], Question) for row in rows):
        note = "the model was trained on texts; the chat template of its tokenizer renders conversations"
        streams.put(sys.stderr, f"note: {note}\n", flush=True)
    answers = _answered(task, export, rows)
    if out is not None:
        _written(out, reads.columns, answers)
        Console(True).say(f"{out}: {len(rows):,} predictions")
    elif as_json:
        _dump(sys.stdout, reads.columns, answers)
    else:
        console = Console(True)
        for row, answer in answers:
            console.say(task.format_prediction(row, answer), hang=4)
    return 0


def row_of(value: PredictionInput, reads: Reads, place: str) -> Row:
    """Texts of one row, in the order of the columns, or a conversation. `place` locates the row in error messages.
    Errors: `RunError`."""
    columns = reads.columns
    if (question := reads.question(value, place)) is not None:
        return (question,)
    if isinstance(value, Mapping):
        if missing := [column for column in columns if column not in value]:
            raise RunError(
                "LS5071",
                f"predict: {place} has no column {missing[0]!r}, which this model reads; it has "
                f"{', '.join(map(str, value))}" + "".join(f". Give a conversation in {t!r}" for t in reads.talks[:1]),
            )
        row = tuple(_text(value[column], column, place) for column in columns)
    elif isinstance(value, str):
        row = tuple(value.split("\t")) if len(columns) > 1 else (value,)
    else:
        row = tuple(_text(each, f"text {n}", place) for n, each in enumerate(value, 1))
    if len(row) != len(columns):
        texts = (
            "one text"
            if len(columns) == 1
            else f"two texts ({' and '.join(columns)}) with one tab between them ($'first\\tsecond')"
        )
        raise RunError(
            "LS5072",
            f"predict: this model reads {texts}, but {place} is {' | '.join(row)[:60]!r}",
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


def rows_of(section: DataSection, seed: int, word: str, reads: Reads) -> list[Row]:
    """Rows of a command-line word: the file's rows if it names a file, else the word itself. Errors: `RunError`, also
    for a word that can only be a file name, if that file does not exist."""
    path = Path(word)
    if not os.path.isfile(word):  # accepts any text; Path.is_file raises for long ones
        one_name = len(word.split()) == 1 or (os.sep in word and _is_folder(path.parent))
        if one_name and (row_files.format_of(path) or _is_folder(path)):
            what = "is a folder; name its files" if _is_folder(path) else "names a file that does not exist"
            raise RunError("LS5074", f"predict: {word} {what}. To predict this text itself, add --texts")
        return [row_of(word, reads, repr(word[:40]))]
    ending, layout = row_files.format_of(path), section.layout
    if layout not in annotated.ENDINGS or annotated.layout_of(path, section.encoding) != layout:
        layout = "rows"
    if ending is None and layout == "rows":
        raise RunError("LS5075", f"predict: {word} is a file of an unknown type; expected {row_files.READ}")
    if ending == ".txt" and layout == "rows":
        try:
            lines = b"".join(file_formats.blocks(path, "predict")).decode(section.encoding).splitlines()
        except UnicodeError as error:
            raise RunError("LS5076", f"predict: {word} cannot be read as {section.encoding}: {error}") from None
        return [row_of(line, reads, f"{word}, line {n}") for n, line in enumerate(lines, 1)]
    keys = ["encoding"]
    if layout != "rows":
        keys += ["layout", "columns"]
    elif ending in file_formats.SEPARATORS:
        keys += ["separator", "quote"]
    read = DataSection.model_validate({"train": word} | {key: getattr(section, key) for key in keys})
    data = source.load(read, seed).splits["train"]
    return [row_of(_flat(row, reads.columns), reads, f"{word}, row {n}") for n, row in enumerate(data)]


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


def _task(job: Job) -> Predicts:
    """The job's task. Errors: `RunError` if the task does not support prediction."""
    task = job.task(job.run)
    if not isinstance(task, Predicts):
        raise RunError(
            "LS5078",
            f"predict: the task {job.run.task.name} cannot predict from texts alone; call the model of "
            "lockstep.load(OUTPUT)",
        )
    return task


def _answered(task: Predicts, export: Path, rows: list[Row]) -> Iterator[tuple[Row, dict[str, Any]]]:
    ACTIVITY.set("loading the model")
    for count, pair in enumerate(zip(rows, task.predict(export, rows), strict=True), 1):
        ACTIVITY.set(f"predicting, {count:,} of {len(rows):,} texts")
        yield pair


def _whole(columns: Sequence[str], row: Row, answer: dict[str, Any]) -> dict[str, Any]:
    first = row[0]
    inputs = {first.column: first.messages} if isinstance(first, Question) else dict(zip(columns, row, strict=True))
    return {**{column: value for column, value in inputs.items() if column not in answer}, **answer}


def _dump(file: TextIO, columns: Sequence[str], answers: Iterator[tuple[Row, dict[str, Any]]]) -> None:
    for row, answer in answers:
        values = _whole(columns, row, answer)
        line = json.dumps(values, ensure_ascii=False)
        file.write((line if streams.encodes(file, line) else json.dumps(values)) + "\n")


def _written(out: Path, columns: Sequence[str], answers: Iterator[tuple[Row, dict[str, Any]]]) -> None:
    """Write JSON lines to a file, atomically. Errors: `RunError`."""
    try:
        with replacing(out) as aside, open(aside, "w", encoding="utf-8") as file:
            _dump(file, columns, answers)
    except OSError as error:
        raise RunError("LS5079", f"predict: {out} cannot be written: {error.strerror or error}") from error
