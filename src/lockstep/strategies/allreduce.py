"""All-reduce by hand: every rank computes its share of the micro-batches, then all ranks sum their gradients.

In: this rank's micro-batches. Out: the same update on every rank. It differs from `single.py` only in `reduce`.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.strategies.exact.exchange import Exchange, all_reduce_flat, buckets
from lockstep.strategies.exact.reduce_schedule import links
from lockstep.strategies.recovery import ReplicaRecovery
from lockstep.strategies.single import ReplicatedStrategy
from lockstep.tasks.task import Task


class AllReduce(ReplicatedStrategy):
    """`strategy.options.bucket_cap_mb`: bucket size in MiB (default 25)."""

    gloo_threads = 2
    recovery = ReplicaRecovery

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        run = job.run
        if unknown := set(run.strategy.options) - {"bucket_cap_mb"}:
            raise RunError(
                "LS4000",
                f"strategy.options: allreduce has no option {', '.join(sorted(unknown))}; it has bucket_cap_mb",
            )
        cap = run.strategy.options.get("bucket_cap_mb", 25)
        if not isinstance(cap, int | float) or isinstance(cap, bool) or cap <= 0:
            raise RunError(
                "LS4001", f"strategy.options.bucket_cap_mb: invalid value {cap!r}; expected a number > 0 (MiB)"
            )

    @override
    def build(self, task: Task) -> None:
        super().build(task)
        cap_bytes = int(self.run.strategy.options.get("bucket_cap_mb", 25) * 2**20)
        self.buckets = buckets(self.leaves.dense, cap_bytes)

    @override
    def reduce(self) -> list[Tensor]:
        if not self.run.strategy.exact:
            own = self.leaves.pop_all()
            return own if self.world.size == 1 else all_reduce_flat(own, self.buckets)
        return self.leaves.tree.root if self.world.size == 1 else self.sum_in_tree_order()

    def sum_in_tree_order(self) -> list[Tensor]:
        """Sum over all ranks in tree order, which does not depend on the number of ranks."""
        how, tree = links(self.run.strategy, self.world), self.leaves.tree
        layout = self.leaves.layout(self.world.size)
        exchange = Exchange(tree.leaves, self.world.rank, self.world.size, links=how, layout=layout)
        for positions in self.buckets:
            exchange.submit({node: [tensors[i] for i in positions] for node, tensors in tree.nodes.items()})
            self.leaves.release(positions)
        gradients = self.leaves.sum_rows(
            {node: [t[i] for i in self.rows] for node, t in tree.nodes.items()}, self.world
        )
        for positions, tensors in zip(self.buckets, exchange.finish(), strict=True):
            gradients |= dict(zip(positions, tensors, strict=True))
        return [gradients[i] for i in range(len(self.parameters))]
