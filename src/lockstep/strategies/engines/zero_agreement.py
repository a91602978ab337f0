"""Refusals for DeepSpeed: a config that contradicts the run file, and versions that compute wrong gradients.

In: a run and `strategy.options`, which may be an ordinary DeepSpeed config with "auto" entries; the device, and the
installed version. Out: the config left for DeepSpeed, and a line for each entry that contradicts the run file; a
`RunError` that cites the report of a fault. pip does not install such a version (pyproject.toml); other environments
are refused here. Does not import torch.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from lockstep.config.run import Run, RunError
from lockstep.config.sections import OptimSection

# Settings with a key in the run file: DeepSpeed's key -> lockstep's.
OURS = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_batches",
    "gradient_accumulation_steps": "micro_batches",
    "managed_gradient_accumulation": "micro_batches",
    "gradient_clipping": "optim.max_grad_norm",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "steps_per_print": "track.every",
    "torch_autocast": "precision",
    "amp": "precision",
    "fp16": "precision (bf16 or fp32 with DeepSpeed)",
}
AUTO = "auto"
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def keeps_bf16_weights(options: Mapping[str, Any]) -> bool:
    """Whether the model's own weights are bf16, with fp32 master weights in the optimizer."""
    section = options.get("bf16", options.get("bfloat16"))
    return isinstance(section, Mapping) and section.get("enabled") not in (AUTO, None, False)


def remaining(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for DeepSpeed: without entries that have a key in the run file, and without "auto", which means
    lockstep's choice."""
    rest = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            value = {k: v for k, v in remaining(value).items() if not (name == "zero_optimization" and k == "stage")}
            if not value and options[name]:
                continue
        if value != AUTO and name not in OURS:
            rest[name] = value
    return rest


def differing(run: Run, processes: int, stage: int, options: Mapping[str, Any], key: str) -> list[str]:
    """Return a line for each entry that contradicts the run file or would not work. `key`: the options' place."""
    agreed = {
        "train_batch_size": run.batch_size,
        "train_micro_batch_size_per_gpu": run.batch_size / run.micro_batches,
        "gradient_accumulation_steps": run.micro_batches / processes,
        "gradient_clipping": run.optim.max_grad_norm or 0.0,
        "steps_per_print": run.track.every,
    }
    rows = []
    for name, ours in OURS.items():
        if name not in options:
            continue
        value = options[name]
        if name in ("optimizer", "scheduler"):
            optim = run.optim
            wrong = list(_optimizer(optim, value) if name == "optimizer" else _scheduler(optim, run.steps, value))
            rows += [f"{key}.{name}{inner}: set this by the run file's own key {ours}" for inner in wrong]
        elif value not in (AUTO, agreed.get(name)) and not _off(value):
            rows.append(f"{key}.{name}: set this by the run file's own key {ours}{_as_it_is(agreed.get(name))}")
    section = options.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        return [
            *rows,
            f"{key}.zero_optimization: {section!r} is not a mapping; expected the entries of DeepSpeed's "
            "zero_optimization",
        ]
    if section.get("stage", AUTO) not in (AUTO, stage):
        rows.append(
            f"{key}.zero_optimization.stage: strategy.name sets the stage (zero1, zero2, zero3), and it is {stage} here"
        )
    if section.get("round_robin_gradients") not in (None, False, AUTO):
        rows.append(
            f"{key}.zero_optimization.round_robin_gradients: with it, DeepSpeed returns weights in another order "
            "than the parameters' (seen in 0.19.8), so checkpoints would be wrong; remove it"
        )
    if keeps_bf16_weights(options) and run.precision != "bf16":
        rows.append(f"{key}.bf16: the run's precision is {run.precision}; set precision=bf16 too")
    return rows


def check(run: Run, processes: int) -> None:
    """Run these checks for any strategy with a DeepSpeed config. Errors: `RunError`."""
    name, options, key = run.strategy.name, run.strategy.options, "strategy.options"
    stage: Any = {"zero1": 1, "zero2": 2, "zero3": 3}.get(name)
    if name == "hf_accelerate" and isinstance(options.get("deepspeed"), Mapping):
        options, key = options["deepspeed"], f"{key}.deepspeed"
        stage, options = options.get("zero_stage"), {k: v for k, v in options.items() if k != "zero_stage"}
    if stage in (1, 2, 3):
        refuse(differing(run, processes, stage, options, key), key)


def refuse(rows: Sequence[str], key: str) -> None:
    """Raise `RunError` if there are rows to report."""
    if rows:
        head = f"{key}: {len(rows)} entries cannot be used:\n  " if len(rows) > 1 else ""
        raise RunError("LS4131", head + "\n  ".join(rows))


def _as_it_is(value: float | None) -> str:
    return "" if value is None else f", which is {value:g}"


def _off(value: Any) -> bool:
    """Whether the section of a DeepSpeed feature disables it, or leaves it to lockstep."""
    return isinstance(value, Mapping) and value.get("enabled", False) in (False, AUTO)


def _optimizer(optim: OptimSection, value: Any) -> Iterator[str]:
    """Yield the entries of DeepSpeed's optimizer that differ from `optim`, as suffixes of its key; "": the whole
    section."""
    names = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}
    if value == AUTO:
        return
    if not isinstance(value, Mapping) or value.get("type", AUTO) not in (AUTO, names.get(optim.name)):
        yield ""
        return
    own = {key: list(each) if isinstance(each, tuple) else each for key, each in optim.options.items()}
    same = own | {"lr": optim.learning_rate, "weight_decay": optim.weight_decay}
    yield from _parameters(value, same)


def _scheduler(optim: OptimSection, steps: int | None, value: Any) -> Iterator[str]:
    """Yield the entries of DeepSpeed's scheduler that differ from `optim.schedule`. DeepSpeed's default warmup is
    logarithmic; lockstep's is linear."""
    if value == AUTO:
        return
    if not isinstance(value, Mapping) or _SCHEDULES.get(value.get("type", "")) != optim.schedule:
        yield ""
        return
    if optim.warmup_steps or optim.warmup_fraction:
        parameters = value.get("params") or {}
        if optim.schedule != "cosine" and parameters.get("warmup_type") != "linear":
            yield ".params.warmup_type (linear)"
    same = {
        "warmup_min_lr": 0,
        "warmup_max_lr": optim.learning_rate,
        "warmup_num_steps": optim.warmup_steps,
        "total_num_steps": steps,
        "warmup_type": "linear",
        "cos_min_ratio": optim.min_lr_ratio,
    }
    yield from _parameters(value, same)


def _parameters(value: Mapping[str, Any], same: Mapping[str, Any]) -> Iterator[str]:
    for name, number in (value.get("params") or {}).items():
        if number != AUTO and (name not in same or number != same[name]):
            yield f".params.{name}"


def _every(options: Mapping[str, Any]) -> bool:
    return True


def _offloads(options: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state is in host memory or on disk."""
    section = options.get("zero_optimization", {})
    offload = section.get("offload_optimizer")
    return section.get("cpu_offload") is True or (
        isinstance(offload, Mapping) and offload.get("device", "none") != "none"
    )


def _overlaps(options: Mapping[str, Any]) -> bool:
    return options.get("zero_optimization", {}).get("overlap_comm") is True


def _reduces_scattered(options: Mapping[str, Any]) -> bool:
    return options.get("zero_optimization", {}).get("contiguous_gradients") is False


def _sums_in_fp32(options: Mapping[str, Any]) -> bool:
    """Whether weights are bf16 and micro-batches are summed in fp32."""
    types = options.get("data_types")
    return keeps_bf16_weights(options) and isinstance(types, Mapping) and types.get("grad_accum_dtype") == "fp32"


@dataclass(frozen=True)
class KnownBad:
    """Versions from `since` to below `mended` with a fault, at these ZeRO stages and on these devices, for options that
    `concerns` matches."""

    since: str
    mended: str
    stages: tuple[int, ...]
    concerns: Callable[[Mapping[str, Any]], bool]
    fault: str
    reports: str
    devices: tuple[str, ...] = ("cpu", "cuda")


OFFLOADED = "with offload_optimizer leaves out gradients of micro-batches"
OVERLAPPED = "with overlap_comm reduces gradients in memory that was already reused"
ALONE = "with bf16 weights and grad_accum_dtype fp32 does not average the last micro-batch over the ranks"
SCATTERED = "on CPUs with contiguous_gradients false does not reduce gradients between ranks"
DEEPSPEED = (
    KnownBad("0.17.6", "0.18.3", (2,), _every, "leaves out gradients of micro-batches", "DeepSpeed#7718"),
    KnownBad("0", "0.19.0", (1, 2), _offloads, OFFLOADED, "DeepSpeed#7967, DeepSpeed#7981"),
    KnownBad("0", "0.19.0", (1, 2), _overlaps, OVERLAPPED, "DeepSpeed#7965"),
    KnownBad("0.18.6", "0.19.0", (1,), _sums_in_fp32, ALONE, "DeepSpeed#7985"),
    KnownBad("0", "0.19.8", (1, 2), _reduces_scattered, SCATTERED, "DeepSpeed#8382", ("cpu",)),
)


def refuse_known_bad(stage: int, options: Mapping[str, Any], name: str, device: str) -> None:
    """Refuse a version with a known fault for this stage and these options. `name`: of the strategy. `device`: cpu or
    cuda. Errors: `RunError`."""
    try:
        installed = Version(importlib.metadata.version("deepspeed"))
    except importlib.metadata.PackageNotFoundError:  # not installed as a package
        return
    for bad in DEEPSPEED:
        inside = Version(bad.since) <= installed < Version(bad.mended)
        if inside and stage in bad.stages and device in bad.devices and bad.concerns(options):
            raise RunError(
                "LS4130",
                f"strategy.name: {name} with deepspeed {installed}: its ZeRO-{stage} {bad.fault} ({bad.reports}); "
                f"install deepspeed {bad.mended} or later: pip install 'lockstep-train[deepspeed]'",
            )
