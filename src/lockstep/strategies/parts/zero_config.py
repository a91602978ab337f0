"""What DeepSpeed is told: its own config, made of the run file and of `strategy.options`. Strategies that use it share
this.

In: a run and the user's part. Out: the whole config as DeepSpeed reads it, or a `RunError` naming the key.
"""

from __future__ import annotations

import difflib
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.run import Run, RunError

# What the run file says already: DeepSpeed's key -> ours.
_OURS = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_batches",
    "gradient_accumulation_steps": "micro_batches",
    "managed_gradient_accumulation": "micro_batches",
    "gradient_clipping": "optim.clip",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "steps_per_print": "track.every",
    "torch_autocast": "precision",
    "amp": "precision",
    "fp16": "precision (bf16: fp16 leaves out updates whose gradient overflows)",
}


def prepare_import(device_type: str) -> None:
    """Call before the first `import deepspeed`: DeepSpeed picks its device then, and would compile an operator."""
    os.environ["DS_ACCELERATOR"] = device_type
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    assert get_accelerator().device_name() == device_type, "DeepSpeed was imported for another device"
    warnings.filterwarnings("ignore", r".*(all_gather_into_tensor|reduce_scatter_tensor)", FutureWarning)
    # Each optimizer of ours is held against `single` in tests/test_zero.py.
    logging.getLogger("DeepSpeed").addFilter(_not_of_untested_optimizers)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 26 s of compiling, for CPU all-reduces


def _not_of_untested_optimizers(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in str(record.msg)


def config(run: Run, stage: int, parameters: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The whole config. DeepSpeed's buffers (its defaults take gigabytes) are bounded by the model's size."""
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
        "train_micro_batch_size_per_gpu": 1,  # a number DeepSpeed wants and does nothing with
        "gradient_accumulation_steps": 1,
        "gradient_clipping": run.optim.clip or 0.0,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,  # SGD: tested here
        "zero_force_ds_cpu_optimizer": False,  # with `offload_optimizer` too the optimizer is ours
    }
    theirs = {k: v for k, v in options.items() if k != "zero_optimization"}
    return ours | theirs | {"zero_optimization": zero | dict(options.get("zero_optimization", {}))}


def keeps_bf16_weights(options: Mapping[str, Any]) -> bool:
    """Whether the model's own weights are bf16, beside fp32 master weights in the optimizer."""
    section = options.get("bf16", options.get("bfloat16"))
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def check(run: Run, stage: int, options: Mapping[str, Any], key: str = "strategy.options") -> None:
    """Refuse, before any process starts, what is ours to say, what DeepSpeed does not know and values it does not take.
    `key`: where in the run file the options are. Errors: `RunError`."""
    if run.on_nonfinite == "skip":
        raise RunError("on_nonfinite: DeepSpeed cannot leave a step out; use on_nonfinite=stop, or another strategy")
    for name in options:
        if name in _OURS:
            raise RunError(f"{key}.{name}: this is said by the run file's own key {_OURS[name]}")
    section = options.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        raise RunError(f"{key}.zero_optimization: {section!r} is not a mapping of DeepSpeed's zero_optimization")
    if "stage" in section:
        raise RunError(f"{key}.zero_optimization.stage: this is said by strategy.name (zero1, zero2, zero3)")
    if section.get("round_robin_gradients"):
        raise RunError(
            f"{key}.zero_optimization.round_robin_gradients: under it DeepSpeed gives weights back in another order "
            f"than the parameters' (seen in 0.19.8), so nothing could be saved; leave it out"
        )
    if keeps_bf16_weights(options) and run.precision != "bf16":
        raise RunError(f"{key}.bf16: the run's precision is {run.precision}; set precision=bf16 too")
    if options:
        prepare_import("cuda" if run.launch.device != "cpu" and torch.cuda.is_available() else "cpu")
        _ask_deepspeed(config(run, stage, 1_000_000, options), options, key)


class _Asked(dict):
    """A config that remembers which of its keys were asked for."""

    def __init__(self, content: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(content)
        self.asked = asked

    def __copy__(self) -> _Asked:
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def _ask_deepspeed(content: dict[str, Any], options: Mapping[str, Any], key: str) -> None:
    """Let DeepSpeed read the config: a key it never asks for is one it does not have. (It would ignore it silently.)"""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    asked: set[str] = set()
    try:
        DeepSpeedConfig(_Asked(content, asked))
    except ValidationError as error:
        first = error.errors()[0]
        section = next((s for s in ("zero_optimization", *options) if _belongs(first["loc"], content.get(s))), None)
        name = ".".join(str(part) for part in (key, section, *first["loc"]) if part is not None)
        if first["type"] == "extra_forbidden":
            raise RunError(f"{name}: DeepSpeed has no such option") from None
        raise RunError(f"{name}: {first['input']!r} will not do, DeepSpeed says: {first['msg']}") from None
    except Exception as error:  # DeepSpeed refuses in many ways
        raise RunError(f"{key}: DeepSpeed says: {' '.join(str(error).split())[:400]}") from error
    for name in options:
        if name not in asked:
            near = difflib.get_close_matches(name, sorted(asked - _OURS.keys()), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RunError(f"{key}.{name}: DeepSpeed has no such option{hint}")


def _belongs(location: tuple[int | str, ...], section: Any) -> bool:
    return isinstance(section, Mapping) and bool(location) and location[0] in section
