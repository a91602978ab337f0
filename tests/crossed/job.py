"""Converts a drawn case to a job: a run file, recipes of its files, and the steps at which it stops and resumes.

In: a case. Out: a `Job`, which YAML holds and `judge.py` runs, also after the drawing has changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from crossed import families, images, modules, rows
from crossed.draw import TASKS, Case

LENGTH = 24  # tokens of an example, at most
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@dataclass(frozen=True)
class Job:
    """A run file, and how it is run. Its paths are relative to the working directory of the run."""

    run: dict[str, Any]
    rows: dict[str, Any]  # as `rows.write` reads it
    first: dict[str, Any]  # strategy and processes it begins with: keys of the run file, dotted
    second: dict[str, Any]  # and those it goes on with
    stop: int  # updates before it stops
    how: str = "stop"  # or kill
    compared: bool = True  # with the plain reference: dropout is off
    tokenizer: dict[str, Any] = field(default_factory=dict)  # of the folder `tokenizer`; empty: there is none
    code: str = ""  # of `mine.py`, a module of the user's own
    model: dict[str, Any] = field(default_factory=dict)  # head, family and config of the folder `model`; empty: none

    def dump(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=110)

    @classmethod
    def load(cls, text: str) -> Job:
        values = yaml.safe_load(text)
        return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})

    def on_gpu(self) -> Job:
        """Return the job with ranks that share the GPU."""
        shared = {"device": "cuda", "processes_per_gpu": 4}
        return replace(self, run={**self.run, "launch": self.run["launch"] | shared})

    def write(self, folder: Path) -> None:
        """Write run file, rows, tokenizer and model to a folder."""
        if self.code:
            (folder / "mine.py").write_text(self.code, encoding="utf-8")
        else:
            rows.write(folder / "data", self.rows)
        if self.tokenizer:
            files = sorted((folder / "data").rglob("*.jsonl"))
            texts = [line for path in files for line in path.open(encoding="utf-8")]
            families.make_tokenizer(folder / "tokenizer", self.tokenizer, texts or [" ".join(rows.WORDS)])
        if self.model.get("head") == "image":
            of = {name: value for name, value in self.model.items() if name != "head"}
            images.make_model(folder / "model", **of)
        elif self.model:
            families.make_model(folder / "model", **self.model, tokenizer=folder / "tokenizer")
        (folder / "run.yaml").write_text(yaml.safe_dump(self.run, sort_keys=False, allow_unicode=True))


def job_of(case: Case) -> Job:
    """Return the job of a case."""
    head, kind = TASKS[case["task"]]
    batch, micro_batches = case["cut"]
    entries = families.config_of(case["family"], case["dropout"], case["leaves"])
    pretrained, of_images = case["origin"] == "pretrained", head == "image"
    saved = not of_images and (pretrained or case["tokenizer"] in ("left", "framed", "no pad"))
    recipe = {"kind": kind, "shape": case["shape"], "labels": case["labels"], "seed": case["seed"]}
    sizes = {} if of_images else {"max_length": LENGTH, "padding": case["padding"]}
    if head == "module":
        return _of_module(case)
    processor = {"processor": images.FAMILIES[case["family"]][1]} if of_images else {}
    data = {"source": "data"} | sizes | _reading(case, recipe)
    if case["drop_missing"]:
        data["drop_missing"] = True
    if case["group_by_length"] > 1:
        data["group_by_length"] = case["group_by_length"]
    run: dict[str, Any] = {
        "name": "crossed",
        "output": "out",
        "seed": case["seed"],
        "task": _task(case) | (processor if not pretrained else {}),
        "data": data,
        "model": _model(case, entries),
        "tokenizer": {} if of_images else _tokenizer(case, saved),
        "steps": case["steps"],
        "batch_size": batch,
        "micro_batches": micro_batches,
        "precision": case["precision"],
        "optim": _optim(case),
        "strategy": {"name": "single"} | _arithmetic(case),
        "launch": {"device": "cpu", "threads": 1, "processes": 1},
        "track": {"every": 1},
        "checkpoint": {"every": 1 if case["how"] == "kill" or case["average"] == "last" else 0},
        **_evaluate(case),
        **_average(case),
    }
    for key, value in _also(case).items():
        section, _, name = key.rpartition(".")
        (run.setdefault(section, {}) if section else run)[name] = value
    return Job(
        run={key: value for key, value in run.items() if value not in ({}, None)},
        rows=recipe,
        first=_way(case["first"]),
        second=_way(case["second"]) | ({"launch.threads": case["threads"]} if case["threads"] > 1 else {}),
        stop=min(case["stop"], case["steps"] - 2),
        how=case["how"],
        compared=not case["dropout"] and case["also"] != "sdc_check",  # which listens to steps in the recorder's place
        tokenizer=_tokenizer_recipe(case) if saved else {},
        model={"head": head, "family": case["family"], "entries": entries} | processor if pretrained else {},
    )


def _of_module(case: Case) -> Job:
    """Return the job of a user's module, which has no rows, tokenizer or model files."""
    plain = job_of(case | {"task": "classification", "family": "bert", "reading": "files", "task option": ""})
    data: dict[str, Any] = {"files": {}, "limit": {"limit": 20}, "fraction": {"validation_fraction": 0.3}}[
        case["reading"]
    ]
    task = {"name": "module"} | modules.task_of(case["family"])
    run = {key: value for key, value in plain.run.items() if key not in ("tokenizer", "model")} | {"task": task}
    return replace(
        plain,
        run={key: value for key, value in (run | {"data": data}).items() if value != {}},
        rows={},
        code=modules.code_of(case["family"], case["dropout"]),
    )


def _task(case: Case) -> dict[str, Any]:
    name = case["task"].split()[0]
    own: dict[str, Any] = {"samples": 0} if name not in ("preference", "reward") else {}
    own |= {
        "classification pair": {"text_pair": "second"},
        "classification multi_label": {"multi_label": True},
        "classification regression": {"regression": True},
        "language_modeling packed": {"block_size": 16},
        "language_modeling documents": {"block_size": LENGTH, "packing": False},
        "language_modeling prompts": {"prompt": "question", "response": "answer", "block_size": LENGTH},
        "language_modeling messages": {"messages": "messages", "chat_template": TEMPLATE, "block_size": 48},
        "masked_language_modeling documents": {"packing": False},
        "question_answering": {"stride": 6},
        "embedding scored": {"score": "score"},
        "translation": {"source": "en", "target": "de", "bleu": False},
        "summarization": {"rouge": False},
    }.get(case["task"], {})
    own |= _OPTIONS.get((name.removeprefix("image_"), case["task option"]), {})
    if case["loss_chunk"] is not None:
        own["loss_chunk"] = case["loss_chunk"]
    return {"name": name, **own}


_OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("classification", "class_weights"): {"class_weights": {"yes": 3}},
    ("classification", "focal"): {"loss": "focal"},
    ("classification", "label_smoothing"): {"label_smoothing": 0.1},
    ("classification", "label_smoothing weights"): {"label_smoothing": 0.1, "class_weights": "balanced"},
    ("classification", "threshold"): {"threshold": "validation"},
    ("classification", "gamma"): {"loss": "focal", "focal_gamma": 3.0},
    ("classification", "mae"): {"loss": "mae"},
    ("language_modeling", "apart"): {"attend_across_documents": False},
    ("language_modeling", "each turn"): {"turns": "per_turn"},
    ("masked_language_modeling", "whole_word_mask"): {"whole_word_mask": True},
    ("masked_language_modeling", "half"): {"mlm_probability": 0.5},
    ("question_answering", "unanswerable"): {"unanswerable": True},
    ("question_answering", "answer_tokens"): {"answer_tokens": 1},
    ("embedding", "cls"): {"pooling": "cls"},
    ("embedding", "scale"): {"similarity_scale": 5.0},
    ("embedding", "range"): {"score_range": [-1.0, 2.0]},
    ("embedding", "negative"): {"negative": "negative"},
    ("embedding", "negatives"): {"negatives": 1},
    ("embedding", "last_token"): {"pooling": "last_token"},
    ("preference", "ipo"): {"loss": "ipo"},
    ("preference", "hinge"): {"loss": "hinge"},
    ("preference", "simpo"): {"loss": "simpo", "beta": 2.0, "gamma": 1.0},
    ("preference", "few of the reference"): {"reference_batch_size": 2},
    ("preference", "label_smoothing"): {"label_smoothing": 0.1},
    ("reward", "center"): {"center": 0.1},
    ("translation", "label_smoothing"): {"label_smoothing": 0.1},
    ("translation", "two tokenizers"): {"tokenizers": "separate"},
    ("translation", "prefix"): {"prefix": "to German: "},
    ("translation", "target_length"): {"target_length": 6},
    ("summarization", "label_smoothing"): {"label_smoothing": 0.1},
    ("summarization", "beams"): {"beams": 2, "rouge": True},
}


def _reading(case: Case, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `data`, and complete the recipe of the rows."""
    reading, text = case["reading"], (rows.KINDS[TASKS[case["task"]][1]] or ("lang",))[0]
    ending = "parquet" if case["task"] == "image_classification" else "jsonl"
    shards = {"stream": True, "stream_window": 5}
    weighted = [{"name": "a", "source": "data/a", "weight": 3}, {"name": "b", "source": "data/b", "weight": 1}]
    paths = {"train": "data/train-*.jsonl", "validation": "data/validation.jsonl"}
    plain = [{key: value for key, value in each.items() if key != "weight"} for each in weighted]
    files, keys = {
        "files": ({}, {}),
        "test": ({"splits": ["train", "validation", "test"]}, {}),
        "cut": ({"splits": ["train"]}, {"validation_fraction": 0.3}),
        "cut test": ({"splits": ["train"]}, {"validation_fraction": 0.2, "test_fraction": 0.2}),
        "csv": ({"files": "csv"}, {}),
        "parquet": ({"files": "parquet"}, {}),
        "split_column": ({"files": "one"}, {"source": f"data/all.{ending}", "split_column": "part"}),
        "folders": ({"files": "folders"}, {"layout": "class_folders"}),
        "filter": ({}, {"filter": {"lang": "en", "size": {"max": 3}}}),
        "filter words": ({}, {"filter": {text: {"max_words": 8}, "size": {"none_of": [0]}}}),
        "limit": ({}, {"limit": 13}),
        "deduplicate": ({"repeated": True}, {"deduplicate": True}),
        "overlap": ({"overlapping": True}, {"decontaminate": True}),
        "mixed": ({"files": "two"}, {"sources": plain}),
        "mixed weights": ({"files": "two"}, {"sources": weighted}),
        "mixed filter": ({"files": "two"}, {"sources": [weighted[0], weighted[1] | {"filter": {"size": {"min": 1}}}]}),
        "streamed": ({"files": "shards"}, paths | shards),
        "streamed mixed": ({"files": "two", "sharded": True}, {"sources": _streams(weighted)} | shards),
    }[reading]
    recipe |= files
    if "sources" in keys or reading == "streamed":
        keys = keys | {"source": None}
    return keys


def _streams(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for each in sources:
        name = each["name"]
        paths = {"train": f"data/{name}/train-*.jsonl", "validation": f"data/{name}/validation.jsonl"}
        found.append({key: value for key, value in each.items() if key != "source"} | paths)
    return found


def _model(case: Case, entries: dict[str, Any]) -> dict[str, Any]:
    pretrained = case["origin"] == "pretrained"
    model: dict[str, Any] = {"source": "model"} if pretrained else {"type": case["family"], "config": entries}
    if case["dtype"] != "float32":
        model["dtype"] = case["dtype"]
    if case["checkpointing"]:
        model["checkpoint_activations"] = True
    if case["compile"]:
        model["compile"] = True
    if case["attention"]:
        model["attention"] = case["attention"]
    if case["groups"] == "freeze":
        model["freeze"] = ["*.0.*"]
    if case["adapter"] != "none":
        model["adapter"] = {
            "lora": {"type": "lora", "r": 4},
            "lora float32": {"type": "lora", "r": 4},
            "lora adapter": {"type": "lora", "r": 4, "export": "adapter"},
            "dora": {"type": "lora", "r": 4, "use_dora": True},
            "ia3": {"type": "ia3"},
        }[case["adapter"]]
        if case["adapter"] == "lora float32":
            model["dtype"] = "float32"
    if case["quantization"] != "none":
        model["quantization"] = case["quantization"]
    return model


def _tokenizer(case: Case, saved: bool) -> dict[str, Any]:
    if case["origin"] == "pretrained":
        return {}
    if saved:
        return {"source": "tokenizer"}
    kind = "character" if case["task option"] == "character" else case["tokenizer"]
    return {"train": kind, "vocab_size": 400 if kind == "bpe" else 120}


def _tokenizer_recipe(case: Case) -> dict[str, Any]:
    recipe: dict[str, Any] = {}
    if case["tokenizer"] == "left":
        recipe["side"] = "left"
    if case["tokenizer"] == "no pad":
        recipe["pad"] = False
    if case["tokenizer"] == "framed" or TASKS[case["task"]][0] in ("classification", "question_answering", "masked"):
        recipe["framed"] = True
    return recipe or {"side": "right"}


def _optim(case: Case) -> dict[str, Any]:
    name, schedule, last = case["optimizer"], case["schedule"], case["steps"]
    rate = {"sgd": 0.05, "lion": 1e-3, "adafactor": 1e-2}.get(name, 5e-3)
    optim: dict[str, Any] = {"name": name, "learning_rate": rate, "max_grad_norm": case["clip"]}
    if name == "adamw_8bit":
        optim["min_8bit_size"] = 256
    if name == "schedule_free" and schedule == "linear":
        schedule = "constant"
    if schedule == "points":
        optim["schedule"] = [[0, rate / 4], [2, rate], [last, 0.0]]
    else:
        optim["schedule"] = schedule
        if case["warmup"]:
            optim["warmup_steps"] = case["warmup"]
    optim |= {
        "cosine": {"min_lr_ratio": 0.1},
        "polynomial": {"power": 2.0, "min_lr_ratio": 0.1},
        "wsd": {"decay_fraction": 0.5, "decay_shape": "sqrt"},
    }.get(str(schedule), {})
    if case["groups"] == "group":
        optim["groups"] = [{"match": "*.0.*", "learning_rate": rate * 3}, {"match": "*.1.*", "weight_decay": 0.3}]
    if case["groups"] == "layerwise_lr_decay":
        optim["layerwise_lr_decay"] = 0.5
    return optim


def _evaluate(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if case["evaluate"] in ("every", "limit"):
        found["every"] = 2
    if case["evaluate"] in ("best", "patience"):
        found["every"] = 1
    if case["evaluate"] == "patience":
        found["patience"] = 1
    if case["evaluate"] == "limit":
        found["limit"] = 3
    if case["evaluated at once"]:
        found["batch_size"] = case["evaluated at once"]
    more = {"export": "best"} if case["evaluate"] == "best" else {}
    return {"evaluate": found, **more} if found else {}


def _average(case: Case) -> dict[str, Any]:
    return {
        "none": {},
        "ema": {"average": {"ema": 0.9}},
        "ema no warm-up": {"average": {"ema": 0.5, "ema_warmup": False}},
        "last": {"average": {"last": 2}},
    }[case["average"]]


def _also(case: Case) -> dict[str, Any]:
    """Return the dotted keys of the case's `ALSO` entries."""
    return {
        "epochs": {"epochs": 4, "steps": None},
        "warmup_fraction": {"optim.warmup_fraction": 0.4},
        "betas": {"optim.betas": [0.8, 0.9]},
        "weight_decay": {"optim.weight_decay": 0.3},
        "sdc_check": {"sdc_check.every": 1},
        "fingerprint": {"fingerprint.every": 1},
        "rebalance": {"launch.rebalance_every": 2},
        "offload": {"model.offload_activations": True},
        "best": {"checkpoint.best": "-loss", "checkpoint.every": 2},
        "min_delta": {"evaluate.min_delta": 0.5},
        "nonfinite": {"on_nonfinite": "skip"},
        "keep": {"checkpoint.every": 1, "checkpoint.keep": 1},
        "workers": {"data.workers": 2},
        "masters": {"optim.master_weights": False},
    }.get(case["also"], {})


def _arithmetic(case: Case) -> dict[str, Any]:
    """Return the keys of `strategy` that all runs of a job share."""
    exact = {} if case["exact"] is True else {"exact": case["exact"]}
    return exact | ({"tensor_leaves": case["leaves"]} if case["leaves"] > 1 else {})


def _way(way: tuple[str, int]) -> dict[str, Any]:
    """Return the keys of a strategy and a number of processes."""
    (name, _, option), processes = way[0].partition(" "), way[1]
    keys: dict[str, Any] = {"strategy.name": name, "launch.processes": processes}
    if option == "tree":
        keys["strategy.all_reduce"] = "hierarchical"
    options: dict[str, Any] = {
        "step": {"gather": "step"},
        "micro_batch": {"gather": "micro_batch"},
        "gpipe": {"schedule": "gpipe"},
        "stages": {"stages": 2},
        "tensor": {"tensor_parallel": 2},
        "tensor4": {"tensor_parallel": 4},
        "fsdp": {"fsdp": {}},
        "zero2": {"deepspeed": {"zero_stage": 2}},
        "zero3": {"deepspeed": {"zero_stage": 3}},
    }.get(option, {})
    return keys | ({"strategy.options": options} if options else {})
