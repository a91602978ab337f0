"""Texts or images in files of their own: a folder for each label, or a file for each language.

In: `data` of a run with `layout: class_folders` (train/pos/1.txt, train/cat/1.jpg) or `layout: parallel` (train.en and
train.de); files of texts may be compressed. Out: the files of each split, and what they hold as a `datasets.Dataset`:
columns text and label, image and label, or one column a language.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection
from lockstep.data import compressed, readable

if TYPE_CHECKING:
    from datasets import Dataset

# The codes of ISO 639-1, and those of three letters that corpora are called by most.
_CODES = (
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo "
    "es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka "
    "kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng "
    "nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su "
    "sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu "
    "eng deu ger fra fre spa ita por rus zho chi jpn kor ara hin ben ces cze pol nld dut swe dan fin ell gre tur ukr "
    "vie ind ron rum hun"
)
_LANGUAGES = frozenset(_CODES.split())
SIDES = (("source", "target"), ("src", "tgt"), ("src", "trg"))  # what the two sides are called, besides languages


def is_language(name: str) -> bool:
    """Whether a column or an ending stands for a language: en, de_DE, pt-BR, eng_Latn."""
    code = re.match(r"[A-Za-z]+", name)
    return (
        bool(re.fullmatch(r"[A-Za-z]{2,3}([-_][A-Za-z]{2,4})?", name))
        and code is not None
        and code.group().lower() in _LANGUAGES
    )


IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

# -- a folder for each label -----------------------------------------------------------------------------------------


def classes_in(folder: Path) -> list[Path]:
    """The folders in a folder that hold texts or images, in order of their names, which are the labels."""
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".") and _texts_in(f))


def _texts_in(folder: Path) -> list[Path]:
    """Files that end in .txt, or whose names have no ending, compressed or not; and images."""
    return sorted(
        f
        for f in folder.iterdir()
        if (compressed.plain(f).suffix in (".txt", "") or is_image(f)) and not f.name.startswith(".") and f.is_file()
    )


def is_image(file: Path) -> bool:
    """Whether the name of a file says that it is an image."""
    return file.suffix.lower() in IMAGES


def class_files(data: DataSection, usual: dict[str, tuple[str, ...]]) -> dict[str, list[Path]]:
    """Split -> its files, those of a label together. `usual`: what splits are called. Errors: `RunError`."""
    given = {split: getattr(data, split) for split in usual if getattr(data, split) is not None}
    found: dict[str, list[Path]] = {}
    if data.source is not None:
        root = Path(data.source).expanduser()
        if not root.is_dir():
            raise RunError(f"data.source: {root} is no folder; layout: class_folders wants one with a folder a label")
        named = {s: next((root / w for w in words if classes_in(root / w)), None) for s, words in usual.items()}
        found = {split: _of_classes(classes_in(folder)) for split, folder in named.items() if folder is not None}
        if not found and "train" not in given:
            found = {"train": _of_classes(classes_in(root))}
            if not found["train"]:
                raise RunError(
                    f"data.source: no folder in {root} holds texts or images; wanted are files like "
                    "train/LABEL/1.txt or LABEL/1.jpg"
                )
    for split, value in given.items():
        folders = [f for text in ([value] if isinstance(value, str) else value) for f in _folders(text, split, data)]
        found[split] = [file for f in folders for file in (_texts_in(f) or _of_classes(classes_in(f)))]
        if not found[split]:
            raise RunError(f"data.{split}: {value} holds no texts or images in folders called by their label")
    return found


def _folders(text: str, split: str, data: DataSection) -> list[Path]:
    root = Path(data.source or "").expanduser()
    for path in (Path(text).expanduser(), root / text):
        if found := sorted(Path(f) for f in glob.glob(str(path)) if Path(f).is_dir()):
            return found
    raise RunError(f"data.{split}: no such folder: {text}")


def _of_classes(folders: Iterable[Path]) -> list[Path]:
    return [file for folder in folders for file in _texts_in(folder)]


def read_classes(files: list[Path], key: str, data: DataSection) -> Dataset:
    """Columns text and label, or image (the file as bytes) and label. Errors: `RunError`."""
    import datasets

    encoding, images = data.encoding, [is_image(file) for file in files]
    if all(images):
        rows = {"image": [file.read_bytes() for file in files], "label": [file.parent.name for file in files]}
        kinds = {"image": datasets.Value("binary"), "label": datasets.Value("string")}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    if any(images):
        text, image = files[images.index(False)], files[images.index(True)]
        raise RunError(f"{key}: {text} is a text and {image} an image; a data set holds texts or images, and not both")

    for file in files:
        readable.check(file, key, encoding)
    rows = {"text": [readable.text_of(f, encoding).strip() for f in files], "label": [f.parent.name for f in files]}
    return datasets.Dataset.from_dict(rows)


# -- a file for each language ----------------------------------------------------------------------------------------


def named(file: Path) -> tuple[str, str]:
    """What a file of lines is called without its ending, and the ending that says which side it is: train.en.gz is
    (train, en), and so is train.en.txt."""
    name = compressed.plain(file).name
    if name.count(".") > 1:
        name = name.removesuffix(".txt")
    stem, _, side = name.rpartition(".")
    return stem, side


def parallel_in(folder: Path) -> dict[str, list[Path]]:
    """What files are called -> the files of it, at least two, whose endings are languages or sides."""
    sides = {side for pair in SIDES for side in pair}
    files = sorted(f for f in folder.iterdir() if f.is_file()) if folder.is_dir() else []
    found: dict[str, list[Path]] = {}
    for file in files:
        stem, side = named(file)
        if stem and (side in sides or is_language(side)):
            found.setdefault(stem, []).append(file)
    return {stem: files for stem, files in found.items() if len({named(f)[1] for f in files}) > 1}


def parallel_files(data: DataSection, usual: dict[str, tuple[str, ...]]) -> dict[str, list[Path]]:
    """Split -> its files. `usual`: what splits are called. Errors: `RunError`."""
    given = {split: getattr(data, split) for split in usual if getattr(data, split) is not None}
    found: dict[str, list[Path]] = {}
    if data.source is not None:
        root = Path(data.source).expanduser()
        if not root.is_dir():
            raise RunError(f"data.source: {root} is no folder; name files in data.train: [train.en, train.de]")
        found = {split: files for split, words in usual.items() if (files := _of_split(root, words))}
        if not found and "train" not in given:
            found = {"train": list(itertools.chain(*parallel_in(root).values()))}
            if not found["train"]:
                raise RunError(
                    f"data.source: {root} holds no two files that differ in their language alone, such as train.en and "
                    "train.de; name them in data.train"
                )
    for split, value in given.items():
        found[split] = []
        for text in [value] if isinstance(value, str) else value:
            paths = [Path(text).expanduser(), Path(data.source or "").expanduser() / text]
            there = next((f for p in paths if (f := sorted(Path(g) for g in glob.glob(str(p))))), None)
            if there is None:
                raise RunError(f"data.{split}: no such file: {text}")
            found[split] += there
    return found


def _of_split(root: Path, words: tuple[str, ...]) -> list[Path]:
    stems = parallel_in(root)
    for word in words:
        inside = parallel_in(root / word)
        for wanted in (
            stems.get(word, []),
            [file for stem, files in stems.items() if re.match(rf"{word}[-_.]", stem) for file in files],
            [file for files in inside.values() for file in files],
        ):
            if wanted:
                return wanted
    return []


def read_parallel(files: list[Path], key: str, data: DataSection) -> Dataset:
    """A column for each side, in alphabetical order. Errors: `RunError`, among them for files of unlike length."""
    import datasets

    columns: dict[str, list[str]] = {}
    together: dict[Path, dict[str, Path]] = {}
    for file in files:
        stem, side = named(file)
        group = together.setdefault(file.parent / stem, {})
        if side in group:
            raise RunError(f"{key}: {group[side]} and {file} are the same side ({side}); leave one out")
        group[side] = file
    sides = sorted({side for group in together.values() for side in group})
    for called, group in together.items():
        if sorted(group) != sides or len(sides) < 2:
            raise RunError(
                f"{key}: {called} has {' and '.join(sorted(group))}; wanted are files of the same name for "
                f"{' and '.join(sides) if len(sides) > 1 else 'two sides'}, such as train.en and train.de"
            )
        lines = {side: _lines(file, key, data.encoding) for side, file in sorted(group.items())}
        counts = {side: len(found) for side, found in lines.items()}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{group[side]} has {count:,} lines" for side, count in counts.items())
            raise RunError(f"{key}: {told}: line n of one has to be the translation of line n of the other")
        for side, found in lines.items():
            columns.setdefault(side, []).extend(found)
    return datasets.Dataset.from_dict(columns)


def _lines(file: Path, key: str, encoding: str) -> list[str]:
    """All lines, blank ones too: they keep the files beside each other."""
    readable.check(file, key, encoding)
    lines = readable.text_of(file, encoding).split("\n")
    return lines[:-1] if lines[-1] == "" else lines
