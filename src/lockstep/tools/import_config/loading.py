"""What a script loads: models, adapters, weights in 4 bits, tokenizers.

In: a `Call` of transformers', peft's or bitsandbytes'. Out: keys of a run file, and gaps.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from lockstep.tools.import_config import things
from lockstep.tools.import_config.script import Arguments, Call, Script, shown
from lockstep.tools.import_config.table import EIGHT_BITS, Imported, quantized
from lockstep.tools.import_config.trl import set_dtype

RUNS = "its value is known when the script runs"
TASKS = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token_classification",
    "ForSeq2SeqLM": "translation",
    "ForConditionalGeneration": "translation",
    "ForCausalLM": "language_modeling",
    "LMHeadModel": "language_modeling",
    "ForMaskedLM": "masked_language_modeling",
    "ForQuestionAnswering": "question_answering",
}
# What `from_pretrained` is given that changes nothing, or is read elsewhere.
_LOADING = {
    *("device_map", "cache_dir", "token", "use_auth_token", "low_cpu_mem_usage", "use_cache"),
    *("ignore_mismatched_sizes", "local_files_only", "use_safetensors", "max_memory", "offload_folder", "id2label"),
    *("label2id", "config", "quantization_config", "num_labels", "force_download", "finetuning_task"),
    *("use_fast", "padding_side", "pad_token", "return_dict", "subfolder", "from_tf"),
    *("resume_download",),
}


@dataclass
class Reading:
    """A script, and what has been read of it."""

    script: Script
    moved: Imported
    arguments: dict[str, Any] = field(default_factory=dict)  # fields of TrainingArguments and its kin
    kind: str = "TrainingArguments"
    tokenizer: tuple[str, str] | None = None  # its name and where it is loaded
    models: list[str] = field(default_factory=list)  # the code of their names
    mapped: bool = False  # whether a function that tokenises was read

    def read(self, call: Call, what: str) -> None:
        self.moved.read.append(f"{call} -> {what}")

    def set(self, call: Call, key: str, value: Any) -> None:
        """A key of the run file; another call must not say otherwise."""
        if key in self.moved.keys and self.moved.keys[key] != value:
            self.moved.unclear(str(call), f"{key} is {self.moved.keys[key]} by an earlier line", by=(key,))
            return
        self.moved.set(key, value, f"{call.name}, line {call.line}")

    def unknown(self, call: Call, given: Arguments, keys: dict[str, str] | None = None) -> None:
        """Arguments whose values are not known."""
        for name, code in given.unknown.items():
            key = (keys or {}).get(name)
            self.moved.unclear(f"line {call.line}: {call.name}({name}={code})", RUNS, by=(key,) if key else ())
        for code in given.more:
            self.moved.unclear(f"line {call.line}: {call.name}({code})", "what it holds is known when the script runs")


def adapter(call: Call, at: Reading) -> None:
    """LoraConfig and its kin."""
    used = [c for c in at.script.calls if c.name in ("get_peft_model", "add_adapter")]
    used += [c for c in at.script.calls for word in c.node.keywords if word.arg == "peft_config"]
    if not used:
        at.moved.unclear(str(call), "no call uses it", decides=False)
        return
    given = at.script.arguments(call)
    kind = call.name.removesuffix("Config").lower()
    entries = {k: v for k, v in given.known.items() if k not in ("task_type", "inference_mode") and v is not None}
    given.unknown.pop("task_type", None)
    at.unknown(call, given, dict.fromkeys(given.unknown, "model.adapter"))
    at.set(call, "model.adapter", {"type": kind, **entries})
    at.read(call, "model.adapter")


def bits(call: Call, at: Reading) -> None:
    """BitsAndBytesConfig."""
    given = at.script.arguments(call, ("load_in_8bit", "load_in_4bit"))
    compute = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
    given.unknown = {name: code for name, code in given.unknown.items() if name not in compute}
    at.unknown(call, given, dict.fromkeys(given.unknown, "model.quantization"))
    if given.known.get("load_in_8bit"):
        at.moved.drop(str(call), None, EIGHT_BITS, True, ("model.quantization", "model.dtype"))
    elif given.known.get("load_in_4bit"):
        kind = given.known.get("bnb_4bit_quant_type", "fp4")
        quantized(at.moved, kind, given.known.get("bnb_4bit_use_double_quant"), f"{call.name}, line {call.line}")
        at.read(call, f"model.quantization: {kind}")


def pretrained(call: Call, at: Reading) -> None:
    """`Class.from_pretrained(name, ...)`."""
    holder = call.origin.rpartition(".")[0]
    given = at.script.arguments(call, ("pretrained_model_name_or_path",))
    for name in ("model_name", "model_name_or_path"):
        for part in (given.known, given.unknown):
            if name in part:
                part["pretrained_model_name_or_path"] = part.pop(name)
    source = given.known.pop("pretrained_model_name_or_path", None)
    unknown = given.unknown.pop("pretrained_model_name_or_path", None)
    if source is None and unknown is None:  # an option that the command line gives
        unknown = shown(call.node.args[0]) if call.node.args else "the model's name"
    code = unknown or str(source)
    given.known = {k: v for k, v in given.known.items() if k not in _LOADING or k == "num_labels"}
    given.unknown = {k: v for k, v in given.unknown.items() if k not in _LOADING}
    if holder.endswith(things.TOKENIZERS):
        _tokenizer(call, at, given, source, code)
        return
    if holder.endswith(("Config", "GenerationConfig")):
        _config(call, at, given)
        return
    if holder.rpartition(".")[2].startswith(("Peft", "AutoPeft")):
        if at.models:  # after training: an adapter is read back, to be merged or tried
            at.moved.unclear(str(call), "an adapter is loaded: merged is the export here", decides=False)
        else:
            at.moved.drop(str(call), None, "to go on with an adapter, merge it first", True, ("model.source",))
        return
    task = next((task for ending, task in TASKS.items() if holder.endswith(ending)), None)
    if task is None:
        at.moved.unclear(str(call), "which task a model of this class has", by=("task.name",))
    if code in at.models:
        return  # once more: a reference, or a model for inference
    at.models.append(code)
    if unknown is not None:
        at.moved.unclear(
            f"line {call.line}: {unknown}", "the model's name is known when the script runs", by=("model.source",)
        )
    else:
        at.set(call, "model.source", source)
    _model(call, at, given, task)
    at.read(call, f"model.source{f', task.name: {task}' if task else ''}")


def task_first(script: Script, moved: Imported) -> None:
    """The task by the model's class, which decides how what stands before it is read."""
    for call in script.calls:
        holder = call.origin.rpartition(".")[0]
        task = next((task for ending, task in TASKS.items() if holder.endswith(ending)), None)
        if call.name != "from_pretrained" or task is None:
            continue
        about = ast.unparse(script.tree).lower()
        if task == "translation" and ("summar" in about or "rouge" in about):
            task = "summarization"
            moved.notes.append("the script speaks of summaries, so the task is summarization, and not translation")
        moved.set("task.name", task, f"{holder.rpartition('.')[2]}, line {call.line}")
        return


def _model(call: Call, at: Reading, given: Arguments, task: str | None) -> None:
    labels = given.known.pop("num_labels", None)
    if labels == 1 and task == "classification":
        at.set(call, "task.regression", True)
    for name, value in given.known.items():
        if name in ("torch_dtype", "dtype"):
            if value is not None:
                set_dtype(at.moved, str(value), name)
        elif name in ("revision", "trust_remote_code"):
            at.set(call, f"model.{name}", value)
        elif name == "attn_implementation":
            if value is not None:
                at.set(call, "model.attention", value)
        elif name == "use_flash_attention_2":
            if value:
                at.set(call, "model.attention", "flash_attention_2")
        elif name == "problem_type":
            _problem(call, at, value)
        elif name == "load_in_4bit" and value:
            quantized(at.moved, "fp4", False, f"load_in_4bit, line {call.line}")
        elif name == "load_in_8bit" and value:
            at.moved.drop(
                f"line {call.line}: load_in_8bit", None, EIGHT_BITS, True, ("model.quantization", "model.dtype")
            )
        elif name not in ("load_in_4bit", "load_in_8bit"):
            entries = {**at.moved.keys.get("model.config", {}), name: value}
            at.moved.set("model.config", entries, f"{call.name}, line {call.line}")
    at.unknown(
        call, given, {"torch_dtype": "model.dtype", "dtype": "model.dtype", "attn_implementation": "model.attention"}
    )


def _problem(call: Call, at: Reading, kind: Any) -> None:
    if kind == "multi_label_classification":
        at.set(call, "task.multi_label", True)
    elif kind == "regression":
        at.set(call, "task.regression", True)


def _config(call: Call, at: Reading, given: Arguments) -> None:
    given.known.pop("num_labels", None)
    entries = {k: v for k, v in given.known.items() if k not in ("revision", "trust_remote_code")}
    if entries:
        at.moved.set(
            "model.config", {**at.moved.keys.get("model.config", {}), **entries}, f"{call.name}, line {call.line}"
        )
    at.unknown(call, given, dict.fromkeys(given.unknown, "model.config"))


def _tokenizer(call: Call, at: Reading, given: Arguments, source: Any, code: str) -> None:
    at.tokenizer = at.tokenizer or (code, str(call))
    for name, value in given.known.items():
        if name == "model_max_length":
            at.set(call, "data.max_length", value)
        elif name not in ("trust_remote_code", "revision") and value not in (None, False):
            where = f"line {call.line}: {name}={value}"
            at.moved.drop(where, None, "a tokenizer is used as it is saved", True, ("tokenizer.source",))
    given.known.clear()
    at.unknown(call, given, dict.fromkeys(given.unknown, "tokenizer.source"))
    if source is not None:
        at.moved.set("tokenizer.source", source, f"{call.name}, line {call.line}")
    at.read(call, "tokenizer.source")


def scratch(call: Call, at: Reading) -> None:
    """`from_config`: a model that begins at random."""
    at.moved.drop(str(call), None, "a model from scratch: model.type, with model.config", True, ("model.type",))
