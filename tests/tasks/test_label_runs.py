"""Everything that `classification` learns under the promise: the same bits, scores and predictions at any number of
processes; and functions of the user's on predictions that are all there, in order, once."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks import own_metrics
from lockstep.training.evaluation import evaluate_with_tables
from support import own_scores
from support.harness import build, build_with_feed, digest, run_on
from support.label_runs import KINDS, make
from support.marks import long

OWN = "metrics=[support.own_scores.order,support.own_scores.mean_of_predictions,support.own_scores.drawing]"


def trained(world: World, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """A few steps of each run, scores, tables and samples."""
    found = {}
    for kind, run in runs.items():
        task, strategy, feed = build_with_feed(run, world)
        batches = [feed.make(step) for step in range(4)]
        results = [strategy.train_step(batch, 5e-3) for batch in batches]
        scores, tables = evaluate_with_tables(world, task, strategy, task.splits["validation"])
        counted = [sum(task.targets_in_batch(micro.targets) for micro in batch.micro_batches) for batch in batches]
        found[kind] = {
            "loss": [float(result.loss) for result in results],
            "norm": [float(result.grad_norm) for result in results],
            "scores": scores,
            "tables": tables,
            "samples": task.samples(strategy.generate, strategy.forward),
            "counted": counted,
            "targets": [batch.targets for batch in batches],
        }
        state = strategy.state.state_dict()
        strategy.close()
        found[kind]["digest"] = digest(state) if world.is_main else None
    return found


def runs_of(folder: Path, strategy: str) -> dict[str, Run]:
    return {kind: make(folder, kind, f"strategy.name={strategy}", OWN) for kind in KINDS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    runs = runs_of(folder, "single")
    return run_on(1, trained, runs)[0]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "ranks"), [long("ddp", 2), long("ddp", 3), ("fsdp2", 2)])
def test_every_kind_has_the_same_bits_on_any_number_of_processes(
    name: str, ranks: int, folder: Path, alone: dict
) -> None:
    runs = runs_of(folder, name)
    first, *others = run_on(ranks, trained, runs)
    for kind in KINDS:
        for key in ("digest", "loss", "norm", "scores", "tables", "samples", "targets"):
            assert first[kind][key] == alone[kind][key], (kind, key)
            assert key == "digest" or all(other[kind][key] == first[kind][key] for other in others)
        parts = zip(*(rank[kind]["counted"] for rank in (first, *others)), strict=True)
        assert list(map(sum, parts)) == first[kind]["targets"], f"{kind}: to the last bit, weights or not"


@pytest.mark.processes
def test_weights_and_losses_make_other_models(alone: dict) -> None:
    """The control: what is equal above is not equal for want of an effect."""
    of_one = [alone[kind]["digest"] for kind in ("balanced", "weights", "focal")]
    of_lists = [alone[kind]["digest"] for kind in KINDS if kind.startswith("lists")]
    assert len({*of_one, *of_lists}) == 6
    assert alone["number"]["digest"] != alone["numbers"]["digest"]


@pytest.mark.processes
def test_metrics_get_all_rows_once_and_in_order(alone: dict) -> None:
    """`in_order` weighs each row by its place; it is the same at any number of ranks (above), and right (below)."""
    for kind, found in alone.items():
        assert found["scores"]["rows"] == found["scores"]["examples"] == 31, kind
        assert found["scores"]["mean_of_predictions"] != 0, "one function does not see what another changes"


# -- functions of the user's -----------------------------------------------------------------------------------------

WRONG = {
    "support.own_scores.nobody": "has no attribute 'nobody'",
    "no_such_module.f": "No module named 'no_such_module'",
    "accuracy": "does not name a file; write my_file.accuracy",
    "support.own_scores.number": "support.own_scores.number is a int; expected a function",
    "support.own_scores.of_one": "must accept two arguments, (predictions, labels)",
    "support.own_scores.failing": r"support.own_scores.failing failed (tried on dummy predictions): IndexError",
    "support.own_scores.telling": "a mapping of numbers by name (tried on dummy predictions)",
    "support.own_scores.accuracy": "returns 'accuracy', which is the name of another metric",
    "support.own_scores.named_badly": "returns a number named 'top 5'",
    "support.own_scores.truth": "must return a number",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_refused_before_any_process_starts(
    name: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = make(folder, "two", f"metrics={name}")
    (tmp_path / "run.yaml").write_text(run.dump())
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    said = capfd.readouterr().err
    assert said.startswith("lockstep: metrics: ")
    assert WRONG[name] in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("kind", ["weights", "two", "lists", "number", "numbers"])
def test_functions_are_tried_on_dummy_predictions_of_the_real_shape(kind: str, folder: Path) -> None:
    """The dummy predictions have the real shape and type, and contain every label."""
    run = make(folder, kind, "strategy.name=single", "metrics=support.own_scores.order")
    own_scores.SEEN.clear()
    own_metrics.check(Job.of(run).with_data())
    (tried,) = own_scores.SEEN
    world = World(run)
    task, strategy = build(run, world)
    evaluate_with_tables(world, task, strategy, task.splits["validation"])
    strategy.close()
    for dummy_predictions, real in zip(tried, own_scores.SEEN[1], strict=True):
        assert dummy_predictions.dtype == real.dtype
        assert dummy_predictions.shape[1:] == real.shape[1:]
    if kind in ("weights", "two"):
        assert set(tried[1].tolist()) == set(range(len(task.labels)))  # type: ignore[attr-defined]
    if kind == "lists":
        assert ((tried[1].sum(0) > 0) & (tried[1].sum(0) < len(tried[1]))).all()
