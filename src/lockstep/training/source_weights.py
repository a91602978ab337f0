"""Compare the weights before the first step, by name, with those that plain `from_pretrained` loads.

In: a session whose strategy is built. Out: None, or a message that names the weights that differ. Each rank hashes its
own shards; rank 0 loads the model once more, as a transformers script would. Weights missing from the files are
randomly initialized and not compared; nor are an adapter's own.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.shard_files import StateHash
from lockstep.data.raw_rows import RawRows
from lockstep.distributed.tensor_hashes import hash_sum
from lockstep.plain.rows import NotCovered
from lockstep.plain.train import load_pretrained
from lockstep.training.plain_sides import WHOLE, job_of, plain_path
from lockstep.training.session import Session

_NAMES = 4  # maximum names in a message


def skipped(session: Session) -> str:
    """Explain why the weights are not compared with their source. Empty if they are compared, or if there is no
    source."""
    run = session.run
    if run.model.source is None:
        return ""
    if session.task.own_model or run.model.trust_remote_code or not session.task.built_in():
        return "the model's code is not that of transformers"
    if run.model.quantization:
        return f"they are kept in {run.model.quantization}"
    if session.strategy.weights.parameter_count > WHOLE:
        return f"a second model of more than {WHOLE / 1e6:.0f} million weights would be loaded"
    if RawRows.of(session.task.prepared.facts) is None:  # the plain path needs them for the labels
        return "the labels are not known to a plain computation"
    return ""


def difference(session: Session) -> str | None:
    """Describe how weights differ from their source, on every rank. None if they are equal or the comparison is
    `skipped`. Collective."""
    run, world, strategy = session.run, session.world, session.strategy
    if run.model.source is None or skipped(session):
        return None
    parts = {n: t for n, t in strategy.state.sharded_state_dict().items() if n.startswith("model.")}
    layouts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for each in world.all_gather({n: (t.dtype, tuple(t.shape)) for n, t in parts.items()}):
        layouts |= each
    own = StateHash(world).sums(parts)
    fault = None
    if world.is_main:
        named = {_plain_name(name): (layouts[name], value) for name, value in own.items()}
        fault = _difference(session, {name: of for name, of in named.items() if name is not None})
    return world.broadcast(fault)


def _plain_name(name: str) -> str | None:
    """Name of a weight in the model without its adapter; None for an adapter's own weight."""
    name = name.removeprefix("model.").removeprefix("base_model.model.").replace(".base_layer.", ".")
    name = re.sub(r"\.original_module\.", ".", name)
    return None if re.search(r"\.(lora_|modules_to_save\.|token_adapter)", f".{name}") else name


def _difference(session: Session, own: dict[str, tuple[tuple[torch.dtype, tuple[int, ...]], int]]) -> str | None:
    """`own`: (dtype, shape) and hash sum of each weight."""
    run = session.run
    low = torch.bfloat16 if run.model.dtype == "bfloat16" else None
    try:
        with plain_path(), torch.random.fork_rng(devices=[]):
            model, drawn = load_pretrained(job_of(session.task), low)
    except NotCovered:
        return None
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return (
            f"before the first step: the weights cannot be compared with those of {run.model.source} ({reason}); "
            "verify.plain=false trains without it; please report this"
        )
    parameters = dict(model.named_parameters())
    wrong: list[str] = []
    if not run.model.adapter:  # peft may replace modules that it trains
        wrong += [f"{n} is missing here" for n in parameters if n not in own and n not in drawn]
    theirs: dict[str, Tensor] = parameters | dict(model.named_buffers())
    for name, ((dtype, shape), value) in own.items():
        if name in drawn:
            continue
        if name not in theirs:
            if name in dict(model.named_parameters(remove_duplicate=False)):
                wrong.append(f"{name} is an independent weight here, and tied there")
        elif tuple(theirs[name].shape) != shape:
            wrong.append(f"{name} has the shape {list(shape)} here, and {list(theirs[name].shape)} there")
        elif theirs[name].is_floating_point() and value not in _sums(theirs[name], low, dtype, name in parameters):
            wrong.append(f"{name} has other values")
    if not wrong:
        return None
    more = f"; and {len(wrong) - _NAMES} more" if len(wrong) > _NAMES else ""
    return (
        "before the first step: the weights differ from those that transformers' from_pretrained loads from "
        f"{run.model.source}: {'; '.join(wrong[:_NAMES])}{more}. Nothing was trained; please report this. "
        "verify.plain=false trains without this comparison"
    )


def _sums(tensor: Any, low: torch.dtype | None, dtype: torch.dtype, weight: bool) -> set[int]:
    """Acceptable hash sums of a tensor. A buffer that a model computes, such as rotary frequencies, is float32 even if
    weights are loaded in lower precision."""
    ways = {low} if weight else {low, None}
    return {int(hash_sum(_in(tensor, way, dtype))) for way in ways}


def _in(tensor: Any, low: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    """Round a tensor as loading does, then convert it to the stored dtype."""
    tensor = tensor.detach()
    return (tensor if low is None else tensor.to(low)).to(dtype).contiguous()
