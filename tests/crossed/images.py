"""Image families in their smallest size, images in every mode that has caused a failure, and folders of models.

In: a family, or a recipe of rows. Out: entries of `model.config` and `task.processor`; bytes of files of images.
"""

from __future__ import annotations

import functools
import io
import random
from pathlib import Path
from typing import Any

SIDE = 32  # pixels of an image as a model reads it
_SQUARE = {"height": SIDE, "width": SIDE}
_VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_VIT |= {"image_size": SIDE, "patch_size": 8}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}
_TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_TOWER = {"vision_config": _VIT, "text_config": _TEXT | {"vocab_size": 99}}
_CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE}
_EDGE = {"size": {"shortest_edge": SIDE}, "crop_pct": 1.0}

# Family -> entries of its config, entries of its processor.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit": (_VIT, {}),
    "resnet": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, _EDGE),
    "convnext": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, _EDGE),
    "convnextv2": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, _EDGE),
    "regnet": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}, _EDGE),
    "deit": (_VIT, {"size": _SQUARE, "crop_size": _SQUARE}),
    "beit": (_VIT, {"size": _SQUARE, "crop_size": _SQUARE}),
    "data2vec-vision": (_VIT | {"out_indices": [0, 0, 1, 1]}, {"size": _SQUARE, "crop_size": _SQUARE}),
    "vit_msn": (_VIT, {}),
    "ijepa": (_VIT, {}),
    "dinov2": ({k: v for k, v in _VIT.items() if k != "intermediate_size"}, _CROPPED),
    "swin": (
        {"image_size": SIDE, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4},
        {},
    ),
    "swinv2": ({"image_size": SIDE, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 4}, {}),
    "bit": ({"embedding_size": 8, "hidden_sizes": [16, 16], "depths": [1, 1], "num_groups": 4}, _CROPPED),
    "focalnet": (
        {"image_size": SIDE, "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
        | {"focal_levels": [1, 1], "focal_windows": [3, 3]},
        _CROPPED,
    ),
    "mobilenet_v1": ({"depth_multiplier": 0.05}, _CROPPED),
    "mobilenet_v2": ({"depth_multiplier": 0.05}, _CROPPED),
    "mobilevit": (
        {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [4, 4, 4, 4, 4, 4, 8], "num_attention_heads": 2}
        | {"image_size": SIDE},
        {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE},
    ),
    "mobilevitv2": (
        {"width_multiplier": 0.1, "n_attn_blocks": [1, 1, 1], "image_size": SIDE},
        {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE},
    ),
    "poolformer": (_STAGES, {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE, "crop_pct": 1.0}),
    "pvt": (_STAGES | {"num_attention_heads": [1, 1, 2, 2], "image_size": SIDE}, {"size": _SQUARE}),
    "pvt_v2": (_STAGES | {"num_attention_heads": [1, 1, 2, 2], "image_size": SIDE}, {"size": _SQUARE}),
    "segformer": (
        _STAGES | {"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
        {"size": _SQUARE},
    ),
    "levit": (
        {"image_size": SIDE, "hidden_sizes": [8, 8, 16], "num_attention_heads": [1, 1, 2], "depths": [1, 1, 1]}
        | {"key_dim": [4, 4, 4]},
        {"size": {"shortest_edge": SIDE}, "crop_size": _SQUARE},
    ),
    "efficientnet": (
        {"image_size": SIDE, "width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 64},
        {"size": _SQUARE},
    ),
    "hiera": (
        {"image_size": [SIDE, SIDE], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1}
        | {"masked_unit_size": [4, 4], "masked_unit_attention": [True, False]},
        _CROPPED,
    ),
    "swiftformer": ({"depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "image_size": SIDE}, {}),
    "cvt": ({"embed_dim": [8, 8, 16], "num_heads": [1, 1, 2], "depth": [1, 2, 3]}, _EDGE),
    "clip": (_TOWER, _CROPPED),
    "siglip": (_TOWER, {"size": _SQUARE}),
}
MODES = ("RGB", "L", "RGBA", "P", "LA", "1", "CMYK", "I;16")
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")


def size_of(draw: random.Random, shape: str, place: int) -> tuple[int, int]:
    """Draw width and height. `shape`: as of texts, such as equal or very unequal lengths."""
    if shape == "equal":
        return 40, 48
    if shape == "one_token":
        return 1, 1
    if shape == "long":
        return 200, 7
    if shape == "ragged":
        return (120, 90) if place % 3 == 0 else (5, 8)
    return draw.randint(8, 60), draw.randint(8, 60)


def image_of(draw: random.Random, shape: str, place: int) -> bytes | None:
    """One file of an image; of the shape `unicode` in one of Pillow's modes and formats, turned as EXIF has it; of
    `blank` one in five is missing."""
    from PIL import Image

    if shape == "blank" and draw.random() < 0.2:
        return None
    width, height = size_of(draw, shape, place)
    image = Image.frombytes("RGB", (width, height), draw.randbytes(3 * width * height))
    file, kind, options = io.BytesIO(), "PNG", dict[str, Any]()
    if shape == "unicode":
        mode, kind = draw.choice(MODES), draw.choice(FORMATS)
        image = image.convert("L").convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
        kind = kind if _holds(kind, mode) else "TIFF"
        if kind in ("JPEG", "PNG", "WEBP"):
            exif = Image.Exif()
            exif[0x0112] = draw.randint(1, 8)  # which side is up
            options["exif"] = exif
    image.save(file, kind, **options)
    return file.getvalue()


@functools.cache
def _holds(kind: str, mode: str) -> bool:
    """Return whether Pillow can write this mode in this format."""
    from PIL import Image

    try:
        Image.new(mode, (4, 4)).save(io.BytesIO(), kind)
    except Exception:
        return False
    return True


def make_model(folder: Path, family: str, entries: dict[str, Any], processor: dict[str, Any]) -> None:
    """Save a small backbone with random weights from a fixed seed, and its processor, in place of a pretrained one."""
    import torch
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    config = transformers.CONFIG_MAPPING[family](**entries)
    torch.manual_seed(5)
    names: Any = IMAGE_PROCESSOR_MAPPING_NAMES[family]
    kind = getattr(transformers, names["pil"])
    size = {"size": _SQUARE} if isinstance(entries.get("image_size"), int) else {}
    kind(**size | processor).save_pretrained(folder)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
