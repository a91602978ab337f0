"""transformers' `TrainingArguments` and TRL's `SFTConfig`, `DPOConfig`, `CPOConfig` and `RewardConfig`.

In: their fields, from JSON (`args.to_json_string()`), YAML, a call in a Python file or a command line; those that the
example scripts of transformers and TRL have beside them (`ModelConfig`, `ScriptArguments`) are among them. Out: keys
of a run file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.key_aliases import NOWHERE
from lockstep.config.run import RunError
from lockstep.tools.import_config.table import (
    EIGHT_BITS,
    OPTIMIZERS,
    SCHEDULES,
    Imported,
    Row,
    Table,
    apply,
    batches,
    length,
    lora,
    number,
    optimizer,
    quantized,
    schedule,
    schedule_ends,
    trackers,
    whole,
)

_SUMS = "sums over the whole step are exact: there is nothing to choose"
_DEVICE = "what a process computes on is found out, or launch.device"
_HUB = "only the finished model is uploaded"
_FEED = "batches are made in a thread, two steps ahead"
_SAVED = "checkpoints hold all that a run needs, and nothing else is chosen"
_LOGS = "what is said: track.console; what is written: metrics.jsonl"
_KERNELS = "an option of strategy.name=hf_trainer (strategy.options), where it may change the bits"
_ACCELERATOR = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
    "gradient_accumulation_kwargs": None,
}
_SAME = "every example once an epoch; the order is a function of seed, epoch and place"

TABLE: Table = {
    # what is trained
    "output_dir": Row("output"),
    "run_name": Row("name", "letters, digits, points and dashes of it", joined=True),
    "seed": Row("seed"),
    "num_train_epochs": Row("epochs", joined=True),
    "max_steps": Row("steps", "where it is above 0, instead of epochs", joined=True),
    "per_device_train_batch_size": Row("batch_size", "times gradient_accumulation_steps and processes", joined=True),
    "gradient_accumulation_steps": Row("micro_batches", "times processes", joined=True),
    "learning_rate": Row("optim.learning_rate"),
    "lr_scheduler_type": Row("optim.schedule", "all but restarts and those that follow the scores", values=SCHEDULES),
    "lr_scheduler_kwargs": Row("optim", "min_lr_ratio, power, decay_steps, decay_shape", joined=True),
    "warmup_steps": Row("optim.warmup_steps", "below 1: optim.warmup_fraction", joined=True),
    "warmup_ratio": Row("optim.warmup_fraction", joined=True),
    "optim": Row(
        "optim.name", "AdamW (also in 8 bits), SGD, Lion, Muon, schedule-free AdamW, Adafactor", values=OPTIMIZERS
    ),
    "weight_decay": Row("optim.weight_decay"),
    "adam_beta1": Row("optim.betas", "with adam_beta2", joined=True),
    "adam_beta2": Row("optim.betas", "with adam_beta1", joined=True),
    "adam_epsilon": Row("optim.eps"),
    "max_grad_norm": Row("optim.max_grad_norm"),
    "label_smoothing_factor": Row(
        "task.label_smoothing", "of classification, translation and summarization", joined=True
    ),
    "bf16": Row("precision", "bf16", values={True: "bf16", "true": "bf16"}),
    "fp16": Row("precision", "fp16", values={True: "fp16", "true": "fp16"}),
    "train_sampling_strategy": Row("data.group_by_length", "group_by_length: 50 steps together", joined=True),
    "group_by_length": Row("data.group_by_length", "true: 50 steps together", joined=True),
    # how it is watched and kept
    "eval_strategy": Row("evaluate.every", "steps: eval_steps; epoch", joined=True),
    "evaluation_strategy": Row("evaluate.every", "the older name of eval_strategy", joined=True),
    "eval_steps": Row("evaluate.every", "with eval_strategy steps", joined=True),
    "per_device_eval_batch_size": Row("evaluate.batch_size"),
    "save_strategy": Row("checkpoint.every", "steps: save_steps; epoch; no: 0", joined=True),
    "save_steps": Row("checkpoint.every", "with save_strategy steps", joined=True),
    "save_total_limit": Row("checkpoint.keep"),
    "load_best_model_at_end": Row("checkpoint.best", "the best model is kept, and exported", joined=True),
    "metric_for_best_model": Row("checkpoint.best", "with a minus where less is better", joined=True),
    "greater_is_better": Row("checkpoint.best", "with metric_for_best_model", joined=True),
    "logging_steps": Row("track.every"),
    "report_to": Row("track.to", "tensorboard, wandb, mlflow, trackio", joined=True),
    "push_to_hub": Row("hub.push_to", "with hub_model_id", joined=True),
    "hub_model_id": Row("hub.push_to", "with push_to_hub", joined=True),
    "hub_private_repo": Row("hub.private"),
    # how it is run
    "use_cpu": Row("launch.device", "cpu", values={True: "cpu"}),
    "no_cuda": Row("launch.device", "cpu", values={True: "cpu"}),
    "ddp_timeout": Row("launch.timeout_s"),
    "ddp_bucket_cap_mb": Row("strategy.options", "bucket_cap_mb of ddp", joined=True),
    "deepspeed": Row("strategy.name", "see DeepSpeed: `lockstep init --from` its JSON", joined=True),
    "fsdp": Row("strategy.name", "fsdp2", joined=True),
    # of the example scripts
    "model_name_or_path": Row("model.source"),
    "model_revision": Row("model.revision"),
    "tokenizer_name": Row("tokenizer.source"),
    "trust_remote_code": Row("model.trust_remote_code"),
    "dataset_name": Row("data.source"),
    "dataset_config_name": Row("data.config"),
    "train_file": Row("data.train"),
    "validation_file": Row("data.validation"),
    "test_file": Row("data.test"),
    "max_seq_length": Row("data.max_length", "of classification and token classification"),
    "max_source_length": Row("data.max_length"),
    "block_size": Row("task.block_size"),
    "max_train_samples": Row("data.limit"),
    "source_prefix": Row("task.prefix"),
    "predict_with_generate": Row("task.bleu", "of translation; of summarization: task.rouge", joined=True),
    "generation_num_beams": Row("task.beams"),
    "text_column_name": Row("task.text"),
    "label_column_name": Row("task.label"),
    # what has no counterpart
    "activation_checkpointing": Row("model.checkpoint_activations"),
    "gradient_checkpointing": Row("model.checkpoint_activations"),
    "torch_compile": Row("model.compile"),
    "overwrite_output_dir": Row("", "a run goes on where its output ends; another output starts anew"),
    "resume_from_checkpoint": Row("", "the same command goes on from the newest checkpoint that is whole"),
    "data_seed": Row("", "seed is that of the order of data, too"),
    "dataloader_num_workers": Row("", f"data.workers, of the task module; of others {_FEED}"),
    "fsdp_config": Row("", "strategy.options of fsdp2: docs/strategies"),
    "local_rank": Row("", _DEVICE, default=-1),
}
# What has no counterpart, with what TrainingArguments takes where nothing is said.
_THEIRS: dict[str, Any] = {
    "logging_nan_inf_filter": True,
    "tf32": True,
    "average_tokens_across_devices": True,
    "logging_strategy": "steps",
    "log_on_each_node": True,
    "log_level": "passive",
    "log_level_replica": "warning",
    "project": "huggingface",
    "eval_do_concat_batches": True,
    "save_safetensors": True,
    "hub_token": "<HUB_TOKEN>",
    "hub_strategy": "every_save",
    "accelerator_config": _ACCELERATOR,
    "dataloader_pin_memory": True,
    "dataloader_in_order": True,
    "remove_unused_columns": True,
    "length_column_name": "length",
    "skip_memory_metrics": True,
    "do_train": True,
    "do_eval": True,
    "do_predict": True,
}
# Of these, what decides what is trained.
_DECIDING = {"neftune_noise_alpha", "optim_args", "optim_target_modules", "config_name", "label_names"}
TABLE |= {name: Row("", why, default=_THEIRS.get(name), decides=name in _DECIDING) for name, why in NOWHERE.items()}
# What TrainingArguments takes where nothing is said, and lockstep otherwise.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "weight_decay": 0.0,
    "seed": 42,
}
_SMOOTHED = ("classification", "translation", "summarization")  # tasks whose label_smoothing is Trainer's
_GROUPED = 50  # steps whose examples are sorted together, as Trainer does


def move(theirs: Mapping[str, Any], moved: Imported, processes: int | None, table: Table = TABLE) -> None:
    """Fields that were given, and the defaults of those that were not."""
    apply(table, theirs, moved)
    full = DEFAULTS | {name: value for name, value in theirs.items() if value is not None}
    for name in ("weight_decay", "seed"):
        if name not in theirs:
            moved.set(table[name].here, DEFAULTS[name], f"{name}, by default")
    batches(
        moved,
        whole(full["per_device_train_batch_size"]),
        whole(full["gradient_accumulation_steps"]),
        processes,
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
    )
    length(moved, full["num_train_epochs"], full.get("max_steps"), ("num_train_epochs", "max_steps"))
    schedule(moved, full, "warmup_steps", "warmup_ratio", full.get("lr_scheduler_type"))
    optimizer(moved, "optim", full.get("optim"))
    kind, ends = str(full.get("lr_scheduler_type", "linear")).lower(), full.get("lr_scheduler_kwargs") or {}
    if isinstance(ends, Mapping):
        schedule_ends(moved, kind, ends, number(full.get("learning_rate")) or 5e-5, "lr_scheduler_kwargs")
    else:
        moved.drop("lr_scheduler_kwargs", ends, "wanted is a mapping")
    if (first := number(full.get("adam_beta1"))) is not None or "adam_beta2" in full:
        second = number(full.get("adam_beta2", 0.999))
        moved.set("optim.betas", [0.9 if first is None else first, second], "adam_beta1 and adam_beta2")
    _intervals(full, moved)
    _best(full, moved)
    _engine(full, moved)
    if full.get("group_by_length") or full.get("train_sampling_strategy") == "group_by_length":
        moved.set("data.group_by_length", _GROUPED, "group_by_length")
    if "report_to" in full:
        trackers(moved, "report_to", full["report_to"])
    if full.get("push_to_hub"):
        if full.get("hub_model_id"):
            moved.set("hub.push_to", full["hub_model_id"], "hub_model_id")
        else:
            moved.drop("push_to_hub", True, "hub.push_to wants USER/REPO, and hub_model_id is not given")
    if full.get("run_name"):
        moved.set("name", full["run_name"], "run_name")


def _intervals(full: Mapping[str, Any], moved: Imported) -> None:
    strategy = _word(full.get("eval_strategy", full.get("evaluation_strategy", "no")))
    if strategy == "epoch":
        moved.set("evaluate.every", "epoch", "eval_strategy epoch")
    elif strategy == "steps":
        every = full.get("eval_steps", full.get("logging_steps", 500))
        _interval(moved, "evaluate.every", every, "eval_steps")
    saving = _word(full.get("save_strategy", "steps"))
    if saving == "epoch":
        moved.set("checkpoint.every", "epoch", "save_strategy epoch")
    elif saving == "no":
        moved.set("checkpoint.every", 0, "save_strategy no: at the end, and at a stop")
    elif saving == "steps":
        _interval(moved, "checkpoint.every", full.get("save_steps", 500), "save_steps")


def _interval(moved: Imported, key: str, every: Any, name: str) -> None:
    """Steps; a share of all steps has to wait until they are known."""
    if (count := number(every)) is not None and count >= 1:
        moved.set(key, int(count), f"{name} {int(count)}")
    elif count:
        moved.set(key, count, f"{name} {count} of all steps")


def _best(full: Mapping[str, Any], moved: Imported) -> None:
    metric = str(full.get("metric_for_best_model") or "loss").removeprefix("eval_")
    if not full.get("load_best_model_at_end"):
        if full.get("metric_for_best_model"):
            moved.drop("metric_for_best_model", metric, "without load_best_model_at_end it changes nothing")
        return
    greater = full.get("greater_is_better")
    less = not greater if greater is not None else "loss" in metric
    moved.set("checkpoint.best", f"-{metric}" if less else metric, f"load_best_model_at_end by {metric}")


def _engine(full: Mapping[str, Any], moved: Imported) -> None:
    fsdp = full.get("fsdp")
    if fsdp and str(fsdp) not in ("[]", "", "None"):
        moved.set("strategy.name", "fsdp2", f"fsdp {fsdp}")
    if full.get("deepspeed"):
        moved.drop("deepspeed", full["deepspeed"], "`lockstep init --from` that file moves it, too")
    if (size := full.get("ddp_bucket_cap_mb")) is not None:
        moved.set("strategy.options", {"bucket_cap_mb": size}, "ddp_bucket_cap_mb")
    if smoothing := number(full.get("label_smoothing_factor")):
        if moved.task in (None, *_SMOOTHED):
            moved.set("task.label_smoothing", smoothing, "label_smoothing_factor")
        else:
            why = f"{', '.join(_SMOOTHED)} have it: task.label_smoothing; {moved.task} has not"
            moved.drop("label_smoothing_factor", smoothing, why, True)
    if "predict_with_generate" in full and moved.task in ("translation", "summarization"):
        key = "task.bleu" if moved.task == "translation" else "task.rouge"
        moved.set(key, bool(full["predict_with_generate"]), "predict_with_generate")


def _word(value: Any) -> str:
    """Of an enumeration, as Python writes it or as JSON does."""
    return str(value).rpartition(".")[2].lower()


_TEMPLATE = ("task.chat_template",)
_TOKENIZER = ("tokenizer.source",)
_LOSSES = "the loss is that of the pairs alone"
_PADDING = "what is padded, and how far, changes nothing"

# Beside these, all keys of `TrainingArguments` are known.
TRL: Table = {
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


def move_trl(theirs: Mapping[str, Any], moved: Imported, processes: int | None) -> None:
    """Errors: `RunError` where nothing says which of TRL's trainers it is."""
    task = moved.task or task_of(theirs)
    if task not in _RATES:
        raise RunError(
            "LS8240",
            "--from: TRL's settings do not say which of its trainers they are for: give --task language_modeling "
            "(SFT), preference (DPO) or reward",
        )
    full = {"learning_rate": _RATES[task], "gradient_checkpointing": True} | dict(theirs)
    if theirs.get("bf16") is None and not theirs.get("fp16"):
        full["bf16"] = True  # in TRL, unlike in transformers
    if isinstance(full.get("model_init_kwargs"), Mapping):
        full |= {k: v for k, v in full.pop("model_init_kwargs").items() if k in TRL}
    moved.set("task.name", task, "TRL's trainer")
    move({k: v for k, v in full.items() if k != "dataset_text_field"}, moved, processes, TABLE | TRL)
    for name in ("learning_rate", "gradient_checkpointing", "bf16"):
        if name not in theirs and (key := TABLE[name].here) in moved.keys:
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
