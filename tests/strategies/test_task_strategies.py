"""Every kind of task under every strategy, two steps each, all kinds in one job per strategy: the bits of one process
under exact strategies, otherwise equal within rounding; also with adapters. test_tasks.py tests more, with fewer
strategies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import plugins
from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks.task import make_task
from lockstep.training.evaluation import evaluate_with_tables
from support import label_runs
from support.harness import TINY, build_with_feed, digest, run_on
from support.marks import long
from support.task_runs import BERT, GPT2, MARIAN, make, sentence, write

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("batch_size=9", "micro_batches=4", "steps=2")
STRATEGIES = {
    "ddp": (),
    "fsdp2": ("strategy.options.gather=micro_batch",),
    "fsdp2, once a step": ("strategy.options.gather=step",),
    "pipeline": ("strategy.options.stages=2",),
    "hf_accelerate": (),
    "hf_trainer": (),
    "zero1": (),
    "zero3": (),
}
ADAPTED = {"gpt2": ["c_attn"], "bert": ["query", "value"], "marian": ["q_proj", "v_proj"]}
OF_LABELS = ("balanced", "two", "lists, shaped", "numbers")


def row(draw: random.Random) -> dict[str, Any]:
    """Return a row: a text, a shorter part of it, and that part's share."""
    text = sentence(draw)
    words = text.split()
    kept = [word for word in words if draw.random() < 0.6]
    return {"text": text, "summary": " ".join(kept) or words[0], "score": len(kept) / len(words)}


MORE: dict[str, dict[str, Any]] = {
    "summaries": {"task": {"name": "summarization"}, "model": MARIAN},
    "scored pairs": {
        "task": {"name": "embedding", "anchor": "text", "positive": "summary", "score": "score"},
        "model": BERT,
    },
    "vectors of a decoder": {
        "task": {"name": "embedding", "anchor": "text", "positive": "summary", "pooling": "last_token"},
        "model": GPT2,
    },
}


def runs_of(folder: Path, *keys: str) -> dict[str, Run]:
    """Return one run of each kind."""
    (folder / "more").mkdir(exist_ok=True)
    draw = random.Random(2)
    for split in ("train", "validation"):
        if not (folder / "more" / f"{split}.jsonl").exists():
            write(folder / "more" / f"{split}.jsonl", [row(draw) for _ in range(30)])
    found = {
        kind: make(folder, kind, *SMALL, *keys) for kind in ("preference", "reward", "masked", "questions", "documents")
    }
    found["without a reference"] = make(folder, "preference", *SMALL, *keys, "task.loss=simpo")
    found["pairs"] = make(folder, "pairs", *SMALL, *keys)
    for kind, values in MORE.items():
        whole = TINY | values | {"data": {"source": str(folder / "more"), "max_length": 32}, "output": str(folder)}
        found[kind] = load(None, [*SMALL, *keys], whole | {"tokenizer": {"train": "bpe", "vocab_size": 400}})
    return found | {kind: label_runs.make(folder, kind, *SMALL, *keys) for kind in OF_LABELS}


def trained(world: World, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Train two steps of each kind, and evaluate."""
    found = {}
    for kind, run in runs.items():
        task, strategy, feed = build_with_feed(run, world)
        results = [strategy.train_step(feed.make(step), 5e-3) for step in range(2)]
        scores, _ = evaluate_with_tables(world, task, strategy, task.splits["validation"])
        state = strategy.state.state_dict()
        strategy.close()
        found[kind] = {
            "loss": [float(result.loss) for result in results],
            "norm": [float(result.grad_norm) for result in results],
            "scores": scores,
            "digest": digest(state) if world.is_main else None,
        }
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    runs = runs_of(folder, "strategy.name=single")
    return run_on(1, trained, runs, timeout_s=280)[0]


# ZeRO-3's shards, and Trainer around the steps of `ddp`: CI covers three tasks in test_tasks.py; all run by hand
@pytest.mark.parametrize("told", [long(told) if told in ("zero3", "hf_trainer") else told for told in STRATEGIES])
def test_every_strategy_trains_every_kind(told: str, folder: Path, alone: dict) -> None:
    name = told.partition(",")[0]
    strategy: Any = plugins.find("strategies", name)
    for package in strategy.needs:
        pytest.importorskip(package)
    runs = runs_of(folder, f"strategy.name={name}", *STRATEGIES[told])
    first, other = run_on(2, trained, runs, timeout_s=280)
    for kind, run in runs.items():
        assert other[kind]["scores"] == first[kind]["scores"], kind
        if Job.of(run).same_bits:
            assert first[kind] == alone[kind], kind
        else:
            assert first[kind]["loss"] == pytest.approx(alone[kind]["loss"], rel=1e-3), kind
            assert first[kind]["scores"]["loss"] == pytest.approx(alone[kind]["scores"]["loss"], rel=1e-2), kind


def adapted(run: Run, folder: Path, kind: str) -> Run:
    """Return the run with an adapter on the model that it would build, which is saved to the folder."""
    task = make_task(Job.of(run).with_data())
    place = folder / f"{kind} model"
    if not place.exists():
        model = task.model()
        task.write(place, model.state_dict())
    adapter = {"type": "lora", "r": 4, "lora_dropout": 0.1, "target_modules": ADAPTED[str(run.model.type)]}
    values = run.model_dump(mode="json") | {"model": {"source": str(place), "adapter": adapter}, "tokenizer": {}}
    return load(None, [], values)


@pytest.fixture(scope="module")
def adapted_alone(folder: Path) -> dict[str, dict[str, Any]]:
    runs = {kind: adapted(run, folder, kind) for kind, run in runs_of(folder, "strategy.name=single").items()}
    return run_on(1, trained, runs, timeout_s=280)[0]


@pytest.mark.parametrize("name", [long("ddp"), long("fsdp2")])
def test_every_kind_trains_an_adapter(name: str, folder: Path, alone: dict, adapted_alone: dict) -> None:
    pytest.importorskip("peft")
    keys = (f"strategy.name={name}", *STRATEGIES[name])
    runs = {kind: adapted(run, folder, kind) for kind, run in runs_of(folder, *keys).items()}
    first, _ = run_on(2, trained, runs, timeout_s=280)
    for kind in runs:
        assert first[kind] == adapted_alone[kind], kind
        assert first[kind]["norm"] != alone[kind]["norm"], kind
