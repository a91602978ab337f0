"""Converts texts, or prompts with responses, to documents of tokens and examples of `block_size` tokens.

In: rows of a data set and a tokenizer. Out: `Documents` in row order, long texts tokenized in parts; full blocks, or
one example per document. Conversations: `conversations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from lockstep.config.run import RunError
from lockstep.data import arrow_cache
from lockstep.data.batch import IGNORED
from lockstep.data.cache import damage, discard, folder_of, locked

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


_WINDOW = 2**20  # characters measured at a time
_TOKENS = 2**21  # tokens split and written at a time
_SHARD = 2**22  # approximate tokens per shard of full blocks
_NUMBERS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [("input_ids", _NUMBERS), ("targets", _NUMBERS), *((name, pa.int64()) for name in ("count", "bytes", "words"))]
)
WITH_STARTS = SCHEMA.append(pa.field("starts", _NUMBERS))
WITH_LEFT = SCHEMA.append(pa.field("left", pa.int64()))  # tokens that were cut off its text
# Tokens that no token precedes, which are not targets, and their bytes and words.
OPENINGS = (
    pa.field("openings", _NUMBERS),
    pa.field("opening_bytes", pa.int64()),
    pa.field("opening_words", pa.int64()),
)
_STREAM = pa.schema(
    [("ids", pa.int32()), ("scored", pa.bool_()), ("bytes", pa.int32()), ("words", pa.int32()), ("starts", pa.bool_())]
)
_SPACES = np.array([chr(code).isspace() for code in range(0x3002)])  # white space by code point; the last one is U+3000


@dataclass(frozen=True)
class Documents:
    """Tokenized texts, concatenated; arrays have one entry per token unless noted."""

    ids: np.ndarray  # int32 [N]
    scored: np.ndarray  # bool [N]: whether it is a target; prompts are not
    bytes: np.ndarray  # int32 [N]: UTF-8 bytes of the text that it covers
    words: np.ndarray  # int32 [N]: words that begin within it
    lengths: np.ndarray  # int64 [D]: tokens of each text
    starts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))  # bool [N]: a text begins; [0]: unknown
    left: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # int64 [D]: tokens cut off each; [0]: none

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ends(self) -> np.ndarray:
        """End of each text: int64 [D]."""
        return np.cumsum(self.lengths)

    @property
    def within(self) -> np.ndarray:
        """Position of each token in its text: int64 [N]."""
        return np.arange(len(self)) - np.repeat(self.ends - self.lengths, self.lengths)

    def only(self, tokens: np.ndarray, lengths: np.ndarray) -> Documents:
        """Select tokens (bool [N], or a slice), which form texts of these lengths."""
        starts = self.starts[tokens] if len(self.starts) else self.starts
        return Documents(self.ids[tokens], self.scored[tokens], self.bytes[tokens], self.words[tokens], lengths, starts)

    def beginnings(self, most: int) -> Documents:
        """Truncate each text to `most` tokens; `left` records the number of tokens cut off."""
        lengths = np.minimum(self.lengths, most)
        return replace(self.only(self.within < most, lengths), left=self.lengths - lengths)


def measured(
    texts: Sequence[str], ids: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray, ends: np.ndarray | None
) -> Documents:
    """Documents of some texts, with bytes and words per token.

    `ids`: tokens of all texts; `lengths`: tokens per text. `ends`: end character of each token in its text, int64 [N];
    None: unknown, nothing is measured. Characters between two tokens (white space that a tokenizer drops) belong to the
    second, trailing ones to the last."""
    numbers, sizes = np.asarray(ids, dtype=np.int32), np.asarray(lengths, dtype=np.int64)
    counted = np.zeros((2, len(numbers)), dtype=np.int32)  # bytes, words
    if ends is not None and len(numbers):
        some = sizes > 0  # a text without tokens has nothing to measure
        nonempty = [text for text, has in zip(texts, some, strict=True) if has]
        stops = np.cumsum(np.fromiter(map(len, nonempty), np.int64, len(nonempty)))
        ends = ends + np.repeat(np.concatenate([[0], stops[:-1]]), sizes[some])
        ends = np.maximum.accumulate(ends)  # a special token ends before the text does
        ends[np.cumsum(sizes[some]) - 1] = stops
        _measure("".join(nonempty), stops, ends, counted)
    return Documents(numbers, np.ones(len(numbers), dtype=bool), counted[0], counted[1], sizes)


def _measure(text: str, stops: np.ndarray, ends: np.ndarray, counted: np.ndarray) -> None:
    """Fill in `counted`, bytes and words of each token [2, N], for concatenated texts."""
    opens = np.zeros(len(text) + 1, dtype=bool)  # where a text begins
    opens[0] = opens[stops] = True
    before, rest = True, [0, 0]  # after white space; counts since the last token
    for start in range(0, len(text), _WINDOW):
        codes = np.frombuffer(text[start : start + _WINDOW].encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        stop = start + len(codes)
        first, last = np.searchsorted(ends, [start, stop], side="right")
        space = _SPACES[np.minimum(codes, len(_SPACES) - 1)]
        begins = ~space & (np.concatenate([[before], space[:-1]]) | opens[start:stop])
        before = bool(space[-1])
        wide = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)  # bytes of UTF-8
        for row, each in enumerate((wide, begins)):
            until = np.concatenate([[0], np.cumsum(each)])  # up to each character
            at = np.concatenate([[-rest[row]], until[ends[first:last] - start]])
            counted[row, first:last] = np.diff(at)
            rest[row] = int(until[-1] - at[-1])


def interleaved(first: Documents, second: Documents) -> Documents:
    """Append to each text of `first` the corresponding text of `second`."""
    lengths = first.lengths + second.lengths
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    of_second = within >= np.repeat(first.lengths, lengths)
    arrays = {}
    for name in ("ids", "scored", "bytes", "words"):
        whole = np.empty(len(of_second), dtype=getattr(first, name).dtype)
        whole[~of_second], whole[of_second] = getattr(first, name), getattr(second, name)
        arrays[name] = whole
    return Documents(**arrays, lengths=lengths)


def separate(documents: Documents) -> Documents:
    """Isolate texts from one another: mark where each starts, and exclude its first token, which has no context, from
    the targets. Tokens that were not targets anyway count no bytes or words."""
    first = documents.within == 0
    never = first & ~documents.scored
    texts = {name: np.where(never, 0, getattr(documents, name)).astype(np.int32) for name in ("bytes", "words")}
    return replace(documents, scored=documents.scored & ~first, starts=first, **texts)


def joined(parts: Sequence[Documents], as_one: bool) -> Documents:
    """Concatenate documents, as separate texts or, with `as_one`, as a single text."""
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("ids", "scored", "bytes", "words", "lengths", "starts", "left")
    }
    whole = Documents(**arrays)
    return replace(whole, lengths=np.array([len(whole)])) if as_one else whole


def _with_openings(schema: pa.Schema) -> pa.Schema:
    return pa.schema([*schema, *OPENINGS])


def _openings(documents: Documents, begin: bool) -> np.ndarray:
    """Tokens of text that no token precedes: bool [N]."""
    first = documents.within == 0
    if len(documents.starts):  # from `separate`
        return documents.starts & ~documents.scored & (documents.bytes > 0) & (begin | ~first)
    return first & documents.scored & (documents.bytes > 0) & begin


def examples(documents: Documents, size: int, begin: bool | None = None) -> pa.RecordBatch:
    """Split each text into parts of at most `size` + 1 tokens that overlap by one token.

    A part stores its inputs and the targets that follow them; parts without a target are dropped. `begin`: also store
    the tokens that no token precedes, see `OPENINGS`; false if the first token is the last of another part."""
    some = documents.lengths > 0
    ends = documents.ends[some]
    read, predicted = np.ones((2, len(documents)), dtype=bool)
    read[ends - 1] = predicted[ends - documents.lengths[some]] = False  # last: no input, first: no target
    rest = documents.lengths[some] - 1
    parts = -(-rest // size)  # of each text
    sizes = np.full(int(parts.sum()), size)
    sizes[np.cumsum(parts)[parts > 0] - 1] = (rest - (parts - 1) * size)[parts > 0]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    scored = documents.scored[predicted]
    targets = np.where(scored, documents.ids[predicted], IGNORED).astype(np.int32)

    def summed(numbers: np.ndarray) -> np.ndarray:
        return np.add.reduceat(numbers * scored, offsets[:-1], dtype=np.int64) if len(sizes) else offsets[:0]

    counts = [summed(each) for each in (np.ones(1, np.int64), documents.bytes[predicted], documents.words[predicted])]
    lists = [pa.ListArray.from_arrays(offsets.astype(np.int32), each) for each in (documents.ids[read], targets)]
    columns, schema = [*lists, *(pa.array(each, pa.int64()) for each in counts)], SCHEMA
    if len(documents.starts):
        columns.append(pa.ListArray.from_arrays(offsets.astype(np.int32), documents.starts[read].astype(np.int32)))
        schema = WITH_STARTS
    if len(documents.left):
        columns.append(pa.array(np.repeat(documents.left[some], parts), pa.int64()))
        schema = WITH_LEFT
    if begin is not None:
        at = np.flatnonzero(_openings(documents, begin))
        text = np.searchsorted(ends, at, side="right")
        part = (np.cumsum(parts) - parts)[text] + np.maximum(documents.within[at] - 1, 0) // size
        at, part = at[parts[text] > 0], part[parts[text] > 0]
        until = np.searchsorted(part, np.arange(len(sizes) + 1)).astype(np.int32)
        columns.append(pa.ListArray.from_arrays(until, documents.ids[at]))
        for numbers in (documents.bytes, documents.words):
            of_each = np.zeros(len(sizes), np.int64)
            np.add.at(of_each, part, numbers[at])
            columns.append(pa.array(of_each))
        schema = _with_openings(schema)
    batch = pa.record_batch(columns, schema=schema)
    return batch if (counts[0] > 0).all() else batch.filter(pa.array(counts[0] > 0))


# -- in the cache ----------------------------------------------------------------------------------------------------

Tokens = Callable[[range], Iterable[tuple[Documents, int]]]  # rows -> documents, and the number of rows they come from


def write(
    parts: list[range],
    make: Tokens,
    size: int,
    packed: bool,
    key: str,
    starts: bool = False,
    cut: bool = False,
    openings: bool = False,
) -> str:
    """Return the examples of a split, writing them if they are not cached or damaged.

    `parts`: rows of each shard. `packed`: concatenate texts, so that every example but the last is full. `starts`:
    record where documents start, see `separate`. `cut`: record truncation, see `beginnings`. `openings`: store tokens
    that no token precedes. The caller holds the lock. `key` identifies the inputs. Errors: `RunError` if the cache
    cannot be written."""
    schema = WITH_LEFT if cut and not packed else SCHEMA
    if starts:
        schema = WITH_STARTS
    schema = _with_openings(schema) if openings else schema
    if not packed:
        return arrow_cache.write_split(
            key, schema, parts, lambda rows: _examples(make(rows), size, openings), "tokenising"
        )
    path = folder_of("tokens") / f"{key}.arrow"
    if damage(path) is None:
        return str(path)
    folder = path.with_name(f"{key}.stream.{parts[0].stop}-{parts[-1].stop}.parts")
    with locked(folder.name):
        files = arrow_cache.fill(folder, parts, ".tokens", lambda rows, *to: _keep(make(rows), *to), "tokenising")
        stream = TokenStream(files, starts)
        count = max(0, -(-(len(stream) - 1) // size))
        blocks = arrow_cache.spans(count, max(1, _SHARD // size))
        written = arrow_cache.write_split(
            key, schema, blocks, lambda rows: _blocks(stream, rows, size, openings), "packing", "blocks"
        )
        discard(folder)
    return written


def _examples(
    batches: Iterable[tuple[Documents, int]], size: int, openings: bool
) -> Iterator[tuple[pa.RecordBatch, int]]:
    return ((examples(documents, size, True if openings else None), rows) for documents, rows in batches)


def _blocks(stream: TokenStream, numbers: range, size: int, openings: bool) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Examples with these numbers, of all texts as one."""
    each = max(1, _TOKENS // size)
    for start in range(numbers.start, numbers.stop, each):
        stop = min(start + each, numbers.stop)
        begin = start == 0 if openings else None
        yield examples(stream[start * size : stop * size + 1], size, begin), stop - start


def _keep(batches: Iterable[tuple[Documents, int]], path: Path, done: Callable[[int], None]) -> None:
    """Write the tokens of texts to a file, compressed, since most tokens are one word each."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _STREAM, options=options) as out:
        waiting: list[pa.RecordBatch] = []
        for documents, rows in batches:
            columns = [pa.array(getattr(documents, name)) for name in _STREAM.names[:-1]]
            columns.append(pa.array(documents.within == 0))
            waiting.append(pa.record_batch(columns, schema=_STREAM))
            if sum(map(len, waiting)) >= _TOKENS // 8:
                out.write_table(pa.Table.from_batches(waiting).combine_chunks())
                waiting = []
            done(rows)
        if waiting:
            out.write_table(pa.Table.from_batches(waiting).combine_chunks())


class TokenStream:
    """All tokens in the files written by `_keep`, concatenated."""

    def __init__(self, files: list[Path], starts: bool) -> None:
        """`starts`: whether the files record where texts start."""
        self._starts = starts
        self._batches: list[tuple[Path, int]] = []
        sizes = [0]
        for file in files:
            with pa.memory_map(str(file)) as mapped:
                opened = pa.ipc.open_file(mapped)
                for number in range(opened.num_record_batches):
                    self._batches.append((file, number))
                    sizes.append(len(opened.get_batch(number)))
        self._first = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, tokens: slice) -> Documents:
        """A slice of tokens as one text."""
        start, stop, _ = tokens.indices(len(self))
        pieces = []
        for number in range(int(np.searchsorted(self._first, start, side="right")) - 1, len(self._batches)):
            if (first := int(self._first[number])) >= stop:
                break
            file, inner = self._batches[number]
            with pa.memory_map(str(file)) as mapped:
                batch = pa.ipc.open_file(mapped).get_batch(inner)
            pieces.append(batch.slice(max(0, start - first), min(len(batch), stop - first) - max(0, start - first)))
        whole = pa.Table.from_batches(pieces, _STREAM)
        read = {}
        for each in _STREAM:
            column, flag = whole.column(each.name), pa.types.is_boolean(each.type)  # numpy reads no bits
            parts = [np.from_dlpack(chunk) for chunk in (column.cast(pa.uint8()) if flag else column).chunks]
            read[each.name] = np.concatenate(parts).astype(bool) if flag else np.concatenate(parts)
        starts = read.pop("starts")
        return Documents(**read, lengths=np.array([stop - start]), starts=starts if self._starts else starts[:0])


PART = 400_000  # characters tokenized at a time
_OVERLAP = 4_000  # overlap of two parts, in characters
_ALIKE = 25  # tokens on each side of a seam on which both parts must agree
_PIECE = 100_000  # approximate characters per piece in tokenizer training


def tokenized(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens of a text, int32 [N], including special tokens, and the end character of each, int64 [N], non-decreasing;
    None if the tokenizer does not report it."""
    if tokenizer.is_fast and len(text) > PART + _OVERLAP and (encoding := _in_parts(tokenizer, text)) is not None:
        return encoding
    encoding = tokenizer(text, return_attention_mask=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    return np.asarray(encoding["input_ids"], dtype=np.int32), ends_of(encoding.get("offset_mapping"))


def ends_of(offsets: list[tuple[int, int]] | None) -> np.ndarray | None:
    """End character of each token, int64 [N], made non-decreasing; None stays None."""
    if offsets is None:
        return None
    return np.maximum.accumulate(np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 1])


def pieces(text: str) -> Iterator[str]:
    """Split a long text, for training a tokenizer, at single spaces between letters or digits. Pre-tokenizers that
    split words there, as all trained here do, see the same words and counts."""
    at = 0
    while len(text) - at > 2 * _PIECE:
        seam = text.find(" ", at + _PIECE)
        while 0 < seam < len(text) - 1 and not (text[seam - 1].isalnum() and text[seam + 1].isalnum()):
            seam = text.find(" ", seam + 1)
        if not 0 < seam < len(text) - 1:
            break
        yield text[at:seam]
        at = seam
    yield text[at:]


def _in_parts(tokenizer: Any, text: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Tokenize a long text in parts. None if two parts disagree on their overlap, or if special tokens do not simply
    surround a text."""
    around = _around(tokenizer)
    if around is None:
        return None
    ids, ends = _part(tokenizer, text, 0)
    done: list[tuple[np.ndarray, np.ndarray]] = []
    start = 0
    while start + PART + _OVERLAP < len(text):
        start += PART
        next_ids, next_ends = _part(tokenizer, text, start)
        seam = _seam(ids, ends, next_ids, next_ends, start)
        if seam is None:
            return None
        done.append((ids[: seam[0]], ends[: seam[0]]))
        ids, ends = next_ids[seam[1] :], next_ends[seam[1] :]
    done.append((ids, ends))
    before, after = around
    last = int(ends[-1]) if len(ends) else 0
    return (
        np.concatenate([before, *(each for each, _ in done), after]),
        np.concatenate([np.zeros(len(before), np.int64), *(each for _, each in done), np.full(len(after), last)]),
    )


def _part(tokenizer: Any, text: str, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the part that begins at `start`, and their end characters in the whole text."""
    encoding = tokenizer(
        text[start : start + PART + _OVERLAP],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    ends = ends_of(encoding["offset_mapping"])
    assert ends is not None
    return np.asarray(encoding["input_ids"], dtype=np.int32), ends + start


def _seam(
    ids: np.ndarray, ends: np.ndarray, next_ids: np.ndarray, next_ends: np.ndarray, start: int
) -> tuple[int, int] | None:
    """Number of tokens before the seam, in a part and in the next one, which begins at `start`. The seam is near the
    middle of the overlap, where both have equal tokens on both sides."""
    shared = np.intersect1d(ends[np.searchsorted(ends, start) :], next_ends)
    for place in sorted(shared.tolist(), key=lambda end: abs(end - start - _OVERLAP // 2)):
        here, there = (int(np.searchsorted(each, place, side="right")) for each in (ends, next_ends))
        if min(here, there, len(ids) - here, len(next_ids) - there) < _ALIKE:
            continue
        ours, theirs = slice(here - _ALIKE, here + _ALIKE), slice(there - _ALIKE, there + _ALIKE)
        if (ids[ours] == next_ids[theirs]).all() and (ends[ours] == next_ends[theirs]).all():
            return here, there
    return None


def _around(tokenizer: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Special tokens before and after a text."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer("a", verbose=False)["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return np.asarray(full[:at], dtype=np.int32), np.asarray(full[at + len(bare) :], dtype=np.int32)
    return None


EncodedDocuments = Iterator[tuple[Documents, int]]  # documents, and the number of rows they come from


def of_texts(dataset: Dataset, tokenizer: Any, column: str, rows: range) -> EncodedDocuments:
    """Yield one document per row, with an end token."""
    for _, batch in arrow_cache.batches(dataset.select_columns([column]), rows):
        for some in shares(batch[column], map(len, batch[column])):
            yield closed(_tokenized(tokenizer, some), tokenizer), len(some)


def _tokenized(tokenizer: Any, texts: Sequence[str], **options: Any) -> Documents:
    """One document per text, without end tokens."""
    if len(texts) == 1 and not options:
        ids, ends = tokenized(tokenizer, texts[0])
        return measured(texts, ids, [len(ids)], ends)
    offsets = bool(tokenizer.is_fast)
    encodings = tokenizer(
        list(texts), return_attention_mask=False, return_offsets_mapping=offsets, verbose=False, **options
    )
    lengths, ids = flat(encodings["input_ids"])
    ends = None
    if offsets:
        spans = chain.from_iterable(encodings["offset_mapping"])
        ends = np.fromiter((end for _, end in spans), np.int64, len(ids))
    return measured(texts, ids, lengths, ends)


def flat(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Length of each row, int64, and all values concatenated, int32."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return lengths, np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))


def shares(rows: Sequence[Any], sizes: Iterator[int]) -> Iterator[list[Any]]:
    """Yield rows in order, in groups of at most `PART` characters, or single longer rows."""
    some: list[Any] = []
    total = 0
    for row, size in zip(rows, sizes, strict=True):
        if some and total + size > PART:
            yield some
            some, total = [], 0
        some.append(row)
        total += size
    if some:
        yield some


def of_prompts(dataset: Dataset, tokenizer: Any, prompt: str, response: str, rows: range) -> EncodedDocuments:
    """Yield documents of prompt, response and end token; only tokens after the prompt are scored."""
    end = end_of(tokenizer)
    for _, batch in arrow_cache.batches(dataset.select_columns(list(dict.fromkeys([prompt, response]))), rows):
        pairs = list(zip(batch[prompt], batch[response], strict=True))
        for some in shares(pairs, (len(text) + len(answer) for text, answer in pairs)):
            prompt_ids = tokenizer([one for one, _ in some], return_attention_mask=False, verbose=False)["input_ids"]
            for ids in prompt_ids:
                while ids and ids[-1] == end:
                    ids.pop()
            answers = _tokenized(tokenizer, [other for _, other in some], add_special_tokens=False)
            yield interleaved(unscored(prompt_ids), closed(answers, tokenizer)), len(some)


def unscored(rows: Sequence[Sequence[int]]) -> Documents:
    """Documents of input tokens that are not targets."""
    lengths, ids = flat(rows)
    nothing = np.zeros(len(ids), dtype=np.int32)
    return Documents(ids, nothing.astype(bool), nothing, nothing, lengths)


def end_of(tokenizer: Any) -> int | None:
    """The token that ends a text, or None."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def end_or_padding(tokenizer: Any) -> int:
    """The token that represents an empty text."""
    end = end_of(tokenizer)
    return int(tokenizer.pad_token_id if end is None else end)


def start_of(tokenizer: Any) -> int | None:
    """The token that precedes a text's first token (as in lm-evaluation-harness), or None."""
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else end_of(tokenizer)


def closed(documents: Documents, tokenizer: Any) -> Documents:
    """Append the end token, which is a target, to each document of raw text. Chat templates end their texts
    themselves."""
    end = end_of(tokenizer)
    if end is None:
        return documents
    stops = documents.ends
    some = documents.lengths > 0
    open_ended = ~some
    open_ended[some] = documents.ids[stops[some] - 1] != end
    at = stops[open_ended]
    return Documents(
        np.insert(documents.ids, at, end),
        np.insert(documents.scored, at, True),
        np.insert(documents.bytes, at, 0),
        np.insert(documents.words, at, 0),
        documents.lengths + open_ended,
    )


def cut(train: Dataset, share: float, seed: Any, key: str, column: str | None = None) -> tuple[Dataset, Dataset]:
    """Hold out a share of the training split: seeded random rows, or the end of a single text in `column`. Returns the
    rest and the held-out part. `key`: the key of `data` that requests it. Errors: `RunError`."""
    if len(train) == 1 and column is not None:
        import datasets

        features = datasets.Features({**train.features, column: datasets.Value("string")})
        text = train[0][column]
        at = int(len(text) * (1 - share))
        beginning, end = (
            datasets.Dataset.from_dict({**train[:], column: [part]}, features) for part in (text[:at], text[at:])
        )
        return beginning, end
    order = np.random.default_rng(seed).permutation(len(train))
    held_out = round(len(train) * share)
    if held_out in (0, len(train)):
        raise RunError(
            "LS2120",
            f"data.{key}: {share:g} of {len(train)} examples leaves one of the splits empty; give another "
            "share, or more data",
        )
    return train.select(np.sort(order[held_out:])), train.select(np.sort(order[:held_out]))
