"""Unreadable data files: the message names the line, the encoding, or what fills the disk."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lockstep.config.run import DataSection, RunError, load
from lockstep.data import file_formats, source
from support.messages import raises

GOOD = '{"text": "abc", "label": 1}\n'


def read(path: Path, **keys: str) -> list[dict]:
    return source.load(DataSection(source=str(path), **keys), 0).splits["train"].to_list()  # type: ignore[arg-type]


def said(path: Path, content: bytes, **keys: str) -> str:
    path.write_bytes(content)
    with pytest.raises(RunError) as caught:
        read(path, **keys)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"text": "x", "label": ', "line 78, column 24: expecting value"),
        ('{"text": "x" "label": 3}', 'line 78, column 14: expecting \',\' delimiter: \'{"text": "x" "label": 3}\''),
        ("[1, 2]", "line 78 holds a list; expected a mapping of columns on each line"),
        ("abc", "line 78, column 1: expecting value: 'abc'"),
        ('{"text": ' * 3000, "line 78: nested more than 200 levels deep"),
    ],
)
def test_a_malformed_line_is_named(line: str, wanted: str, tmp_path: Path) -> None:
    found = said(tmp_path / "a.jsonl", (GOOD * 50 + "\n" + GOOD * 26 + line + "\n" + GOOD * 10).encode())
    assert f"a.jsonl, {wanted}" in found


def test_a_malformed_json_file_names_its_line(tmp_path: Path) -> None:
    assert "a.json, line 2, column 9: expecting ':'" in said(tmp_path / "a.json", b'[{"text": "a"},\n{"text" "b"}]')


FILES = {
    "a.txt": "été; oui;1\nb;2\n",
    "a.csv": "text,label\nété; oui,1\nb,2\n",
    "a.tsv": "text\tlabel\nété; oui\t1\nb\t2\n",
    "a.jsonl": '{"text": "été; oui", "label": 1}\n{"text": "b", "label": 2}\n',
    "a.json": '[{"text": "été; oui", "label": 1},\n {"text": "b", "label": 2}]',
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("encoding", "hint"), [("latin-1", "cp1252, latin-1"), ("utf-16", "(utf-16: it"), ("utf-16-le", "(utf-16-le: it")]
)
def test_data_encoding_is_used(name: str, encoding: str, hint: str, tmp_path: Path) -> None:
    content = FILES[name].encode(encoding)
    found = said(tmp_path / name, content)
    assert "is not text in UTF-8" in found
    assert f"set data.encoding {hint}" in found if hint[0] == "(" else hint in found
    if encoding == "latin-1":
        assert f"(line {2 if name in ('a.csv', 'a.tsv') else 1}: invalid continuation byte)" in found
    wanted = [{"text": "été; oui", "label": 1}, {"text": "b", "label": 2}]
    assert read(tmp_path / name, encoding=encoding) == wanted
    (tmp_path / name).write_bytes(FILES[name].encode("utf-8-sig"))
    assert read(tmp_path / name) == wanted


def test_utf_16_read_as_utf_8_is_refused(tmp_path: Path) -> None:
    """Two-byte ASCII decodes as UTF-8 and as latin-1 without an error."""
    for encoding in ("utf-8", "latin-1"):
        found = said(tmp_path / "a.txt", "good;1\nbad;2\n".encode("utf-16-be"), encoding=encoding)
        assert "letters with zeros between them" in found
        assert "utf-16-be" in found


def test_an_unknown_encoding_is_refused() -> None:
    values = {"data": {"source": "builtin/emotion", "encoding": "latin-99"}, "model": {"type": "gpt2"}}
    with raises("LS1132", "data.encoding", "'latin-99'"):
        load(None, [], values)


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzip.compress), ("bzip2", bz2.compress), ("xz", lzma.compress)])
def test_compressed_files_without_their_ending_are_refused(name: str, pack: object, tmp_path: Path) -> None:
    for file in ("a.jsonl", "a.csv", "a.txt"):
        assert f"is compressed ({name})" in said(tmp_path / file, pack(GOOD.encode() * 100_000))  # type: ignore[operator]


@pytest.mark.parametrize(("ending", "pack"), [("bz2", bz2.compress), ("xz", lzma.compress)])
def test_data_after_a_compressed_stream_is_not_lost(
    ending: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """Python's own readers stop there in silence (tests/assumptions/test_files.py)."""
    whole, path = GOOD.encode(), tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(pack(whole) + bytes(8) + pack(whole))
    assert len(read(path)) == 2 * len(whole.splitlines())
    path.write_bytes(pack(whole) + b"damaged" + pack(whole))
    with raises("LS2062"):
        read(path)


def test_a_file_that_would_fill_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same long text in every row takes a few kilobytes, because the format stores it once in a dictionary."""
    monkeypatch.setattr(file_formats, "LARGE", 2**22)
    path = tmp_path / "a.parquet"
    table = pa.table({"text": pa.array(["word " * 1000] * 2000), "label": [i % 2 for i in range(2000)]})
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < 9000
    with raises("LS2066", "0.0"):
        read(path)
    monkeypatch.setattr(file_formats, "LARGE", 2**25)
    assert len(read(path)) == 2000
