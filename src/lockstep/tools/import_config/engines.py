"""Files of `accelerate config` and of DeepSpeed. In: their keys. Out: keys of a run file; of DeepSpeed's, all that the
run file does not say itself passes to the engine untouched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.tools.import_config.table import Imported, Row, Table, apply, batches, number, whole

_MEETING = "launch.name=torchrun has rendezvous, where machines meet"
_LAUNCHED = "a launcher tells a process who it is"

ACCELERATE: Table = {
    "distributed_type": Row(
        "strategy.name", "NO: single; MULTI_*: ddp; FSDP: fsdp2; DEEPSPEED: zero1 to zero3", joined=True
    ),
    "num_processes": Row("launch.processes", "divided by num_machines: it is those of a machine", joined=True),
    "num_machines": Row("launch.machines", "with launch.name: torchrun, above 1", joined=True),
    "main_process_ip": Row("launch.rendezvous", "HOST:PORT, with main_process_port", joined=True),
    "main_process_port": Row("launch.rendezvous", "HOST:PORT, with main_process_ip", joined=True),
    "mixed_precision": Row("precision", "no: fp32", values={"no": "fp32", "bf16": "bf16", "fp16": "fp16"}),
    "use_cpu": Row("launch.device", "true: cpu", values={True: "cpu"}),
    "deepspeed_config": Row("strategy", "zero_stage, gradient_clipping, offloading", joined=True),
    "gradient_accumulation_steps": Row("micro_batches", "times processes", joined=True),
    "dynamo_config": Row("model.compile", "dynamo_backend INDUCTOR: true; its modes have no counterpart", joined=True),
    "dynamo_backend": Row("model.compile", "INDUCTOR: true", values={"no": None, "inductor": True}),
    # what has no counterpart
    "compute_environment": Row("", "launch.name: `lockstep list` says what there is", default="LOCAL_MACHINE"),
    "debug": Row("", "lockstep --debug shows tracebacks"),
    "downcast_bf16": Row("", "of TPUs"),
    "enable_cpu_affinity": Row("", "launch.threads says how many threads a process has"),
    "fsdp_config": Row("", "fsdp2 finds the blocks by itself; strategy.options of fsdp2: docs/strategies"),
    "gpu_ids": Row("", "CUDA_VISIBLE_DEVICES says which are seen", default="all"),
    "machine_rank": Row("", "every machine runs the same command; launch.node_rank where it has to be said"),
    "main_training_function": Row("", "there is no script", default="main"),
    "megatron_lm_config": Row("", "no strategy does this; fsdp2 and pipeline cut models"),
    "rdzv_backend": Row("", _MEETING, default="static"),
    "same_network": Row("", _MEETING, default=True),
    "tpu_env": Row("", "no TPUs"),
    "tpu_use_cluster": Row("", "no TPUs"),
    "tpu_use_sudo": Row("", "no TPUs"),
    "fp8_config": Row("", "precision is fp32, bf16 or fp16"),
    "parallelism_config": Row("", "strategy.name and its options"),
}

DEEPSPEED: Table = {
    "train_batch_size": Row("batch_size", joined=True),
    "train_micro_batch_size_per_gpu": Row("micro_batches", "batch_size / this many examples", joined=True),
    "gradient_accumulation_steps": Row("micro_batches", "times processes", joined=True),
    "gradient_clipping": Row("optim.max_grad_norm", joined=True),
    "optimizer": Row("optim", "AdamW, Adam, SGD and Lion with lr, betas, eps, weight_decay, momentum", joined=True),
    "scheduler": Row(
        "optim.schedule", "WarmupLR: constant; WarmupDecayLR: linear; WarmupCosineLR: cosine", joined=True
    ),
    "zero_optimization": Row("strategy.name", "its stage; the rest in strategy.options, untouched", joined=True),
    "bf16": Row("precision", "enabled: bf16", joined=True),
    "fp16": Row("precision", "enabled: fp16; lockstep does not take it with ZeRO", joined=True),
    "steps_per_print": Row("track.every", joined=True),
}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZERS = {"AdamW": "adamw", "SGD": "sgd", "Lion": "lion"}


def move_accelerate(theirs: Mapping[str, Any], moved: Imported, processes: int | None) -> None:
    """Where and how, and nothing of what is trained."""
    apply(ACCELERATE, theirs, moved)
    machines = whole(theirs.get("num_machines"))
    every = whole(theirs.get("num_processes"))
    moved.set("launch.processes", max(1, every // machines), f"num_processes {every} on {machines} machine(s)")
    if machines > 1:
        moved.set("launch.name", "torchrun", f"num_machines {machines}")
        moved.set("launch.machines", machines, "num_machines")
        if theirs.get("main_process_ip"):
            place = f"{theirs['main_process_ip']}:{theirs.get('main_process_port') or 29500}"
            moved.set("launch.rendezvous", place, "main_process_ip and main_process_port")
    kind = str(theirs.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        _of_accelerate(theirs.get("deepspeed_config") or {}, moved, every)
    elif kind == "FSDP":
        moved.set("strategy.name", "fsdp2", "distributed_type FSDP")
    elif kind.startswith("MULTI_") or (kind == "NO" and every > 1):
        moved.set("strategy.name", "ddp", f"distributed_type {kind}")
    elif kind == "NO":
        moved.set("strategy.name", "single", "distributed_type NO")
    else:
        moved.drop("distributed_type", kind, "no strategy does this; `lockstep list` names them")
    accumulated = theirs.get("gradient_accumulation_steps")
    if accumulated is not None:
        moved.set("micro_batches", whole(accumulated) * every, f"gradient_accumulation_steps {accumulated} x {every}")
    if isinstance(config := theirs.get("dynamo_config"), Mapping):
        _compiled(config, moved)
    _at_least(moved, every)


def _compiled(config: Mapping[str, Any], moved: Imported) -> None:
    backend = str(config.get("dynamo_backend", "no")).lower()
    if backend == "inductor":
        moved.set("model.compile", True, "dynamo_config: dynamo_backend INDUCTOR")
    elif backend != "no":
        moved.drop("dynamo_config: dynamo_backend", backend, "model.compile compiles by inductor")
    for name, value in config.items() if backend == "inductor" else ():
        if name != "dynamo_backend" and value and value != "default":
            moved.drop(f"dynamo_config: {name}", value, "inductor compiles the layers, in its default mode")


def _of_accelerate(config: Mapping[str, Any], moved: Imported, processes: int) -> None:
    stage = whole(config.get("zero_stage"), 2)
    if (path := config.get("deepspeed_config_file")) not in (None, "none"):
        moved.drop("deepspeed_config_file", path, "`lockstep init --from` that file moves it, too")
    moved.set("strategy.name", f"zero{stage}" if stage else "ddp", f"zero_stage {stage}")
    if (clip := number(config.get("gradient_clipping"))) is not None:
        moved.set("optim.max_grad_norm", clip, "gradient_clipping")
    if (times := number(config.get("gradient_accumulation_steps"))) is not None:
        moved.set("micro_batches", int(times) * processes, f"gradient_accumulation_steps {int(times)} x {processes}")
    offload = {
        part: {"device": device}
        for part in ("offload_optimizer", "offload_param")
        if (device := str(config.get(f"{part}_device", "none")).lower()) != "none"
    }
    if offload:
        moved.set("strategy.options", {"zero_optimization": offload}, "offload_optimizer_device, offload_param_device")
    if config.get("zero3_save_16bit_model"):
        moved.drop("zero3_save_16bit_model", True, "the export is whole, and in fp32")


def move_deepspeed(theirs: Mapping[str, Any], moved: Imported, processes: int | None) -> None:
    """What only the run file decides is taken out, and the rest goes into `strategy.options`."""
    rest = {name: value for name, value in theirs.items() if name not in DEEPSPEED}
    zero = dict(theirs.get("zero_optimization") or {})
    stage = whole(zero.pop("stage", 0), 0)
    moved.set("strategy.name", f"zero{stage}" if stage else "ddp", f"zero_optimization: stage {stage}")
    if stage and zero:
        rest["zero_optimization"] = zero
    if stage and rest:
        moved.set("strategy.options", rest, "DeepSpeed's own, untouched")
    for name, value in {} if stage else rest.items():
        moved.drop(name, value, "without ZeRO DeepSpeed is not used")
    _steps(theirs, moved, processes)
    if (clip := number(theirs.get("gradient_clipping"))) is not None:
        moved.set("optim.max_grad_norm", clip, "gradient_clipping")
    if (every := number(theirs.get("steps_per_print"))) is not None and every < 10_000:
        moved.set("track.every", max(1, int(every)), "steps_per_print")
    if _enabled(theirs.get("bf16")):
        moved.set("precision", "bf16", "bf16 enabled")
    if _enabled(theirs.get("fp16")):
        moved.set("precision", "fp16", "fp16 enabled")
    _optimizer(theirs.get("optimizer"), moved)
    _scheduler(theirs.get("scheduler"), moved)


def _steps(theirs: Mapping[str, Any], moved: Imported, processes: int | None) -> None:
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole_, each, times = (number(theirs.get(name)) for name in ("train_batch_size", *names))
    if whole_ is not None:
        moved.set("batch_size", int(whole_), "train_batch_size")
        if each:
            moved.set("micro_batches", max(1, int(whole_ / each)), f"train_batch_size / {names[0]} {each:g}")
        elif times:
            moved.set("micro_batches", int(times) * (processes or 1), f"{names[1]} {times:g} x {processes or 1}")
    elif each is not None:
        batches(moved, int(each), whole(times), processes, names)


def _optimizer(given: Any, moved: Imported) -> None:
    if not isinstance(given, Mapping):
        return
    kind, values = str(given.get("type")), given.get("params") or {}
    adam = "AdamW" if kind.lower() == "adam" and values.get("adam_w_mode", True) else kind
    if adam not in _OPTIMIZERS:
        moved.drop("optimizer", kind, "with DeepSpeed optim.name is adamw, sgd or lion")
        return
    moved.set("optim.name", _OPTIMIZERS[adam], f"optimizer {kind}")
    ours = {
        "lr": "learning_rate",
        "betas": "betas",
        "eps": "eps",
        "weight_decay": "weight_decay",
        "momentum": "momentum",
    }
    for name, value in values.items():
        if name in ours and value != "auto":
            moved.set(f"optim.{ours[name]}", value if isinstance(value, list) else number(value), f"optimizer: {name}")
        elif name not in (*ours, "adam_w_mode", "torch_adam"):
            moved.drop(f"optimizer: {name}", value, "optim has no such key")


def _scheduler(given: Any, moved: Imported) -> None:
    if not isinstance(given, Mapping):
        return
    kind, values = str(given.get("type")), given.get("params") or {}
    if kind not in _SCHEDULES:
        moved.drop("scheduler", kind, "WarmupLR, WarmupDecayLR and WarmupCosineLR have a counterpart")
        return
    moved.set("optim.schedule", _SCHEDULES[kind], f"scheduler {kind}")
    for name, value in values.items():
        if value == "auto":
            continue
        if name == "warmup_num_steps":
            moved.set("optim.warmup_steps", whole(value), "scheduler: warmup_num_steps")
        elif name == "warmup_max_lr":
            moved.set("optim.learning_rate", number(value), "scheduler: warmup_max_lr")
        elif name == "total_num_steps":
            moved.set("steps", whole(value), "scheduler: total_num_steps")
        elif not (name == "warmup_min_lr" and not number(value)) and not (name == "warmup_type" and value == "linear"):
            moved.drop(f"scheduler: {name}", value, "a warm-up is linear, from 0")
    if values.get("warmup_type", "log") != "linear" and kind != "WarmupCosineLR" and values.get("warmup_num_steps"):
        moved.drop("scheduler: warmup_type", values.get("warmup_type", "log"), "a warm-up is linear, from 0")


def _enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _at_least(moved: Imported, processes: int) -> None:
    """Every process needs a micro-batch."""
    if processes > moved.keys.get("micro_batches", 8):
        moved.set("micro_batches", processes, f"one for each of {processes} processes")
