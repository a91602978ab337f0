"""Documents -> blocks of tokens with their targets, in the cache: each token is predicted once, from those before it.

In: documents as tokens, with the text that each token stands for measured. Out: an Arrow file of examples, the columns
`input_ids` and `targets` (shifted by one), and what an example's targets count: tokens, bytes and words of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from lockstep.data.cache import folder_of, kept

_WINDOW = 2**20  # characters that are measured at once
_ROWS, _TOKENS = 10_000, 2**21  # that are written at once: whichever comes first
IGNORED = -100  # as in batch.py, which imports torch
_NUMBERS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [("input_ids", _NUMBERS), ("targets", _NUMBERS), *((name, pa.int64()) for name in ("count", "bytes", "words"))]
)


@dataclass(frozen=True)
class Document:
    """One text as tokens; the arrays have one entry a token."""

    ids: np.ndarray  # int32 [N]
    scored: np.ndarray  # bool [N]: whether it is to be predicted; a prompt is not
    bytes: np.ndarray  # int32 [N]: of UTF-8 that it adds to the text
    words: np.ndarray  # int32 [N]: words of the text that begin with it or inside it
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))  # bool [N]: a text begins; [0]: unknown

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Document:
        """Some of its tokens."""
        return Document(*(getattr(self, each.name)[start:stop] for each in fields(self)))


def measured(text: str, ids: Sequence[int] | np.ndarray, ends: np.ndarray | None) -> Document:
    """The document of a text. `ends` says before which character each token ends, int64 [N], in order; None: not known,
    nothing is measured. What lies between two tokens (white space that a tokenizer drops) belongs to the second."""
    numbers = np.asarray(ids, dtype=np.int32)
    counted = np.zeros((2, len(numbers)), dtype=np.int32)  # bytes, words
    if ends is not None and len(numbers):
        ends = np.concatenate([ends[:-1], [len(text)]])
        before, rest = True, [0, 0]  # after white space; what was counted since the last token
        for start in range(0, len(text), _WINDOW):
            part = text[start : start + _WINDOW]
            first, last = np.searchsorted(ends, [start, start + len(part)], side="right")
            space = np.fromiter((c.isspace() for c in part), dtype=bool, count=len(part))
            begins = ~space & np.concatenate([[before], space[:-1]])
            before = bool(space[-1])
            for row, each in enumerate((_wide(part), begins)):
                until = np.concatenate([[0], np.cumsum(each)])  # up to each character
                at = np.concatenate([[-rest[row]], until[ends[first:last] - start]])
                counted[row, first:last] = np.diff(at)
                rest[row] = int(until[-1] - at[-1])
    return Document(numbers, np.ones(len(numbers), dtype=bool), counted[0], counted[1])


def _wide(text: str) -> np.ndarray:
    """Bytes of UTF-8 of each character."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)


def joined(parts: list[Document]) -> Document:
    """One document after the other."""
    if len(parts) == 1:
        return parts[0]
    return Document(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Document)))


def apart(documents: Iterable[Document]) -> Iterator[Document]:
    """Documents that are not seen from one another: each says where it starts, and its first token, which nothing comes
    before, is not predicted."""
    for document in documents:
        first = np.arange(len(document)) == 0
        yield replace(document, scored=document.scored & ~first, starts=first)


def blocks(documents: Iterable[Document], size: int, packed: bool) -> Iterator[Document]:
    """Parts of `size` + 1 tokens at most, which overlap by one: the last token of a part is the first of the next.

    `packed`: documents follow each other without regard to where they end, so that every part but the last is full.
    """
    rest: list[Document] = []
    length = 0
    for document in documents:
        rest, length = (rest, length) if packed else ([], 0)
        rest.append(document)
        length += len(document)
        if length > size or not packed:
            whole = joined(rest)
            at = 0
            while length - at > size + 1 or (length - at > 1 and not packed):
                yield whole.part(at, at + size + 1)
                at += size
            rest, length = [whole.part(at, length)], max(0, length - at)
    if packed and length > 1:
        yield joined(rest)


def example(part: Document) -> dict[str, np.ndarray | int] | None:
    """What is stored of a part: inputs and the targets that follow them. None where there is nothing to predict."""
    scored = part.scored[1:]
    if not scored.any():
        return None
    starts = {"starts": part.starts[:-1].astype(np.int32)} if len(part.starts) else {}
    return starts | {
        "input_ids": part.ids[:-1],
        "targets": np.where(scored, part.ids[1:], IGNORED).astype(np.int32),
        "count": int(scored.sum()),
        "bytes": int(part.bytes[1:][scored].sum()),
        "words": int(part.words[1:][scored].sum()),
    }


def write(parts: Iterable[Document], key: str, starts: bool = False) -> str:
    """The Arrow file of the examples, made if not yet cached, or not as it was. The caller holds the lock. `key` stands
    for what they are made of. `starts`: they say where documents do. Errors: `RunError` when the cache cannot be
    written."""
    schema = SCHEMA.append(pa.field("starts", _NUMBERS)) if starts else SCHEMA

    def make(aside: Path) -> None:
        found = (row for part in parts if (row := example(part)) is not None)
        with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for rows in _shares(found):
                stream.write_batch(_batch(rows, schema))

    return str(kept(folder_of("tokens") / f"{key}.arrow", make))


def together(files: list[str], key: str) -> str:
    """One Arrow file of the examples of several, in order. Errors: as those of `write`."""

    def make(aside: Path) -> None:
        with pa.memory_map(files[0]) as first:
            schema = pa.ipc.open_stream(first).schema
        with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for path in files:
                with pa.memory_map(path) as mapped:
                    for batch in pa.ipc.open_stream(mapped):
                        stream.write_batch(batch)

    return str(kept(folder_of("tokens") / f"{key}.arrow", make))


def _shares(examples: Iterable[dict]) -> Iterator[list[dict]]:
    """As many examples at a time as are written at once, however long they are."""
    rows: list[dict] = []
    size = 0
    for row in examples:
        rows.append(row)
        size += len(row["input_ids"])
        if len(rows) >= _ROWS or size >= _TOKENS:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _batch(rows: list[dict], schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for each in schema:
        if each.type == _NUMBERS:
            offsets = np.cumsum([0, *(len(row[each.name]) for row in rows)], dtype=np.int32)
            columns.append(pa.ListArray.from_arrays(offsets, np.concatenate([row[each.name] for row in rows])))
        else:
            columns.append(pa.array([row[each.name] for row in rows], each.type))
    return pa.record_batch(columns, schema=schema)
