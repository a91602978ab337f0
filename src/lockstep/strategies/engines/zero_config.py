"""DeepSpeed's config, built from the run file and `strategy.options`, for all strategies that use DeepSpeed.

In: a run and the user's part. Out: the whole config as DeepSpeed reads it, or a `RunError` naming the key.
"""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.config.sections import LaunchSection, OptimSection
from lockstep.data.job import Job
from lockstep.distributed.hardware import share_gpus
from lockstep.strategies.engines import zero_agreement
from lockstep.strategies.engines.zero_agreement import OURS, differing, refuse, remaining


def prepare_import(device_type: str) -> None:
    """Prepare the first `import deepspeed`, at which DeepSpeed picks its device and would compile an operator."""
    os.environ["DS_ACCELERATOR"] = device_type
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    assert get_accelerator().device_name() == device_type, "DeepSpeed was imported for another device"
    warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor)", FutureWarning)
    # tests/strategies/test_zero.py compares each optimizer with `single`.
    logging.getLogger("DeepSpeed").addFilter(_not_of_untested_optimizers)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # skips 26 s of compiling an op for CPU all-reduces


def _not_of_untested_optimizers(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in str(record.msg)


def config(optim: OptimSection, stage: int, parameters: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole config. The model's size bounds DeepSpeed's buffers, whose defaults take gigabytes."""
    part = max(1, min(parameters, max(parameters // 8, 1_000_000)))
    part += part % 2  # DeepSpeed asserts that a bucket is a multiple of two
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": min(part, 50_000_000),
        "allgather_bucket_size": min(part, 500_000_000),
    }
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": min(part, 50_000_000),
            "stage3_param_persistence_threshold": min(parameters // 1000, 100_000),
            "stage3_max_live_parameters": min(parameters // 4, 1_000_000_000),
            "stage3_max_reuse_distance": min(parameters // 4, 1_000_000_000),
        }
    ours = {
        "train_micro_batch_size_per_gpu": 1,  # required by DeepSpeed, and unused
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.max_grad_norm or 0.0,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it would synchronize the device around every micro-batch
        "zero_allow_untested_optimizer": True,  # SGD: tested here
        "zero_force_ds_cpu_optimizer": False,  # the optimizer is lockstep's, also with `offload_optimizer`
    }
    theirs = remaining(options)
    section = zero | theirs.pop("zero_optimization", {})
    return ours | theirs | {"zero_optimization": section}


def check(job: Job, stage: int, options: Mapping[str, Any], key: str = "strategy.options") -> None:
    """Refuse, before any process starts, options that have their own key in the run file, unknown options, and invalid
    values. `key`: the options' place in the run file. Errors: `RunError`, listing all faults."""
    run = job.run
    device = _device(run.launch)
    if isinstance(options.get("zero_optimization", {}), Mapping):
        zero_agreement.refuse_known_bad(stage, options, run.strategy.name, device)
    if run.on_nonfinite == "skip":
        raise RunError(
            "LS4140", "on_nonfinite: DeepSpeed cannot skip a step; use on_nonfinite=stop, or another strategy"
        )
    if stage == 3 and run.strategy.tensor_leaves > 1:
        raise RunError(
            "LS4145",
            "strategy.tensor_leaves: DeepSpeed's stage 3 wraps the outputs of layers in its own autograd nodes, "
            "which do not support leaves; use strategy.name=fsdp2 or zero2, whose results are bitwise equal, or "
            "remove it",
        )
    if share_gpus(run.launch):
        raise RunError(
            "LS4141",
            "launch.processes_per_gpu: DeepSpeed needs one GPU per process; use strategy.name=fsdp2, which "
            "shards the same states exactly, or remove launch.processes_per_gpu",
        )
    if run.model.compiled:
        raise RunError(
            "LS4142",
            "model.compile: DeepSpeed gathers and releases weights inside of layers, which prevents "
            "compiling them; remove model.compile, or use strategy.name=fsdp2",
        )
    if run.precision == "fp16":
        raise RunError(
            "LS4143",
            "precision: the fp16 mode of DeepSpeed keeps fp16 weights and a separate loss scale, so no other "
            "strategy could resume from its checkpoints; use precision=bf16 or fp32, or strategy.name=fsdp2",
        )
    if run.model.dtype == "bfloat16" and run.model.adapter:
        raise RunError(
            "LS4144",
            "model.dtype: DeepSpeed supports one dtype of weights only, and here the model is bfloat16 and "
            "the adapter float32; set model.dtype=float32, or strategy.name=fsdp2",
        )
    rows = differing(run, job.processes, stage, options, key)
    if options and isinstance(options.get("zero_optimization", {}), Mapping):
        prepare_import(device)
        rest = remaining(options)
        rows += _ask_deepspeed(config(run.optim, stage, 1_000_000, rest), rest, key)
    refuse(rows, key)


# Entries of DeepSpeed's config that affect only placement, buffer sizes, communication or reports.
_SAME_NUMBERS = {
    "zero_optimization": {
        *("stage", "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients"),
        *("reduce_scatter", "allgather_partitions", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters"),
        *("offload_optimizer", "offload_param", "sub_group_size", "round_robin_gradients", "parameter_alignment"),
        *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"),
        *("stage3_param_persistence_threshold", "stage3_module_granularity_threshold"),
        "stage3_gather_16bit_weights_on_model_save",
    },
    "bf16": {"enabled"},
    "bfloat16": {"enabled"},
    "fp16": {"enabled"},
    "flops_profiler": None,
    "comms_logger": None,
    "tensorboard": None,
    "wandb": None,
    "csv_monitor": None,
    "wall_clock_breakdown": None,
    "memory_breakdown": None,
    "dump_state": None,
    "zero_allow_untested_optimizer": None,
    "zero_force_ds_cpu_optimizer": None,
}


def other_arithmetic(options: Mapping[str, Any]) -> list[str]:
    """Return the entries of DeepSpeed's config that require its own reduction and update: they change the arithmetic,
    or are untested."""
    entries: list[str] = []
    for name, value in remaining(options).items():
        if name == "communication_data_type" and value == "fp32":
            continue
        if name in ("bf16", "bfloat16") and not zero_agreement.keeps_bf16_weights(options):
            continue
        inner = _SAME_NUMBERS.get(name, set())
        if inner is None:
            continue
        if not isinstance(value, Mapping):
            entries.append(name)
            continue
        entries += [f"{name}.{key}" for key in value if key not in inner]
        if name in ("bf16", "bfloat16"):
            entries.append(name)
        for key in ("offload_optimizer", "offload_param"):
            section = value.get(key)
            if isinstance(section, Mapping) and section.get("device") not in (None, "cpu", "none"):
                entries.append(f"{name}.{key}.device")
    return sorted(entries)


def _device(launch: LaunchSection) -> str:
    import torch

    return "cuda" if launch.device != "cpu" and torch.cuda.is_available() else "cpu"


class _RecordingConfig(dict):
    """A config that records which keys are read."""

    def __init__(self, content: Mapping[str, Any], keys_read: set[str]) -> None:
        super().__init__(content)
        self.keys_read = keys_read

    def __copy__(self) -> _RecordingConfig:
        return self

    @override
    def __contains__(self, key: object) -> bool:
        self.keys_read.add(str(key))
        return super().__contains__(key)

    @override
    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    @override
    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


def _ask_deepspeed(content: dict[str, Any], options: Mapping[str, Any], key: str) -> list[str]:
    """Let DeepSpeed parse the config: a key that it never reads is unknown to it. (It would ignore it silently.)"""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    keys_read: set[str] = set()
    try:
        DeepSpeedConfig(_RecordingConfig(content, keys_read))
    except ValidationError as error:
        return [_format_fault(fault, content, options, key) for fault in error.errors()]
    except Exception as error:  # DeepSpeed raises many types of errors
        return [f"{key}: DeepSpeed says: {' '.join(str(error).split())[:400]}"]
    rows = []
    for name in options:
        if name not in keys_read:
            near = difflib.get_close_matches(name, sorted(keys_read - OURS.keys()), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            rows.append(f"{key}.{name}: DeepSpeed has no such option{hint}")
    return rows


def _format_fault(error: Any, content: dict[str, Any], options: Mapping[str, Any], key: str) -> str:
    """Format one of pydantic's errors, with its key."""
    section = next((s for s in ("zero_optimization", *options) if _belongs(error["loc"], content.get(s))), None)
    name = ".".join(str(part) for part in (key, section, *error["loc"]) if part is not None)
    if error["type"] == "extra_forbidden":
        return f"{name}: DeepSpeed has no such option"
    return f"{name}: invalid value {error['input']!r}; DeepSpeed says: {error['msg']}"


def _belongs(location: tuple[int | str, ...], section: Any) -> bool:
    return isinstance(section, Mapping) and bool(location) and location[0] in section


def shared_out(bytes_of: Mapping[str, float], processes: int, stage: int, low: bool) -> dict[str, float]:
    """Convert `MemoryEstimate.bytes_held` of plain data parallelism to a ZeRO stage. `low`: the model's own weights are
    bf16."""
    shares = {**bytes_of, "optimizer": bytes_of["optimizer"] + 4.0}  # DeepSpeed's copy of the weights
    shares |= {"weights": 2.0, "gradients": 2.0} if low else {}
    shared = {"weights": 3, "gradients": 2, "optimizer": 1}  # sharded from this stage on
    return {name: each / (processes if stage >= shared[name] else 1) for name, each in shares.items()}
