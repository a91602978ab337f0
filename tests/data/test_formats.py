"""Local files as users have them: compressed, in several formats within a split, with nested columns."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from lockstep.config.run import DataSection, RunError
from lockstep.data import file_formats, source, usable_rows
from lockstep.data.cache import cache_folder
from support.messages import mentions

ROWS = [{"text": "été; oui", "label": 1}, {"text": "b", "label": 2}]
PLAIN = {
    ".txt": "été; oui;1\nb;2\n",
    ".csv": "text,label\nété; oui,1\nb,2\n",
    ".tsv": "text\tlabel\nété; oui\t1\nb\t2\n",
    ".jsonl": '{"text": "été; oui", "label": 1}\n{"text": "b", "label": 2}\n',
    ".json": '[{"text": "été; oui", "label": 1},\n {"text": "b", "label": 2}]',
}
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


def read(columns: dict[str, str] | None = None, **keys: object) -> list[dict]:
    return source.load(DataSection(**keys), 0, columns=columns).splits["train"].to_list()  # type: ignore[arg-type]


def refused(columns: dict[str, str] | None = None, **keys: object) -> str:
    with pytest.raises(RunError) as caught:
        read(columns, **keys)
    return str(caught.value)


# -- compressed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("ending", PLAIN)
def test_every_format_is_read_compressed(ending: str, packing: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}{packing}"
    path.write_bytes(PACK[packing](PLAIN[ending].encode()))
    assert read(source=str(path)) == ROWS
    path.write_bytes(PACK[packing](PLAIN[ending].encode("utf-16")))
    assert read(source=str(path), encoding="utf-16") == ROWS
    assert mentions(refused(source=str(path)), "LS2065", "utf-16")
    assert list((cache_folder() / "unpacked").iterdir()) == []


@pytest.mark.parametrize("packing", PACK)
def test_a_truncated_compressed_file_is_named_with_its_line(packing: str, tmp_path: Path) -> None:
    import random

    draw = random.Random(0)
    rows = "".join(
        json.dumps({"text": f"{draw.getrandbits(256)}", "label": i % 2}) + "\n"
        for i in range(15_000 if packing == ".bz2" else 3000)
    )
    for name in ("train.jsonl", "train.csv", "train.txt"):
        path = tmp_path / f"{name}{packing}"
        path.write_bytes(PACK[packing](rows.encode())[:-2000])
        said = refused(source=str(path))
        assert mentions(said, "LS2062", str(path))
        assert int(said.partition("beyond line ")[2].partition(" (")[0].replace(",", "")) > 500
        assert mentions(said, "LS2062")
        path.write_bytes(b"no such file, " * 30)
        assert mentions(refused(source=str(path)), "LS2062", str(path), "line 1")
        path.write_bytes(PACK[packing](b""))
        assert "empty" in refused(source=str(path))


def test_a_compressed_file_names_the_line_that_is_wrong_as_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(PLAIN[".jsonl"].encode() + b'{"text": \n'))
    assert mentions(refused(source=str(path)), "LS2226", "data.train", str(path), "line 3", "column 10")
    path.write_bytes(gzip.compress(gzip.compress(b"text")))
    assert mentions(refused(source=str(path)), "LS2064")
    path = tmp_path / "b.jsonl"
    path.write_bytes(lzma.compress(PLAIN[".jsonl"].encode()))
    assert mentions(refused(source=str(path)), "LS2064", "b.jsonl.xz")
    path = tmp_path / "c.parquet.gz"
    path.write_bytes(gzip.compress(b"text"))
    assert mentions(refused(train=str(path)), "LS2251")


@pytest.mark.parametrize("packing", PACK)
def test_a_file_that_would_fill_the_disk_is_not_decompressed(
    packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "LARGE", 2**20)
    monkeypatch.setattr(file_formats, "MOST", 100)
    path = tmp_path / f"a.csv{packing}"
    path.write_bytes(PACK[packing](b"text,label\n" + b"a,1\n" * 2**19))
    monkeypatch.setattr(file_formats, "check", lambda *_: None)  # the second read has a guard, too
    assert mentions(refused(source=str(path)), "LS2060")
    assert list((cache_folder() / "unpacked").iterdir()) == []


def test_folders_hold_compressed_files(tmp_path: Path) -> None:
    for split in ("train", "dev", "test-00"):
        (tmp_path / f"{split}.jsonl.zst").write_bytes(PACK[".zst"](PLAIN[".jsonl"].encode()))
    found = source.load(DataSection(source=str(tmp_path)), 0)
    assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 2, "validation": 2, "test": 2}
    (tmp_path / "films/pos").mkdir(parents=True)
    (tmp_path / "films/neg").mkdir()
    (tmp_path / "films/pos/1.txt.xz").write_bytes(PACK[".xz"](b"good\n"))
    (tmp_path / "films/neg/1.txt").write_bytes(b"bad\n")
    rows = read(source=str(tmp_path / "films"), layout="class_folders")
    assert rows == [{"text": "bad", "label": "neg"}, {"text": "good", "label": "pos"}]


# -- several formats -------------------------------------------------------------------------------------------------


def test_formats_are_mixed_in_the_order_of_the_files(tmp_path: Path) -> None:
    names = ["a.jsonl", "b.csv.gz", "c.json", "d.tsv.zst", "e.txt"]
    for name in names:
        path = Path(name)
        data = PLAIN[file_formats.plain(path).suffix].replace("été; oui", name).encode()
        (tmp_path / name).write_bytes(PACK[path.suffix](data) if file_formats.is_compressed(path) else data)
    pa_rows = datasets.Dataset.from_list(
        [{"label": 7, "text": "f"}],
        datasets.Features({"label": datasets.Value("int8"), "text": datasets.Value("large_string")}),
    )
    pa_rows.to_parquet(tmp_path / "f.parquet")
    rows = read(source=str(tmp_path))
    assert [row["text"] for row in rows] == [text for name in names for text in (name, "b")] + ["f"]
    assert [row["label"] for row in rows] == [1, 2] * 5 + [7]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("text\nb\n", "a.jsonl has text, label, and {b} has no column 'label': it has text"),
        ("text,label,more\nb,1,2\n", "a.jsonl has text, label, and {b} has an additional column 'more'"),
        ("text,label\nb,joy\n", "'label' holds whole numbers in {a} and texts in {b}"),
    ],
)
def test_formats_with_different_columns_are_refused(text: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(PLAIN[".jsonl"])
    (tmp_path / "b.csv").write_text(text)
    places = {"a": tmp_path / "a.jsonl", "b": tmp_path / "b.csv"}
    assert wanted.format(**places) in refused(source=str(tmp_path))


def test_integers_and_decimals_become_decimals(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(PLAIN[".jsonl"])
    (tmp_path / "b.csv").write_text("text,label\nb,1.5\n")
    assert [row["label"] for row in read(source=str(tmp_path))] == [1.0, 2.0, 1.5]


# -- nested columns --------------------------------------------------------------------------------------------------

DEEP = [
    {
        "question": "a",
        "answers": {"text": ["x", "y"], "start": [1, 2]},
        "turns": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yo"}],
        "meta": {"kind": "k"},
    },
    {"question": "b", "answers": {"text": ["z"], "start": [3]}, "turns": [], "meta": None},
    {"question": "c", "answers": {"text": [], "start": []}, "turns": None, "meta": {"kind": "l"}},
]


def deep(folder: Path) -> str:
    path = folder / "deep.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DEEP))
    return str(path)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("answers.text.0", ["x", "z", None]),
        ("answers.start.1", [2, None, None]),
        ("answers.text.-1", ["y", "z", None]),
        ("answers.text", [["x", "y"], ["z"], []]),
        ("turns.1.content", ["yo", None, None]),
        ("turns.-2.content", ["hi", None, None]),
        ("meta.kind", ["k", None, "l"]),
    ],
)
def test_dotted_paths_are_columns(path: str, wanted: list, tmp_path: Path) -> None:
    found = read({"task.text": path}, source=deep(tmp_path))
    assert [row[path] for row in found] == wanted
    some = datasets.Dataset.from_list(DEEP * 3).select([3, 2, 4])  # rows after an earlier selection
    again = usable_rows.added(some, {"task.text": path}, "train", "x")
    assert again[path] == [wanted[0], wanted[2], wanted[1]]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("answers.nope", "'answers' of the train split of x has no 'nope'; it has text, start"),
        ("turns.content", "'turns' of the train split of x holds lists: say which of their items, for example"),
        ("turns.content", "turns.0.content (-1: the last)"),
        ("question.a", "'question' of the train split of x holds strings, in which there is no 'a'"),
    ],
)
def test_dotted_paths_without_a_value(path: str, wanted: str, tmp_path: Path) -> None:
    said = refused({"task.text": path}, source=deep(tmp_path))
    assert mentions(said, "LS2311", "task.text", str(path))
    assert wanted.replace("of x", f"of {deep(tmp_path)}") in said


def test_names_of_labels_are_kept_and_columns_with_dots_are_themselves() -> None:
    names = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"meta": {"label": names}, "a.b": datasets.Value("string")})
    rows = datasets.Dataset.from_list([{"meta": {"label": 1}, "a.b": "x"}], features)
    found = usable_rows.added(rows, {"task.label": "meta.label", "task.text": "a.b"}, "train", "x")
    assert found.features["meta.label"] == names
    assert found.column_names == ["meta", "a.b", "meta.label"]
