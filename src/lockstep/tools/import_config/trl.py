"""TRL's `SFTConfig`, `DPOConfig`, `CPOConfig` and `RewardConfig`, as YAML, as JSON, in a script or on a command line.

In: their fields, those of TRL's own scripts (`ModelConfig`, `ScriptArguments`) and of `TrainingArguments` among them.
Out: keys of a run file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.run import RunError
from lockstep.tools.import_config import trainer
from lockstep.tools.import_config.table import EIGHT_BITS, Imported, Row, Table, lora, number, quantized

_TEMPLATE = ("task.chat_template",)
_TOKENIZER = ("tokenizer.source",)
_LOSSES = "the loss is that of the pairs alone"
_PADDING = "what is padded, and how far, changes nothing"

# Beside these, all keys of `TrainingArguments` are known.
TABLE: Table = {
    # of the data
    "dataset_train_split": Row("data.train"),
    "dataset_test_split": Row("data.validation", "with eval_strategy", joined=True),
    "dataset_config": Row("data.config"),
    "dataset_text_field": Row("task.text", joined=True),
    "max_length": Row("data.max_length", "of language modelling: task.block_size; default 1024", joined=True),
    "max_seq_length": Row("data.max_length", "the older name of max_length", joined=True),
    "packing": Row("task.packing", "with packing_strategy", joined=True),
    "packing_strategy": Row("task.attend_across_documents", "bfd: false; wrapped: true", joined=True),
    # of the loss
    "beta": Row("task.beta", "of preference", joined=True),
    "loss_type": Row("task.loss", "sigmoid: dpo; ipo, hinge; simpo of CPOConfig with cpo_alpha 0", joined=True),
    "label_smoothing": Row("task.label_smoothing", "of preference", joined=True),
    "simpo_gamma": Row("task.gamma", "of simpo", joined=True),
    "cpo_alpha": Row("task.loss", "0, with loss_type simpo", joined=True),
    "center_rewards_coefficient": Row("task.center", "of reward", joined=True),
    # of the model
    "use_peft": Row("model.adapter", "with lora_r, lora_alpha and so on", joined=True),
    "lora_r": Row("model.adapter", "r", joined=True),
    "lora_alpha": Row("model.adapter", "lora_alpha", joined=True),
    "lora_dropout": Row("model.adapter", "lora_dropout", joined=True),
    "lora_target_modules": Row("model.adapter", "target_modules", joined=True),
    "lora_modules_to_save": Row("model.adapter", "modules_to_save", joined=True),
    "use_dora": Row("model.adapter", "use_dora", joined=True),
    "use_rslora": Row("model.adapter", "use_rslora", joined=True),
    "load_in_4bit": Row("model.quantization", "with bnb_4bit_quant_type", joined=True),
    "bnb_4bit_quant_type": Row("model.quantization", "nf4, fp4", joined=True),
    "use_bnb_nested_quant": Row("model.quantization", joined=True),
    "dtype": Row("model.dtype", "float32, bfloat16", joined=True),
    "torch_dtype": Row("model.dtype", "the older name of dtype", joined=True),
    "attn_implementation": Row("model.attention"),
    "activation_offloading": Row("model.offload_activations"),
    # what has no counterpart
    "load_in_8bit": Row("", EIGHT_BITS, decides=True, by=("model.quantization", "model.dtype")),
    "assistant_only_loss": Row("", "task.messages: of a conversation the assistant's words are learned", joined=True),
    "completion_only_loss": Row("", "of a prompt and its completion the completion is learned", joined=True),
    "model_init_kwargs": Row("", "model.dtype, model.attention and their kin", decides=True),
    "chat_template_path": Row("", "task.chat_template has the Jinja text", decides=True, by=_TEMPLATE),
    "eos_token": Row("", "a tokenizer is used as it is", decides=True, by=_TOKENIZER),
    "pad_token": Row("", _PADDING),
    "pad_to_multiple_of": Row("", _PADDING, default="auto"),
    "padding_free": Row("", _PADDING),
    "eval_packing": Row("", "validation is cut as training is"),
    "dataset_num_proc": Row("", "tokens are cached by their content"),
    "dataset_kwargs": Row("", "rows are read as the task says", decides=True),
    "dataset_streaming": Row("", "data.stream: true reads shards while training"),
    "dataset_batch_size": Row("", "tokens are cached by their content"),
    "shuffle_dataset": Row("", "the order is drawn anew for each epoch"),
    "truncation_mode": Row("", "what is too long is cut at its end", default="keep_start", decides=True),
    "max_prompt_length": Row(
        "", "prompt and answer are cut together: data.max_length", decides=True, by=("data.max_length",)
    ),
    "max_completion_length": Row(
        "", "prompt and answer are cut together: data.max_length", decides=True, by=("data.max_length",)
    ),
    "disable_dropout": Row("", "model.config sets the model's dropout", default=True),
    "precompute_ref_log_probs": Row("", "the reference is asked once, before training"),
    "precompute_ref_batch_size": Row(
        "", "task.reference_batch_size: pairs over all processes; the reference is asked once, before training"
    ),
    "loss_weights": Row("", _LOSSES, decides=True),
    "ld_alpha": Row("", _LOSSES, decides=True),
    "rpo_alpha": Row("", _LOSSES, decides=True),
    "f_divergence_type": Row("", _LOSSES, default="reverse_kl", decides=True),
    "f_alpha_divergence_coef": Row("", _LOSSES, default=0.5),
    "use_weighting": Row("", _LOSSES, decides=True),
    "discopop_tau": Row("", _LOSSES, default=0.05),
    "reference_free": Row("", _LOSSES, decides=True),
    "sync_ref_model": Row("", "the reference is the model as it begins", decides=True),
    "ref_model_mixup_alpha": Row("", "the reference is the model as it begins", default=0.6),
    "ref_model_sync_steps": Row("", "the reference is the model as it begins", default=512),
    "router_aux_loss_coef": Row("", "the task's loss alone is learned", decides=True),
    "bnb_4bit_quant_storage": Row("", "weights of 4 bits are kept as bytes"),
    "lora_task_type": Row("", "the task says it", default="CAUSAL_LM"),
    "lora_target_parameters": Row("", "model.adapter has target_parameters", decides=True, by=("model.adapter",)),
    "ignore_bias_buffers": Row("", "buffers are no weights"),
    "gradient_checkpointing_kwargs": Row("", "a layer is computed again from its inputs, in one way"),
}
# fields that one of TRL's trainers has and the others have not
MARKS = {
    "language_modeling": {
        "packing",
        "dataset_text_field",
        "assistant_only_loss",
        "completion_only_loss",
        "eval_packing",
    },
    "preference": {"beta", "precompute_ref_log_probs", "max_prompt_length", "simpo_gamma", "cpo_alpha", "ld_alpha"},
    "reward": {"center_rewards_coefficient"},
}
CONFIGS = {"SFT": "language_modeling", "DPO": "preference", "CPO": "preference", "Reward": "reward"}
_RATES = {"language_modeling": 2e-5, "preference": 1e-6, "reward": 1e-4}
_DPO_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "hinge": "hinge"}


def task_of(theirs: Mapping[str, Any]) -> str | None:
    """The task whose own fields these are."""
    tasks = [task for task, marks in MARKS.items() if marks & theirs.keys()]
    return tasks[0] if len(tasks) == 1 else None


def move(theirs: Mapping[str, Any], moved: Imported, processes: int | None) -> None:
    """Errors: `RunError` where nothing says which of TRL's trainers it is."""
    task = moved.task or task_of(theirs)
    if task not in _RATES:
        raise RunError(
            "--from: TRL's settings do not say which of its trainers they are for: give --task language_modeling "
            "(SFT), preference (DPO) or reward"
        )
    full = {"learning_rate": _RATES[task], "gradient_checkpointing": True} | dict(theirs)
    if theirs.get("bf16") is None and not theirs.get("fp16"):
        full["bf16"] = True  # in TRL, unlike in transformers
    if isinstance(full.get("model_init_kwargs"), Mapping):
        full |= {k: v for k, v in full.pop("model_init_kwargs").items() if k in TABLE}
    moved.set("task.name", task, "TRL's trainer")
    trainer.move({k: v for k, v in full.items() if k != "dataset_text_field"}, moved, processes, trainer.TABLE | TABLE)
    for name in ("learning_rate", "gradient_checkpointing", "bf16"):
        if name not in theirs and (key := trainer.TABLE[name].here) in moved.keys:
            moved.told[key] = f"{name}, by TRL's default"
    _length(theirs, moved, task)
    if task == "language_modeling":
        _texts(theirs, moved)
    elif task == "preference":
        _pairs(theirs, moved)
        moved.notes.append("TRL turns a model's dropout off for pairs; here it is as model.config says")
    elif (center := number(theirs.get("center_rewards_coefficient"))) is not None:
        moved.set("task.center", center, "center_rewards_coefficient")
    _model(theirs, moved)
    if theirs.get("dataset_test_split") and str(theirs.get("eval_strategy", "no")).rpartition(".")[2].lower() != "no":
        moved.set("data.validation", theirs["dataset_test_split"], "dataset_test_split")


def _length(theirs: Mapping[str, Any], moved: Imported, task: str) -> None:
    key = "task.block_size" if task == "language_modeling" else "data.max_length"
    name = "max_length" if "max_length" in theirs else "max_seq_length"
    length = theirs.get(name, 1024)
    if length is None:
        moved.drop(name, "None", f"{key} is a number: texts are cut to it", True, (key,))
    else:
        moved.set(key, length, name if name in theirs else "max_length, by TRL's default")


def _texts(theirs: Mapping[str, Any], moved: Imported) -> None:
    if theirs.get("dataset_text_field"):
        moved.set("task.text", theirs["dataset_text_field"], "dataset_text_field")
    if theirs.get("packing"):
        strategy = str(theirs.get("packing_strategy", "bfd"))
        moved.set("task.packing", True, "packing")
        moved.set("task.attend_across_documents", strategy == "wrapped", f"packing_strategy {strategy}")
        if strategy != "wrapped":
            moved.notes.append("packing: texts follow each other and are cut where a block ends; TRL's bfd sorts them")
    else:
        moved.set("task.packing", False, "packing")
    if (loss := str(theirs.get("loss_type", "nll"))) not in ("nll", "chunked_nll"):
        moved.drop("loss_type", loss, "the loss of language modelling is the mean over tokens", True)
    if theirs.get("completion_only_loss") is False:
        moved.drop("completion_only_loss", "false", "of a prompt and its response the response is learned", True)
    whole = not theirs.get("assistant_only_loss")
    moved.at_end.append(lambda moved: _columns(moved, whole))


def _columns(moved: Imported, whole: bool) -> None:
    """Once the data were looked at. `whole`: of a conversation all is learned."""
    if not any(f"task.{key}" in moved.keys for key in ("text", "prompt", "messages")):
        why = (
            "SFTTrainer takes text, messages, or prompt and completion, as the data have them: give --data or name them"
        )
        moved.unclear("the columns", why, True, ("task.text", "task.messages", "task.prompt"))
    if "task.messages" in moved.keys and whole:
        why = "of conversations the assistant's words alone are learned here: say task.messages=... if that is wanted"
        moved.drop("assistant_only_loss", "false", why, True, ("task.messages",))


def _pairs(theirs: Mapping[str, Any], moved: Imported) -> None:
    """Errors: `RunError` for a loss that there is none of here."""
    kind = theirs.get("loss_type", "sigmoid")
    kind = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind
    simpo = kind == "simpo" and not number(theirs.get("cpo_alpha", 1.0))
    if not simpo and (kind not in _DPO_LOSSES or "cpo_alpha" in theirs):
        moved.drop(
            "loss_type", kind, "task.loss is dpo (sigmoid), ipo, hinge, or simpo with cpo_alpha 0", True, ("task.loss",)
        )
    else:
        moved.set("task.loss", "simpo" if simpo else _DPO_LOSSES[str(kind)], f"loss_type {kind}")
    for key, name in (("beta", "beta"), ("label_smoothing", "label_smoothing"), ("gamma", "simpo_gamma")):
        if (value := number(theirs.get(name))) is not None and (key != "gamma" or simpo):
            moved.set(f"task.{key}", value, name)


def _model(theirs: Mapping[str, Any], moved: Imported) -> None:
    dtype = str(theirs.get("dtype", theirs.get("torch_dtype", "float32")))
    set_dtype(moved, dtype, "dtype")
    if theirs.get("use_peft"):
        entries = {
            "r": theirs.get("lora_r", 16),
            "lora_alpha": theirs.get("lora_alpha", 32),
            "lora_dropout": theirs.get("lora_dropout", 0.05),
            "target_modules": theirs.get("lora_target_modules"),
            "modules_to_save": theirs.get("lora_modules_to_save"),
            "use_dora": theirs.get("use_dora"),
            "use_rslora": theirs.get("use_rslora"),
        }
        lora(moved, {k: v for k, v in entries.items() if v is not False}, "use_peft")
    if theirs.get("load_in_4bit"):
        nested = theirs.get("use_bnb_nested_quant")
        quantized(moved, theirs.get("bnb_4bit_quant_type", "nf4"), nested, "load_in_4bit")


def set_dtype(moved: Imported, dtype: str, told: str) -> None:
    """What weights are kept in, by its name at torch."""
    name = dtype.rpartition(".")[2].lower()
    if name in ("bfloat16", "bf16"):
        moved.set("model.dtype", "bfloat16", f"{told} {name}")
        moved.notes.append("model.dtype bfloat16: a float32 copy of what is trained is updated (optim.master_weights)")
    elif name in ("float16", "fp16", "half"):
        moved.drop(
            told, name, "model.dtype is float32 or bfloat16; precision: fp16 computes so", True, ("model.dtype",)
        )
    elif name == "auto":
        moved.notes.append(f"{told} auto: weights are kept in float32 here (with an adapter in bfloat16): model.dtype")
