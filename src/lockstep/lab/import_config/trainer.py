"""transformers' `TrainingArguments` and TRL's `SFTConfig`, `DPOConfig`, `CPOConfig` and `RewardConfig`.

In: their fields, from JSON (`args.to_json_string()`), YAML, a call in a Python file or a command line, including the
fields that the example scripts add (`ModelConfig`, `ScriptArguments`). Out: keys of a run file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.run import RunError
from lockstep.lab.import_config import model_defaults, table
from lockstep.lab.import_config.table import RunDraft, Table

TABLE = table.read_table("trainer")
# Defaults of TrainingArguments that differ from lockstep's.
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "weight_decay": 0.0,
    "seed": 42,
}
_SMOOTHED = ("classification", "translation", "summarization")  # tasks to which Trainer's label_smoothing applies
_GROUPED = 50  # steps whose examples Trainer sorts together


def move(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None, rows: Table = TABLE) -> None:
    """Convert given fields, and the defaults of the others."""
    table.apply(rows, theirs, draft)
    full = DEFAULTS | {name: value for name, value in theirs.items() if value is not None}
    for name in ("weight_decay", "seed"):
        if name not in theirs:
            draft.set(rows[name].here, DEFAULTS[name], f"{name}, by default")
    table.batches(
        draft,
        table.whole(full["per_device_train_batch_size"]),
        table.whole(full["gradient_accumulation_steps"]),
        processes,
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
    )
    table.length(draft, full["num_train_epochs"], full.get("max_steps"), ("num_train_epochs", "max_steps"))
    table.schedule(draft, full, "warmup_steps", "warmup_ratio", full.get("lr_scheduler_type"))
    table.optimizer(draft, "optim", full.get("optim"))
    kind, ends = str(full.get("lr_scheduler_type", "linear")).lower(), full.get("lr_scheduler_kwargs") or {}
    if isinstance(ends, Mapping):
        table.schedule_ends(draft, kind, ends, table.number(full.get("learning_rate")) or 5e-5, "lr_scheduler_kwargs")
    else:
        draft.drop("lr_scheduler_kwargs", ends, "expected a mapping", True, ("optim.schedule",))
    if (first := table.number(full.get("adam_beta1"))) is not None or "adam_beta2" in full:
        second = table.number(full.get("adam_beta2", 0.999))
        draft.set("optim.betas", [0.9 if first is None else first, second], "adam_beta1 and adam_beta2")
    if full.get("average_tokens_across_devices") is False:
        draft.notes.append(
            "difference, on several processes: with average_tokens_across_devices false the original averages the mean "
            "losses of its processes; lockstep weights all targets of a step equally"
        )
    _intervals(full, draft)
    _best(full, draft)
    _engine(full, draft)
    sampling = _word(full.get("train_sampling_strategy", "random"))
    if full.get("group_by_length") or sampling == "group_by_length":
        draft.set("data.group_by_length", _GROUPED, "group_by_length")
    elif sampling != "random":
        why = "every epoch has an order from the seed, and the data's own order cannot be chosen"
        draft.drop("train_sampling_strategy", sampling, why, True)
    if "report_to" in full:
        table.trackers(draft, "report_to", full["report_to"])
    if full.get("push_to_hub"):
        if full.get("hub_model_id"):
            draft.set("hub.push_to", full["hub_model_id"], "hub_model_id")
        else:
            draft.drop(
                "push_to_hub",
                True,
                "hub_model_id is not set: give hub.push_to=USER/REPO, or run lockstep push later",
            )
    if full.get("run_name"):
        draft.set("name", full["run_name"], "run_name")


def _intervals(full: Mapping[str, Any], draft: RunDraft) -> None:
    strategy = _word(full.get("eval_strategy", full.get("evaluation_strategy", "no")))
    if strategy == "epoch":
        draft.set("evaluate.every", "epoch", "eval_strategy epoch")
    elif strategy == "steps":
        name = "eval_steps" if "eval_steps" in full else "logging_steps"
        _interval(draft, "evaluate.every", full.get(name), name)
    saving = _word(full.get("save_strategy", "steps"))
    if saving == "epoch":
        draft.set("checkpoint.every", "epoch", "save_strategy epoch")
    elif saving == "no":
        draft.set("checkpoint.every", 0, "save_strategy no: at the end, and at a stop")
    elif saving == "steps":
        _interval(draft, "checkpoint.every", full.get("save_steps"), "save_steps")
    else:
        draft.drop("save_strategy", saving, "checkpoint.every counts steps, or is epoch")


def _interval(draft: RunDraft, key: str, every: Any, name: str) -> None:
    """Set an interval in steps; a share of all steps is converted once they are known. `every`: None if not set."""
    if every is None:
        draft.set(key, 500, f"{name}, by default")
    elif (count := table.number(every)) is not None and count >= 1:
        draft.set(key, int(count), f"{name} {int(count)}")
    elif count:
        draft.set(key, count, f"{name} {count} of all steps")


def _best(full: Mapping[str, Any], draft: RunDraft) -> None:
    metric = str(full.get("metric_for_best_model") or "loss").removeprefix("eval_")
    if not full.get("load_best_model_at_end"):
        if full.get("metric_for_best_model"):
            draft.drop("metric_for_best_model", metric, "without load_best_model_at_end it changes nothing")
        return
    greater = full.get("greater_is_better")
    less = not greater if greater is not None else metric.endswith("loss")
    draft.set("checkpoint.best", f"-{metric}" if less else metric, f"load_best_model_at_end by {metric}")


def _engine(full: Mapping[str, Any], draft: RunDraft) -> None:
    fsdp = full.get("fsdp")
    if fsdp and str(fsdp) not in ("[]", "", "None"):
        draft.set("strategy.name", "fsdp2", f"fsdp {fsdp}")
    if full.get("deepspeed"):
        draft.deepspeed = full["deepspeed"]
    if isinstance(accelerator := full.get("accelerator_config"), Mapping) and accelerator.get("split_batches"):
        why = "batch_size is the size of a whole step, which the processes share"
        draft.drop("accelerator_config: split_batches", True, why, True, ("batch_size",))
    if (size := full.get("ddp_bucket_cap_mb")) is not None:
        draft.set("strategy.options", {"bucket_cap_mb": size}, "ddp_bucket_cap_mb")
    if smoothing := table.number(full.get("label_smoothing_factor")):
        if draft.task in (None, *_SMOOTHED):
            draft.set("task.label_smoothing", smoothing, "label_smoothing_factor")
        else:
            why = f"{', '.join(_SMOOTHED)} support it (task.label_smoothing); {draft.task} does not"
            draft.drop("label_smoothing_factor", smoothing, why, True)
    if "predict_with_generate" in full and draft.task in ("translation", "summarization"):
        key = "task.bleu" if draft.task == "translation" else "task.rouge"
        draft.set(key, bool(full["predict_with_generate"]), "predict_with_generate")


def _word(value: Any) -> str:
    """Text of an enumeration value, in Python's or JSON's spelling."""
    return str(value).rpartition(".")[2].lower()


TRL = table.read_table("trl")  # in addition to all keys of `TrainingArguments`
# fields that only one of TRL's trainers has
MARKS = {
    "language_modeling": {f"{kind}_only_loss" for kind in ("assistant", "completion")}
    | {"packing", "dataset_text_field", "eval_packing"},
    "preference": {"beta", "precompute_ref_log_probs", "max_prompt_length", "simpo_gamma", "cpo_alpha", "ld_alpha"},
    "reward": {"center_rewards_coefficient"},
}
CONFIGS = {"SFT": "language_modeling", "DPO": "preference", "CPO": "preference", "Reward": "reward"}
# columns that TRL takes by their names: those with a key of the task, and others
_PAIRS = frozenset({"prompt", "chosen", "rejected"})
COLUMNS = {"language_modeling": frozenset({"text", "messages", "prompt"}), "preference": _PAIRS, "reward": _PAIRS}
OTHER_COLUMNS = _PAIRS | {"text", "messages", "completion", "margin", "tools", "images", "image", "label"}
OTHER_COLUMNS |= {"input_ids", "labels", "completion_mask", "assistant_masks", "chat_template_kwargs"}
_RATES = {"language_modeling": 2e-5, "preference": 1e-6, "reward": 1e-4}


def positions(trainer: str) -> tuple[str, ...]:
    """Return the names of the positional arguments of a Trainer; TRL's DPOTrainer has a second model."""
    reference = ("ref_model",) if trainer == "DPOTrainer" else ()
    return ("model", *reference, "args", "data_collator", "train_dataset", "eval_dataset")


_DPO_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "hinge": "hinge"}


def task_of(theirs: Mapping[str, Any]) -> str | None:
    """Return the task that these fields identify."""
    tasks = [task for task, marks in MARKS.items() if marks & theirs.keys()]
    return tasks[0] if len(tasks) == 1 else None


def move_trl(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None) -> None:
    """Convert fields of a TRL config. Errors: `RunError` if its trainer is unknown."""
    task = draft.task or task_of(theirs)
    if task not in _RATES:
        raise RunError(
            "LS8240",
            "--from: the settings do not name the TRL trainer they belong to; give --task language_modeling "
            "(SFT), preference (DPO) or reward" + _lacking(theirs, draft, processes),
        )
    theirs = _with_model_options(theirs, draft)
    full = {"learning_rate": _RATES[task], "gradient_checkpointing": True} | dict(theirs)
    if theirs.get("bf16") is None and not theirs.get("fp16"):
        full["bf16"] = True  # TRL's default, unlike transformers'
    draft.set("task.name", task, "TRL's trainer")
    move({k: v for k, v in full.items() if k != "dataset_text_field"}, draft, processes, TABLE | TRL)
    for name in ("learning_rate", "gradient_checkpointing", "bf16"):
        if name not in theirs and (key := TABLE[name].here) in draft.keys:
            draft.comments[key] = f"{name}, by TRL's default"
    _length(theirs, draft, task)
    if task == "language_modeling":
        _texts(theirs, draft)
    else:
        draft.at_end.append(lambda draft: _disable_dropout(draft, theirs))
    if task == "preference":
        _pairs(theirs, draft)
    table.numbers(draft, theirs, {"task.center": "center_rewards_coefficient"})
    _model(theirs, draft)
    if theirs.get("dataset_test_split") and _word(theirs.get("eval_strategy", "no")) != "no":
        draft.set("data.validation", theirs["dataset_test_split"], "dataset_test_split")


def _with_model_options(theirs: Mapping[str, Any], draft: RunDraft) -> dict[str, Any]:
    """Return the fields with those of `model_init_kwargs` among them; entries without a key are gaps."""
    fields = dict(theirs)
    if isinstance(options := fields.get("model_init_kwargs"), Mapping):
        del fields["model_init_kwargs"]
        for name, value in options.items():
            if name in ("dtype", "torch_dtype", "attn_implementation"):
                fields[name] = value
            else:
                why = "model.config has the entries of a config.json"
                draft.drop(f"model_init_kwargs: {name}", value, why, True, ("model.config", f"model.config.{name}"))
    return fields


def _lacking(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None) -> str:
    """List, by task, what would be missing next, so that it can be given at once."""
    lines: dict[str, list[str]] = {}
    for task in _RATES:
        trial = RunDraft(by_hand={**draft.by_hand, "task.name": task}, keys=dict(draft.by_hand), folder=draft.folder)
        move_trl(theirs, trial, processes)
        for check in trial.at_end:
            check(trial)
        for gap in trial.deciding():
            keys = f"; give {' or '.join(f'{key}=...' for key in gap.by)}" if gap.by else ""
            lines.setdefault(f"{gap}{keys}", []).append(task)
    of = {line: "" if len(tasks) == len(_RATES) else f"{', '.join(tasks)}: " for line, tasks in lines.items()}
    texts = [f"  {tasks}{line}" for line, tasks in of.items()]
    return "\n".join(["; also missing:", *texts]) if texts else ""


def _length(theirs: Mapping[str, Any], draft: RunDraft, task: str) -> None:
    key = "task.block_size" if task == "language_modeling" else "data.max_length"
    name = "max_length" if "max_length" in theirs else "max_seq_length"
    length = theirs.get(name, 1024)
    if length is None:
        draft.drop(name, "None", f"{key} is a number: texts are cut to it", True, (key,))
    else:
        draft.set(key, length, name if name in theirs else "max_length, by TRL's default")


def _texts(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    if theirs.get("dataset_text_field"):
        draft.set("task.text", theirs["dataset_text_field"], "dataset_text_field")
    if theirs.get("packing"):
        strategy = str(theirs.get("packing_strategy", "bfd"))
        draft.set("task.packing", True, "packing")
        draft.set("task.attend_across_documents", strategy == "wrapped", f"packing_strategy {strategy}")
        if strategy != "wrapped":
            note = f"packing: texts are concatenated and cut at block ends; TRL's {strategy} sorts them"
            cut = " and drops the rest of a text beyond max_length" if strategy == "bfd" else ""
            draft.notes.append(note + cut)
    else:
        draft.set("task.packing", False, "packing")
    if (loss := str(theirs.get("loss_type", "nll"))) not in ("nll", "chunked_nll"):
        draft.drop("loss_type", loss, "the loss of language modelling is the mean over tokens", True)
    draft.at_end.append(lambda draft: _columns(draft, theirs))


def _columns(draft: RunDraft, theirs: Mapping[str, Any]) -> None:
    """After looking at the data, set the columns, and check which of their tokens TRL learns."""
    if not any(f"task.{key}" in draft.keys for key in ("text", "prompt", "messages")):
        why = (
            "SFTTrainer takes text, messages, or prompt and completion, as the data have them: give --data or name them"
        )
        draft.unclear("the columns", why, "task.text", "task.messages", "task.prompt")
        return
    assistant, completion = (theirs.get(f"{kind}_only_loss") for kind in ("assistant", "completion"))
    if "task.messages" in draft.keys:
        if not assistant:  # TRL applies completion_only_loss only to prompts and completions
            why = (
                "of conversations, lockstep learns only the assistant's messages: give task.messages=... to accept that"
            )
            draft.drop("assistant_only_loss", "false", why, True, ("task.messages",))
        return
    if assistant:
        why = "TRL applies it only to conversations, and these are plain texts: give task.messages=COLUMN, or remove it"
        draft.drop("assistant_only_loss", "true", why, True, ("task.messages",))
    if "task.prompt" in draft.keys and completion is False:
        draft.drop("completion_only_loss", "false", "of prompts and responses, only the response is learned", True)
    elif "task.prompt" not in draft.keys and completion:
        draft.drop("completion_only_loss", "true", "plain texts have no completion: all tokens are learned, as in TRL")


def _pairs(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Set the loss of preference pairs. Errors: `RunError` for an unsupported loss."""
    kind = theirs.get("loss_type", "sigmoid")
    kind = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind
    simpo = kind == "simpo" and not table.number(theirs.get("cpo_alpha", 1.0))
    if not simpo and (str(kind) not in _DPO_LOSSES or "cpo_alpha" in theirs):
        draft.drop(
            "loss_type", kind, "task.loss is dpo (sigmoid), ipo, hinge, or simpo with cpo_alpha 0", True, ("task.loss",)
        )
    else:
        draft.set("task.loss", "simpo" if simpo else _DPO_LOSSES[str(kind)], f"loss_type {kind}")
    ours = {"task.beta": "beta", "task.label_smoothing": "label_smoothing"}
    table.numbers(draft, theirs, ours | ({"task.gamma": "simpo_gamma"} if simpo else {}))


def _model(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    dtype = str(theirs.get("dtype", theirs.get("torch_dtype", "float32")))
    set_dtype(draft, dtype, "dtype")
    if theirs.get("use_peft"):
        entries = table.adapter_entries(TRL, {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, **theirs})
        table.lora(draft, {k: v for k, v in entries.items() if v is not False}, "use_peft")
    if theirs.get("load_in_4bit"):
        nested = theirs.get("use_bnb_nested_quant")
        table.quantized(draft, theirs.get("bnb_4bit_quant_type", "nf4"), nested, "load_in_4bit")


def _disable_dropout(draft: RunDraft, theirs: Mapping[str, Any]) -> None:
    """Turn off dropout, including an adapter's, as TRL does for preference pairs."""
    if theirs.get("disable_dropout") is False:
        return
    why = "TRL switches off a model's dropout for pairs"
    if model_defaults.model_config(draft, {}) is None:
        draft.notes.append(f"{why}; lockstep uses the dropout of model.config")
    elif model_defaults.without_dropout(draft, "disable_dropout, TRL's default", why):
        adapter = draft.keys.get("model.adapter")
        if isinstance(adapter, dict) and adapter.get("lora_dropout") and not draft.is_given("model.adapter"):
            adapter["lora_dropout"] = 0.0


def set_dtype(draft: RunDraft, dtype: str, origin: str) -> None:
    """Set the dtype of stored weights, by its name in torch."""
    name = dtype.rpartition(".")[2].lower()
    if name in ("bfloat16", "bf16"):
        draft.set("model.dtype", "bfloat16", f"{origin} {name}")
        draft.notes.append("model.dtype bfloat16: a float32 copy of what is trained is updated (optim.master_weights)")
    elif name in ("float16", "fp16", "half"):
        draft.drop(
            origin, name, "model.dtype is float32 or bfloat16; precision: fp16 computes in fp16", True, ("model.dtype",)
        )
    elif name == "auto":
        draft.notes.append(
            f"{origin} auto: lockstep stores weights in float32, or in bfloat16 with an adapter (model.dtype)"
        )
