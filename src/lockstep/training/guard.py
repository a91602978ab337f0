"""`guard`: a processor, a memory or a link that changes bits in silence is found in the step in which it does.

In: a step that is about to be trained. Out: the same result, or, before anything is updated, which micro-batch, which
ranks and which hosts did not come to the same bits.

At every `guard.every`-th step one micro-batch, drawn from seed and step, is computed twice: by the rank whose it is,
as part of the step, and by the next one (where there is one rank, by itself). Their gradients must have the same bits;
no tolerance is needed, because a micro-batch has the same bits wherever it runs. A third computation decides who was
wrong. At these steps the weights of all ranks are compared, too. It takes strategies that hold a whole copy of the
model.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.state_hash import summed
from lockstep.config.guard import TAKEN
from lockstep.config.run import Run, RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.place import PLACE
from lockstep.distributed.randomness import seed_everything
from lockstep.strategies.exact.reduction import share
from lockstep.strategies.native import Native

if TYPE_CHECKING:
    from lockstep.training.session import Session


class Corrupted(Exception):
    """Ranks did not come to the same bits; nothing was updated. `sound`: the weights are the same on all ranks."""

    def __init__(self, told: str, sound: bool) -> None:
        super().__init__(told)
        self.sound = sound


class Guard:
    """What trains a session's steps, and looks at some of them twice."""

    def __init__(self, session: Session) -> None:
        """Errors: `RunError` for what cannot be guarded. Collective."""
        self._run, self._world, self._feed = session.run, session.world, session.feed
        self._strategy: Any = session.strategy
        self._session, self.retried = session, 0  # steps that were computed once more
        if not self._run.guard.every:
            return
        if not isinstance(self._strategy, Native):
            raise RunError(f"guard.every: {self._run.strategy.name} takes parts of this model; it takes {TAKEN}")
        if self._strategy.statistics.names:
            raise RunError(
                f"guard.every: the model keeps running statistics ({self._strategy.statistics.names[0]}), which a "
                "second computation would change; leave it out"
            )

    def trained(self, batch: StepBatch, rate: float) -> StepResult:
        """One update. Collective. Errors: `Corrupted`, on every rank, before anything is updated."""
        every = self._run.guard.every
        if not every or (batch.step + 1) % every:
            return self._strategy.train_step(batch, rate)
        try:
            return self._watched(batch, rate)
        except Corrupted as caught:
            if self._run.guard.on_difference == "stop" or not caught.sound:
                raise
            self.retried += 1
            self._session.journal.event("guard", batch.step, retried=True)
            if self._world.is_main:
                self._session.checkpoints.say(f"{caught}. The step is computed once more")
        return self._watched(batch, rate)

    def _watched(self, batch: StepBatch, rate: float) -> StepResult:
        self._agree(batch.step)
        world, strategy = self._world, self._strategy
        chosen = drawn(self._run, batch.step)
        ranks = range(world.size)
        owner = next(r for r in ranks if chosen in share(self._run.micro_batches, r, world.size))
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
        world = self._world
        third = (witness + 1) % world.size
        if third == owner:
            third = owner if world.size > 1 else witness
        decided = world.all_gather(self._again(batch, chosen) if world.rank == third else None)[third]
        hosts = world.hosts
        who = {0: f"rank {owner} on {hosts[owner]}, whose it is", 1: f"rank {witness} on {hosts[witness]}"}
        wrong = who[1] if decided == found[0] else who[0] if decided == found[1] else None
        verdict = (
            f"a third computation says that {wrong}, was wrong"
            if wrong
            else "and a third computation came to another one"
        )
        raise Corrupted(
            f"guard: step {batch.step + 1}: the gradient of micro-batch {chosen} is not the same where {who[0]}, "
            f"computed it and where {who[1]}, did; {verdict}. Nothing was updated. A processor, memory or driver that "
            "changes bits is the likely cause: take that machine out",
            sound=True,
        )

    def _again(self, batch: StepBatch, chosen: int) -> str:
        """The hash of a micro-batch's gradient, computed beside the step: no `.grad` is touched."""
        strategy = self._strategy
        micro = self._feed.one(batch.step, chosen).to(self._world.device)
        heard = _Listener(strategy)
        PLACE.at(f"guard: micro-batch {chosen} of step {batch.step + 1} once more")
        with strategy.autocast():
            if strategy.fresh_casts:
                torch.clear_autocast_cache()
            seed_everything(self._run.seed, batch.step, chosen)
            loss = strategy.task.loss_sum(strategy.model(**micro.inputs), micro.targets)
            with heard.listening(True), strategy.autocast(False):
                torch.autograd.grad(strategy.scaled(loss / batch.targets), strategy.parameters, allow_unused=True)
        return heard.hash()

    def _agree(self, step: int) -> None:
        """Whether all ranks hold the same weights. Collective. Errors: `Corrupted`."""
        world = self._world
        if world.size == 1:
            return
        found = world.all_gather(_hashed([p.detach() for p in self._strategy.parameters]))
        counts = Counter(found)
        if len(counts) == 1:
            return
        (usual, most), *_ = counts.most_common()
        others = [f"rank {r} on {world.hosts[r]}" for r, each in enumerate(found) if each != usual]
        told = f"those of {', '.join(others)} are other ones" if most > len(found) / 2 else "no majority has the same"
        raise Corrupted(
            f"guard: before step {step + 1} the ranks do not hold the same weights: {told}. What changed them came "
            "after the last step that was guarded; the same command goes on from the newest checkpoint, whose hash is "
            "verified",
            sound=False,
        )


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
