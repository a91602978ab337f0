"""Training in one process: a complete training step, the reference for every other strategy.

In: the micro-batches of a step. Out: one update of a model that this rank holds whole. `ReplicatedStrategy` has the
whole step except `reduce`, which sums gradients over ranks; `Single` has no other ranks. `allreduce.py` and `ddp.py`
describe their differences. Parts: `LeafGradients` adds gradients in a fixed order, `TrainedWeights` are what the
optimizer updates, `WeightUpdate` makes the update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.config.lazy import lazy
from lockstep.config.run import RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.data.job import Job, MemoryEstimate, StrategyFacts
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.torch_internals import local
from lockstep.strategies.engines import side_effects
from lockstep.strategies.exact import stepper, training_state
from lockstep.strategies.exact.gradient_sum import LeafGradients, most_held, row_sparse
from lockstep.strategies.exact.step_totals import Statistics
from lockstep.strategies.exact.training_state import TrainedWeights
from lockstep.strategies.observer import observing
from lockstep.strategies.strategy import Recomputation, Strategy, WeightFormats
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from lockstep.strategies.engines import blocks
    from lockstep.strategies.engines.region import Region
    from lockstep.tasks.models.inference import Decoding
else:  # for compiled, recomputed or divided layers
    (blocks,) = lazy("lockstep.strategies.engines", "blocks")


class ReplicatedMemory(MemoryEstimate):
    """The memory of a replica: a whole copy, and the partial sums of its share of the tree."""

    @override
    def partial_sums(self, job: Job) -> float:
        run = job.run
        partials = most_held(run.micro_batches, job.processes, uneven=bool(run.launch.rebalance_every))
        sums = 4.0 * (partials - 1) if run.strategy.exact else 0.0
        graphs = run.model.cuda_graphs and run.model.compile == "whole"  # which write into gradients of their own
        return sums + 4.0 * graphs


class ReplicatedRecomputation(Recomputation):
    """Recomputation for a `ReplicatedStrategy`: each rank has the whole model, so one rank computes alone."""

    strategy: ReplicatedStrategy

    @override
    def compute(self, step: int, micro: MicroBatch, targets: float) -> None:
        strategy, totals, precision = self.strategy, self.strategy.totals, self.strategy.precision

        def backward() -> Tensor:
            outputs = strategy.model(**strategy.inputs_of(micro))
            loss = totals.loss_sum(strategy.task, outputs, micro, strategy.observer)
            with precision.autocast(False):
                torch.autograd.grad(precision.scaled(loss / targets), strategy.parameters, allow_unused=True)
            return loss.detach()

        with precision.autocast(), totals.preserved():
            strategy.compute(step, micro, backward)

    @override
    def replicated_weights(self) -> list[Tensor]:
        return [p.detach() for p in self.strategy.parameters]

    @override
    def replicated_state(self) -> list[Tensor]:
        state = sorted(self.strategy.state.sharded_state_dict().items())
        return [tensor.detach() for _, tensor in state if local(tensor) is tensor]


class ReplicatedStrategy(Strategy):
    """Base of strategies in which each rank holds all weights and computes some of a step's micro-batches."""

    plugin = "strategies"  # a base: it has no name in a run file

    exact = True
    facts = StrategyFacts(
        weight_formats=WeightFormats.BFLOAT16 | WeightFormats.BFLOAT16_ALONE | WeightFormats.FOUR_BITS,
        runs_whole_model=True,
    )
    statistics: Statistics
    memory = ReplicatedMemory()
    recomputation = ReplicatedRecomputation
    region: Region | None = None  # compiled micro-batches (`model.compile: whole`)
    travelling = False  # whether this micro-batch's backward sends gradients, and so waits for other ranks

    # -- before the first step ---------------------------------------------------------------------------------------

    @override
    def build(self, task: Task) -> None:
        self.task, run, exact = task, self.run, self.run.strategy.exact
        self.model = self.make_model().to(self.world.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        for position, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self.on_grad_ready, position))
        with self.precision.autocast():  # some attention kernels support bf16 only
            uses = side_effects.count_uses(self.model, task.first_inputs(self.world.device)) if exact else {}
        whole = run.model.compile == "whole"  # its code returns dense gradients
        plain = exact and not run.model.trained_in_bfloat16 and not whole
        sparse = row_sparse(self.model, self.world.device, uses) if plain else set()
        if run.model.changes_layers or run.strategy.tensor_leaves > 1:
            blocks.prepare(run.model, self.model, run.strategy.tensor_leaves)
        if whole:
            from lockstep.strategies.engines.region import Region

            self.region = Region(self, task, self.model)
        self.weights = self.make_weights(masters=run.model.trained_in_bfloat16 and run.optim.master_weights)
        if run.model.trained_in_bfloat16:
            training_state.sums_in_float32([*self.parameters, *self.weights.updated.values()])
        self.rows = [i for i, name in enumerate(self.weights.named) if name in sparse]  # row-sparse gradients
        self.leaves = LeafGradients(self.parameters, self.rows)
        treated = stepper.assigned(run.optim, self.model)
        groups = stepper.groups(run.optim, self.weights.updated.items(), treated)
        self.set_optimizer(stepper.Stepper(run.optim, groups, self.weights.to_dtensor))
        # Autograd adds the gradients of a weight used three times or more in an order that depends on when its
        # low-precision copy was recorded. Casting again for every micro-batch makes that order the same for all.
        self.fresh_casts = exact and run.precision != "fp32" and max(uses.values(), default=0) > 2
        self.statistics = Statistics(self.model)
        self.model.train()
        self.wrapped = self.model  # called like forward in training: an engine may wrap it

    def make_model(self) -> nn.Module:
        """Return the model, in host memory."""
        return training_state.make_model(self.task)

    def make_weights(self, masters: bool) -> TrainedWeights:
        """Return the weights that this rank updates: all of them."""
        return TrainedWeights(self.model, masters)

    # -- one step ----------------------------------------------------------------------------------------------------

    @override
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        losses = self.totals.start(batch.count)  # [M], zeros: each rank fills in its own
        self.leaves.start(batch.count, batch.shares)
        self.statistics.start(batch.count)
        with self.precision.autocast():  # around the whole step, so that weights are cast once
            for micro in batch.micro_batches:
                last = micro is batch.micro_batches[-1]
                backward = partial(self.backward, micro, batch.targets, last)
                losses[micro.index] = self.compute(batch.step, micro, backward)
                self.statistics.take(micro)
                self.totals.switched += not all(p.requires_grad for p in self.parameters)
        with self.phases("reduction"):
            gradients = self.reduce()
            losses, uses = self.totals.all_reduce(losses, self.leaves.grad_counts)
            self.leaves.free()
        return self.optimizer_step(batch, self.weights.gradient(gradients), learning_rate, losses, uses)

    def compute(self, step: int, micro: MicroBatch, backward: Callable[[], Tensor]) -> Tensor:
        """Run forward and backward of one micro-batch by calling `backward`, which returns the loss sum. Dropout
        depends on seed, step and micro-batch, not on the rank. Call it within `autocast`."""
        if self.fresh_casts:
            torch.clear_autocast_cache()
        seed_everything(self.run.seed, step, micro.index)
        compiled = self.region is not None and self.region.has_code(micro)
        arithmetic = self.region.arithmetic() if self.region is not None and compiled else nullcontext()
        observed = observing(self.observer, micro.index, self.model) if self.observer is not None else nullcontext()
        with observed, arithmetic:
            return backward()

    def backward(self, micro: MicroBatch, targets: float, last: bool) -> Tensor:
        """Run one micro-batch forward and backward, and add its gradient to the tree. `targets`: of the whole step, by
        which its loss is divided, once; `last`: whether it is this rank's last. Returns the loss sum."""
        if not self.run.strategy.exact:  # autograd sums the gradients of all micro-batches
            return self.run_micro_batch(micro, targets)
        self.leaves.begin(micro.index)
        loss = self.run_micro_batch(micro, targets)
        with self.phases("backward"):
            self.leaves.end()
        return loss

    def run_micro_batch(self, micro: MicroBatch, divisor: float) -> Tensor:
        """Run forward and backward of one micro-batch, with the gradient of loss sum / divisor. Returns the loss sum,
        detached."""
        inputs = self.inputs_of(micro)
        graphs = None if self.region is None or self.travelling else self.region.graphs
        if graphs is not None and graphs.fits(inputs):
            replayed: Tensor = graphs.run(self, inputs, micro, divisor)
            return replayed
        with self.phases("forward"):
            loss = self.totals.loss_sum(self.task, self.wrapped(**inputs), micro, self.observer)
        with self.phases("overlapped" if self.travelling else "backward"), self.precision.autocast(False):
            self.precision.scaled(loss / divisor).backward()
        return loss.detach()

    def inputs_of(self, micro: MicroBatch) -> Mapping[str, Tensor]:
        """Return the model's inputs for a micro-batch. With a compiled model, they also select its compiled code."""
        return micro.inputs if self.region is None else self.region.inputs(micro)

    def on_grad_ready(self, position: int, parameter: Tensor) -> None:
        """Autograd hook: a parameter's gradient of this micro-batch is complete."""
        self.leaves.note(position)

    @abstractmethod
    def reduce(self) -> list[Tensor]:
        """Return the gradient sum over all micro-batches of all ranks, in the order of `self.parameters`."""

    # -- evaluation --------------------------------------------------------------------------------------------------

    @override
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        with side_effects.evaluating(self.model, self.dry_run.effects), self.precision.autocast():
            return self.model(**inputs).logits

    @override
    def generate(self, inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        from lockstep.tasks.models import inference

        with side_effects.evaluating(self.model, self.dry_run.effects), self.precision.autocast():
            return inference.by_transformers(self.model, inputs, how)

    @override
    def close(self) -> None:
        self.region = None
        del self.model, self.wrapped, self.update, self.state, self.parameters, self.weights, self.leaves


class Single(ReplicatedStrategy):
    """A strategy for one process: the gradient sum is the root of its own reduction tree."""

    facts = replace(ReplicatedStrategy.facts, chooses_links=False)

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        run, processes = job.run, job.processes
        if processes > 1:
            raise RunError(
                "LS4260",
                f"strategy.name: single supports one process only, and this job has {processes}; use "
                "strategy.name=ddp, or launch.processes=1",
            )
        if run.strategy.options:
            raise RunError(
                "LS4261", f"strategy.options: single has no options; remove {', '.join(run.strategy.options)}"
            )

    @override
    def reduce(self) -> list[Tensor]:
        return self.leaves.tree.root if self.run.strategy.exact else self.leaves.pop_all()
