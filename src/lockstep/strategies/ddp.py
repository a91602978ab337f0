"""PyTorch DistributedDataParallel: gradients travel in buckets while backward is still computing.

In: this rank's micro-batches. Out: the same update on every rank. The difference from `allreduce.py` is *when*
gradients travel: all pieces but the last run in `no_sync`, and the last one's backward hands over each bucket as soon
as its gradients are there.
"""

import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.batch import MicroBatch, StepBatch, StepResult
from lockstep.reduction import Exchange, Node, ReductionTree
from lockstep.run import Run, RunError
from lockstep.strategies.native import Native
from lockstep.tasks.task import Task

_OURS = {"module", "device_ids", "output_device", "process_group", "device_mesh"}


class DDP(Native):
    """`strategy.options` are DistributedDataParallel's own (`bucket_cap_mb`, `static_graph`,
    `find_unused_parameters`, ...)."""

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - _OURS - {"self"}
        if unknown := set(run.strategy.options) - known:
            raise RunError(
                f"strategy.options: DistributedDataParallel has no option {', '.join(sorted(unknown))}; "
                f"it has {', '.join(sorted(known))}"
            )

    def build(self, task: Task) -> None:
        super().build(task)
        if self.world.size == 1:
            return
        # Buffers (position ids) are the same on every rank and stay so. The option was renamed in torch 2.13.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {
            buffers: False,
            "gradient_as_bucket_view": True,
        } | self.run.strategy.options
        ignored = [name for i, name in enumerate(self.named) if i in self.rows]  # their rows travel by themselves
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ignored)
        self.wrapped = DistributedDataParallel(self.model, **options)
        self.position = {id(p): i for i, p in enumerate(self.parameters)}
        self.primed = not self.run.strategy.options.get("static_graph")
        if self.run.strategy.exact:
            self.wrapped.register_comm_hook(None, self.on_bucket)

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        if self.world.size > 1 and not self.primed:
            self.prime(batch.micro_batches[0])
        self.bucket_positions: list[list[int]] = []
        self.exchange = Exchange(batch.leaves, self.world.rank, self.world.size)
        return super().train_step(batch, learning_rate)

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        if self.world.size == 1:
            return super().backward(micro, targets, last)
        self.last_leaf = micro.leaf
        with contextlib.nullcontext() if last else self.wrapped.no_sync():  # type: ignore[operator]
            loss = self.task.loss_sum(self.wrapped(**micro.inputs), micro.targets)
            with self.autocast(False):
                if self.run.strategy.exact:
                    (loss / targets).backward()
                else:
                    (loss * (self.world.size / targets)).backward()  # DDP averages over ranks: multiply back
        if not last and self.run.strategy.exact:
            self.tree.add(micro.leaf, self.take_gradients())
        return loss.detach()

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
        if self.world.size == 1 and self.run.strategy.exact:
            return self.tree.root
        gradients = self.take_gradients()
        if self.world.size > 1 and self.run.strategy.exact:
            rows = self.sum_rows(self.with_last_leaf(list(self.rows), [gradients[i] for i in self.rows]))
            for i, tensor in rows.items():
                gradients[i] = tensor
            for positions, tensors in zip(self.bucket_positions, self.exchange.finish(), strict=True):
                for i, tensor in zip(positions, tensors, strict=True):
                    gradients[i] = tensor
        return gradients

    def prime(self, micro: MicroBatch) -> None:
        """One backward without a gradient: `static_graph` learns its graph from a first backward outside `no_sync`."""
        blank = self.blank(micro)
        self.task.loss_sum(self.wrapped(**blank.inputs), blank.targets).backward()
        self.take_gradients()
        self.primed = True

    def close(self) -> None:
        super().close()
        self.exchange = self.tree = None  # type: ignore[assignment]
