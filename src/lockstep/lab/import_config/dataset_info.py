"""LLaMA-Factory datasets, by their entry in dataset_info.json.

In: the file and a name. Out: `data` and the columns of the task. An entry gives the columns, the format of
conversations (`formatting`) and their keys and roles (`tags`). Each of them is converted, or is a gap that decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.data.conversations import ROLES
from lockstep.lab.import_config import table
from lockstep.lab.import_config.table import RunDraft

TEMPLATE = (
    "lockstep reads one prompt column and applies no template to it. Write a file with a column of messages and give "
    "it: --data FILE task.messages=messages; or, if a column has whole prompts: task.prompt=COLUMN"
)
_ENTRY = {"hf_hub_url", "ms_hub_url", "file_name", "subset", "split", "num_samples", "formatting", "ranking"}
_ENTRY |= {"columns", "tags"}
_COLUMNS = {  # our key -> theirs, and the default column name
    "task.text": ("prompt", "instruction"),
    "task.prompt": ("prompt", "instruction"),
    "task.response": ("response", "output"),
    "task.chosen": ("chosen", "chosen"),
    "task.rejected": ("rejected", "rejected"),
}
_JOINED = ("query", "history", "system")  # columns that their prompt is composed of
_TALKS = ("sharegpt", "openai")
_TAGS = {  # and their defaults if an entry has no `tags`
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
_KEYS = ("data.source", "task.messages", "task.prompt", "task.text")  # each of them, given by hand, replaces an entry


def read(file: Path, name: str, draft: RunDraft) -> None:
    """Convert the entry `name`. Errors: `RunError` if the file cannot be read."""
    entry = table.read_keys(file, file.read_text(encoding="utf-8")).get(name)
    if not isinstance(entry, Mapping):
        draft.unclear(f"dataset: {name}", f"{file} has no entry of that name", "data.source")
        return
    origin = f"{file.name}: {name}"
    if (source := entry.get("hf_hub_url")) is not None:
        draft.set("data.source", source, f"{origin}: hf_hub_url")
    elif entry.get("file_name"):
        draft.set("data.source", str(file.parent / str(entry["file_name"])), f"{origin}: file_name")
    else:
        draft.lacks(f"dataset: {name}", f"its entry in {file} has neither file_name nor hf_hub_url", "data.source")
    for theirs, ours in (("subset", "data.config"), ("split", "data.train"), ("num_samples", "data.limit")):
        if entry.get(theirs) not in (None, "train"):
            draft.set(ours, entry[theirs], f"{origin}: {theirs}")
    for other in sorted(entry.keys() - _ENTRY):
        draft.drop(f"{origin}: {other}", entry[other], "unknown key", True, _KEYS)
    _columns(entry, origin, draft)


def _columns(entry: Mapping[str, Any], origin: str, draft: RunDraft) -> None:
    columns = entry.get("columns")
    names: dict[str, Any] = dict(columns) if isinstance(columns, Mapping) else {}
    pairs = draft.task in ("preference", "reward")
    if bool(entry.get("ranking")) is not pairs:
        why = "stages dpo and rm read pairs of answers (ranking: true), and other stages do not"
        draft.drop(f"{origin}: ranking", bool(entry.get("ranking")), why, True, ("task.name", "data.source"))
    formatting = entry.get("formatting") or "alpaca"
    if formatting in _TALKS:
        _talks(entry, names, origin, draft, pairs)
    elif formatting != "alpaca":
        draft.drop(f"{origin}: formatting", formatting, "supported: alpaca, sharegpt and openai", True, _KEYS)
    else:
        _instructions(names, columns is None, origin, draft)


def _instructions(names: dict[str, Any], usual: bool, origin: str, draft: RunDraft) -> None:
    """Convert `formatting: alpaca`. `usual`: the entry names no columns, so Alpaca's are used."""
    for key, (theirs, name) in _COLUMNS.items():
        if key in draft.keys:
            draft.set(key, names.pop(theirs, name), f"{origin}: columns: {theirs}")
    if usual:
        names["query"] = "input"
    for theirs in [name for name in _JOINED if names.get(name)]:
        if theirs != "history" and _is_empty(draft.keys.get("data.source"), names[theirs]):
            draft.read.append(f"{origin}: columns: {theirs}: {names.pop(theirs)} -> nothing: it is empty in every row")
            continue
        why = "lockstep reads one prompt column: join the columns and set task.prompt=..."
        default = ", by default" * (usual and theirs == "query")
        draft.lacks(f"{origin}: columns: {theirs}: {names.pop(theirs)}{default}", why, "task.prompt", "task.messages")
    _others(names, origin, draft)


def _is_empty(source: Any, column: Any) -> bool:
    """Return whether a JSON file has no text in a column; LLaMA-Factory then takes the instruction alone."""
    file = Path(str(source))
    if file.suffix not in (".json", ".jsonl") or not file.is_file():
        return False
    try:
        text = file.read_text(encoding="utf-8")
        rows = json.loads(text) if file.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line]
        return not any(row.get(column) for row in rows)
    except (ValueError, AttributeError, RecursionError):  # not rows of a data set, which planning reports
        return False


def _talks(entry: Mapping[str, Any], names: dict[str, Any], origin: str, draft: RunDraft, pairs: bool) -> None:
    """Convert `formatting: sharegpt`: messages, and for preference pairs the two answers to them."""
    messages = names.pop("messages", "conversations")
    for key in ("task.prompt", "task.response", "task.text"):
        draft.keys.pop(key, None)
    draft.gaps = [gap for gap in draft.gaps if gap.why != TEMPLATE]
    if pairs:
        draft.set("task.prompt", messages, f"{origin}: columns: messages")
        for theirs in ("chosen", "rejected"):
            draft.set(f"task.{theirs}", names.pop(theirs, theirs), f"{origin}: columns: {theirs}")
    else:
        draft.set("task.messages", messages, f"{origin}: columns: messages")
        draft.notes.append(
            "the tokenizer's own chat template is used; for another, write Jinja text into task.chat_template"
        )
    if (tools := names.pop("tools", None)) and not pairs:
        draft.set("task.tools", tools, f"{origin}: columns: tools")
    elif tools:
        draft.lacks(f"{origin}: columns: tools: {tools}", "prompts of pairs have no tools", "task.prompt")
    if system := names.pop("system", None):
        why = "add it as the first message, with role system"
        draft.lacks(f"{origin}: columns: system: {system}", why, "task.messages", "task.prompt")
    _others(names, origin, draft)
    _tags(entry.get("tags"), origin, draft)


def _others(names: Mapping[str, Any], origin: str, draft: RunDraft) -> None:
    for other, column in names.items():
        read_elsewhere = other in ("response", "chosen", "rejected", "prompt", "messages")  # columns of other stages
        if column and not read_elsewhere:
            draft.drop(f"{origin}: columns: {other}", column, "no task reads it", True, _KEYS)


def _tags(tags: Any, origin: str, draft: RunDraft) -> None:
    """Check the names of message keys and roles; unsupported ones are gaps."""
    own_tags: dict[str, Any] = dict(tags) if isinstance(tags, Mapping) else {}
    known = {**_TAGS, **{name: value for name, value in own_tags.items() if value is not None}}
    keys = (known["role_tag"], known["content_tag"])
    why = "messages need role and content (user, assistant, system, tool), or from and value"
    by = ("data.source", "task.messages", "task.prompt")
    if keys not in (("from", "value"), ("role", "content")):
        draft.drop(f"{origin}: tags", f"role_tag {keys[0]}, content_tag {keys[1]}", why, True, by)
        return
    for name, role in _ROLES.items():
        theirs = str(known[name])
        here = ROLES.get(theirs.strip().lower()) if keys[0] == "from" else theirs
        if here != role and (name in own_tags or name in ("user_tag", "assistant_tag")):
            draft.drop(f"{origin}: tags: {name}", f"{theirs}{', by default' * (name not in own_tags)}", why, True, by)
    for name in sorted(own_tags.keys() - _ROLES.keys() - {"role_tag", "content_tag"}):
        if name not in _TAGS:
            draft.drop(f"{origin}: tags: {name}", own_tags[name], "unknown tag", True, by)
        elif keys[0] == "role":  # with from and value, training refuses an unknown role and names the row
            draft.drop(f"{origin}: tags: {name}", own_tags[name], why, True, by)
