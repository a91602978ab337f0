"""The one accumulate, clip, update body of the plain strategies; they differ in `reduce` and, for ddp, in `backward`.

In: micro-batches. Out: one update of a replicated model. Read `single.py`, then `allreduce.py`, then `ddp.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.strategies.engines import blocks, layers
from lockstep.strategies.exact import optim
from lockstep.strategies.exact.gradient import Gradient, Part
from lockstep.strategies.exact.reduction import Node, ReductionTree
from lockstep.strategies.exact.sparse_rows import DenseRows, by_row, exchange_rows, row_sparse
from lockstep.strategies.exact.statistics import Statistics
from lockstep.strategies.strategy import Strategy, make_model
from lockstep.tasks.models import decoding
from lockstep.tasks.models.decoding import Decoding
from lockstep.tasks.task import Task


class Native(Strategy):
    """A whole copy of model and optimizer on every rank."""

    exact = True
    statistics: Statistics

    @property
    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def trained_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def build(self, task: Task) -> None:
        self.task = task
        self.model = make_model(task).to(self.world.device)
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.uses = [0] * len(self.parameters)  # of this step: how many of its micro-batches here gave each a gradient
        exact = self.run.strategy.exact
        with self.autocast():  # attention of some kinds takes bf16 only
            uses = layers.uses(self.model, first_inputs(task, self.world.device)) if exact else {}
        sparse = row_sparse(self.model, self.world.device, uses) if exact else set()
        blocks.prepare(self.run, self.model)
        self.rows = {i: DenseRows(p) for i, (n, p) in enumerate(self.named.items()) if n in sparse}
        self.optimizer = optim.build(self.run.optim, self.model)
        # A weight that is used three times and more gets its gradient's terms in an order that depends on when autograd
        # saw its bf16 copy being made: then it is made anew for every micro-batch, and the order is the same for all.
        self.fresh_casts = exact and self.run.precision == "bf16" and max(uses.values(), default=0) > 2
        self.statistics = Statistics(self.model)
        self.model.train()
        self.wrapped = self.model

    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        self.tree = ReductionTree(batch.count)
        self.uses = [0] * len(self.parameters)
        losses = torch.zeros(batch.count, dtype=torch.float64, device=self.world.device)  # [M], 0 for others' leaves
        self.statistics.start(batch.count)
        with self.autocast():  # around the whole step: weights are cast to bf16 once, not once a micro-batch
            for micro in batch.micro_batches:
                if self.fresh_casts:
                    torch.clear_autocast_cache()
                # dropout depends on the micro-batch, not on the rank
                seed_everything(self.run.seed, batch.step, micro.index)
                losses[micro.index] = self.backward(micro, batch.targets, last=micro is batch.micro_batches[-1])
                self.statistics.take(micro)
        with self.phases("reduction"):
            gradients = self.reduce()
            losses, uses = self.agree(losses, self.uses)
            self.tree = ReductionTree(0)  # lets go of partial sums
        with self.phases("optimizer"):
            norm, used = self.update(batch.step, self.whole_gradient(gradients), learning_rate, losses, uses)
        self.statistics.finish(self.world.sum, used)
        return StepResult(losses.sum() / batch.targets, norm, used)

    def backward(self, micro: MicroBatch, targets: int, last: bool) -> Tensor:
        """One micro-batch, forward and backward; its gradient goes into the tree. Returns the micro-batch's loss
        sum."""
        with self.phases("forward"):
            loss = self.task.loss_sum(self.wrapped(**micro.inputs), micro.targets)
        with self.phases("backward"):
            with self.autocast(False):
                (loss / targets).backward()
            if self.run.strategy.exact:
                self.tree.add(micro.index, self.take_gradients())
        return loss.detach()  # without `exact`, autograd has added the gradient to those of the micro-batches before

    @abstractmethod
    def reduce(self) -> list[Tensor]:
        """The sum of all leaves of all ranks, in the order of `self.parameters`."""

    def take_gradients(self) -> list[Tensor]:
        """This micro-batch's gradients, in the order of `self.parameters`, zero where it has none; the parameters hold
        none afterwards."""
        self.uses = [uses + (p.grad is not None) for uses, p in zip(self.uses, self.parameters, strict=True)]
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        for i in self.rows:
            gradients[i] = by_row(gradients[i])
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def sum_rows(self, nodes: Mapping[Node, list[Tensor]]) -> dict[int, Tensor]:
        """The row-sparse gradients summed over ranks in tree order, by position; `nodes` holds this rank's partial sums
        in the order of `self.rows`. Collective."""
        ours = (self.world.rank, self.world.size)
        return {
            i: exchange_rows({node: tensors[j] for node, tensors in nodes.items()}, self.tree.leaves, *ours)
            for j, i in enumerate(self.rows)
        }

    def whole_gradient(self, gradients: list[Tensor]) -> Gradient:
        """Every rank holds all of it."""
        named = zip(self.named.items(), gradients, strict=True)
        return Gradient([Part(n, p, g, rows=self.rows.get(i)) for i, ((n, p), g) in enumerate(named)], list(self.named))

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        self.model.eval()
        with torch.no_grad(), self.autocast():
            logits = self.model(**inputs).logits
        self.model.train()
        return logits

    def generate(self, inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        self.model.eval()
        with torch.no_grad(), self.autocast():
            tokens = decoding.by_transformers(self.model, inputs, how)
        self.model.train()
        return tokens

    def export(self) -> dict[str, Tensor] | None:
        return {k: v.detach() for k, v in self.model.state_dict().items()} if self.world.is_main else None

    def close(self) -> None:
        del self.model, self.wrapped, self.optimizer, self.parameters, self.named


def first_inputs(task: Task, device: torch.device) -> Mapping[str, Tensor]:
    """Two examples, as the model takes them."""
    columns = task.splits["train"]
    return task.collate(columns, np.arange(min(2, len(columns))), 0).to(device).inputs
