"""LLaMA-Factory's YAML. In: its keys, those of `TrainingArguments` among them. Out: keys of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.run import RunError
from lockstep.tools.import_config import trainer
from lockstep.tools.import_config.table import (
    CACHED,
    EIGHT_BITS,
    Imported,
    Row,
    Table,
    lora,
    number,
    quantized,
    whole,
)

# Beside these, all keys of `TrainingArguments` are known.
TABLE: Table = {
    "model_name_or_path": Row("model.source"),
    "trust_remote_code": Row("model.trust_remote_code"),
    "stage": Row("task.name", "pt and sft: language_modeling; dpo: preference; rm: reward", joined=True),
    "dataset": Row("data.source", "its file: the name stands in dataset_info.json", joined=True),
    "dataset_dir": Row("data.source", "the folder of that file", joined=True),
    "cutoff_len": Row("task.block_size", "of preference and reward: data.max_length"),
    "packing": Row("task.packing", "stage pt: true by default", joined=True),
    "neat_packing": Row("task.attend_across_documents", "true: with packing, false", joined=True),
    "max_samples": Row("data.limit"),
    "val_size": Row("data.validation_fraction", "a share", joined=True),
    "finetuning_type": Row("model.adapter", "lora; full: no adapter", joined=True),
    "lora_rank": Row("model.adapter", "r", joined=True),
    "lora_alpha": Row("model.adapter", "lora_alpha", joined=True),
    "lora_dropout": Row("model.adapter", "lora_dropout", joined=True),
    "lora_target": Row("model.adapter", "target_modules; all: all-linear", joined=True),
    "use_dora": Row("model.adapter", "use_dora", joined=True),
    "use_rslora": Row("model.adapter", "use_rslora", joined=True),
    "flash_attn": Row(
        "model.attention", "fa2, sdpa", values={"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}
    ),
    "pref_beta": Row("task.beta", "of stage dpo", joined=True),
    "pref_loss": Row("task.loss", "sigmoid: dpo; ipo, hinge, simpo", joined=True),
    "simpo_gamma": Row("task.gamma", "of pref_loss simpo", joined=True),
    "dpo_label_smoothing": Row("task.label_smoothing", "of pref_loss sigmoid", joined=True),
    "quantization_bit": Row("model.quantization", "4: nf4", joined=True),
    "quantization_type": Row("model.quantization", "nf4, fp4", joined=True),
    # what has no counterpart
    "template": Row("", "the tokenizer's own chat template, or task.chat_template as Jinja", joined=True),
    "adapter_name_or_path": Row(
        "", "merge that adapter first, or go on with lockstep's own checkpoint", decides=True, by=("model.source",)
    ),
    "pref_ftx": Row("", "the loss of pairs alone, without that of the chosen answer's tokens", decides=True),
    "reward_model": Row("", "of stage ppo", decides=True),
    "overwrite_cache": Row("", CACHED),
    "preprocessing_num_workers": Row("", CACHED),
    "tokenized_path": Row("", CACHED),
    "streaming": Row("", "data.stream: true reads shards while training"),
    "plot_loss": Row("", "report.html has the curves"),
    "double_quantization": Row("", "the scales of the 4-bit weights are in float32", default=True),
    "use_muon": Row("", "optim.name: muon, by rates of its own", decides=True, by=("optim.name",)),
    "quantization_method": Row("", "bitsandbytes", default="bnb", decides=True),
    "train_on_prompt": Row("", "of prompts and conversations the response alone is learned", decides=True),
    "mask_history": Row("", "all that the assistant says is learned", decides=True),
    "eval_dataset": Row("", "data.validation names files, or a split"),
    "resize_vocab": Row("", "a tokenizer is used as it is", decides=True, by=("tokenizer.source",)),
    "rope_scaling": Row("", "model.config sets entries of the model's own config", decides=True, by=("model.config",)),
    "enable_liger_kernel": Row("", "an option of strategy.name=hf_trainer, where it may change the bits"),
    "use_unsloth": Row("", "the model's own kernels are used"),
    "freeze_trainable_layers": Row(
        "", "model.freeze names the weights that are not trained", decides=True, by=("model.freeze",)
    ),
}
_STAGES = {
    "pt": ("language_modeling", {"task.text": "text"}),
    "sft": ("language_modeling", {"task.prompt": "instruction", "task.response": "output"}),
    "dpo": ("preference", {"task.prompt": "instruction", "task.chosen": "chosen", "task.rejected": "rejected"}),
    "rm": ("reward", {"task.prompt": "instruction", "task.chosen": "chosen", "task.rejected": "rejected"}),
}
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "hinge": "hinge", "simpo": "simpo"}
_TEMPLATE = (
    "a prompt and its response are read as they are, and its column input is not: make conversations of them "
    "(task.messages=messages), or name a column of whole prompts (task.prompt=...)"
)


def move(theirs: Mapping[str, Any], moved: Imported, processes: int | None) -> None:
    """Its task is language modelling (pt, sft), or learning from pairs of answers (dpo, rm). Errors: `RunError`."""
    stage = str(theirs.get("stage", "sft"))
    loss = str(theirs.get("pref_loss", "sigmoid")) if stage == "dpo" else "sigmoid"
    if moved.task is None and (stage not in _STAGES or loss not in _LOSSES):
        way = f"stage: {stage}" if stage not in _STAGES else f"pref_loss: {loss}"
        raise RunError(
            f"--from: {way} has no counterpart: stages are {', '.join(_STAGES)}, and losses of dpo "
            f"{', '.join(_LOSSES)}; to write another task's file, give --task"
        )
    task, columns = _STAGES.get(stage, ("language_modeling", {}))
    moved.set("task.name", task, f"stage {stage}")
    trainer.move(theirs, moved, processes, trainer.TABLE | TABLE)
    for key, column in columns.items():
        moved.set(key, column, f"stage {stage}: LLaMA-Factory's usual column, if dataset_info.json says no other")
    template = theirs.get("template")
    if task != "language_modeling":
        moved.set("task.conversations", True, f"stage {stage}: through the tokenizer's own chat template")
        if template:
            moved.notes.append(f"template {template}: the tokenizer's own is used, or task.chat_template as Jinja")
    elif template not in (None, "empty") and stage != "pt":
        moved.drop("template", template, _TEMPLATE, True, ("task.messages", "task.prompt"))
    if stage == "dpo":
        moved.set("task.loss", _LOSSES.get(loss, loss), f"pref_loss {loss}")
    for key, name in (("beta", "pref_beta"), ("gamma", "simpo_gamma"), ("label_smoothing", "dpo_label_smoothing")):
        if (value := number(theirs.get(name))) is not None:
            moved.set(f"task.{key}", value, name)
    if task == "language_modeling":
        neat = bool(theirs.get("neat_packing"))
        packed = neat or bool(theirs["packing"] if theirs.get("packing") is not None else stage == "pt")
        told = "neat_packing" if neat else "packing" if "packing" in theirs else f"packing, by default of stage {stage}"
        moved.set("task.packing", packed, told)
        if neat:
            moved.set("task.attend_across_documents", False, told)
    _data(theirs, moved)
    _adapter(theirs, moved)


def _data(theirs: Mapping[str, Any], moved: Imported) -> None:
    if name := theirs.get("dataset"):
        names = [each.strip() for each in str(name).split(",")]
        folder = str(theirs.get("dataset_dir", "data"))
        moved.set("data.source", f"{folder}/{names[0]}.json", f"dataset {names[0]}: see its file in dataset_info.json")
        moved.notes.append(f"data.source is guessed from dataset {names[0]!r}: dataset_info.json says which file it is")
        for more in names[1:]:
            moved.drop("dataset", more, "several are written by hand: data.sources", True, ("data.source",))
    if share := number(theirs.get("val_size")):
        if share < 1:
            moved.set("data.validation_fraction", share, "val_size")
        else:
            why = "data.validation_fraction is a share, below 1"
            moved.drop("val_size", theirs["val_size"], why, True, ("data.validation_fraction",))


def _adapter(theirs: Mapping[str, Any], moved: Imported) -> None:
    kind = theirs.get("finetuning_type", "lora")
    if kind == "lora":
        target = theirs.get("lora_target", "all")
        entries = {
            "r": theirs.get("lora_rank", 8),
            "lora_alpha": theirs.get("lora_alpha", 2 * (theirs.get("lora_rank") or 8)),
            "lora_dropout": theirs.get("lora_dropout"),
            "target_modules": "all-linear" if target == "all" else [t.strip() for t in str(target).split(",")],
            "use_dora": theirs.get("use_dora"),
            "use_rslora": theirs.get("use_rslora"),
        }
        lora(moved, entries, "finetuning_type lora")
    elif kind != "full":
        why = "all weights are trained, or those of an adapter (model.adapter)"
        moved.drop("finetuning_type", kind, why, True, ("model.adapter", "model.freeze"))
    if bits := whole(theirs.get("quantization_bit"), 0):
        if bits == 4:
            quantized(moved, theirs.get("quantization_type", "nf4"), True, "quantization_bit 4")
        else:
            moved.drop("quantization_bit", bits, EIGHT_BITS, True, ("model.quantization", "model.dtype"))
