"""One stage of a pipeline: running a micro-batch, and collecting its gradients.

In: hidden states and the random state from the previous stage, gradients from the next; a `StagePart` of a model. Out:
the same in the other direction, and each micro-batch's gradients in this stage's own tree.

`Stage` is torch's `PipelineStage`, adapted to micro-batches of different shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo
from typing_extensions import override

from lockstep.data.batch import MicroBatch
from lockstep.distributed.torch_internals import to_device
from lockstep.strategies.engines.cuts import Cut, StagePart
from lockstep.strategies.exact.gradient_sum import ReductionTree
from lockstep.strategies.observer import StepObserver, hearing

try:
    from torch.distributed.pipelining._utils import _TensorMeta
except ImportError:  # before torch 2.13, which `Pipeline.check` refuses; others read the class, and plan imports this
    _TensorMeta: Any = None  # type: ignore[no-redef]

AVAILABLE = _TensorMeta is not None


def random_state(device: torch.device) -> Tensor:
    """Return the state of the device's random generator: uint8, 5056 bytes on the CPU and 16 on CUDA."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return to_device(torch.cuda.get_rng_state(device), device)  # the state is in host memory


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of the device's random generator. On CUDA the host waits until the message has arrived."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state.cpu(), device)


def skip_negotiation(schedule: Any, several: bool) -> None:
    """Skip a schedule's exchange of shapes before its first step, because the stages know them. `several`: several
    stages per rank."""
    for flag in ("forward_initialized", "backward_initialized"):
        setattr(schedule, f"_stage{'s' * several}_{flag}", True)


def run_schedule(schedule: Any, micro_batches: list[MicroBatch]) -> None:
    """Run forward and backward of these micro-batches in the order of the schedule. Collective."""
    schedule._step_microbatches(
        kwarg_mbs=[{"micro": micro} for micro in micro_batches],
        target_mbs=[None] * len(micro_batches),
        return_outputs=False,
    )


class StageModule(nn.Module):
    """A stage's part of a micro-batch. The random state travels with the hidden states, so that dropout draws the same
    numbers as in a single process."""

    def __init__(
        self, part: StagePart, loss: Callable[[Any, MicroBatch], Tensor], begin: Callable[[MicroBatch], None]
    ) -> None:
        super().__init__()
        self.part, self.loss, self.begin = part, loss, begin

    @override
    def forward(self, *received: Tensor, micro: MicroBatch) -> Any:
        """Return (hidden states..., random state), or the loss on the last stage."""
        device = micro.targets.device
        if self.part.first:
            self.begin(micro)
            outputs = self.part((), micro.inputs)
        else:
            *hidden, state = received
            self.begin(micro)  # seeds Python and numpy, whose state does not travel
            outputs = self.part(hidden, micro.inputs, lambda: set_random_state(state, device))
        return self.loss(outputs, micro) if self.part.last else (*outputs, random_state(device))


class Stage(PipelineStage):
    """torch's stage for micro-batches of any shape, with gradients collected after each micro-batch."""

    def __init__(
        self,
        micro_batch: StageModule,
        weights: StageWeights,
        bytes_of_state: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        part = micro_batch.part
        super().__init__(micro_batch, part.stage, part.cut.stages, device, group=group)
        self.part, self.stage_weights, self._bytes_of_state = part, weights, bytes_of_state
        self._runtime_validate = False  # it would require equal shapes of all micro-batches
        self.has_backward = True
        self._tied: list[tuple[Tensor, Tensor]] = []  # (weight of this stage, its gradient from a later one)
        tensors = part.sends + 1  # the random state is the last one
        self.act_send_info = {0: []} if part.last else {i: [part.stage + 1] for i in range(tensors)}
        before = part.stage - 1
        self.grad_send_info = [] if part.first else [*[before] * part.receives, None]
        metas: Any = () if part.first else (*[_meta((1, 1, 1))] * part.receives, None)  # only the length is used
        self._stage_meta.inputs = self._stage_meta.input_grads = metas

    def expect(self, micro_batches: list[MicroBatch], leaves: int, exact: bool, observer: StepObserver | None) -> None:
        """Set the micro-batches of the next step; unless `exact`, autograd sums their gradients. `observer` receives
        each micro-batch's gradients of the weights that this stage owns."""
        self.clear_runtime_states()
        self.observer = observer
        self.micro_batches, self.chunks, self.exact = micro_batches, len(micro_batches), exact
        self.stage_weights.tree, self.stage_weights.grad_counts = ReductionTree(leaves if exact else 1), {}

    @override
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.part.first:
            metas = [_meta(shape) for shape in self.part.arriving(self.micro_batches[fwd_chunk_id].inputs)]
            metas.append(_TensorMeta(torch.Size([self._bytes_of_state]), (1,), torch.uint8, False))
            self.args_recv_info[fwd_chunk_id] = tuple(self._buffer(meta, self.part.stage - 1) for meta in metas)
        else:
            self.args_recv_info[fwd_chunk_id] = ()
        return super().get_fwd_recv_ops(fwd_chunk_id)

    @override
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.part.last:
            *hidden, _ = self.fwd_cache[bwd_chunk_id][0]
            after = self.part.stage + 1
            infos = [self._buffer(_meta(tuple(tensor.shape)), after) for tensor in hidden]
            self.grad_recv_info[bwd_chunk_id] = (*infos, _RecvInfo("random state", after, None, None))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    @override
    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        tied, self._tied = self._tied, []
        return (*super()._retrieve_recv_grads(bwd_chunk_id), *(gradient for _, gradient in tied))

    def _buffer(self, meta: _TensorMeta, source: int) -> _RecvInfo:
        return _RecvInfo("hidden", source, torch.empty(meta.shape, dtype=meta.dtype, device=self.device), meta)

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        for tensor in () if self.part.last else outputs[:-1]:
            assert tensor.dtype == torch.float32, f"hidden states are {tensor.dtype} between stages"
        return outputs

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if self.exact and not self.part.last:
            # Later stages' gradient of a tied weight enters backward as the gradient of an additional output, so that
            # autograd adds it before the uses on this stage, in the order of a single process.
            self._tied = self.stage_weights.receive_tied()
            outputs, values = self.fwd_cache[bwd_chunk_id]
            self.fwd_cache[bwd_chunk_id] = (*outputs, *(parameter for parameter, _ in self._tied)), values
        index = self.micro_batches[bwd_chunk_id].index
        heard = hearing(self.observer, index, self.stage_weights.owned.items())
        with heard, torch.autocast(self.device.type, enabled=False):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.args_recv_info.pop(bwd_chunk_id, None)
        self.grad_recv_info.pop(bwd_chunk_id, None)
        if self.exact:
            self.stage_weights.collect(index)


def _meta(shape: tuple[int, ...]) -> _TensorMeta:
    """Return the metadata of contiguous float32 hidden states."""
    return _TensorMeta.from_tensor(torch.empty(shape, device="meta", requires_grad=True))


class Links:
    """The ranks of stages, and the exchange of gradients of tied weights between them.

    Autograd adds the uses of a weight in the order of backward: the last use first. A chain of stages does the same:
    for each micro-batch, the last stage sends its share to the next lower one that uses the weight, and the lowest (the
    owner) adds the sum to its tree. After the step's reduction, the owner sends the total to the others.
    """

    def __init__(self, cut: Cut, ranks: int, pipelines: int, pipeline: int, group: dist.ProcessGroup) -> None:
        self.holders, self._ranks, self._group = cut.holders, ranks, group
        self._pipelines, self._pipeline = pipelines, pipeline
        self._here: dict[tuple[str, int], list[Tensor]] = {}  # in transit between two stages of one rank
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def rank_of(self, stage: int) -> int:
        """Return the global rank that runs a stage of this pipeline."""
        return stage % self._ranks * self._pipelines + self._pipeline

    def send(self, name: str, tensor: Tensor, source: int, stage: int) -> None:
        """Send to a stage without waiting; the tensor must not be modified afterwards."""
        if self.rank_of(stage) == self.rank_of(source):
            self._here.setdefault((name, stage), []).append(tensor)
        else:
            work = dist.isend(tensor, self.rank_of(stage), group=self._group)
            assert work is not None
            self._sent.append((work, tensor))

    def receive(self, name: str, like: Tensor, source: int, stage: int) -> Tensor:
        """Receive a tensor that a stage sent."""
        if self.rank_of(stage) == self.rank_of(source):
            return self._here[name, stage].pop(0)
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(tensor, self.rank_of(source), group=self._group)
        return tensor

    def tie(self, parts: list[StageWeights], totals: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Distribute the total gradients of tied weights from their owners to the other stages. Collective."""
        for weights, gradients in zip(parts, totals, strict=True):
            for name in weights.owned:
                for stage in self.holders[name][1:]:
                    self.send(name, gradients[name].clone(), weights.part.stage, stage)
        for weights, gradients in zip(parts, totals, strict=True):
            for name, parameter in weights.parameters.items():
                if name not in weights.owned:
                    gradients[name] = self.receive(name, parameter, self.holders[name][0], weights.part.stage)
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        return totals


class StageWeights:
    """The trainable weights of one part, and the tree of their gradients."""

    tree: ReductionTree
    grad_counts: dict[str, int]  # number of the step's micro-batches with a gradient of each weight

    def __init__(self, part: StagePart, order: list[str], links: Links) -> None:
        self.part, self._links = part, links
        names = set(part.names)
        self.position = {name: i for i, name in enumerate(order)}
        self.parameters = {name: part.tensor(name) for name in order if name in names}
        self.owned = {n: p for n, p in self.parameters.items() if links.holders[n][0] == part.stage}

    def receive_tied(self) -> list[tuple[Tensor, Tensor]]:
        """Receive the gradients of a micro-batch for weights that a later stage uses too."""
        received = []
        for name, parameter in self.parameters.items():
            later = [stage for stage in self._links.holders[name] if stage > self.part.stage]
            if later:
                received.append((parameter, self._links.receive(name, parameter, later[0], self.part.stage)))
        return received

    def collect(self, index: int) -> None:
        """Move `.grad` into the tree, or send it to an earlier stage that uses the weight too."""
        gradients = []
        for name, parameter in self.parameters.items():
            self.grad_counts[name] = self.grad_counts.get(name, 0) + (parameter.grad is not None)
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = None
            earlier = [stage for stage in self._links.holders[name] if stage < self.part.stage]
            if earlier:
                self._links.send(name, gradient.contiguous(), self.part.stage, earlier[-1])
            else:
                gradients.append(gradient)
        self.tree.add(index, gradients)
