"""Calls of a script that load models, adapters, 4-bit weights, tokenizers and datasets, or change rows.

In: a `Call` of transformers, peft, bitsandbytes or datasets. Out: keys of a run file, and gaps: above all, which rows
and which of their texts are trained on.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lockstep.lab.import_config import loss_means, model_defaults, script, text_columns
from lockstep.lab.import_config.mapped_function import MappedFunction
from lockstep.lab.import_config.qa_function import QaFunction
from lockstep.lab.import_config.script import (
    CUT,
    TOKENIZERS,
    Arguments,
    Call,
    Scope,
    Script,
    Unknown,
    code_of,
)
from lockstep.lab.import_config.table import EIGHT_BITS, NAMES, RunDraft, quantized
from lockstep.lab.import_config.text_blocks import block_length
from lockstep.lab.import_config.trainer import CONFIGS, set_dtype

RUNS = "its value is known only when the script runs"
SIDE = (
    "texts are padded on the right here; on the left, padding shifts the positions that a model counts: take it out of "
    "the training, if it is meant for generation"
)
TASKS: Mapping[str, str] = NAMES["model_tasks"]  # suffix of a model's class -> its task


@dataclass
class Reading:
    """A script, and the findings so far."""

    script: Script
    draft: RunDraft
    arguments: dict[str, Any] = field(default_factory=dict)  # fields of TrainingArguments or a subclass
    kind: str = "TrainingArguments"
    tokenizer: tuple[str, str] | None = None  # its name, and the line that loads it
    models: list[str] = field(default_factory=list)  # code of their names
    mapped: bool = False  # whether a tokenizing function was read
    padded: bool = False  # whether that function pads
    side_named: bool = False  # whether the script says on which side texts are padded
    padded_left: list[str] = field(default_factory=list)  # lines that pad on the left, or on an unknown side
    left_out: dict[str, str] = field(default_factory=dict)  # missing model input -> the line that shows it
    renamed: dict[str, str] = field(default_factory=dict)  # new column name -> name in the data

    def read(self, call: Call, what: str) -> None:
        self.draft.read.append(f"{call} -> {what}")

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
            self.padded_left.append(f"{self.tokenizer[1]}: its padding_side is left, as it is saved")
        for line in self.padded_left:
            draft.lacks(line, SIDE)
        if self.padded and (where := self.left_out.get("attention_mask")):
            why = "texts are padded and their attention_mask is left out, so the model attends to padding; here not"
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
        why = "it is not given token_type_ids, so both texts are of one type; here it gets those of its tokenizer"
        draft.lacks(where, why, "task.text_pair", "task.context")


def adapter(call: Call, at: Reading) -> None:
    """Read LoraConfig and other adapter configs."""
    wrapped = any(c.name in ("get_peft_model", "add_adapter") for c in at.script.calls)
    if not wrapped and not any(word.arg == "peft_config" for c in at.script.calls for word in c.node.keywords):
        at.draft.unclear(str(call), "no call uses it", decides=False)
        return
    arguments = at.script.arguments(call)
    entries = {k: v for k, v in arguments.known.items() if k not in ("task_type", "inference_mode") and v is not None}
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


def pretrained(call: Call, at: Reading) -> None:
    """Read `Class.from_pretrained(name, ...)`."""
    holder = call.origin.rpartition(".")[0]
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
        _config(call, at, arguments)
        return
    if holder.rpartition(".")[2].startswith(("Peft", "AutoPeft")):
        if at.models:  # after training: an adapter is loaded again, to be merged or tried
            at.draft.unclear(str(call), "an adapter is loaded: merged is the export here", decides=False)
        else:
            at.draft.lacks(str(call), "to continue training an adapter, merge it first", "model.source")
        return
    task = next((task for ending, task in TASKS.items() if holder.endswith(ending)), None)
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


def task_first(script: Script, draft: RunDraft) -> None:
    """Determine the task from the model's class, which decides how earlier lines are read."""
    for call in script.calls:
        holder = call.origin.rpartition(".")[0]
        task = next((task for ending, task in TASKS.items() if holder.endswith(ending)), None)
        if call.name != "from_pretrained" or task is None:
            continue
        about = ast.unparse(script.tree).lower()
        if task == "translation" and ("summar" in about or "rouge" in about):
            task = "summarization"
            draft.notes.append("the script speaks of summaries, so the task is summarization, and not translation")
        draft.set("task.name", task, f"{holder.rpartition('.')[2]}, line {call.line}")
        return


def _model(call: Call, at: Reading, arguments: Arguments, task: str | None) -> None:
    _label_names(call, at, task)
    if not {"dtype", "torch_dtype"} & (arguments.known.keys() | arguments.unknown.keys()):
        at.draft.at_end.append(lambda draft: model_defaults.note_saved_dtype(draft, str(call)))
    labels = arguments.known.pop("num_labels", None)
    if labels == 1 and task == "classification":
        at.set(call, "task.regression", True)
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


def _dtype(call: Call, at: Reading, name: str, value: Any) -> None:
    set_dtype(at.draft, str(value), name)


def _attention(call: Call, at: Reading, name: str, value: Any) -> None:
    at.set(call, "model.attention", value if name == "attn_implementation" else "flash_attention_2")


def _same_key(call: Call, at: Reading, name: str, value: Any) -> None:
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
        if isinstance(each, ast.expr) and script.kind_of(script_, each) == "rows":
            return True
        value = script_.bound(each, last=True) if isinstance(each, ast.Name) and depth < 10 else None
        if value is not None and _of_rows(script_, value, depth + 1):
            return True
    return False


def _config(call: Call, at: Reading, arguments: Arguments) -> None:
    arguments.known.pop("num_labels", None)
    entries = {k: v for k, v in arguments.known.items() if k not in ("revision", "trust_remote_code")}
    if entries:
        at.draft.set(
            "model.config", {**at.draft.keys.get("model.config", {}), **entries}, f"{call.name}, line {call.line}"
        )
    at.unknown(call, arguments, dict.fromkeys(arguments.unknown, "model.config"))


def _tokenizer(call: Call, at: Reading, arguments: Arguments, source: Any, code: str) -> None:
    at.tokenizer = at.tokenizer or (code, str(call))
    for name, value in arguments.known.items():
        if name == "model_max_length":
            at.set(call, "data.max_length", value)
        elif name == "padding_side":
            pads(at, value, f"line {call.line}: {name}={value!r}")
        elif name not in ("trust_remote_code", "revision") and value not in (None, False):
            where = f"line {call.line}: {name}={value}"
            at.draft.lacks(where, "tokenizers are used as saved", "tokenizer.source")
    arguments.known.clear()
    if (side := arguments.unknown.pop("padding_side", None)) is not None:
        pads(at, None, f"line {call.line}: padding_side={side}")
    at.unknown(call, arguments, dict.fromkeys(arguments.unknown, "tokenizer.source"))
    if source is not None:
        at.draft.set("tokenizer.source", source, f"{call.name}, line {call.line}")
    at.read(call, "tokenizer.source")


def pads(at: Reading, side: Any, where: str) -> None:
    """Record the side on which a tokenizer pads. TRL's collators ignore the tokenizer's side."""
    at.side_named = True
    if side == "right":
        return
    if any(c.name == f"{prefix}Trainer" for c in at.script.calls for prefix in CONFIGS):
        at.draft.notes.append(f"{where}: TRL's collators pad on a side of their own, whatever the tokenizer says")
    else:
        at.padded_left.append(where)


def without(why: str, *keys: str) -> Callable[[Call, Reading], None]:
    """Make a handler for calls without a counterpart. `keys`: keys of a run file that replace them."""
    return lambda call, at: at.draft.lacks(str(call), why, *keys)


_WHOLE = "save the final rows (to_json), and give that file: --data FILE"
scratch = without("a model from scratch: model.type, with model.config", "model.type")  # `from_config`
own_rows = without(_WHOLE, "data.source", "data.train")  # `Dataset.from_list` and its kin, `load_from_disk`
_several = without("write several sources by hand in data.sources", "data.source", "data.sources", "data.train")


def load(call: Call, at: Reading) -> None:
    """Read `load_dataset`."""
    arguments = at.script.arguments(call, ("path", "name"))
    path, config, split = (arguments.known.get(name) for name in ("path", "name", "split"))
    at.unknown(call, arguments, {"path": "data.source", "name": "data.config", "split": "data.train"})
    if path is None:
        if "path" not in arguments.unknown:
            at.draft.unclear(str(call), RUNS, "data.source", "data.train")
        return
    files = arguments.known.get("data_files")
    if path in NAMES["file_builders"]:
        _files(call, at, files, "data_files" in arguments.unknown)
    else:
        at.set(call, "data.source", path)
        if config is not None:
            at.set(call, "data.config", config)
        if files is not None:
            at.draft.lacks(f"line {call.line}: data_files={files}", "data.train names them", "data.train")
    if isinstance(split, str) and not split.isidentifier():
        at.draft.lacks(
            f"line {call.line}: split={split!r}", "use a whole split, or data.limit", "data.train", "data.limit"
        )
    if arguments.known.get("revision"):
        at.set(call, "data.revision", arguments.known["revision"])
    if arguments.known.get("streaming"):
        at.set(call, "data.stream", True)
    read = _reading(str(path), arguments.known, call, at)
    read += ("path", "name", "split", "data_files", "revision", "streaming", "trust_remote_code")
    for name, value in arguments.known.items():
        if name not in (*read, *NAMES["load_dataset"]) and value is not None:
            at.draft.unclear(f"line {call.line}: {name}={value}", "unknown argument")
    at.read(call, "data.source")


def _reading(builder: str, known: Mapping[str, Any], call: Call, at: Reading) -> tuple[str, ...]:
    """Set the keys that describe .csv and .json files. Returns the names of the arguments used."""
    if builder == "json" and isinstance(known.get("field"), str):
        at.set(call, "data.layout", "records")
        return ("field",)
    if builder != "csv":
        return ()
    keys = NAMES["csv"]
    quotes = {'"': "double", "'": "single", 0: "double", 3: "none"}  # 0 and 3: csv.QUOTE_MINIMAL and QUOTE_NONE
    read = []
    for name in keys.keys() & known.keys():
        value = quotes.get(known[name]) if keys[name] == "quote" else known[name]
        if value is not None:
            at.set(call, f"data.{keys[name]}", value)
            read.append(name)
    if "header" in known and known["header"] is None and "data.columns" not in at.draft.keys:
        at.draft.unclear(f"line {call.line}: header=None", "name the columns", "data.columns")
    if known.get("header") == 0 and "data.columns" not in at.draft.keys:  # same as without it
        read.append("header")
    return tuple(read)


def _files(call: Call, at: Reading, files: Any, unknown: bool) -> None:
    if isinstance(files, str | list):
        at.set(call, "data.train", files)
    elif isinstance(files, dict):
        for name, value in files.items():
            split = {"dev": "validation", "valid": "validation", "eval": "validation"}.get(name, name)
            if split in ("train", "validation", "test"):
                at.set(call, f"data.{split}", value)
            else:
                at.draft.drop(f"line {call.line}: data_files: {name}", None, "splits are train, validation and test")
    elif not unknown:
        at.draft.lacks(str(call), "name its files: --data FILE", "data.source", "data.train")


def cut(call: Call, at: Reading) -> None:
    """Read `train_test_split`."""
    arguments = at.script.arguments(call, ("test_size", "train_size"))
    share = arguments.known.get("test_size")
    at.unknown(call, arguments, {"test_size": "data.validation_fraction"})
    if isinstance(share, float) and 0 < share < 1:
        at.set(call, "data.validation_fraction", share)
        at.read(call, "data.validation_fraction")
    elif "test_size" not in arguments.unknown:
        why = "data.validation_fraction is a share of train"
        at.draft.lacks(str(call), why, "data.validation_fraction", "data.validation")


def fewer(call: Call, at: Reading) -> None:
    """Read `select`, `take` and `filter`."""
    if call.name == "filter":
        at.draft.lacks(str(call), "data.filter chooses rows by their columns", "data.filter")
    else:
        why = "data.limit is the most examples of each split"
        at.draft.lacks(str(call), why, "data.limit")


def renamed(call: Call, at: Reading) -> None:
    """Read a renamed column, such as Trainer's label."""
    names = [at.script.known(each) for each in call.node.args]
    pairs: Any = None
    if call.name == "rename_columns" and names:
        pairs = names[0]
    elif len(names) == 2:
        pairs = dict([names])
    if not isinstance(pairs, dict) or not all(isinstance(each, str) for pair in pairs.items() for each in pair):
        at.draft.unclear(str(call), RUNS)
        return
    for theirs, ours in ((str(old), str(new)) for old, new in pairs.items()):
        at.renamed[ours] = at.renamed.get(theirs, theirs)
        if ours in ("label", "labels"):
            at.set(call, "task.label", theirs)
            at.read(call, "task.label")


def columns(call: Call, at: Reading) -> None:
    """Read columns that are kept or removed."""
    arguments = at.script.arguments(call, ("type", "columns") if call.name.endswith("format") else ("column_names",))
    names = arguments.known.get("columns", arguments.known.get("column_names"))
    if not isinstance(names, list | str):
        return
    listed = [names] if isinstance(names, str) else names
    for name in ("attention_mask", "token_type_ids"):
        out = name in listed if call.name == "remove_columns" else "input_ids" in listed and name not in listed
        if out:
            at.left_out[name] = str(call)


def mapped(call: Call, at: Reading) -> None:
    """Read `map` and `set_transform`: a tokenizing function gives columns and lengths; any other changes the rows."""
    node = at.script.arguments(call, ("function",)).nodes.get("function")
    function = script.function_of(at.script, node)
    if function is None:
        at.draft.unclear(str(call), f"its effect on the rows is unknown: {_WHOLE}", "data.source", "data.train")
        return
    inside = script.calls_in(at.script, function)
    tokenising = [c for c in inside if script.kind_of(at.script, c.node.func) == "tokenizer"]
    if tokenising:
        at.mapped = True
        for one in tokenising:
            _tokens(one, function, at)
        _labels(function, at)
        MappedFunction(at.script, function, at.draft.task or "classification", partial(_changed, at)).read()
        at.read(call, f"line {tokenising[0].line}: the columns and their length")
        return
    block = block_length(at.script, function)
    if block is not None:
        at.set(call, "task.block_size", block)
        at.draft.notes.append(
            f"blocks of task.packing go through all texts, each with its tokenizer's end token behind it; those of "
            f"line {call.line} are made of a batch of rows as they are, and drop what is left over of it"
        )
        at.draft.set("task.packing", True, f"line {call.line}")
        at.read(call, "task.block_size, task.packing")
        return
    name = "a function" if isinstance(function, ast.Lambda) else function.name
    what = f"line {call.line}: {name} of {code_of(call.node)}"
    at.draft.unclear(what, f"it makes other rows: {_WHOLE}", "data.source", "data.train", "task.text", "task.prompt")


def _changed(at: Reading, node: ast.AST, why: str, *by: str) -> None:
    line = getattr(node, "lineno", 0)
    if not any(gap.name.startswith(f"line {line}:") for gap in at.draft.gaps):
        at.draft.unclear(f"line {line}: {code_of(node)}", why, *by)


def _tokens(call: Call, function: Scope, at: Reading) -> None:
    """Read a tokenizer call within a mapped function."""
    arguments = at.script.arguments(call, ("text", "text_pair"))
    task = at.draft.task or "classification"
    _length(call, arguments.known, arguments.unknown, at, task)
    if arguments.known.get("add_special_tokens", True) is not True or "add_special_tokens" in arguments.unknown:
        why = "texts get the tokenizer's default special tokens"
        at.draft.lacks(f"line {call.line}: add_special_tokens", why, "tokenizer.source")
    at.padded = at.padded or "padding" in arguments.unknown or bool(arguments.known.get("padding"))
    for name, node in arguments.nodes.items():
        if name not in NAMES["tokenizer_arguments"]:
            at.draft.lacks(f"line {call.line}: {name}={code_of(node)}", "tokens are the tokenizer's own")
    for each in ("attention_mask", "token_type_ids"):
        if arguments.known.get(f"return_{each}", True) is False:
            at.left_out[each] = f"line {call.line}: return_{each}=False"
    if task == "question_answering":
        _windows(call, arguments, QaFunction(at.script, function, partial(_changed, at)), at)
        return
    target = "text_target" in arguments.nodes or _is_target(call, function)
    if any(isinstance(each, ast.Starred) for each in call.node.args):
        names = tuple(f"task.{key}" for key in NAMES["text_keys"].get(task, ("text",)))
        at.draft.unclear(str(call), "its columns are known only when the script runs", *names)
        return
    keys = NAMES["text_keys"].get(task, ("text", "text_pair"))
    nodes = [arguments.nodes[name] for name in ("text", "text_pair") if name in arguments.nodes]
    if target:
        if "text_target" in arguments.nodes:
            _column(call, at, "target", arguments.nodes["text_target"])
        else:
            _column(call, at, "target", nodes[0] if nodes else None)
            nodes = []
    for key, node in zip(keys, nodes, strict=False):
        _column(call, at, key, node)
    if arguments.known.get("return_overflowing_tokens"):
        at.draft.lacks(f"line {call.line}: return_overflowing_tokens", "long texts are truncated at their end")


def _windows(call: Call, arguments: Arguments, function: QaFunction, at: Reading) -> None:
    """Read windows of questions and contexts."""
    for key, which in (("question", "text"), ("context", "text_pair")):
        if (column := function.texts(arguments.nodes.get(which))) is None:
            code = code_of(arguments.nodes[which]) if which in arguments.nodes else "nothing"
            why = f"the column of these texts is unknown: {_WHOLE}"
            at.draft.unclear(f"line {call.line}: {call.name}({code})", why, f"task.{key}")
        else:
            at.set(call, f"task.{key}", at.renamed.get(column, column))
    if (answers := function.answers()) is not None:
        at.set(call, "task.answers", at.renamed.get(answers, answers))
    if not function.truncates(arguments.nodes.get("truncation")):
        why = 'the context alone is cut into windows, as truncation="only_second" does'
        at.draft.lacks(f"line {call.line}: truncation", why, "data.max_length")
    if not arguments.known.get("return_overflowing_tokens"):
        why = "what does not fit a window is cut off there; here a context is read in windows, all of it"
        at.draft.lacks(str(call), why, "task.stride")
    elif "stride" in arguments.unknown:
        at.draft.unclear(f"line {call.line}: stride={arguments.unknown['stride']}", RUNS, "task.stride")
    else:
        at.set(call, "task.stride", arguments.known.get("stride") or 0)
    function.read()


def _is_target(call: Call, function: Scope) -> bool:
    """Return whether the tokens become labels: `labels = tokenizer(...)`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and node.value is call.node and isinstance(node.targets[0], ast.Name):
            return "label" in node.targets[0].id or "target" in node.targets[0].id
    return False


def _column(call: Call, at: Reading, key: str, node: ast.expr | None) -> None:
    column: text_columns.Column | None = text_columns.column_of(at.script, node)
    if column is None:
        code = code_of(node) if node is not None else "nothing"
        why = f"the column of these texts is unknown: {_WHOLE}"
        at.draft.unclear(f"line {call.line}: {call.name}({code})", why, f"task.{key}")
        return
    at.set(call, f"task.{key}", column.language or at.renamed.get(column.name, column.name))
    if column.prefix and key == "source":
        at.set(call, "task.prefix", column.prefix)
    elif column.prefix:
        at.draft.lacks(f"line {call.line}: the prefix {column.prefix!r}", _WHOLE, "data.source", "data.train")


def _length(call: Call, known: dict[str, Any], unknown: dict[str, str], at: Reading, task: str) -> None:
    language = task in ("language_modeling", "masked_language_modeling")
    if language:  # one text per row, unless a later function packs them into blocks
        at.draft.at_end.append(lambda draft: loss_means.note_end(draft, f"line {call.line}"))
        at.draft.keys.setdefault("task.packing", False)
    key = (
        "task.target_length"
        if at.draft.task in ("translation", "summarization") and "data.max_length" in at.draft.keys
        else "data.max_length"
    )
    if "max_length" in unknown:
        at.draft.unclear(
            f"line {call.line}: max_length={unknown['max_length']}", RUNS, "data.max_length", "task.block_size"
        )
    elif isinstance(known.get("max_length"), int) and (known.get("truncation") or "truncation" in unknown):
        at.set(call, key, known["max_length"])
    elif known.get("truncation") and (length := _own_length(at)) is not None:
        at.draft.set(key, length[0], length[1])
    elif known.get("truncation"):
        why = "it truncates at the length in the tokenizer's files: give data.max_length"
        at.draft.unclear(str(call), why, "data.max_length", "task.block_size")
    elif not language and "data.max_length" not in at.draft.keys:
        at.draft.lacks(str(call), "texts are not truncated: give data.max_length", "data.max_length")
    elif language:
        at.draft.at_end.append(lambda draft: _uncut(call, draft))


def _own_length(at: Reading) -> tuple[int, str] | None:
    """Return the tokenizer's length set by the script, and where; None if unknown."""
    lengths = [
        each
        for each in at.script.assignments()
        if isinstance(each.target, ast.Attribute) and each.target.attr == "model_max_length"
    ]
    value = at.script.known(lengths[0].value) if len(lengths) == 1 and lengths[0].condition is None else None
    return (value, str(lengths[0])) if isinstance(value, int) else None


def _uncut(call: Call, draft: RunDraft) -> None:
    """Add a gap for texts of a language model that are neither truncated nor packed into blocks."""
    keys = ("task.block_size", "data.max_length")
    if not any(key in draft.keys for key in keys):
        draft.lacks(str(call), "texts are not truncated: give task.block_size, at least the longest text", *keys)


def _labels(function: Scope, at: Reading) -> None:
    """Find the column of labels in assignments such as `out["labels"] = rows["star"]`."""
    for node in ast.walk(function):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if not isinstance(node, ast.Assign) or not isinstance(target, ast.Subscript):
            continue
        if at.script.known(target.slice) not in ("label", "labels"):
            continue
        task = at.draft.task
        read = [n for n in ast.walk(node.value) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)]
        names = [name for n in read if isinstance(name := at.script.known(n.slice), str) and name != "input_ids"]
        if task == "classification" and len(set(names)) == 1:
            at.draft.set("task.label", names[0], f"line {node.lineno}")
            at.draft.read.append(f"line {node.lineno}: {code_of(node)} -> task.label")
        elif task == "classification":
            at.draft.unclear(
                f"line {node.lineno}: {code_of(node)}", "the column of the labels is unknown", "task.label"
            )
        elif task == "language_modeling" and ("input_ids" not in (text := ast.unparse(node.value)) or "100" in text):
            where = f"line {node.lineno}: {code_of(node)}"
            names_ = ("task.prompt", "task.messages", "task.text")
            at.draft.unclear(where, "custom labels: the learned tokens are unknown", *names_)
    if at.draft.task == "token_classification":
        tags = [n for n in ast.walk(function) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)]
        names = [name for n in tags if isinstance(name := at.script.known(n.slice), str) and "tag" in name]
        if names:
            at.draft.set("task.tags", names[0], "the column that is read beside the words")


def of_trainer(call: Call, at: Reading) -> None:
    """Read the splits passed to a Trainer."""
    arguments = at.script.arguments(call, ("model", "args", "data_collator", "train_dataset", "eval_dataset"))
    train = script.split_of(at.script, arguments.nodes.get("train_dataset"))
    if train not in (None, "train", CUT) and str(train).isidentifier():
        at.set(call, "data.train", train)
    tested = script.split_of(at.script, arguments.nodes.get("eval_dataset"))
    if tested not in (None, CUT, "validation") and str(tested).isidentifier():
        if tested == (train or "train"):
            at.draft.drop(f"line {call.line}: eval_dataset", None, "it is the training split", False)
        elif tested != "train" or "data.validation_fraction" not in at.draft.keys:
            at.set(call, "data.validation", tested)


HANDLERS = {
    "load_dataset": load,
    "concatenate_datasets": _several,
    "interleave_datasets": _several,
    "load_from_disk": own_rows,
}
METHODS = dict.fromkeys(("select", "take", "skip", "filter", "shard"), fewer) | {
    "train_test_split": cut,
    "rename_column": renamed,
    "rename_columns": renamed,
    "set_format": columns,
    "with_format": columns,
    "select_columns": columns,
    "remove_columns": columns,
    "map": mapped,
    "set_transform": mapped,
    "with_transform": mapped,
}


def method(call: Call, at: Reading) -> None:
    """Read a method of a dataset."""
    if call.name in METHODS:
        METHODS[call.name](call, at)
    elif call.name not in NAMES["rows_methods"]:
        at.draft.unclear(str(call), "its effect on the rows is unknown", "data.source", "data.train")
