"""Local files without a header, in one folder per label, or one file per language; and where paths are resolved."""

import gzip
from pathlib import Path

import pytest

from lockstep.config.run import DataSection, RunError, load
from lockstep.data import file_formats, source
from lockstep.data.row_files import is_language
from support.messages import mentions

MODEL = "model: {type: gpt2}\ntokenizer: {train: bpe}\n"


def read(**keys: object) -> dict[str, list[dict]]:
    found = source.load(DataSection(**keys), 0)  # type: ignore[arg-type]
    return {split: rows.to_list() for split, rows in found.splits.items()}


def refused(**keys: object) -> str:
    with pytest.raises(RunError) as caught:
        read(**keys)
    return str(caught.value)


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# -- files without a header ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", '"I, too",joy\r\nNA,fear\r\n'),
        ("a.tsv", "I, too\tjoy\nNA\tfear\n"),
        ("a.csv", '﻿"I, too",joy\nNA,fear'),
    ],
)
def test_data_columns_names_the_columns(name: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, text)
    rows = read(source=str(path), columns=["text", "label"])["train"]
    assert rows == [{"text": "I, too", "label": "joy"}, {"text": "NA", "label": "fear"}]


def test_columns_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "I,joy\nyou,fear\n")
    assert mentions(refused(source=str(path), columns=["a", "b", "c"]), "LS2073", "2", "data.columns", "3")
    assert mentions(refused(source=str(path), columns=["a", "a"]), "LS2190")
    write(tmp_path / "b.jsonl", '{"text": "a"}\n')
    assert mentions(refused(source=str(tmp_path / "b.jsonl"), columns=["text"]), "LS2191", "b.jsonl")
    assert mentions(refused(source="some/set", columns=["text"]), "LS2243", "data.columns")
    assert mentions(refused(source="builtin/emotion", layout="parallel"), "LS2243", "data.layout")
    assert mentions(refused(source="some/set", encoding="latin-1"), "LS2243", "data.encoding")


def test_hub_keys_are_refused_for_local_data(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", '{"text": "a"}\n')
    assert mentions(refused(source=str(path), revision="v2"), "LS2255", "data.revision", str(path))
    assert mentions(refused(train=str(path), config="small"), "LS2255", "data.config", "data.train")
    assert mentions(refused(source="builtin/emotion", revision="v2"), "LS2255", "data.revision", "builtin/emotion")


def test_number_sign_within_a_sentence_starts_no_comment(tmp_path: Path) -> None:
    """In CoNLL-U, comments come before sentences."""
    text = "# text = it costs # 5\nit PRP\ncosts VBZ\n# SYM\n5 CD\n\n# newpar\nthe DT\nend NN\n"
    rows = read(train=str(write(tmp_path / "a.conll", text)), layout="conll")["train"]
    assert [row["tokens"] for row in rows] == [["it", "costs", "#", "5"], ["the", "end"]]
    assert rows[0]["tags"] == ["PRP", "VBZ", "SYM", "CD"]
    tabs = "it\tPRP\n# misplaced\ncosts\tVBZ\n"
    assert read(train=str(write(tmp_path / "b.conll", tabs)), layout="conll")["train"][0]["tokens"] == ["it", "costs"]


# -- a folder for each label -----------------------------------------------------------------------------------------


def classes(root: Path, splits: tuple[str, ...] = ("train/", "test/")) -> Path:
    for split in splits:
        for label in ("pos", "neg"):
            for i in range(3):
                write(root / f"{split}{label}/{i}.txt", f"{split}{label} {i}\nand more\n")
    return root


def test_class_folders(tmp_path: Path) -> None:
    root = classes(tmp_path / "reviews")
    write(root / "train/urls.txt", "of all of them")  # next to the label folders: not one of the texts
    write(root / "train/.cache/x.txt", "hidden")
    found = read(source=str(root), layout="class_folders")
    assert [(row["text"], row["label"]) for row in found["train"]] == [
        (f"train/{label} {i}\nand more", label) for label in ("neg", "pos") for i in range(3)
    ]
    assert (set(found), len(found["test"])) == ({"train", "test"}, 6)
    alone = read(source=str(classes(tmp_path / "alone", ("",))), layout="class_folders")
    assert {row["label"] for row in alone["train"]} == {"pos", "neg"}
    two = read(train=[str(root / "train/pos"), str(root / "test/neg")], layout="class_folders")
    assert [row["label"] for row in two["train"]] == ["pos"] * 3 + ["neg"] * 3
    inside = read(source=str(root), train="test", layout="class_folders")
    assert inside["train"] == found["test"]


def test_class_folders_that_are_not_there(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "text\n")
    assert mentions(refused(source=str(tmp_path / "a.csv"), layout="class_folders"), "LS2200")
    assert mentions(refused(source=str(tmp_path), layout="class_folders"), "LS2201")
    assert mentions(refused(train="none", layout="class_folders"), "LS2203")
    write(tmp_path / "pos/1.txt", b"caf\xe9")
    assert mentions(refused(source=str(tmp_path), layout="class_folders"), "LS2065", "1.txt", "UTF-8")


# -- a file for each language ----------------------------------------------------------------------------------------


def test_parallel_files(tmp_path: Path) -> None:
    write(tmp_path / "train.en", "one\n\nthree\n")
    write(tmp_path / "train.de", "eins\n\ndrei")
    write(tmp_path / "val.en.gz", gzip.compress(b"\xef\xbb\xbfone\r\n"))
    write(tmp_path / "val.de.txt", "eins\n")
    write(tmp_path / "README.md", "# texts\n")
    for test, number in (("test_a", "one"), ("test_b", "two")):
        for language in ("en", "de"):
            write(tmp_path / f"{test}.{language}", f"{number} {language}\n")
    found = read(source=str(tmp_path), layout="parallel")
    assert found["train"] == [{"de": "eins", "en": "one"}, {"de": "", "en": ""}, {"de": "drei", "en": "three"}]
    assert found["validation"] == [{"de": "eins", "en": "one"}]
    assert found["test"] == [{"de": "one de", "en": "one en"}, {"de": "two de", "en": "two en"}]
    named = read(train=[str(tmp_path / "val.*")], layout="parallel")
    assert named["train"] == found["validation"]


def test_parallel_files_that_do_not_fit(tmp_path: Path) -> None:
    english = write(tmp_path / "train.en", "one\ntwo\n")
    assert mentions(refused(source=str(tmp_path), layout="parallel"), "LS2206")
    assert mentions(refused(train=str(english), layout="parallel"), "LS2209")
    write(tmp_path / "train.de", "eins\n")
    said = refused(source=str(tmp_path), layout="parallel")
    assert mentions(said, "LS2210", "train.de", "1")
    assert mentions(said, "LS2210", "train.en", "2")
    write(tmp_path / "train.de.gz", gzip.compress(b"eins\nzwei\n"))
    assert mentions(refused(source=str(tmp_path), layout="parallel"), "LS2208")
    (tmp_path / "train.de").unlink()
    write(tmp_path / "train.de.gz", gzip.compress(b"eins\nzwei\n")[:-12])
    assert mentions(refused(source=str(tmp_path), layout="parallel"), "LS2062")
    write(tmp_path / "train.de.gz", gzip.compress(b"caf\xe9\n"))
    assert mentions(refused(source=str(tmp_path), layout="parallel"), "LS2065", "UTF-8", "1")


def test_a_file_that_would_fill_the_disk_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_formats, "LARGE", 2**20)
    monkeypatch.setattr(file_formats, "MOST", 100)
    for language in ("en", "de"):
        write(tmp_path / f"train.{language}.gz", gzip.compress(b"\n" * 2**23))
    assert mentions(refused(source=str(tmp_path), layout="parallel"), "LS2060")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("en", True), ("de_DE", True), ("eng_Latn", True), ("md", False), ("py", False), ("label", False)],
)
def test_names_of_languages(name: str, wanted: bool) -> None:
    assert is_language(name) is wanted


# -- paths -----------------------------------------------------------------------------------------------------------


def test_paths_beside_the_run_file_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, elsewhere = write(tmp_path / "job/run.yaml", f"data: {{source: texts}}\n{MODEL}"), tmp_path / "elsewhere"
    write(tmp_path / "job/texts/train.jsonl", '{"text": "a"}\n')
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("job/run.yaml", []).data.source == "job/texts"
    monkeypatch.chdir(elsewhere)
    assert load(run, []).data.source == str(tmp_path / "job/texts")
    assert load("../job/run.yaml", []).data.source == "../job/texts"
    short = write(tmp_path / "job/short.yaml", f"data: texts\n{MODEL}")
    assert load(short, []).data.source == str(tmp_path / "job/texts")
    # a path on the command line is relative to the working directory
    assert load(run, ["data.source=texts"]).data.source == "texts"
    write(elsewhere / "texts/train.jsonl", '{"text": "b"}\n')
    assert load("../job/run.yaml", []).data.source == "../job/texts"
    monkeypatch.chdir(tmp_path / "job")
    assert load("run.yaml", []).data.source == "texts"


def test_other_names_are_unchanged(here: Path) -> None:
    write(here / "job/train/x.txt", "")
    write(here / "job/a-1.csv", "")
    run = write(here / "job/run.yaml", f"data: {{source: some/set, train: train}}\n{MODEL}")
    assert (load(run, []).data.source, load(run, []).data.train) == ("some/set", "train")
    run = write(here / "job/run.yaml", f"data: {{train: ['a-*.csv', b.csv]}}\n{MODEL}")
    assert load("job/run.yaml", []).data.train == ["job/a-*.csv", "b.csv"]


def test_paths_of_a_finished_run_are_not_relative_to_its_folder(here: Path) -> None:
    write(here / "out/export/train.jsonl", "{}")
    text = f"data: {{source: export}}\noutput: out\n{MODEL}"
    write(here / "out/run.yaml", text)
    assert load("out/run.yaml", []).data.source == "export"
    write(here / "out/other.yaml", text.replace("output: out\n", ""))
    assert load("out/other.yaml", []).data.source == "out/export"


# -- links -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of this machine that must not be read through a data folder."""
    write(tmp_path / "home/private/key.txt", "a secret")
    return tmp_path / "home/private"


@pytest.mark.parametrize("link", ["a file", "a folder", "a folder of texts in another link"])
def test_links_that_lead_out_of_class_folders_are_refused(link: str, secret: Path, tmp_path: Path) -> None:
    root = classes(tmp_path / "reviews", ("train/",))
    if link == "a file":
        (root / "train/pos/9.txt").symlink_to(secret / "key.txt")
    elif link == "a folder":
        (root / "train/zzz").symlink_to(secret)
    else:
        (tmp_path / "hop").symlink_to(secret)
        (root / "train/zzz").symlink_to(tmp_path / "hop")
    said = refused(source=str(root), layout="class_folders")
    assert said.startswith(f"data.train: {root}/train/")
    assert mentions(said, "LS2240", str(secret), "/key.txt")
    assert mentions(said, "LS2240")
    texts = [row["text"] for row in read(source=str(root), layout="class_folders", follow_links=True)["train"]]
    assert "a secret" in texts


def test_links_that_lead_out_of_other_folders_are_refused(secret: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    write(secret / "rows.jsonl", '{"text": "a secret", "label": 1}\n')
    (root / "train.jsonl").symlink_to(secret / "rows.jsonl")
    assert mentions(refused(source=str(root)), "LS2240")
    assert mentions(refused(train=f"{root}/*.jsonl"), "LS2240")
    assert mentions(refused(sources=[{"source": str(root)}, {"source": "builtin/emotion"}]), "LS2240")
    for side in ("en", "de"):
        write(secret / f"texts.{side}", "one\n")
        (root / f"train.{side}").symlink_to(secret / f"texts.{side}")
    assert mentions(refused(source=str(root), layout="parallel"), "LS2240")


def test_links_that_a_run_file_names_or_that_stay_inside_are_followed(secret: Path, tmp_path: Path) -> None:
    """A folder of the Hub's cache holds links into the folder next to it."""
    write(secret / "rows.jsonl", '{"text": "mine", "label": 1}\n')
    (tmp_path / "mine.jsonl").symlink_to(secret / "rows.jsonl")
    assert read(train=str(tmp_path / "mine.jsonl"))["train"] == [{"text": "mine", "label": 1}]
    (tmp_path / "folder").symlink_to(classes(tmp_path / "reviews", ("train/",)))
    (tmp_path / "reviews/train/pos/9.txt").symlink_to("../neg/1.txt")
    assert read(source=str(tmp_path / "folder"), layout="class_folders")["train"]
    cached = tmp_path / "datasets--a--b"
    write(cached / "blobs/0123", '{"text": "cached", "label": 1}\n')
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "snapshots/abc/train.jsonl").symlink_to("../../blobs/0123")
    assert read(source=str(cached / "snapshots/abc"))["train"] == [{"text": "cached", "label": 1}]
