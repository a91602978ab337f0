"""A script that trains by transformers' Trainer or one of TRL's.

In: a `Script`. Out: what moves it: its calls one by one, then the settings of its Trainer; what is not known is a gap.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from lockstep.config.run import RunError
from lockstep.tools.import_config import libraries, loading, rows, things, trainer, trl
from lockstep.tools.import_config.loading import Reading
from lockstep.tools.import_config.script import Call, Script, shown
from lockstep.tools.import_config.table import Imported

Move = Callable[[Imported, int | None], None]
LOOPS = ("lightning", "pytorch_lightning", "pl", "L", "composer", "ignite", "fastai")  # which have a Trainer, too
_LIBRARIES = ("transformers", "trl", "peft", "datasets", "bitsandbytes", "unsloth", "optimum", "sentence_transformers")
_OVERRIDES: tuple[str, ...] = (
    "compute_loss",
    "training_step",
    "create_optimizer",
    "create_scheduler",
    "create_optimizer_and_scheduler",
)
_OVERRIDES += (
    "get_train_dataloader",
    "get_eval_dataloader",
    "_inner_training_loop",
    "optimizer_step",
    "prediction_step",
)
_AFTER = {  # methods of a trainer that decide nothing
    *("train", "evaluate", "predict", "save_model", "save_state", "push_to_hub", "log_metrics", "save_metrics", "log"),
    *("create_model_card", "is_world_process_zero", "metrics_format", "remove_callback", "add_callback"),
}


def read(script: Script) -> tuple[str, Move] | None:
    """None: it has no Trainer. Errors: `RunError` where its settings are on its command line."""
    calls = [c for c in script.calls if c.origin.partition(".")[0] not in LOOPS]
    settings = [c for c in calls if _is_settings(c.name)]
    trainers = [c for c in calls if things.is_trainer(script, c.name)]
    if not settings and not trainers:
        return None
    way = next((c.name for c in (*settings, *trainers) if _no_way(c.name)), None)
    if way is not None:
        raise RunError(
            f"--from: {script.path}: {way} has no counterpart: of TRL's trainers those of SFT, DPO and rewards have, "
            "and CPO's with loss_type simpo"
        )
    if len(settings) > 1:
        lines = ", ".join(str(c.line) for c in settings)
        raise RunError(f"--from: {script.path} calls {settings[0].name} on lines {lines}; leave one")
    parsers = [c for c in calls if c.name in ("HfArgumentParser", "TrlParser")]
    if parsers and not settings and not script.options:
        raise RunError(
            f"--from: {script.path} takes its settings from its command line (line {parsers[0].line}): write that "
            "command to a file, run.sh, and give that: --from run.sh; or training_args.json of args.to_json_string()"
        )
    name = settings[0].name if settings else trainers[0].name
    return f"a script with {name}", lambda moved, processes: _move(script, moved, processes)


def _is_settings(name: str) -> bool:
    return name.endswith("TrainingArguments") or any(name == f"{prefix}Config" for prefix in (*trl.CONFIGS, *_NO_WAY))


_NO_WAY = (
    "KTO",
    "ORPO",
    "GRPO",
    "PPO",
    "PPOv2",
    "RLOO",
    "GKD",
    "PRM",
    "OnlineDPO",
    "XPO",
    "NashMD",
    "BCO",
    "AlignProp",
)


def _no_way(name: str) -> bool:
    return any(name in (f"{prefix}Config", f"{prefix}Trainer") for prefix in _NO_WAY) or name.startswith("SentenceTr")


def _move(script: Script, moved: Imported, processes: int | None) -> None:
    at = Reading(script, moved)
    known = {**trainer.TABLE, **trl.TABLE}
    if any(c.name in ("HfArgumentParser", "TrlParser") for c in script.calls):
        at.arguments |= {name: value for name, value in script.options.items() if name in known}
    loading.task_first(script, moved)
    for call in script.calls:
        read_call(call, at)
    for kind in script.classes.values():
        _subclass(kind, at)
    libraries.settings(at)
    _settings(at, processes)
    own_tokenizer(at)
    if moved.task is None:
        moved.unclear("the task", "nothing says which one it is", by=("task.name",))


def read_call(call: Call, at: Reading) -> None:
    handler = _handler(call, at)
    if handler is None:
        return
    if call.condition is not None and not things.is_trainer(at.script, call.name):
        moves = len(at.moved.gaps), dict(at.moved.keys), dict(at.arguments)
        handler(call, at)
        if (len(at.moved.gaps), at.moved.keys, at.arguments) != moves:
            at.moved.unclear(str(call), f"it is called only {call.condition}, which is known when the script runs")
        return
    handler(call, at)


def _handler(call: Call, at: Reading) -> Callable[[Call, Reading], None] | None:
    """What reads a call; None: it decides nothing."""
    kind = things.kind_of(at.script, call.receiver) if call.receiver is not None else None
    root, name = call.origin.partition(".")[0], call.name
    if _is_settings(name):
        return libraries.arguments
    if things.is_trainer(at.script, name) and root not in LOOPS:
        return _trainer
    if name in libraries.HANDLERS:
        return libraries.HANDLERS[name]
    if name in rows.HANDLERS:
        return rows.HANDLERS[name]
    if root == "transformers" and name.endswith(tuple(loading.TASKS)):
        return loading.scratch
    if root == "peft" and name.endswith("Config"):
        return loading.adapter
    if call.origin == "torch.compile":
        return libraries.compiled
    if call.origin.startswith(("datasets.Dataset.", "datasets.DatasetDict", "datasets.IterableDataset.")):
        return rows.own_rows
    if kind == "rows":
        return rows.method
    if kind == "model":
        return libraries.model_method
    if kind == "trainer":
        return None if name in _AFTER else _unknown
    if kind is not None or things.kind_of(at.script, call.node.func) in ("tokenizer", "model"):
        return None
    if root in _LIBRARIES and name not in libraries.NO_ROLE and not _quiet(call):
        return _unknown
    return None


def _quiet(call: Call) -> bool:
    parts = call.origin.split(".")
    return (
        "logging" in parts
        or call.name.startswith(("is_", "set_verbosity", "disable_", "enable_"))
        or ("schedule" in call.name and call.name.startswith("get_"))  # see Trainer's optimizers
        or (parts[-2] in ("datasets", "transformers") and call.name in ("Features", "Value", "ClassLabel", "Sequence"))
    )


def _unknown(call: Call, at: Reading) -> None:
    at.moved.unclear(str(call), "what it does to the training is not known here")


def _trainer(call: Call, at: Reading) -> None:
    libraries.trainer_call(call, at)
    rows.of_trainer(call, at)


def _subclass(kind: ast.ClassDef, at: Reading) -> None:
    """A Trainer of the script's own, and rows that a class of its own makes."""
    bases = [at.script.origin_of(base).rpartition(".")[2] for base in kind.bases]
    if any(base.endswith("Trainer") for base in bases):
        for line in kind.body:
            if isinstance(line, ast.FunctionDef) and line.name in _OVERRIDES:
                why = "a loss, or a step, of the script's own: task.name=module takes a loss"
                at.moved.drop(f"line {line.lineno}: {kind.name}.{line.name}", None, why, True, ("task.loss",))
    if any(base in ("Dataset", "IterableDataset") for base in bases):
        why = "save its texts to a file, and give that: --data FILE"
        at.moved.unclear(
            f"line {kind.lineno}: class {kind.name}({', '.join(map(shown, kind.bases))})",
            why,
            by=("data.source", "data.train"),
        )


def _settings(at: Reading, processes: int | None) -> None:
    moved = at.moved
    prefix = at.kind.removesuffix("Config")
    if prefix not in trl.CONFIGS and moved.task in trl.CONFIGS.values() and "Config" in at.kind:
        prefix = next(p for p, task in trl.CONFIGS.items() if task == moved.task)
    if prefix in trl.CONFIGS:
        older = any(c.name.endswith("TrainingArguments") for c in at.script.calls)
        defaults = {"learning_rate": 5e-5, "gradient_checkpointing": False, "bf16": False} if older else {}
        if prefix == "CPO":
            defaults |= {"cpo_alpha": 1.0}
        trl.move(defaults | at.arguments, moved, processes)
        return
    trainer.move(at.arguments, moved, processes)
    if at.mapped:
        return
    why = "no function was seen that makes tokens of them"
    moved.unclear("which texts are read, and where they are cut", why, by=("data.max_length", "task.block_size"))


def own_tokenizer(at: Reading) -> None:
    """A tokenizer that is the model's own is not named."""
    moved = at.moved
    source = moved.keys.get("tokenizer.source")
    if source is not None and source == moved.keys.get("model.source"):
        del moved.keys["tokenizer.source"]
        moved.told.pop("tokenizer.source", None)
    elif source is None and at.tokenizer is not None and at.tokenizer[0] not in at.models:
        code, where = at.tokenizer
        moved.unclear(where, f"{code} is known when the script runs", by=("tokenizer.source", "model.source"))
