"""The storage dtype of a model's weights: float32, bfloat16, or bfloat16 for an adapter's frozen weights.

In: a transformers model and `model.dtype`. Out: the same model. With an adapter, the frozen matrices of linear layers
and embeddings are stored in bfloat16 and computed in `precision`; results are bitwise equal to those of float32 weights
of the same values. Vectors (norms, biases) and trained weights stay float32. Without an adapter, all weights and
computation are bfloat16.
"""

from __future__ import annotations

import warnings
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.lazy import lazy
from lockstep.config.sections import ModelSection

if TYPE_CHECKING:
    from lockstep.tasks.models import quantized, tie_entry
else:
    quantized, tie_entry = lazy("lockstep.tasks.models", "quantized", "tie_entry")


def loaded_in(section: ModelSection) -> dict[str, Any]:
    """The dtype argument for building or loading the model."""
    return {"dtype": torch.bfloat16} if section.dtype == "bfloat16" else {}


def cast_weights(section: ModelSection, model: nn.Module) -> nn.Module:
    """Cast each weight to its storage dtype, in place, and return the model. Errors: `RunError`."""
    model = _in_dtypes(section, model)
    if section.quantization is not None:
        quantized.pack(section, model)
    return model


def _in_dtypes(section: ModelSection, model: nn.Module) -> nn.Module:
    if section.dtype == "float32":
        model = model.float()
        assert all(p.dtype == torch.float32 for p in model.parameters()), "weights must be float32"
        return model
    narrow = {id(p) for p in model.parameters()}
    if section.adapter:
        from transformers.pytorch_utils import Conv1D

        wide = _wide(model)
        modules = [m for name, m in model.named_modules() if not wide & {*name.split(".")}]
        modules = [m for m in modules if type(m) in (nn.Linear, nn.Embedding, Conv1D) and not m.weight.requires_grad]
        narrow = {id(m.weight) for m in modules}
        for module in modules:
            _widen(module)
        for buffer in model.buffers():
            if buffer.dtype == torch.bfloat16:
                buffer.data = buffer.data.float()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if id(parameter) in narrow else torch.float32)
    return model


def _wide(model: Any) -> set[str]:
    """Names of modules that transformers keeps in float32, such as T5's `wo`, which casts its inputs to the weight's
    dtype."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {*(getattr(base, "_keep_in_fp32_modules", None) or ())}


def _widen(module: nn.Module) -> None:
    """Make a layer with a frozen bfloat16 weight compute as if the weight were float32."""
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(_float)
    else:
        module.forward = MethodType(_forward, module)


def _float(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output if vars(module).get("gives_bfloat16") else output.float()


def keep_narrow(model: nn.Module) -> None:
    """Make frozen embeddings return bfloat16, for an engine that casts all weights and layer inputs to bfloat16 itself:
    its bfloat16 norms do not accept float32."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            vars(module)["gives_bfloat16"] = True


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Forward of a linear layer. Under autocast, autocast casts the weight. Otherwise the weight is float32 only while
    in use: autograd saves the bfloat16 weight and casts it again in backward."""
    if torch.is_autocast_enabled(x.device.type):
        return _linear(layer, x, layer.weight)
    wide = layer.weight.float()
    start = wide.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        of_weight = tensor.untyped_storage().data_ptr() == start
        return (tensor.shape, tensor.stride(), tensor.storage_offset()) if of_weight else tensor

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else layer.weight.detach().float().as_strided(*packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return _linear(layer, x, wide)


def _linear(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The linear layer as torch and transformers compute it."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    return torch.addmm(layer.bias, x.view(-1, x.size(-1)), weight).view((*x.size()[:-1], layer.nf))


def merged(model: Any, low: bool) -> nn.Module:
    """Merge a peft model's adapter into its weights, in bfloat16 (`low`) or float32. Sums are computed in float32 and
    rounded once. 4-bit weights are dequantized first."""
    if count(model):
        quantized.unpack(model)
    dtype = torch.bfloat16 if low else torch.float32
    for parameter in () if low else model.parameters():
        parameter.data = parameter.data.float()
    untied = _untie_adapted(model)
    tied = getattr(model.get_base_model().config, "tie_word_embeddings", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(Model with `tie_word|Input and output embeddings)")  # untied above
        whole = model.merge_and_unload()
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    whole.config.dtype = dtype
    if untied:
        whole.config.tie_word_embeddings = tied  # peft checks only two of possibly more weights
        tie_entry.write_down(whole)
    return whole


def _shared_and_adapted(model: Any) -> list[Any]:
    """Adapted layers of a peft model whose frozen weight is shared with another module. Merging would also change that
    module, which was trained without the adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    weights = [(layer, getattr(layer.get_base_layer(), "weight", None)) for layer in layers]
    return [layer for layer, weight in weights if isinstance(weight, Tensor) and holders.get(id(weight), 0) > 1]


def _untie_adapted(model: Any) -> bool:
    """Give the layers of `_shared_and_adapted` their own weights. Returns whether there are any."""
    layers = _shared_and_adapted(model)
    for layer in layers:
        base = layer.get_base_layer()
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
    return bool(layers)


def count(model: nn.Module) -> int:
    """Number of weights stored in 4 bits (`quantized.py`)."""
    return sum(layer.kept_as[1].numel() for layer in _packed(model))


def parameters(model: nn.Module) -> int:
    """Number of parameters of a model, counting 4-bit weights by their original number."""
    others = {id(p) for layer in _packed(model) for p in (layer.packed, layer.absmax)}
    return count(model) + sum(p.numel() for p in model.parameters() if id(p) not in others)


def _packed(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "kept_as")]


def counts(model: nn.Module) -> tuple[int, int]:
    """(parameters, trained parameters) of a model."""
    return parameters(model), sum(p.numel() for p in model.parameters() if p.requires_grad)
