"""YAML files of axolotl and LLaMA-Factory.

In: their keys; LLaMA-Factory's include those of `TrainingArguments`. Out: keys of a run file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.config.run import RunError
from lockstep.lab.import_config import dataset_info, model_defaults, table, trainer
from lockstep.lab.import_config.table import RunDraft

_TOKENS = "lockstep uses a tokenizer as saved: save one with these tokens, and set tokenizer.source"
_ONE_DATA_SET = "init reads one data set only; add the others as data.sources"

TABLE = table.read_table("axolotl")
# dataset type -> keys of the task
TYPES = {
    "completion": {"task.text": "text"},
    "alpaca": {"task.prompt": "instruction", "task.response": "output"},
    "chat_template": {"task.messages": "messages"},
    "input_output": None,
}
_ALPACA = (
    "axolotl writes sentences around instruction and input, but lockstep reads a prompt from one column. Write that "
    "column to a file: 'Below is an instruction that describes a task[, paired with an input that provides further "
    "context]. "
    r"Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    r"[### Input:\n{input}\n\n]### Response:\n', with the parts in brackets only if input is not empty, and give "
    "data.source=FILE task.prompt=COLUMN; or set task.prompt=instruction to train without the sentences"
)
# Supported keys of an entry of `datasets`, and keys without effect on training.
_READ = (
    *("path", "name", "split", "data_files", "type", "field", "text_column", "skip", "revision", "ds_type"),
    *(f"field_{name}" for name in ("messages", "chosen", "rejected")),
)
_USUAL: dict[str, list[Any]] = {
    "message_field_role": ["role"],
    "message_field_content": ["content"],
    "message_property_mappings": [{"role": "role", "content": "content"}, {"role": "from", "content": "value"}],
    "roles_to_train": [["assistant"], ["assistant", "gpt"]],
    "train_on_eos": ["turn"],
    "chat_template": ["tokenizer_default"],
}
_WARM_UP = 0.03, 100  # axolotl's default: a share of all steps, and an upper limit in steps
_PAIRS = {"prompt": "messages", "chosen": "chosen", "rejected": "rejected"}  # axolotl's columns for preference pairs
_LOSSES = ("dpo", "ipo", "simpo")

_PRECISIONS = {"bf16", "fp16", "fp8", "bfloat16", "float16", "float32"}  # any of them decides instead of `bf16: auto`


def move(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None) -> None:
    """Convert a file whose task is language modelling or learning from preference pairs. Errors: `RunError`."""
    table.apply(TABLE, theirs, draft)
    _task(theirs, draft)
    _data(theirs, draft)
    _chatml(draft, "chat_template", theirs.get("chat_template"))
    for key, value, origin in (
        ("optim.weight_decay", 0.0, "weight_decay"),
        ("optim.schedule", "cosine", "lr_scheduler"),
        ("task.block_size", 512, "sequence_len"),
    ):
        if key not in draft.keys:
            draft.set(key, value, f"{origin}, by axolotl's default")
    if not theirs.keys() & _PRECISIONS:
        draft.set("precision", "bf16", "bf16: auto, by axolotl's default")
    table.optimizer(draft, "optimizer", theirs.get("optimizer"))
    for name, token in (theirs.get("special_tokens") or {}).items():
        draft.drop(f"special_tokens: {name}", token, _TOKENS, name != "pad_token", ("tokenizer.source",))
    each, times = table.whole(theirs.get("micro_batch_size")), table.whole(theirs.get("gradient_accumulation_steps"))
    table.batches(draft, each, times, processes, ("micro_batch_size", "gradient_accumulation_steps"))
    table.length(draft, theirs.get("num_epochs", 1), theirs.get("max_steps"), ("num_epochs", "max_steps"))
    table.schedule(draft, theirs, "warmup_steps", "warmup_ratio", theirs.get("lr_scheduler"))
    if theirs.get("warmup_steps") is None:
        _warm_up(table.number(theirs.get("warmup_ratio")), theirs.get("lr_scheduler"), draft)
    elif draft.keys.get("optim.warmup_steps") == 1:
        draft.set("optim.warmup_steps", 2, "warmup_steps 1: axolotl changes it to two")
    table.numbers(draft, theirs, {"optim.learning_rate": "learning_rate"})
    if "adam_beta1" in theirs or "adam_beta2" in theirs:
        betas = [table.number(theirs.get("adam_beta1", 0.9)), table.number(theirs.get("adam_beta2", 0.999))]
        draft.set("optim.betas", betas, "adam_beta1 and adam_beta2")
    _intervals(theirs, draft)
    _packing(theirs, draft)
    _adapter(theirs, draft)
    _tracking(theirs, draft)
    if theirs.get("fsdp") or theirs.get("fsdp_config"):
        draft.set("strategy.name", "fsdp2", "fsdp")
    if theirs.get("deepspeed"):
        draft.deepspeed = theirs["deepspeed"]


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _chatml(draft: RunDraft, name: str, value: Any) -> None:
    """Write the template that a file calls chatml, if conversations are trained on: it replaces the tokenizer's."""
    if value == "chatml" and (draft.keys.get("task.messages") or draft.keys.get("task.conversations")):
        draft.set("task.chat_template", CHATML, f"{name} chatml")
        draft.gaps[:] = [gap for gap in draft.gaps if gap.name != f"{name}: chatml"]
        if not draft.is_given("task.chat_template"):
            draft.notes.append(
                f"{name} chatml: if <|im_start|> and <|im_end|> are no special tokens of the tokenizer, it splits them "
                "into several tokens; to add them, save a tokenizer with them and give tokenizer.source"
            )


def _warm_up(ratio: float | None, kind: str | None, draft: RunDraft) -> None:
    """Set the warm-up from `warmup_ratio` or axolotl's default: a share of all steps, rounded down, and never exactly
    one step. transformers' schedule `constant` ignores it, but the optimizer schedule_free uses it."""
    share, most = _WARM_UP if ratio is None else (ratio, None)
    origin = f"warmup_ratio {ratio}"
    if ratio is None:
        origin = f"axolotl's default: {share:.0%} of all steps, at most {most}"
    own = draft.keys.get("optim.name") == "schedule_free"
    if (kind == "constant" and not own) or not share:
        return
    if kind == "constant_with_warmup" and own:
        why = "Trainer warms up twice, in the optimizer and by lr_scheduler: constant leaves it to the optimizer"
        draft.drop(origin, None, why, True, ("optim.warmup_steps", "optim.warmup_fraction"))
        return
    if (steps := draft.keys.get("steps")) is not None:
        count = int(share * steps) if most is None else min(int(share * steps), most)
        draft.set("optim.warmup_steps", 2 if count == 1 else count, origin)
        draft.keys.pop("optim.warmup_fraction", None)
        return
    draft.set("optim.warmup_fraction", share, origin)
    if draft.is_given("optim.warmup_fraction") or draft.is_given("optim.warmup_steps"):
        return
    draft.notes.append("the warm-up may be one step longer: axolotl rounds it down, optim.warmup_fraction rounds it up")
    if most is not None:
        draft.notes.append(f"axolotl's warm-up ends after {most} steps: in a longer run give optim.warmup_steps={most}")


def _task(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Set the task from `rl` and `reward_model`. Errors: `RunError` for an unsupported training method."""
    way = theirs.get("rl")
    if theirs.get("reward_model") or theirs.get("process_reward_model"):
        way = "process_reward_model" if theirs.get("process_reward_model") else "reward_model"
    if draft.task is None and way and way not in (*_LOSSES, "reward_model"):
        raise RunError(
            "LS8180",
            f"--from: {'rl: ' if theirs.get('rl') else ''}{way} has no counterpart: preference supports the "
            f"losses {', '.join(_LOSSES)} and hinge, and reward scores answers; to write the file of another "
            "task, give --task",
        )
    if way in _LOSSES:
        draft.set("task.name", "preference", f"rl {way}")
        draft.set("task.loss", way, f"rl {way}")
        nested = theirs.get("dpo") if isinstance(theirs.get("dpo"), Mapping) else {}
        beta = theirs.get("rl_beta", theirs.get("dpo_beta", (nested or {}).get("beta")))
        table.numbers(
            draft,
            {**theirs, "rl_beta": beta},
            {"task.beta": "rl_beta", "task.gamma": "simpo_gamma", "task.label_smoothing": "dpo_label_smoothing"},
        )
    elif way:
        draft.set("task.name", "reward", "reward_model")
        table.numbers(draft, theirs, {"task.center": "center_rewards_coefficient"})
    else:
        draft.set("task.name", "language_modeling", "")


def _pairs(entry: Mapping[str, Any], draft: RunDraft) -> None:
    """Set the columns of a preference dataset; `type` says how they become texts."""
    kind, fields = entry.get("type"), {}
    names = ("task.prompt", "task.chosen", "task.rejected")
    if isinstance(kind, Mapping):
        fields = {part: kind.get(f"field_{part}", part) for part in ("prompt", "chosen", "rejected")}
        if written := [name for name in ("prompt_format", "chosen_format", "rejected_format") if kind.get(name)]:
            draft.drop("datasets: type", ", ".join(written), "columns are read unchanged", True, names)
    elif str(kind).partition(".")[0] == "chat_template" or str(kind).endswith(".chat_template"):
        fields = {part: entry.get(f"field_{column}", column) for part, column in _PAIRS.items()}
        draft.set("task.conversations", True, f"datasets: type {kind}")
    else:
        draft.drop("datasets: type", kind, "name the columns: task.prompt, task.chosen, task.rejected", True, names)
    for part, column in fields.items():
        draft.set(f"task.{part}", column, "datasets: type")


def _data(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    sets = theirs.get("datasets") or []
    if theirs.get("pretraining_dataset") and not sets:
        sets = _streamed(theirs["pretraining_dataset"], draft)
    elif theirs.get("pretraining_dataset"):
        draft.lacks("pretraining_dataset", _ONE_DATA_SET, "data.source")
    if theirs.get("streaming"):
        draft.set("data.stream", True, "streaming")
    if len(sets) > 1:
        for more in sets[1:]:
            draft.drop(
                "datasets",
                more.get("path"),
                _ONE_DATA_SET,
                True,
                ("data.source",),
            )
    if sets:
        _first(sets[0], draft)
    for place, entry in enumerate(theirs.get("test_datasets") or []):
        if place:
            draft.drop("test_datasets", entry.get("path"), "data.validation names the files of one source")
        else:
            draft.set("data.validation", entry.get("path"), "test_datasets: path")
    table.share(draft, theirs, "val_set_size")


def _first(entry: Mapping[str, Any], draft: RunDraft) -> None:
    """Return the dataset to train on: the first one."""
    draft.set("data.source", entry.get("path"), "datasets: path")
    keys = {"name": "data.config", "revision": "data.revision", "split": "data.train", "data_files": "data.train"}
    for name, key in keys.items():
        if entry.get(name):
            draft.set(key, entry[name], f"datasets: {name}")
    for key, value in entry.items():
        if key not in _READ and value not in (None, False, *_USUAL.get(key, ())):
            by = ("data.source", "task.messages", "task.prompt", "task.text")
            draft.drop(f"datasets: {key}", value, "unknown key", True, by)
    if draft.task in ("preference", "reward"):
        _pairs(entry, draft)
    else:
        _texts(entry, draft)


def _streamed(value: Any, draft: RunDraft) -> list[Mapping[str, Any]]:
    """Convert entries of `pretraining_dataset` (a path, or a list) like those of `datasets`: texts, streamed during
    training."""
    draft.set("data.stream", True, "pretraining_dataset")
    entries = value if isinstance(value, list) else [value]
    entries = [{"path": each} if isinstance(each, str) else each for each in entries]
    for entry in entries:
        if entry.get("skip"):
            draft.drop("pretraining_dataset: skip", entry["skip"], "all rows are read", True, ("data.source",))
    return [{**entry, "type": "completion", "field": entry.get("text_column", "text")} for entry in entries]


def _texts(entry: Mapping[str, Any], draft: RunDraft) -> None:
    kind = entry.get("type", "completion")
    keys = TYPES.get(kind) if isinstance(kind, str) else None
    if keys is None:
        names = ("task.text", "task.prompt", "task.messages")
        why = "name the columns: task.text, task.prompt and task.response, task.messages"
        draft.drop("datasets: type", kind, why, True, names)
    if kind == "alpaca":
        draft.drop("datasets: type", kind, _ALPACA, True, ("task.prompt", "task.messages", "task.text"))
    for key, column in (keys or {}).items():
        if key == "task.messages":
            draft.notes.append(
                "difference: axolotl learns a turn up to its end token; lockstep also learns the template's text "
                "after it, such as a newline"
            )
            column = entry.get("field_messages", column)
        elif key == "task.text":
            column = entry.get("field", column)
        draft.set(key, column, f"datasets: type {kind}")


def _adapter(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    kind = theirs.get("adapter")
    if kind in ("lora", "qlora"):
        entries = table.adapter_entries(TABLE, theirs)
        if theirs.get("lora_target_linear"):
            entries["target_modules"] = entries["target_modules"] or "all-linear"
        table.lora(draft, entries, f"adapter {kind}")
        if kind == "qlora" or theirs.get("load_in_4bit"):
            nested = theirs.get("bnb_4bit_use_double_quant", True)
            table.quantized(draft, theirs.get("bnb_4bit_quant_type", "nf4"), nested, f"adapter {kind}, load_in_4bit")
    elif kind:
        draft.drop("adapter", kind, "model.adapter takes kinds that peft knows: {type: ...}", True, ("model.adapter",))
    elif theirs.get("load_in_4bit"):
        draft.drop("load_in_4bit", True, "4-bit weights need an adapter on top", True, ("model.adapter",))


def _intervals(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Set the intervals of evaluations and checkpoints: per epoch, several per epoch, or in steps (below 1: a share of
    all)."""
    for ours, count, steps, strategies in (
        ("evaluate.every", "evals_per_epoch", "eval_steps", ("eval_strategy", "evaluation_strategy")),
        ("checkpoint.every", "saves_per_epoch", "save_steps", ("save_strategy",)),
    ):
        name = next((each for each in strategies if each in theirs), strategies[0])
        strategy = str(theirs.get(name)).lower()  # YAML parses no as false
        if (times := table.whole(theirs.get(count), 0)) > 0:
            draft.set(ours, "epoch" if times == 1 else f"1/{times} epoch", f"{count} {times}")
        elif strategy in ("no", "false"):
            draft.set(ours, 0, f"{name} no")
        elif strategy == "epoch":
            draft.set(ours, "epoch", f"{name} epoch")
        elif (every := table.number(theirs.get(steps))) is not None:
            draft.set(ours, int(every) if every >= 1 else every, f"{steps} {every:g}")


def _packing(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Set packing: packed samples do not attend to each other; without sample_packing each text has its own row."""
    packed = bool(theirs.get("sample_packing"))
    if draft.task != "language_modeling":
        if packed:
            draft.drop("sample_packing", True, f"{draft.task} processes each pair separately")
        return
    if packed or "sample_packing" in theirs:
        draft.set("task.packing", packed, "sample_packing")
    elif "task.text" in draft.keys:  # lockstep packs plain texts by default
        draft.set("task.packing", False, "sample_packing, by axolotl's default")
    if packed:
        draft.set("task.attend_across_documents", False, "sample_packing")


def _tracking(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    to = ["wandb"] if theirs.get("wandb_project") else []
    to += ["tensorboard"] if theirs.get("use_tensorboard") else []
    to += ["mlflow"] if theirs.get("use_mlflow") else []
    if to:
        draft.set("track.to", to, "wandb_project, use_tensorboard, use_mlflow")
    for name in ("project", "entity"):
        if value := theirs.get(f"wandb_{name}"):
            draft.set(f"track.wandb.{name}", value, f"wandb_{name}")
    if theirs.get("wandb_name"):
        draft.set("name", theirs["wandb_name"], "wandb_name")


LLAMA_FACTORY = table.read_table("llama_factory")  # in addition to all keys of `TrainingArguments`
_STAGES = {
    "pt": ("language_modeling", {"task.text": "text"}),
    "sft": ("language_modeling", {"task.prompt": "instruction", "task.response": "output"}),
    "dpo": ("preference", {"task.prompt": "instruction", "task.chosen": "chosen", "task.rejected": "rejected"}),
    "rm": ("reward", {"task.prompt": "instruction", "task.chosen": "chosen", "task.rejected": "rejected"}),
}
_LLAMA_FACTORY_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "hinge": "hinge", "simpo": "simpo"}


def move_llama_factory(theirs: Mapping[str, Any], draft: RunDraft, processes: int | None) -> None:
    """Convert a file whose stage is language modelling (pt, sft) or learning from preference pairs (dpo, rm). Errors:
    `RunError`."""
    stage = str(theirs.get("stage", "sft"))
    loss = str(theirs.get("pref_loss", "sigmoid")) if stage == "dpo" else "sigmoid"
    if draft.task is None and (stage not in _STAGES or loss not in _LLAMA_FACTORY_LOSSES):
        way = f"stage: {stage}" if stage not in _STAGES else f"pref_loss: {loss}"
        raise RunError(
            "LS8181",
            f"--from: {way} has no counterpart: supported stages are {', '.join(_STAGES)}, and losses of dpo "
            f"{', '.join(_LLAMA_FACTORY_LOSSES)}; to convert it to another task, give --task",
        )
    task, columns = _STAGES.get(stage, ("language_modeling", {}))
    draft.set("task.name", task, f"stage {stage}")
    trainer.move({"cutoff_len": 2048, **theirs}, draft, processes, trainer.TABLE | LLAMA_FACTORY)
    if "cutoff_len" not in theirs:
        draft.comments["task.block_size"] = "cutoff_len, by LLaMA-Factory's default"
    for key, column in columns.items():
        draft.set(key, column, f"stage {stage}: LLaMA-Factory's usual column, if dataset_info.json says no other")
    template = theirs.get("template")
    if task != "language_modeling":
        draft.set("task.conversations", True, f"stage {stage}: through the tokenizer's own chat template")
        if template:
            own = "the tokenizer's own template is used; for another, write Jinja text into task.chat_template"
            draft.notes.append(f"template {template}: {own}")
    elif template not in (None, "empty") and stage != "pt":
        draft.drop("template", template, dataset_info.TEMPLATE, True, ("task.messages", "task.prompt"))
    if stage == "dpo":
        draft.set("task.loss", _LLAMA_FACTORY_LOSSES.get(loss, loss), f"pref_loss {loss}")
    ours = {"task.beta": "pref_beta", "task.gamma": "simpo_gamma", "task.label_smoothing": "dpo_label_smoothing"}
    table.numbers(draft, theirs, ours)
    if task == "language_modeling":
        neat = bool(theirs.get("neat_packing"))
        packed = neat or bool(theirs["packing"] if theirs.get("packing") is not None else stage == "pt")
        origin = "packing" if "packing" in theirs else f"packing, by default of stage {stage}"
        if neat:
            origin = "neat_packing"
        draft.set("task.packing", packed, origin)
        if neat:
            draft.set("task.attend_across_documents", False, origin)
    _data_llama_factory(theirs, draft)
    if task == "language_modeling":
        _chatml(draft, "template", template)
    _own_template(template, theirs, draft)
    _adapter_llama_factory(theirs, draft)


def _own_template(template: Any, theirs: Mapping[str, Any], draft: RunDraft) -> None:
    """Add a gap for a template that is not that of the model's family, if conversations are trained on, and a note if
    the tokenizer that LLaMA-Factory saves ends a text with another token."""
    if draft.is_given("task.chat_template") or not (
        draft.keys.get("task.messages") or draft.keys.get("task.conversations")
    ):
        return
    if template == "chatml":
        draft.notes.append(
            "template chatml: LLaMA-Factory saves the tokenizer with <|im_end|> as its end token, at which generation "
            "stops; lockstep saves it with its own: give tokenizer.source, a tokenizer with eos_token <|im_end|>"
        )
        return
    name, model = str(template or "").lower(), str(theirs.get("model_name_or_path", "")).lower()
    others = [each for each in _FAMILIES if each in model]
    if name in _GENERAL or (others and name not in ("", "none") and not any(each in name for each in others)):
        why = "it is not the template of the tokenizer, which a run uses: write Jinja text into task.chat_template"
        draft.lacks(f"template: {template}", why, "task.chat_template")


def _data_llama_factory(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    if name := theirs.get("dataset"):
        names = [each.strip() for each in str(name).split(",")]
        folder = str(theirs.get("dataset_dir", "data"))
        if (file := draft.file_named(f"{folder}/dataset_info.json")) is not None:
            dataset_info.read(file, names[0], draft)
            names[:1] = []
            for more in names:
                draft.drop(
                    "dataset",
                    more,
                    _ONE_DATA_SET,
                    True,
                    ("data.source",),
                )
            table.share(draft, theirs, "val_size")
            return
        draft.set("data.source", f"{folder}/{names[0]}.json", f"dataset {names[0]}: see its file in dataset_info.json")
        draft.notes.append(f"data.source is guessed from dataset {names[0]!r}: dataset_info.json says which file it is")
        for more in names[1:]:
            draft.drop("dataset", more, _ONE_DATA_SET, True, ("data.source",))
    table.share(draft, theirs, "val_size")


def _adapter_llama_factory(theirs: Mapping[str, Any], draft: RunDraft) -> None:
    kind = theirs.get("finetuning_type", "lora")
    if kind == "lora":
        target = theirs.get("lora_target", "all")
        entries = table.adapter_entries(LLAMA_FACTORY, {"lora_rank": 8, **theirs})
        entries["lora_alpha"] = theirs.get("lora_alpha", 2 * (theirs.get("lora_rank") or 8))
        entries["target_modules"] = "all-linear" if target == "all" else [t.strip() for t in str(target).split(",")]
        table.lora(draft, entries, "finetuning_type lora")
        if not any(theirs.get(key) for key in ("bf16", "fp16", "pure_bf16")):
            draft.at_end.append(lambda draft: model_defaults.note_saved_dtype(draft, "finetuning_type lora"))
    elif kind != "full":
        why = "all weights are trained, or those of an adapter (model.adapter)"
        draft.drop("finetuning_type", kind, why, True, ("model.adapter", "model.freeze"))
    if bits := table.whole(theirs.get("quantization_bit"), 0):
        if bits == 4:
            table.quantized(draft, theirs.get("quantization_type", "nf4"), True, "quantization_bit 4")
        else:
            draft.drop("quantization_bit", bits, table.EIGHT_BITS, True, ("model.quantization", "model.dtype"))


_GENERAL = ("default", "alpaca", "vicuna", "fewshot")  # LLaMA-Factory's templates that are of no model
_FAMILIES = (
    "qwen",
    "llama",
    "mistral",
    "gemma",
    "phi",
    "deepseek",
    "glm",
    "yi-",
    "falcon",
    "internlm",
    "baichuan",
    "smollm",
)
