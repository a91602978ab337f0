"""`guard`: a processor, a memory or a link that changes bits in silence is found in the step in which it does.

In: a step that is about to be trained. Out: the same result, or, before anything is updated, which micro-batch, which
ranks and which hosts did not come to the same bits.

At every `sdc_check.every`-th step one micro-batch, drawn from seed and step, is computed twice: by the rank whose it
is, as part of the step, and by the next one (where there is one rank, by itself). Their gradients must have the same
bits; no tolerance is needed, because a micro-batch has the same bits wherever it runs. A third computation decides who
was wrong, and `leaving.py` what becomes of it. At these steps the weights of all ranks are compared, too; before every
checkpoint the weights and, where all hold it, the state of the optimizer: what a run goes on from is what its ranks
agreed on. It takes strategies that hold a whole copy of the model.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.state_hash import summed
from lockstep.config.guard import TAKEN
from lockstep.config.run import Run, RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.sharded import local
from lockstep.strategies.exact.reduction import even
from lockstep.strategies.native import Native
from lockstep.training.eviction import leaving

if TYPE_CHECKING:
    from lockstep.training.session import Session


class Corrupted(Exception):
    """Ranks did not come to the same bits; nothing was updated. `sound`: the weights are the same on all ranks.
    `leaves`: the ranks that the job goes on without, if it does."""

    def __init__(self, told: str, sound: bool, leaves: Sequence[int] = ()) -> None:
        super().__init__(told)
        self.sound, self.leaves = sound, list(leaves)


class Guard:
    """What trains a session's steps, and looks at some of them twice."""

    def __init__(self, session: Session) -> None:
        """Errors: `RunError` for what cannot be guarded. Collective."""
        self._run, self._world, self._feed = session.run, session.world, session.feed
        self._strategy: Any = session.strategy
        self._session, self.retried = session, 0  # steps that were computed once more
        if not self._run.sdc_check.every:
            return
        if not isinstance(self._strategy, Native):
            raise RunError(f"sdc_check.every: {self._run.strategy.name} takes parts of this model; it takes {TAKEN}")
        if self._strategy.statistics.names:
            raise RunError(
                f"sdc_check.every: the model keeps running statistics ({self._strategy.statistics.names[0]}), which a "
                "second computation would change; leave it out"
            )

    def trained(self, batch: StepBatch, rate: float) -> StepResult:
        """One update. Collective. Errors: `Corrupted`, on every rank, before anything is updated."""
        every = self._run.sdc_check.every
        if not every or (batch.step + 1) % every:
            return self._strategy.train_step(batch, rate)
        try:
            return self._watched(batch, rate)
        except Corrupted as caught:
            if self._run.sdc_check.on_difference != "retry" or not caught.sound:
                raise
            self.retried += 1
            self._session.journal.event("guard", batch.step, retried=True)
            if self._world.is_main:
                self._session.checkpoints.say(f"{caught}. The step is computed once more")
        return self._watched(batch, rate)

    def _watched(self, batch: StepBatch, rate: float) -> StepResult:
        self._agree(f"before step {batch.step + 1}", [p.detach() for p in self._strategy.parameters])
        world, strategy = self._world, self._strategy
        chosen = drawn(self._run, batch.step)
        shares = batch.shares or even(self._run.micro_batches, world.size)
        owner = next(rank for rank, each in enumerate(shares) if chosen in each)
        witness = (owner + 1) % world.size
        theirs = self._again(batch, chosen) if world.rank == witness else None
        heard = _Listener(strategy)
        plain: Callable[..., Tensor] = strategy.backward

        def backward(micro: MicroBatch, targets: int, last: bool) -> Tensor:
            with heard.listening(micro.index == chosen):
                return plain(micro, targets, last)

        def compare() -> None:
            mine = heard.hash() if world.rank == owner else None
            found = world.all_gather((mine, theirs))
            first, second = found[owner][0], found[witness][1]
            if first != second:
                self._tell(batch, chosen, owner, witness, (first, second))

        strategy.backward, strategy.before_update = backward, compare
        try:
            return strategy.train_step(batch, rate)
        finally:
            del strategy.backward
            strategy.before_update = None

    def _tell(self, batch: StepBatch, chosen: int, owner: int, witness: int, found: tuple[Any, Any]) -> None:
        """Let a third rank decide. Collective. Errors: `Corrupted`."""
        world, hosts = self._world, self._world.hosts
        third = third_of(owner, witness, hosts)
        decided = world.all_gather(self._again(batch, chosen) if world.rank == third else None)[third]
        who = {witness: f"rank {witness} on {hosts[witness]}", owner: f"rank {owner} on {hosts[owner]}, whose it is,"}
        second = "it did so again" if owner == witness else f"{who[witness]} did"
        wrong = [witness] if decided == found[0] else [owner] if decided == found[1] else []
        verdict = (
            f"a third computation says that {who[wrong[0]]} was wrong"
            if wrong
            else "and a third computation came to another one"
        )
        then, leaves = leaving(self._run, hosts, wrong, (owner, witness, third))
        raise Corrupted(
            f"guard: step {batch.step + 1}: the gradient of micro-batch {chosen} is not the same where {who[owner]} "
            f"computed it and where {second}; {verdict}. Nothing was updated. A processor, memory or driver that "
            f"changes bits is the likely cause: {then}",
            True,
            leaves,
        )

    def _again(self, batch: StepBatch, chosen: int) -> str:
        """The hash of a micro-batch's gradient, computed beside the step: no `.grad` is touched."""
        strategy = self._strategy
        micro = self._feed.one(batch.step, chosen).to(self._world.device)
        heard = _Listener(strategy)
        ACTIVITY.at(f"guard: micro-batch {chosen} of step {batch.step + 1} once more")
        with strategy.autocast():
            if strategy.fresh_casts:
                torch.clear_autocast_cache()
            seed_everything(self._run.seed, batch.step, chosen)
            loss = strategy.task.loss_sum(strategy.model(**micro.inputs), micro.targets)
            with heard.listening(True), strategy.autocast(False):
                torch.autograd.grad(strategy.scaled(loss / batch.targets), strategy.parameters, allow_unused=True)
        return heard.hash()

    def agree(self, step: int) -> None:
        """After `step` updates, whether all ranks hold the same weights and, where each has all of it, optimizer.
        Collective. Errors: `Corrupted`."""
        if self._run.sdc_check.every:
            state = sorted(self._strategy.sharded_state_dict().items())
            self._agree(f"after step {step}", [each.detach() for _, each in state if local(each) is each])

    def agrees(self, step: int) -> bool:
        """The same as an answer. Collective."""
        try:
            self.agree(step)
        except Corrupted:
            return False
        return True

    def _agree(self, when: str, held: list[Tensor]) -> None:
        """Whether all ranks hold the same. Collective. Errors: `Corrupted`."""
        world = self._world
        if world.size == 1:
            return
        found = world.all_gather(_hashed(held))
        counts = Counter(found)
        if len(counts) == 1:
            return
        (usual, most), *_ = counts.most_common()
        wrong = [rank for rank, each in enumerate(found) if each != usual] if most > len(found) / 2 else []
        others = ", ".join(f"rank {rank} on {world.hosts[rank]}" for rank in wrong)
        told = f"those of {others} are other ones" if wrong else "no majority has the same"
        then, leaves = leaving(self._run, world.hosts, wrong, range(world.size))
        raise Corrupted(
            f"sdc_check: {when} the ranks do not hold the same weights: {told}. What changed them came after the last "
            f"checkpoint, before which they were compared; {then}",
            False,
            leaves,
        )


def third_of(owner: int, witness: int, hosts: Sequence[str]) -> int:
    """The rank that decides between two: on a third host if there is one, else any third; of two ranks the owner."""
    after = [(witness + place) % len(hosts) for place in range(1, len(hosts))]
    others = [rank for rank in after if rank != owner]
    elsewhere = [rank for rank in others if hosts[rank] not in (hosts[owner], hosts[witness])]
    return (elsewhere or others or [owner])[0]


def drawn(run: Run, step: int) -> int:
    """The micro-batch of a step that is computed twice: from the seed and the step alone."""
    seen = hashlib.blake2b(f"guard {run.seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(seen, "little") % run.micro_batches


class _Listener:
    """Hashes of what one micro-batch gives each parameter as its gradient, before it is added to anything."""

    def __init__(self, strategy: Native) -> None:
        self._parameters = strategy.parameters
        self._sums: dict[int, list[Tensor]] = {}
        self._hooks: list[Any] = []

    def listening(self, on: bool) -> _Listener:
        self._on = on
        return self

    def __enter__(self) -> None:
        if self._on:
            self._sums = {}
            self._hooks = [p.register_hook(partial(self._hear, i)) for i, p in enumerate(self._parameters)]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hear(self, place: int, gradient: Tensor) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        self._sums.setdefault(place, []).append(summed(dense.detach()))

    def hash(self) -> str:
        """The host waits for the device here."""
        found = {place: [int(each) for each in sums] for place, sums in sorted(self._sums.items())}
        return hashlib.blake2b(str(found).encode(), digest_size=8).hexdigest()


def _hashed(tensors: list[Tensor]) -> str:
    sums = np.array([int(summed(each)) for each in tensors], dtype=np.int64)
    return hashlib.blake2b(sums.tobytes(), digest_size=8).hexdigest()
