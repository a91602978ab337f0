"""Each key of the run file with another value, for each kind of task: input of `benchmarks/silent_keys.py`.

In: nothing. Out: `keys_of` a kind, `words_of` that change a key, and `IDLE`, the pairs that may have no effect. Keys
come from the sections and the plug-ins, kinds from `tests/crossed`: a new key without a value is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from crossed.draw import TASKS
from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.config.sections import Section

KINDS = tuple(TASKS)
SECTIONS = ("data", "tokenizer", "model", "optim", "evaluate", "average", "strategy")
TOP = ("seed", "epochs", "steps", "max_time", "on_nonfinite", "batch_size", "micro_batches", "precision", "metrics")
TOP += ("export",)
# test_run_file_keys.py; a compiler and a minute per run: test_compiled.py, test_fixed_lengths.py
ELSEWHERE = {"task.name", "model.compile", "model.compile_lengths"}
# Key -> words that set it. ENDING: of row files; LOSS, PACKING: another than the run's.
VALUES: dict[str, tuple[str, ...]] = {
    "seed": ("seed=5",),
    "epochs": ("epochs=4", "steps=null"),
    "steps": ("steps=3",),
    "max_time": ("max_time=9h",),
    "batch_size": ("batch_size=12",),
    "micro_batches": ("micro_batches=2",),
    "precision": ("precision=bf16",),
    "metrics": ("metrics=[metricfile.always_one]",),
    "export": ("export=best",),
    "data.config": ("data.config=x",),
    "data.revision": ("data.revision=x",),
    "data.source": ("data.source=data2",),
    "data.sources": ("data.sources=[{name: a, source: data}, {name: b, source: data2}]", "data.source=null"),
    "data.train": ("data.train=data2/train.ENDING",),
    "data.validation": ("data.validation=data2/validation.ENDING",),
    "data.test": ("data.test=data2/validation.ENDING",),
    "data.layout": ("data.layout=class_folders",),
    "data.columns": ("data.columns=[a, b]",),
    "data.types": ("data.types={nowhere: text}",),
    "data.separator": ("data.separator=semicolon",),
    "data.quote": ("data.quote=none",),
    "data.validation_fraction": ("data.validation_fraction=0.3",),
    "data.test_fraction": ("data.test_fraction=0.2",),
    "data.split_column": ("data.split_column=part",),
    "data.filter": ("data.filter={lang: en}",),
    "data.encoding": ("data.encoding=latin-1",),
    "data.limit": ("data.limit=9",),
    "data.max_length": ("data.max_length=6",),
    "data.group_by_length": ("data.group_by_length=2",),
    "data.workers": ("data.workers=1",),
    "data.stream_window": ("data.stream_window=7",),
    "data.stream_cache_gb": ("data.stream_cache_gb=1",),
    "tokenizer.source": ("tokenizer.source=tok", "tokenizer.train=null", "tokenizer.vocab_size=8000"),
    "tokenizer.train": ("tokenizer.train=wordlevel",),
    "tokenizer.vocab_size": ("tokenizer.vocab_size=90",),
    "model.source": ("model.source=mod", "model.type=null", "model.config={}"),
    "model.revision": ("model.revision=x",),
    "model.type": ("model.type=mobilebert",),
    "model.config": ("model.config.initializer_range=0.3",),
    "model.attention": ("model.attention=eager",),
    "model.adapter": ("model.adapter={type: lora, r: 2}",),
    "model.dtype": ("model.dtype=bfloat16",),
    "model.freeze": ("model.freeze=['*.0.*']",),
    "optim.name": ("optim.name=sgd",),
    "optim.learning_rate": ("optim.learning_rate=1e-3",),
    "optim.schedule": ("optim.schedule=wsd",),
    "optim.warmup_steps": ("optim.warmup_steps=2",),
    "optim.warmup_fraction": ("optim.warmup_fraction=0.9",),
    "optim.min_lr_ratio": ("optim.min_lr_ratio=0.5",),
    "optim.power": ("optim.power=2",),
    "optim.decay_fraction": ("optim.decay_fraction=0.6",),
    "optim.decay_steps": ("optim.decay_steps=2",),
    "optim.decay_shape": ("optim.decay_shape=sqrt",),
    "optim.weight_decay": ("optim.weight_decay=0.7",),
    "optim.groups": ("optim.groups=[{match: '*', learning_rate: 1e-4}]",),
    "optim.layerwise_lr_decay": ("optim.layerwise_lr_decay=0.5",),
    "optim.max_grad_norm": ("optim.max_grad_norm=1e-5",),
    "optim.betas": ("optim.betas=[0.5, 0.6]",),
    "optim.eps": ("optim.eps=0.1",),
    "evaluate.every": ("evaluate.every=0",),
    "evaluate.limit": ("evaluate.limit=3",),
    "evaluate.patience": ("evaluate.patience=1",),
    "evaluate.min_delta": ("evaluate.min_delta=0.5",),
    "evaluate.batch_size": ("evaluate.batch_size=3",),
    "average.ema": ("average.ema=0.5",),
    "average.last": ("average.last=2", "checkpoint.every=1"),
    "strategy.name": ("strategy.name=ddp",),
    "strategy.options": ("strategy.options={x: 1}",),
    "strategy.tensor_leaves": ("strategy.tensor_leaves=2",),
    "task.label_names": ("task.label_names=[a, b, c]",),
    "task.class_weights": ("task.class_weights=balanced",),
    "task.threshold": ("task.threshold=0.3",),
    "task.label_smoothing": ("task.label_smoothing=0.2",),
    "task.loss": ("task.loss=LOSS",),
    "task.focal_gamma": ("task.focal_gamma=1",),
    "task.processor": ("task.processor={do_normalize: false}",),
    "task.chat_template": ("task.chat_template='{{ messages[0].content }}'",),
    "task.template_arguments": ("task.template_arguments={a: 1}",),
    "task.block_size": ("task.block_size=12",),
    "task.packing": ("task.packing=PACKING",),
    "task.sample_prompt": ("task.sample_prompt='the dog'",),
    "task.sample_tokens": ("task.sample_tokens=3",),
    "task.temperature": ("task.temperature=0",),
    "task.samples": ("task.samples=1",),
    "task.mlm_probability": ("task.mlm_probability=0.4",),
    "task.stride": ("task.stride=2",),
    "task.answer_tokens": ("task.answer_tokens=1",),
    "task.score": ("task.score=size",),
    "task.score_range": ("task.score_range=[-1, 2]",),
    "task.similarity_scale": ("task.similarity_scale=3",),
    "task.negatives": ("task.negatives=1",),
    "task.pooling": ("task.pooling=cls",),
    "task.corpus": ("task.corpus=3",),
    "task.beta": ("task.beta=0.7",),
    "task.gamma": ("task.gamma=2",),
    "task.reference_batch_size": ("task.reference_batch_size=2",),
    "task.center": ("task.center=0.3",),
    "task.prefix": ("task.prefix='to: '",),
    "task.target_length": ("task.target_length=5",),
    "task.beams": ("task.beams=3",),
    "task.bleu_tokenizer": ("task.bleu_tokenizer=char",),
    "task.loss_chunk": ("task.loss_chunk=5",),
    "task.model": ("task.model=mine.build_again",),
    "task.data": ("task.data=mine.data_again",),
    "task.model_arguments": ("task.model_arguments={x: 1}",),
    "task.data_arguments": ("task.data_arguments={x: 1}",),
    "task.length": ("task.length=mine.cost",),
    "task.targets": ("task.targets=mine.two",),
    "task.generate": ("task.generate=mine.one",),
    "task.collate": ("task.collate=mine.reversed_items",),
    "task.metrics": ("task.metrics=mine.always_one",),
}
# for keys that name columns: another column, or a missing one
COLUMNS = "text text_pair label image prompt response messages tools negative anchor positive chosen rejected question"
COLUMNS += " context answers source target words tags"
VALUES |= {f"task.{key}": (f"task.{key}=lang",) for key in COLUMNS.split()}
# appended to the user's module
FUNCTIONS = """

def cost(item):
    return 2


def two(item):
    return 2


def one(model, batch, *more, **most):
    return [1]


def reversed_items(items):
    from torch.utils.data import default_collate

    return default_collate(items[::-1])


def always_one(outputs, batch):
    return {"always": 1.0}


def twice(outputs, batch):
    return 2 * loss(outputs, batch)


def build_again():
    torch.manual_seed(5)
    return build()


def data_again():
    made = data()
    return {split: list(items)[1:] for split, items in (made if isinstance(made, dict) else {"train": made}).items()}
"""

# (kind, key), with * for any part -> reason why the change may have no effect
IDLE: dict[tuple[str, str], str] = {
    ("*", "max_time"): "the run ends sooner",
    ("*", "on_nonfinite"): "every loss is finite",
    ("*", "data.drop_missing"): "no row lacks anything",
    ("*", "data.drop_unusable"): "every row can be used",
    ("*", "data.follow_links"): "there are no links",
    ("*", "data.encoding"): "every letter is ASCII",
    ("*", "model.checkpoint_activations"): "memory alone: the same bits",
    ("*", "evaluate.batch_size"): "memory alone: the same scores",
    ("module", "data.workers"): "time alone: the same bits",
    ("masked_language_modeling*", "task.whole_word_mask"): "every word is one token",
    ("question_answering", "task.stride"): "every context fits into one window",
    ("question_answering", "task.unanswerable"): "every question has an answer, and none is left out",
    ("translation", "task.bleu_tokenizer"): "a model of two steps writes nothing that is right",
}


def keys_of(kind: str) -> dict[str, Any]:
    """Keys that a run of a kind may have -> their fields."""
    task, adamw = (_options(*of) for of in (("tasks", TASKS_OF[kind]), ("optimizers", "adamw")))
    found = {key: Run.model_fields[key] for key in TOP}
    found |= {f"task.{key}": field for key, field in task.items()}
    for name in SECTIONS:
        section: Any = Run.model_fields[name].annotation
        assert issubclass(section, Section)
        found |= {f"{name}.{key}": field for key, field in section.model_fields.items()}
    found |= {f"optim.{key}": field for key, field in adamw.items()}
    return {key: field for key, field in found.items() if key not in ELSEWHERE}


TASKS_OF = {kind: kind.partition(" ")[0] for kind in KINDS}


def _options(plugin: str, name: str) -> dict[str, Any]:
    found: Any = plugins.find(plugin, name)
    return dict(found.Options.model_fields)


def words_of(kind: str, key: str, field: Any, run: Mapping[str, Any]) -> list[str]:
    """Words that set a key to another value. `run`: the flat keys of the run to change."""
    loss = {"preference": "ipo", "module": "mine.twice"}.get(TASKS_OF[kind], "focal")
    apart = run.get("task.packing") is False or kind.endswith(("prompts", "messages"))
    known = {
        "ENDING": "parquet" if kind == "image_classification" else "jsonl",
        "LOSS": "mae" if run.get("task.regression") else loss,
        "PACKING": str(apart).lower(),
    }
    if key in VALUES:
        return [re.sub("ENDING|LOSS|PACKING", lambda found: known[found[0]], word) for word in VALUES[key]]
    now = run.get(key, field.get_default(call_default_factory=True))
    others = [value for value in _literals(field.annotation) if value != now]
    if isinstance(now, bool) or not others:
        assert isinstance(now, bool), f"{key} is new: give it a value in VALUES"
        return [f"{key}={str(not now).lower()}"]
    return [f"{key}={others[0]}"]


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for inner in get_args(annotation) for value in _literals(inner)]
