"""`model.cuda_graphs`: replayed micro-batches have the bits of the code that was recorded; where that cannot be, the
run goes on without. A recorder for CPUs stands in for CUDA, and uncompiled code for compiled code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config.run import Run
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.proof import replay_rank
from lockstep.strategies import single
from lockstep.strategies.engines import cuda_graphs, region
from lockstep.strategies.exact.gradient_sum import LeafGradients
from lockstep.strategies.observer import StepObserver, listening
from lockstep.training.startup import without_effect
from support.harness import build_with_feed
from support.marks import long
from support.messages import raises
from support.recorded_graphs import CpuRecorder
from support.strategy_runs import steps_of
from support.task_runs import make

SIZES = ("batch_size=6", "micro_batches=4", "model.config.n_layer=1", "strategy.name=single")


def graphed(folder: Path, *overrides: str) -> Run:
    """Return a run with micro-batches of two texts, and of one."""
    return make(folder, "packed", "model.compile=whole", "model.cuda_graphs=true", *SIZES, *overrides)


def uncompiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def code(*args: Any) -> Any:
        torch.clear_autocast_cache()  # compiled code casts weights in each call
        return function(*args)

    return code


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[CpuRecorder]:
    made: list[CpuRecorder] = []

    def recorder(device: torch.device) -> CpuRecorder:
        made.append(CpuRecorder())
        return made[-1]

    monkeypatch.setattr(torch, "compile", uncompiled)
    monkeypatch.setattr(region, "_check_generated", lambda folder: None)
    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", recorder)
    return made


@pytest.mark.parametrize("precision", [long("bf16"), "fp16"])
def test_replayed_micro_batches_have_the_bits_of_compiled_ones(
    precision: str, tmp_path: Path, recorders: list[CpuRecorder]
) -> None:
    """With dropout, a step's number of targets, a loss scale, and weights that change."""
    run = graphed(tmp_path, f"precision={precision}")
    graphs = steps_of(World(run), run)
    events = recorders[0].events
    assert events[:6] == ["record 0", "replay 0", "replay 0", "record 1", "replay 1", "replay 1"]
    assert {*events[6:]} == {"replay 0", "replay 1"}
    plain = run.with_keys("model", cuda_graphs=False)
    assert graphs["digest"] == steps_of(World(plain), plain)["digest"]
    assert len(recorders) == 1


@pytest.mark.slow
def test_bfloat16_weights_and_sums_without_a_tree(tmp_path: Path, recorders: list[CpuRecorder]) -> None:
    for keys in (("model.dtype=bfloat16", "precision=bf16"), ("strategy.exact=false",)):
        run = graphed(tmp_path, *keys)
        plain = run.with_keys("model", cuda_graphs=False)
        assert steps_of(World(run), run)["digest"] == steps_of(World(plain), plain)["digest"]
        assert len(recorders.pop().events) > 10


class Gradients(StepObserver):
    """Keeps what it hears of a step."""

    def __init__(self) -> None:
        self.heard: dict[tuple[int, str], Tensor] = {}
        self.losses: dict[int, Tensor] = {}

    def hears(self, index: int) -> bool:
        return index != 1

    def loss(self, index: int, loss: Tensor) -> None:
        self.losses[index] = loss.detach()

    def gradient(self, index: int, name: str, gradient: Tensor) -> None:
        self.heard[index, name] = gradient.clone()


def test_an_observer_hears_the_same(tmp_path: Path, recorders: list[CpuRecorder]) -> None:
    """`sdc_check` and `verify` observe replayed micro-batches."""
    heard = []
    for graphs in (True, False):
        run = graphed(tmp_path).with_keys("model", cuda_graphs=graphs)
        _, strategy, feed = build_with_feed(run, World(run))
        with listening(strategy, observer := Gradients()):
            strategy.train_step(feed.make(0), 1e-3)
        strategy.close()
        heard.append(observer)
    torch.testing.assert_close(heard[0].heard, heard[1].heard, rtol=0, atol=0)
    torch.testing.assert_close(heard[0].losses, heard[1].losses, rtol=0, atol=0)
    assert {index for index, _ in heard[0].heard} == {0, 2, 3}


def test_diff_computes_without_graphs(tmp_path: Path, recorders: list[CpuRecorder]) -> None:
    """It compares inputs and outputs of modules between two runs, one of which may have no graphs, or fewer."""
    run = graphed(tmp_path)
    world = World(run)
    _, strategy, feed = build_with_feed(run, world)
    before = len(recorders[0].events)
    record = replay_rank._recorded(strategy, world, feed.make(0), 1e-3)
    assert {value.micro_batch for value in record.computed} == {0, 1, 2, 3}
    assert len(recorders[0].events) == before
    strategy.close()


def test_gradients_get_the_memory_layout_of_their_weights() -> None:
    """As autograd gives it: compiled code may write a gradient transposed."""
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    leaves = LeafGradients([weight], [])
    leaves.begin(0)
    leaves.add({0: torch.arange(6.0).view(3, 2).T})
    assert weight.grad is not None
    assert weight.grad.is_contiguous()
    assert torch.equal(weight.grad, torch.arange(6.0).view(3, 2).T)


def test_weights_at_another_address_are_not_replayed(tmp_path: Path, recorders: list[CpuRecorder]) -> None:
    run = graphed(tmp_path)
    digests = []
    for moves in (False, True):
        _, strategy, feed = build_with_feed(run, World(run))
        for parameter in strategy.parameters[:1] if moves else ():
            parameter.data = parameter.data.clone()
        before = len(recorders[-1].events)
        result = strategy.train_step(feed.make(0), 1e-3)
        assert (len(recorders[-1].events) == before) == moves
        digests.append(float(result.grad_norm))
        strategy.close()
    assert digests[0] == digests[1]


def stale(graphs: cuda_graphs.MicroBatchGraphs, inputs: Any, slope: Tensor) -> Any:
    """Replay with the inputs that were recorded."""
    graph = graphs._recorded[region.shapes_of(inputs)]
    graphs._slope.copy_(slope)
    graph.replay()
    return graph.loss, {i: graphs._gradients[i] for i in graph.positions}


def unscaled(graphs: cuda_graphs.MicroBatchGraphs, inputs: Any, slope: Tensor) -> Any:
    """Replay with the gradient of the loss that was recorded."""
    return replay(graphs, inputs, torch.ones_like(slope))


def same_weights(graphs: cuda_graphs.MicroBatchGraphs, inputs: Any, slope: Tensor) -> Any:
    """Replay with copies of the weights that were recorded."""
    weights = [p.detach() for p in graphs._model.parameters()]
    factor = 0.5 if float(slope) != 1 else 1.0
    torch._foreach_mul_(weights, factor)
    try:
        return replay(graphs, inputs, slope)
    finally:
        torch._foreach_mul_(weights, 1 / factor)


def other_seed(graphs: cuda_graphs.MicroBatchGraphs, inputs: Any, slope: Tensor) -> Any:
    """Replay with other random numbers."""
    torch.rand(1)
    return replay(graphs, inputs, slope)


replay = cuda_graphs.MicroBatchGraphs.replay


def test_a_graph_that_misses_what_changes_is_not_used(
    tmp_path: Path, recorders: list[CpuRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = graphed(tmp_path)
    task, strategy, _ = build_with_feed(run, World(run))
    assert strategy.region.graphs is not None
    before = strategy.state.state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    for fault in (stale, unscaled, same_weights, other_seed):
        strategy.region.graphs, strategy.remarks = None, ()
        monkeypatch.setattr(cuda_graphs.MicroBatchGraphs, "replay", fault)
        cuda_graphs.warm_up(strategy, task)
        assert strategy.region.graphs is None, fault
        assert "runs without CUDA graphs, because replaying a micro-batch" in strategy.remarks[-1], fault
    torch.testing.assert_close(strategy.state.state_dict(), before, rtol=0, atol=0)  # weights are as they were
    strategy.close()


def test_a_micro_batch_that_cannot_be_recorded(
    tmp_path: Path, recorders: list[CpuRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that tells the host a value. What torch leaves of a failed recording breaks its random numbers."""
    plain = region.Region._loss

    def reads(self: Any, inputs: Any, targets: Tensor) -> Any:
        assert int(targets.max()) >= -100
        return plain(self, inputs, targets)

    monkeypatch.setattr(region.Region, "_loss", reads)
    run = graphed(tmp_path)
    with raises("LS4054", "stream is capturing", "model.cuda_graphs=false"):
        build_with_feed(run, World(run))
    assert recorders[0].events == ["record 0"]


def test_runs_without_graphs(tmp_path: Path) -> None:
    """There are none on a CPU, and none of micro-batches that are not compiled whole."""
    run = graphed(tmp_path)
    strategy = single.Single(Job.of(run), World(run))
    strategy.region = object()  # type: ignore[assignment]
    cuda_graphs.warm_up(strategy, None)  # type: ignore[arg-type]
    assert strategy.remarks == ("runs without CUDA graphs, because there are none on cpu",)
    for choice in (True, False):
        job = Job.of(run.with_keys("model", compile=choice))
        notes = without_effect(job, 10, 1, on_cpu=True)
        assert "model.cuda_graphs has no effect without model.compile=whole" in notes
    assert without_effect(Job.of(run), 10, 1, on_cpu=True) == []


def test_a_plan_counts_the_gradients_that_graphs_write(tmp_path: Path) -> None:
    run = graphed(tmp_path)
    sums = [
        single.ReplicatedMemory().partial_sums(Job.of(run.with_keys("model", cuda_graphs=choice), 1))
        for choice in (True, False)
    ]
    assert sums[0] == sums[1] + 4.0
