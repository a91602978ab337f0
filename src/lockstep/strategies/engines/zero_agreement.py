"""Where a config of DeepSpeed and the run file say the same thing: what agrees, what is left to lockstep, what differs.

In: a run and `strategy.options`, which may be an ordinary file of DeepSpeed's with its "auto". Out: what is left for
DeepSpeed to read, and a line for each entry that says otherwise than the run file. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.config.run import Run, RunError

# What the run file says already: DeepSpeed's key -> ours.
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
    """Whether the model's own weights are bf16, beside fp32 master weights in the optimizer."""
    section = options.get("bf16", options.get("bfloat16"))
    return isinstance(section, Mapping) and section.get("enabled") not in (AUTO, None, False)


def remaining(options: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed is to read: without what the run file says, and without "auto", which leaves it to lockstep."""
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
    """A line for each entry that says otherwise than the run file, or that would not work. `key`: where they are."""
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
            wrong = list(_optimizer(run, value) if name == "optimizer" else _scheduler(run, value))
            rows += [f"{key}.{name}{inner}: this is said by the run file's own key {ours}" for inner in wrong]
        elif value not in (AUTO, agreed.get(name)) and not _off(value):
            rows.append(f"{key}.{name}: this is said by the run file's own key {ours}{_as_it_is(agreed.get(name))}")
    section = options.get("zero_optimization", {})
    if not isinstance(section, Mapping):
        return [*rows, f"{key}.zero_optimization: {section!r} is not a mapping of DeepSpeed's zero_optimization"]
    if section.get("stage", AUTO) not in (AUTO, stage):
        rows.append(f"{key}.zero_optimization.stage: this is said by strategy.name (zero1, zero2, zero3), {stage} here")
    if section.get("round_robin_gradients") not in (None, False, AUTO):
        rows.append(
            f"{key}.zero_optimization.round_robin_gradients: under it DeepSpeed gives weights back in another order "
            "than the parameters' (seen in 0.19.8), so nothing could be saved; leave it out"
        )
    if keeps_bf16_weights(options) and run.precision != "bf16":
        rows.append(f"{key}.bf16: the run's precision is {run.precision}; set precision=bf16 too")
    return rows


def check(run: Run, processes: int) -> None:
    """All of this, of whatever strategy may have a config of DeepSpeed. Errors: `RunError`."""
    name, options, key = run.strategy.name, run.strategy.options, "strategy.options"
    stage: Any = {"zero1": 1, "zero2": 2, "zero3": 3}.get(name)
    if name == "hf_accelerate" and isinstance(options.get("deepspeed"), Mapping):
        options, key = options["deepspeed"], f"{key}.deepspeed"
        stage, options = options.get("zero_stage"), {k: v for k, v in options.items() if k != "zero_stage"}
    if stage in (1, 2, 3):
        refuse(differing(run, processes, stage, options, key), key)


def refuse(rows: Sequence[str], key: str) -> None:
    """Errors: `RunError`, if there is anything to tell."""
    if rows:
        head = f"{key}: {len(rows)} entries cannot be used:\n  " if len(rows) > 1 else ""
        raise RunError(head + "\n  ".join(rows))


def _as_it_is(value: float | None) -> str:
    return "" if value is None else f", and comes to {value:g} here"


def _off(value: Any) -> bool:
    """Of a feature's section: not used, or left to lockstep."""
    return isinstance(value, Mapping) and value.get("enabled", False) in (False, AUTO)


def _optimizer(run: Run, value: Any) -> Iterator[str]:
    """Entries of DeepSpeed's optimizer that differ from `optim`, as what follows its key; empty: the whole."""
    names = {"adamw": "AdamW", "sgd": "SGD", "lion": "Lion"}
    if value == AUTO:
        return
    if not isinstance(value, Mapping) or value.get("type", AUTO) not in (AUTO, names.get(run.optim.name)):
        yield ""
        return
    own = {key: list(each) if isinstance(each, tuple) else each for key, each in run.optim.options.items()}
    same = own | {"lr": run.optim.learning_rate, "weight_decay": run.optim.weight_decay}
    yield from _parameters(value, same)


def _scheduler(run: Run, value: Any) -> Iterator[str]:
    """Entries of DeepSpeed's scheduler that differ from `optim.schedule`. DeepSpeed warms up by the logarithm where it
    is not told to do so evenly, which lockstep does."""
    if value == AUTO:
        return
    if not isinstance(value, Mapping) or _SCHEDULES.get(value.get("type", "")) != run.optim.schedule:
        yield ""
        return
    if run.optim.warmup_steps or run.optim.warmup_fraction:
        parameters = value.get("params") or {}
        if run.optim.schedule != "cosine" and parameters.get("warmup_type") != "linear":
            yield ".params.warmup_type (linear)"
    same = {
        "warmup_min_lr": 0,
        "warmup_max_lr": run.optim.learning_rate,
        "warmup_num_steps": run.optim.warmup_steps,
        "total_num_steps": run.steps,
        "warmup_type": "linear",
        "cos_min_ratio": run.optim.min_lr_ratio,
    }
    yield from _parameters(value, same)


def _parameters(value: Mapping[str, Any], same: Mapping[str, Any]) -> Iterator[str]:
    for name, number in (value.get("params") or {}).items():
        if number != AUTO and (name not in same or number != same[name]):
            yield f".params.{name}"
