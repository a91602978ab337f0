"""Trains a few steps in one process: forward, backward, one division, clipping, torch's optimizer.

In: a job, a transformers model, and the examples of each step. Out: loss, gradients and weight changes of each step.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from lockstep.plain import module
from lockstep.plain.examples import Plain, end_token
from lockstep.plain.losses import batch_loss
from lockstep.plain.rows import TASKS, NotCovered

SHARED = ("betas", "eps", "momentum", "beta2_decay", "d", "nesterov", "ns_steps")  # optimizer keys that torch shares


@dataclass(frozen=True)
class TrainedStep:
    """The results of one step."""

    loss: float  # mean over the targets of the step
    targets: float
    norm: float  # 2-norm of the whole gradient, before clipping
    gradients: dict[str, Tensor]  # by parameter, before clipping
    changes: dict[str, Tensor]  # by trained parameter, from the update; empty if torch lacks the optimizer


def build_model(job: Plain, weights: dict[str, Tensor] | None = None, empty: bool = False) -> nn.Module:
    """Build the model of the run file with the Auto class of its task.

    `weights`: initial weights by name; default: those of the source, or random ones. `empty`: build on the meta device,
    without reading weights of the source. Errors: `NotCovered`."""
    if job.run["task"]["name"] == "module":
        model = module.build(job.run)
    else:
        section, (_, head, kind) = job.run["model"], TASKS[job.run["task"]["name"]]
        if section["quantization"] or (section["dtype"] != "float32" and not section["adapter"]):
            raise NotCovered("model.quantization, model.dtype: plain trains in float32")
        if section["source"] and weights is None and not empty:
            model = load_pretrained(job)[0].float()
        else:
            with torch.device("meta" if empty else "cpu"):
                auto, options = getattr(transformers, f"AutoModel{head}"), _attention(section)
                model = auto.from_config(_config(job, head), **options).float()
            if weights is not None:
                _untie(model, weights)
        if section["adapter"]:
            model = _adapted(model, {k: v for k, v in section["adapter"].items() if k != "export"}, kind)
        frozen = [*section["freeze"], *(() if head else ["pooler.*"])]  # embeddings do not use the pooler
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not any(fnmatchcase(name, each) for each in frozen))
    if weights is not None:
        load_weights(model, weights)
    return model


def load_pretrained(job: Plain, dtype: torch.dtype | None = None) -> tuple[Any, set[str]]:
    """Load a model by `from_pretrained`, and return it with the names of weights that its files lack or hold in another
    shape, which are initialized randomly. `dtype`: None for that of the files. Errors: `NotCovered`."""
    section, (_, head, _) = job.run["model"], TASKS[job.run["task"]["name"]]
    options = {"revision": section["revision"], "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, report = getattr(transformers, f"AutoModel{head}").from_pretrained(
        section["source"],
        config=_config(job, head),
        **options,
        **_attention(section),
        **({"dtype": dtype} if dtype else {}),
    )
    return model, {*report["missing_keys"], *(n if isinstance(n, str) else n[0] for n in report["mismatched_keys"])}


def _attention(section: dict) -> dict[str, Any]:
    return {"attn_implementation": section["attention"]} if section["attention"] else {}


def _untie(model: Any, weights: dict[str, Tensor]) -> None:
    """Untie each tied parameter that has its own entry in `weights`."""
    first = {name for name, _ in model.named_parameters()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        named = {name, f"base_model.model.{name}"}  # the second: inside a peft adapter
        if named & weights.keys() and name not in first:
            holder, _, last = name.rpartition(".")
            setattr(model.get_submodule(holder), last, nn.Parameter(torch.empty_like(parameter)))


HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",)}


def _adapted(model: nn.Module, adapter: dict, kind: str | None) -> nn.Module:
    """Add a peft adapter. `kind`: peft's task type; None if peft has none, so the head has to be named."""
    import peft

    head = {"modules_to_save": ["classifier"]} if kind is None else {}
    options = {"peft_type": adapter.pop("type", "lora").upper(), "task_type": kind, **head, **adapter}
    if str(options.get("target_modules")).lower() == "all-linear":  # heads are trained whole, without an adapter
        whole = [*(options.get("modules_to_save") or []), *HEADS.get(kind or "", ())]
        if whole:
            options.setdefault("exclude_modules", rf".*({'|'.join(map(re.escape, whole))})(\..*)?")
        # torch's attention reads the weight of this layer without calling it, so an adapter there would do nothing
        inner = [f"{n}.out_proj" for n, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)]
        if inner and isinstance(excluded := options.get("exclude_modules") or [], str):
            options["exclude_modules"] = "|".join([excluded, *map(re.escape, inner)])
        elif inner:
            options["exclude_modules"] = [*excluded, *inner]
    return peft.get_peft_model(model, peft.get_peft_config(options))


def _config(job: Plain, head: str) -> Any:
    """Return the model's config: the run file's entries, the tokenizer's special tokens, the task's labels."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    section, tokenizer = job.run["model"], job.tokenizer
    if section["trust_remote_code"]:
        raise NotCovered("model.trust_remote_code: plain supports only models of transformers")
    if section["type"]:
        config = _new_config(section, tokenizer)
    else:
        config = transformers.AutoConfig.from_pretrained(section["source"], revision=section["revision"])
        config.update(section["config"])
    if tokenizer is not None:
        for part in parts(config):
            part.pad_token_id = tokenizer.pad_token_id
            part.use_cache = False
    if head.endswith("Classification"):
        _set_labels(job, config)
    if head == "ForCausalLM" and config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        config.is_decoder = True  # else each token would see later ones
    if head == "ForSeq2SeqLM":
        _set_targets(job, config)
    elif config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = tokenizer.pad_token_id
    return config


def _new_config(section: dict, tokenizer: Any) -> Any:
    """Return the config of a model from scratch, with the tokenizer's size and special tokens."""
    kind = transformers.CONFIG_MAPPING[section["type"]]
    entries: dict[str, Any] = {"architectures": [], **section["config"]}  # transformers iterates over architectures
    for name, part in kind.sub_configs_defaults.items():  # defaults of a part, for example is_decoder of a decoder
        if isinstance(entries.get(name), dict):
            entries[name] = {**(part.init_kwargs or {}), **entries[name]}
    config = kind(**entries)
    if tokenizer is not None:
        size = entries.get("vocab_size", len(tokenizer))
        for part in parts(config):
            for name in ("vocab_size", "decoder_vocab_size"):
                if hasattr(part, name):
                    part.update({name: size})
            for name in ("bos_token_id", "eos_token_id"):
                with suppress(Exception):  # a family that requires one keeps its default
                    setattr(part, name, getattr(tokenizer, name))
    if config.is_encoder_decoder:
        if config.eos_token_id is None:  # classifiers read the token at the text's end
            config.eos_token_id = tokenizer.sep_token_id
        for part in parts(config)[1:]:
            if part.bos_token_id is None:  # the decoder needs a start token
                part.bos_token_id = tokenizer.pad_token_id
    return config


def _set_labels(job: Plain, config: Any) -> None:
    """Set the kind of a classifier's labels, and their number: 1 for a reward model, which has no labels."""
    task = job.run["task"]
    if task.get("regression"):
        config.problem_type = "regression"
        labels = job.encode(job.splits["train"][:1])[0]["labels"]
    elif task.get("multi_label"):
        config.problem_type = "multi_label_classification"
        labels = job.labels
    else:
        config.problem_type = "single_label_classification"
        labels = job.labels
    config.num_labels = len(labels) or 1


def _set_targets(job: Plain, config: Any) -> None:
    """Set the token that targets begin with, and the size of a decoder with a vocabulary of its own.

    A pretrained model names its first token; else it is the family's, and for most families the padding."""
    section, targets = job.run["model"], job.target_tokenizer
    family = config.model_type.rstrip("2")
    first: list[int | None] = []
    if not section["type"]:
        first += [getattr(config, "decoder_start_token_id", None), getattr(config, "bos_token_id", None)]
    if family in ("bart", "mbart", "fsmt"):
        first.append(end_token(targets))
    if family == "t5gemma":
        first.append(targets.bos_token_id)
    first.append(targets.pad_token_id)
    config.decoder_start_token_id = next((token for token in first if token is not None), None)
    if section["type"] and hasattr(config, "decoder_vocab_size"):
        config.decoder_vocab_size = len(targets)
        config.share_encoder_decoder_embeddings = targets is job.tokenizer


def parts(config: Any) -> list[Any]:
    """Return a config and its nested encoder, decoder and text configs."""
    within = [p for name in ("encoder", "decoder", "text_config") if (p := vars(config).get(name)) is not None]
    return [config, *(each for part in within for each in parts(part))]


def load_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set all parameters and buffers by name. Errors: `ValueError` if the names differ."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if tensors.keys() != weights.keys():
        raise ValueError(f"the weights do not fit the model: {sorted(tensors.keys() ^ weights.keys())[:4]}")
    for name, tensor in tensors.items():
        tensor.detach().copy_(weights[name])


def train_steps(
    job: Plain,
    model: nn.Module,
    steps: Iterable[Iterable[list[dict]]],
    total: int,
    numbers: Sequence[int],
    state: dict[str, Tensor] | None = None,
    divisors: Iterable[float] | None = None,
) -> Iterator[TrainedStep]:
    """Train `model` and yield a record of each step.

    `steps`: steps of micro-batches of examples. `numbers`: the steps' numbers among the `total` steps of the run.
    `state`: optimizer state before the first step, KEY.PARAMETER -> tensor. `divisors`: number of targets of each step,
    if known; losses are then divided before backward, because in half precision a gradient and its quotient round
    differently. Errors: `NotCovered`; for an optimizer that torch lacks, after the first step."""
    run = job.run
    if run["precision"] == "fp16":
        raise NotCovered("precision: fp16 scales the loss, and skips steps")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizers = optimizers_of(run, model, trained, state or {})
    rates = rates_of(run["optim"], total, max(numbers) + 1)
    model.train()
    for number, micro_batches, divisor in zip(numbers, steps, divisors or [1.0] * len(numbers), strict=True):
        loss, count = 0.0, 0.0
        model.zero_grad()
        for examples in micro_batches:
            with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, run["precision"] == "bf16"):
                sum_of_losses, targets = batch_loss(job, model, examples)
            (sum_of_losses / divisor).backward()
            loss, count = loss + float(sum_of_losses.detach()), count + targets
        for p in trained.values():
            p.grad = None if p.grad is None else p.grad / (count / divisor)
        before = {name: p.detach().clone() for name, p in trained.items()}
        gradients = {name: p.grad.cpu().clone() for name, p in trained.items() if p.grad is not None}
        # in float64: on a CPU a float32 sum of the squares of large embeddings is off by 1e-5, and so is the clip
        norm = torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(trained.values(), run["optim"]["max_grad_norm"] or math.inf, norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rates[number] * group["scale"]
            optimizer.step()
        changes = {name: (p.detach() - before[name]).cpu() for name, p in trained.items() if optimizers}
        yield TrainedStep(loss / count, count, float(norm), gradients, changes)
        if not optimizers:
            raise NotCovered("optim.name, optim.layerwise_lr_decay: plain compares only its losses and gradients")


# -- the optimizer -----------------------------------------------------------------------------------------------------


def optimizers_of(run: dict, model: nn.Module, trained: dict[str, Any], state: dict) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers; none if torch lacks the kind. Muon has a second one for other parameters. Each
    parameter is a group of its own; `scale` of a group: factor of the run's learning rate."""
    optim = run["optim"]
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
    if optim["name"] not in (*kinds, "muon") or optim["layerwise_lr_decay"] != 1.0:
        return []
    options: dict[str, Any] = {key: optim[key] for key in SHARED if key in optim}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    modules: dict[int, list[nn.Module]] = {id(p): [] for p in trained.values()}  # those that hold a parameter directly
    for layer in model.modules():
        for p in layer.parameters(recurse=False):
            modules.setdefault(id(p), []).append(layer)
    groups = {name: _group(optim, name, p, modules[id(p)]) for name, p in trained.items()}
    optimizers: list[torch.optim.Optimizer] = []
    if optim["name"] == "muon":
        heads = _heads(model)
        of_the_rest = {key: options.pop(key) for key in ("betas", "eps")}
        muons = {name for name, p in trained.items() if _is_muons(optim, name, p, modules[id(p)], id(p) in heads)}
        matrices = [group for name, group in groups.items() if name in muons]
        others = [group for name, group in groups.items() if name not in muons]
        if matrices:
            optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn=optim["lr_adjust"], **options))
        if others:
            optimizers.append(torch.optim.AdamW(others, **of_the_rest))
    else:
        optimizers.append(kinds[optim["name"]](list(groups.values()), **options))
    for optimizer in optimizers:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, tensor in state.items():
            kind, _, name = key.partition(".")
            if id(trained[name]) in own:
                on_device = tensor.to(trained[name].device) if tensor.dim() else tensor
                optimizer.state[trained[name]][kind] = on_device
    return optimizers


def _group(optim: dict, name: str, parameter: Tensor, modules: list[nn.Module]) -> dict[str, Any]:
    """Return the group of one parameter, which `modules` hold. It has the keys of the first of `optim.groups` that
    matches its name, and else those of `optim`. Biases and the weights of norms do not decay."""
    own = dict(optim)
    for group in optim["groups"]:
        if fnmatchcase(name, group["match"]):
            own |= {key: value for key, value in group.items() if value is not None}
            break
    # without the numbers of layers and peft's wrappers: [module, own name]
    last_two = re.sub(r"\.(\d+|modules_to_save|default)(?=\.|$)", "", name).rsplit(".", 2)[-2:]
    is_bias = "bias" in ".".join(last_two).lower()
    is_norm = any("norm" in type(each).__name__.lower() for each in modules)
    decays = not is_bias and (not is_norm or _is_embedding(modules))
    return {
        "params": [parameter],
        "scale": own["learning_rate"] / optim["learning_rate"],
        "weight_decay": own["weight_decay"] if decays else 0.0,
    }


def _heads(model: Any) -> set[int]:
    """Ids of the parameters outside the base of a transformers model, also of one within an adapter."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, transformers.PreTrainedModel) or inner.base_model is inner:
        return set()
    return {id(p) for p in model.parameters()} - {id(p) for p in inner.base_model.parameters()}


def _is_muons(optim: dict, name: str, parameter: Tensor, modules: list[nn.Module], in_head: bool) -> bool:
    """Whether Muon updates the parameter: a matrix that `optim.muon_params` names; by default, one in a numbered layer
    that is no embedding and not in the head."""
    if parameter.dim() != 2:
        return False
    if optim.get("muon_params") is not None:
        return any(fnmatchcase(name, pattern) for pattern in optim["muon_params"])
    return re.search(r"(^|\.)\d+\.", name) is not None and not in_head and not _is_embedding(modules)


def _is_embedding(modules: list[nn.Module]) -> bool:
    return any(isinstance(each, nn.Embedding) for each in modules)


def rates_of(optim: dict, total: int, count: int) -> list[float]:
    """Return the rates of the first `count` of `total` steps, by transformers' `get_scheduler` or OneCycleLR."""
    if isinstance(optim["schedule"], list):  # points [step, rate], and straight lines between them
        steps, rates_at = zip(*optim["schedule"], strict=True)
        return [float(np.interp(step, steps, rates_at)) for step in range(count)]
    if optim["schedule"] == "one_cycle" and total == 1:  # OneCycleLR divides by the steps before the last
        return [optim["learning_rate"]]
    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=optim["learning_rate"])
    scheduler = _scheduler(optim, dummy, total)
    rates = []
    for _ in range(count):
        rates.append(float(scheduler.get_last_lr()[0]))
        dummy.step()
        scheduler.step()
    return rates


def _scheduler(optim: dict, dummy: torch.optim.Optimizer, total: int) -> Any:
    """Return the scheduler of torch or transformers that `optim.schedule` names, for an optimizer with the top rate."""
    kind, least = optim["schedule"], optim["min_lr_ratio"]
    warmup = optim["warmup_steps"] or math.ceil(optim["warmup_fraction"] * total)
    if kind == "constant":
        return transformers.get_scheduler("constant_with_warmup", dummy, warmup)
    if kind == "inverse_sqrt":
        return transformers.get_scheduler("inverse_sqrt", dummy, warmup)
    if kind == "cosine":
        return transformers.get_scheduler("cosine_with_min_lr", dummy, warmup, total, {"min_lr_rate": least})
    if kind == "wsd":
        decay = optim["decay_steps"] or math.ceil(optim["decay_fraction"] * total)
        shape = "1-sqrt" if optim["decay_shape"] == "sqrt" else optim["decay_shape"]
        options = {"num_decay_steps": min(decay, total - warmup), "decay_type": shape, "min_lr_ratio": least}
        return transformers.get_scheduler("warmup_stable_decay", dummy, warmup, total, options)
    if kind == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(
            dummy,
            max_lr=optim["learning_rate"],
            total_steps=total,
            pct_start=optim["warmup_steps"] / total or optim["warmup_fraction"] or 0.3,
            final_div_factor=1 / (25 * least) if least else math.inf,  # of the first rate, which is top / 25
            cycle_momentum=False,
        )
    # polynomial; linear is the one of power 1
    options = {"lr_end": least * optim["learning_rate"], "power": optim["power"]}
    return transformers.get_scheduler("polynomial", dummy, warmup, total, options)
