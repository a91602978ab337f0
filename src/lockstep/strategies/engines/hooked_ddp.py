"""A DistributedDataParallel model whose gradients are reduced during backward, whatever engine wraps it.

In: this rank's micro-batches. Out: the same update on every rank. Unlike in `allreduce.py`, reduction overlaps with
backward: all micro-batches but the last run in `no_sync`, and the last one's backward sends each bucket as soon as its
gradients are complete. `ddp.py`, `hf_accelerate.py` and `hf_trainer.py` differ in what wraps the model and runs a
micro-batch.

DDP waits for a gradient of every weight, but a micro-batch may not give one (layers skipped at random, experts, unused
weights). Communication therefore does not depend on DDP: gradients travel in lockstep's own buckets, in the same order
on every rank, during backward if DDP provides them, else after it. DDP reduces only after a whole step in which every
micro-batch gave every weight a gradient, and no more after a step that did not.
"""

# No `from __future__ import annotations` here: DDP reads a communication hook's annotations.

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job
from lockstep.strategies.engines import layers
from lockstep.strategies.engines.side_effects import preserved
from lockstep.strategies.exact.exchange import Exchange, buckets
from lockstep.strategies.exact.gradient_sum import layout_of
from lockstep.strategies.exact.reduce_schedule import links
from lockstep.strategies.exact.update import Gradient
from lockstep.strategies.recovery import ReplicaRecovery
from lockstep.strategies.single import ReplicatedMemory, ReplicatedStrategy
from lockstep.tasks.task import Task


class HookedMemory(ReplicatedMemory):
    """The memory of a model in DDP: one more gradient, in DDP's buckets."""

    @override
    def partial_sums(self, job: Job) -> float:
        return super().partial_sums(job) + 4.0 * (job.processes > 1 and bool(job.run.strategy.exact))


class OverlappedSums:
    """The gradients of a model in a DDP wrapper: who sums them, and what of a step has been sent. Every method but the
    hook is collective."""

    def __init__(self, strategy: "Hooked") -> None:
        self.strategy = strategy
        self.ddp: DistributedDataParallel | None = None  # None: one process
        self.primed = True  # False until DDP has run a backward outside `no_sync`
        self.steady: bool | None = None  # whether every micro-batch so far used every weight; None: no step yet
        self.exchange: Any = None  # of the step under way
        self.arrived: dict[int, Tensor] = {}  # the last leaf's gradients from DDP
        self.sent = 0  # buckets

    def wrap(self) -> None:
        """Create the wrapper, its communication hook and the buckets."""
        strategy = self.strategy
        strategy.wrapped = strategy.wrap()
        self.ddp = strategy.wrapped if isinstance(strategy.wrapped, DistributedDataParallel) else None
        size = strategy.world.size
        assert (self.ddp is not None) == (size > 1), f"{type(strategy.wrapped)} at {size} processes"
        narrow = strategy.run.model.trained_in_bfloat16
        if self.ddp is not None:
            self.position = {id(p): i for i, p in enumerate(strategy.parameters)}
            backwards = dict(reversed(strategy.leaves.dense.items()))  # in backward's order
            self.buckets = buckets(backwards, self.ddp.bucket_bytes_cap)
            self.ddp.register_comm_hook(None, self.on_bucket)
            # DDP's buckets would be bfloat16, like the weights
            if narrow or layers.leaves_out_layers(getattr(strategy.model, "config", None)) is not None:
                self.leave_ddp()

    @property
    def in_tree(self) -> bool:
        """Whether this step sums in tree order; without `exact`, also if DDP cannot reduce."""
        return bool(self.strategy.run.strategy.exact) or (self.ddp is not None and not self.steady)

    def leave_ddp(self) -> None:
        """Bypass DDP from now on: if it started a reduction that it cannot finish, it would raise an error."""
        assert self.ddp is not None
        self.steady, self.strategy.wrapped = False, self.ddp.module

    def release(self) -> None:
        """Free the wrapper, whose hook refers to this object, and pending messages."""
        self.ddp = self.exchange = None
        self.arrived = {}

    def start(self, batch: StepBatch) -> None:
        """Prepare a step."""
        strategy = self.strategy
        if not self.primed and self.steady is not False:
            self._prime(batch.micro_batches[0])
        self.arrived, self.sent = {}, 0
        how, world = links(strategy.run.strategy, strategy.world), strategy.world
        layout = layout_of(batch.count, world.size, batch.shares)
        self.exchange = Exchange(batch.count, world.rank, world.size, links=how, layout=layout)

    def on_bucket(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Communication hook, called in backward of the last micro-batch with complete gradients: send the lockstep
        buckets that are complete. Exact runs do not use the returned tensor: `reduce` reads the exchange."""
        strategy = self.strategy
        if self.primed:
            arrived = {self.position[id(p)]: g for p, g in zip(bucket.parameters(), bucket.gradients())}  # noqa: B905
            leaves = strategy.leaves
            for position in arrived.keys() - leaves.with_gradient if leaves.waiting is not None else ():
                arrived[position] += 0.0  # like `LeafGradients.take`
            self.arrived |= arrived
            if not strategy.run.strategy.exact:
                return allreduce_hook(cast(dist.ProcessGroup, dist.group.WORLD), bucket)
            with strategy.phases("reduction"):  # a bucket waits for the previous one, and so for other ranks
                while self.sent < len(self.buckets) and self.arrived.keys() >= set(self.buckets[self.sent]):
                    self._send()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def _send(self) -> None:
        """Send the next bucket: this rank's partial nodes merged with its last leaf."""
        positions = self.buckets[self.sent]
        self.exchange.submit(self.strategy.leaves.with_last_leaf(positions, [self.arrived[i] for i in positions]))
        self.sent += 1

    def finish(self) -> list[Tensor]:
        """Send what was not sent in backward, and return the sums in the order of `parameters`."""
        strategy = self.strategy
        leaves = strategy.leaves
        if self.ddp is None and self.in_tree:
            return leaves.tree.root
        gradients: list[Tensor] = leaves.pop_all()
        if self.in_tree:
            self.arrived = dict(enumerate(gradients))
            while self.sent < len(self.buckets):
                self._send()
            own = leaves.with_last_leaf(strategy.rows, [gradients[i] for i in strategy.rows])
            for i, tensor in leaves.sum_rows(own, strategy.world).items():
                gradients[i] = tensor
            # Write into the last leaf's memory, which is DDP's buckets: one gradient in memory instead of two.
            for positions, tensors in zip(self.buckets, self.exchange.finish(), strict=True):
                torch._foreach_copy_([gradients[i] for i in positions], tensors)
        elif self.ddp is not None and len(self.arrived) < len(gradients):
            lacking = next(name for i, name in enumerate(strategy.weights.named) if i not in self.arrived)
            raise RunError(
                "LS4090",
                f"strategy.exact: with strategy.exact=false DDP waits for a gradient of {lacking}, which the "
                "last micro-batch of this step did not use; set strategy.exact=true, or DDP's option "
                "find_unused_parameters",
            )
        return gradients

    def note_uses(self, uses: Sequence[int], micro_batches: int) -> None:
        """After a step in which some micro-batch did not use every weight, bypass DDP."""
        if self.ddp is not None and self.steady is not False and self.in_tree:
            self.steady = min(uses) == micro_batches
            if not self.steady:
                self.leave_ddp()

    def _prime(self, micro: MicroBatch) -> None:
        """Run one backward with zero gradients: `static_graph` learns its graph from a first backward outside
        `no_sync`."""
        strategy, blank = self.strategy, micro.blank()
        with preserved(strategy.model, strategy.dry_run.effects.written):
            strategy.task.loss_sum(strategy.wrapped(**blank.inputs), blank.targets).backward()
        strategy.leaves.pop_all()
        self.primed = True


class WrapperRecovery(ReplicaRecovery):
    """Recovery of a wrapped model: removes the wrapper, and wraps the model again in the new process group."""

    strategy: "Hooked"

    @override
    def detach_group(self) -> None:
        super().detach_group()
        strategy = self.strategy
        strategy.wrapped, strategy.update.optimizer = strategy.model, strategy.update.stepper
        strategy.overlap.release()
        strategy.overlap = OverlappedSums(strategy)

    @override
    def attach_group(self) -> None:
        super().attach_group()
        self.strategy.overlap.wrap()


class Hooked(ReplicatedStrategy):
    """A replicated model in a DDP wrapper, with the exact reduction as its communication hook."""

    memory = HookedMemory()
    recovery: ClassVar[type[WrapperRecovery]] = WrapperRecovery

    @abstractmethod
    def wrap(self) -> nn.Module:
        """Return `self.model` as its engine runs it: in DistributedDataParallel if there are several processes. May
        replace `self.update.optimizer` by the engine's."""

    @override
    def build(self, task: Task) -> None:
        super().build(task)
        self.overlap = OverlappedSums(self)
        ignored = [
            name for i, name in enumerate(self.weights.named) if i in self.rows
        ]  # row-sparse, reduced separately
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ignored)
        self.overlap.wrap()

    @override
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        self.overlap.start(batch)
        return super().train_step(batch, learning_rate)

    @override
    def backward(self, micro: MicroBatch, targets: float, last: bool) -> Tensor:
        ddp, in_tree = self.overlap.ddp, self.overlap.in_tree
        if in_tree:
            self.leaves.begin(micro.index)
        self.travelling = ddp is not None and last and bool(self.overlap.steady)
        with ddp.no_sync() if ddp is not None and not self.travelling else contextlib.nullcontext():
            # DDP's own reduction averages over ranks: multiply back
            loss = self.run_micro_batch(micro, targets if in_tree else targets / self.world.size)
        if in_tree and (ddp is None or not last):
            with self.phases("backward"):
                self.leaves.end()
        return loss

    @override
    def reduce(self) -> list[Tensor]:
        return self.overlap.finish()

    @override
    def optimizer_step(
        self, batch: StepBatch, gradient: Gradient, learning_rate: float, losses: Tensor, uses: Sequence[int]
    ) -> StepResult:
        self.overlap.note_uses(uses, batch.count)
        return super().optimizer_step(batch, gradient, learning_rate, losses, uses)

    @override
    def close(self) -> None:
        super().close()
        self.overlap.release()
