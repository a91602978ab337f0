"""Other names of keys: those of other systems, those that have no counterpart here, and former ones of our own.

`FOREIGN`: a key's last part as it is written elsewhere (Trainer, Lightning, axolotl, LLaMA-Factory, scripts) -> our key
("" where nothing has to be set), and one sentence on what is different. `NOWHERE`: a name of TrainingArguments -> why
nothing is to be set. Messages about unknown keys look in both before they guess; docs/reference/coming-from/names.md
shows them. A former name of our own is read for one release, with a note: `present`, of a section or of the flat keys
of a checkpoint.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config.errors import InvalidValue

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


class RenamedKey(FutureWarning):
    """A run file uses the former name of a key, or of a value. `lockstep` prints it as a note."""


# Former dotted key -> present one. Keys of plug-ins stand here, too: no two of them use one name differently.
RENAMED = {
    "mirror": "remote_dir",
    "stop_after": "max_time",
    "guard": "sdc_check",
    "data.overlap": "data.decontaminate",
    "optim.clip": "optim.max_grad_norm",
    "optim.minimum": "optim.min_lr_ratio",
    "optim.layer_decay": "optim.layerwise_lr_decay",
    "optim.least": "optim.min_8bit_size",
    "optim.matrices": "optim.muon_params",
    "optim.adjust": "optim.lr_adjust",
    "strategy.exchange": "strategy.all_reduce",
    "launch.on_loss": "launch.on_rank_failure",
    "launch.copy_every": "launch.replicate_every",
    "launch.hang_s": "launch.hang_timeout_s",
    "launch.hand_over": "launch.rebalance_every",
    "launch.join_s": "launch.join_timeout_s",
    "launch.more_s": "launch.last_call_timeout_s",
    "launch.lost_s": "launch.keep_alive_timeout_s",
    "launch.warn": "launch.signal_before",
    "launch.claim": "launch.pvc",
    "launch.master": "launch.init_method",
    "track.wait_s": "track.close_timeout_s",
    "task.masked": "task.mlm_probability",
    "task.whole_words": "task.whole_word_mask",
    "task.cross_documents": "task.attend_across_documents",
    "task.scale": "task.similarity_scale",
}
# Present dotted key -> former value -> present one.
VALUES: dict[str, dict[Any, Any]] = {
    "data.decontaminate": {"warn": False, "drop": True},
    "strategy.all_reduce": {"tree": "hierarchical"},
    "sdc_check.on_difference": {"exclude": "evict"},
    "task.turns": {"each": "per_turn"},
}


def translate(section: str, values: Any, known: Mapping[str, Any]) -> Any:
    """The keys and values of a section ("" for the top of the file) under their present names, with a `RenamedKey`
    warning for each that had another. A key that `known` has keeps its name.

    Errors: `ValueError` where a key stands there under both names.
    """
    if not isinstance(values, Mapping):
        return values
    prefix = f"{section}." if section else ""
    present: dict[str, Any] = {}
    for key, value in values.items():
        name = RENAMED.get(f"{prefix}{key}", f"{prefix}{key}").removeprefix(prefix)
        if name != key and (key in known or name not in known):
            name = key  # a plug-in of the user's own may have a key of that name
        if name != key:
            if name in values:
                raise InvalidValue(
                    "LS1050",
                    f"{prefix}{key} is the former name of {prefix}{name}, and both are given; leave {prefix}{key} out",
                )
            _note(f"{prefix}{key} is called {prefix}{name} now; the former name is read for one release")
        present[name] = _present_value(f"{prefix}{name}", value) if name in known else value
    return present


def _present_value(key: str, value: Any) -> Any:
    former = VALUES.get(key, {})
    if not isinstance(value, str) or value not in former:
        return value
    now = former[value]
    _note(f"{key}: {value} is written {str(now).lower() if isinstance(now, bool) else now} now")
    return now


def _note(text: str) -> None:
    warnings.warn(text, RenamedKey, stacklevel=2)


def of_checkpoint(arithmetic: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys as a checkpoint of any release has them, under their present names and values."""
    renamed = {RENAMED.get(key, key): value for key, value in arithmetic.items()}
    return {
        key: VALUES[key].get(value, value) if key in VALUES and isinstance(value, str) else value
        for key, value in renamed.items()
    }


def former(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a section under the names that they had first: what names of files in the cache are made of."""
    names = {now: then for then, now in RENAMED.items()}
    prefix = f"{section}."
    result = {}
    for key, value in values.items():
        then = {now: was for was, now in VALUES.get(f"{prefix}{key}", {}).items()}
        name = names.get(f"{prefix}{key}", f"{prefix}{key}").removeprefix(prefix)
        result[name] = then.get(value, value) if isinstance(value, str | bool) else value
    return result


AGAIN = "a layer is computed again from its inputs, in one way"
_OLDER = "of older releases of transformers, where it decides nothing about what is trained"
_SUMS = "sums over the whole step are exact: there is nothing to choose"
_HUB = "only the finished model is uploaded"
_FEED = "batches are made in a thread, two steps ahead"
_SAVED = "checkpoints hold all that a run needs, and nothing else is chosen"
_LOGS = "what is said: track.console; what is written: metrics.jsonl"
_KERNELS = "an option of strategy.name=hf_trainer (strategy.options), where it may change the bits"
_SAME = "every example once an epoch; the order is a function of seed, epoch and place"

NOWHERE: dict[str, str] = {
    "logging_nan_inf_filter": "on_nonfinite: stop or skip; nothing is filtered in silence",
    "config_name": "model.config sets entries of the model's own config",
    "fp16_full_eval": "an evaluation computes as training does (precision)",
    "bf16_full_eval": "an evaluation computes as training does (precision)",
    "tf32": _KERNELS,
    "optim_args": "each optimizer has keys of its own: docs/reference/optimizers.md",
    "optim_target_modules": "optim.muon_params of muon; optim.groups has rates",
    "average_tokens_across_devices": _SUMS,
    "activation_checkpointing_kwargs": AGAIN,
    "gradient_checkpointing_kwargs": AGAIN,
    "torch_compile_backend": "inductor compiles, in its default mode",
    "torch_compile_mode": "inductor compiles, in its default mode",
    "use_liger_kernel": _KERNELS,
    "liger_kernel_config": _KERNELS,
    "use_cache": "no cache in training",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "torch_empty_cache_steps": "torch keeps its memory",
    "auto_find_batch_size": "a step is what the run file says; more micro_batches need less memory",
    "logging_strategy": "track.every steps",
    "logging_first_step": "track.every steps",
    "logging_dir": "everything is written below output",
    "log_on_each_node": _LOGS,
    "include_num_input_tokens_seen": "metrics.jsonl has tokens_per_s",
    "log_level": _LOGS,
    "log_level_replica": _LOGS,
    "disable_tqdm": "track.console: quiet",
    "project": "a tracker's own keys: track.wandb.project, ...",
    "trackio_space_id": "a tracker's own keys: track.trackio",
    "trackio_bucket_id": "a tracker's own keys: track.trackio",
    "trackio_static_space_id": "a tracker's own keys: track.trackio",
    "eval_delay": "evaluations begin with the first interval",
    "prediction_loss_only": "a task has its own scores",
    "eval_on_start": "evaluations begin with the first interval",
    "eval_do_concat_batches": "scores are sums over batches",
    "eval_use_gather_object": "scores are sums over batches",
    "eval_accumulation_steps": "scores are sums over batches",
    "include_for_metrics": "a task has its own scores",
    "batch_eval_metrics": "scores are sums over batches",
    "save_only_model": _SAVED,
    "save_on_each_node": "output is a folder that every machine sees",
    "save_safetensors": _SAVED,
    "enable_jit_checkpoint": "lockstep stop, and SIGTERM, save at the next step",
    "hub_token": "secrets come from the environment: HF_TOKEN",
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "ignore_data_skip": "a resumed run goes on with the next examples at once",
    "restore_callback_states_from_checkpoint": "there are no callbacks with states",
    "full_determinism": "strategy.exact, which is the default",
    "accelerator_config": _SUMS,
    "parallelism_config": "strategy.name and its options",
    "dataloader_drop_last": _SAME,
    "dataloader_pin_memory": _FEED,
    "dataloader_persistent_workers": _FEED,
    "dataloader_prefetch_factor": _FEED,
    "dataloader_multiprocessing_context": _FEED,
    "dataloader_in_order": _FEED,
    "remove_unused_columns": "a task reads the columns that it names",
    "label_names": "task.label names the column",
    "length_column_name": "lengths are counted in tokens",
    "ddp_find_unused_parameters": "strategy.options of ddp",
    "ddp_broadcast_buffers": "strategy.options of ddp",
    "ddp_static_graph": "strategy.options of ddp",
    "ddp_backend": "nccl on GPUs, gloo on CPUs",
    "debug": "lockstep --debug shows tracebacks; profile.steps looks into steps",
    "skip_memory_metrics": "memory is always in metrics.jsonl",
    "do_train": "lockstep train trains, evaluates and tests",
    "do_eval": "lockstep train trains, evaluates and tests",
    "do_predict": "lockstep train trains, evaluates and tests",
    "sortish_sampler": "data.group_by_length",
    "generation_max_length": "data.max_length is the most that is written",
    "generation_config": "task.beams of translation, task.temperature of language modelling",
    # of older releases
    "half_precision_backend": _OLDER,
    "fp16_backend": _OLDER,
    "fp16_opt_level": _OLDER,
    "use_mps_device": _OLDER,
    "use_ipex": _OLDER,
    "jit_mode_eval": _OLDER,
    "tpu_num_cores": _OLDER,
    "tpu_metrics_debug": _OLDER,
    "include_tokens_per_second": _OLDER,
    "include_inputs_for_metrics": _OLDER,
    "push_to_hub_model_id": _OLDER,
    "mp_parameters": _OLDER,
    "push_to_hub_organization": _OLDER,
    "push_to_hub_token": _OLDER,
    "ray_scope": _OLDER,
    "dispatch_batches": _OLDER,
    "split_batches": _OLDER,
    "fsdp_min_num_params": _OLDER,
    "fsdp_transformer_layer_cls_to_wrap": _OLDER,
    "torchdynamo": "the older name of torch_compile_backend: model.compile",
    "xpu_backend": _OLDER,
    "past_index": _OLDER,
}
