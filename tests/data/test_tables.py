"""Tables in .csv and .tsv files, compared with Python's csv module."""

import csv
import gzip
import random
from pathlib import Path

import pandas
import pytest

from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import DataSection, Run, RunError, load
from lockstep.data import file_formats, prepare, row_files, source
from support.init_runs import here, written
from support.messages import mentions, raises

__all__ = ["here"]  # fixtures

TEXTS = [
    "plain words",
    "I feel sad, and tired",
    'he said "no" to me',
    '"no," he said',
    "first line\nsecond line",
    "first, line\r\nsecond; line\tend",
    "007",
    "true",
    "NA",
    "été | über",
]


def read(**keys: object) -> list[dict]:
    return source.load(DataSection.model_validate(keys), 0).splits["train"].to_list()


def refused(**keys: object) -> str:
    with pytest.raises(RunError) as caught:
        read(**keys)
    return str(caught.value)


def judged(path: Path, separator: str, encoding: str = "utf-8", **how: object) -> list[dict]:
    """Return the rows that Python's csv module reads, in the dialect in which the file was written."""
    with open(path, encoding=encoding, newline="") as file:
        return list(csv.DictReader(file, delimiter=separator, **how))  # type: ignore[arg-type]


def write(path: Path, separator: str, encoding: str = "utf-8", rows: int = 40, **how: object) -> None:
    with open(path, "w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=separator, **how)  # type: ignore[arg-type]
        writer.writerow(["text", "label", "note"])
        writer.writerows([TEXTS[i % len(TEXTS)], ["joy", "fear"][i % 2], TEXTS[-1 - i % 7]] for i in range(rows))


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize(
    ("name", "separator", "encoding", "keys"),
    [
        ("a.csv", ",", "utf-8", {}),
        ("a.tsv", "\t", "utf-8", {}),
        ("a.csv", ";", "utf-8-sig", {"separator": "semicolon"}),
        ("a.tsv", "|", "cp1252", {"separator": "|", "encoding": "cp1252"}),
        ("a.csv", "\t", "utf-16", {"separator": "tab", "encoding": "utf-16"}),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_equal_those_of_the_csv_module(
    name: str, separator: str, encoding: str, keys: dict, quoting: int, end: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write(path, separator, encoding, quoting=quoting, lineterminator=end)
    assert read(source=str(path), **keys) == judged(path, separator, encoding)
    packed = tmp_path / "packed" / f"{name}.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(source=str(packed.parent), **keys) == judged(path, separator, encoding)


@pytest.mark.parametrize("seed", range(3))
def test_any_table_is_read_as_written_or_refused(seed: int, tmp_path: Path) -> None:
    draw, wrong = random.Random(seed), []
    parts = ["a", "é", " ", '"', "'", ",", ";", "\t", "|", "\n", "\r\n", "007", "-2", "3.5", "true", "#", "\\", "inf"]
    for number in range(30):
        separator, rows = draw.choice(",,\t;|"), draw.choice([2, 20, 150])
        path = tmp_path / f"{number}{'.tsv' if separator == chr(9) else '.csv'}"
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=separator, quoting=draw.choice([0, 1, 2]))  # type: ignore[arg-type]
            writer.writerow(["text", "label", "more"])
            for _ in range(rows):
                texts = ["".join(draw.choices(parts, k=draw.randint(1, 4))) for _ in range(2)]
                writer.writerow([texts[0], draw.choice(["joy", "sad"]), texts[1]])
        said = ""
        try:
            found = read(source=str(path), separator=separator)
        except Exception as error:
            said = str(error)
        if said:
            assert "can be read in two ways" in said
        elif [{k: str(v) for k, v in row.items()} for row in found] != judged(path, separator):
            texts = [{k: str(v) for k, v in row.items()} for row in found]
            odd = [(a, b) for a, b in zip(texts, judged(path, separator), strict=True) if a["text"] != b["text"]]
            wrong += [(path.name, a, b) for a, b in odd if isinstance(found[0]["text"], str)]
    assert wrong == []


def test_strings_stay_strings_in_any_column(tmp_path: Path) -> None:
    """The reader of `datasets` infers types from some rows at a time, and would parse some texts as numbers."""
    path = tmp_path / "a.csv"
    texts = [*(f"word {i}" for i in range(15_000)), *(f"{i:05d}" for i in range(15_000)), "true", "1e5"]
    path.write_text("text,label\n" + "".join(f"{text},{i % 2}\n" for i, text in enumerate(texts)))
    assert [row["text"] for row in read(source=str(path))] == texts
    numbers = [*map(str, range(12_000)), "0.5"]
    path.write_text("text,label\n" + "".join(f"a,{number}\n" for number in numbers))
    assert [row["label"] for row in read(source=str(path))] == [float(number) for number in numbers]


def test_an_obviously_unquoted_file(tmp_path: Path) -> None:
    rows = [('"Hello" he said', "joy"), ('the 5" pipe', "joy"), ("plain", "sad"), ('"no', "sad"), ("'it", "joy")]
    for name, separator in (("a.tsv", "\t"), ("b.csv", ",")):
        (tmp_path / name).write_text(f"text{separator}label\n" + "".join(f"{a}{separator}{b}\n" for a, b in rows))
        found = read(source=str(tmp_path / name))
        assert found == judged(tmp_path / name, separator, quoting=csv.QUOTE_NONE)
    (tmp_path / "c.tsv").write_text('text\tlabel\n"Hello"\tjoy\nplain\tsad\n')  # no writer would quote that
    assert read(source=str(tmp_path / "c.tsv"))[0]["text"] == '"Hello"'
    assert read(source=str(tmp_path / "c.tsv"), quote="double")[0]["text"] == "Hello"


def test_ambiguous_tables_are_refused(tmp_path: Path) -> None:
    for name, mark in (("a.tsv", "\t"), ("a.csv", ",")):
        path = tmp_path / name
        path.write_text('text\tlabel\n"Oh no\tjoy\nplain\tsad\nhe said"\tjoy\n'.replace("\t", mark))
        assert mentions(refused(source=str(path)), "LS2072", "1")
        assert len(read(source=str(path), quote="none")) == 3
        assert read(source=str(path), quote="double") == judged(path, mark)
    # in a file of one column, any line without quotes is a row
    path.write_text('text\n"first line\nsecond line"\nplain\n')
    assert [row["text"] for row in read(source=str(path))] == ["first line\nsecond line", "plain"]


def many(rows: int) -> str:
    return "text,label\n" + "".join(f"words {i},{i % 2}\n" for i in range(rows))


@pytest.mark.parametrize(
    ("content", "keys", "told"),
    [
        ("text,label\nhello, you,1\nmy, dear,0\n", {}, "line 2: the row has 3 columns, and the header has 2: 'hello"),
        (
            many(100_000) + "late, and wide,1\n",
            {},
            "line 100,002: the row has 3 columns, and the header has 2: 'late",
        ),
        (many(100_000) + "narrow\n", {}, "line 100,002: the row has 1 column, and the header has 2: 'narrow'"),
        ("text;label\nhello, you;1\n", {}, "The header seems to be separated by semicolons: set data.separator"),
        ("text\tlabel\nhello, you\t1\n", {}, "The header seems to be separated by tabs: set data.separator"),
        ("text,label\na,1,\nb,0,\n", {}, "and the header does not: end both or neither with one"),
        ("text,label\na,1\n# made by hand\nb,0\n", {}, "line 3: the row has 1 column"),
        ("text,label\na,1\n# made by hand\nb,0\n", {}, "Remove comments"),
        (
            "sep=,\ntext,label\na,1\n",
            {},
            "line 1: 'sep=,' is an instruction for Excel; remove the line, and set data.separator",
        ),
        ("# by hand\ntext,label\na,1\n", {}, "The first line seems to be a comment, '# by hand': remove it"),
        ("text,label,text\na,1,b\n", {}, "columns 1 and 3 are both named 'text'; give each column a different name"),
        (
            'text,label\n"fine",0\n"b",0\n"never ends,1\n',
            {},
            'line 4: a cell that begins with " there is never closed',
        ),
        ('text,label\n"ends" early, really,1\n', {}, 'line 2: there is text between the " that ends a cell'),
        ("text,label\na\0b,1\n", {}, "line 2: the row contains a zero byte"),
        ("a,1\nb,0,2\n", {"columns": ["text", "label"]}, "line 2: the row has 3 columns, and data.columns names 2"),
        ('text,label\n"Oh" he said,1\nb,0\nlate, and wide,1\n', {}, "line 4: the row has 3 columns"),
        ('text,label\n"a \\"b\\" c, d",1\n', {}, "line 2: there is text between"),
        ('text,label\n"a \\"b\\" c",1\n', {}, 'seem to be escaped by backslashes (\\"); double them'),
    ],
)
def test_rows_with_a_wrong_number_of_cells_are_named(content: str, keys: dict, told: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content)
    said = refused(source=str(path), **keys)
    assert str(path) in said
    assert told in said


def test_blank_cells_are_unchanged(tmp_path: Path) -> None:
    """Blank lines are not rows, blank column names get pandas' names, and an index column has a name."""
    path = tmp_path / "a.csv"
    path.write_text("\n,text,label,\n0,a,1,\n\n  \n1,b,0,\n\n")
    assert read(source=str(path)) == [
        {"Unnamed: 0": 0, "text": "a", "label": 1, "Unnamed: 3": ""},
        {"Unnamed: 0": 1, "text": "b", "label": 0, "Unnamed: 3": ""},
    ]
    path.write_text(" text, label \na,1\n")
    assert read(source=str(path)) == [{" text": "a", " label ": 1}]


def test_an_index_of_pandas_is_no_column(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": list("abcd"), "label": [0, 1, 0, 1]})
    frame[frame.label == 1].to_parquet(tmp_path / "a.parquet")
    assert read(source=str(tmp_path / "a.parquet")) == [{"text": "b", "label": 1}, {"text": "d", "label": 1}]


def test_a_table_of_the_hub_whose_columns_shift_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    (here / "a.csv").write_text("text,label\nhello, you,1\nmy, dear,0\n")
    pandas.DataFrame({"text": ["a", "b"], "label": [0, 1]}, index=[3, 5]).to_parquet("a.parquet")
    load_dataset = datasets.load_dataset
    for name, kind in (("a.csv", "csv"), ("a.parquet", "parquet")):
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *_, kind=kind, name=name, **__: load_dataset(kind, data_files=name)
        )
        if kind == "csv":
            assert mentions(refused(source="someone/table"), "LS2253")
        else:
            assert read(source="someone/table") == [{"text": "a", "label": 0}, {"text": "b", "label": 1}]


def test_table_keys_are_refused_for_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\n')
    assert mentions(refused(source=str(tmp_path / "a.jsonl"), separator=";"), "LS2192", "data.separator")
    assert mentions(refused(source="builtin/emotion", quote="none"), "LS2243", "data.quote")
    for key, value in (("separator", "ab"), ("separator", '"'), ("quote", "`")):
        with pytest.raises(ValueError, match=key):
            DataSection.model_validate({"source": "a.csv", key: value})


def test_table_keys_are_in_the_cache_key(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data prepared with another reader is not used; tokens of equal rows are."""
    (here / "a.csv").write_text(many(40))
    (here / "a.jsonl").write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n' * 10)
    run = {"model": {"type": "gpt2"}, "tokenizer": {"train": "bpe"}, "launch": {"processes": 1}}
    keys: dict[str, list[str]] = {"a.csv": [], "a.jsonl": []}
    digest = prepare.digest
    for name, version in [(name, version) for name in keys for version in (1, 2)]:
        monkeypatch.setattr(file_formats, "VERSION", version)
        monkeypatch.setattr(
            prepare, "digest", lambda *values, name=name: keys[name].append(digest(*values)) or digest(*values)
        )
        made = Run.model_validate(run | {"data": {"source": name}})
        prepare.prepare(made, plugins.find("tasks", "classification"))  # type: ignore[type-abstract]
    assert len({*keys["a.jsonl"]}) < len({*keys["a.csv"]})


# -- init ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "separator", "how", "keys"),
    [
        ("a.csv", ",", {}, (None, None)),
        ("a.tsv", "\t", {}, (None, None)),
        ("a.csv", ";", {}, (";", None)),
        ("a.csv", "\t", {}, ("\t", None)),
        ("a.tsv", ",", {}, (",", None)),
        ("a.csv", "|", {"quoting": csv.QUOTE_ALL}, ("|", None)),
        ("a.csv", ",", {"quotechar": "'", "quoting": csv.QUOTE_ALL}, (None, "single")),
        ("a.csv", ";", {"quotechar": "'"}, (";", "single")),
    ],
)
def test_init_finds_separator_and_quotes(name: str, separator: str, how: dict, keys: tuple, here: Path) -> None:
    write(here / name, separator, rows=60, **how)
    run = written("--data", name, "--model", "scratch", "--task", "classification")
    assert (run.data.separator, run.data.quote) == keys
    assert run.task.options["label"] == "label"
    rows = source.load(run.data, 0).splits["train"].to_list()
    assert rows == judged(here / name, separator, quotechar=how.get("quotechar", '"'))


def test_init_names_the_row_that_does_not_fit(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "a.csv").write_text(many(3000).replace(",", ";") + "late; and wide;1\n")
    assert main(["init", "--yes", "--data", "a.csv"]) == 2
    assert mentions(" ".join(capfd.readouterr().err.split()), "LS2073", "a.csv", "line 3,002", "3", "2")


def test_first_row_of_a_headerless_table_may_repeat_a_value(here: Path) -> None:
    (here / "a.csv").write_text("".join(f"{i % 2};{i % 2};I feel so, so {i}\n" for i in range(60)))
    run = written("--data", "a.csv", "--model", "scratch", "data.separator=semicolon")
    assert (run.data.separator, len(run.data.columns or ())) == (";", 3)
    loaded = load("run.yaml", [])
    assert loaded.data.separator == ";"
    assert row_files.format_of(Path("a.csv")) in file_formats.SEPARATORS


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            "text;label\n" + "".join(f"words {i};{i % 2};\n" for i in range(60)),
            "a.csv, line 2: the row has 3 columns",
        ),
        (
            "text;label\n" + "".join(f"w{'; more' * (i % 2)};{i % 2}\n" for i in range(60)),
            "a.csv, line 3: the row has 3",
        ),
        ("text\n" + "Hello, world\n" * 60, "name a file with one text per line .txt"),
    ],
)
def test_init_does_not_read_a_table_as_one_column(
    content: str, told: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "a.csv").write_text(content)
    assert main(["init", "--yes", "--data", "a.csv"]) == 2
    assert told in " ".join(capfd.readouterr().err.split())


# -- everywhere that tables are read ---------------------------------------------------------------------------------


def test_predict_and_mixtures_read_tables_equally(here: Path) -> None:
    from lockstep.training import predicting

    write(here / "a.csv", ";")
    write(here / "b.tsv", "\t", quoting=csv.QUOTE_ALL)
    wanted = [(row["text"],) for row in judged(here / "a.csv", ";")]
    run = Run.model_validate({"model": {"type": "gpt2"}, "data": {"source": "a.csv", "separator": ";"}})
    assert predicting.rows_of(run.data, run.seed, "a.csv", predicting.Reads(["text"])) == wanted
    entries = [{"source": "a.csv", "separator": "semicolon"}, {"source": "b.tsv", "quote": "double"}]
    both = source.load(DataSection.model_validate({"sources": entries}), 0, columns={"task.text": "text"})
    mixed = both.splits["train"].to_list()
    assert [(row["text"],) for row in mixed] == wanted * 2
    (here / "test.jsonl").write_text('{"text": "a", "label": "joy", "note": "b"}\n')
    keys = {"train": "a.csv", "test": "test.jsonl", "separator": ";"}
    assert {s: len(d) for s, d in source.load(DataSection.model_validate(keys), 0).splits.items()} == {
        "train": 40,
        "test": 1,
    }
    with raises("LS1040", "data.stream", error=ValueError):
        DataSection.model_validate(keys | {"stream": True})


def test_one_file_is_quoted_and_another_is_not(tmp_path: Path) -> None:
    write(tmp_path / "a.tsv", "\t")
    (tmp_path / "b.tsv").write_text('text\tlabel\tnote\n"Oh" he said\tjoy\ta\n"no\tsad\tb\n')
    found = read(train=[str(tmp_path / "a.tsv"), str(tmp_path / "b.tsv")])
    assert found == judged(tmp_path / "a.tsv", "\t") + judged(tmp_path / "b.tsv", "\t", quoting=csv.QUOTE_NONE)
