"""One reader for data in memory and for streams: messy files give both the rows of the table below, or one message."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config.run import DataSection, RunError
from lockstep.data import row_reader, source

AB = [{"text": "a", "label": "x"}, {"text": "b; c", "label": "y"}]
LINES = "".join(json.dumps(row) + "\n" for row in AB)
EMOJI = {"text": "ä\u2028ß\x85 \x0c🎉", "label": "x"}

# name -> content, and the rows or a part of the message
FILES: dict[str, tuple[str, list[dict[str, Any]] | str]] = {
    "mark.jsonl": ("\ufeff" + LINES, AB),
    "windows.jsonl": (LINES.replace("\n", "\r\n"), AB),
    "blank.jsonl": (f"\n \n{LINES}\t\n\n", AB),
    "no-end.jsonl": (LINES.rstrip(), AB),
    "unicode.jsonl": (json.dumps(EMOJI, ensure_ascii=False), [EMOJI]),
    "escaped.jsonl": (json.dumps(EMOJI), [EMOJI]),
    "zero.jsonl": (json.dumps({"text": "a\0b"}), [{"text": "a\0b"}]),
    "short.jsonl": ('{"text": "a"}\n{"label": "y"}\n', [{"text": "a", "label": None}, {"text": None, "label": "y"}]),
    "infinite.jsonl": ('{"x": -Infinity}\n{"x": 1.5}\n', [{"x": float("-inf")}, {"x": 1.5}]),
    "numbers.jsonl": ('{"x": 1}\n{"x": 2.5}\n', [{"x": 1.0}, {"x": 2.5}]),
    "nested.jsonl": (
        '{"m": [{"role": "u", "content": "ä"}], "t": {"a": [1]}}\n{"m": [], "t": {"a": []}}',
        [
            {"m": [{"role": "u", "content": "ä"}], "t": {"a": [1]}},
            {"m": [], "t": {"a": []}},
        ],
    ),
    "day.jsonl": ('{"text": "2024-01-02", "x": 1}\n' * 2, [{"text": "2024-01-02", "x": 1}] * 2),
    "time.jsonl": ('{"text": "2024-01-02T03:04:05Z"}\n', [{"text": "2024-01-02T03:04:05Z"}]),
    "days-within.jsonl": (
        '{"m": [{"role": "u", "content": "2024-01-02"}], "t": {"a": ["2024-01-02T03:04:05"]}}\n' * 2,
        [{"m": [{"role": "u", "content": "2024-01-02"}], "t": {"a": ["2024-01-02T03:04:05"]}}] * 2,
    ),
    "mark-alone.jsonl": ("\ufeff\n" + LINES, AB),
    "cut.jsonl": (LINES[:-9], 'line 2, column 18: unterminated string starting at: \'{"text": "b; c", "labe'),
    "comma.jsonl": (LINES[:-1] + ",\n", "line 2, column 31: extra data: "),
    "list.jsonl": (LINES + "\n[1]\n", "line 4 holds a list; expected a mapping of columns on each line"),
    "number.jsonl": ("7\n", "line 1 holds an integer; expected a mapping of columns on each line"),
    "tab.jsonl": ('{"text": "a\tb"}\n', "line 1, column 12: invalid control character at: "),
    "space.jsonl": (f"{LINES}\u00a0\n{LINES}", "line 3, column 1: expecting value: '\\xa0'"),
    "deep.jsonl": (f'{LINES}{{"x": {"[" * 300}{"]" * 300}}}\n', "line 3: nested more than 200 levels deep"),
    "lines.txt": ("a;x\n\n  \nb; c; y \n", AB),
    "mark.txt": ("\ufeffa;x\nb; c;y", AB),
    "mark-alone.txt": ("\ufeff\na;x\nb; c;y", AB),
    "separator.txt": ("a;x\n\x1c\nb; c;y\n", AB),
    "windows.txt": ("a;x\r\nb; c;y\r\n", AB),
    "old-mac.txt": ("a;x\rb; c;y\r", AB),
    "unicode.txt": ("a;x\n\u00a0\n\x0c\nb; c;y\n", AB),
    "separators.txt": ("a\u2028b\x0cc;x\n", [{"text": "a\u2028b\x0cc", "label": "x"}]),
    "no-label.txt": ("a;x\n\nb c\n", "line 3: expected 'text;label', but the line has no semicolon"),
}


def whole(path: Path, plain: str | None = None) -> list[dict[str, Any]] | str:
    try:
        return list(source.load(DataSection(train=str(path)), 0, plain).splits["train"].to_list())  # type: ignore[arg-type]
    except RunError as error:
        return error.message


def streamed(path: Path, plain: str | None = None) -> list[dict[str, Any]] | str:
    """Read chunk by chunk, and again in reverse, as a resumed run may."""
    reader = row_reader.reader(path, plain)
    try:
        steps = list(reader.walk())
    except RunError as error:
        return error.message
    again = [reader.read(chunk) for chunk, _ in reversed(steps)]
    assert [repr(rows) for _, rows in steps] == [repr(rows) for rows in reversed(again)]
    tables = [rows if isinstance(rows, pa.Table) else pa.table(rows) for _, rows in steps]
    assert [chunk.rows for chunk, _ in steps] == [len(table) for table in tables]
    return list(pa.concat_tables(tables, promote_options="permissive").to_pylist())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_both_readers_give_the_same_rows_or_message(name: str, packed: bool, tmp_path: Path) -> None:
    content, wanted = FILES[name]
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert whole(path) == streamed(path)
    if isinstance(wanted, str):
        assert str(whole(path)).startswith(f"data.train: {path}, {wanted}")
    else:
        assert whole(path) == wanted


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".txt")])
def test_texts_without_labels_are_the_same_lines(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name][0].encode())
    assert whole(path, "line") == streamed(path, "line")


def test_rows_do_not_depend_on_the_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"{i} ü", "label": f"{i % 3}x"} for i in range(25)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" * (1 + i % 3) for i, row in enumerate(rows)))
    (tmp_path / "b.txt").write_text("".join(f"{row['text']};{row['label']}\r\n" for row in rows), newline="")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=7)
    for size in (1, 4, 1000):
        monkeypatch.setattr(row_reader, "ROWS", size)
        for path in sorted(tmp_path.iterdir()):
            assert whole(path) == streamed(path) == rows


def test_line_numbers_count_from_the_start_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "ROWS", 2)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"x": 1}\n{"x": 2}\n\n{"x": 3}\n{"x": \n')
    assert whole(path) == streamed(path) == f"data.train: {path}, line 6, column 7: expecting value: '{{\"x\":'"
    path.write_bytes(b'\n{"x": 1}\n{"x": 2}\n\n{"x": "\xff"}\n')
    assert f"{path} is not text in UTF-8 (line 5: invalid start byte)" in str(streamed(path))
    assert f"{path} is not text in UTF-8 (line 5: invalid start byte)" in str(whole(path))


def test_invalid_files_have_the_same_message(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    path.write_bytes(path.read_bytes()[:-9])
    assert whole(path) == streamed(path)
    assert "the file is truncated, damaged" in str(whole(path))
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(LINES.encode()))
    assert whole(path) == streamed(path)
    assert "is compressed (gzip), although its name ends differently" in str(whole(path))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    for name, content in (("a.jsonl", ""), ("b.jsonl", "\n \n"), ("b.parquet", None)):
        if content is not None:
            (tmp_path / name).write_text(content)
        assert (
            whole(tmp_path / name)
            == f"data.train: {tmp_path / name} holds no example: the file is empty or has a header only"
        )
