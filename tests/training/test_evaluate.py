"""Evaluation gives the same numbers bit for bit on any number of ranks, equal to a plain loop over the examples."""

from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks.classification import Classification
from lockstep.training.evaluation import evaluate
from support.harness import build, run_on, tiny

SIZE = 7  # 100 examples are 15 batches: not a multiple of 2 or 4 ranks, and the last one is short


def run_of(*overrides: str) -> Run:
    return tiny("strategy.name=allreduce", f"evaluate.batch_size={SIZE}", *overrides)


def metrics_of(world: World, run: Run) -> dict[str, Any]:
    task, strategy = build(run, world)
    collated = []
    whole = task.collate

    def collate(columns: Any, rows: np.ndarray, index: int) -> Any:
        collated.extend(rows.tolist())
        return whole(columns, rows, index)

    task.collate = collate  # type: ignore[method-assign]
    found = evaluate(world, task, strategy, task.splits["validation"])
    training = strategy.model.training  # type: ignore[attr-defined]
    strategy.close()
    return {"metrics": found, "rows": collated, "training": training}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_on(1, metrics_of, run_of())[0]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same_bits_and_uses_each_example_once(ranks: int, alone: dict) -> None:
    found = run_on(ranks, metrics_of, run_of())
    for rank in found:
        assert rank["metrics"] == alone["metrics"]  # equal, not approximately
        assert rank["training"]  # the model is back in training mode
    assert sorted(row for rank in found for row in rank["rows"]) == list(range(100))
    assert all(rank["rows"] for rank in found)


@pytest.mark.processes
def test_evaluation_matches_a_plain_loop(alone: dict) -> None:
    run = run_of()
    task = Classification(run).opened(Job.of(run).with_data().data)
    model = task.model().eval()
    columns = task.splits["validation"]
    losses, predicted = [], []
    labels = columns.flat("label")
    for i in range(len(columns)):
        ids = torch.from_numpy(columns.ragged("input_ids").row(i).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        losses.append(-float(torch.log_softmax(logits.double(), 0)[labels[i]]))
        predicted.append(int(logits.argmax()))
    found = alone["metrics"]
    assert found["examples"] == 100
    assert found["loss"] == pytest.approx(np.mean(losses), abs=2e-6)
    assert found["accuracy"] == np.mean(np.array(predicted) == labels)
    assert found["macro_f1"] == pytest.approx(macro_f1(labels.tolist(), predicted), abs=1e-12)


def macro_f1(true: list[int], predicted: list[int]) -> float:
    """Compute macro F1 by definition: the mean of 2 p r / (p + r) over the classes in labels or predictions."""
    scores = []
    for c in sorted({*true, *predicted}):
        right = sum(t == p == c for t, p in zip(true, predicted, strict=True))
        if right == 0:
            scores.append(0.0)
            continue
        precision, recall = right / predicted.count(c), right / true.count(c)
        scores.append(2 * precision * recall / (precision + recall))
    return float(np.mean(scores))


@pytest.mark.parametrize("seed", range(5))
def test_macro_f1_matches_scikit_learn(seed: int) -> None:
    random = np.random.default_rng(seed)
    true = random.integers(0, 6, 50)
    predicted = np.where(random.random(50) < 0.5, true, random.integers(0, 4, 50))
    run = run_of()
    task = Classification(run).opened(Job.of(run).with_data().data)
    eye = np.eye(6)
    sums = {
        "examples": 50.0,
        "loss": 0.0,
        "right": float((true == predicted).sum()),
        "of_class": eye[true].sum(0),
        "predicted": eye[predicted].sum(0),
        "right_of_class": eye[true[true == predicted]].sum(0),
    }
    found = task.metrics({k: torch.as_tensor(v, dtype=torch.float64) for k, v in sums.items()})["macro_f1"]
    assert found == pytest.approx(macro_f1(true.tolist(), predicted.tolist()), abs=1e-12)
    try:
        from sklearn.metrics import f1_score
    except ImportError:
        return
    assert found == pytest.approx(f1_score(true, predicted, average="macro"), abs=1e-12)


def test_a_missing_example_raises() -> None:
    run = run_of("strategy.name=single", "launch.processes=1")
    world = World(run)
    task, strategy = build(run, world)
    whole = task.collate
    task.collate = lambda columns, rows, index: whole(columns, rows[1:], index)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="of 100 examples were evaluated"):
        evaluate(world, task, strategy, task.splits["validation"])


def test_nan_logits_give_no_scores() -> None:
    """Not even accuracy is reported: the argmax of NaNs is the position of the first one."""
    run = tiny("strategy.name=single", "launch.processes=1")
    task, strategy = build(run, World(run))
    with torch.no_grad():
        next(iter(strategy.model.parameters())).fill_(float("nan"))  # type: ignore[attr-defined]
    found = evaluate(World(run), task, strategy, task.splits["validation"])
    assert found.pop("examples") == 100
    assert {"loss", "accuracy", "macro_f1"} <= found.keys()
    assert all(np.isnan(value) for value in found.values())
