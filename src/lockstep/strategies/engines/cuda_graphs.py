"""CUDA graphs of compiled micro-batches (`model.cuda_graphs`): the host launches forward and backward of a micro-batch
as one.

In: a strategy with a `Region`, and a micro-batch of each of its shapes. Out: the same losses and gradients, bit for
bit, from replayed graphs; or the reason why the run does without them, or cannot have them.

A graph repeats kernels at recorded addresses with recorded numbers. So whatever differs between micro-batches must be
in memory: inputs and targets are copied into tensors of the graph; so is the gradient of the loss sum (1 / targets,
times the loss scale); weights change in place; torch passes the seed of random numbers to a graph in memory, too. A
graph writes its gradients into one set of tensors, which all shapes share and which are added to the sums after it.

Before training, each graph is compared with the compiled code that it was recorded from, twice: on the recorded
micro-batch, and with other inputs, weights, seed and divisor. The gradients must be equal in bits on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.tensor_hashes import hash_text
from lockstep.strategies.engines.region import Region, examples, shapes_of
from lockstep.strategies.exact.step_totals import LossOutput
from lockstep.tasks.task import Task
from lockstep.track.busy import ACTIVITY

if TYPE_CHECKING:
    from lockstep.data.batch import MicroBatch
    from lockstep.strategies.single import ReplicatedStrategy
    from lockstep.strategies.strategy import Strategy

T = TypeVar("T")
OTHER_SLOPE = 0.37  # gradient of the loss sum, in the comparison with other numbers


class DifferentBits(Exception):
    """A graph computes something else than the code that it was recorded from."""


class GraphRecorder(Protocol):
    """Records what a function launches on a device."""

    def __call__(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Return the function's result, tensors without values yet, and a function that computes them."""


class CudaRecorder:
    """Recorder of torch's CUDA graphs, which share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # torch records on another stream than the default one

    def __call__(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            work()  # creates what must exist before recording, such as the workspace of cuBLAS for this stream
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # no other stream can use the memory of that call
            # threads of other libraries may call CUDA meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            except BaseException:
                with suppress(Exception):  # the error that led here says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return result, graph.replay


RECORDERS: dict[str, Callable[[torch.device], GraphRecorder]] = {"cuda": CudaRecorder}  # by type of device


@dataclass(frozen=True)
class _Recorded:
    """The graph of one shape."""

    inputs: Mapping[str, Tensor]
    loss: LossOutput
    positions: Sequence[int]  # of the parameters with a gradient
    replay: Callable[[], None]


class MicroBatchGraphs:
    """The graphs of a model's micro-batches, by shape."""

    def __init__(self, region: Region, model: nn.Module, record: GraphRecorder) -> None:
        self._region, self._model, self._record = region, model, record
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._slope = torch.ones((), device=region.device)  # gradient of the loss sum
        self._gradients: dict[int, Tensor] = {}  # by position of the parameter
        self._recorded: dict[Any, _Recorded] = {}
        self._addresses = self._tensors()

    def add(self, inputs: Mapping[str, Tensor]) -> None:
        """Record the graph of a micro-batch's shape."""
        own = {name: value.clone() for name, value in inputs.items()}
        (loss, gradients), replay = self._record(partial(self._compute, own))
        self._gradients |= gradients
        self._recorded[shapes_of(inputs)] = _Recorded(own, loss, list(gradients), replay)

    def _compute(self, inputs: Mapping[str, Tensor]) -> tuple[LossOutput, dict[int, Tensor]]:
        """Compute a micro-batch. Autograd remembers the stream on which it first met a parameter, and would leave the
        recorded stream for it: parameters of the same memory are new to it."""
        aliases: dict[str, Tensor] = {name: nn.Parameter(p.detach()) for name, p in self._trained.items()}
        for name, alias in aliases.items():
            alias.grad_dtype = self._trained[name].grad_dtype
        with self._region.arithmetic():
            output = torch.func.functional_call(self._model, aliases, kwargs=dict(inputs))
            slopes = torch.autograd.grad(output.loss, [*aliases.values()], self._slope, allow_unused=True)
        gradients = {i: slope for i, slope in enumerate(slopes) if slope is not None}
        shared = [i for i in gradients if i in self._gradients]  # from the graph of another shape
        if shared:
            torch._foreach_copy_([self._gradients[i] for i in shared], [gradients[i] for i in shared])
            gradients |= {i: self._gradients[i] for i in shared}
        return LossOutput(output.loss.detach(), output.each), gradients

    def fits(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether there is a graph for these inputs, and the weights are where it reads them."""
        return shapes_of(inputs) in self._recorded and self._addresses == self._tensors()

    def replay(self, inputs: Mapping[str, Tensor], slope: Tensor) -> tuple[LossOutput, dict[int, Tensor]]:
        """Compute a micro-batch that `fits`; return its loss, and its gradients by position of the parameter, for the
        gradient `slope` of the loss sum. The next call overwrites the gradients and the losses of examples."""
        graph = self._recorded[shapes_of(inputs)]
        for name, own in graph.inputs.items():
            own.copy_(inputs[name])
        self._slope.copy_(slope)
        graph.replay()
        loss = LossOutput(graph.loss.loss.clone(), graph.loss.each)
        return loss, {i: self._gradients[i] for i in graph.positions}

    def run(
        self, strategy: ReplicatedStrategy, inputs: Mapping[str, Tensor], micro: MicroBatch, divisor: float
    ) -> Tensor:
        """Run a micro-batch that `fits` and add its gradients, as `ReplicatedStrategy.run_micro_batch` does."""
        observer, precision = strategy.observer, strategy.precision
        start = torch.ones((), device=self._slope.device, requires_grad=True)
        with strategy.phases("forward+backward"):
            with precision.autocast(False):
                (slope,) = torch.autograd.grad(precision.scaled(start / divisor), start)
            output, gradients = self.replay(inputs, slope)
            loss = strategy.totals.loss_sum(strategy.task, output, micro, observer)
            if observer is not None and observer.hears(micro.index):
                names = list(self._trained)
                for position, gradient in gradients.items():
                    observer.gradient(micro.index, names[position], gradient)
            strategy.leaves.add(gradients)
        return loss

    def _tensors(self) -> list[int]:
        """Addresses of the weights and buffers."""
        return [tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers())]

    # -- before training -----------------------------------------------------------------------------------------------

    def check(self, inputs: Mapping[str, Tensor], seed: int) -> None:
        """Compare the graph of a shape with the code that it was recorded from. Errors: `DifferentBits`."""
        self._compare(inputs, torch.ones_like(self._slope), seed)
        weights = [p.detach() for p in self._model.parameters() if p.is_floating_point()]
        torch._foreach_mul_(weights, 2.0)  # the next line takes it back without rounding
        try:
            others = {name: value.flip(-1) for name, value in inputs.items()}
            self._compare(others, torch.full_like(self._slope, OTHER_SLOPE), seed + 1)
        finally:
            torch._foreach_mul_(weights, 0.5)

    def _compare(self, inputs: Mapping[str, Tensor], slope: Tensor, seed: int) -> None:
        seed_everything(seed, -3)
        with self._region.arithmetic():
            loss = self._model(**inputs).loss
            slopes = torch.autograd.grad(loss, [*self._trained.values()], slope, allow_unused=True)
        expected = hash_text(loss.detach(), *(each for each in slopes if each is not None))
        seed_everything(seed, -3)
        replayed, gradients = self.replay(inputs, slope)
        if hash_text(replayed.loss, *gradients.values()) != expected:
            raise DifferentBits("replaying a micro-batch's graph gave other bits than computing it without")


def warm_up(strategy: Strategy, task: Task) -> None:
    """Record and check a graph for each shape of a run's compiled micro-batches, if the run asks for graphs. If there
    can be none, or one has other bits on a rank, no rank uses graphs, with the reason in `strategy.remarks`.
    Collective. Errors: `RunError`, on every rank, if recording fails: torch's random numbers are unusable then."""
    region: Region | None = getattr(strategy, "region", None)
    if region is None or not strategy.run.model.cuda_graphs:
        return
    ACTIVITY.set("recording CUDA graphs")
    graphs, reason, failure = None, _refusal(strategy), None
    if reason is None:
        try:
            graphs = _checked(strategy, task, region)
        except DifferentBits as error:
            reason = str(error)
        except Exception as error:  # of CUDA, for whatever cannot be recorded
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    answers = strategy.world.all_gather((reason, failure))
    if (failure := next((each for _, each in answers if each is not None), None)) is not None:
        raise RunError(
            "LS4054", f"model.cuda_graphs: a micro-batch cannot be recorded: {failure}; set model.cuda_graphs=false"
        )
    reason = next((each for each, _ in answers if each is not None), None)
    if reason is None:
        region.graphs = graphs
    else:
        strategy.remarks = (*strategy.remarks, f"runs without CUDA graphs, because {reason}")


def _refusal(strategy: Strategy) -> str | None:
    """Explain why a strategy's micro-batches cannot be graphs; None if they can."""
    if strategy.world.device.type not in RECORDERS:
        return f"there are none on {strategy.world.device.type}"
    if strategy.facts.engine_casts:
        return f"the engine of {strategy.run.strategy.name} runs forward and backward itself"
    if strategy.statistics is not None and strategy.statistics.names:
        return f"the model keeps running statistics ({strategy.statistics.names[0]})"
    return None


def _checked(strategy: Strategy, task: Task, region: Region) -> MicroBatchGraphs:
    """Return the graphs of a run's micro-batches, compared with their code. Errors: `DifferentBits`, and those of
    torch."""
    device = strategy.world.device
    graphs = MicroBatchGraphs(region, strategy.model, RECORDERS[device.type](device))
    for micro in examples(task):
        inputs = region.inputs(micro.to(device))
        graphs.add(inputs)
        graphs.check(inputs, strategy.run.seed)
    return graphs
