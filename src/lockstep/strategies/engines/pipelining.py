"""One stage of a pipeline: what it does with a micro-batch, and where the micro-batch's gradients go.

In: hidden states and the random state from the stage before, gradients from the stage after; a `StagePart` of a model.
Out: the same towards the other side, and each micro-batch's gradients in this stage's own tree.

`Stage` is the engine's `PipelineStage`, changed where the engine takes every micro-batch to have the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.stage import _RecvInfo

from lockstep.data.batch import MicroBatch
from lockstep.distributed.torch_internals import to_device
from lockstep.strategies.engines.cuts import Cut, StagePart
from lockstep.strategies.exact.reduction import ReductionTree
from lockstep.strategies.observer import StepObserver, hearing

try:
    from torch.distributed.pipelining._utils import _TensorMeta
except ImportError as error:
    raise ImportError(f"pipeline needs torch 2.13 or newer, this is {torch.__version__}") from error


def random_state(device: torch.device) -> Tensor:
    """Where the device's random numbers are: uint8, 5056 bytes on the CPU and 16 on CUDA."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return to_device(torch.cuda.get_rng_state(device), device)  # the host has it


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Go on from there. On CUDA the host waits until the message is there."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state.cpu(), device)


def skip_negotiation(schedule: Any, several: bool) -> None:
    """What a schedule would ask its stages for before its first step, they know: shapes. `several`: stages a rank."""
    for flag in ("forward_initialized", "backward_initialized"):
        setattr(schedule, f"_stage{'s' * several}_{flag}", True)


def run_schedule(schedule: Any, micro_batches: list[MicroBatch]) -> None:
    """Forward and backward of these, each in the engine's order. Collective."""
    schedule._step_microbatches(
        kwarg_mbs=[{"micro": micro} for micro in micro_batches],
        target_mbs=[None] * len(micro_batches),
        return_outputs=False,
    )


class StageModule(nn.Module):
    """The part of a micro-batch that a stage runs. The random state travels with the hidden states, so that dropout
    draws what it draws in a single process."""

    def __init__(
        self, part: StagePart, loss: Callable[[Any, MicroBatch], Tensor], begin: Callable[[MicroBatch], None]
    ) -> None:
        super().__init__()
        self.part, self.loss, self.begin = part, loss, begin

    def forward(self, *received: Tensor, micro: MicroBatch) -> Any:
        """(hidden states..., random state), or the loss on the last stage."""
        device = micro.targets.device
        if self.part.first:
            self.begin(micro)
            outputs = self.part((), micro.inputs)
        else:
            *hidden, state = received
            self.begin(micro)  # for Python's and numpy's numbers, which do not travel
            outputs = self.part(hidden, micro.inputs, lambda: set_random_state(state, device))
        return self.loss(outputs, micro) if self.part.last else (*outputs, random_state(device))


class Stage(PipelineStage):
    """The engine's stage for micro-batches of any shape, whose gradients are collected micro-batch by micro-batch."""

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
        self._runtime_validate = False  # it compares every micro-batch's shapes with the first one's
        self.has_backward = True
        self._tied: list[tuple[Tensor, Tensor]] = []  # weights of this stage, and their gradients from later ones
        tensors = part.sends + 1  # the random state is the last one
        self.act_send_info = {0: []} if part.last else {i: [part.stage + 1] for i in range(tensors)}
        before = part.stage - 1
        self.grad_send_info = [] if part.first else [*[before] * part.receives, None]
        metas: Any = () if part.first else (*[_meta((1, 1, 1))] * part.receives, None)  # only their number is read
        self._stage_meta.inputs = self._stage_meta.input_grads = metas

    def expect(self, micro_batches: list[MicroBatch], leaves: int, exact: bool, observer: StepObserver | None) -> None:
        """The micro-batches of the step that comes; unless `exact`, autograd adds them up. `observer` hears of each
        micro-batch's gradients of the weights that this stage owns."""
        self.clear_runtime_states()
        self.observer = observer
        self.micro_batches, self.chunks, self.exact = micro_batches, len(micro_batches), exact
        self.stage_weights.tree, self.stage_weights.uses = ReductionTree(leaves if exact else 1), {}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.part.first:
            metas = [_meta(shape) for shape in self.part.arriving(self.micro_batches[fwd_chunk_id].inputs)]
            metas.append(_TensorMeta(torch.Size([self._bytes_of_state]), (1,), torch.uint8, False))
            self.args_recv_info[fwd_chunk_id] = tuple(self._buffer(meta, self.part.stage - 1) for meta in metas)
        else:
            self.args_recv_info[fwd_chunk_id] = ()
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.part.last:
            *hidden, _ = self.fwd_cache[bwd_chunk_id][0]
            after = self.part.stage + 1
            infos = [self._buffer(_meta(tuple(tensor.shape)), after) for tensor in hidden]
            self.grad_recv_info[bwd_chunk_id] = (*infos, _RecvInfo("random state", after, None, None))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        tied, self._tied = self._tied, []
        return (*super()._retrieve_recv_grads(bwd_chunk_id), *(gradient for _, gradient in tied))

    def _buffer(self, meta: _TensorMeta, source: int) -> _RecvInfo:
        return _RecvInfo("hidden", source, torch.empty(meta.shape, dtype=meta.dtype, device=self.device), meta)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        for tensor in () if self.part.last else outputs[:-1]:
            assert tensor.dtype == torch.float32, f"hidden states are {tensor.dtype} between stages"
        return outputs

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if self.exact and not self.part.last:
            # What later stages' uses of a tied weight gave enters backward as the gradient of one more output, so that
            # autograd adds it up first, before the uses on this stage: the order of a single process.
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
    """Contiguous float32 hidden states."""
    return _TensorMeta.from_tensor(torch.empty(shape, device="meta", requires_grad=True))


class Links:
    """Where stages are, and the way that the gradients of tied weights take between them.

    Autograd adds up the uses of a weight in the order backward meets them: the last use first. So does a chain of
    stages: the last one hands its share to the next lower one that uses the weight, micro-batch by micro-batch, and the
    lowest (its owner) puts the sum into its tree. After the step's reduction the owner gives the total to the others.
    """

    def __init__(self, cut: Cut, ranks: int, pipelines: int, pipeline: int, group: dist.ProcessGroup) -> None:
        self.holders, self._ranks, self._group = cut.holders, ranks, group
        self._pipelines, self._pipeline = pipelines, pipeline
        self._here: dict[tuple[str, int], list[Tensor]] = {}  # on their way between two stages of one rank
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def rank_of(self, stage: int) -> int:
        """The global rank that runs a stage of this pipeline."""
        return stage % self._ranks * self._pipelines + self._pipeline

    def send(self, name: str, tensor: Tensor, source: int, stage: int) -> None:
        """Towards a stage, without waiting; the tensor must not be written to any more."""
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
        """Totals for all uses of a weight, from those its owners have. Collective."""
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
    uses: dict[str, int]  # how many of the step's micro-batches gave each weight a gradient; a tied one: of the head's

    def __init__(self, part: StagePart, order: list[str], links: Links) -> None:
        self.part, self._links = part, links
        names = set(part.names)
        self.position = {name: i for i, name in enumerate(order)}
        self.parameters = {name: part.tensor(name) for name in order if name in names}
        self.owned = {n: p for n, p in self.parameters.items() if links.holders[n][0] == part.stage}

    def receive_tied(self) -> list[tuple[Tensor, Tensor]]:
        """The weights that a later stage uses too, each with the gradient of a micro-batch that comes from there."""
        received = []
        for name, parameter in self.parameters.items():
            later = [stage for stage in self._links.holders[name] if stage > self.part.stage]
            if later:
                received.append((parameter, self._links.receive(name, parameter, later[0], self.part.stage)))
        return received

    def collect(self, index: int) -> None:
        """Move the gradients that backward left into the tree, or on to an earlier stage that uses the weight too."""
        gradients = []
        for name, parameter in self.parameters.items():
            self.uses[name] = self.uses.get(name, 0) + (parameter.grad is not None)
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = None
            earlier = [stage for stage in self._links.holders[name] if stage < self.part.stage]
            if earlier:
                self._links.send(name, gradient.contiguous(), self.part.stage, earlier[-1])
            else:
                gradients.append(gradient)
        self.tree.add(index, gradients)
