"""torchtune recipes: they are refused, and the message lists the keys to write.

In: the keys of a YAML file whose values name functions of torchtune (`_component_`): its models, tokenizers and data
sets are in formats of its own, so no run file can be written from their names. Out: the lines of a run file that the
other keys give.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.run import RunError
from lockstep.lab.import_config.table import number

PAGE = "reference/coming-from/torchtune on the site"
_OWN = ("model", "tokenizer", "dataset")
_MLP = ("gate_proj", "up_proj", "down_proj")
_OPTIMIZERS = {"AdamW": "adamw", "PagedAdamW": "adamw", "PagedAdamW8bit": "adamw_8bit", "AdamW8bit": "adamw_8bit"}


def is_recipe(keys: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) and "_component_" in value for value in keys.values())


def refusal(path: Path, keys: Mapping[str, Any]) -> RunError:
    """The error for a recipe, with the lines that its numbers give."""
    own = [f"{name}: {keys[name].get('_component_')}" for name in _OWN if isinstance(keys.get(name), Mapping)]
    return RunError(
        "LS8540",
        "\n".join(
            [
                f"--from: {path} is a recipe of torchtune. Its weights and texts come from functions of torchtune that "
                f"have no counterpart by name ({'; '.join(own)}). Write the run file by hand: model.source (the Hub id "
                f"of the same weights), data.source, task and its columns, as {PAGE} shows, and",
                *(f"  {line}" for line in _lines(keys)),
            ]
        ),
    )


def _lines(keys: Mapping[str, Any]) -> list[str]:
    """Lines of a run file from the keys that are numbers, for one process."""
    each, times = number(keys.get("batch_size")), number(keys.get("gradient_accumulation_steps", 1))
    lines = []
    if each and times:
        lines.append(f"batch_size: {int(each * times)}  # of one process; times their number")
        lines.append(f"micro_batches: {int(times)}")
    for ours, theirs in (("epochs", "epochs"), ("seed", "seed")):
        if (value := number(keys.get(theirs))) is not None:
            lines.append(f"{ours}: {value:g}")
    optim = _optim(keys)
    lines.append(f"optim: {{{', '.join(f'{name}: {value}' for name, value in optim.items())}}}")
    if str(keys.get("dtype")) in ("bf16", "fp16", "fp32"):
        lines.append(f"precision: {keys['dtype']}")
    tokenizer = keys["tokenizer"] if isinstance(keys.get("tokenizer"), Mapping) else {}
    if length := number(tokenizer.get("max_seq_len")):
        lines.append(f"task: {{name: language_modeling, block_size: {length:g}}}")
    if keys.get("shuffle") is False:
        lines.append("# shuffle: False has no counterpart: every epoch has an order from the seed")
    model = keys["model"] if isinstance(keys.get("model"), Mapping) else {}
    if rank := model.get("lora_rank"):
        modules = [*(model.get("lora_attn_modules") or ()), *(_MLP if model.get("apply_lora_to_mlp") else ())]
        modules += ["lm_head"] if model.get("apply_lora_to_output") else []
        dropout = f", lora_dropout: {rate:g}" if (rate := number(model.get("lora_dropout"))) else ""
        targets = dropout + (f", target_modules: [{', '.join(map(str, modules))}]" if modules else "")
        lines.append(f"model: {{adapter: {{type: lora, r: {rank}, lora_alpha: {model.get('lora_alpha')}{targets}}}}}")
    return lines


def _optim(keys: Mapping[str, Any]) -> dict[str, Any]:
    theirs = keys["optimizer"] if isinstance(keys.get("optimizer"), Mapping) else {}
    kind = str(theirs.get("_component_")).rpartition(".")[2]
    optim: dict[str, Any] = {"name": _OPTIMIZERS.get(kind, kind.lower())}
    for ours, name in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
        if (value := number(theirs.get(name))) is not None:
            optim[ours] = f"{value:g}"
    scheduler = keys.get("lr_scheduler")
    if isinstance(scheduler, Mapping):
        cosine = "cosine" in str(scheduler.get("_component_"))
        optim |= {"schedule": "cosine" if cosine else "..."}
        if (steps := number(scheduler.get("num_warmup_steps"))) is not None:
            optim["warmup_steps"] = int(steps)
    else:
        optim["schedule"] = "constant"
    clip = number(keys.get("clip_grad_norm"))
    optim["max_grad_norm"] = f"{clip:g}" if clip else 0
    return optim
