"""Calls of a script that load datasets, change their rows, or make tokens of them.

In: a `Call` of datasets. Out: keys of a run file, and gaps: which rows and which of their texts are trained on.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import partial
from typing import Any

from lockstep.lab.import_config import (
    call_arguments,
    kinds,
    label_order,
    loss_means,
    text_blocks,
    text_columns,
    trainer,
    tried_on_rows,
)
from lockstep.lab.import_config.kinds import CUT, split_of
from lockstep.lab.import_config.loading import RUNS, Reading, without
from lockstep.lab.import_config.mapped_function import MappedFunction
from lockstep.lab.import_config.qa_function import QaFunction
from lockstep.lab.import_config.script import Arguments, Assignment, Call, Scope, Unknown, code_of
from lockstep.lab.import_config.table import NAMES, RunDraft

_WHOLE = "save the final rows (to_json), and give that file: --data FILE"
_TEXTS = ("data.source", "data.train")
own_rows = without(_WHOLE, "data.source", "data.train")  # `Dataset.from_list` and its kin, `load_from_disk`
_several = without("write several sources by hand in data.sources", "data.source", "data.sources", "data.train")


_SPLITS = {"dev": "validation", "valid": "validation", "eval": "validation"}  # of data_files -> here


def load(call: Call, at: Reading) -> None:
    """Read `load_dataset`."""
    arguments = at.script.arguments(call, ("path", "name"))
    path, config, split = (arguments.known.get(name) for name in ("path", "name", "split"))
    arguments.unknown = {k: v for k, v in arguments.unknown.items() if not call_arguments.is_quiet(call.name, k)}
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
    parts = split.items() if isinstance(split, dict) else [(each, each) for each in _listed(split)]
    if any(not isinstance(each, str) or not each.isidentifier() for _, each in parts):
        at.draft.lacks(
            f"line {call.line}: split={split!r}", "use a whole split, or data.limit", "data.train", "data.limit"
        )
    elif any(name != each for name, each in parts):
        at.draft.lacks(f"line {call.line}: split={split!r}", "data.train names the split", "data.train")
    if arguments.known.get("revision"):
        at.set(call, "data.revision", arguments.known["revision"])
    if arguments.known.get("streaming"):
        at.set(call, "data.stream", True)
    if path == "text" and arguments.known.pop("keep_linebreaks", False):
        why = "the script keeps the newline at the end of a text (keep_linebreaks=True), lockstep does not"
        at.draft.notes.append(f"difference: {why}")
    read = _reading(str(path), arguments.known, call, at)
    read += ("path", "name", "split", "data_files", "revision", "streaming", "trust_remote_code")
    for name, value in arguments.known.items():
        if name not in read and not call_arguments.is_quiet(call.name, name) and value is not None:
            at.draft.unclear(f"line {call.line}: {name}={value}", "unknown argument")
    at.read(call, "data.source")


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


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
            split = _SPLITS.get(name, name)
            if split in ("train", "validation", "test"):
                at.set(call, f"data.{split}", value)
            else:
                at.draft.drop(f"line {call.line}: data_files: {name}", None, "splits are train, validation and test")
    elif not unknown:
        at.draft.lacks(str(call), "name its files: --data FILE", "data.source", "data.train")


def cut(call: Call, at: Reading) -> None:
    """Read `train_test_split`."""
    arguments = at.script.arguments(call, ("test_size", "train_size"))
    share, train_share = (arguments.known.get(f"{part}_size") for part in ("test", "train"))
    if isinstance(train_share, float) and share is None and "test_size" not in arguments.unknown:
        share = round(1 - train_share, 10)
    elif train_share is not None and (not isinstance(share, float) or share + train_share != 1):
        at.draft.lacks(f"line {call.line}: train_size={train_share}", "all rows that are not held out are trained on")
    at.unknown(call, arguments, dict.fromkeys(("test_size", "train_size"), "data.validation_fraction"))
    if isinstance(share, float) and 0 < share < 1:
        at.set(call, "data.validation_fraction", share)
        at.read(call, "data.validation_fraction")
        at.draft.at_end.append(partial(_held_out, call, at.script.arguments(call).nodes.get("seed")))
    elif "test_size" not in arguments.unknown:
        why = "data.validation_fraction is a share of train"
        at.draft.lacks(str(call), why, "data.validation_fraction", "data.validation")


def _held_out(call: Call, seed: ast.expr | None, draft: RunDraft) -> None:
    """Say which rows are held out; data with a validation split hold out none."""
    if draft.rows is not None and "data.validation" not in draft.keys:
        why = "the data have a validation split, so data.validation_fraction holds out no rows of train"
        draft.lacks(str(call), why, "data.validation", "data.train")
    own = f"seed={code_of(seed)}" if seed is not None else "the script's generator"
    where = f"line {call.line}: lockstep draws the held-out rows with its own seed, so they differ from those of {own}"
    draft.notes.append(f"{where}. If the data have a validation split, no rows are held out")


_LIMIT = "data.limit is the maximum number of examples of each split"


def _fewer_trained_on(call: Call, split: str, draft: RunDraft) -> None:
    """Add a gap if the run trains on a split of which only a part is read, whatever the split is called."""
    if draft.keys.get("data.train") == split:
        draft.lacks(str(call), _LIMIT, "data.limit")


def fewer(call: Call, at: Reading) -> None:
    """Read `select`, `take` and `filter`."""
    if call.name == "filter":
        at.draft.lacks(str(call), "data.filter chooses rows by their columns", "data.filter")
    elif (split := split_of(at.script, call.receiver)) is not None and not split.startswith("train"):
        why = "evaluate.limit is the number of validation examples that an evaluation uses, drawn with the seed"
        at.draft.lacks(str(call), why, "evaluate.limit", "data.validation", "data.limit")
        at.draft.at_end.append(lambda draft: _fewer_trained_on(call, split, draft))
    else:
        at.draft.lacks(str(call), _LIMIT, "data.limit")


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
    before = dict(at.renamed)  # one call may swap two names
    for theirs, ours in ((str(old), str(new)) for old, new in pairs.items()):
        at.renamed[ours] = before.get(theirs, theirs)
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
    function = kinds.function_of(at.script, node)
    if at.script.arguments(call).known.get("drop_last_batch"):
        at.draft.lacks(f"line {call.line}: drop_last_batch=True", "all rows are trained on", "data.train")
    if function is None:
        at.draft.unclear(str(call), f"its effect on the rows is unknown: {_WHOLE}", "data.source", "data.train")
        return
    if getattr(function, "decorator_list", None):
        by = function.decorator_list[0]  # type: ignore[union-attr]
        why = f"its decorator {code_of(by)} may change the rows: {_WHOLE}"
        at.draft.unclear(str(call), why, "data.source", "data.train")
        return
    if at.draft.task == "image_classification":
        why = "it makes the pixels, which lockstep makes with the model's image processor, without random changes: if "
        at.draft.unclear(str(call), f"{why}they are alike, give task.processor={{}}", "task.processor")
        return
    nodes = {id(node) for node in ast.walk(function)}
    inside = [call for call in at.script.calls if id(call.node) in nodes]
    tokenising = [c for c in inside if kinds.kind_of(at.script, c.node.func) == "tokenizer"]
    if tokenising:
        at.mapped = True
        for one in tokenising:
            _tokens(one, function, at)
        _labels(function, at)
        checked = MappedFunction(at.script, function, at.draft.task or "classification", partial(_changed, at))
        gaps = len(at.draft.gaps)
        checked.read()
        if at.draft.task == "token_classification" and len(at.draft.gaps) == gaps:
            _try_tags(tokenising[0], function, checked, at)
        if at.draft.task in (None, "classification", "translation", "summarization") and len(at.draft.gaps) == gaps:
            batched = call.name != "map" or at.script.arguments(call).known.get("batched", False)
            _try_texts(tokenising, function, checked, bool(batched), at)
        label_order.note(at.script, function, at.draft)
        if checked.drops_blank:
            at.set(call, "data.drop_missing", True)
        for one in tokenising:
            _padding(one, function, checked, at)
        at.read(call, f"line {tokenising[0].line}: columns and maximum length")
        return
    block = text_blocks.block_length(at.script, function)
    if block is not None:
        at.set(call, "task.block_size", block)
        at.draft.notes.append(
            f"task.packing concatenates all texts, each followed by the tokenizer's end token; line {call.line} "
            "concatenates batches of rows without it, and drops the rest of each batch"
        )
        if text_blocks.is_limited(at.script, function):
            at.draft.at_end.append(lambda draft: loss_means.note_length(draft, f"line {call.line}"))
        at.draft.set("task.packing", True, f"line {call.line}")
        at.read(call, "task.block_size, task.packing")
        return
    name = "a function" if isinstance(function, ast.Lambda) else function.name
    what = f"line {call.line}: {name} of {code_of(call.node)}"
    at.draft.unclear(what, f"it changes the rows: {_WHOLE}", "data.source", "data.train", "task.text", "task.prompt")


def _try_tags(call: Call, function: Scope, checked: MappedFunction, at: Reading) -> None:
    """Try a function that gives tokens the tags of their words on rows of ours."""
    node = at.script.arguments(call, ("text",)).nodes.get("text")
    words = text_columns.column_of(at.script, node)
    other = None if words is None else tried_on_rows.other_tags(at.script, function, words.name, checked.is_mapping)
    if other is not None:
        why = "on init's test rows the tags differ: here the first token of a word has its tag, and the others none"
        _changed(at, other, why, "task.tags")


def _try_texts(calls: list[Call], function: Scope, checked: MappedFunction, batched: bool, at: Reading) -> None:
    """Try a function that tokenises texts, or sources and targets, on rows of ours."""
    columns: dict[str, text_columns.Column] = {}
    for call in calls:
        nodes = at.script.arguments(call, ("text", "text_pair")).nodes
        target = at.draft.task in ("translation", "summarization") and _is_target(call, function)
        for side in (each for each in ("text", "text_pair", "text_target") if each in nodes):
            column = text_columns.column_of(at.script, nodes[side])
            key = "text_target" if target else side
            if column is None or columns.setdefault(key, column) != column:
                return  # the column is unknown, or another branch has another one: refused elsewhere
    node = tried_on_rows.other_texts(at.script, function, columns, batched, checked.is_mapping)
    if node is not None:
        why = f"on rows that init tries, its tokens or labels are not those of the columns: {_WHOLE}"
        _changed(at, node, why, "data.source", "data.train")


def _changed(at: Reading, node: ast.AST, why: str, *by: str) -> None:
    line = getattr(node, "lineno", 0)
    if not any(gap.name.startswith(f"line {line}:") for gap in at.draft.gaps):
        at.draft.unclear(f"line {line}: {code_of(node)}", why, *by)


def _tokens(call: Call, function: Scope, at: Reading) -> None:
    """Read a tokenizer call within a mapped function."""
    arguments = at.script.arguments(call, ("text", "text_pair"))
    task = at.draft.task or "classification"
    length = text_blocks.limited_length(at.script, arguments.nodes.get("max_length"))
    if length is not None and _own_length(at) is None:
        arguments.known["max_length"] = length
        arguments.unknown.pop("max_length", None)
        at.draft.at_end.append(lambda draft: loss_means.note_length(draft, f"line {call.line}"))
    _length(call, arguments.known, arguments.unknown, at, task)
    if arguments.known.get("add_special_tokens", True) is not True or "add_special_tokens" in arguments.unknown:
        why = "texts get the tokenizer's default special tokens"
        at.draft.lacks(f"line {call.line}: add_special_tokens", why, "tokenizer.source")
    cut_ = arguments.known.get("truncation")
    odd = cut_ in ("only_first", "only_second") and task != "question_answering"
    if odd and "text_pair" in arguments.nodes:
        why = "the longer text of a pair is truncated first (longest_first)"
        at.draft.lacks(f"line {call.line}: truncation={cut_!r}", why, "data.max_length")
    at.padded = at.padded or "padding" in arguments.unknown or bool(arguments.known.get("padding"))
    call_arguments.check(at.script, at.draft, call, call_arguments.TRAINERS["tokenizer.__call__"])
    words = arguments.known.get("is_split_into_words", False)
    if task != "token_classification" and (words or "is_split_into_words" in arguments.unknown):
        why = "texts are not split into words before they are tokenised"
        at.draft.lacks(f"line {call.line}: is_split_into_words", why, *_TEXTS)
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


def _padding(call: Call, function: Scope, checked: MappedFunction, at: Reading) -> None:
    """Add a gap if padding has labels."""
    target = "text_target" in at.script.arguments(call, ("text", "text_pair")).nodes or _is_target(call, function)
    if at.draft.task in ("translation", "summarization") and not target:
        return
    remade = any(each.name == "DataCollatorForLanguageModeling" for each in at.script.calls)  # makes its own labels
    if not (remade and at.draft.task == "language_modeling") and checked.learns_padding(call.node):
        why = "the script learns padding, because its labels are not -100; in lockstep padding is never a target"
        at.draft.lacks(f"line {call.line}: padding", why)


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
    if at.padded:
        loss_means.note_positions(at.draft, f"line {call.line}")
    if not arguments.known.get("return_overflowing_tokens"):
        why = "the script truncates a context at the window; lockstep reads all of it, in several windows"
        at.draft.lacks(str(call), why, "task.stride")
    elif "stride" in arguments.unknown:
        at.draft.unclear(f"line {call.line}: stride={arguments.unknown['stride']}", RUNS, "task.stride")
    else:
        at.set(call, "task.stride", arguments.known.get("stride") or 0)
    before = len(at.draft.gaps)
    function.read()
    columns = (function.texts(arguments.nodes.get("text")), function.texts(arguments.nodes.get("text_pair")), answers)
    if len(at.draft.gaps) == before and None not in columns:
        node, late = tried_on_rows.other_windows(at.script, function.function, columns)  # type: ignore[arg-type]
        if node is not None:
            why = "on init's test rows the answer positions differ from those of transformers' recipe, used here"
            _changed(at, node, why, "task.answers")
        elif late:
            at.draft.notes.append(_LATE)


_LATE = (
    "difference: answers that begin at the last token of a window begin at a token after the context in the original, "
    "as in an older recipe of transformers"
)


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
    ours = column.language or at.renamed.get(column.name, column.name)
    at.set(call, f"task.{key}", ours)
    if isinstance(node, ast.Subscript) and text_columns.usual_name(at.script, node.slice) is not None:
        at.draft.at_end.append(lambda draft: _first_column(draft, call, f"task.{key}", ours))
    if column.prefix and key == "source":
        at.set(call, "task.prefix", column.prefix)
    elif column.prefix:
        at.draft.lacks(f"line {call.line}: the prefix {column.prefix!r}", _WHOLE, "data.source", "data.train")


def _first_column(draft: RunDraft, call: Call, key: str, name: str) -> None:
    """Add a gap if the data lack the column NAME of a script's `NAME if NAME in columns else columns[0]`."""
    if draft.keys.get(key) not in (name, None):
        draft.unclear(str(call), f"the data have no column {name!r}, so the script reads the first one", key)


def _length(call: Call, known: dict[str, Any], unknown: dict[str, str], at: Reading, task: str) -> None:
    language = task in ("language_modeling", "masked_language_modeling")
    if language:  # one text per row, unless a later function packs them into blocks
        truncates = bool(known.get("truncation")) or "truncation" in unknown
        at.draft.at_end.append(lambda draft: loss_means.note_end(draft, f"line {call.line}", truncates))
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
        why = "it truncates at the tokenizer's model_max_length, which the script does not show: give data.max_length"
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
    if value is not None and _is_tokenized_before(lengths[0], at):
        return None
    return (value, str(lengths[0])) if isinstance(value, int) else None


def _is_tokenized_before(length: Assignment, at: Reading) -> bool:
    """Return whether rows are tokenized above the line that sets the length, in the same function."""
    script = at.script
    return any(
        call.name in ("map", "set_transform", "with_transform")
        and script.scopes.get(id(call.node)) is script.scopes.get(id(length.node))
        and script.order.get(id(call.node), 0) < script.order.get(id(length.node), 0)
        for call in script.calls
    )


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
            at.draft.set("task.tags", names[0], "the column that is used in addition to the words")


def of_trainer(call: Call, at: Reading) -> None:
    """Read the splits passed to a Trainer."""
    arguments = at.script.arguments(call, trainer.positions(call.name))
    files = {} if "data.source" in at.draft.keys else dict(at.draft.keys)  # of data_files, by split
    train = kinds.split_of(at.script, arguments.nodes.get("train_dataset"))
    if train not in (None, "train", CUT) and str(train).isidentifier():
        at.set(call, "data.train", files.get(f"data.{_SPLITS.get(train, train)}", train))
    evaluated = arguments.nodes.get("eval_dataset")
    tested = kinds.split_of(at.script, evaluated)
    if tested is None and evaluated is not None and at.script.known(evaluated, Unknown) is not None:
        why = "its split was not found; data.validation names it"
        at.draft.unclear(f"line {call.line}: eval_dataset={code_of(evaluated)}", why, "data.validation", decides=False)
    if tested not in (None, CUT, "validation") and str(tested).isidentifier():
        if tested == (train or "train"):
            at.draft.drop(f"line {call.line}: eval_dataset", None, "it is the training split", False)
        elif tested != "train" or "data.validation_fraction" not in at.draft.keys:
            at.set(call, "data.validation", files.get(f"data.{_SPLITS.get(tested, tested)}", tested))
            if tested == "test" and "data.test" in files and "data.test" not in at.draft.by_hand:
                del at.draft.keys["data.test"]  # its file is the one that the script validates on


def cast(call: Call, at: Reading) -> None:
    """Read `cast` and `cast_column`, which are not carried over: the data decide types and the order of labels. Add a
    gap for floats, booleans and types known only when the script runs, because a label's type decides the loss."""
    nodes = at.script.arguments(call, ("column", "feature") if call.name == "cast_column" else ("feature",)).nodes
    node = nodes.get("feature", nodes.get("features"))
    value = at.script.bound(node, last=True) if isinstance(node, ast.Name) else node
    makers = [each for each in ast.walk(value) if isinstance(each, ast.Call)] if value is not None else []
    names = {at.script.origin_of(each.func).rpartition(".")[2] for each in makers}
    types = [
        str(at.script.known(each)) for maker in makers for each in ast.walk(maker) if isinstance(each, ast.Constant)
    ]
    known = names and names <= {"Features", "Value", "ClassLabel", "Sequence", "List", "Audio", "Image", "copy"}
    if not known or any(each.startswith(("float", "double", "bool")) for each in types):
        why = "columns have the types of the data"
        at.draft.unclear(str(call), f"{why}, and a label of another type changes the loss", "data.source", "data.train")
        return
    at.draft.notes.append(f"{call} is not carried over: columns have the types of the data, and labels their order")


def encoded(call: Call, at: Reading) -> None:
    """Read `class_encode_column`, which numbers labels in the order of their texts. So does lockstep, except for
    integers, which it orders by value: 2 before 10."""
    at.read(call, "nothing: lockstep also numbers texts in sorted order, but integers by value, 2 before 10")


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
    "class_encode_column": encoded,
    "cast": cast,
    "cast_column": cast,
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
