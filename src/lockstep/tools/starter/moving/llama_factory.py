"""LLaMA-Factory's YAML. In: its keys, those of `TrainingArguments` among them. Out: keys of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.tools.starter.moving import trainer
from lockstep.tools.starter.moving.table import CACHED, QUANTISED, Moved, Row, Table, lora, number

# Beside these, all keys of `TrainingArguments` are known.
TABLE: Table = {
    "model_name_or_path": Row("model.source"),
    "trust_remote_code": Row("model.trust_remote_code"),
    "stage": Row("task.name", "pt and sft are language modelling", joined=True),
    "dataset": Row("data.source", "its file: the name stands in dataset_info.json", joined=True),
    "dataset_dir": Row("data.source", "the folder of that file", joined=True),
    "cutoff_len": Row("task.block_size"),
    "packing": Row("task.packing"),
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
    # what has no counterpart
    "template": Row("", "the tokenizer's own chat template, or task.chat_template as Jinja"),
    "adapter_name_or_path": Row("", "merge that adapter first, or go on with lockstep's own checkpoint"),
    "overwrite_cache": Row("", CACHED),
    "preprocessing_num_workers": Row("", CACHED),
    "tokenized_path": Row("", CACHED),
    "streaming": Row("", "data are tokenised once, before training"),
    "plot_loss": Row("", "report.html has the curves"),
    "quantization_bit": Row("", QUANTISED),
    "quantization_method": Row("", QUANTISED),
    "train_on_prompt": Row("", "of prompts and conversations the response alone is learned"),
    "mask_history": Row("", "all that the assistant says is learned"),
    "eval_dataset": Row("", "data.validation names files, or a split"),
    "resize_vocab": Row("", "a tokenizer is used as it is"),
    "rope_scaling": Row("", "model.config sets entries of the model's own config"),
    "enable_liger_kernel": Row("", "an option of strategy.name=hf_trainer, where it may change the bits"),
    "use_unsloth": Row("", "the model's own kernels are used"),
    "neat_packing": Row("", "task.packing"),
    "freeze_trainable_layers": Row("", "all weights are trained, or those of an adapter"),
    "pref_beta": Row("", "preference learning and rewards are not learned here"),
    "pref_loss": Row("", "preference learning and rewards are not learned here"),
    "reward_model": Row("", "preference learning and rewards are not learned here"),
}
_STAGES = {"pt": {"task.text": "text"}, "sft": {"task.prompt": "instruction", "task.response": "output"}}


def move(theirs: Mapping[str, Any], moved: Moved, processes: int | None) -> None:
    """Its task is language modelling: texts (pt), or instructions (sft)."""
    moved.set("task.name", "language_modeling", "")
    trainer.move(theirs, moved, processes, trainer.TABLE | TABLE)
    stage = str(theirs.get("stage", "sft"))
    if stage in _STAGES:
        for key, column in _STAGES[stage].items():
            moved.set(key, column, f"stage {stage}: LLaMA-Factory's usual column, if dataset_info.json says no other")
    else:
        moved.drop("stage", stage, "preference learning and rewards are not learned here")
    if name := theirs.get("dataset"):
        names = [each.strip() for each in str(name).split(",")]
        folder = str(theirs.get("dataset_dir", "data"))
        moved.set("data.source", f"{folder}/{names[0]}.json", f"dataset {names[0]}: see its file in dataset_info.json")
        moved.notes.append(f"data.source is guessed from dataset {names[0]!r}: dataset_info.json says which file it is")
        for more in names[1:]:
            moved.drop("dataset", more, "one data set a run: join them into files of one folder")
    if share := number(theirs.get("val_size")):
        if share < 1:
            moved.set("data.validation_fraction", share, "val_size")
        else:
            moved.drop("val_size", theirs["val_size"], "data.validation_fraction is a share, below 1")
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
        moved.drop("finetuning_type", kind, "all weights are trained, or those of an adapter (model.adapter)")
