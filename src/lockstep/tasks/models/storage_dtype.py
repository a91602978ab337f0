"""What a model's weights are kept in: float32, bfloat16, or the frozen ones of an adapter in bfloat16.

In: a model of transformers and `model.dtype`. Out: the same model. With an adapter, the matrices of its frozen linear
layers and embeddings are kept in bfloat16, and computed with as `precision` says: what they give is what float32
weights of the same values would have given, to the bit. Vectors (norms, biases) and what is trained stay float32.
Without one, all weights are bfloat16, and so is what is computed.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lockstep.config.run import Run
from lockstep.tasks.models import quantized, tie_entry


def loaded_in(run: Run) -> dict[str, Any]:
    """What transformers is told of it when it builds or loads the model."""
    return {"dtype": torch.bfloat16} if run.model.dtype == "bfloat16" else {}


def cast_weights(run: Run, model: nn.Module) -> nn.Module:
    """The model, each weight in what it is kept in; in place. Errors: `RunError`."""
    model = _in_dtypes(run, model)
    if run.model.quantization is not None:
        quantized.pack(run, model)
    return model


def _in_dtypes(run: Run, model: nn.Module) -> nn.Module:
    if run.model.dtype == "float32":
        model = model.float()
        assert all(p.dtype == torch.float32 for p in model.parameters()), "weights must be float32"
        return model
    narrow = {id(p) for p in model.parameters()}
    if run.model.adapter:
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
    """Names of modules that transformers keeps in float32, such as T5's `wo`, whose inputs it casts to the weight's
    dtype itself."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {*(getattr(base, "_keep_in_fp32_modules", None) or ())}


def _widen(module: nn.Module) -> None:
    """Let a layer with a frozen bfloat16 weight compute as if it were float32."""
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(_float)
    else:
        module.forward = MethodType(_forward, module)


def _float(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output if vars(module).get("gives_bfloat16") else output.float()


def keep_narrow(model: nn.Module) -> None:
    """Let frozen embeddings give bfloat16 again, for an engine that casts all weights and what goes into layers to
    bfloat16 itself: a norm beside them has bfloat16 weights then, and takes no float32."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            vars(module)["gives_bfloat16"] = True


def _forward(layer: Any, x: Tensor) -> Tensor:
    """A linear layer's. Autocast casts a weight of any dtype to its own. Without it the weight is float32 while it is
    used: autograd keeps the bfloat16 one, and widens it once more in backward."""
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
    """As torch and transformers compute it."""
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    return torch.addmm(layer.bias, x.view(-1, x.size(-1)), weight).view((*x.size()[:-1], layer.nf))


def merged(model: Any, low: bool) -> nn.Module:
    """A model of peft with its adapter merged into its weights; all of them bfloat16 (`low`) or float32. The sums are
    made in float32, and rounded once. Weights in 4 bits are merged into as what they stand for."""
    quantized.unpack(model)
    dtype = torch.bfloat16 if low else torch.float32
    for parameter in () if low else model.parameters():
        parameter.data = parameter.data.float()
    untied = _untie_adapted(model)
    tied = getattr(model.get_base_model().config, "tie_word_embeddings", False)
    whole = model.merge_and_unload()
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)
    whole.config.dtype = dtype
    if untied:
        whole.config.tie_word_embeddings = tied  # peft looks at two of maybe more weights
        tie_entry.write_down(whole)
    return whole


def _shared_and_adapted(model: Any) -> list[Any]:
    """The layers of a model of peft whose frozen weight is also another module's: merging their adapter would change
    that one, too, which was trained without it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    weights = [(layer, getattr(layer.get_base_layer(), "weight", None)) for layer in layers]
    return [layer for layer, weight in weights if isinstance(weight, Tensor) and holders.get(id(weight), 0) > 1]


def _untie_adapted(model: Any) -> bool:
    """Give those of `_shared_and_adapted` weights of their own. Returns whether there are any."""
    layers = _shared_and_adapted(model)
    for layer in layers:
        base = layer.get_base_layer()
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
    return bool(layers)
