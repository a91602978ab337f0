"""Draws run files over the whole grammar: one value per feature, preferring pairs of values that no case had yet.

Plain seeded drawing, and not Hypothesis. A case takes seconds and starts processes, so that what counts is which cases
are tried: each is the one of several draws with the most new pairs of features, which Hypothesis does not offer. A
failure is shrunk feature by feature towards the plainest run (`shrink.py`), in tens of tries where Hypothesis takes
hundreds. A case is repeated by its seed and number alone, whatever Hypothesis's version and database, and a long run
goes on after an interruption.

In: a seed. Out: cases: feature -> value, where the first value of a feature is the plainest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations
from typing import Any

from crossed import families

Case = dict[str, Any]  # feature -> value; JSON holds it
CANDIDATES = 6  # draws of which the one with the most new pairs is taken
FREE = 0.12  # share of cases that are drawn of anything with anything, and are mostly refused

# Task as drawn -> head of its model, kind of rows.
TASKS: dict[str, tuple[str, str]] = {
    "classification": ("classification", "labelled"),
    "classification pair": ("classification", "paired"),
    "classification multi_label": ("classification", "multi_label"),
    "classification regression": ("classification", "numbers"),
    "token_classification": ("token_classification", "tagged"),
    "language_modeling packed": ("causal", "texts"),
    "language_modeling documents": ("causal", "texts"),
    "language_modeling prompts": ("causal", "prompts"),
    "language_modeling messages": ("causal", "messages"),
    "masked_language_modeling packed": ("masked", "texts"),
    "masked_language_modeling documents": ("masked", "texts"),
    "question_answering": ("question_answering", "questions"),
    "embedding pairs": ("embedding", "pairs"),
    "embedding scored": ("embedding", "scored"),
    "preference": ("causal", "preferences"),
    "reward": ("classification", "preferences"),
    "translation": ("seq2seq", "translations"),
    "summarization": ("seq2seq", "summaries"),
    "image_classification": ("image", "images"),
    "module": ("module", "items"),
}
ALONE = [("single", 1)]
ENGINES = [
    *(("ddp", 2), ("allreduce", 2), ("hf_accelerate", 2), ("hf_trainer", 2), ("fsdp2 step", 2)),
    *(("fsdp2 micro_batch", 2), ("pipeline", 2), ("ddp tree", 3), ("ddp", 3), ("allreduce", 4), ("fsdp2 step", 3)),
    *(("fsdp2 micro_batch", 3), ("pipeline gpipe", 2), ("ddp", 1), ("fsdp2 step", 1), ("fsdp2 tree", 4)),
    *(("hf_accelerate fsdp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("pipeline stages", 4)),
    *(("zero1", 3), ("zero2", 3), ("zero3", 3), ("hf_accelerate zero2", 2), ("hf_accelerate zero3", 3)),
]
WAYS = ALONE + ENGINES
TENSOR = [("fsdp2 tensor", 2), ("fsdp2 tensor", 4), ("fsdp2 tensor4", 4)]  # ranks that share the leaves out


def _of_task(case: Case) -> list[str]:
    """Return the possible options of a task, one per entry."""
    return {
        "classification": [
            "",
            "class_weights",
            "focal",
            "label_smoothing",
            "label_smoothing weights",
            "threshold",
            "gamma",
        ],
        "classification multi_label": ["", "class_weights", "focal", "label_smoothing"],
        "classification regression": ["", "mae"],
        "image_classification": ["", "class_weights", "focal", "label_smoothing", "threshold"],
        "language_modeling packed": ["", "apart", "character"],
        "language_modeling messages": ["", "each turn"],
        "masked_language_modeling packed": ["", "whole_word_mask", "half"],
        "masked_language_modeling documents": ["", "whole_word_mask", "half"],
        "question_answering": ["", "unanswerable", "answer_tokens"],
        "embedding pairs": ["", "negative", "negatives", "last_token", "cls", "scale"],
        "embedding scored": ["", "range"],
        "preference": ["", "ipo", "hinge", "simpo", "label_smoothing", "few of the reference"],
        "reward": ["", "center"],
        "translation": ["", "label_smoothing", "two tokenizers", "target_length", "prefix"],
        "summarization": ["", "label_smoothing", "beams"],
    }.get(case["task"], [""])


def _families(case: Case) -> list[str]:
    names = families.known()[TASKS[case["task"]][0]]
    return names[:1] * max(1, len(names) // 3) + names


def _shapes(case: Case) -> list[str]:
    return ["varied", "varied", "equal", "one_token", "long", "ragged", "unicode", "blank"]


def _labels(case: Case) -> list[str]:
    if case["task option"] == "threshold":
        return ["two"]
    return ["few", "few", "many", "one_each"] if "classification" in case["task"] else ["few"]


def _reading(case: Case) -> list[str]:
    if case["task"] == "module":
        return ["files"] * 4 + ["limit", "fraction"]
    if case["task"] == "image_classification":
        cut = ["test", "cut", "cut test", "split_column", "filter", "limit", "deduplicate", "overlap"]
        return ["files"] * 3 + ["folders"] * 3 + cut + ["mixed", "mixed weights", "mixed filter"]
    flat = TASKS[case["task"]][1] in ("labelled", "paired", "numbers", "texts", "prompts", "pairs", "summaries")
    plain = ["files"] * 6 + ["test", "cut", "cut test", "parquet", "split_column", "filter", "filter words", "limit"]
    plain += ["deduplicate", "overlap", "mixed", "mixed weights", "streamed", "streamed mixed", "mixed filter"]
    return plain + ["csv"] * flat


def _usually(*values: Any, plainest: int = 3) -> Callable[[Case], list[Any]]:
    """Return a function that lists the values, the first one `plainest` times, so that it is drawn more often."""
    return lambda case: [values[0]] * plainest + list(values[1:])


def _ways(case: Case) -> list[tuple[str, int]]:
    return ENGINES + ALONE + TENSOR * (4 if case["leaves"] > 1 else 1)


# What changes little by itself, and is to go with everything else.
ALSO = ("epochs", "warmup_fraction", "betas", "weight_decay", "sdc_check", "fingerprint", "rebalance")
ALSO += ("offload", "best", "min_delta", "nonfinite", "keep", "masters", "workers")

# Feature -> the values that it may have beside those that were drawn before it, as often as they are to be drawn.
FEATURES: dict[str, Callable[[Case], list[Any]]] = {
    "task": lambda case: list(TASKS),
    "task option": lambda case: [*_of_task(case), ""],
    "family": _families,
    "dropout": _usually(False, True, plainest=2),
    "shape": _shapes,
    "labels": _labels,
    "reading": _reading,
    "drop_missing": lambda case: [True] * 5 + [False] if case["shape"] == "blank" else [False] * 3 + [True],
    "padding": _usually("none", "batch", plainest=2),
    "group_by_length": _usually(1, 2, plainest=5),
    "origin": _usually("scratch", "pretrained", plainest=2),
    "tokenizer": _usually("bpe", "wordpiece", "wordlevel", "unigram", "left", "framed", "no pad", plainest=4),
    "optimizer": _usually("adamw", "sgd", "lion", "adafactor", "muon", "schedule_free", "adamw_8bit", plainest=3),
    "groups": _usually("none", "group", "layerwise_lr_decay", "freeze", plainest=4),
    "schedule": _usually("linear", "constant", "cosine", "inverse_sqrt", "polynomial", "wsd", "one_cycle", "points"),
    "warmup": _usually(0, 2, plainest=1),
    "clip": _usually(1.0, 0.05, None, plainest=1),
    "precision": _usually("fp32", "bf16", "fp16", plainest=5),
    "dtype": _usually("float32", "bfloat16", plainest=2),
    "adapter": _usually("none", "lora", "lora float32", "lora adapter", "dora", "ia3", plainest=4),
    "quantization": lambda case: ["none"] if case["adapter"] == "none" else ["none", "none", "nf4", "fp4"],
    "checkpointing": _usually(False, True, plainest=3),
    "compile": _usually(False, True, plainest=150),
    "loss_chunk": _usually(None, 5, plainest=3),
    "average": _usually("none", "ema", "ema no warm-up", "last", plainest=6),
    "cut": _usually((8, 4), (9, 3), (6, 6), (8, 1), (5, 4), plainest=3),
    "attention": _usually(None, "eager", plainest=6),
    "evaluate": _usually("end", "every", "best", "patience", "limit", plainest=2),
    "evaluated at once": _usually(2, None, 3, plainest=2),
    "exact": lambda case: [True] * 12 + [False] + ["portable"] * 2,
    "threads": lambda case: [1, 2] if case["exact"] == "portable" else [1],  # of the second way
    "leaves": _usually(1, 2, 4, plainest=2),
    "first": _ways,
    "second": lambda case: [case["first"]] + _ways(case) * bool(case["exact"]),  # else the strategy is arithmetic
    "stop": _usually(2, 1, 3, plainest=1),
    "how": _usually("stop", "kill", plainest=2),
    "steps": _usually(5, 4, plainest=2),
    "also": _usually("nothing", *ALSO, plainest=20),
    "seed": _usually(0, 7, plainest=1),
}


def plainest(case: Case) -> Case:
    """Return the case with the plainest value of each feature, for the same task."""
    found: Case = {"task": case["task"]}
    for feature, values in FEATURES.items():
        if feature != "task":
            found[feature] = values(found)[0]
    return found


# What is known not to go together, by the later feature: most cases leave it out, so that most train.
_PIPELINED = {*families.words("bart bert distilbert gpt2 llama marian mistral qwen2 qwen3 roberta xlm-roberta")}
_ADAPTED = {*families.words("bert roberta distilbert gpt2 llama mistral qwen2 bart t5 opt bloom")}  # peft knows them
_STREAMED = ("classification", "token", "language", "masked", "question", "translation", "summarization")


# Features of rows of texts and of models of transformers.
_OF_MODELS = (
    "shape",
    "drop_missing",
    "origin",
    "dtype",
    "adapter",
    "checkpointing",
    "compile",
    "loss_chunk",
    "attention",
)


def _goes(case: Case, feature: str, value: Any) -> bool:
    """Return whether a value is compatible with those drawn before it, as far as is known."""
    task, streamed = case.get("task", ""), case.get("reading", "").startswith("streamed")
    if feature == "reading" and value.startswith("streamed"):
        return task.startswith(_STREAMED) and not task.endswith(("multi_label", "regression"))
    if feature == "labels":
        return value in ("few", "two") or case["task option"] != "class_weights"
    if feature == "reading" and (value.startswith("cut") or "filter" in value or value == "limit"):
        return case["labels"] != "one_each"
    if feature in ("padding", "group_by_length", "tokenizer") and task in ("image_classification", "module"):
        return value in ("none", 1, "bpe")
    if task == "module" and feature in _OF_MODELS:
        return value in ("varied", False, "scratch", "float32", "none", None) and value is not True
    if feature == "group_by_length":
        return value == 1 or not (streamed or task.startswith("embedding"))
    if feature == "origin":
        return value == "scratch" or case["family"] not in ("reformer", "funnel")
    if feature == "tokenizer" and value in ("wordpiece", "wordlevel", "unigram"):
        return case["origin"] == "scratch"
    if feature == "groups" and task == "module":
        return value in ("none", "group")
    if feature == "dtype":
        return value == "float32" or (case["precision"] == "bf16" and case["optimizer"] in ("adamw", "sgd", "lion"))
    if feature == "adapter":
        ready = case["origin"] == "pretrained" and case["groups"] == "none" and case["family"] in _ADAPTED
        return value == "none" or ready
    if feature == "quantization":
        return value == "none" or case["adapter"].startswith("lora")
    if feature == "shape":
        whole = ("preference", "reward", "language_modeling prompts")  # whose prompts are not cut
        return value not in ("long", "ragged") or not task.startswith(whole)
    if feature == "compile":
        return not value or not (streamed or case["quantization"] != "none")
    if feature == "loss_chunk":
        chunked = task.startswith(("language", "masked", "translation", "summarization"))
        return value is None or (chunked and case["precision"] != "fp16")
    if feature == "average":
        return value == "none" or case["optimizer"] != "schedule_free"
    if feature == "evaluate" and value in ("best", "patience"):
        return case["average"] != "last"
    if feature == "schedule":
        return value in ("linear", "constant") or case["optimizer"] != "schedule_free"
    if feature == "cut":
        return value in ((8, 4), (8, 1), (9, 3)) or not task.startswith("embedding")
    if feature == "exact":
        own = case["compile"] or case["quantization"] != "none" or case["optimizer"] == "adamw_8bit"
        return value is True or (case["precision"] == "fp32" if value is False else not own)
    if feature == "also":
        return _also_goes(case, value)
    if feature == "leaves":
        whole = task == "module" or case["compile"] or case["adapter"] != "none" or not case["exact"]
        return value == 1 or (case["family"] in families.CUT and not whole)
    return feature not in ("first", "second") or _can_run(case, *value)


def _also_goes(case: Case, value: str) -> bool:
    """Return whether an entry of `ALSO` is compatible with the case, as far as is known."""
    return {
        "warmup_fraction": case["schedule"] != "points" and not case["warmup"],
        "betas": case["optimizer"] in ("adamw", "adamw_8bit", "lion", "schedule_free"),
        "weight_decay": case["optimizer"] != "adafactor",
        "sdc_check": case["exact"] is not False,
        "rebalance": case["first"][1] > 1 and case["first"][0] in ("ddp", "allreduce"),
        "offload": not case["compile"] and not case["checkpointing"] and case["task"] != "module",
        "best": case["average"] != "last" and case["evaluate"] == "every",
        "min_delta": case["evaluate"] == "patience",
        "nonfinite": case["precision"] != "fp16",
        "workers": case["task"] == "module",
        "masters": case["dtype"] == "bfloat16" and case["adapter"] == "none",
    }.get(value, True)


def _can_run(case: Case, strategy: str, processes: int) -> bool:
    """Return whether a strategy supports the case, as far as is known."""
    name = strategy.split()[0]
    deepspeed = "zero" in strategy
    if processes > case["cut"][1] or (case["quantization"] != "none" and name not in ("single", "allreduce", "ddp")):
        return False
    if not case["exact"] and strategy in ("single", "ddp tree", "fsdp2 tree"):
        return False
    if (strategy, processes) in TENSOR and (not case["exact"] or case["leaves"] % (4 if "4" in strategy else 2)):
        return False
    if case["leaves"] > 1 and (name == "pipeline" or strategy.endswith("zero3")):
        return False
    if name == "pipeline":
        plain = case["dtype"] == "float32" and case["adapter"] == "none" and not case["compile"]
        return case["family"] in _PIPELINED and plain and not case["task"].startswith(("embedding", "preference"))
    if deepspeed:
        plain = case["dtype"] == "float32" and case["average"] == "none" and case["precision"] != "fp16"
        return plain and case["optimizer"] in ("adamw", "sgd", "lion") and not case["compile"]
    return case["dtype"] == "float32" or strategy in ("single", "ddp", "allreduce", "fsdp2 step", "fsdp2 tensor")


Fixed = Mapping[str, Collection[str]]  # by feature the values that are drawn, as words, where a case has any of them


def one(draw: random.Random, free: bool, fixed: Fixed | None = None) -> Case:
    """Draw one case. `free`: combine any values; otherwise only values that are not known to be refused together."""
    case: Case = {}
    for feature, values in FEATURES.items():
        given = [each for each in values(case) if str(each) in (fixed or {}).get(feature, ())] or values(case)
        case[feature] = draw.choice(given if free else [each for each in given if _goes(case, feature, each)] or given)
    return case


def never_drawn(fixed: Fixed) -> list[str]:
    """Return the FEATURE=VALUE that no case can have, for example because the value is misspelt."""
    draw = random.Random(0)
    drawn = [one(draw, True, fixed) for _ in range(1000)]
    return [
        f"{feature}={value}"
        for feature, values in fixed.items()
        for value in sorted(set(values) - {str(case[feature]) for case in drawn})
    ]


def pairs(case: Case) -> set[tuple[str, str]]:
    """Return the pairs of feature values in a case, without pairs of two plainest values and without families."""
    plain = plainest(case)
    named = [
        (f"{feature}={value}", value == plain[feature] and feature != "task")
        for feature, value in case.items()
        if feature not in ("family", "seed", "steps", "compile")  # compiling takes a minute
    ]
    return {(a, b) for (a, plain_a), (b, plain_b) in combinations(named, 2) if not (plain_a and plain_b)}


def cases(seed: int, fixed: Fixed | None = None) -> Iterator[Case]:
    """Yield the cases of a seed, without end."""
    seen: set[tuple[str, str]] = set()
    number = 0
    while True:
        draw = random.Random(f"{seed}/{number}")
        free = draw.random() < FREE
        drawn = [one(draw, free, fixed) for _ in range(CANDIDATES)]
        case = max(drawn, key=lambda each: len(pairs(each) - seen))
        seen |= pairs(case)
        yield case
        number += 1
