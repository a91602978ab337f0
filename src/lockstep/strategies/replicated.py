"""The one accumulate, clip, update body of the plain strategies; they differ in `reduce` and, for ddp, in `backward`.

In: micro-batches. Out: one update of a replicated model. Reading order: `single.py`, `allreduce.py`, `ddp.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.config.run import Run
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.sharded import Saved, local
from lockstep.strategies.abilities import Recomputes
from lockstep.strategies.engines import blocks, layers, side_effects
from lockstep.strategies.exact import held_state, stepper
from lockstep.strategies.exact.leaf_gradients import LeafGradients
from lockstep.strategies.exact.norm_and_clip import Gradient, Part
from lockstep.strategies.exact.reduction_tree import most_held
from lockstep.strategies.exact.rows import row_sparse
from lockstep.strategies.exact.statistics import Statistics
from lockstep.strategies.exact.stepper import make_model
from lockstep.strategies.observer import observing
from lockstep.strategies.strategy import DataShard, WeightFormats
from lockstep.tasks.models import inference
from lockstep.tasks.models.inference import Decoding
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from lockstep.strategies.engines.region import Region


class ReplicatedStrategy(Recomputes):
    """A full replica of model and optimizer on every rank."""

    plugin = "strategies"  # a base: it has no name in a run file

    exact = True
    weight_formats = WeightFormats.BFLOAT16 | WeightFormats.BFLOAT16_ALONE | WeightFormats.FOUR_BITS
    gloo_threads: ClassVar[int] = 1  # 2 if it uses no functional collectives in exact mode
    statistics: Statistics
    runs_whole_model = True
    region: Region | None = None  # compiled micro-batches (`model.compile: whole`)
    travelling = False  # whether this micro-batch's backward sends gradients, and so waits for other ranks

    @classmethod
    def partial_sums(cls, run: Run, processes: int) -> float:
        partials = most_held(run.micro_batches, processes, uneven=bool(run.launch.rebalance_every))
        return 4.0 * (partials - 1) if run.strategy.exact else 0.0

    def build(self, task: Task) -> None:
        self.task = task
        self.model = self.make(task).to(self.world.device)
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        for i, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self.on_grad_ready, i))
        exact = self.run.strategy.exact
        with self.precision.autocast():  # some attention kernels support bf16 only
            uses = layers.uses(self.model, first_inputs(task, self.world.device)) if exact else {}
        narrow = self.run.model.trained_in_bfloat16
        whole = self.run.model.compile == "whole"  # its code returns dense gradients
        sparse = row_sparse(self.model, self.world.device, uses) if exact and not narrow and not whole else set()
        blocks.prepare(self.run, self.model)
        if whole:
            from lockstep.strategies.engines.region import Region

            self.region = Region(self, task, self.model)
        self.places = self.parts_to_step()
        self.stepped = held_state.masters_of(self.places) if held_state.keeps_masters(self.run) else self.places
        if narrow:
            held_state.sums_in_float32([*self.parameters, *self.stepped.values()])
        self.rows = [i for i, name in enumerate(self.stepped) if name in sparse]
        self.leaves = LeafGradients(self.parameters, self.rows)
        groups = stepper.groups(self.run.optim, self.stepped.items(), stepper.assigned(self.run.optim, self.model))
        self.set_optimizer(stepper.Stepper(self.run.optim, groups, self.to_dtensor))
        # Autograd adds the gradients of a weight used three times or more in an order that depends on when its
        # low-precision copy was recorded. Casting again for every micro-batch makes that order the same for all.
        self.fresh_casts = exact and self.run.precision != "fp32" and max(uses.values(), default=0) > 2
        self.statistics = Statistics(self.model)
        self.model.train()
        self.wrapped = self.model

    @property
    def dense(self) -> dict[int, nn.Parameter]:
        """Trained parameters whose gradients are not row-sparse, by position."""
        return {i: p for i, p in enumerate(self.parameters) if i not in self.rows}

    def make(self, task: Task) -> nn.Module:
        """Return the model, in host memory."""
        return make_model(task)

    def parts_to_step(self) -> dict[str, nn.Parameter]:
        """Return this rank's part of each trained parameter, which its optimizer updates."""
        return self.named

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        self.leaves.start(batch.count, batch.shares)
        losses = self.totals.start(batch.count)
        self.statistics.start(batch.count)
        with self.precision.autocast():  # around the whole step, so that weights are cast once
            for micro in batch.micro_batches:
                last = micro is batch.micro_batches[-1]
                losses[micro.index] = self.compute(
                    batch.step, micro, partial(self.backward, micro, batch.targets, last)
                )
                self.statistics.take(micro)
                self.totals.switched += not all(p.requires_grad for p in self.parameters)
        with self.phases("reduction"):
            gradients = self.reduce()
            losses, uses = self.agree(losses, self.leaves.grad_counts)
            self.leaves.free()
        return self.optimizer_step(batch, self.whole_gradient(gradients), learning_rate, losses, uses)

    def compute(self, step: int, micro: MicroBatch, backward: Callable[[], Tensor]) -> Tensor:
        """Run forward and backward of one micro-batch by calling `backward`, which returns the loss sum. Dropout
        depends on seed, step and micro-batch, not on the rank. Call it within `autocast`."""
        if self.fresh_casts:
            torch.clear_autocast_cache()
        seed_everything(self.run.seed, step, micro.index)
        compiled = self.region is not None and self.region.has_code(micro)
        arithmetic = self.region.arithmetic() if self.region is not None and compiled else nullcontext()
        with observing(self.observer, micro.index, self.model), arithmetic:
            return backward()

    def inputs_of(self, micro: MicroBatch) -> Mapping[str, Tensor]:
        """Return the model's inputs for a micro-batch, by which it runs compiled code if it has some."""
        return micro.inputs if self.region is None else self.region.inputs(micro)

    def backward(self, micro: MicroBatch, targets: float, last: bool) -> Tensor:
        """Run one micro-batch forward and backward, and add its gradient to the tree. Returns the micro-batch's loss
        sum."""
        if not self.run.strategy.exact:  # autograd sums the gradients of all micro-batches
            return self.run_micro_batch(micro, targets)
        self.leaves.begin(micro.index)
        loss = self.run_micro_batch(micro, targets)
        with self.phases("backward"):
            self.leaves.end()
        return loss

    def run_micro_batch(self, micro: MicroBatch, divisor: float) -> Tensor:
        """Run forward and backward of one micro-batch on `self.wrapped`, with the gradient of loss sum / divisor.
        Returns the loss sum, detached."""
        with self.phases("forward"):
            loss = self.totals.loss_sum(self.task, self.wrapped(**self.inputs_of(micro)), micro, self.observer)
        with self.phases("overlapped" if self.travelling else "backward"), self.precision.autocast(False):
            self.precision.scaled(loss / divisor).backward()
        return loss.detach()

    def recompute(self, step: int, micro: MicroBatch, targets: float) -> None:
        def backward() -> Tensor:
            loss = self.totals.loss_sum(self.task, self.model(**self.inputs_of(micro)), micro, self.observer)
            with self.precision.autocast(False):
                torch.autograd.grad(self.precision.scaled(loss / targets), self.parameters, allow_unused=True)
            return loss.detach()

        with self.precision.autocast(), self.totals.preserved():
            self.compute(step, micro, backward)

    def replicated_weights(self) -> list[Tensor]:
        return [p.detach() for p in self.parameters]

    def replicated_state(self) -> list[Tensor]:
        state = sorted(self.sharded_state_dict().items())
        return [tensor.detach() for _, tensor in state if local(tensor) is tensor]

    @abstractmethod
    def reduce(self) -> list[Tensor]:
        """Return the gradient sum over all micro-batches of all ranks, in the order of `self.parameters`."""

    def on_grad_ready(self, position: int, parameter: Tensor) -> None:
        """Autograd hook: a parameter's gradient of this micro-batch is complete."""
        self.leaves.note(position)

    def whole_gradient(self, gradients: list[Tensor]) -> Gradient:
        """Return the step's gradient; every rank holds all of it."""
        updated = zip(self.stepped.items(), gradients, strict=True)
        return Gradient([Part(n, p, g) for (n, p), g in updated], list(self.named))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        with self.evaluating():
            return self.model(**inputs).logits

    def generate(self, inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        with self.evaluating():
            return inference.by_transformers(self.model, inputs, how)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which the model runs in evaluation mode without gradients. Restores weights that a model changes
        for evaluation (rwkv divides them by powers of two)."""
        names = self.effects.evaluated
        self.model.eval()
        kept = side_effects.preserved(self.model, names) if names else nullcontext()
        with kept, torch.no_grad(), self.precision.autocast():
            yield
        self.model.train()

    # -- state -------------------------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        if self.stepped is not self.places:
            held_state.write_masters(self.stepped.values(), self.places.values())

    def to_dtensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of a trained parameter, gradient or moment, as a DTensor if it is sharded."""
        return tensor

    def updated_parts(self) -> list[tuple[str, Tensor]]:
        return [(name, self.to_dtensor(name, tensor.detach())) for name, tensor in self.stepped.items()]

    def to_save(self) -> dict[str, Tensor]:
        """Return weights and buffers; float32 master weights in place of the weights they belong to."""
        own = {} if self.stepped is self.places else self.stepped
        return held_state.tensors_of(self.model) | {name: self.to_dtensor(name, t.detach()) for name, t in own.items()}

    def sharded_state_dict(self) -> dict[str, Tensor]:
        return held_state.sharded(self.to_save(), self.update.stepper, self.precision.loss_scale)

    def load_sharded_state_dict(self, saved: Saved) -> None:
        held_state.load(saved, self.to_save(), self.update.stepper, self.precision.loss_scale)
        if self.stepped is not self.places:
            self.weights_changed()

    def export(self) -> dict[str, Tensor] | None:
        return {k: v.detach() for k, v in self.model.state_dict().items()} if self.world.is_main else None

    def close(self) -> None:
        del (
            self.model,
            self.wrapped,
            self.update,
            self.parameters,
            self.named,
            self.stepped,
            self.places,
            self.leaves,
        )


class WholeStateRecovery(ReplicatedStrategy):
    """A strategy with the full state on every rank, so that surviving ranks can continue in a new process group after a
    failure: `launch.on_rank_failure: continue`."""

    plugin = "strategies"  # a base: it has no name in a run file

    def detach_group(self) -> None:
        """Drop everything that belongs to the process group: the wrapper and pending messages. Keeps the state between
        two updates."""
        self.leaves.start(0, None)
        self.leaves.waiting = None
        for parameter in (*self.parameters, *self.stepped.values()):
            parameter.grad = None

    def attach_group(self) -> None:
        """Use a new process group, whose ranks all have the full state. Collective."""
        self.data_parallel = DataShard(self.world.rank, self.world.size, self.world.sum)


def first_inputs(task: Task, device: torch.device) -> Mapping[str, Tensor]:
    """Return the model inputs of the first two training examples."""
    columns = task.splits["train"]
    return task.collate(columns, np.arange(min(2, len(columns))), 0).to(device).inputs


def call_on_cpu(model: nn.Module, task: Task) -> None:
    """Run forward on the first two examples on the CPU, before the model is sharded."""
    model(**first_inputs(task, torch.device("cpu")))
