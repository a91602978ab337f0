"""Parameter names without wrapper prefixes, and the blocks of the full tensors that a rank holds.

In: modules, parameters, gradients. Out: names, local tensors and `Block`s. No communication.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .fingerprint import INTEGERS, Block, mixed, shifted, whole

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


class FlatPart:
    """A rank's part of a parameter, or of its gradient, inside an engine's flat tensor. Represents the parameter
    `source` in the recorder. `name`: set if `source` is a flat tensor of several parameters."""

    def __init__(
        self, source: Tensor, tensor: Tensor, block: Block, grad: FlatPart | None = None, name: str | None = None
    ) -> None:
        self.source, self.tensor, self.block, self.grad, self.name = source, tensor, block, grad, name
        self.shape, self.dtype, self.device = block.shape, tensor.dtype, tensor.device
        self.requires_grad = source.requires_grad


def key(parameter: Any) -> Any:
    """Return a key that identifies a parameter, also among several parts of one flat tensor."""
    if not isinstance(parameter, FlatPart):
        return id(parameter)
    return id(parameter.source) if parameter.name is None else (id(parameter.source), parameter.name)


def name_of(parameter: Any, names: dict[int, str]) -> str | None:
    """Return the name of a parameter, or None. `names`: id -> name of the models' parameters."""
    if isinstance(parameter, FlatPart):
        return parameter.name or names.get(id(parameter.source))
    return names.get(id(parameter))


def plain_name(name: str) -> str:
    """Remove the prefixes of DDP, FSDP, torch.compile, checkpointing and Lightning. `module` is removed only at the
    front, because models may have parts of that name."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in WRAPPERS:
        parts = parts[1:]
    return ".".join(part for part in parts if part not in WRAPPERS[1:])


DTENSOR = ("torch.distributed.tensor", "torch.distributed._tensor")  # the second until torch 2.4


def is_dtensor(tensor: Any) -> bool:
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    kinds = (getattr(sys.modules.get(name), "DTensor", None) for name in DTENSOR)
    kind = next((k for k in kinds if k is not None), None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Any) -> tuple[Tensor, Block, str]:
    """Return (local tensor, its block, "partial" if the full tensor is the sum of the local ones, else "")."""
    if isinstance(tensor, FlatPart):
        return tensor.tensor, tensor.block, ""
    if not is_dtensor(tensor):
        return tensor, whole(tensor), ""
    part: Any = tensor
    kinds = [type(p).__name__ for p in part.placements]
    inner = part.to_local()
    if hasattr(inner, "wait"):  # result of an asynchronous collective
        inner = inner.wait()
    return inner, block_of(part), "partial" if any("Partial" in kind for kind in kinds) else ""


def block_of(tensor: Any) -> Block:
    """Return the local block of a DTensor. Mesh dimensions split a tensor dimension in order, each like torch.chunk; a
    strided shard (FSDP over tensor parallel) splits last."""
    shape = tuple(tensor.shape)
    offset, size = [0] * len(shape), list(shape)
    coordinate = tensor.device_mesh.get_coordinate()
    cuts = []
    for mesh_dim, placement in enumerate(tensor.placements):
        name = type(placement).__name__
        if "Shard" in name:
            cuts.append(("Strided" in name, mesh_dim, placement.dim % max(len(shape), 1)))
    for _, mesh_dim, dim in sorted(cuts):
        count, index = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        step = -(-size[dim] // count)
        begin = min(index * step, size[dim])
        offset[dim] += begin
        size[dim] = min(step, size[dim] - begin)
    return Block(shape, tuple(offset), tuple(size))


def mesh_of(tensor: Any) -> dict[str, Any] | None:
    """Return names, sizes and this rank's coordinate of a DTensor's mesh, and its placements; None for other
    tensors."""
    if not is_dtensor(tensor):
        return None
    mesh = tensor.device_mesh
    return {
        "names": list(mesh.mesh_dim_names or []),
        "sizes": list(mesh.mesh.shape),
        "at": list(mesh.get_coordinate() or []),
        "placements": [str(p) for p in tensor.placements],
    }


def named_parameters(roots: list[nn.Module]) -> tuple[dict[int, str], list[list[str]]]:
    """Return id -> name (the first one) over all roots, and the groups of names of tied parameters. Names that occur in
    two roots are prefixed with the root's class."""
    names: dict[int, str] = {}
    ids: dict[str, int] = {}
    aliases: dict[int, list[str]] = {}
    for number, root in enumerate(sorted(roots, key=lambda r: -sum(1 for _ in r.parameters()))):
        for full, parameter in root.named_parameters(remove_duplicate=False):
            name = plain_name(full)
            if id(parameter) in names and names[id(parameter)] in ids and number and name not in ids:
                continue  # a part of a larger root, called directly
            if ids.get(name, id(parameter)) != id(parameter):
                name = f"{type(root).__name__}{number}.{name}"
            ids[name] = id(parameter)
            names.setdefault(id(parameter), name)
            if name not in aliases.setdefault(id(parameter), []):
                aliases[id(parameter)].append(name)
    return names, [each for each in aliases.values() if len(each) > 1]


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def is_fsdp(root: nn.Module) -> bool:
    return any(
        t.__name__ in ("FSDPModule", "FullyShardedDataParallel") for m in root.modules() for t in type(m).__mro__
    )


def kinds_of(root: nn.Module) -> list[str]:
    """Return the wrappers around a model, outermost first."""
    return [type(module).__name__ for module in _inwards(root)]


def _inwards(root: nn.Module) -> list[nn.Module]:
    modules = [root]
    while [name for name, _ in modules[-1].named_children()] in [[w] for w in WRAPPERS]:
        modules.append(next(modules[-1].children()))
    return modules


DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def stochastic(root: nn.Module) -> list[str]:
    """Return the names of modules in training mode whose output depends on the mode: dropout, batch norm."""
    active = [(n, m) for n, m in root.named_modules() if m.training and _is_modal(m)]
    return [plain_name(n) or type(m).__name__ for n, m in active if getattr(m, "momentum", 0) is not None]


def _is_modal(module: Any) -> bool:
    return isinstance(module, BATCH_NORM) or (isinstance(module, DROPOUT) and module.p > 0)


def deciding(root: nn.Module) -> list[nn.Module]:
    """Return the modules whose `training` flag defines the model's mode: dropout and batch norm, else the innermost
    module. A wrapper's flag may differ from its model's (Lightning around DDP)."""
    return [m for m in root.modules() if _is_modal(m)] or [unwrapped(root)]


def has_stochastic(root: nn.Module) -> bool:
    """Return whether the model's output depends on the mode."""
    return any(map(_is_modal, root.modules()))


def has_dropout(root: nn.Module) -> bool:
    return any(isinstance(m, DROPOUT) and m.p > 0 for m in root.modules())


def unwrapped(root: nn.Module) -> nn.Module:
    """Return the model inside all wrappers."""
    return _inwards(root)[-1]


def replicas_of(root: nn.Module, wrappers: list[Any]) -> dict[str, Any] | None:
    """Return the attributes of a model's DistributedDataParallel, or None: number of ranks, ignored parameters, whether
    the wrapper is inside the root, and whether it sends buffers. The root may be a part of the wrapped model.
    `wrappers`: weak references to all."""
    for module in root.modules():
        if any(t.__name__ == "DistributedDataParallel" for t in type(module).__mro__):
            return _group(module) | {"part": module is not root}
    for ref in wrappers:
        module = ref()
        if module is not None and any(part is root for part in module.module.modules()):
            return _group(module) | {"part": False}
    return None


def _group(ddp: Any) -> dict[str, Any]:
    ignored = sorted(plain_name(n) for n in getattr(ddp, "parameters_to_ignore", ()))
    sends = getattr(ddp, "broadcast_buffers", True)
    hooked = bool(getattr(ddp, "_comm_hooks", ()))
    return {"ranks": ddp.process_group.size(), "ignored": ignored, "hooked": hooked, "buffers": sends}


CASTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.Bilinear)


def cast_weights(roots: list[nn.Module]) -> list[str]:
    """Return the names of a few float32 weights whose casts autocast caches."""
    names = []
    for root in roots:
        if any(type(m).__name__ == "OptimizedModule" for m in root.modules()):
            continue  # compiled: casts are inside its graph
        for name, module in root.named_modules():
            weight: Any = getattr(module, "weight", None)
            casts = isinstance(module, CASTS) and type(weight) is nn.Parameter and weight.requires_grad
            if casts and weight.dtype == torch.float32 and weight.is_leaf:
                names.append(plain_name(f"{name}.weight" if name else "weight"))
    return names[:4]


def is_plain_tensor(value: Any) -> bool:
    """Return whether a value is a tensor with a shape here: neither distributed nor nested."""
    return isinstance(value, torch.Tensor) and not value.is_nested and not is_dtensor(value)


def one_memory(parameters: Iterable[Any], names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of parameters that are views of the same elements and have gradients of their own."""
    rows: dict[Any, list[Any]] = {}
    for p in parameters:
        if type(p) is nn.Parameter and is_plain_tensor(p) and p.numel() > 1 and p.grad is not None and p.data_ptr():
            rows.setdefault((p.device, p.data_ptr(), p.shape, p.stride()), []).append(p)
    twins = [same for same in rows.values() if len({id(p.grad) for p in same}) == len(same) > 1]
    return [[names.get(id(p), "?") for p in same] for same in twins]


def perturb(module: nn.Module) -> None:
    """Flip the last bit of half of the weights, by a fixed pattern: a change of the size of rounding."""
    with torch.no_grad():
        for parameter in module.parameters():
            tensor, _, _ = local(parameter.detach())
            if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.is_contiguous() and tensor.numel():
                bits = tensor.view(INTEGERS[tensor.element_size()]).view(-1)
                for at in range(0, bits.numel(), 1 << 20):
                    part = bits[at : at + (1 << 20)]
                    flips = shifted(mixed(part.numel(), first=(1 << 46) + at), 41) & 1
                    part.bitwise_xor_((flips * (part != 0).cpu()).to(part.dtype).to(part.device))
