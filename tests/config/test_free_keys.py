"""Keys that do not determine the weights: runs that differ in all of them have equal bits. Each kind of task is trained
twice more, once with every such key changed, and once with those that conflict with these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.config import error_messages as messages
from lockstep.config.run import Run
from lockstep.data.job import arithmetic_of
from support.marks import long, slow
from support.own_modules import NET, NET_FUNCTIONS, job
from support.task_runs import TASKS, make

ONE = ("launch.processes=1", "strategy.name=single", "micro_batches=4", "steps=6", "fingerprint.every=1")
MORE = {
    "documents": ("optim.name=schedule_free",),
    "masked": ("precision=bf16",),
    "translation": ("average.ema=0.9",),
    "preference": ("task.beta=5", "model.config.n_embd=128", "data.padding=batch"),
}
CHANGED: dict[str, Any] = {
    "evaluate": {"every": 1, "limit": 9, "batch_size": 1, "patience": 90, "min_delta": 0.5},
    "checkpoint": {"every": 1, "keep": 1, "at": [2], "best": "-loss", "on_failure": "stop", "changed_code": "allow"},
    "fingerprint": {"every": 2},
    "sdc_check": {"every": 2, "on_difference": "retry"},
    "verify": {"plain": False},
    "profile": {"steps": 1, "after": 1},
    "track": {"every": 1, "console": "quiet", "close_timeout_s": 1.0},
    "export": "best",
    "metrics": ["test_free_keys.draws"],
    "hub": {"license": "mit", "language": "en", "tags": ["small"], "private": False},
    "model": {"checkpoint_activations": True},
    "launch": {
        "timeout_s": 99.0,
        "hang_timeout_s": 99.0,
        "rebalance_every": 2,
        "max_restarts": 1,
        "replicate_every": 0,
    },
    "strategy": {"name": "allreduce", "all_reduce": "hierarchical"},
}
INSTEAD: dict[str, Any] = {"checkpoint": {"every": 3}, "average": {"last": 2}, "strategy": {"name": "ddp"}}
SHOWN = {
    "samples": 1,
    "beams": 2,
    "bleu": False,
    "bleu_tokenizer": "char",
    "sample_prompt": "the dog",
    "sample_tokens": 3,
    "temperature": 0.0,
    "answer_tokens": 2,
    "corpus": 5,
}
# `reward` learns of the pairs of `preference`, and `questions` finds places of words as `token_classification` does.
# `masked` and `pairs` have the loaders of `documents` and of classification, `translation` and `preference` pairs of
# texts like `pairs`.
LONG = ("preference", "translation", "reward", "questions", "token_classification", "masked", "pairs")
# What is tried elsewhere: where a run takes place, what it is called, when it stops, and what needs a network.
ELSEWHERE = {"name", "output", "remote_dir", "max_time", "hub.push_to", "track.to", "strategy.options"}
ELSEWHERE |= {
    f"launch.{key}" for key in ("name", "device", "processes", "processes_per_gpu", "threads", "on_rank_failure")
}
ELSEWHERE |= {
    "data.workers",
    "data.stream_cache_gb",
    "data.follow_links",
    "checkpoint.rescue",
    "model.offload_activations",
    "model.cuda_graphs",
    "model.trust_remote_code",
    "task.metrics",
    "task.generate",
}
ELSEWHERE |= {
    "average.ema",
    "average.ema_warmup",
    "data.separator",
    "data.quote",
    "model.compile",
    "model.compile_lengths",
}  # arithmetic where given


def draws(predictions: np.ndarray, labels: np.ndarray) -> float:
    """A metric that takes and sets random numbers."""
    torch.manual_seed(3)
    np.random.seed(3)
    return float(np.random.random() + torch.rand(()))


def changed(run: Run, values: dict[str, Any]) -> dict[str, Any]:
    """Return a run file's keys, some of them changed, as far as its task supports them."""
    given = run.model_dump(mode="json")
    given["task"] |= {key: value for key, value in SHOWN.items() if key in given["task"]}
    for key, value in values.items():
        given[key] = given[key] | value if isinstance(value, dict) else value
    if run.average.ema or run.optim.name == "schedule_free":
        given["average"]["last"] = None
    if run.task.name == "module":
        given["model"]["checkpoint_activations"] = False
        given["sdc_check"]["every"] = 0  # of a model with running statistics it cannot be
    if not run.metrics and not gathers(run):
        given["metrics"] = []
    return given


def gathers(run: Run) -> bool:
    return run.task.name in ("preference", "token_classification", "question_answering")


def hashes(folder: Path, name: str, values: dict[str, Any]) -> dict[int, dict[str, str]]:
    """Return step -> hashes of its loss and norm, and for some steps of the weights and moments after it."""
    (folder / f"{name}.json").write_text(json.dumps(values | {"output": str(folder / name)}))
    assert main(["train", str(folder / f"{name}.json")]) == 0
    lines = map(json.loads, (folder / name / "fingerprints.jsonl").read_text().splitlines())
    return {line["step"]: {k: line[k] for k in ("hash", "weights", "optimizer") if k in line} for line in lines}


@pytest.mark.parametrize("kind", [*map(slow, ("documents", "module")), *map(long, LONG)])
def test_keys_outside_the_arithmetic_change_no_bit(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    if kind == "module":
        run = job(tmp_path, NET, *ONE, functions=NET_FUNCTIONS)
    else:
        run = make(tmp_path, kind, *ONE, *MORE.get(kind, ()))
    wanted = hashes(tmp_path, "plain", run.model_dump(mode="json"))
    assert len({each["weights"] for each in wanted.values()}) > 4  # the rate of the first step is 0
    for name, values in (("all", CHANGED), ("instead", INSTEAD)):
        found = hashes(tmp_path, name, changed(run, values))
        assert len(found) == len(wanted) == 6
        for step, seen in found.items():
            assert seen == {key: wanted[step][key] for key in seen}, (name, step)
        assert "weights" in found[max(found)]


def test_every_key_outside_the_arithmetic_is_tested(tmp_path: Path) -> None:
    for kind in TASKS:
        run = make(tmp_path, kind)
        free = {*messages.flat(run.model_dump(mode="json"))} - {*arithmetic_of(run)}
        tried = {f"task.{key}" for key in SHOWN}
        for key, value in [*CHANGED.items(), *INSTEAD.items()]:
            tried |= {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else {key}
        assert free - tried - ELSEWHERE == set(), kind
