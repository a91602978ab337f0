"""Rows -> examples of tokens and labels, text by text, with the model's own tokenizer.

In: a run file as a mapping, a tokenizer, rows. Out: examples as mappings, in the order of the rows: `input_ids`, and
what the task's loss compares with.
"""

from typing import Any

from lockstep.plain.rows import NotCovered, Row, columns, get

IGNORED = -100


def examples(run: dict, tokenizer: Any, rows: list[Row], labels: list[Any]) -> list[dict[str, Any]]:
    """All examples of some rows. `labels`: the values of labels, in the order of their codes."""
    task, most = run["task"], run["data"]["max_length"]
    if task["name"] == "language_modeling":
        return _language(task, tokenizer, rows)
    make = {"classification": _classification}[task["name"]]
    return [make(task, tokenizer, row, most, labels) for row in rows]


def end_of(tokenizer: Any) -> int | None:
    """The token that ends a text."""
    return tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def values_of_labels(run: dict, rows: list[Row]) -> list[Any]:
    """What labels are called in the data, in the order of their codes: sorted, or as the run file names them."""
    task, (_, names) = run["task"], columns(run["task"])
    if task["name"] == "token_classification":
        return sorted({tag for row in rows for tag in get(row, names[0])})
    if task["name"] != "classification" or task["regression"]:
        return []
    if len(names) > 1:
        return list(names)
    held = [get(row, names[0]) for row in rows]
    found = sorted({label for each in held for label in each} if task["multi_label"] else set(held))
    if isinstance(found[0], float) and not task["multi_label"]:
        found = [int(value) for value in found]
    named = task["label_names"]
    return list(range(len(named))) if named and found[0] >= 0 and found[-1] < len(named) else found


# -- one example a row -------------------------------------------------------------------------------------------------


def _classification(task: dict, tokenizer: Any, row: Row, most: int, labels: list[Any]) -> dict[str, Any]:
    texts, names = columns(task)
    found = tokenizer(*(get(row, column) for column in texts), truncation=True, max_length=most)
    instead = tokenizer.pad_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    example = {"input_ids": found["input_ids"] or [instead]}
    if len(texts) == 2 and "token_type_ids" in found:
        example["token_type_ids"] = found["token_type_ids"] or [0]
    held = [get(row, name) for name in names]
    if task["regression"]:
        return example | {"labels": [float(n) for n in (held[0] if isinstance(held[0], list) else held)]}
    if task["multi_label"]:
        has = [bool(value) for value in held] if len(names) > 1 else [label in held[0] for label in labels]
        return example | {"labels": [float(each) for each in has]}
    value = str(held[0]).lower() if isinstance(held[0], bool) and held[0] not in labels else held[0]
    return example | {"labels": labels.index(value)}


# -- causal language models --------------------------------------------------------------------------------------------


def _language(task: dict, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
    """Texts one after the other in full blocks, or each by itself; a token's label is the token itself, as in
    transformers, and IGNORED where it is only read."""
    size, alone = task["block_size"], not task["cross_documents"]
    texts = [_text(task, tokenizer, row) for row in rows]
    if task["packing"] if task["packing"] is not None else not (task["prompt"] or task["messages"]):
        ids = [token for text, _ in texts for token in text]
        wanted = [IGNORED if alone and place == 0 else label for _, known in texts for place, label in enumerate(known)]
        places = [place for text, _ in texts for place in range(len(text))]
        return _blocks(ids, wanted, size, places if alone else None)
    if task["prompt"] or task["messages"]:
        texts = [(ids[: size + 1], known[: size + 1]) for ids, known in texts]
    return [example for ids, known in texts for example in _blocks(ids, known, size, None)]


def _blocks(ids: list[int], labels: list[int], size: int, places: list[int] | None) -> list[dict[str, Any]]:
    """Blocks that share a token: the last label of one is the first token of the next. `labels` are shifted here: the
    label at a place is the token that follows. A block with nothing to predict is none."""
    found = []
    for start in range(0, len(ids) - 1, size):
        stop = min(start + size, len(ids) - 1)
        block: dict[str, Any] = {"input_ids": ids[start:stop], "next": labels[start + 1 : stop + 1]}
        if places is not None:
            within = places[start:stop]
            block["position_ids"] = [min(place, i) for i, place in enumerate(within)]
        if any(label != IGNORED for label in block["next"]):
            found.append(block)
    return found


def _text(task: dict, tokenizer: Any, row: Row) -> tuple[list[int], list[int]]:
    """The tokens of a row, closed by the end token, and their labels."""
    end = end_of(tokenizer)
    if task["messages"]:
        raise NotCovered("task.messages: plain has no conversations yet")
    if not task["prompt"]:
        ids = list(tokenizer(get(row, task["text"]), verbose=False)["input_ids"])
        ids += [end] if end is not None and ids and ids[-1] != end else []
        ids = ids or ([end] if end is not None else [])
        return ids, list(ids)
    asked = list(tokenizer(get(row, task["prompt"]), verbose=False)["input_ids"])
    while asked and asked[-1] == end:
        asked.pop()
    told = list(tokenizer(get(row, task["response"]), add_special_tokens=False, verbose=False)["input_ids"])
    told += [end] if end is not None and told[-1:] != [end] else []
    return asked + told, [IGNORED] * len(asked) + told
