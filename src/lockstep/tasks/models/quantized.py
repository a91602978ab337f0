"""QLoRA: the frozen linear layers of an adapter's base, kept in 4 bits by bitsandbytes.

In: a model with its adapter, `model.quantization`. Out: the same model; each frozen linear layer inside its blocks
stores 4-bit values (`packed`) and one float32 scale per `BLOCK` values (`absmax`) in place of its weight, and computes
with the dequantized weight. Both are frozen parameters, so a checkpoint contains the base used in training. Embeddings,
heads, norms, biases and trained weights are unchanged. Needs the extra `lockstep-train[quantization]`.
"""

from __future__ import annotations

import importlib.util
import logging
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data.job import Job, WeightFormats

BLOCK = 64  # weights that share a scale, as in the QLoRA paper
BYTES = 0.5 + 4 / BLOCK  # bytes per weight
# suppress a warning, on some CPUs, about a kernel that is unused here
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def check(job: Job) -> None:
    """Refuse unsupported combinations with quantization. Errors: `RunError`."""
    run = job.run
    if run.model.quantization is None:
        return
    adapter = run.model.adapter
    if not adapter:
        raise RunError(
            "LS3170",
            "model.quantization: 4-bit weights cannot be trained, only an adapter on them; set "
            "model.adapter, or remove model.quantization",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RunError(
            "LS3171", "model.quantization: bitsandbytes is not installed: pip install 'lockstep-train[quantization]'"
        )
    kind = str(adapter.get("type", "lora")).lower()
    if kind != "lora" or adapter.get("use_dora"):
        kind = "lora with use_dora" if kind == "lora" else kind
        raise RunError(
            "LS3172",
            f"model.quantization: only adapters of type lora are supported, not {kind}, which reads the "
            "weights; set model.adapter.type: lora",
        )
    if WeightFormats.FOUR_BITS not in job.strategy.facts.weight_formats:
        raise RunError(
            "LS3173",
            f"model.quantization: {run.strategy.name} does not support 4-bit weights; use strategy.name=ddp, or fsdp2 "
            "with strategy.options.gather=step",
        )
    if run.model.compiled:
        raise RunError("LS3174", "model.compile: not supported with model.quantization; set model.compile=false")


def pack(section: ModelSection, model: nn.Module) -> None:
    """Quantize the frozen linear layers to 4 bits, in place. Runs on the CPU, where the model is built, so the result
    depends on the weights alone, not on the training device. Errors: `RunError` if the model has no such layers."""
    modules = [m for name, m in model.named_modules() if _within_blocks(name) and _fits(m)]
    if not modules:
        raise RunError(
            "LS3175",
            "model.quantization: no block of this model has a frozen linear layer whose inputs are a "
            f"multiple of {BLOCK}; remove model.quantization, which keeps the weights in bfloat16",
        )
    for layer in modules:
        _pack(layer, str(section.quantization))


def _within_blocks(name: str) -> bool:
    """Whether a module is inside a module list, as blocks are; heads and poolers are not."""
    return any(part.isdecimal() for part in name.split("."))


def _fits(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    if type(module) not in (nn.Linear, Conv1D) or module.weight.requires_grad:
        return False
    # bitsandbytes 0.50 unpacks other widths wrongly on CPUs with AVX-512: a scale there must not belong to two rows
    return module.weight.shape[1 if isinstance(module, nn.Linear) else 0] % BLOCK == 0


def _pack(layer: Any, kind: str) -> None:
    library = _library()
    weight = layer.weight.detach()
    # Conv1D weights are [in, out]: transpose. float32, because backward dequantizes to the dtype that was packed
    weight = (weight if isinstance(layer, nn.Linear) else weight.t()).float().contiguous()  # [N, K]
    if weight.is_meta:
        packed = weight.new_empty(weight.numel() // 2, 1, dtype=torch.uint8)
        absmax = weight.new_empty(-(-weight.numel() // BLOCK))
    else:
        packed, state = library.functional.quantize_4bit(weight, blocksize=BLOCK, quant_type=kind)
        absmax = state.absmax
    layer.kept_as = (kind, weight.shape)
    del layer.weight
    layer.weight = torch.empty(0)  # not a parameter: some models read the dtype of a layer's weight
    layer.packed = nn.Parameter(packed, requires_grad=False)
    layer.absmax = nn.Parameter(absmax, requires_grad=False)
    layer.forward = MethodType(_forward, layer)


def _library() -> Any:
    """Import bitsandbytes on use: it is an optional extra."""
    import bitsandbytes

    return bitsandbytes


def _state(layer: Any) -> Any:
    kind, shape = layer.kept_as
    return _library().functional.QuantState(layer.absmax, shape, blocksize=BLOCK, quant_type=kind, dtype=torch.float32)


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Forward of a linear layer; backward dequantizes the weight again. x: [..., K]."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    return _library().matmul_4bit(rows, layer.packed, _state(layer), bias=bias).view(*x.shape[:-1], -1)


@torch.no_grad()
def unpack(model: nn.Module) -> None:
    """Replace the 4-bit weights by their dequantized float32 weights, in place."""
    for layer in [m for m in model.modules() if hasattr(m, "kept_as")]:
        weight = _library().functional.dequantize_4bit(layer.packed, _state(layer))  # [N, K]
        del layer.packed, layer.absmax, layer.kept_as, layer.weight, layer.forward
        weight = weight if isinstance(layer, nn.Linear) else weight.t().contiguous()
        layer.weight = nn.Parameter(weight, requires_grad=False)


@torch.no_grad()
def unpacked(model: nn.Module) -> dict[str, Tensor]:
    """The dequantized 4-bit weights, float32, keyed by the original weight names. Does not change the model."""
    tensors = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "kept_as"):
            weight = _library().functional.dequantize_4bit(layer.packed, _state(layer))  # [N, K]
            tensors[f"{name}.weight"] = weight if isinstance(layer, nn.Linear) else weight.t().contiguous()
    return tensors
