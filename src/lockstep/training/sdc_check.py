"""`sdc_check`: detect silent data corruption by a processor, memory or link in the step in which it occurs.

In: a step to train. Out: the step's result; or, before anything is updated, an error that names the micro-batch, ranks
and hosts that disagree, and the ranks to evict (`sdc_check.on_difference`).

Every `sdc_check.every` steps, one micro-batch, drawn from seed and step, is computed twice: by its own rank as part of
the step, and by the next rank (by the same rank, if there is only one). The gradients must be bitwise equal; no
tolerance is needed, because a micro-batch has the same bits wherever it runs. A third computation decides which one was
wrong. At these steps the weights of all ranks are compared as well; before every checkpoint the weights and, if each
rank holds all of it, the optimizer state. A run therefore resumes only from a state that its ranks agreed on. Requires
a strategy that can recompute a micro-batch (`Recomputation`). `step_record.py` compares steps of two
trainings; ranks of one step are compared here, by votes.

Identifying the wrong one takes three: three machines if machines are evicted (torchrun with `launch.machines` as
fewest:most), three ranks on one machine (`launch.on_rank_failure: continue`). With two, a permanently faulty one would
vote against the other.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from lockstep.config.errors import EXCLUDED, FAILED, HALTED
from lockstep.config.run import RunError
from lockstep.data.batch import StepBatch, StepResult
from lockstep.data.job import Job
from lockstep.distributed import job_record
from lockstep.distributed.event_log import launched_by
from lockstep.distributed.tensor_hashes import combined, hash_sum, hash_text
from lockstep.strategies.observer import StepObserver, WholeGradient, listening
from lockstep.strategies.strategy import recomputes
from lockstep.track.busy import ACTIVITY
from lockstep.training.errors import CorruptionDetected, Regroup, TrainingFailed
from lockstep.training.resolve import launcher_class, refuse_eviction, shards_this_model
from lockstep.training.session import Session
from lockstep.training.train_state import TrainState


class SdcCheck:
    """Train a session's steps and verify some of them by a second computation."""

    def __init__(self, session: Session) -> None:
        """Collective. Errors: `RunError` if the run cannot be checked."""
        self._run, self._job, self._world, self._feed = session.run, session.job, session.world, session.feed
        self._session = session
        self._strategy = strategy = session.strategy
        if strategy.recomputation is None or not recomputes(self._job):
            raise shards_this_model(self._run.strategy)
        self._recomputation = strategy.recomputation(strategy)
        if names := () if strategy.statistics is None else strategy.statistics.names:
            raise RunError(
                "LS5151",
                f"sdc_check.every: the model keeps running statistics ({names[0]}), which a second computation "
                "would change; remove it",
            )

    def train_step(self, batch: StepBatch, rate: float) -> StepResult:
        """Make one update. Collective. Errors: `CorruptionDetected`, on every rank, before anything is updated."""
        if (batch.step + 1) % self._run.sdc_check.every:
            return self._strategy.train_step(batch, rate)
        try:
            return self._checked_step(batch, rate)
        except CorruptionDetected as caught:
            if self._run.sdc_check.on_difference != "retry" or not caught.sound:
                raise
            self._session.journal.event("guard", batch.step, retried=True)
            if self._world.is_main:
                self._session.checkpoints.say(f"{caught}. Recomputing the step")
        return self._checked_step(batch, rate)

    def _checked_step(self, batch: StepBatch, rate: float) -> StepResult:
        self._agree(f"before step {batch.step + 1}", self._recomputation.replicated_weights())
        world, strategy = self._world, self._strategy
        chosen = drawn(self._job, batch.step)
        owner = world.all_gather(any(micro.index == chosen for micro in batch.micro_batches)).index(True)
        witness = (owner + 1) % world.size
        theirs = self._recompute(batch, chosen, witness)

        def compare_hashes(mine: str) -> None:
            hashes = world.all_gather((mine, theirs))
            first, second = hashes[owner][0], hashes[witness][1]
            if first != second:
                self._decide(batch, chosen, owner, witness, (first, second))

        with listening(strategy, GradientHash(chosen, compare_hashes)):
            return strategy.train_step(batch, rate)

    def _decide(self, batch: StepBatch, chosen: int, owner: int, witness: int, hashes: tuple[Any, Any]) -> None:
        """Decide with a third computation of the micro-batch. Collective. Errors: `CorruptionDetected`."""
        world, hosts = self._world, self._world.hosts
        third = third_of(owner, witness, hosts)
        decided = world.all_gather(self._recompute(batch, chosen, third))[third]
        who = {witness: f"rank {witness} on {hosts[witness]}", owner: f"rank {owner} on {hosts[owner]}, its owner,"}
        second = "its own second computation" if owner == witness else who[witness]
        wrong = list[int]()
        if decided in hashes:  # the other one of the two is wrong
            wrong = [witness if decided == hashes[0] else owner]
        verdict = (
            f"a third computation shows that {who[wrong[0]]} was wrong"
            if wrong
            else "a third computation gave yet another gradient"
        )
        then, leaves = decide_eviction(self._job, hosts, wrong, (owner, witness, third))
        raise CorruptionDetected(
            "LS5152",
            f"sdc_check: step {batch.step + 1}: {who[owner]} and {second} computed different gradients for micro-batch "
            f"{chosen}; {verdict}. No weight was updated. A faulty processor, memory or driver is the likely cause: "
            f"{then}",
            True,
            leaves,
        )

    def _recompute(self, batch: StepBatch, chosen: int, rank: int) -> str | None:
        """Hash of a micro-batch's gradient, computed by `rank` outside the step (by all ranks, if the strategy requires
        that). None on other ranks. Collective."""
        if self._world.rank != rank and not self._recomputation.together:
            return None
        micro = self._feed.one(batch.step, chosen).to(self._world.device)
        gradient = GradientHash(chosen)
        ACTIVITY.set(f"sdc_check: recomputing micro-batch {chosen} of step {batch.step + 1}")
        with listening(self._strategy, gradient):
            self._recomputation.compute(batch.step, micro, batch.targets)
        return gradient.hash()

    def agree(self, step: int) -> None:
        """Check after `step` updates that all ranks hold the same weights and, if each holds all of it, optimizer
        state. Collective. Errors: `CorruptionDetected`."""
        self._agree(f"after step {step}", self._recomputation.replicated_state())

    def agrees(self, step: int) -> bool:
        """Whether `agree` passes. Collective."""
        try:
            self.agree(step)
        except CorruptionDetected:
            return False
        return True

    def _agree(self, when: str, tensors: list[Tensor]) -> None:
        """Check that all ranks hold the same tensors. Collective. Errors: `CorruptionDetected`."""
        world = self._world
        if world.size == 1:
            return
        hashes = world.all_gather(hash_text(*tensors))
        counts = Counter(hashes)
        if len(counts) == 1:
            return
        (usual, most), *_ = counts.most_common()
        wrong = [rank for rank, each in enumerate(hashes) if each != usual] if most > len(hashes) / 2 else []
        others = ", ".join(f"rank {rank} on {world.hosts[rank]}" for rank in wrong)
        message = f"{others} differs from the majority" if wrong else "no majority agrees"
        then, leaves = decide_eviction(self._job, world.hosts, wrong, range(world.size))
        raise CorruptionDetected(
            "LS5153",
            f"sdc_check: {when} the ranks hold different weights: {message}. They were equal at the last checkpoint; "
            f"{then}",
            False,
            leaves,
        )


def third_of(owner: int, witness: int, hosts: Sequence[str]) -> int:
    """Rank that decides between two: on a third host if possible, else any third rank; with two ranks, the owner."""
    after = [(witness + place) % len(hosts) for place in range(1, len(hosts))]
    others = [rank for rank in after if rank != owner]
    elsewhere = [rank for rank in others if hosts[rank] not in (hosts[owner], hosts[witness])]
    return (elsewhere or others or [owner])[0]


def drawn(job: Job, step: int) -> int:
    """Index of the micro-batch of a step to compute twice; depends only on seed and step."""
    run = job.run
    digest = hashlib.blake2b(f"guard {run.seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % run.micro_batches


class GradientHash(StepObserver):
    """Hash one micro-batch's gradient of each parameter, before accumulation."""

    def __init__(self, chosen: int, compare: Callable[[str], None] | None = None) -> None:
        """`compare` is called with the hash once the step's gradient is complete; it is collective."""
        self._chosen, self._compare = chosen, compare
        self._sums: dict[str, list[Tensor]] = {}  # by parameter name; may still be on the device

    def hears(self, index: int) -> bool:
        return index == self._chosen

    def gradient(self, index: int, name: str, gradient: Tensor) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        self._sums.setdefault(name, []).append(hash_sum(dense.detach()))

    def reduced(self, gradient: WholeGradient) -> None:
        if self._compare is not None:
            self._compare(self.hash())

    def hash(self) -> str:
        """Return the hash. Synchronizes with the device."""
        return combined((name, "", (), int(each)) for name, sums in sorted(self._sums.items()) for each in sums)


def decide_eviction(
    job: Job, hosts: Sequence[str], wrong: Collection[int], voters: Collection[int]
) -> tuple[str, list[int]]:
    """Decide which ranks to evict. `wrong`: outvoted ranks (empty if undecided); `voters`: ranks that computed;
    `hosts`: host of each rank. Returns a message and the ranks to evict."""
    run = job.run
    if run.sdc_check.on_difference != "evict":
        return "remove that machine from the job", []
    least, kind = launcher_class(run.launch).fewest_machines(run.launch), "machines"
    places: Sequence[object] = hosts
    if least is None:
        least, kind, places = 1, "ranks", range(len(hosts))
    out = {places[rank] for rank in wrong}
    names = ", ".join(sorted(hosts[rank] if kind == "machines" else f"rank {rank}" for rank in wrong))
    if not out or len({places[rank] for rank in voters}) < 3:
        return f"nothing is evicted: computations by three {kind} are needed to identify the wrong one", []
    if len(set(places)) - len(out) < least:
        return f"{names} is not evicted, because launch.machines needs at least {least}", []
    return (
        f"{names} is evicted, and the job continues without it",
        [rank for rank in range(len(hosts)) if places[rank] in out],
    )


def check_eviction(job: Job, why: str | None) -> None:
    """Check, before the first step, that machines or ranks can be evicted from this job. `why`: why single ranks cannot
    be removed. Errors: `RunError`."""
    run = job.run
    if run.sdc_check.on_difference != "evict" or not run.sdc_check.every:
        return
    refuse_eviction(job, why)
    how = launched_by(run.launch)
    if how != f"launcher {run.launch.name}":
        raise RunError(
            "LS5155",
            "sdc_check.on_difference: evict needs lockstep's own launcher, and this job was started by "
            f"{how}; use stop or retry, or start it with `lockstep train`",
        )


def evict(
    session: Session, state: TrainState, caught: CorruptionDetected, agrees: Callable[[int], bool]
) -> TrainingFailed | Regroup:
    """Handle a difference in the step after `state`: evict ranks, or stop. `agrees`: checks whether all ranks hold the
    same state. Returns the error that this rank raises: `Regroup` if it continues in the same process. Collective."""
    run, world, out, step = session.run, session.world, caught.leaves, state.step
    left = [rank for rank in range(world.size) if rank not in out]
    single = launcher_class(run.launch).fewest_machines(run.launch) is None
    names = sorted({f"rank {rank}" if single else world.hosts[rank] for rank in out})
    session.journal.event("guard", step, weights_agree=caught.sound, ranks=world.size, ranks_out=out, out=names)
    if out and single:
        if world.rank == left[0]:
            session.checkpoints.say(str(caught))
        return TrainingFailed(caught.code, caught.message, EXCLUDED, True) if world.rank in out else Regroup()
    checkpoints = session.checkpoints
    if caught.sound and step and agrees(step):
        checkpoints.settle()
        if checkpoints.newest != step:
            checkpoints.save(step, session.averaged, state=state.state_dict())
            checkpoints.settle()
    if world.is_main or (world.rank in out and world.local_rank == 0):
        for host in names:
            job_record.note_eviction(run.folder, host, step + 1)
    status = EXCLUDED if world.rank in out else FAILED
    if not out and job_record.restarts_left():
        status = HALTED
    return TrainingFailed(caught.code, caught.message, status, bool(out))
