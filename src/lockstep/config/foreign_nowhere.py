"""Names of TrainingArguments that have no counterpart here: a name -> why nothing is to be set.

In: nothing. Out: `NOWHERE`, for messages about unknown keys, for `lockstep init --from` and for docs/coming-from.md.
"""

from __future__ import annotations

AGAIN = "a layer is computed again from its inputs, in one way"
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
    "optim_args": "each optimizer has keys of its own: docs/optimizers.md",
    "optim_target_modules": "optim.matrices of muon; optim.groups has rates",
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
}
