"""Assumptions about Python's, pyarrow's and Pillow's readers of files."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.assumed import rests_on_it

TEXT = b"".join(b"%d\n" % n for n in range(3000))
PACKED: dict[str, tuple[Callable[[bytes], bytes], Callable[[Any], Any]]] = {
    "gzip": (gzip.compress, gzip.open),
    "bzip2": (bz2.compress, bz2.open),
    "xz": (lzma.compress, lzma.open),
    "zstd": (
        lambda data: bytes(pa.compress(data, "zstd", asbytes=True)),
        lambda file: pa.CompressedInputStream(file, "zstd"),
    ),
}
RAISES = (OSError, EOFError, lzma.LZMAError)


@pytest.mark.parametrize("kind", PACKED)
@rests_on_it("src/lockstep/data/file_formats.py", "src/lockstep/data/row_reader.py")
def test_concatenated_streams_are_read_and_truncated_ones_raise(kind: str) -> None:
    """Concatenated compressed streams in one file are read as one text. A file that ends within a stream raises."""
    pack, unpack = PACKED[kind]
    assert unpack(io.BytesIO(pack(TEXT[:700]) + pack(TEXT[700:]))).read() == TEXT
    for whole in (pack(TEXT), pack(TEXT[:700]) + pack(TEXT[700:])):
        with pytest.raises(RAISES):
            unpack(io.BytesIO(whole[:-9])).read()


@pytest.mark.parametrize("kind", PACKED)
@rests_on_it("src/lockstep/data/file_formats.py")
def test_bzip2_and_xz_ignore_trailing_bytes(kind: str) -> None:
    """Trailing bytes that do not begin another stream raise for gzip and zstd. Python's readers of bzip2 and xz
    silently ignore them, so lockstep has its own."""
    pack, unpack = PACKED[kind]
    damaged = pack(TEXT[:700]) + b"damaged" + pack(TEXT[700:])
    if kind in ("bzip2", "xz"):
        assert unpack(io.BytesIO(damaged)).read() == TEXT[:700]
        return
    with pytest.raises(RAISES):
        unpack(io.BytesIO(damaged)).read()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@rests_on_it("src/lockstep/data/row_reader.py")
def test_a_member_can_be_read_from_its_offset(form: int) -> None:
    """A tar member's offset is that of its first header, also with long names; after the last member, the stream's
    offset is at the zero blocks that end the archive."""
    names = ["a.txt", "x" * (90 if form == tarfile.USTAR_FORMAT else 180), "é.txt", "b.txt"]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=form) as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = 600, 1.5 if form == tarfile.PAX_FORMAT else 1
            archive.addfile(member, io.BytesIO(name.encode()[:1] * 600))
    data = whole.getvalue()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
        places = [(member.name, member.offset) for member in archive]
        end = archive.offset
    assert [name for name, _ in places] == names
    for name, place in places:
        with tarfile.open(fileobj=io.BytesIO(data[place:]), mode="r:") as archive:
            assert next(iter(archive)).name == name
    assert not any(data[end:])
    assert any(data[end - 1024 : end])


@rests_on_it("src/lockstep/data/row_reader.py", "src/lockstep/data/file_formats.py")
def test_rows_of_a_row_group_come_in_order_and_nested_columns_whole() -> None:
    """iter_batches of one row group yields its rows in order, at most batch_size at a time, and all fields of a
    requested struct."""
    file = io.BytesIO()
    table = pa.table({"n": range(10), "s": [{"a": n, "b": -n} for n in range(10)], "t": ["x"] * 10})
    pq.write_table(table, file, row_group_size=7)
    batches = list(pq.ParquetFile(file).iter_batches(3, [0], ["n", "s"]))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [n for batch in batches for n in batch["n"].to_pylist()] == list(range(7))
    assert batches[1]["s"].to_pylist()[0] == {"a": 3, "b": -3}
    assert batches[0].schema.names == ["n", "s"]


@rests_on_it("src/lockstep/data/row_reader.py")
def test_numbers_and_repeated_keys_in_pythons_json() -> None:
    """json reads and writes floats with all digits and integers of any size, accepts NaN, raises ValueError for
    integers of 5,000 digits, and keeps the last value of a repeated key."""
    for value in (1 / 3, 5e-324, 1.7976931348623157e308, 2**70):
        assert json.loads(json.dumps(value)) == value
    assert json.loads("NaN") != json.loads("NaN")
    assert json.loads('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="digits"):
        json.loads("1" * 5000)


@rests_on_it("src/lockstep/data/row_reader.py", "src/lockstep/data/file_formats.py")
def test_white_space_of_str_strip() -> None:
    """str.strip removes four ASCII separators that bytes.strip keeps; splitlines splits at more than line feeds."""
    assert {n for n in range(128) if not chr(n).strip()} == {*b" \t\r\n\v\f\x1c\x1d\x1e\x1f"}
    assert {n for n in range(128) if not bytes([n]).strip()} == {*b" \t\r\n\v\f"}
    assert len("a\u2028b\x1cc\x85d".splitlines()) == 4


@rests_on_it("src/lockstep/data/file_formats.py")
def test_strict_csv_raises_for_text_after_a_quote() -> None:
    """csv.reader with strict raises for text after a closing quote and for an unclosed quote; without strict it reads
    both."""
    for line in ('"a"b,c\n', '"a,c\n'):
        assert list(csv.reader([line]))
        with pytest.raises(csv.Error):
            list(csv.reader([line], strict=True))


@rests_on_it("src/lockstep/tasks/image_classification.py")
def test_images_of_16_bits_are_clipped_to_8() -> None:
    """Pillow's convert("RGB") clips 16-bit images at 255 instead of scaling them, and drops an alpha channel."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.array([[0, 255, 256, 65535]], np.uint16)).save(file, "PNG")
    image = Image.open(file)
    assert image.mode[0] == "I"
    assert np.asarray(image.convert("RGB"))[..., 0].tolist() == [[0, 255, 255, 255]]
    assert np.asarray(Image.new("RGBA", (1, 1), (9, 8, 7, 0)).convert("RGB")).tolist() == [[[9, 8, 7]]]


@rests_on_it("src/lockstep/tasks/image_classification.py", "src/lockstep/plain/examples.py")
def test_exif_orientation_is_not_applied_on_open() -> None:
    """Image.open does not apply the EXIF orientation; exif_transpose rotates the pixels by it."""
    from PIL import Image, ImageOps

    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.new("RGB", (4, 2)).save(file, "PNG", exif=exif)
    image = Image.open(file)
    assert image.size == (4, 2)
    assert ImageOps.exif_transpose(image).size == (2, 4)


@rests_on_it("src/lockstep/tasks/image_classification.py", "src/lockstep/plain/examples.py")
def test_image_processing_can_be_split_after_resizing() -> None:
    """The Pillow image processor resizes to uint8. Rescaling and normalizing that result later gives the same bits as
    one call, for one image and for a batch. transformers calls this backend pil."""
    import transformers
    from PIL import Image
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names: Any = IMAGE_PROCESSOR_MAPPING_NAMES
    processor = getattr(transformers, names["vit"]["pil"])(size={"height": 8, "width": 8})
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 256, (h, 9, 3), np.uint8)) for h in (7, 30)]
    both = [processor(image, return_tensors="np")["pixel_values"][0] for image in images]
    halves = [
        processor([image], return_tensors="np", do_rescale=False, do_normalize=False)["pixel_values"][0]
        for image in images
    ]
    assert {half.dtype.name for half in halves} == {"uint8"}
    left = processor(halves, return_tensors="np", input_data_format="channels_first", do_resize=False)["pixel_values"]
    assert all(np.array_equal(a, b) for a, b in zip(left, both, strict=True))


@rests_on_it("src/lockstep/tasks/image_classification.py")
def test_encoded_images_are_embedded_in_their_table(tmp_path: Any) -> None:
    """embed_table_storage embeds the file at an image's path, byte for byte, in an image column with decoding off."""
    import datasets
    from datasets.table import embed_table_storage
    from PIL import Image

    path = tmp_path / "a.png"
    Image.new("RGB", (2, 2)).save(path)
    rows = datasets.Dataset.from_dict({"image": [str(path)]}).cast_column("image", datasets.Image(decode=False))
    table = embed_table_storage(rows.with_format("arrow")[:])
    assert table.column("image").to_pylist()[0]["bytes"] == path.read_bytes()


@rests_on_it("src/lockstep/checkpoint/export.py")
def test_model_card_metadata_round_trips() -> None:
    """yaml_dump quotes strings that YAML would read as another type, such as "no", "1e3" and "2024-01-01". ModelCard
    reads them back, along with the results of a data set and the arguments of their metrics."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData
    from huggingface_hub.utils import yaml_dump

    texts = ["no", "1e3", "2024-01-01", "null", "0x10", "12:30:00", "~", "!x", "é"]
    common: dict[str, Any] = {"task_type": "t", "dataset_type": "no", "dataset_name": "2024-01-01", "metric_type": "f1"}
    results = [
        EvalResult(**common, metric_value=0.5, metric_name="Macro", metric_args={"average": "macro"}),
        EvalResult(**common, metric_value=0.25, metric_name="F1"),
    ]
    data = ModelCardData(license="mit", language=["no"], tags=texts, model_name="null", eval_results=results)
    read: Any = ModelCard(f"---\n{yaml_dump(data.to_dict(), sort_keys=False)}---\n\n# A\n").data
    assert (read.tags, read.language, read.model_name) == (texts, ["no"], "null")
    assert [(each.metric_value, each.metric_args, each.dataset_name) for each in read.eval_results] == [
        (0.5, {"average": "macro"}, "2024-01-01"),
        (0.25, None, "2024-01-01"),
    ]
