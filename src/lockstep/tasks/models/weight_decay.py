"""Weights without weight decay: biases (including tables of relative positions) and norms.

In: a model, which may be on the meta device. Out: names of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_WRAPPERS = ("modules_to_save", "default")  # name parts that peft inserts for trained copies of a module


def exempt(model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay: weights of modules whose class name contains "norm", and parameters
    named "bias" or in a module named so (`relative_attention_bias.weight`, `lstm.bias_ih_l0`)."""
    return {name for name, module in _owned(model) if _is_norm(module) or is_bias(name)}


def is_bias(name: str) -> bool:
    """Whether the name of a parameter, or of its module, contains "bias". List indices are skipped."""
    words = [word for word in name.split(".") if not word.isdigit() and word not in _WRAPPERS]
    return any("bias" in word.lower() for word in words[-2:])


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name of each parameter and the module that holds it."""
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            yield (f"{prefix}.{name}" if prefix else name), module


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not isinstance(module, nn.Embedding)
