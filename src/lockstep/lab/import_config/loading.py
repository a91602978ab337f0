"""Calls of a script that load models, adapters, 4-bit weights and tokenizers.

In: a `Call` of transformers, peft or bitsandbytes. Out: keys of a run file, and gaps. `dataset_calls.py` has the rows.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.lab.import_config import kinds, model_defaults
from lockstep.lab.import_config.kinds import TOKENIZERS
from lockstep.lab.import_config.script import Arguments, Call, Script, Unknown, code_of
from lockstep.lab.import_config.table import EIGHT_BITS, NAMES, RunDraft, quantized
from lockstep.lab.import_config.trainer import CONFIGS, set_dtype

RUNS = "its value is known only when the script runs"
SIDE = (
    "lockstep pads texts on the right; padding on the left shifts a model's positions: remove it from training if "
    "it is meant for generation"
)
IMAGES = {"ForImageClassification": "image_classification"}  # read with a Trainer only
TASKS: Mapping[str, str] = NAMES["model_tasks"]  # suffix of a model's class -> its task


@dataclass
class Reading:
    """A script, and the findings so far."""

    script: Script
    draft: RunDraft
    arguments: dict[str, Any] = field(default_factory=dict)  # fields of TrainingArguments or a subclass
    kind: str = "TrainingArguments"
    tokenizer: tuple[str, str] | None = None  # its name, and the line that loads it
    models: list[str] = field(default_factory=list)  # source code of their names
    mapped: bool = False  # whether a tokenizing function was read
    padded: bool = False  # whether that function pads
    side_named: bool = False  # whether the script says on which side texts are padded
    padded_left: list[str] = field(default_factory=list)  # lines that pad on the left, or on an unknown side
    left_out: dict[str, str] = field(default_factory=dict)  # missing model input -> the line that shows it
    renamed: dict[str, str] = field(default_factory=dict)  # new column name -> name in the data

    def read(self, call: Call, what: str) -> None:
        if (line := f"{call} -> {what}") not in self.draft.read:
            self.draft.read.append(line)

    def set(self, call: Call, key: str, value: Any) -> None:
        """Set a key of the run file; a call that sets another value is a gap."""
        if key in self.draft.keys and self.draft.keys[key] != value:
            self.draft.unclear(str(call), f"{key} is {self.draft.keys[key]} by an earlier line", key)
            return
        self.draft.set(key, value, f"{call.name}, line {call.line}")

    def check_inputs(self, draft: RunDraft) -> None:
        """Once the data are known, add a gap for each model input that the script leaves out."""
        if draft.keys.get("task.packing"):  # packed blocks have no padding
            return
        if not self.side_named and self.tokenizer is not None and model_defaults.pads_left(draft):
            self.padded_left.append(f"{self.tokenizer[1]}: its saved padding_side is left")
        for line in self.padded_left:
            draft.lacks(line, SIDE)
        if self.padded and (where := self.left_out.get("attention_mask")):
            why = (
                "the script pads texts without passing attention_mask, so its model attends to padding; in "
                "lockstep it does not"
            )
            draft.lacks(where, why)
        if where := self.left_out.get("token_type_ids"):
            untyped(draft, where)

    def unknown(self, call: Call, arguments: Arguments, keys: dict[str, str] | None = None) -> None:
        """Record arguments whose values are unknown."""
        for name, code in arguments.unknown.items():
            key = (keys or {}).get(name)
            self.draft.unclear(f"line {call.line}: {call.name}({name}={code})", RUNS, *((key,) if key else ()))
        for code in arguments.more:
            self.draft.unclear(f"line {call.line}: {call.name}({code})", RUNS)


def untyped(draft: RunDraft, where: str) -> None:
    """Add a gap if a model gets text pairs without token_type_ids that its tokenizer may produce."""
    pair = "task.text_pair" in draft.keys or draft.task == "question_answering"
    source = str(draft.keys.get("model.source", "")).lower()
    if pair and not any(kind in source for kind in NAMES["without_token_types"]):
        why = "the model is not given token_type_ids, so both texts have one type; lockstep passes the tokenizer's"
        draft.lacks(where, why, "task.text_pair", "task.context")


def adapter(call: Call, at: Reading) -> None:
    """Read LoraConfig and other adapter configs."""
    wrapped = any(c.name in ("get_peft_model", "add_adapter") for c in at.script.calls)
    if not wrapped and not any(word.arg == "peft_config" for c in at.script.calls for word in c.node.keywords):
        at.draft.unclear(str(call), "no call uses it", decides=False)
        return
    arguments = at.script.arguments(call)
    entries = {k: v for k, v in arguments.known.items() if k not in ("task_type", "inference_mode") and v is not None}
    if arguments.known.get("inference_mode") or "inference_mode" in arguments.unknown:
        at.draft.lacks(f"line {call.line}: inference_mode", "an adapter in it is not trained", "model.adapter")
    typed = arguments.unknown.pop("task_type", None) or arguments.known.get("task_type")
    headed = any("Classification.from_" in c.origin or "Answering.from_" in c.origin for c in at.script.calls)
    if headed and not typed and "modules_to_save" not in {**arguments.known, **arguments.unknown}:
        at.draft.lacks(str(call), "without task_type, peft freezes a new head; lockstep trains it", "model.adapter")
    at.unknown(call, arguments, dict.fromkeys(arguments.unknown, "model.adapter"))
    at.set(call, "model.adapter", {"type": call.name.removesuffix("Config").lower(), **entries})
    at.read(call, "model.adapter")


def bits(call: Call, at: Reading) -> None:
    """Read BitsAndBytesConfig."""
    arguments = at.script.arguments(call, ("load_in_8bit", "load_in_4bit"))
    compute = ("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
    arguments.unknown = {name: code for name, code in arguments.unknown.items() if name not in compute}
    at.unknown(call, arguments, dict.fromkeys(arguments.unknown, "model.quantization"))
    if arguments.known.get("load_in_8bit"):
        at.draft.lacks(str(call), EIGHT_BITS, "model.quantization", "model.dtype")
    elif arguments.known.get("load_in_4bit"):
        kind = arguments.known.get("bnb_4bit_quant_type", "fp4")
        quantized(at.draft, kind, arguments.known.get("bnb_4bit_use_double_quant"), f"{call.name}, line {call.line}")
        at.read(call, f"model.quantization: {kind}")
        if compute[0] not in {word.arg for word in call.node.keywords} or compute[0] in arguments.known:
            computed = arguments.known.get(compute[0]) or "float32"
            at.draft.at_end.append(lambda draft: _computes_in(draft, f"line {call.line}: {compute[0]}", str(computed)))


def _computes_in(draft: RunDraft, where: str, theirs: str) -> None:
    """Note that 4-bit layers compute in another dtype than in a run: that of precision."""
    ours = {"bf16": "bfloat16", "fp16": "float16"}.get(str(draft.keys.get("precision")), "float32")
    if theirs != ours:
        draft.notes.append(f"{where}: 4-bit layers compute in {theirs} there, in lockstep in {ours}, by precision")


def pretrained(call: Call, at: Reading) -> None:
    """Read `Class.from_pretrained(name, ...)`."""
    holder = call.origin.rpartition(".")[0]
    if holder in at.script.classes and holder.endswith((*TOKENIZERS, "Config")):
        at.draft.unclear(str(call), "what the script's own class makes is unknown", "tokenizer.source", "model.source")
        return
    arguments = at.script.arguments(call, ("pretrained_model_name_or_path",))
    names = ("model_name_or_path", "model_name", "pretrained_model_name_or_path")
    source, unknown = (
        next((value for value in [part.pop(name, None) for name in names] if value is not None), None)
        for part in (arguments.known, arguments.unknown)
    )
    if source is None and unknown is None:  # an option from the command line
        unknown = code_of(call.node.args[0]) if call.node.args else "the model's name"
    code = unknown or str(source)
    arguments.known = {
        k: v for k, v in arguments.known.items() if k not in NAMES["from_pretrained"] or k == "num_labels"
    }
    arguments.unknown = {k: v for k, v in arguments.unknown.items() if k not in NAMES["from_pretrained"]}
    if holder.endswith(TOKENIZERS):
        _tokenizer(call, at, arguments, source, code)
        return
    if holder.endswith(("Config", "GenerationConfig")):
        _config(call, at, arguments, source)
        return
    if holder.rpartition(".")[2].startswith(("Peft", "AutoPeft")):
        later = not arguments.known.get("is_trainable") and not _precedes_training(call, at)
        if at.models and later:  # an adapter is loaded again, to be merged or tried
            at.draft.unclear(str(call), "an adapter is loaded: merged is the export here", decides=False)
        else:
            at.draft.lacks(str(call), "to continue training an adapter, merge it first", "model.source")
        return
    task = next((task for ending, task in {**TASKS, **IMAGES}.items() if holder.endswith(ending)), None)
    if holder in at.script.classes:
        at.draft.unclear(str(call), "the script's own model class computes something else", "task.name")
    elif task is None:
        at.draft.unclear(str(call), "which task a model of this class has", "task.name")
    if code in at.models:
        return  # a second load: a reference model, or one for inference
    at.models.append(code)
    if unknown is not None:
        at.draft.unclear(f"line {call.line}: {unknown}", RUNS, "model.source")
    else:
        at.set(call, "model.source", source)
    _model(call, at, arguments, task)
    at.read(call, f"model.source{f', task.name: {task}' if task else ''}")


def _precedes_training(call: Call, at: Reading) -> bool:
    """Return whether a call stands before the one that trains, in the same function."""
    order, trains = at.script.order, _trains_beside(call, at)
    return bool(trains) and all(order[id(call.node)] < order[id(node)] for node in trains)


def follows_training(call: Call, at: Reading) -> bool:
    """Return whether a call stands after the one that trains, in the same function, and in no loop."""
    order, trains = at.script.order, _trains_beside(call, at)
    loops = [each for each in ast.walk(at.script.tree) if isinstance(each, ast.For | ast.While)]
    repeated = any(call.node is inner for each in loops for inner in ast.walk(each))
    return bool(trains) and not repeated and all(order[id(call.node)] > order[id(node)] for node in trains)


def refuse_saved_cast(call: Call, at: Reading) -> None:
    """Record a cast of the trained model before it is saved."""
    order, saves = at.script.order, ("save_model", "save_pretrained", "push_to_hub")
    later = [c for c in at.script.calls if c.name in saves and order[id(c.node)] > order[id(call.node)]]
    if later and call.name in ("half", "bfloat16", "double"):
        at.draft.lacks(str(call), "an export has the dtype of the weights, which model.dtype sets", "model.dtype")


def _trains_beside(call: Call, at: Reading) -> list[ast.Call]:
    """Return the calls that train, in the same function as a call."""
    scopes = at.script.scopes
    trains = [c.node for c in at.script.calls if c.name in ("train", "fit", "backward") and c.receiver is not None]
    trains = [node for node in trains if kinds.kind_of(at.script, node.func.value) != "model"]  # type: ignore[attr-defined]
    return [node for node in trains if scopes.get(id(node)) is scopes.get(id(call.node))]


def task_first(script: Script, draft: RunDraft) -> None:
    """Determine the task from the model's class, which decides how earlier lines are read."""
    for call in script.calls:
        holder = call.origin.rpartition(".")[0]
        task = next((task for ending, task in {**TASKS, **IMAGES}.items() if holder.endswith(ending)), None)
        if call.name != "from_pretrained" or task is None:
            continue
        about = ast.unparse(script.tree).lower()
        if task == "translation" and ("summar" in about or "rouge" in about):
            task = "summarization"
            draft.notes.append("the script mentions summaries, so the task is summarization, not translation")
        draft.set("task.name", task, f"{holder.rpartition('.')[2]}, line {call.line}")
        return


def _model(call: Call, at: Reading, arguments: Arguments, task: str | None) -> None:
    _label_names(call, at, task)
    _objects(call, at)
    if not {"dtype", "torch_dtype"} & (arguments.known.keys() | arguments.unknown.keys()):
        at.draft.at_end.append(lambda draft: model_defaults.note_saved_dtype(draft, str(call)))
    labels = arguments.known.pop("num_labels", None)
    rewards = any(c.name in ("RewardTrainer", "RewardConfig") for c in at.script.calls)
    if labels == 1 and task == "classification" and not rewards:
        at.set(call, "task.regression", True)
    elif (
        isinstance(labels, int) and not (rewards and labels == 1) and task in ("classification", "token_classification")
    ):
        why = f"line {call.line}: num_labels={labels} is left out: the data's labels determine the number of outputs"
        at.draft.notes.append(why)
    for name, value in arguments.known.items():
        if name in _OF_MODEL:
            if value is not None and value is not False:
                _OF_MODEL[name](call, at, name, value)
        else:
            entries = {**at.draft.keys.get("model.config", {}), name: value}
            at.draft.set("model.config", entries, f"{call.name}, line {call.line}")
    at.unknown(
        call,
        arguments,
        {"torch_dtype": "model.dtype", "dtype": "model.dtype", "attn_implementation": "model.attention"},
    )


def _objects(call: Call, at: Reading) -> None:
    """Check what a model is loaded with: a config, or a quantization, that the script makes by a call that is read."""
    for name, node in at.script.arguments(call).nodes.items():
        value = at.script.bound(node, last=True) if isinstance(node, ast.Name) else node
        while isinstance(value, ast.IfExp):  # bnb if args.four_bits else None
            value = value.orelse if at.script.known(value.body, 0) is None else value.body
        if name not in ("config", "quantization_config") or at.script.known(node, 0) is None:
            continue
        maker = at.script.origin_of(value.func) if isinstance(value, ast.Call) else ""
        maker = maker.removesuffix(".from_pretrained")
        if not maker.endswith("Config") and maker.rpartition(".")[2] != "get_quantization_config":
            key = "model.config" if name == "config" else "model.quantization"
            at.draft.unclear(f"line {call.line}: {name}={code_of(node)}", "the line that creates it was not found", key)


def _dtype(call: Call, at: Reading, name: str, value: Any) -> None:
    set_dtype(at.draft, str(value), name)


def _attention(call: Call, at: Reading, name: str, value: Any) -> None:
    at.set(call, "model.attention", value if name == "attn_implementation" else "flash_attention_2")


def _same_key(call: Call, at: Reading, name: str, value: Any) -> None:
    if (name, value) != ("revision", "main"):  # the default
        at.set(call, f"model.{name}", value)


def _problem_type(call: Call, at: Reading, name: str, value: Any) -> None:
    key = {"multi_label_classification": "task.multi_label", "regression": "task.regression"}.get(value)
    if key is not None:
        at.set(call, key, True)


def _subfolder(call: Call, at: Reading, name: str, value: Any) -> None:
    if value:
        at.draft.lacks(f"line {call.line}: subfolder={value}", "a model is a folder of its own", "model.source")


def _few_bits(call: Call, at: Reading, name: str, value: Any) -> None:
    if value and name == "load_in_4bit":
        quantized(at.draft, "fp4", False, f"load_in_4bit, line {call.line}")
    elif value:
        at.draft.lacks(f"line {call.line}: load_in_8bit", EIGHT_BITS, "model.quantization", "model.dtype")


# Readers of arguments of a model's `from_pretrained`; all others are entries of its config.
_OF_MODEL: dict[str, Callable[[Call, Reading, str, Any], None]] = {
    "torch_dtype": _dtype,
    "dtype": _dtype,
    "revision": _same_key,
    "trust_remote_code": _same_key,
    "attn_implementation": _attention,
    "use_flash_attention_2": _attention,
    "problem_type": _problem_type,
    "subfolder": _subfolder,
    "load_in_4bit": _few_bits,
    "load_in_8bit": _few_bits,
}


def _label_names(call: Call, at: Reading, task: str | None) -> None:
    nodes = at.script.arguments(call, ("pretrained_model_name_or_path",)).nodes
    for name in ("id2label", "label2id"):
        if (node := nodes.get(name)) is not None:
            named_labels(at, name, node, f"line {call.line}: {call.name}({name}={code_of(node)})", task)
            return


def named_labels(at: Reading, name: str, node: ast.expr, where: str, task: str | None) -> None:
    """Read `id2label` or `label2id`, the names of integer labels. Names computed from the rows are those of the data.
    Other unknown names are a gap, because a model is exported with them."""
    value = at.script.known(node, Unknown)
    if value is None or _of_rows(at.script, node):
        return
    pairs = value.items() if isinstance(value, dict) else ()
    numbers = {str(number): label for number, label in (pairs if name == "id2label" else ((b, a) for a, b in pairs))}
    ordered = [numbers.get(str(place)) for place in range(len(numbers))]
    if task == "classification" and ordered and all(isinstance(each, str) for each in ordered):
        at.draft.set("task.label_names", ordered, where.partition(": ")[2])
        return
    decides = task == "classification"  # for tags, the data have names and order; there is no key
    at.draft.unclear(where, "labels have the data's names and order", "task.label_names", decides=decides)


def _of_rows(script_: Script, node: ast.expr, depth: int = 0) -> bool:
    """Return whether an expression is computed from rows, for example from the names of their features."""
    for each in ast.walk(node):
        if isinstance(each, ast.expr) and kinds.kind_of(script_, each) == "rows":
            return True
        value = script_.bound(each, last=True) if isinstance(each, ast.Name) and depth < 10 else None
        if value is not None and _of_rows(script_, value, depth + 1):
            return True
    return False


def _config(call: Call, at: Reading, arguments: Arguments, source: Any) -> None:
    if call.origin.rpartition(".")[0].endswith("GenerationConfig"):
        return
    if isinstance(source, str):
        at.draft.at_end.append(lambda draft: _same_config(draft, str(call), source))
    arguments.known.pop("num_labels", None)
    entries = {k: v for k, v in arguments.known.items() if k not in ("revision", "trust_remote_code")}
    if entries:
        at.draft.set(
            "model.config", {**at.draft.keys.get("model.config", {}), **entries}, f"{call.name}, line {call.line}"
        )
    at.unknown(call, arguments, dict.fromkeys(arguments.unknown, "model.config"))


def _same_config(draft: RunDraft, where: str, source: str) -> None:
    """Add a gap for the config of another model than the one that is loaded."""
    if source != draft.keys.get("model.source", source) and not draft.is_given("model.source"):
        draft.lacks(where, "a model is loaded with its own config: model.config has single entries", "model.config")


def _tokenizer(call: Call, at: Reading, arguments: Arguments, source: Any, code: str) -> None:
    at.tokenizer = at.tokenizer or (code, str(call))
    for name, value in arguments.known.items():
        if name == "model_max_length":
            at.set(call, "data.max_length", value)
        elif name == "padding_side":
            pads(at, value, f"line {call.line}: {name}={value!r}")
        elif name == "revision":
            at.draft.at_end.append(partial(_same_revision, f"line {call.line}: {name}={value}", value))
        elif (name, value) not in _AS_SAVED and name not in _NO_TOKEN and value is not None:
            where = f"line {call.line}: {name}={value}"
            at.draft.lacks(where, "tokenizers are used as saved", "tokenizer.source")
    arguments.known.clear()
    if (side := arguments.unknown.pop("padding_side", None)) is not None:
        pads(at, None, f"line {call.line}: padding_side={side}")
    at.unknown(call, arguments, dict.fromkeys(arguments.unknown, "tokenizer.source"))
    earlier = at.draft.keys.get("tokenizer.source", source)
    if source is not None and earlier != source and not at.draft.is_given("tokenizer.source"):
        why = f"tokenizer.source is {earlier} by an earlier line"
        at.draft.unclear(str(call), why, "tokenizer.source", decides=_precedes_training(call, at))
        return
    if source is not None:
        at.draft.set("tokenizer.source", source, f"{call.name}, line {call.line}")
    at.read(call, "tokenizer.source")


_NO_TOKEN = ("trust_remote_code", "return_tensors")  # change no token
_AS_SAVED = (
    ("truncation_side", "right"),
    ("clean_up_tokenization_spaces", False),
    ("clean_up_tokenization_spaces", True),
)


def _same_revision(where: str, value: Any, draft: RunDraft) -> None:
    """Add a gap if a tokenizer is of another revision than the model, whose revision a run reads."""
    if value is not None and value != draft.keys.get("model.revision", "main"):
        draft.lacks(where, "the tokenizer is read at the revision of the model", "tokenizer.source", "model.revision")


def pads(at: Reading, side: Any, where: str) -> None:
    """Record the side on which a tokenizer pads. TRL's collators ignore the tokenizer's side."""
    at.side_named = True
    if side == "right":
        return
    if any(c.name == f"{prefix}Trainer" for c in at.script.calls for prefix in CONFIGS):
        at.draft.notes.append(f"{where}: TRL's collators choose the padding side themselves, ignoring the tokenizer's")
    else:
        at.padded_left.append(where)


def without(why: str, *keys: str) -> Callable[[Call, Reading], None]:
    """Make a handler for calls without a counterpart. `keys`: keys of a run file that replace them."""
    return lambda call, at: at.draft.lacks(str(call), why, *keys)


scratch = without("a model from scratch: model.type, with model.config", "model.type")  # handler of `from_config`
