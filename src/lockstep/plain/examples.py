"""The inputs of the plain reference: the rows of a run, and their examples of tokens and labels, made text by text with
the model's tokenizer.

In: a run file as a mapping, with its defaults filled in, and a tokenizer's folder. Out: a `Plain`, which reads each
part once, on first use; examples as mappings, in the order of the rows: `input_ids`, and the targets of the task's
loss.
"""

import base64
import inspect
import io
import json
import re
from collections.abc import Callable
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from lockstep.plain import module
from lockstep.plain.rows import SOURCE, TASKS, UNFILTERED_TRAIN, NotCovered, Row, columns, get, read_splits, row_key

IGNORED = -100  # label to ignore, as in transformers
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "observation": "tool"}


class Plain:
    """The inputs of one run. `rows`: raw rows by split, if already read. `labels`: the label values in the order of
    their class indices, if the rows do not contain all of them."""

    tokenizer: Any = None  # of text tasks
    target_tokenizer: Any = None  # of translation targets: `tokenizer`, or their own
    processor: Any = None  # of image tasks
    reference: Any = None  # of preference tasks: the model before training
    libraries = False  # compute losses by the libraries that define them; importing them takes seconds

    def __init__(
        self, run: dict, tokenizer: str, rows: dict[str, list[Row]] | None = None, labels: list[Any] | None = None
    ) -> None:
        from transformers import AutoImageProcessor, AutoTokenizer

        self.run, own = run, Path(tokenizer) / "target"
        self.__dict__ |= {k: v for k, v in (("splits", rows), ("labels", labels)) if v is not None}
        if run["task"]["name"] == "image_classification":
            self.processor = AutoImageProcessor.from_pretrained(tokenizer, backend="pil")
        elif not self.own_model:
            trusted = {"trust_remote_code": run["model"]["trust_remote_code"]}
            self.tokenizer = AutoTokenizer.from_pretrained(tokenizer, **trusted)
            self.target_tokenizer = AutoTokenizer.from_pretrained(own, **trusted) if own.is_dir() else self.tokenizer

    @property
    def own_model(self) -> bool:
        """Whether model, data and loss are the user's own."""
        return bool(self.run["task"]["name"] == "module")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the model before training (the reference of DPO)."""
        return bool(self.run["task"]["name"] == "preference")

    @cached_property
    def config(self) -> Any:
        """The model's config, without the entries of the run file."""
        section = self.run["model"]
        if not section["source"]:
            return transformers.CONFIG_MAPPING[section["type"]]()
        return transformers.AutoConfig.from_pretrained(section["source"], revision=section["revision"])

    @property
    def reads_last(self) -> bool:
        """Whether the model classifies by the vector of the last place, so that padding must be on the left."""
        classifies = self.run["task"]["name"] in ("classification", "reward")
        if not classifies or self.config.model_type != "xlnet":
            return False
        return (self.run["model"]["config"] or {}).get("summary_type", self.config.summary_type) != "first"

    @cached_property
    def reads_types(self) -> bool:
        """Whether the tokenizer writes `token_type_ids` and the model's forward takes them; `Trainer` leaves out what a
        forward does not take."""
        if "token_type_ids" not in self.tokenizer.model_input_names:
            return False
        with torch.device("meta"):
            model = getattr(transformers, f"AutoModel{TASKS[self.run['task']['name']][1]}").from_config(self.config)
        return "token_type_ids" in inspect.signature(model.forward).parameters

    @cached_property
    def splits(self) -> dict[str, Any]:
        """The rows of all splits; for the task `module`, the items of the user's data sets."""
        return module.read_splits(self.run) if self.own_model else read_splits(self.run, self.tokenizer)

    @cached_property
    def labels(self) -> list[Any]:
        """The label values, in the order of their class indices."""
        return values_of_labels(self.run, self.splits.get(UNFILTERED_TRAIN, self.splits["train"]))

    @cached_property
    def class_weights(self) -> list[float] | None:
        """The weight of each label in the loss, rounded to 2^-20."""
        task, setting = self.run["task"], self.run["task"].get("class_weights")
        if not setting:
            return None
        if isinstance(setting, dict):
            known = (
                task["label"]
                if isinstance(task["label"], list)
                else sorted(v for v in self.labels if isinstance(v, int))
            )
            names = dict(zip(known, task["label_names"] or (), strict=False))
            weights: Any = [setting.get(names.get(value, str(value)), 1.0) for value in self.labels]
        else:  # balanced, as in scikit-learn
            encoded = [each["labels"] for each in self.examples("train")]
            of = np.sum(encoded, 0) if task["multi_label"] else np.bincount(encoded, minlength=len(self.labels))
            weights = (len(encoded) - of) / of if task["multi_label"] else len(encoded) / (len(of) * of)
        return [max(1, round(weight * 2**20)) / 2**20 for weight in weights]

    @cache  # noqa: B019 - lives as long as the job
    def examples(self, split: str) -> list[dict]:
        """Return all examples of a split. Errors: `NotCovered`."""
        if self.run["data"]["stream"] and split == "train" and self.run["task"].get("packing"):
            raise NotCovered("data.stream: blocks hold texts of one chunk of a shard, which only the run's index knows")
        return self.encode(self.splits[split])

    def encode(self, rows: list[Row]) -> list[dict]:
        """Return the examples of rows. Errors: `NotCovered`."""
        return encode_rows(self, rows)


def encode_rows(job: Any, rows: list[Row]) -> list[dict[str, Any]]:
    """Return the examples of rows. No example mixes texts of two sources. `job`: a `Plain`."""
    task, max_length = job.run["task"], job.run["data"]["max_length"]
    if task["name"] == "module":
        return [module.batch_of(job.run, rows)]
    if not task["name"].endswith("language_modeling"):
        return [MAKERS[task["name"]](job, row, task, max_length) for row in rows]
    make = _hidden if task["name"].startswith("masked") else _language
    return [example for _, group in groupby(rows, lambda row: row.get(SOURCE)) for example in make(job, list(group))]


def end_token(tokenizer: Any) -> Any:
    """Return the token that ends a text, or None."""
    return tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def encode(tokenizer: Any, *texts: str, **options: Any) -> list[int]:
    """Return the tokens of a text or a pair of texts; if there are none, the end token."""
    return list(tokenizer(*texts, verbose=False, **options)["input_ids"]) or append_end(tokenizer, [])


def append_end(tokenizer: Any, ids: list[int]) -> list[int]:
    """Append the end token, unless `ids` ends with it."""
    return ids if end_token(tokenizer) in (None, *ids[-1:]) else [*ids, end_token(tokenizer)]


def strip_end(tokenizer: Any, ids: list[int]) -> list[int]:
    """Remove end tokens from the end, in place."""
    while ids and ids[-1] == end_token(tokenizer):
        ids.pop()
    return ids


def values_of_labels(run: dict, rows: list[Row]) -> list[Any]:
    """Return the label values in the data, in the order of their class indices.

    The order is that of a pretrained model whose config names all labels, up to case and whitespace (if it names more,
    the model must have a head of the task's kind); else `_own_order`. Labels that the data lack keep the model's name.
    Errors: `NotCovered`."""
    values, task, section = _own_order(run, rows), run["task"], run["model"]
    if not (values and section["source"]):
        return values
    config = transformers.AutoConfig.from_pretrained(section["source"], revision=section["revision"])
    stored = config.get_config_dict(section["source"], revision=section["revision"])[0]
    if stored.get("label2id") and not stored.get("id2label"):  # transformers then calls the outputs LABEL_0, LABEL_1
        model_names = sorted(stored["label2id"], key=stored["label2id"].get)
    else:
        model_names = [name for _, name in sorted(config.id2label.items())]
    head = any(name.endswith(TASKS[task["name"]][1]) for name in config.architectures or ())
    for normalize in (str, lambda name: " ".join(name.split()).casefold()):
        names = task.get("label_names") or map(str, values)
        by_code = {normalize(name): value for name, value in zip(names, values, strict=True)}
        codes = [normalize(name) for name in model_names]
        if {*by_code} <= {*codes} and (head or len(by_code) == len(codes)) and len({*codes}) == len(codes):
            return [by_code.get(code, name) for code, name in zip(codes, model_names, strict=True)]
    if isinstance(values[0], int) and not task["label_names"] and "LABEL_0" not in model_names:
        raise NotCovered("task.label: plain does not read label names that a data set declares")
    return values


def tag_of(value: Any) -> str:
    """Return a tag as a string. Integers in a list with missing values are floats: 1.0 becomes "1"."""
    return str(int(value) if isinstance(value, float) else value)


def _own_order(run: dict, rows: list[Row]) -> list[Any]:
    """Return the label values in the data, sorted, or in the order of the run file."""
    task, (_, names) = run["task"], columns(run["task"])
    if task["name"] == "token_classification":
        tags = sorted({tag_of(tag) for row in rows for tag in get(row, names[0])})
        counted = all(str(int(tag)) == tag for tag in tags if tag.isdecimal()) and all(map(str.isdecimal, tags))
        return sorted(tags, key=int) if counted else tags
    if not task["name"].endswith("classification") or task.get("regression"):
        return []
    if len(names) > 1:
        return list(names)
    row_labels = [get(row, names[0]) for row in rows]
    values = [label for labels in row_labels for label in labels] if task.get("multi_label") else row_labels
    known = sorted({int(value) if isinstance(value, float) else value for value in values})
    numbers = [*range(len(task["label_names"] or ()))]
    return numbers if {*known} <= {*numbers} else known


# -- one example per row -----------------------------------------------------------------------------------------------


def _classification(job: Any, row: Row, task: dict, max_length: int) -> dict[str, Any]:
    texts, names = columns(task)
    encoded = job.tokenizer(*(get(row, column) for column in texts), truncation=True, max_length=max_length)
    fallback_id = job.tokenizer.pad_token_id if job.tokenizer.eos_token_id is None else job.tokenizer.eos_token_id
    example = {"input_ids": encoded["input_ids"] or [fallback_id]}
    if job.reads_types and "token_type_ids" in encoded:
        example["token_type_ids"] = encoded["token_type_ids"] or [0]
    labels = [get(row, name) for name in names]
    if task["multi_label"]:
        positive = labels[0] if len(names) == 1 else [name for name, value in zip(names, labels, strict=True) if value]
        labels = [label in positive for label in job.labels]
    if task["multi_label"] or task["regression"]:
        return example | {"labels": [float(n) for n in (labels[0] if isinstance(labels[0], list) else labels)]}
    return example | {"labels": job.labels.index(labels[0])}


def _image(job: Any, row: Row, task: dict, max_length: int) -> dict[str, Any]:
    """Return an image from the model's processor, float32 [C, H, W], and its label."""
    from PIL import Image, ImageOps

    image = get(row, task["image"])  # from the Hub, already an image
    if isinstance(image, dict):
        image = base64.b64decode(image["base64"]) if "base64" in image else image["bytes"]
    image = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    return {
        "pixel_values": job.processor(ImageOps.exif_transpose(image).convert("RGB"), return_tensors="pt").pixel_values[
            0
        ],
        "labels": job.labels.index(get(row, task["label"])),
    }


def _tags(job: Any, row: Row, task: dict, max_length: int) -> dict[str, Any]:
    """Return tokens and tags; only the first token of a word is labelled."""
    words, tags = map(str, get(row, task["words"])), [*map(tag_of, get(row, task["tags"]))]
    encoded = job.tokenizer([*words], is_split_into_words=True, truncation=True, max_length=max_length)
    labels = [IGNORED] * len(encoded["input_ids"])
    for word in {*encoded.word_ids()} - {None}:
        labels[encoded.word_ids().index(word)] = job.labels.index(tags[word])
    types = {"token_type_ids": encoded["token_type_ids"]} if job.reads_types and "token_type_ids" in encoded else {}
    return {"input_ids": encoded["input_ids"], "next": labels} | types


def _pair(job: Any, row: Row, task: dict, max_length: int) -> dict[str, Any]:
    """Return the tokens of a source and its target."""
    source, target = task["prefix"] + get(row, task["source"]), get(row, task["target"])
    return {
        "input_ids": encode(job.tokenizer, source, truncation=True, max_length=max_length),
        "next": encode(
            job.target_tokenizer, text_target=target, truncation=True, max_length=task["target_length"] or max_length
        ),
        "reference": target,
    }


def _question(job: Any, row: Row, task: dict, max_length: int) -> dict[str, Any]:
    """Return a question's windows as in transformers' script. A window without the answer has token 0 as its target."""
    both = get(row, task["question"]).strip(), get(row, task["context"])
    question = job.tokenizer(both[0], add_special_tokens=False, verbose=False)["input_ids"]
    room = max_length - len(question) - job.tokenizer.num_special_tokens_to_add(pair=True)
    encodings = job.tokenizer(
        *both,
        truncation="only_second",
        max_length=max_length,
        stride=task["stride"] if task["stride"] < room else room // 2,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    answers, windows = get(row, task["answers"]) or [], list[dict[str, Any]]()
    if isinstance(answers, list):
        answers = {key: [answer[key] for answer in answers] for key in ("text", "answer_start")}
    for part in range(len(encodings["input_ids"])):
        spans, sides, ends = encodings["offset_mapping"][part], encodings.sequence_ids(part), (0, 0)
        inside = [place for place, side in enumerate(sides) if side == 1]
        for text, start in zip(answers["text"][:1], answers["answer_start"][:1], strict=True):  # the first: the target
            if spans[inside[0]][0] <= start and spans[inside[-1]][1] >= start + len(text):
                ends = (
                    max(place for place in inside if spans[place][0] <= start),
                    min(place for place in inside if spans[place][1] >= start + len(text)),
                )
        inputs = {name: encodings[name][part] for name in ("input_ids", "token_type_ids") if name in encodings}
        windows.append(inputs | {"ends": ends, "spans": {place: spans[place] for place in inside}})
    return {"windows": windows, "context": both[1], "right": answers["text"]}


def _texts(job: Any, row: Row, task: dict, max_length: int) -> dict[str, Any]:
    """Return the texts of a row and their similarity score."""
    texts = [get(row, column) for column in columns(task)[0]]
    low, high = task["score_range"]
    return {
        "texts": [_typed(job, text, max_length) for text in texts],
        "score": (get(row, task["score"]) - low) / (high - low) if task["score"] else None,
        "names": [row_key({"text": text}, ["text"]) for text in texts],  # equal for equal texts
    }


def _typed(job: Any, text: str, max_length: int) -> dict[str, list[int]]:
    """Return the tokens of a text, with their types if the model reads them."""
    encoded = job.tokenizer(text, truncation=True, max_length=max_length, verbose=False)
    ids = list(encoded["input_ids"]) or append_end(job.tokenizer, [])
    if job.reads_types and "token_type_ids" in encoded:
        return {"input_ids": ids, "token_type_ids": encoded["token_type_ids"] or [0] * len(ids)}
    return {"input_ids": ids}


def _answers(job: Any, row: Row, task: dict, max_length: int) -> dict[str, Any]:
    """Return a prompt with each of two answers; only answer tokens are targets."""
    spans = []
    for key in ("chosen", "rejected"):
        prompt, answer = task["prompt"] and get(row, task["prompt"]), get(row, task[key])
        if task["conversations"]:
            before, after = ([{"role": r, "content": t}] if isinstance(t, str) else list(t or ())
                             for r, t in (("user", prompt), ("assistant", answer)))  # fmt: skip
            ids, known = _turns(job, [*before, *after], None, {})[-1]
        else:
            prompt_ids = strip_end(job.tokenizer, encode(job.tokenizer, prompt)) if prompt is not None else []
            answer_ids = append_end(job.tokenizer, encode(job.tokenizer, answer, add_special_tokens=prompt is None))
            ids, known = prompt_ids + answer_ids, [False] * len(prompt_ids) + [True] * len(answer_ids)
        targets = [token if learned else IGNORED for token, learned in zip(ids, known, strict=True)]
        spans.append({"input_ids": ids[:max_length], "next": [*targets[1:max_length], IGNORED]})
    return {"answers": spans}


MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "classification": _classification,
    "image_classification": _image,
    "token_classification": _tags,
    **dict.fromkeys(("translation", "summarization"), _pair),
    "question_answering": _question,
    "embedding": _texts,
    **dict.fromkeys(("preference", "reward"), _answers),
}


# -- language models ---------------------------------------------------------------------------------------------------


def _language(job: Any, rows: list[Row]) -> list[dict[str, Any]]:
    """Return blocks of concatenated texts (with packing), or of each text separately."""
    task = job.run["task"]
    size, texts = task["block_size"], [text for row in rows for text in _documents(job, row, task)]
    if not task["packing"]:
        limit = size + 1 if task["prompt"] or task["messages"] else None
        return [block for ids, known in texts for block in _blocks(ids[:limit], known[:limit], size)]
    separate = not task["attend_across_documents"]
    known = [t and not (separate and place == 0) for _, learned in texts for place, t in enumerate(learned)]
    places = [place for ids, _ in texts for place in range(len(ids))]
    return _blocks([token for ids, _ in texts for token in ids], known, size, places if separate else None)


def _blocks(ids: list[int], known: list[bool], size: int, places: list[int] | None = None) -> list[dict[str, Any]]:
    """Return blocks with the next token of each position as target; the last token is only a target.

    `known`: whether a token is a target. `places`: its position in its text, if attention is limited to one text."""
    blocks, labels = [], [token if learned else IGNORED for token, learned in zip(ids, known, strict=True)]
    for start in range(0, len(ids) - 1, size):
        stop = min(start + size, len(ids) - 1)
        block: dict[str, Any] = {"input_ids": ids[start:stop], "next": labels[start + 1 : stop + 1]}
        if places is not None:
            block["position_ids"] = [min(place, i) for i, place in enumerate(places[start:stop])]
        blocks += [block] * any(label != IGNORED for label in block["next"])
    return blocks


def _documents(job: Any, row: Row, task: dict) -> list[tuple[list[int], list[bool]]]:
    """Return the texts of a row as (tokens, whether each is a target)."""
    if task["messages"]:
        tools = get(row, task["tools"]) if task["tools"] else None
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools or None
        return _turns(job, get(row, task["messages"]), tools, task["template_arguments"])
    if not task["prompt"]:
        ids = append_end(job.tokenizer, encode(job.tokenizer, get(row, task["text"])))
        return [(ids, [True] * len(ids))]
    prompt = strip_end(job.tokenizer, encode(job.tokenizer, get(row, task["prompt"])))
    answer = append_end(job.tokenizer, encode(job.tokenizer, get(row, task["response"]), add_special_tokens=False))
    return [(prompt + answer, [False] * len(prompt) + [True] * len(answer))]


def _turns(job: Any, row: list[dict], tools: Any, arguments: dict) -> list[tuple[list[int], list[bool]]]:
    """Return a conversation rendered by the chat template as (tokens, whether each is a target).

    Targets are the spans that the template marks by `{% generation %}`, or else the assistant's turns after their
    generation prompt; for preference pairs only the last turn. With turns: per_turn, one example per turn."""
    task, tokenizer, conversations = job.run["task"], job.tokenizer, []
    messages = [
        {"role": ROLES.get(str(m.get("from")), m.get("from")), "content": m.get("value") or ""}
        | {key: value for key, value in m.items() if value is not None and key not in ("from", "value")}
        for m in row
    ]
    common = {"tools": tools, "chat_template": task["chat_template"]} | arguments
    marked = (
        re.search(r"{%-?\s*generation\s*-?%}", tokenizer.get_chat_template(task["chat_template"], tools)) is not None
    )

    def length(count: int, **options: bool) -> int:
        return len(tokenizer.apply_chat_template(messages[:count], tokenize=False, **options, **common)) if count else 0

    assistant_turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    examples = [(len(messages), assistant_turns if task["name"] == "language_modeling" else assistant_turns[-1:])]
    if task.get("turns") == "per_turn":
        examples = [(place + 1, [place]) for place in assistant_turns]
    for count, places in examples:
        offsets = {"return_offsets_mapping": True}
        encoded = tokenizer.apply_chat_template(
            messages[:count], return_assistant_tokens_mask=marked, tokenizer_kwargs=offsets, **common
        )
        spans = [(length(place, add_generation_prompt=True), length(place + 1)) for place in places]
        if marked:  # the template marks the targets; with per_turn, earlier turns are not targets
            spans = [(length(places[0]), length(count))]
        marks = encoded.get("assistant_masks", [1] * len(encoded["input_ids"]))
        ends = [end if mark else 0 for mark, (_, end) in zip(marks, encoded["offset_mapping"], strict=True)]
        conversations.append((encoded["input_ids"], [any(a < end <= b for a, b in spans) for end in ends]))
    return conversations


def _hidden(job: Any, rows: list[Row]) -> list[dict[str, Any]]:
    """Return examples of a masked language model, before masking."""
    task, size = job.run["task"], job.run["data"]["max_length"]
    if not task["packing"]:
        examples = []
        for row in rows:
            text = [get(row, task["text"])]
            parts = job.tokenizer(text, truncation=True, max_length=size, return_overflowing_tokens=True)
            names = [name for name in ("input_ids", "token_type_ids") if name in parts][: 1 + job.reads_types]
            examples += [{name: parts[name][part] for name in names} for part in range(len(parts["input_ids"]))]
        return examples
    ids = [token for row in rows for token in append_end(job.tokenizer, encode(job.tokenizer, get(row, task["text"])))]
    blocks, types = _blocks(ids, [True] * len(ids), size), job.tokenizer("a").get("token_type_ids")
    if types is None or any(types) or not job.reads_types:
        return blocks
    return [block | {"token_type_ids": [0] * len(block["input_ids"])} for block in blocks]
