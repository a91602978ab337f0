"""A few steps of training in one process: forward, backward, one division, clipping, the optimizer of torch.

In: a job, a model of transformers, and which examples are in which step. Out: loss, gradients and weights of each step.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.plain.job import Plain
from lockstep.plain.losses import batch_loss, without_dropout
from lockstep.plain.rows import NotCovered

HEADS = {
    "classification": "AutoModelForSequenceClassification",
    "language_modeling": "AutoModelForCausalLM",
}
LAYER = re.compile(r".*?\.\d+(?:\.|$)")  # the name of a weight in a list of layers


@dataclass(frozen=True)
class StepRecord:
    """What one step did."""

    loss: float  # mean over the targets of the step
    norm: float  # 2-norm of the whole gradient, before clipping
    learning_rate: float
    gradients: dict[str, Tensor]  # by parameter, before clipping
    changes: dict[str, Tensor]  # of each trained parameter by the update; empty where torch has no such optimizer


def build_model(job: Plain, weights: dict[str, Tensor] | None = None, empty: bool = False) -> nn.Module:
    """The model of the run file, by the Auto class of its task. `weights`: what it starts from, by name; else those of
    the source, or fresh ones. `empty`: on the meta device, and nothing is read."""
    import transformers

    run, section = job.run, job.run["model"]
    auto = getattr(transformers, HEADS[run["task"]["name"]])
    trusted = {"trust_remote_code": section["trust_remote_code"]}
    if section["type"]:
        config = transformers.AutoConfig.for_model(section["type"], **section["config"])
        config.vocab_size = section["config"].get("vocab_size", len(job.tokenizer))
        config.bos_token_id, config.eos_token_id = job.tokenizer.bos_token_id, job.tokenizer.eos_token_id
    else:
        where = {"revision": section["revision"], **trusted}
        config = transformers.AutoConfig.from_pretrained(section["source"], **where)
        for key, value in section["config"].items():
            setattr(config, key, value)
    config.pad_token_id, config.use_cache = job.tokenizer.pad_token_id, False
    if run["task"]["name"] == "classification":
        count = len(job.labels) or len(job.examples("train")[0]["labels"])
        config.num_labels = count
    options = trusted | ({"attn_implementation": section["attention"]} if section["attention"] else {})
    if section["adapter"] or section["quantization"] or section["dtype"] != "float32":
        raise NotCovered("model.adapter, model.quantization, model.dtype: plain trains whole models in float32")
    if section["source"] and weights is None and not empty:
        options |= {"revision": section["revision"], "ignore_mismatched_sizes": True}
        model = auto.from_pretrained(section["source"], config=config, **options)
    else:
        with torch.device("meta" if empty else "cpu"):
            model = auto.from_config(config, **options)
    model = model.float()
    if weights is not None:
        load_weights(model, weights)
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in section["freeze"]):
            parameter.requires_grad_(False)
    return model


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set parameters and buffers by name; each must be there."""
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    if places.keys() != weights.keys():
        raise ValueError(f"other weights than the model's: {sorted(places.keys() ^ weights.keys())[:4]}")
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(weights[name])


def train_steps(
    job: Plain,
    model: nn.Module,
    steps: Sequence[Sequence[Sequence[int]]],
    total: int,
    numbers: Sequence[int] | None = None,
    perturb: bool = False,
    state: dict[str, Tensor] | None = None,
) -> Iterator[StepRecord]:
    """Train `model`, without dropout. `steps`: of each step its micro-batches, of each the numbers of its examples in
    train. `total`: steps of the whole run; `numbers`: which of them these are, default the first ones. `perturb`:
    begin from weights whose last bit is another. `state`: the optimizer's before the first step, as KEY.PARAMETER.
    Errors: `NotCovered`; for an optimizer that torch has not, after the first step."""
    run, known = job.run, job.examples("train")
    numbers = range(len(steps)) if numbers is None else numbers
    if run["precision"] == "fp16":
        raise NotCovered("precision: fp16 scales the loss, and skips steps")
    if perturb:
        perturb_(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    uncovered, optimizers = None, []
    try:
        optimizers = optimizers_of(run, model)
        load_state(optimizers, trained, state or {})
    except NotCovered as error:
        uncovered = error
    rates = rates_of(run["optim"], total, max(numbers) + 1)
    model.train()
    device = next(model.parameters()).device.type
    low = torch.autocast(device, torch.bfloat16) if run["precision"] == "bf16" else nullcontext()
    for number, groups in zip(numbers, steps, strict=True):
        loss, count = 0.0, 0.0
        model.zero_grad()
        for group in groups:
            if not len(group):
                continue
            with without_dropout(model), low:
                total_loss, targets = batch_loss(job, model, [known[i] for i in group], number)
            total_loss.backward()
            loss, count = loss + float(total_loss.detach()), count + targets
        for parameter in trained.values():
            if parameter.grad is not None:
                parameter.grad /= count
        gradients = {n: p.grad.detach().cpu().clone() for n, p in trained.items() if p.grad is not None}
        limit = run["optim"]["clip"] or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), limit))
        before = {name: p.detach().clone() for name, p in trained.items()}
        for optimizer in optimizers:
            for treated in optimizer.param_groups:
                treated["lr"] = rates[number] * treated["scale"]
            optimizer.step()
        changes = {name: (p.detach() - before[name]).cpu() for name, p in trained.items() if optimizers}
        yield StepRecord(loss / count, norm, rates[number], gradients, changes)
        if uncovered is not None:
            raise uncovered


@torch.no_grad()
def perturb_(model: nn.Module) -> None:
    """Every weight one step up or down among the numbers of its type, at random."""
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            up = torch.rand(parameter.shape, generator=draw).to(parameter.device) < 0.5
            ends = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, ends))


def load_state(optimizers: list[torch.optim.Optimizer], trained: dict[str, nn.Parameter], state: dict) -> None:
    """Give optimizers the state that they would have after earlier steps."""
    for key, tensor in state.items():
        kind, _, name = key.partition(".")
        for optimizer in optimizers:
            if any(p is trained[name] for group in optimizer.param_groups for p in group["params"]):
                optimizer.state[trained[name]][kind] = tensor.to(trained[name].device) if tensor.dim() else tensor


# -- the optimizer -----------------------------------------------------------------------------------------------------


def optimizers_of(run: dict, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizer of torch, its groups with `scale`, a factor of the run's rate; of muon a second for the rest."""
    optim = run["optim"]
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters(recurse=False)}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if optim["layer_decay"] != 1.0:
        raise NotCovered("optim.layer_decay: plain compares losses and gradients alone")
    for name, p in named.items():
        own: dict = next((g for g in optim["groups"] if fnmatchcase(name, g["match"])), {})
        scale = own["learning_rate"] / optim["learning_rate"] if own.get("learning_rate") else 1.0
        decay = optim["weight_decay"] if own.get("weight_decay") is None else own["weight_decay"]
        plain = id(p) in norms or name.rpartition(".")[2].endswith("bias")
        matrix = p.dim() == 2 and LAYER.match(f"model.{name}") is not None and id(p) not in tables
        if optim.get("matrices") is not None:
            matrix = p.dim() == 2 and any(fnmatchcase(name, pattern) for pattern in optim["matrices"])
        groups.setdefault((scale, 0.0 if plain else decay, matrix), []).append(p)
    every = [{"params": ps, "scale": s, "weight_decay": d, "matrix": m} for (s, d, m), ps in groups.items()]
    rate = {"lr": optim["learning_rate"]}
    if optim["name"] == "adamw":
        return [torch.optim.AdamW(every, **rate, betas=tuple(optim["betas"]), eps=optim["eps"])]
    if optim["name"] == "sgd":
        return [torch.optim.SGD(every, **rate, momentum=optim["momentum"])]
    if optim["name"] == "adafactor":
        shape = {key: optim[key] for key in ("beta2_decay", "d")}
        return [torch.optim.Adafactor(every, **rate, eps=tuple(optim["eps"]), **shape)]
    if optim["name"] == "muon":
        how = {key: optim[key] for key in ("momentum", "nesterov", "ns_steps")} | {"adjust_lr_fn": optim["adjust"]}
        first, rest = ([g for g in every if g["matrix"] == is_matrix] for is_matrix in (True, False))
        others = torch.optim.AdamW(rest, **rate, betas=tuple(optim["betas"]), eps=optim["eps"])
        return [torch.optim.Muon(first, **rate, **how), others]
    raise NotCovered(f"optim.name: torch has no {optim['name']}; plain compares losses and gradients alone")


def rates_of(optim: dict, total: int, count: int) -> list[float]:
    """The learning rates of the first `count` of `total` steps, by transformers' `get_scheduler` or OneCycleLR."""
    top, least, kind = optim["learning_rate"], optim["minimum"], optim["schedule"]
    if isinstance(kind, list):
        return [float(np.interp(step, [s for s, _ in kind], [r for _, r in kind])) for step in range(count)]
    from transformers import get_scheduler

    warmup = optim["warmup_steps"] or math.ceil(optim["warmup_fraction"] * total)
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=top)
    if kind == "one_cycle":
        share = optim["warmup_steps"] / total if optim["warmup_steps"] else optim["warmup_fraction"] or 0.3
        if total == 1:
            return [top]
        down: dict[str, Any] = {"final_div_factor": 1 / (25 * least) if least else math.inf, "cycle_momentum": False}
        schedule: Any = torch.optim.lr_scheduler.OneCycleLR(dummy, top, total_steps=total, pct_start=share, **down)
    else:
        decay = optim["decay_steps"] or math.ceil(optim["decay_fraction"] * total)
        shape = {"sqrt": "1-sqrt"}.get(optim["decay_shape"], optim["decay_shape"])
        names = {
            "constant": ("constant_with_warmup", {}),
            "linear": ("polynomial", {"lr_end": least * top, "power": 1.0}) if least else ("linear", {}),
            "cosine": ("cosine_with_min_lr", {"min_lr_rate": least}) if least else ("cosine", {}),
            "polynomial": ("polynomial", {"lr_end": least * top, "power": optim["power"]}),
            "inverse_sqrt": ("inverse_sqrt", {}),
            "wsd": (
                "warmup_stable_decay",
                {"num_decay_steps": min(decay, total - warmup), "min_lr_ratio": least, "decay_type": shape},
            ),
        }
        name, own = names[kind]
        steps = {
            "num_warmup_steps": warmup,
            "num_training_steps": None if kind in ("constant", "inverse_sqrt") else total,
        }
        schedule = get_scheduler(name, dummy, **steps, scheduler_specific_kwargs=own)
    found = []
    for _ in range(count):
        found.append(float(dummy.param_groups[0]["lr"]))
        dummy.step()
        schedule.step()
    return found
