"""The model that a rank trains: built by the task, some weights frozen, every tensor contiguous and aligned."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.strategies.engines.side_effects import first_few, hooks
from lockstep.strategies.exact.parameter_groups import unmatched
from lockstep.tasks.task import Task

ALIGNED = 64  # bytes: alignment of torch's CPU allocator


def make_model(task: Task, empty: bool = False) -> nn.Module:
    """Build the task's model with contiguous, aligned tensors; `empty`: on the meta device.

    Sums, slices and fused updates walk through memory, so a transposed weight's gradient would be summed in another
    order. Products with a single row differ in their last bits if a weight does not start at a multiple of 64 bytes, as
    in a memory-mapped file; engines that copy weights align them.
    Errors: `RunError` for trainable weights that are not float32 (or the run's dtype), and for hooks that would see
    sums of micro-batches.
    """
    dtype = torch.bfloat16 if task.run.model.trained_in_bfloat16 else torch.float32
    model = freeze(task.run.model, task.model(empty=True) if empty else task.model())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            raise RunError("LS4174", f"model(): {name} is {parameter.dtype}; weights that are trained must be {dtype}")
    if names := hooks(model, after=True):
        raise RunError(
            "LS4175",
            f"model(): {first_few(names)} has a hook that runs after gradient accumulation "
            "(register_post_accumulate_grad_hook), which would see the sum of several micro-batches; use "
            "register_hook instead",
        )
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
    return model


def freeze(section: ModelSection, model: nn.Module) -> nn.Module:
    """Freeze the weights that match `model.freeze`, and empty ones; return the model. Errors: `RunError` for a pattern
    without a match, or if no trainable weight remains."""
    named = dict(model.named_parameters())
    for parameter in named.values():
        if not parameter.numel():  # nothing to train or save
            parameter.requires_grad_(False)
    for pattern in section.freeze:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            raise RunError("LS4172", f"model.freeze: {unmatched(pattern, named)}")
        for name in matching:
            named[name].requires_grad_(False)
    if section.freeze and not any(p.requires_grad for p in named.values()):
        raise RunError("LS4173", "model.freeze: every weight is frozen, so nothing is left to train; freeze fewer")
    return model
