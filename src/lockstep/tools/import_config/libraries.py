"""The calls of transformers, peft, bitsandbytes and TRL in a script that decide what is trained.

In: a `Call`. Out: keys of a run file, fields of `TrainingArguments`, and gaps. `rows.py` has the calls of data sets.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from lockstep.tools.import_config import loading, things, trainer, trl
from lockstep.tools.import_config.loading import RUNS, Reading
from lockstep.tools.import_config.script import Call, Script, shown
from lockstep.tools.import_config.table import decides

_NO_ROLE: tuple[str, ...] = (
    "set_seed",
    "login",
    "pipeline",
    "TextStreamer",
    "GenerationConfig",
    "notebook_login",
    "default_data_collator",
)
_NO_ROLE += ("TaskType", "DataCollatorWithPadding", "DataCollatorForTokenClassification", "DataCollatorForSeq2Seq")
_NO_ROLE += ("get_last_checkpoint", "check_min_version", "require_version", "EvalPrediction", "ProgressCallback")
_NO_ROLE += (
    "prepare_model_for_kbit_training",
    "get_peft_model",
    "get_kbit_device_map",
    "get_quantization_config",
    "HfArgumentParser",
    "load_metric",
    "TrlParser",
)
_NO_ROLE += ("TensorBoardCallback", "WandbCallback", "PrinterCallback", "AutoPeftModelForCausalLM", "get_peft_config")
_CALLBACKS = ("EarlyStoppingCallback", "TensorBoardCallback", "WandbCallback", "PrinterCallback", "ProgressCallback")
# Fields of a model's config that a script may set and that change nothing in training.
_CONFIG = ("use_cache", "pad_token_id", "eos_token_id", "bos_token_id", "pretraining_tp", "label2id", "id2label")
_TOKENIZER = ("pad_token", "pad_token_id", "padding_side")
_METHODS = {  # of a model, that change no weight and no loss
    *("to", "cuda", "train", "eval", "parameters", "named_parameters", "print_trainable_parameters", "state_dict"),
    *("save_pretrained", "push_to_hub", "generate", "num_parameters", "named_modules", "modules", "merge_and_unload"),
    *(
        "enable_input_require_grads",
        "gradient_checkpointing_enable",
        "get_memory_footprint",
        "config",
        "from_pretrained",
    ),
    "requires_grad_",
}
# Of SFTTrainer's own arguments, those that its config has in newer releases.
OLDER: tuple[str, ...] = (
    "dataset_text_field",
    "max_seq_length",
    "packing",
    "dataset_kwargs",
    "neftune_noise_alpha",
    "beta",
    "loss_type",
)
OLDER += ("label_smoothing", "max_length", "max_prompt_length", "dataset_num_proc")
_SILENT: tuple[str, ...] = (
    "args",
    "model",
    "tokenizer",
    "processing_class",
    "peft_config",
    "compute_metrics",
    "model_init",
    "ref_model",
)
_SILENT += ("preprocess_logits_for_metrics", "train_dataset", "eval_dataset", "callbacks", "data_collator")


def arguments(call: Call, at: Reading) -> None:
    """TrainingArguments, SFTConfig and their kin."""
    at.kind = call.name
    given = at.script.arguments(call, ("output_dir",))
    at.arguments |= given.known
    table = trainer.TABLE | trl.TABLE
    for name, code in given.unknown.items():
        row = table.get(name)
        deciding = row is None or row.decides or (bool(row.here) and decides(row.here))
        by = (row.here,) if row is not None and row.here else ()
        at.moved.unclear(f"line {call.line}: {name}={code}", f"{RUNS}; a default is taken", deciding, by)
    for code in given.more:
        at.moved.unclear(f"line {call.line}: {call.name}({code})", "what it holds is known when the script runs")
    at.read(call, f"{len(given.known)} settings: see the comments of the run file")


def stopping(call: Call, at: Reading) -> None:
    """EarlyStoppingCallback."""
    given = at.script.arguments(call, ("early_stopping_patience", "early_stopping_threshold"))
    at.unknown(call, given, {"early_stopping_patience": "evaluate.patience"})
    at.set(call, "evaluate.patience", given.known.get("early_stopping_patience", 1))
    if threshold := given.known.get("early_stopping_threshold"):
        at.set(call, "evaluate.min_delta", threshold)
    at.read(call, "evaluate.patience")


def collator(call: Call, at: Reading) -> None:
    """DataCollatorForLanguageModeling: mlm is its default."""
    given = at.script.arguments(call, ("tokenizer", "mlm", "mlm_probability"))
    mlm = given.known.get("mlm", "mlm" not in given.unknown)
    if call.name == "DataCollatorForWholeWordMask" or mlm:
        at.moved.set("task.name", "masked_language_modeling", f"{call.name}, line {call.line}")
        at.set(call, "task.mlm_probability", given.known.get("mlm_probability", 0.15))
        if call.name == "DataCollatorForWholeWordMask":
            at.set(call, "task.whole_word_mask", True)
    at.read(call, f"task.name: {at.moved.keys.get('task.name')}")


def completion_collator(call: Call, at: Reading) -> None:
    why = "a response is learned by its column: task.prompt and task.response, or task.messages"
    at.moved.drop(str(call), None, why, True, ("task.prompt", "task.messages"))


def trainer_call(call: Call, at: Reading) -> None:
    """`Trainer(...)` and its kin: data, callbacks, a loss or an optimizer of the script's own."""
    given = at.script.arguments(call, ("model", "args", "data_collator", "train_dataset", "eval_dataset"))
    for prefix, task in trl.CONFIGS.items():
        if call.name.startswith(prefix):
            at.kind = f"{prefix}Config"
            at.moved.set("task.name", task, f"{call.name}, line {call.line}")
    model = given.known.get("model")
    if isinstance(model, str):
        at.set(call, "model.source", model)
    for name, node in given.nodes.items():
        if name in OLDER and call.name.startswith(tuple(trl.CONFIGS)):
            if name in given.known:
                at.arguments.setdefault(name, given.known[name])
            else:
                at.moved.unclear(f"line {call.line}: {name}={given.unknown[name]}", RUNS)
        elif name == "args" and things.kind_of(at.script, node) is None and not isinstance(node, ast.Constant):
            at.moved.unclear(
                f"line {call.line}: args={shown(node)}", "where these are made was not seen", not at.arguments
            )
        elif name not in _SILENT:
            _own(call, at, name, node)
    for code in given.more:
        at.moved.unclear(f"line {call.line}: {call.name}({code})", "what it holds is known when the script runs")
    if "compute_metrics" in given.nodes:
        why = "metrics takes functions of (predictions, labels); the task has scores of its own"
        at.moved.drop(f"line {call.line}: compute_metrics={shown(given.nodes['compute_metrics'])}", None, why)
    collate = given.nodes.get("data_collator")
    if collate is not None and (own := _own_collator(at.script, collate)):
        at.moved.drop(f"line {call.line}: data_collator={own}", None, "batches are made as the task says", True)
    callbacks(call, at, given.nodes.get("callbacks"))
    at.read(call, "the task and its data")


def _own(call: Call, at: Reading, name: str, node: ast.expr) -> None:
    """An argument that makes another training of it."""
    if isinstance(node, ast.Constant) and not node.value:
        return
    if name == "optimizers" and isinstance(node, ast.Tuple) and all(at.script.known(e, 0) is None for e in node.elts):
        return
    whys = {
        "optimizers": (
            "optim.name, optim.learning_rate and optim.schedule say it",
            ("optim.name", "optim.learning_rate"),
        ),
        "formatting_func": ("columns are read as they are", ("task.text", "task.prompt", "task.messages")),
        "compute_loss_func": ("the loss is the task's own, or that of task.name=module", ("task.loss",)),
    }
    why, by = whys.get(name, ("not an argument that is known here", ()))
    at.moved.drop(f"line {call.line}: {name}={shown(node)}", None, why, True, by)


def _own_collator(script: Script, node: ast.expr) -> str | None:
    """The code of a collator that the script has made itself."""
    value = script.bound(node, last=True) if isinstance(node, ast.Name) else node
    name = ast.unparse(value.func) if isinstance(value, ast.Call) else shown(node)
    own = name in script.functions or name in script.classes or isinstance(value, ast.Lambda)
    return shown(node) if own else None


def callbacks(call: Call, at: Reading, node: ast.expr | None) -> None:
    value = at.script.bound(node, last=True) if isinstance(node, ast.Name) else node
    if value is None:
        return
    each = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    for one in each:
        one = (at.script.bound(one, last=True) or one) if isinstance(one, ast.Name) else one
        name = at.script.origin_of(one.func if isinstance(one, ast.Call) else one).rpartition(".")[2]
        if name not in _CALLBACKS and not (isinstance(one, ast.Constant) and one.value is None):
            at.moved.unclear(f"line {call.line}: the callback {shown(one)}", "what it does is not known")


def add_callback(call: Call, at: Reading) -> None:
    callbacks(call, at, call.node.args[0] if call.node.args else None)


def seed(call: Call, at: Reading) -> None:
    value = at.script.known(call.node.args[0]) if call.node.args else None
    if value is not None:
        at.arguments.setdefault("seed", value)
        at.read(call, "seed")


def checkpointing(call: Call, at: Reading) -> None:
    at.moved.set("model.checkpoint_activations", True, f"line {call.line}")
    at.read(call, "model.checkpoint_activations")


def compiled(call: Call, at: Reading) -> None:
    at.moved.set("model.compile", True, f"torch.compile, line {call.line}")
    at.read(call, "model.compile")


def added_tokens(call: Call, at: Reading) -> None:
    """`add_special_tokens`, `add_tokens`: one for padding alone is never learned."""
    given = at.script.known(call.node.args[0]) if call.node.args else None
    if call.name == "add_special_tokens" and isinstance(given, dict) and set(given) <= {"pad_token"}:
        at.read(call, "nothing: padding is not learned")
        return
    at.moved.drop(str(call), None, "a tokenizer is used as it is saved", True, ("tokenizer.source",))


def resized(call: Call, at: Reading) -> None:
    why = "embeddings grow with a tokenizer that is saved with its tokens"
    at.moved.drop(str(call), None, why, any(c.name == "add_tokens" for c in at.script.calls), ("tokenizer.source",))


Handler = Callable[[Call, Reading], None]
HANDLERS: dict[str, Handler] = {
    "from_pretrained": loading.pretrained,
    "from_config": loading.scratch,
    "BitsAndBytesConfig": loading.bits,
    "EarlyStoppingCallback": stopping,
    "DataCollatorForLanguageModeling": collator,
    "DataCollatorForWholeWordMask": collator,
    "DataCollatorForCompletionOnlyLM": completion_collator,
    "add_callback": add_callback,
    "set_seed": seed,
    "gradient_checkpointing_enable": checkpointing,
    "add_special_tokens": added_tokens,
    "add_tokens": added_tokens,
    "resize_token_embeddings": resized,
}
NO_ROLE = frozenset(_NO_ROLE)


def settings(at: Reading) -> None:
    """Attributes that the script sets: of arguments, of a model's config, of a tokenizer, of weights."""
    for node in ast.walk(at.script.tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute):
                _setting(node, target, at)  # type: ignore[arg-type]


def _setting(node: ast.Assign, target: ast.Attribute, at: Reading) -> None:
    kind, where = things.kind_of(at.script, target.value), f"line {node.lineno}: {shown(node)}"
    value = at.script.known(node.value)
    if kind == "arguments":
        at.arguments[target.attr] = value
        at.moved.read.append(f"{where} -> {target.attr}")
    elif target.attr == "requires_grad":
        at.moved.drop(where, None, "model.freeze names the weights that are not trained", True, ("model.freeze",))
    elif kind == "config" and target.attr not in _CONFIG:
        at.moved.drop(where, None, "model.config sets entries of the model's own config", True, ("model.config",))
    elif kind == "tokenizer" and target.attr == "chat_template" and isinstance(value, str):
        at.moved.set("task.chat_template", value, f"line {node.lineno}")
        at.moved.read.append(f"{where} -> task.chat_template")
    elif kind == "tokenizer" and target.attr not in _TOKENIZER:
        at.moved.drop(where, None, "a tokenizer is used as it is saved", True, ("tokenizer.source",))
    elif kind == "model" and target.attr not in ("is_parallelizable", "model_parallel", "generation_config"):
        at.moved.unclear(where, "what it changes of the model is not known")


def model_method(call: Call, at: Reading) -> None:
    """A method of a model that none of the above knows."""
    if call.name not in _METHODS and call.name not in HANDLERS:
        at.moved.unclear(str(call), "what it changes of the model is not known")
    elif call.name == "requires_grad_":
        at.moved.drop(str(call), None, "model.freeze names the weights that are not trained", True, ("model.freeze",))
