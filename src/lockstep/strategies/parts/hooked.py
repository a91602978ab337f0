"""A DistributedDataParallel model whose gradients travel while backward is computing, whoever wrapped it.

In: this rank's micro-batches. Out: the same update on every rank. The difference from `allreduce.py` is *when*
gradients travel: all pieces but the last run in `no_sync`, and the last one's backward hands over each bucket as soon
as its gradients are there. `ddp.py`, `hf_accelerate.py` and `hf_trainer.py` differ in who wraps and who runs a piece.
"""

# No `from __future__ import annotations` here: DDP reads a communication hook's annotations.

import contextlib
from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.batch import MicroBatch, StepBatch, StepResult
from lockstep.reduction import Exchange, Node, ReductionTree
from lockstep.strategies.parts.native import Native
from lockstep.tasks.task import Task


class Hooked(Native):
    """A replicated model in a DDP wrapper, with the exact reduction as its communication hook."""

    travelling = False  # whether gradients leave during this piece's backward: it then waits for other ranks, too
    primed = True  # False while DDP has still to see a backward outside `no_sync`

    @abstractmethod
    def wrap(self) -> nn.Module:
        """`self.model` as its engine runs it: in DistributedDataParallel where there are several processes. May replace
        `self.optimizer` by the engine's."""

    @abstractmethod
    def run_piece(self, micro: MicroBatch, divisor: float) -> Tensor:
        """Forward and backward of one piece on `self.wrapped`, the gradient being that of loss sum / divisor. Returns
        the loss sum, detached."""

    def build(self, task: Task) -> None:
        super().build(task)
        ignored = [name for i, name in enumerate(self.named) if i in self.rows]  # their rows travel by themselves
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ignored)
        self.wrapped = self.wrap()
        self.ddp = self.wrapped if isinstance(self.wrapped, DistributedDataParallel) else None
        assert (self.ddp is not None) == (self.world.size > 1), f"{type(self.wrapped)} at {self.world.size} processes"
        self.position = {id(p): i for i, p in enumerate(self.parameters)}
        if self.ddp is not None and self.run.strategy.exact:
            self.ddp.register_comm_hook(None, self.on_bucket)

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        if not self.primed:
            self.prime(batch.micro_batches[0])
        self.bucket_positions: list[list[int]] = []
        self.exchange = Exchange(batch.leaves, self.world.rank, self.world.size)
        return super().train_step(batch, learning_rate)

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        self.last_leaf = micro.leaf
        exact = self.run.strategy.exact
        self.travelling = self.ddp is not None and last
        with self.ddp.no_sync() if self.ddp is not None and not last else contextlib.nullcontext():
            # DDP's own reduction averages over ranks: multiply back
            loss = self.run_piece(micro, targets if exact else targets / self.world.size)
        if exact and (self.ddp is None or not last):
            with self.phases("backward"):
                self.tree.add(micro.leaf, self.take_gradients())
        return loss

    def on_bucket(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Called in backward of the last piece, in the same order on every rank: merge the bucket's part of this
        rank's partial nodes with the last leaf, and send it off. What DDP gets back is not used: `reduce` reads the
        exchange."""
        if self.primed:
            positions = [self.position[id(p)] for p in bucket.parameters()]
            self.exchange.submit(self.with_last_leaf(positions, bucket.gradients()))
            self.bucket_positions.append(positions)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def with_last_leaf(self, positions: list[int], gradients: list[Tensor]) -> dict[Node, list[Tensor]]:
        """This rank's partial nodes of some parameters, its last leaf among them."""
        part = ReductionTree(self.tree.leaves)
        for node, tensors in self.tree.nodes.items():
            part.place(node, [tensors[i] for i in positions])
        part.add(self.last_leaf, gradients)
        return part.nodes

    def reduce(self) -> list[Tensor]:
        exact = self.run.strategy.exact
        if self.ddp is None and exact:
            return self.tree.root
        gradients = self.take_gradients()
        if exact:
            rows = self.sum_rows(self.with_last_leaf(list(self.rows), [gradients[i] for i in self.rows]))
            for i, tensor in rows.items():
                gradients[i] = tensor
            # Into DDP's own buckets, which it keeps anyway: one gradient in memory and not two.
            for positions, tensors in zip(self.bucket_positions, self.exchange.finish(), strict=True):
                torch._foreach_copy_([gradients[i] for i in positions], tensors)
        return gradients

    def prime(self, micro: MicroBatch) -> None:
        """One backward without a gradient: `static_graph` learns its graph from a first backward outside `no_sync`."""
        blank = micro.blank()
        self.task.loss_sum(self.wrapped(**blank.inputs), blank.targets).backward()
        self.take_gradients()
        self.primed = True

    def close(self) -> None:
        super().close()
        self.ddp = self.exchange = self.tree = None  # type: ignore[assignment]
