"""Tests that run over every strategy file: a new strategy is tested without further code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.run import Run
from lockstep.data.batch import StepBatch
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.strategies.single import ReplicatedStrategy
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from support.harness import build, build_with_feed, digest, run_on, tiny
from support.marks import long, slow
from support.strategy_runs import EXACT, NAMES, steps_of, worlds

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


# The largest number of ranks that CI runs, of strategies whose sums another one tries at 4: DeepSpeed has the code of
# stage 2 for stage 1, Accelerate that of DDP; test_checkpoint_pairs.py has ZeRO-3 at 4.
MOST = {"zero1": 2, "zero3": 2, "hf_accelerate": 2, "hf_trainer": 3}
Question = tuple[str, ...]  # name of a function below, and overrides of its run


def most(name: str) -> int:
    return MOST.get(name, worlds(name)[-1])


def run_of(*overrides: str) -> Run:
    """Return a run whose third step is the short one at the end of an epoch."""
    return tiny("data.limit=56", *overrides)


def a_few(world: World, run: Run) -> dict[str, Any]:
    return steps_of(world, run, steps=4)


def together(world: World, questions: list[tuple[str, Run]]) -> list[Any]:
    """Answer several questions in one job: starting it takes longer than each answer."""
    return [{"steps": a_few, "restored": restored, "judged": judged}[kind](world, run) for kind, run in questions]


class Answers:
    """Results of one strategy and number of processes for all selected tests, computed at the first request."""

    def __init__(self, items: list[Any]) -> None:
        self.asked: dict[tuple[str, int], dict[Question, list[Any] | None]] = {}
        for item in items:
            if item.path == Path(__file__) and hasattr(item, "callspec"):
                for name, ranks, question in asked_by(item.originalname, **item.callspec.params):
                    self.asked.setdefault((name, ranks), {})[question] = None

    def every(self, name: str, ranks: int, *question: str) -> list[Any]:
        """Return each rank's answer."""
        of_it = self.asked.setdefault((name, ranks), {})
        of_it.setdefault(question, None)
        if of_it[question] is None:
            left = [each for each, answer in of_it.items() if answer is None]
            stages = ("strategy.options.stages=2",) if name == "pipeline" else ()
            runs = [run_of(f"strategy.name={name}", *stages, *overrides) for _, *overrides in left]
            questions = [(kind, run) for (kind, *_), run in zip(left, runs, strict=True)]
            answers = run_on(ranks, together, questions, run=runs[0], timeout_s=500)
            of_it.update(zip(left, zip(*answers, strict=True), strict=True))
        return list(of_it[question] or [])

    def __call__(self, name: str, ranks: int, *overrides: str) -> dict[str, Any]:
        """Return rank 0's results of four steps; check that all ranks agree."""
        first, *others = self.every(name, ranks, "steps", *overrides)
        for other in others:
            assert {k: other[k] for k in ("loss", "norm")} == {k: first[k] for k in ("loss", "norm")}
            # rank 0 alone has the full weights
            assert all(torch.equal(w, first["weights"][k]) for k, w in other["weights"].items())
        assert first["clear"]
        return first


SGD = ("optim.name=sgd", "optim.learning_rate=0.1")
ENGINES = ("strategy.exact=false", *SGD)


def asked_by(
    test: str, name: str = "", ranks: int = 0, precision: str = "", **_: Any
) -> list[tuple[str, int, Question]]:
    """Return the questions that a test of this file needs answered for its strategy."""
    few = 1 if name == "single" else 2
    return {
        "test_exact_means_the_bits_of_single": [(name, ranks, ("steps", f"precision={precision}"))],
        "test_dtypes_of_each_precision": [(name, most(name), ("steps", "precision=bf16"))],
        "test_the_engine_s_own_reduction_is_equal_to_rounding": [(name, ranks, ("steps", *ENGINES))],
        "test_the_state_is_complete": [(name, few, ("restored",))],
        "test_all_ranks_evaluate_equally_and_rank_0_exports": [(name, few, ("judged",))],
    }.get(test, [])


@pytest.fixture(scope="module")
def of(request: pytest.FixtureRequest) -> Answers:
    return Answers(request.session.items)


@pytest.fixture(scope="module")
def single(of: Answers) -> dict[str, dict[str, Any]]:
    return {p: of("single", 1, f"precision={p}") for p in ("fp32", "bf16")}


# In bf16, whose sums are those of fp32, CI runs only the largest number of ranks; the others run in fp32. Engines that
# share the sums of these strategies run by hand at 1 and at 3 ranks; ZeRO has 3 ranks in test_zero.py.
AT_ANY_NUMBER = {1: ("single", "ddp", "fsdp2"), 3: ("allreduce", "ddp", "fsdp2", "hf_trainer")}
BITS = [
    (n, r, "fp32") if r <= most(n) and n in AT_ANY_NUMBER.get(r, EXACT) else long(n, r, "fp32")
    for n in EXACT
    for r in worlds(n)
]
BITS += [(n, r, "bf16") if r == most(n) else long(n, r, "bf16") for n in EXACT for r in worlds(n)]


@pytest.mark.parametrize(("name", "ranks", "precision"), BITS)
def test_exact_means_the_bits_of_single(name: str, ranks: int, precision: str, of: Answers, single: dict) -> None:
    found = of(name, ranks, f"precision={precision}")
    assert found["digest"] == single[precision]["digest"]
    assert found["loss"] == single[precision]["loss"]
    assert found["norm"] == single[precision]["norm"]


def test_the_control_bf16_has_other_bits(single: dict) -> None:
    assert single["fp32"]["digest"] != single["bf16"]["digest"]


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_of_each_precision(name: str, of: Answers, single: dict) -> None:
    """bf16 means autocast: bf16 losses, float32 weights and moments."""
    found = of(name, most(name), "precision=bf16")
    assert found["dtypes"] == {"torch.float32"}
    steps = slice(None) if name in EXACT else slice(1)  # later steps drift apart under AdamW
    near = 0 if name in EXACT else 1e-5
    assert found["loss"] == pytest.approx(single["bf16"]["loss"], rel=0 if name in EXACT else 2e-4)
    assert found["loss"][steps] == pytest.approx(single["bf16"]["loss"][steps], rel=near)
    assert found["loss"][steps] != pytest.approx(single["fp32"]["loss"][steps], rel=near)


MARKS = {2: pytest.param, 3: long, 4: slow}


@pytest.mark.parametrize(
    ("name", "ranks"), [(MARKS[r] if r <= most(n) else long)(n, r) for n in NAMES for r in worlds(n) if r > 1]
)
def test_the_engine_s_own_reduction_is_equal_to_rounding(name: str, ranks: int, of: Answers) -> None:
    exact, engine = of("single", 1, *SGD), of(name, ranks, *ENGINES)
    assert engine["loss"] == pytest.approx(exact["loss"], rel=1e-6)
    assert engine["norm"] == pytest.approx(exact["norm"], rel=2e-6)
    for key, weight in exact["weights"].items():
        assert (engine["weights"][key] - weight).abs().max() <= 1e-6, key


def test_the_control_an_ordinary_all_reduce_has_other_bits(of: Answers, single: dict) -> None:
    found = {ranks: of("allreduce", ranks, "strategy.exact=false")["digest"] for ranks in (1, 2, 3)}
    assert single["fp32"]["digest"] not in found.values()
    assert len(set(found.values())) == 3


class MeanOfMeans(ReplicatedStrategy):
    """The classic mistake, for the control below: each micro-batch's loss divided by its own number of targets."""

    check = classmethod(lambda cls, run, processes: None)

    def reduce(self) -> list[torch.Tensor]:
        return self.leaves.tree.root

    def backward(self, micro: Any, targets: int, last: bool) -> torch.Tensor:
        return super().backward(micro, len(micro.targets) * self.run.micro_batches, last)


def mean_of_means(world: World, run: Run) -> list[float]:
    task, _ = build(run, world)
    strategy = MeanOfMeans(Job.of(run), world)
    strategy.build(task)
    feed = StepLoader(task, strategy.own_micro_batches(), world.device)
    return [float(strategy.train_step(feed.make(t), 1e-3).grad_norm) for t in range(2)]


def test_the_control_a_mean_of_means_is_seen_in_the_norm(of: Answers) -> None:
    run = run_of("strategy.name=single")
    wrong = run_on(1, mean_of_means, run)[0]
    right = of("single", 1, "precision=fp32")["norm"]
    assert abs(wrong[0] / right[0] - 1) > 1e-3


def whole_gradient(world: World, run: Run) -> tuple[float, float]:
    """Compute the whole batch's gradient in one plain backward, and compare its norm and loss with the strategy's."""
    task, strategy, feed = build_with_feed(run, world)
    batch: StepBatch = feed.make(0)
    strategy.model.zero_grad()
    everything = task.collate(feed.columns, batch.ids, 0)
    loss = task.loss_sum(strategy.model(**everything.inputs), everything.targets) / batch.targets
    loss.backward()
    gradients = [p.grad for p in strategy.model.parameters() if p.grad is not None]
    norm = torch.cat([g.to_dense().reshape(-1).double() for g in gradients]).norm()
    strategy.model.zero_grad()
    result = strategy.train_step(batch, 1e-3)
    assert float(result.loss) == pytest.approx(float(loss), rel=1e-5)
    return float(norm), float(result.grad_norm)


def test_a_step_is_the_gradient_of_the_mean_over_all_targets() -> None:
    run = run_of(
        "strategy.name=single",
        "model.config.resid_pdrop=0",
        "model.config.embd_pdrop=0",
        "model.config.attn_pdrop=0",
    )
    plain, ours = run_on(1, whole_gradient, run)[0]
    assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("option", ["static_graph=true", "bucket_cap_mb=0.05", "find_unused_parameters=true"])
def test_ddp_options_pass_through(option: str, of: Answers, single: dict) -> None:
    assert of("ddp", 2, f"strategy.options.{option}")["digest"] == single["fp32"]["digest"]


def test_more_micro_batches_than_examples_give_padding_micro_batches(of: Answers, single: dict) -> None:
    short = (
        "data.limit=9",
        "batch_size=8",
        "micro_batches=8",
        "steps=4",
    )  # every second step has one example
    assert of("ddp", 3, *short)["digest"] == of("single", 1, *short)["digest"]


def restored(world: World, run: Run) -> tuple[str, str]:
    _, strategy, feed = build_with_feed(run, world)
    for t in range(3):
        strategy.train_step(feed.make(t), 1e-3)
    kept = world.broadcast({k: v.clone() for k, v in strategy.state.state_dict().items()})
    strategy.train_step(feed.make(3), 1e-3)
    straight = digest(strategy.state.state_dict())
    _, other = build(run, world)
    other.state.load_state_dict(kept)
    other.train_step(feed.make(3), 1e-3)
    again = digest(other.state.state_dict())
    strategy.close()
    other.close()
    return straight, again


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_complete(name: str, of: Answers) -> None:
    for straight, again in of.every(name, 1 if name == "single" else 2, "restored"):
        assert straight == again


def judged(world: World, run: Run) -> tuple[dict[str, float], str | None]:
    """Return scores and the export's digest after two steps."""
    task, strategy, feed = build_with_feed(run, world)
    for t in range(2):
        strategy.train_step(feed.make(t), 1e-3)
    scores = evaluate(world, task, strategy, task.splits["validation"])
    weights = strategy.state.export()
    strategy.close()
    assert (weights is not None) == world.is_main
    return scores, digest(weights) if weights is not None else None


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_evaluate_equally_and_rank_0_exports(name: str, of: Answers) -> None:
    (alone,) = of.every("single", 1, "judged")
    (scores, exported), *others = of.every(name, 1 if name == "single" else 2, "judged")
    assert all(other == (scores, None) for other in others)
    if name in EXACT:
        assert (scores, exported) == alone
    else:
        assert scores["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)


def densely(world: World, run: Run) -> dict[str, Any]:
    """Run the same steps with every gradient dense."""
    from lockstep.strategies import single

    single.row_sparse = lambda model, device, uses: set()
    return a_few(world, run)


def sparse_rows(world: World, run: Run) -> int:
    return len(build(run, world)[1].rows)


def test_row_sparse_gradients_have_the_bits_of_dense_ones(single: dict) -> None:
    run = run_of("strategy.name=single")
    assert run_on(1, sparse_rows, run) == [1]  # the token embedding; that of positions is too small
    assert run_on(1, densely, run)[0]["digest"] == single["fp32"]["digest"]
    run = run_of("strategy.name=ddp")
    assert {r["digest"] for r in run_on(3, densely, run)} == {single["fp32"]["digest"]}
