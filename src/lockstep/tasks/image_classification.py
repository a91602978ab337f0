"""Image classification with any model that `AutoModelForImageClassification` knows: ViT, ConvNeXT, ResNet and others.

In: images with one label each: a folder per label (`data.layout: class_folders`), or a column of images, as in parquet
files and Hub data sets. Out: losses from sums; single-label scores. The model's image processor resizes every image to
one size during preparation: the cache holds uint8 [C, H, W] of each. Needs the extra `lockstep-train[images]` (Pillow).
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from lockstep.config.run import RunError
from lockstep.config.sections import DataSection, ModelSection
from lockstep.data import arrow_cache, labels, raw_rows, row_files, source, splitting, token_checks, usable_rows
from lockstep.data.arrow_cache import VERSION, Columns, Prepared, content, digest
from lockstep.data.batch import IGNORED, MicroBatch
from lockstep.data.cache import cached, folder_of
from lockstep.data.hub import explained, model_folder
from lockstep.data.stream import names_of
from lockstep.tasks.classification import LabelTask
from lockstep.tasks.models import head_labels, heads
from lockstep.tasks.objectives.objective import LabelOptions
from lockstep.tasks.objectives.one_label import OneLabel
from lockstep_trace.coded import quantity

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import Tensor, nn

    from lockstep.tasks.models.model_configs import ModelChoice

_AS_IT_IS = {"do_resize": False, "do_center_crop": False}  # for images already resized
_UNUSED = ("max_length", "padding", "group_by_length", "stream_window")  # keys of `data`


class ImageClassificationOptions(LabelOptions):
    """The task's own keys in the run file."""

    image: str = Field("image", description="column of the image")
    label: str = Field("label", description="column of the label: integers, strings, or true and false")
    loss: Literal["cross_entropy", "focal"] | None = Field(None, description="training loss; default: cross_entropy")
    processor: dict[str, Any] = Field(
        default_factory=dict,
        description="entries of the image processor, such as size: {height: 64, width: 64}; default: the model's own",
    )
    multi_label: ClassVar[bool] = False
    regression: ClassVar[bool] = False

    @property
    def labels(self) -> dict[str, str]:
        """Key of the run file -> label column."""
        return {"task.label": self.label}


class ImageClassification(LabelTask):
    """One label per image."""

    Options = ImageClassificationOptions
    head = heads.IMAGE_CLASSIFICATION
    column_keys = ("image", "label")
    default_model = "google/vit-base-patch16-224-in21k"
    small_model = "vit"
    pipeline = "image-classification"
    display_keys = ("samples",)
    row_is_example = True
    not_streamed_reason = "it caches all images, resized to one size"

    @property
    def example_input(self) -> str:
        return "image.png"

    @property
    def usage(self) -> str:
        return f'{super().usage}\nask("image.png")'

    @property
    def padded_because(self) -> str | None:
        """None: images of one size need no padding."""
        return None

    def unsupported_keys(self) -> dict[str, str]:
        why = "it applies to texts, and the task image_classification reads images; remove it"
        keys = {f"data.{key}" for key in _UNUSED if key in self.run.data.changed_keys}
        if self.run.tokenizer.source is not None or self.run.tokenizer.train is not None:
            keys.add("tokenizer")
        return dict.fromkeys(sorted(keys), why)

    # -- before any process ------------------------------------------------------------------------------------------

    def prepare(self) -> Prepared:
        from lockstep.tasks.models import models

        if importlib.util.find_spec("PIL") is None:
            raise RunError(
                "LS3030", "task.name: image_classification needs Pillow: pip install 'lockstep-train[images]'"
            )
        options = self.options
        columns = {"task.image": options.image} | options.labels
        data = source.load(self.run.data, self.run.seed, columns=columns, kinds={options.label: "label"})
        splits = {}
        for split, rows in data.splits.items():
            if (
                split == "test"
                and self.run.data.test is None
                and labels.hidden(rows, options.label, data.splits["train"])
            ):
                continue  # hidden test labels, as in benchmarks
            splits[split] = _whole(rows, options, split, data.name, self.run.data.drop_missing)
        usable, drop = dict(splits), self.run.data.drop_unusable
        train = {"train": splits["train"]}
        codes = labels.codes_of(train if drop else splits, options.label, options.label_names, data.name)
        if drop:
            known = codes.place.keys().__contains__
            splits = {split: labels.known_rows(rows, [options.label], known) for split, rows in splits.items()}
        learned = splits
        ordered = head_labels.in_model_order(self.run.model, self.head, codes.names, codes.values)
        codes = codes.reordered(ordered.names, ordered.values)
        notes = (
            data.notes
            + ordered.notes
            + head_labels.problem_notes(self.run.model, self.head, OneLabel.problem, len(codes.names))
        )

        def cut(train: Dataset, share: float, seed: Any, key: str) -> tuple[Dataset, Dataset]:
            return OneLabel.cut(codes, train, share, seed, key)

        section, seed, columns = self.run.data, self.run.seed, ([options.image], [options.label])
        splits, facts = splitting.deduplicate_and_split(data, learned, section, seed, *columns, cut)
        facts |= raw_rows.fact(splits, [options.image, options.label, *data.columns], section.max_length, seed)
        facts = usable_rows.with_unusable(facts, usable, learned, data.name)
        counts = codes.counts(splits["train"])
        OneLabel(options, codes.names, counts, len(splits["train"]))  # refuses weights and thresholds of none of them
        models.check(self.model_choice, self.head)
        folder = _processor_folder(self.run.model, options)
        processor = load_processor(str(folder))
        shape = _shape(self.run.model, processor)
        files = {}
        for split, rows in splits.items():
            hashed = content(rows, [options.image, options.label])
            key = digest("images", VERSION, hashed, folder.name, options.image, options.label, codes.names)
            files[split] = _encode(rows, self.run.data, options, codes, processor, shape, split, key)
        notes += token_checks.pictures(Columns(files["train"]), "pixels", "train")
        facts |= {"source": data.name, "labels": codes.names, "label_values": codes.values, "of_label": counts}
        facts |= labels.alike(dict(zip(codes.names, counts, strict=True))) | {"shape": list(shape)}
        facts |= {"notes": notes} if notes else {}
        return Prepared(digest(names_of(files), codes.names, folder.name), files, str(folder), facts)

    @classmethod
    def has_unusable_rows(cls, options: ImageClassificationOptions) -> bool:
        return True

    def check_prepared(self, prepared: Prepared) -> None:
        from lockstep.tasks.models import models

        facts = prepared.facts
        models.check_arithmetic(self.run.model, self.head, self.run.precision, self.run.strategy.exact)
        _check_outputs(self.model_choice, self.head, facts["shape"], facts["labels"])
        self.refuse_lone_examples(
            sum(facts["of_label"]), lambda: _trained_on_one(self.model_choice, self.head, facts["shape"])
        )

    # -- in every process --------------------------------------------------------------------------------------------

    def open(self, prepared: Prepared) -> None:
        super().open(prepared)
        facts = self.prepared.facts
        self.labels: list[str] = facts["labels"]
        self.processor = load_processor(self.prepared.tokenizer)
        self.set_objective(OneLabel(self.options, self.labels, facts["of_label"], len(self.splits["train"])))

    @property
    def model_choice(self) -> ModelChoice:
        from lockstep.tasks.models.model_configs import ModelChoice

        return ModelChoice.of(self.run)

    @property
    def config_entries(self) -> dict[str, Any]:
        from lockstep.tasks.models import models

        return models.named(self.labels) | {"problem_type": self.objective.problem}

    def model(self, empty: bool = False) -> nn.Module:
        from lockstep.tasks.models import models

        return models.build(self.model_choice, self.head, None, empty, **self.config_entries)

    def collate(self, columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        """`pixel_values` [B, C, H, W], rescaled and normalized by the processor: float32, or bfloat16 if the weights
        are.

        For no rows, two images, which batch normalization needs."""
        import torch

        blank = len(rows) == 0
        rows = np.zeros(2, dtype=np.int64) if blank else rows
        ragged, shape = columns.ragged("pixels"), tuple(self.prepared.facts["shape"])
        images = [np.array(ragged.row(int(row))).reshape(shape) for row in rows]
        pixels = torch.from_numpy(normalized(self.processor, images))
        inputs = {"pixel_values": pixels.bfloat16() if self.run.model.trained_in_bfloat16 else pixels}
        targets = torch.from_numpy(self.objective.targets(columns, rows))
        return MicroBatch(index, inputs, torch.full_like(targets, IGNORED) if blank else targets)

    def inputs_shown(self, rows: np.ndarray, batch: MicroBatch) -> dict[str, list[str]]:
        return {"image": [f"validation, row {row}" for row in rows]}

    def sample_input(self, sample: Mapping[str, str]) -> str:
        """Empty: samples are rows of the data set, but `predict` reads files."""
        return ""

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        from lockstep.tasks.models import models

        model: Any = models.to_fill(self.run.model, self.model)
        self.keep_threshold(model.config)
        models.save(model, weights, None, folder, self.run.model)
        self.processor.save_pretrained(folder)

    # -- answers -----------------------------------------------------------------------------------------------------

    def input_columns(self) -> tuple[str, ...]:
        return ("image",)

    def input_rows(self, word: str) -> list[tuple[str, ...]]:
        """The image at a path, or all images in a folder, sorted by path."""
        path = Path(word)
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in row_files.IMAGES]
            if not files:
                raise RunError("LS3031", f"predict: {word} contains no images ({', '.join(row_files.IMAGES)})")
            return [(str(file),) for file in files]
        return [(word,)]

    def predict(self, folder: Path, rows: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield `label`, its `score`, and the `scores` of all labels, which sum to 1. A row is the path of an image."""
        import torch

        from lockstep.tasks.models import inference, models

        model, processor = models.exported_model(self.head, folder, self.run.model), load_processor(str(folder))
        names = [model.config.id2label[code] for code in range(model.config.num_labels)]
        options = self.options
        objective = OneLabel(options, names, [], 0)
        threshold = self.threshold_of(objective, folder)

        def answer(rows: list[Sequence[str]]) -> list[dict[str, Any]]:
            images = [resized(processor, _opened(_read(row[0]), row[0])) for row in rows]
            pixels = torch.from_numpy(normalized(processor, images)).to(model.dtype)
            logits = model(pixel_values=pixels).logits.float()  # [B, C]
            return objective.answers(logits, threshold)

        return inference.answers(rows, answer)

    @classmethod
    def format_prediction(cls, row: Sequence[str], answer: Mapping[str, Any]) -> str:
        return f"{OneLabel.format_answer(answer)}  {row[0]}"


# -- rows ------------------------------------------------------------------------------------------------------------


def _whole(rows: Dataset, options: ImageClassificationOptions, split: str, name: str, drop: bool) -> Dataset:
    """Rows with an image and a label; images are kept as encoded bytes. Errors: `RunError`."""
    import datasets
    from datasets.table import embed_table_storage

    columns = {"task.image": options.image} | options.labels
    usable_rows.check_columns(rows, columns, split, name)
    feature: Any = rows.features[options.image]
    fields = feature.keys() if isinstance(feature, dict) else ()
    if isinstance(feature, datasets.Image) or {*fields} == {"bytes", "path"}:
        read = {options.image, options.label, source.SOURCE}
        rows = rows.select_columns([column for column in rows.column_names if column in read])
        rows = rows.cast_column(options.image, datasets.Image(decode=False))
        pairs = rows.with_format("arrow").map(embed_table_storage, batched=True, batch_size=100, keep_in_memory=True)
        files = pa.chunked_array(
            [chunk.field("bytes") for chunk in pairs.data.column(options.image).chunks], pa.binary()
        )
        rows = datasets.concatenate_datasets(
            [rows.remove_columns(options.image), datasets.Dataset(pa.table({options.image: files}))], axis=1
        )
    elif getattr(feature, "dtype", "") not in ("binary", "large_binary"):
        kind = getattr(feature, "dtype", None) or type(feature).__name__
        raise RunError(
            "LS3032",
            f"task.image: column {options.image!r} of the {split} split of {name} holds {kind}; expected "
            "images: a column of datasets' Image feature, of bytes, or folders of images (data.layout: "
            "class_folders)",
        )
    rows = usable_rows.complete(rows, columns, split, name, drop)
    return labels.readable(rows, options.label)


def _read(path: str) -> bytes:
    """Read a file. Errors: `RunError`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RunError("LS3033", f"predict: {path} cannot be read: {error.strerror}") from error


def _file_name(file: bytes, data: DataSection | None) -> str:
    """Name the file in folders of classes that has these bytes; empty if there is none."""
    if data is None or data.layout != "class_folders" or data.source is None:
        return ""
    files = (path for path in sorted(Path(data.source).expanduser().rglob("*")) if path.is_file())
    path = next((path for path in files if path.stat().st_size == len(file) and path.read_bytes() == file), None)
    return "" if path is None else f"{path}, "


def _opened(file: bytes, where: str, data: DataSection | None = None) -> Any:
    """Open an image with Pillow and convert it to RGB. Errors: `RunError`, which names `where` and the file."""
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
        converted = image.convert("RGB")
    except Exception as error:  # Pillow raises many kinds of errors for other files
        reason = " ".join(str(error).split()).partition(" <")[0]
        where = _file_name(file, data) + where
        raise RunError("LS3034", f"task.image: {where} is not an image that Pillow can read ({reason})") from error
    if image.mode[0] in "IF" and not np.array_equal(np.asarray(image), np.asarray(converted)[..., 0]):
        where = _file_name(file, data) + where
        raise RunError(
            "LS3044",
            f"task.image: {where} has numbers that do not fit into 8 bits (mode {image.mode} of Pillow, which would "
            "clip them); scale its numbers to 0..255",
        )
    return converted


# -- the image processor ---------------------------------------------------------------------------------------------


def load_processor(folder: str) -> Any:
    """Load a folder's image processor with the Pillow backend, so that results do not depend on whether torchvision is
    installed."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(folder, backend="pil")


def _processor_folder(section: ModelSection, options: ImageClassificationOptions) -> Path:
    """Cache folder with the image processor of the model, or of its family, and the run file's entries. Errors:
    `RunError`."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    from lockstep.tasks.models import model_configs

    if section.source is not None:
        folder = model_folder(section.source)
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(
                str(Path(folder).expanduser()) if Path(folder).expanduser().is_dir() else folder,
                revision=section.revision,
                backend="pil",
            )
        except Exception as error:  # not on the Hub, no network, no such file: user errors
            raise RunError(
                "LS3035", f"model.source: {folder} has no image processor: {explained(error, section.revision)}"
            ) from error
    else:
        config = model_configs.load_config(section)
        names: Any = IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type, {})
        if (name := names.get("pil")) is None:
            raise RunError(
                "LS3036",
                f"model.type: transformers has no image processor based on Pillow for {config.model_type}; "
                "choose another model.type",
            )
        processor = getattr(transformers, name)()
        size = getattr(config, "image_size", None)
        if isinstance(size, int) and "size" not in options.processor:
            processor.size = type(processor)(size={"height": size, "width": size}).size
    entries = processor.to_dict()
    if unknown := sorted(set(options.processor) - set(entries)):
        raise RunError(
            "LS3037",
            f"task.processor: {type(processor).__name__} has no entry {unknown[0]!r}; it has "
            f"{', '.join(sorted(entries))}",
        )
    try:
        processor = type(processor).from_dict(entries | options.processor)
    except Exception as error:
        raise RunError("LS3038", f"task.processor: {' '.join(str(error).split())[:300]}") from error
    key = digest("image processor", 1, json.loads(processor.to_json_string()), type(processor).__name__)
    return cached(folder_of("tokenizers") / key, lambda aside: processor.save_pretrained(aside))


def resized(processor: Any, image: Any) -> np.ndarray:
    """Resize an image with the processor, without rescaling values: uint8 [C, H, W]."""
    pixels = processor([image], return_tensors="np", do_rescale=False, do_normalize=False)["pixel_values"][0]
    return np.asarray(pixels)


def normalized(processor: Any, images: Sequence[np.ndarray]) -> np.ndarray:
    """Rescale and normalize images of one size with the processor: float32 [B, C, H, W]."""
    known = {name: value for name, value in _AS_IT_IS.items() if hasattr(processor, name)}
    pixels = processor(list(images), return_tensors="np", input_data_format="channels_first", **known)["pixel_values"]
    return np.ascontiguousarray(pixels, dtype=np.float32)


def _check_outputs(choice: ModelChoice, head: str, shape: Sequence[int], labels: list[str]) -> None:
    """Run one image through the model on the meta device. Errors: `RunError` if it returns no logits of the labels."""
    import torch

    from lockstep.tasks.models import models

    model = models.build(choice, head, None, empty=True, **models.named(labels)).eval()
    try:
        pixels = torch.empty(1, *shape, device="meta", dtype=next(model.parameters()).dtype)
        outputs = model(pixel_values=pixels)
    except Exception:
        return  # other failures are reported where they matter
    logits = getattr(outputs, "logits", None)
    size = list(logits.shape) if isinstance(logits, torch.Tensor) else None
    if size != [1, len(labels)]:
        what = "has no logits" if size is None else f"has logits of size {size} for one image of {len(labels)} labels"
        raise RunError(
            "LS3046",
            f"model: the output of transformers' {type(model).__name__} {what}, which the loss is computed from; "
            "choose another model, such as a ViT",
        )


def _trained_on_one(choice: ModelChoice, head: str, shape: Sequence[int]) -> None:
    """Run one image through the model in training mode, on the meta device."""
    import torch

    from lockstep.tasks.models import models

    model = models.build(choice, head, None, empty=True)
    model.train()(pixel_values=torch.empty(1, *shape, device="meta", dtype=next(model.parameters()).dtype))


def _shape(section: ModelSection, processor: Any) -> tuple[int, ...]:
    """Output shape [C, H, W] of the processor. Errors: `RunError` if it varies, if resizing and normalizing separately
    differs from doing both at once, or if it does not fit the model."""
    from PIL import Image

    from lockstep.tasks.models import model_configs

    draw, name = np.random.default_rng(0), type(processor).__name__
    trials = [Image.fromarray(draw.integers(0, 256, (h, w, 3), np.uint8)) for h, w in ((48, 64), (300, 200))]
    try:
        output = processor(trials[0], return_tensors="np")
        if np.ndim(output.get("pixel_values")) != 4:
            raise RunError(
                "LS3045",
                f"model: its {name} does not write images of channels, rows and columns, but "
                f"{', '.join(sorted(output))}; choose another model, such as a ViT",
            )
        halves = [resized(processor, image) for image in trials]
        if len({half.shape for half in halves}) > 1:
            raise RunError(
                "LS3039", f"task.processor: {name} does not bring images to one size; set task.processor.size"
            )
        whole = [processor(image, return_tensors="np")["pixel_values"][0] for image in trials]
        both = normalized(processor, halves)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError("LS3040", f"task.processor: {name} fails: {' '.join(str(error).split())[:300]}") from error
    if halves[0].dtype != np.uint8 or not all(np.array_equal(a, b) for a, b in zip(both, whole, strict=True)):
        raise RunError(
            "LS3041",
            f"model: {name} does more than resize, crop, rescale and normalise, which this task does not "
            "support; choose another model",
        )
    config, shape = model_configs.load_config(section), halves[0].shape
    channels = getattr(config, "num_channels", 3)
    if channels != shape[0]:
        scratch = section.source is None
        mend = f"set it to {shape[0]}" if scratch else f"choose a model with {shape[0]} channels"
        raise RunError(
            "LS3042",
            f"model.{'config.num_channels' if scratch else 'source'}: the model has "
            f"{quantity(channels, 'input channel')}, but the processor writes {shape[0]}, because every image is read "
            f"as RGB, grey ones too; {mend}",
        )
    size = getattr(config, "image_size", None)
    size = [size, size] if isinstance(size, int) else size
    if isinstance(size, list | tuple) and list(size) != list(shape[1:]) and config.model_type in _ONE_SIZE:
        raise RunError(
            "LS3043",
            f"task.processor.size: images of {shape[1]} x {shape[2]}, but the model expects {size[0]} x {size[1]}",
        )
    return shape


_ONE_SIZE = {"vit", "deit", "beit", "data2vec-vision", "vit_msn", "dinov2"}  # families with a fixed number of patches


def _encode(
    rows: Dataset,
    data: DataSection,
    options: ImageClassificationOptions,
    codes: labels.Codes,
    processor: Any,
    shape: tuple[int, ...],
    split: str,
    key: str,
) -> str:
    """Encode a split and return its folder of shards. Errors: `RunError` with the row number if a row holds no
    image."""
    schema = pa.schema([("pixels", pa.list_(pa.uint8())), ("label", pa.int64())])
    size = int(np.prod(shape))

    def batch(start: int, stop: int) -> pa.RecordBatch:
        some = rows[start:stop]
        images = [
            resized(processor, _opened(file, f"row {start + place} of the {split} split", data))
            for place, file in enumerate(some[options.image])
        ]
        offsets = pa.array(np.arange(len(images) + 1, dtype=np.int32) * size)
        pixels = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([i.ravel() for i in images])))
        return pa.record_batch([pixels, pa.array(codes.of(some), pa.int64())], schema=schema)

    def make(part: range) -> Iterable[tuple[pa.RecordBatch, int]]:
        for start in range(part.start, part.stop, _TOGETHER):
            stop = min(start + _TOGETHER, part.stop)
            yield batch(start, stop), stop - start

    parts = arrow_cache.spans(len(rows), max(1, arrow_cache.BYTES // size))
    return arrow_cache.write_split(key, schema, parts, make, "cutting images to size", of="images")


_TOGETHER = 16  # images decoded between progress updates
