"""A script that trains with transformers' Trainer or one of TRL's.

In: a `Script`. Out: a mover: it reads each call of transformers, peft, bitsandbytes and TRL that affects training, then
the settings of the Trainer; unknown values are gaps. `loading.py` reads calls of models and datasets.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from lockstep.config.run import RunError
from lockstep.lab.import_config import (
    attributes,
    branch_values,
    call_arguments,
    dataset_calls,
    evaluating_trainers,
    inlining,
    lightning,
    loading,
    loss_means,
    metric_names,
    object_flows,
    trainer,
)
from lockstep.lab.import_config.bound_names import root_of
from lockstep.lab.import_config.kinds import casts, function_of, is_trainer, kind_of
from lockstep.lab.import_config.library_names import is_own, is_seed, whose
from lockstep.lab.import_config.loading import RUNS, Reading
from lockstep.lab.import_config.quiet_code import QuietCode
from lockstep.lab.import_config.script import Call, Script, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft
from lockstep.lab.import_config.trainer_statements import TrainerStatements, changes_outside, subclass_of_trainer
from lockstep.lab.import_config.value_bounds import Unknown

Mover = Callable[[RunDraft, int | None], None]
LOOPS = ("lightning", "pytorch_lightning", "pl", "L", "composer", "ignite", "fastai")  # have a Trainer, too


def read(script: Script) -> tuple[str, Mover] | None:
    """Return the mover of a script with a Trainer, or None if it has none. Errors: `RunError` if its settings are on
    its command line."""
    calls = [c for c in script.calls if c.origin.partition(".")[0] not in LOOPS]
    settings = [c for c in calls if _is_settings(c.name)]
    trainers = [c for c in calls if is_trainer(script, c.name)]
    if not settings and not trainers:
        return None
    way = next((c.name for c in (*settings, *trainers) if _no_way(c.name)), None)
    if way is not None:
        ours = "supported TRL trainers are SFT, DPO, reward, and CPO with loss_type simpo"
        if way.startswith("SentenceTr"):
            ours = "for embeddings of texts: `lockstep init run.yaml --task embedding --data FILE --model NAME`"
        raise RunError("LS8250", f"--from: {script.path}: {way} has no counterpart; {ours}")
    if len(settings) > 1:
        lines = ", ".join(str(c.line) for c in settings)
        raise RunError("LS8251", f"--from: {script.path} calls {settings[0].name} on lines {lines}; keep only one")
    parsers = [c for c in calls if c.name in ("HfArgumentParser", "TrlParser")]
    if parsers and not settings and not script.options:
        raise RunError(
            "LS8252",
            f"--from: {script.path} reads its settings from its command line (line {parsers[0].line}); write "
            "that command to a file, run.sh, and give --from run.sh, or write args.to_json_string() to "
            "training_args.json and give that",
        )
    name = settings[0].name if settings else trainers[0].name
    return f"a script with {name}", lambda draft, processes: _move(script, draft, processes)


def written_out(script: Script) -> Script:
    """Return a script whose Trainer is created in a method with the statements of that method in its place."""
    tree = inlining.written_out(script.tree, "train") if inlining.holds_trainer(script.tree) else None
    return script if tree is None else Script(script.path, script.text, script.options, tree)


def _is_settings(name: str) -> bool:
    prefixes = (*trainer.CONFIGS, *NAMES["trl_without_counterpart"])
    return name.endswith("TrainingArguments") or any(name == f"{prefix}Config" for prefix in prefixes)


def _no_way(name: str) -> bool:
    kinds = [f"{prefix}{kind}" for prefix in NAMES["trl_without_counterpart"] for kind in ("Config", "Trainer")]
    return name in kinds or name.startswith("SentenceTr")


def _move(script: Script, draft: RunDraft, processes: int | None) -> None:
    at = Reading(script, draft)
    rows = {**trainer.TABLE, **trainer.TRL}
    if any(c.name in ("HfArgumentParser", "TrlParser") for c in script.calls):
        at.arguments |= {name: value for name, value in script.options.items() if name in rows}
    loading.task_first(script, draft)
    quiet = QuietCode(script, lambda *_: None, lambda node: False)
    for call in script.calls:
        read_call(call, at)
        if _touches(call, script) and not quiet.is_quiet(call.node):
            draft.unclear(str(call), "its effect on its arguments is unknown: inline it where it is called")
    makes = any(is_trainer(script, call.name) for call in script.calls)
    for call in (each for each in script.calls if each.name == "train" and each.receiver is not None):
        if not makes and kind_of(script, call.receiver) is None:
            draft.unclear(str(call), "the line that creates its Trainer was not found")
    if not any(call.name in ("train", "fit", "hyperparameter_search") for call in script.calls):
        draft.notes.append("the script never calls train(): whether it trains at all is decided elsewhere")
    _unread_effects(at)
    for kind in script.classes.values():
        _subclass(kind, at)
    attributes.read(at)
    draft.at_end += [at.check_inputs, lambda draft: loss_means.note_trainer(draft, script)]
    TrainerStatements(script, draft, lambda node: _is_read(node, at)).read()
    _settings(at, processes)
    own_tokenizer(at)
    object_flows.refuse(script, draft)
    if draft.task is None:
        draft.unclear("the task", "the script does not show it", "task.name")


def _unread_effects(at: Reading) -> None:
    """Add a gap for classes that are made by `type(...)`."""
    for call in at.script.calls:
        if call.origin == "type" and len(call.node.args) == 3:
            at.draft.unclear(str(call), "which class it makes is known only when the script runs")


def _touches(call: Call, script: Script) -> bool:
    """Return whether a function of the script gets a model, rows or a Trainer."""
    if not isinstance(call.node.func, ast.Name) or call.node.func.id not in script.functions:
        return False
    nodes = [*call.node.args, *(word.value for word in call.node.keywords)]
    return any(kind_of(script, node) in ("model", "rows", "trainer", "arguments") for node in nodes)


def read_call(call: Call, at: Reading) -> None:
    handler = _handler(call, at)
    kind = kind_of(at.script, call.receiver) if call.receiver is not None else None
    if handler is not None or kind is None:
        call_arguments.check(at.script, at.draft, call, call_arguments.row_of_trainer(call, kind))
    if handler is None:
        return
    if not is_seed(at.script, call.node.func) and is_own(at.script, call.node.func):
        first = root_of(call.node.func)
        looked_at = (
            is_trainer(at.script, call.name) or _is_settings(call.name) or kind_of(at.script, call.node) == "model"
        )
        if first not in at.script.classes or not looked_at:
            at.draft.unclear(str(call), f"{call.name} is {whose(at.script, first)}, and not the library's")
            return
    _changed_later(call, at)
    grows = call.name == "resize_token_embeddings" and "len(tokenizer) >" in (call.condition or "")
    if call.condition is not None and not grows and not is_trainer(at.script, call.name):
        gaps, moves = len(at.draft.gaps), (dict(at.draft.keys), dict(at.arguments))
        handler(call, at)
        if len(at.draft.gaps) == gaps and (at.draft.keys, at.arguments) != moves:
            at.draft.unclear(str(call), f"it is called only {call.condition}, which is known only when the script runs")
        return
    handler(call, at)


def _changed_later(call: Call, at: Reading) -> None:
    """Add a gap for each attribute that the script sets on the object that a call creates: `config.r = 64`."""
    names = {
        ast.unparse(each.target)
        for each in at.script.assignments()
        if each.value is call.node and isinstance(each.target, ast.Name)
    }
    if not names or kind_of(at.script, call.node) not in (None, "adapter"):  # read elsewhere
        return
    for node in ast.walk(at.script.tree):
        changed = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        by_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "replace", "dataclasses.replace")
        holder = node.args[0] if isinstance(node, ast.Call) and by_call and node.args else node
        if (changed or by_call) and root_of(holder) in names:
            at.draft.unclear(f"line {node.lineno}: {code_of(node)}", f"it changes the result of {call}")  # type: ignore[attr-defined]


def _handler(call: Call, at: Reading) -> Callable[[Call, Reading], None] | None:
    """Return the handler of a call; None if the call does not affect training."""
    kind = kind_of(at.script, call.receiver) if call.receiver is not None else None
    root, name = call.origin.partition(".")[0], call.name
    if _is_settings(name):
        return arguments
    if is_trainer(at.script, name) and root not in LOOPS:
        return _trainer
    if name in HANDLERS and (name != "set_seed" or is_seed(at.script, call.node.func)):
        return HANDLERS[name]
    if name in dataset_calls.HANDLERS:
        return dataset_calls.HANDLERS[name]
    if root == "transformers" and name.endswith(tuple(loading.TASKS)):
        return loading.scratch
    if root == "peft" and name.endswith("Config"):
        return loading.adapter
    if call.origin == "torch.compile":
        return compiled
    if call.origin.startswith(("datasets.Dataset.", "datasets.DatasetDict", "datasets.IterableDataset.")):
        return dataset_calls.own_rows
    if kind == "rows":
        return dataset_calls.method
    if kind == "model":
        return model_method
    if kind == "trainer":
        return _OF_TRAINER.get(name, _unknown)
    if kind == "arguments":
        return None if name in NAMES["arguments_methods"] else _unknown
    if kind is not None or kind_of(at.script, call.node.func) in ("tokenizer", "model"):
        return _unknown if kind == "tokenizer" and name not in NAMES["tokenizer_methods"] else None
    if root in NAMES["libraries"] and name not in NAMES["without_role"] and not _quiet(call):
        return _unknown
    return None


def _is_read(node: ast.Call, at: Reading) -> bool:
    """Return whether a call is read, or reported as not understood."""
    origin = at.script.origin_of(node.func)
    return _handler(Call(node, origin.rpartition(".")[2], origin), at) is not None


def _quiet(call: Call) -> bool:
    parts = call.origin.split(".")
    return (
        "logging" in parts
        or call.name.startswith(("is_", "set_verbosity", "disable_", "enable_"))
        or ("schedule" in call.name and call.name.startswith("get_"))  # handled with Trainer's optimizers
        or (parts[-2] in ("datasets", "transformers") and call.name in ("Features", "Value", "ClassLabel", "Sequence"))
    )


def _unknown(call: Call, at: Reading) -> None:
    at.draft.unclear(str(call), "its effect on training is unknown")


def _trainer(call: Call, at: Reading) -> None:
    trainer_call(call, at)
    dataset_calls.of_trainer(call, at)


def _subclass(kind: ast.ClassDef, at: Reading) -> None:
    """Check subclasses of Trainer, and dataset classes of the script."""
    bases = [at.script.origin_of(base).rpartition(".")[2] for base in kind.bases]
    if is_trainer(at.script, kind.name):
        subclass_of_trainer(at.script, kind, at.draft)
        at.draft.at_end.append(lambda draft: evaluating_trainers.refuse(at.script, kind, draft, at.arguments))
    if any(base in ("Dataset", "IterableDataset") for base in bases):
        why = "save its texts to a file, and give that: --data FILE"
        at.draft.unclear(
            f"line {kind.lineno}: class {kind.name}({', '.join(map(code_of, kind.bases))})",
            why,
            "data.source",
            "data.train",
        )


def _settings(at: Reading, processes: int | None) -> None:
    draft = at.draft
    prefix = at.kind.removesuffix("Config")
    if prefix not in trainer.CONFIGS and draft.task in trainer.CONFIGS.values() and "Config" in at.kind:
        prefix = next(p for p, task in trainer.CONFIGS.items() if task == draft.task)
    if prefix in trainer.CONFIGS:
        older = any(c.name.endswith("TrainingArguments") for c in at.script.calls)
        defaults = {"learning_rate": 5e-5, "gradient_checkpointing": False, "bf16": False} if older else {}
        if prefix == "CPO":
            defaults |= {"cpo_alpha": 1.0}
        trainer.move_trl(defaults | at.arguments, draft, processes)
        _renamed_for_trl(at)
        return
    trainer.move(at.arguments, draft, processes)
    if at.mapped or draft.task == "image_classification":
        return
    why = "init found no tokenizing function"
    draft.unclear("the text columns and the maximum length", why, "data.max_length", "task.block_size")


def _renamed_for_trl(at: Reading) -> None:
    """Set the columns that TRL takes by their names, where the script has given these names to others."""
    task = str(at.draft.keys["task.name"])
    for theirs, column in at.renamed.items():
        name = "text" if theirs == at.arguments.get("dataset_text_field", "text") else theirs
        if name in trainer.COLUMNS[task]:
            at.draft.set(f"task.{name}", column, f"the column renamed to {theirs}")
        elif name in trainer.OTHER_COLUMNS:
            why = "TRL takes the column by this name"
            at.draft.unclear(f"{column}, renamed to {theirs}", why, "data.source", "data.train")


def own_tokenizer(at: Reading) -> None:
    """Record the tokenizer, unless it is the model's own."""
    draft = at.draft
    source = draft.keys.get("tokenizer.source")
    if source is not None and source == draft.keys.get("model.source"):
        del draft.keys["tokenizer.source"]
        draft.comments.pop("tokenizer.source", None)
    elif source is None and at.tokenizer is not None and at.tokenizer[0] not in at.models:
        code, where = at.tokenizer
        draft.unclear(where, f"{code} is known when the script runs", "tokenizer.source", "model.source")


def arguments(call: Call, at: Reading) -> None:
    """Read TrainingArguments, SFTConfig and similar classes."""
    at.kind = call.name
    arguments = at.script.arguments(call, ("output_dir",))
    for name in NAMES["never_none"]:  # an option without a default, which each command sets
        if name in arguments.nodes and arguments.known.get(name, Unknown) is None:
            del arguments.known[name]
            arguments.unknown[name] = code_of(arguments.nodes[name])
    at.arguments |= arguments.known
    for name, code in arguments.unknown.items():
        attributes.unknown_setting(at, name, f"line {call.line}: {name}={code}")
    for code in arguments.more:
        at.draft.unclear(f"line {call.line}: {call.name}({code})", "its content is known only when the script runs")
    at.read(call, f"{len(arguments.known)} settings: see the comments of the run file")


def stopping(call: Call, at: Reading) -> None:
    """Read EarlyStoppingCallback."""
    arguments = at.script.arguments(call, ("early_stopping_patience", "early_stopping_threshold"))
    at.unknown(call, arguments, {"early_stopping_patience": "evaluate.patience"})
    at.set(call, "evaluate.patience", arguments.known.get("early_stopping_patience", 1))
    if threshold := arguments.known.get("early_stopping_threshold"):
        at.set(call, "evaluate.min_delta", threshold)
    at.read(call, "evaluate.patience")


def collator(call: Call, at: Reading) -> None:
    """Read DataCollatorForLanguageModeling; its default is mlm=True."""
    arguments = at.script.arguments(call, ("tokenizer", "mlm", "mlm_probability"))
    mlm = arguments.known.get("mlm", "mlm" not in arguments.unknown)
    if not mlm and at.draft.task == "masked_language_modeling":
        at.draft.lacks(f"line {call.line}: {call.name}(mlm=False)", "a share of the tokens is masked and learned")
    if call.name == "DataCollatorForWholeWordMask" or mlm:
        at.draft.set("task.name", "masked_language_modeling", f"{call.name}, line {call.line}")
        at.set(call, "task.mlm_probability", arguments.known.get("mlm_probability", 0.15))
        if call.name == "DataCollatorForWholeWordMask":
            at.set(call, "task.whole_word_mask", True)
    for name, node in arguments.nodes.items():
        if name not in ("tokenizer", "mlm", "mlm_probability", "pad_to_multiple_of", "return_tensors"):
            why = "of masked tokens, 80 % become the mask token, 10 % a random token, and 10 % stay"
            at.draft.lacks(f"line {call.line}: {call.name}({name}={code_of(node)})", why, "task.mlm_probability")
    at.read(call, f"task.name: {at.draft.keys.get('task.name')}")


def padding_collator(call: Call, at: Reading) -> None:
    """Read DataCollatorForSeq2Seq and similar collators: labels of padding are ignored, and a label is a sequence."""
    if at.draft.task == "classification":
        why = "it pads labels as sequences, and a classifier has one label a text: use DataCollatorWithPadding"
        at.draft.unclear(str(call), why)
    arguments = at.script.arguments(call, ("tokenizer", "model"))
    node = arguments.nodes.get("label_pad_token_id")
    if node is not None and arguments.known.get("label_pad_token_id") != -100:
        where = f"line {call.line}: {call.name}(label_pad_token_id={code_of(node)})"
        at.draft.lacks(where, "padding is never a target, as with -100")


completion_collator = loading.without(
    "a response is learned by its column: task.prompt and task.response, or task.messages",
    *("task.prompt", "task.messages"),
)


def trainer_call(call: Call, at: Reading) -> None:
    """Read `Trainer(...)` or a subclass: data, callbacks, custom losses and optimizers."""
    arguments = at.script.arguments(call, trainer.positions(call.name))
    _reference(call, at, arguments.nodes.get("ref_model"))
    for prefix, task in trainer.CONFIGS.items():
        if call.name.startswith(prefix):
            at.kind = f"{prefix}Config"
            at.draft.set("task.name", task, f"{call.name}, line {call.line}")
    model = arguments.known.get("model")
    if isinstance(model, str):
        at.set(call, "model.source", model)
    elif (node := arguments.nodes.get("model")) is not None and _is_other(at.script, node, "model"):
        at.draft.unclear(f"line {call.line}: model={code_of(node)}", "a model of the script's own is task.model")
    if (node := arguments.nodes.get("train_dataset")) is not None and _is_other(at.script, node, "rows"):
        why = "save its texts to a file, and give that: --data FILE"
        where = f"line {call.line}: train_dataset={code_of(node)}"
        at.draft.unclear(where, why, "data.source", "data.train")
    for name, node in arguments.nodes.items():
        if name in NAMES["older_trainer_arguments"] and call.name.startswith(tuple(trainer.CONFIGS)):
            if name in arguments.known:
                at.arguments.setdefault(name, arguments.known[name])
            else:
                at.draft.unclear(f"line {call.line}: {name}={arguments.unknown[name]}", RUNS)
        elif name == "args":
            _settings_of(call, at, node)
        elif name not in NAMES["trainer_arguments"]:
            _own(call, at, name, node)
    for code in arguments.more:
        at.draft.unclear(f"line {call.line}: {call.name}({code})", "its content is known only when the script runs")
    if "compute_metrics" in arguments.nodes:
        why = "the task reports its usual metrics; to keep a function of (predictions, labels), name it in metrics"
        function = arguments.nodes["compute_metrics"]
        at.draft.drop(f"line {call.line}: compute_metrics={code_of(function)}", None, why)
        at.draft.at_end.append(lambda draft: metric_names.rename_best(at.script, function, draft))
    _objects(call, at, arguments.nodes)
    collate = arguments.nodes.get("data_collator")
    if collate is not None and (collator := own_collator(at.script, collate)):
        at.draft.lacks(f"line {call.line}: data_collator={collator}", "lockstep builds batches itself")
    elif collate is not None:
        _pads_with(call, at, collate)
    callbacks(call, at, arguments.nodes.get("callbacks"))
    at.read(call, "the task and its data")


def _pads_with(call: Call, at: Reading, collate: ast.expr) -> None:
    """Check that a library's collator pads with a tokenizer that is read where it is loaded."""
    value = at.script.bound(collate, last=True) if isinstance(collate, ast.Name) else collate
    if not isinstance(value, ast.Call) or not at.script.origin_of(value.func).endswith(_PADDING):
        return
    words = {word.arg: word.value for word in value.keywords}
    node = words.get("tokenizer", value.args[0] if value.args else None)
    if node is not None and kind_of(at.script, node) != "tokenizer":
        where = f"line {value.lineno}: {code_of(value)}"
        at.draft.unclear(where, f"the line that loads {code_of(node)} was not found", "tokenizer.source")


def _objects(call: Call, at: Reading, nodes: dict[str, ast.expr]) -> None:
    """Check that the calls that create a Trainer's tokenizer, adapter and model are read, and that its functions of
    evaluation change nothing else."""
    for name in ("tokenizer", "processing_class", "peft_config", "model_init"):
        node = nodes.get(name)
        if node is None or at.script.known(node, 0) is None:
            continue
        value = at.script.bound(node, last=True) if isinstance(node, ast.Name) else node
        maker = at.script.origin_of(value.func) if isinstance(value, ast.Call) else ""
        if name == "model_init":
            is_read = _makes_model(at.script, node)
        elif name == "peft_config":
            is_read = maker.endswith(("Config", "get_peft_config")) or _is_choice(at.script, value)
        else:
            is_read = kind_of(at.script, node) == "tokenizer"
        if not is_read:
            key = {"peft_config": "model.adapter", "model_init": "model.source"}.get(name, "tokenizer.source")
            at.draft.unclear(f"line {call.line}: {name}={code_of(node)}", "the line that creates it was not found", key)
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        function = _scoring(at.script, nodes.get(name))
        if function is None and nodes.get(name) is not None and not _is_of_library(at.script, nodes[name]):
            where = f"line {call.line}: {name}={code_of(nodes[name])}"
            at.draft.unclear(where, "which function it is was not found, and it may change the training")
        if function is not None and (line := changes_outside(at.script, function)) is not None:
            where = f"line {line.lineno}: {code_of(line)}"  # type: ignore[attr-defined]
            at.draft.unclear(where, f"it changes the training from {name}")


def _scoring(script: Script, node: ast.expr | None) -> ast.AST | None:
    """Return the function of the script that scores: one that is named, one with others in it that makes it, or the
    `__call__` of a class."""
    value = script.bound(node, last=True) if isinstance(node, ast.Name) and node.id not in script.functions else node
    if (function := function_of(script, node) or function_of(script, value)) is not None:
        return function
    name = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
    if name in script.classes:
        return next((m for m in script.classes[name].body if getattr(m, "name", "") == "__call__"), None)
    return script.functions.get(name) if name not in script.ambiguous else None


def _is_of_library(script: Script, node: ast.expr) -> bool:
    """Return whether a function is one of a library, or None."""
    value = script.bound(node, last=True) if isinstance(node, ast.Name) else node
    if value is None or script.known(value, 0) is None:
        return script.known(node, 0) is None or root_of(node) in script.imports
    return root_of(value) in script.imports


def _is_choice(script: Script, node: ast.expr | None) -> bool:
    """Return whether a value is an adapter's config, or None, by a condition."""
    parts = (node.body, node.orelse) if isinstance(node, ast.IfExp) else ()
    origins = [script.origin_of(each.func) if isinstance(each, ast.Call) else code_of(each) for each in parts]
    return bool(parts) and all(each == "None" or each.endswith("Config") for each in origins)


def _makes_model(script: Script, node: ast.expr) -> bool:
    """Return whether `model_init` is a function that only returns a loaded model."""
    function = function_of(script, node)
    if isinstance(function, ast.Lambda):
        return kind_of(script, function.body) == "model"
    lines = [line for line in getattr(function, "body", []) if not _is_docstring(line)]
    only = lines[0].value if len(lines) == 1 and isinstance(lines[0], ast.Return) else None
    return kind_of(script, only) == "model"


def _reference(call: Call, at: Reading, node: ast.expr | None) -> None:
    """Check that a reference model has the weights of the model before training."""
    value = at.script.bound(node, last=True) if isinstance(node, ast.Name) else node
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return
    loads = next((c for c in at.script.calls if c.node is value and c.name == "from_pretrained"), None)
    source = at.script.arguments(loads, ("name",)).known.get("name") if loads is not None else None
    copied = isinstance(value, ast.Call) and at.script.origin_of(value.func) in _COPIES
    if copied or (source is not None and source == at.draft.keys.get("model.source")):
        return
    where, why = (
        f"line {call.line}: ref_model={code_of(node or value)}",
        "lockstep's reference is the model before training",
    )
    if source is not None:
        at.draft.lacks(where, f"its weights are those of {source}; {why}")
    elif loads is None or not loads.node.args or code_of(loads.node.args[0]) not in at.models:
        at.draft.unclear(where, f"it may have other weights than the model; {why}", "task.loss")


def _settings_of(call: Call, at: Reading, node: ast.expr) -> None:
    """Check where the settings of a Trainer come from."""
    where = f"line {call.line}: args={code_of(node)}"
    if isinstance(node, ast.Name) and at.script.is_parsed(node):  # from the command line
        if node.id in at.script.replaced:
            at.draft.unclear(where, "its values are not those of the command line alone")
    elif kind_of(at.script, node) is None and not isinstance(node, ast.Constant):
        decides = not at.arguments or _is_other(at.script, node, "arguments")
        at.draft.unclear(where, "the line that creates them was not found", decides=decides)


def _own(call: Call, at: Reading, name: str, node: ast.expr) -> None:
    """Read an argument that changes the training."""
    if isinstance(node, ast.Constant) and not node.value:
        return
    if name == "optimizers" and isinstance(node, ast.Tuple) and all(at.script.known(e, 0) is None for e in node.elts):
        return
    whys = {
        "optimizers": (
            "set optim.name, optim.learning_rate and optim.schedule",
            ("optim.name", "optim.learning_rate"),
        ),
        "formatting_func": ("columns are read unchanged", ("task.text", "task.prompt", "task.messages")),
        "compute_loss_func": ("the loss is the task's own, or that of task.name=module", ("task.loss",)),
    }
    why, by = whys.get(name, ("unknown argument", ()))
    at.draft.lacks(f"line {call.line}: {name}={code_of(node)}", why, *by)


def _is_other(script: Script, node: ast.expr, kind: str) -> bool:
    """Return whether the script creates an object that is not of this kind."""
    value = script.bound(node, last=True) if isinstance(node, ast.Name) else node
    return value is not None and not isinstance(value, ast.Constant) and kind_of(script, node) != kind


def own_collator(script: Script, node: ast.expr) -> str | None:
    """Return the code of a collator that is not from a known library."""
    value = script.bound(node, last=True) if isinstance(node, ast.Name) else node
    if isinstance(value, ast.Constant) and value.value is None:
        return None
    if value is None:
        value = node
    origin = script.origin_of(value.func if isinstance(value, ast.Call) else value)
    known = origin.rpartition(".")[2] in NAMES["collators"]
    known = known and not is_own(script, value.func if isinstance(value, ast.Call) else value)
    return None if known or _only_pads(script, value) else code_of(node)


def _only_pads(script: Script, node: ast.expr) -> bool:
    """Return whether a collator is `lambda rows: tokenizer.pad(rows, return_tensors="pt")` or a function of this."""
    function = None if isinstance(node, ast.Call) else function_of(script, node)
    if not isinstance(function, ast.Lambda | ast.FunctionDef) or getattr(function, "decorator_list", None):
        return False
    arguments = function.args
    if len(arguments.args) != 1 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        return False
    if isinstance(function, ast.Lambda):
        result: ast.expr | None = function.body
    else:
        lines = [line for line in function.body if not _is_docstring(line)]
        result = lines[-1].value if lines and isinstance(lines[-1], ast.Return) else None
        if len(lines) == 2 and isinstance(first := lines[0], ast.Assign) and len(first.targets) == 1:  # batch = ...
            result = (
                first.value if result is not None and ast.unparse(result) == ast.unparse(first.targets[0]) else None
            )
        elif len(lines) != 1:
            return False
    if (
        not isinstance(result, ast.Call)
        or not _is_pad(script, result.func)
        or len(result.args) != 1
        or _unread_words(result)
    ):
        return False
    return ast.unparse(result.args[0]) == arguments.args[0].arg


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_pad(script: Script, node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "pad" and kind_of(script, node.value) == "tokenizer"


def _unread_words(call: ast.Call) -> bool:
    """Return whether a call of `pad` has arguments that change more than the length of the padding."""
    return any(word.arg not in NAMES["pad_arguments"] for word in call.keywords)


def callbacks(call: Call, at: Reading, node: ast.expr | None) -> None:
    value = at.script.bound(node, last=True) if isinstance(node, ast.Name) else node
    if isinstance(node, ast.Name) and (value is None or at.script.bound(node) is None):
        at.draft.unclear(f"line {call.line}: the callbacks {node.id}", "its value is known only when the script runs")
    if value is None:
        return
    each = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    for one in each:
        one = (at.script.bound(one, last=True) or one) if isinstance(one, ast.Name) else one
        name = at.script.origin_of(one.func if isinstance(one, ast.Call) else one).rpartition(".")[2]
        known = name in NAMES["callbacks"] and not is_own(at.script, one.func if isinstance(one, ast.Call) else one)
        if not known and not (isinstance(one, ast.Constant) and one.value is None):
            at.draft.unclear(f"line {call.line}: the callback {code_of(one)}", "its effect is unknown")


def add_callback(call: Call, at: Reading) -> None:
    nodes = at.script.arguments(call, ("callback",)).nodes
    callbacks(call, at, nodes.get("callback"))


def remove_callback(call: Call, at: Reading) -> None:
    """Read `remove_callback` and `pop_callback`: without effect after training, or of a callback that only reports."""
    node = at.script.arguments(call, ("callback",)).nodes.get("callback")
    kind = node.func if isinstance(node, ast.Call) else node
    name = at.script.origin_of(kind).rpartition(".")[2] if kind is not None else ""
    if name not in _REPORTING and not loading.follows_training(call, at):
        at.draft.unclear(str(call), "it removes a callback that may affect the training", "evaluate.patience")


def seed(call: Call, at: Reading) -> None:
    value = at.script.known(call.node.args[0]) if call.node.args else None
    if value is not None:
        at.arguments.setdefault("seed", value)
        at.read(call, "seed")


def checkpointing(call: Call, at: Reading) -> None:
    at.draft.set("model.checkpoint_activations", True, f"line {call.line}")
    at.read(call, "model.checkpoint_activations")


def compiled(call: Call, at: Reading) -> None:
    at.draft.set("model.compile", True, f"torch.compile, line {call.line}")
    at.read(call, "model.compile")


def added_tokens(call: Call, at: Reading) -> None:
    """Read `add_special_tokens` and `add_tokens`; a token only for padding is never learned."""
    tokens = at.script.known(call.node.args[0]) if call.node.args else None
    if call.name == "add_special_tokens" and isinstance(tokens, dict) and set(tokens) <= {"pad_token"}:
        at.read(call, "nothing: padding is not learned")
        return
    at.draft.lacks(str(call), "tokenizers are used as saved", "tokenizer.source")


def resized(call: Call, at: Reading) -> None:
    why = "save the tokenizer with its tokens: embeddings are resized"
    at.draft.drop(str(call), None, why, any(c.name == "add_tokens" for c in at.script.calls), ("tokenizer.source",))


def trained(call: Call, at: Reading) -> None:
    """Read `trainer.train()`, which may resume from a checkpoint."""
    node = at.script.arguments(call, ("resume_from_checkpoint",)).nodes.get("resume_from_checkpoint")
    if node is None or at.script.known(node, True) in (None, False):
        return
    newest = at.script.known(node) is True or branch_values.is_newest(at.script, node)
    why = "training resumes from a checkpoint of Trainer; in lockstep the same command resumes a run"
    at.draft.drop(f"line {call.line}: resume_from_checkpoint={code_of(node)}", None, why, not newest, ("model.source",))


_PADDING = ("WithPadding", "ForTokenClassification", "ForSeq2Seq", "ForLanguageModeling", "ForWholeWordMask")
_REPORTING = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback", "TensorBoardCallback", "WandbCallback")
_COPIES = ("copy.deepcopy", "trl.create_reference_model", "create_reference_model")
Handler = Callable[[Call, Reading], None]
_OF_TRAINER: dict[str, Handler | None] = {
    **dict.fromkeys(NAMES["trainer_methods"]),
    "fit": lightning.fit,
    "train": trained,
    "add_callback": add_callback,
    "remove_callback": remove_callback,
    "pop_callback": remove_callback,
}
HANDLERS: dict[str, Handler] = {
    "from_pretrained": loading.pretrained,
    "from_config": loading.scratch,
    "BitsAndBytesConfig": loading.bits,
    "EarlyStoppingCallback": stopping,
    "DataCollatorForLanguageModeling": collator,
    "DataCollatorForWholeWordMask": collator,
    "DataCollatorForCompletionOnlyLM": completion_collator,
    "DataCollatorForSeq2Seq": padding_collator,
    "DataCollatorForTokenClassification": padding_collator,
    "add_callback": add_callback,
    "set_seed": seed,
    "gradient_checkpointing_enable": checkpointing,
    "add_special_tokens": added_tokens,
    "add_tokens": added_tokens,
    "resize_token_embeddings": resized,
}


def model_method(call: Call, at: Reading) -> None:
    """Record a method of a model that no other handler knows."""
    if call.name in NAMES["after_training"] and loading.follows_training(call, at):
        loading.refuse_saved_cast(call, at)
        return
    if call.name not in NAMES["model_methods"] and call.name not in HANDLERS:
        at.draft.unclear(str(call), "its effect on the model is unknown")
    elif casts(at.script, call.node):
        at.draft.lacks(str(call), "model.dtype is the type of the weights", "model.dtype")
    elif call.name == "requires_grad_":
        at.draft.lacks(str(call), "model.freeze names the weights that are not trained", "model.freeze")
