"""Functions of `metrics` with every task: they are given all predictions of a split, in order, once; what they make of
them is the task's own score."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks import own_metrics
from lockstep.tasks.models.qa_spans import normal
from lockstep.track.report import panels
from lockstep.training.evaluation import evaluate, evaluate_with_tables
from support import own_scores
from support.harness import TINY, build, build_with_feed, run_on
from support.messages import raises
from support.own_modules import TOY, job
from support.task_runs import BERT, MARIAN, TASKS, make, rows_of, write

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

# kind -> the function that is given its predictions, and what its numbers are called by the task itself
TOKENS = ("tokens", {"own_accuracy": "accuracy"})
REWARDS = ("rewards", {"own_accuracy": "accuracy", "own_margin": "margin"})
KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "packed": TOKENS,
    "messages": TOKENS,
    "masked": TOKENS,
    "token_classification": ("tags", {"own_accuracy": "accuracy", "own_f1": "f1"}),
    "translations": ("texts", {"own_bleu": "bleu", "own_chrf": "chrf"}),
    "unscored texts": ("texts", {}),
    "summaries": ("texts", {}),
    "questions": ("answers", {"own_exact": "exact_match", "own_f1": "f1"}),
    "pairs": ("vectors", {"own_triplets": "triplet_accuracy", "own_recall": "recall_at_1"}),
    "scored pairs": ("cosines", {"own_pearson": "pearson"}),
    "preference": REWARDS,
    "reward": REWARDS,
}


Both = tuple[dict[str, dict[str, float]], dict[str, dict[str, Any]]]  # metrics, and tables of the report, by kind


def run_of(folder: Path, kind: str, *keys: str) -> Run:
    """A run of this kind with its function."""
    function = f"metrics=[support.own_scores.{KINDS[kind][0]}]"
    if kind in TASKS:
        return make(folder, kind, function, *keys)
    written = {"source": "anchor", "target": "positive"}
    task, model = {
        "scored pairs": ({"name": "embedding", "score": "score", "score_range": [0, 4]}, BERT),
        "translations": ({"name": "translation"} | written, MARIAN),
        "unscored texts": ({"name": "translation", "bleu": False} | written, MARIAN),
        "summaries": ({"name": "summarization"} | written, MARIAN),
    }[kind]
    make(folder, "pairs")
    values = {"task": task, "model": model, "data": {"source": str(folder / "pairs"), "max_length": 32}}
    whole = TINY | values | {"output": str(folder / "out"), "tokenizer": {"train": "bpe", "vocab_size": 400}}
    return load(None, [function, *keys], whole)


def scores(world: World, runs: dict[str, Run]) -> Both:
    """After a few steps, so that something is right; and what a report shows of it."""
    found, tables = {}, {}
    for kind, run in runs.items():
        task, strategy, feed = build_with_feed(run, world)
        for step in range(3):
            strategy.train_step(feed.make(step), 1e-2)
        found[kind], tables[kind] = evaluate_with_tables(world, task, strategy, task.splits["validation"])
        strategy.close()
    return found, tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def both(folder: Path) -> Both:
    runs = {kind: run_of(folder, kind, "strategy.name=single", "evaluate.batch_size=4") for kind in KINDS}
    return scores(World(runs["packed"]), runs)


@pytest.fixture(scope="module")
def alone(both: Both) -> dict[str, dict[str, float]]:
    return both[0]


@pytest.fixture(scope="module")
def tables(both: Both) -> dict[str, dict[str, Any]]:
    return both[1]


@pytest.mark.parametrize("kind", KINDS)
def test_own_metrics_equal_the_tasks_metrics(kind: str, alone: dict) -> None:
    found, names = alone[kind], KINDS[kind][1]
    assert found["rows"] == found["examples"] > 4
    for own, name in names.items():
        assert found[own] == pytest.approx(found[name], rel=1e-6, abs=1e-6), name
    if kind == "unscored texts":
        assert "bleu" not in found
        assert found["own_chrf"] == alone["translations"]["own_chrf"] > 0


GATHERED = ("masked", "token_classification", "summaries", "questions", "pairs", "scored pairs", "preference")
UNDER = {("ddp", 3): GATHERED, ("fsdp2", 2): GATHERED, ("pipeline", 2): ("packed", "questions")}


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "ranks"), UNDER)
def test_any_number_of_processes_gives_the_same(name: str, ranks: int, folder: Path, both: Both) -> None:
    keys = (f"strategy.name={name}", "evaluate.batch_size=4")
    runs = {kind: run_of(folder, kind, *keys) for kind in UNDER[name, ranks]}
    for found in run_on(ranks, scores, runs, timeout_s=280):
        for kind in runs:
            for mine, wanted in zip(found, both, strict=True):
                assert mine[kind] == wanted[kind], kind


@pytest.mark.parametrize("kind", KINDS)
def test_functions_are_tried_on_dummy_predictions_of_the_real_shape(kind: str, folder: Path) -> None:
    """The dummy arrays have the real type and shape, and the trial is before any process starts."""
    run = run_of(folder, kind, "strategy.name=single")
    own_scores.SEEN.clear()
    own_metrics.check(Job.of(run).with_data())
    ((tried, true),) = own_scores.SEEN
    world = World(run)
    task, strategy = build(run, world)
    evaluate_with_tables(world, task, strategy, task.splits["validation"])
    strategy.close()
    for dummy_predictions, real in zip((tried, true), own_scores.SEEN[1], strict=True):
        assert dummy_predictions.dtype == real.dtype
        assert dummy_predictions.shape[2:] == real.shape[2:]
        assert dummy_predictions.ndim == real.ndim
        assert dummy_predictions.dtype != object or type(dummy_predictions[0]) is type(real[0])
    if kind == "token_classification":
        assert {tag for tags in true for tag in tags} == {*task.labels}  # type: ignore[attr-defined]


# -- what a report shows -----------------------------------------------------------------------------------------------


def mean(points: list[list[float]], counts: list[float]) -> float:
    return sum(y * count for (_, y), count in zip(points, counts, strict=True)) / sum(counts)


def test_scores_by_length_are_parts_of_the_whole(folder: Path, alone: dict, tables: dict) -> None:
    """Means over bins are those of the split; BLEU is none, and stands where the references are."""

    def held(words: list[int]) -> list[int]:
        return [count for count in np.bincount(own_metrics.bin_of(words)).tolist() if count]

    def rows(kind: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / kind / "validation.jsonl").read_text().splitlines()]

    (plot,) = tables["questions"]["plots"]
    of_answers = held([len(normal(row["answers"]["text"][0]).split()) for row in rows("questions")])  # `the` is none
    assert mean(plot["lines"]["F1"], of_answers) == pytest.approx(alone["questions"]["f1"])
    words = [len(row["positive"].split()) for row in rows("pairs")]
    (plot,) = tables["summaries"]["plots"]
    assert mean([[0, x] for x, _ in plot["lines"]["rouge1"]], held(words)) == pytest.approx(sum(words) / len(words))
    for name in ("rouge1", "rouge2", "rougeL"):
        assert mean(plot["lines"][name], held(words)) == pytest.approx(alone["summaries"][name], abs=1e-6)
    (plot,) = tables["translations"]["plots"]
    assert plot["lines"].keys() == {"bleu", "chrf"}
    chrf = [y for _, y in plot["lines"]["chrf"]]
    assert min(chrf) <= alone["translations"]["chrf"] <= max(chrf) > 0


def test_each_kind_of_entity_has_its_scores(alone: dict, tables: dict) -> None:
    of_kinds = tables["token_classification"]["labels"]
    assert of_kinds["names"] == ["ANIMAL"]
    right, given, there = (of_kinds[key][0] for key in ("right", "given", "examples"))
    assert there > 0
    assert alone["token_classification"]["f1"] == (2 * right / (there + given) if there + given else 0.0)
    (panel,) = panels.panels({"validation": tables["token_classification"]})
    assert panel["labels"]["rows"][0][0] == "ANIMAL"
    assert "F1 of each kind of entity" in panel["labels"]["bars"]


@pytest.mark.parametrize("kind", ["preference", "reward"])
def test_margins_are_sorted(kind: str, alone: dict, tables: dict) -> None:
    (plot,) = tables[kind]["plots"]
    line = plot["lines"]["margin"]
    assert line == sorted(line)
    assert (line[0][0], line[-1][0], len(line)) == (0.0, 1.0, 15)
    assert sum(y for _, y in line) / 15 == pytest.approx(alone[kind]["margin"], abs=1e-6)
    assert sum(y > 0 for _, y in line) / 15 == pytest.approx(alone[kind]["accuracy"])
    assert own_metrics.in_order("margins", "margin", np.array([1.0, np.nan])) == {}


def test_metric_functions_get_separate_copies(folder: Path) -> None:
    run = run_of(
        folder,
        "token_classification",
        "metrics=[support.own_scores.emptying,support.own_scores.tags]",
        "strategy.name=single",
    )
    world = World(run)
    task, strategy = build(run, world)
    assert evaluate(world, task, strategy, task.splits["validation"])["rows"] == 15
    strategy.close()


def test_rows_of_several_sources_equal_those_of_the_split(folder: Path) -> None:
    """Texts are read by row: those of the second source follow the first one's."""
    for place, name in enumerate(("one", "two")):
        (folder / name).mkdir()
        draw = random.Random(place)
        for split, count in (("train", 40), ("validation", 5 + place)):
            write(folder / name / f"{split}.jsonl", [rows_of("translation", draw) for _ in range(count)])
    both = [{"source": str(folder / name), "weight": 1} for name in ("one", "two")]
    data = {"sources": both, "max_length": 32}
    values = TINY | TASKS["translation"] | {"data": data, "output": str(folder / "out"), "steps": 2}
    keys = ["metrics=[support.own_scores.texts]", "strategy.name=single", "evaluate.batch_size=4"]
    run = load(None, keys, values | {"tokenizer": {"train": "bpe", "vocab_size": 400}})
    world = World(run)
    task, strategy = build(run, world)
    found = evaluate(world, task, strategy, task.splits["validation"])
    strategy.close()
    assert found["rows"] == 11
    assert found["own_chrf"] == pytest.approx(found["chrf"])


def test_metrics_are_refused_for_tasks_without_predictions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    of_chunks = run_of(folder, "packed", "task.loss_chunk=8")
    own = job(tmp_path, TOY.replace("LOSS", "((outputs - answers) ** 2).sum()"), "metrics=[support.own_scores.rewards]")
    for code, value, run in (("LS3320", "task.loss_chunk", of_chunks), ("LS3304", "task.metrics", own)):
        with raises(code, "metrics: ", value):
            own_metrics.check(Job.of(run).with_data())
