"""transformers' `TrainingArguments`, as JSON (`args.to_json_string()`) or as a call in a Python file.

In: its fields, and those that the example scripts of transformers have beside them. Out: keys of a run file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.key_aliases import NOWHERE
from lockstep.tools.import_config.table import (
    OPTIMIZERS,
    SCHEDULES,
    Imported,
    Row,
    Table,
    apply,
    batches,
    length,
    number,
    optimizer,
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
