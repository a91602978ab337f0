"""Names that other systems have for what a run file says: Trainer, Lightning, axolotl, LLaMA-Factory, scripts.

`FOREIGN`: a key's last part as it is written elsewhere -> our key ("" where there is none, because nothing has to be
set), and one sentence on what is different. Messages about unknown keys look here before they guess, and then in
`NOWHERE`. docs/coming-from.md shows the same names.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config.unsupported_keys import NOWHERE

CLOSE = 0.75  # how alike a name must be to one of ours to be guessed
MOST = 4  # places named for one name

_GLOBAL = "batch_size is the global batch (per device x devices x accumulation); how many processes share it is free"
_PIECES = (
    "micro_batches are the pieces that a step of batch_size examples is cut into, over all processes together; a "
    "process runs its share of them one after another"
)
_EVALUATIONS = "steps between evaluations, or epoch; 0: only at the end"
_CHECKPOINTS = "steps between checkpoints; 0: only at a stop and at the end"
_PRECISION = "bf16, fp16 or fp32; what weights are kept in is model.dtype"
_LENGTH = "tokens an example is truncated to; blocks of language_modeling are task.block_size"
_MODEL = "a Hub id or a folder; model.type instead trains from scratch"
_DATA = "a Hub id, a folder or files; splits are data.train, data.validation and data.test"
_ADAPTER = "a mapping with the names of peft, such as {type: lora, r: 8, lora_alpha: 16}"
_PROCESSES = "processes a machine"
_SCHEDULE = "constant, linear, cosine, inverse_sqrt, polynomial, wsd, one_cycle or points [[step, rate], ...]"
_WORKERS = "for the task module; of the other tasks texts are tokenised once, and batches are made ahead by themselves"
_RESUMED = "the same command goes on from the newest checkpoint of OUTPUT by itself"

FOREIGN: dict[str, tuple[str, str]] = {
    # length and size of a step
    "num_train_epochs": ("epochs", "passes over the training split"),
    "num_epochs": ("epochs", "passes over the training split"),
    "max_epochs": ("epochs", "passes over the training split"),
    "max_steps": ("steps", "optimizer steps; give either steps or epochs"),
    "max_iters": ("steps", "optimizer steps; give either steps or epochs"),
    "per_device_train_batch_size": ("batch_size", _GLOBAL),
    "train_batch_size": ("batch_size", _GLOBAL),
    "global_batch_size": ("batch_size", _GLOBAL),
    "micro_batch_size": ("micro_batches", f"a number and not a size: {_PIECES}"),
    "train_micro_batch_size_per_gpu": ("micro_batches", f"a number and not a size: {_PIECES}"),
    "gradient_accumulation_steps": ("micro_batches", _PIECES),
    "accumulate_grad_batches": ("micro_batches", _PIECES),
    "eval_batch_size": ("evaluate.batch_size", "examples of an evaluation batch on each process"),
    "per_device_eval_batch_size": ("evaluate.batch_size", "examples of an evaluation batch on each process"),
    "precompute_ref_batch_size": ("task.reference_batch_size", "pairs whose reference is computed together, over all"),
    # the optimizer
    "lr": ("optim.learning_rate", "the highest rate of the schedule"),
    "optimizer": (
        "optim",
        "its keys are name (adamw, muon, lion, ...: `lockstep list`), learning_rate, schedule and more",
    ),
    "lr_scheduler_type": ("optim.schedule", _SCHEDULE),
    "lr_scheduler": ("optim.schedule", _SCHEDULE),
    "scheduler": ("optim.schedule", _SCHEDULE),
    "lr_scheduler_kwargs": (
        "optim",
        "the ends of schedules are keys of it: min_lr_ratio, power, decay_steps, decay_shape",
    ),
    "warmup": ("optim.warmup_steps", "or optim.warmup_fraction, a share of all steps"),
    "warmup_ratio": ("optim.warmup_fraction", "a share of all steps"),
    "gradient_clip_val": ("optim.max_grad_norm", "of the whole gradient's norm, once a step; 0: no clipping"),
    "gradient_clipping": ("optim.max_grad_norm", "of the whole gradient's norm, once a step; 0: no clipping"),
    "adam_beta1": ("optim.betas", "both in one list, [0.9, 0.999]"),
    "adam_beta2": ("optim.betas", "both in one list, [0.9, 0.999]"),
    "adam_epsilon": ("optim.eps", "1e-8 unless it is given"),
    "min_lr_rate": ("optim.min_lr_ratio", "a share of learning_rate that the schedule ends at"),
    "num_decay_steps": ("optim.decay_steps", "the last steps of wsd, in which the rate falls"),
    "param_groups": ("optim.groups", "as [{match: 'classifier.*', learning_rate: 1e-3}]"),
    "freeze_layers": ("model.freeze", "names of weights, with * for any part of a name"),
    "ema_decay": ("average.ema", "the decay of a moving average of the weights, which is evaluated and exported"),
    "use_ema": ("average.ema", "the decay of a moving average of the weights, such as 0.999"),
    "label_smoothing_factor": (
        "task.label_smoothing",
        "a key of the tasks classification, translation and summarization",
    ),
    # model and data
    "model_name_or_path": ("model.source", _MODEL),
    "pretrained_model_name_or_path": ("model.source", _MODEL),
    "model_name": ("model.source", _MODEL),
    "base_model": ("model.source", _MODEL),
    "model_revision": ("model.revision", "branch, tag or commit of a Hub model"),
    "tokenizer_name": ("tokenizer.source", "a Hub id or a folder; default: the model's own"),
    "attn_implementation": ("model.attention", "sdpa, eager and others, as transformers has them"),
    "flash_attention": ("model.attention", "flash_attention_2, sdpa or eager, as transformers has them"),
    "torch_dtype": ("precision", _PRECISION),
    "bf16": ("precision", _PRECISION),
    "fp16": ("precision", _PRECISION),
    "mixed_precision": ("precision", _PRECISION),
    "torch_compile": ("model.compile", "true or false; the layers are compiled, in training"),
    "gradient_checkpointing": ("model.checkpoint_activations", "true or false; the same bits"),
    "activation_checkpointing": ("model.checkpoint_activations", "true or false; the same bits"),
    "activation_offloading": ("model.offload_activations", "true or false, on GPUs; the same bits"),
    "lora": ("model.adapter", _ADAPTER),
    "lora_r": ("model.adapter", _ADAPTER),
    "lora_alpha": ("model.adapter", _ADAPTER),
    "peft_config": ("model.adapter", _ADAPTER),
    "dataset": ("data.source", _DATA),
    "datasets": ("data.source", _DATA),
    "dataset_name": ("data.source", _DATA),
    "dataset_config_name": ("data.config", "the configuration of a Hub data set"),
    "train_file": ("data.train", "a path, or several"),
    "validation_file": ("data.validation", "a path, or several; without one a share of train is cut off"),
    "test_file": ("data.test", "a path, or several"),
    "val_set_size": ("data.validation_fraction", "the share of train that is cut off, seeded"),
    "max_train_samples": ("data.limit", "at most so many examples of each split"),
    "max_eval_samples": ("evaluate.limit", "examples of validation that evaluations use, drawn with the seed"),
    "limit_val_batches": ("evaluate.limit", "examples, and not batches, of validation that evaluations use"),
    "train_sampling_strategy": ("data.group_by_length", "steps whose examples are sorted together, such as 50"),
    "max_seq_length": ("data.max_length", _LENGTH),
    "max_seq_len": ("data.max_length", _LENGTH),
    "sequence_len": ("data.max_length", _LENGTH),
    "cutoff_len": ("data.max_length", _LENGTH),
    "max_source_length": ("data.max_length", "tokens of a source, and of what is written"),
    "text_column": ("task.text", "the column's name"),
    "text_column_name": ("task.text", "the column's name"),
    "label_column": ("task.label", "the column's name"),
    "problem_type": ("task.multi_label", "true; or task.regression: true; without either, one label a text"),
    "compute_metrics": ("metrics", "functions of (predictions, labels) of a whole split, as [my_file.function]"),
    "label_column_name": ("task.label", "the column's name"),
    "source_prefix": ("task.prefix", "put before every source text"),
    "predict_with_generate": ("task.bleu", "of translation: write at each evaluation, and score by BLEU and chrF"),
    "generation_num_beams": ("task.beams", "of the search that writes translations"),
    "chat_template_kwargs": ("task.template_arguments", "variables of the chat template"),
    "assistant_only_loss": (
        "task.messages",
        "the column of conversations, of which only the assistant's words are learned",
    ),
    # evaluation, checkpoints, the best model
    "eval_steps": ("evaluate.every", _EVALUATIONS),
    "eval_strategy": ("evaluate.every", _EVALUATIONS),
    "evaluation_strategy": ("evaluate.every", _EVALUATIONS),
    "val_check_interval": ("evaluate.every", _EVALUATIONS),
    "check_val_every_n_epoch": ("evaluate.every", _EVALUATIONS),
    "save_steps": ("checkpoint.every", _CHECKPOINTS),
    "save_strategy": ("checkpoint.every", _CHECKPOINTS),
    "save_total_limit": ("checkpoint.keep", "how many of the newest checkpoints are kept, and the best one besides"),
    "load_best_model_at_end": ("export", "best: the export is the best evaluated model, by checkpoint.best"),
    "metric_for_best_model": ("checkpoint.best", "a metric, with a minus where less is better: accuracy, or -loss"),
    "greater_is_better": ("checkpoint.best", "a minus before the metric where less is better: -loss"),
    "early_stopping_patience": ("evaluate.patience", "evaluations in a row without a better one, after which to end"),
    "early_stopping": ("evaluate.patience", "evaluations in a row without a better one, after which to end"),
    "early_stopping_threshold": ("evaluate.min_delta", "how much better an evaluation has to be, for patience"),
    "mode": ("checkpoint.best", "a minus before the metric where less is better: -loss"),
    "monitor": ("checkpoint.best", "a metric, with a minus where less is better: accuracy, or -loss"),
    "resume_from_checkpoint": ("", _RESUMED),
    "overwrite_output_dir": ("", f"{_RESUMED}; another output=FOLDER begins anew"),
    # where and how it runs
    "output_dir": ("output", "the folder that all is written into; default: outputs/NAME"),
    "run_name": ("name", "it also names the output folder"),
    "logging_steps": ("track.every", "steps between lines of metrics.jsonl"),
    "log_every_n_steps": ("track.every", "steps between lines of metrics.jsonl"),
    "report_to": ("track.to", "tensorboard, wandb, mlflow or trackio, one or several"),
    "logger": ("track.to", "tensorboard, wandb, mlflow or trackio, one or several"),
    "push_to_hub": ("hub.push_to", "USER/REPO; the token comes from HF_TOKEN"),
    "hub_model_id": ("hub.push_to", "USER/REPO; the token comes from HF_TOKEN"),
    "hub_private_repo": ("hub.private", "true or false"),
    "deepspeed": ("strategy.name", "zero1, zero2 or zero3; DeepSpeed's own keys go into strategy.options"),
    "fsdp": ("strategy.name", "fsdp2; its keys go into strategy.options"),
    "fsdp_config": ("strategy.options", "with strategy.name: fsdp2"),
    "ddp_bucket_cap_mb": ("strategy.options", "bucket_cap_mb, with strategy.name: ddp"),
    "ddp_timeout": ("launch.timeout_s", "seconds a collective may wait for the other ranks"),
    "distributed_type": ("strategy.name", "ddp, fsdp2, zero2 and others: `lockstep list`"),
    "num_processes": ("launch.processes", _PROCESSES),
    "nproc_per_node": ("launch.processes", _PROCESSES),
    "num_gpus": ("launch.processes", _PROCESSES),
    "devices": ("launch.processes", _PROCESSES),
    "accelerator": ("launch.device", "cpu, cuda or auto"),
    "use_cpu": ("launch.device", "cpu, cuda or auto"),
    "no_cuda": ("launch.device", "cpu, cuda or auto"),
    "nnodes": ("launch.machines", "with launch.name: torchrun, slurm or another that has machines"),
    "num_nodes": ("launch.machines", "with launch.name: torchrun, slurm or another that has machines"),
    "num_machines": ("launch.machines", "with launch.name: torchrun, slurm or another that has machines"),
    # nothing to set
    "dataloader_num_workers": ("data.workers", _WORKERS),
    "num_workers": ("data.workers", _WORKERS),
    "data_seed": ("seed", "one seed for weights, data order and dropout"),
    "local_rank": ("", "the launcher says which rank a process is"),
}


def place(key: str, ours: Mapping[str, str]) -> str | None:
    """What an unknown key is here, by the exact name of its last part: a foreign name, or a key of ours that stands
    elsewhere. `ours`: every dotted key -> when it is one ("" for always). None: nobody knows the name."""
    name = key.rpartition(".")[2].replace("-", "_").lower()
    if name in FOREIGN:
        found, told = FOREIGN[name]
        return f"it is {found!r} here: {told}" if found else told
    same = [f"{mine!r} {when or 'here'}" for mine, when in ours.items() if mine.rpartition(".")[2] == name]
    if not same and name in NOWHERE:
        return f"it has no counterpart here: {NOWHERE[name]}"
    return f"it is {' or '.join(same[:MOST])}{' or another' if len(same) > MOST else ''}" if same else None


def near(key: str, value: Any, siblings: Sequence[str], ours: Mapping[str, str]) -> str:
    """Explain an unknown key, by its exact name or by a guess: a key beside it, the names inside it if it is a
    mapping, a key elsewhere; else the keys that are known there."""
    if (found := place(key, ours)) is not None:
        return found
    last = key.rpartition(".")[2]
    if close := difflib.get_close_matches(last, siblings, 1, cutoff=CLOSE):
        return f"did you mean {close[0]!r}?"
    if isinstance(value, Mapping):
        inner = [f"{name!r}: {found}" for name in map(str, value) if (found := place(name, ours)) is not None]
        if inner:
            return f"there is no such section; of what stands in it, {'; '.join(inner)}"
    places = {mine.rpartition(".")[2]: mine for mine in reversed(list(ours))}  # of equal ones the first
    if close := difflib.get_close_matches(last, list(places), 1, cutoff=CLOSE):
        return f"did you mean {places[close[0]]!r}?"
    return f"known here: {', '.join(siblings)}"
