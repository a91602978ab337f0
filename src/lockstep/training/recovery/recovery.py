"""Recovery from rank failures: the surviving ranks complete the interrupted step, bitwise equal.

In: a session whose launcher keeps a roster of ranks (`distributed/membership.py`). Out: the result of `train`, however
many ranks fail or join on the way. Every surviving rank does the following:

  1. Notice the failure: a collective fails because a connection closed, or the launcher posts the next generation,
  which aborts pending collectives. Abort and destroy the process group, so that ranks waiting for this one do not hang.
  2. Wait for the newest generation that includes this rank, until all its members have arrived.
  3. Form a group and exchange the number of updates made. An update is atomic on a rank and needs the gradients of all
  ranks, so these numbers differ by at most one.
  4. Ranks that are behind or new receive weights, optimizer state and counters from one that is up to date. All compare
  a hash of the whole state; if one differs, the job restarts from its checkpoint.
  5. Deal micro-batches again. Run the hooks of the last update again if some rank had not run them, or if rank 0, which
  writes the results, failed; lines already written are not repeated.
  6. Continue training: the interrupted step is computed from its beginning.

If another rank fails meanwhile, all start over at 1 with the next generation. A rank's state changes only after all its
new content has arrived. For sharded state, `reshard.py` replaces 4: it assembles the newest state that the survivors
hold, which may be some steps back. Any other failure ends the rank and the current job: the launcher restarts all ranks
from the last checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.errors import STOPPED
from lockstep.distributed.hang_watchdog import Watchdog
from lockstep.distributed.lost_contact import lost_contact
from lockstep.distributed.membership import Generation
from lockstep.distributed.rendezvous import Unreached
from lockstep.distributed.sharded import WholeState
from lockstep.distributed.tensor_hashes import combined, hash_sum
from lockstep.strategies.recovery import ReplicaRecovery
from lockstep.strategies.single import ReplicatedStrategy
from lockstep.strategies.strategy import Strategy, shard_recovery
from lockstep.track.busy import ACTIVITY
from lockstep.training import sdc_check
from lockstep.training.errors import Regroup, TrainingFailed
from lockstep.training.resolve import ends_with_a_rank
from lockstep.training.session import Session
from lockstep.training.train_state import TrainState

if TYPE_CHECKING:
    from lockstep.training.recovery.reshard import Resharder


def recovery_for(
    session: Session, state: TrainState, watch: Watchdog | None, on_regroup: Callable[[int, str], None]
) -> Recovery | None:
    """Return a `Recovery` for a session whose ranks may fail; None, with a note, if recovery is not possible. Errors:
    `RunError`, if the run also requests evictions, which are not possible then."""
    run, members = session.run, session.world.members
    why = (
        unsupported_reason(session) if members else "it takes launch.name=local, torchrun, or slurm with ranks=elastic"
    )
    sdc_check.check_eviction(session.job, why)
    if members is not None and watch is not None and why is None:
        return Recovery(session, state, watch, on_regroup)
    if run.launch.on_rank_failure == "continue" and session.world.size > 1:
        session.checkpoints.say(
            f"launch.on_rank_failure: continue is not possible ({why}): a failed rank ends the others"
        )
    return None


class Recovery:
    """Train one session, and replace parts of it when ranks fail or join."""

    def __init__(
        self, session: Session, state: TrainState, watch: Watchdog, on_regroup: Callable[[int, str], None]
    ) -> None:
        """`on_regroup` is called after the ranks have formed a new group, with the number of updates and a
        description."""
        self.session = replace(session, between_steps=self._between_steps)
        self._state, self._watch, self._on_regroup = state, watch, on_regroup
        self._resharder: Resharder | None = None
        if reshards(session.strategy):
            from lockstep.training.recovery.reshard import Resharder

            self._resharder = Resharder(session)
        self._trained = Generation(-1, ())  # last generation in which this rank trained

    def run(self, train: Callable[[Session, TrainState], TrainState]) -> None:
        """Call `train` until it finishes, re-forming the group after failures. Collective. Errors: those of `train`
        that are not rank failures; `TrainingFailed`."""
        members = self.session.world.members
        assert members is not None
        members.ready()
        if self.session.world.joining:
            self._meet(math.inf)
        self._trained = members.generation
        while True:
            try:
                if self._resharder is not None:
                    self._resharder.copies.form(self.session, self._state)
                members.trains()
                train(self.session, self._state)
                members.over()
                return
            except Regroup:
                pass
            except RuntimeError as caught:
                if not self._lost(caught):
                    raise
            self._meet(members.place.soon_s)

    def stop(self) -> None:
        """Stop the watchdog."""
        self._watch.stop()

    def _between_steps(self, state: TrainState) -> None:
        """Replicate the state, or admit a joining rank, after all hooks and before the next step. Collective. Errors:
        `Regroup`."""
        session = self.session
        if session.world.grows:
            session.checkpoints.settle()
            if self._resharder is not None:
                self._resharder.copies.before_join(state)
            session.world.barrier()
            raise Regroup
        if self._resharder is not None:
            with session.strategy.phases("checkpoint"):
                self._resharder.after_step(state)

    def _lost(self, caught: RuntimeError | Unreached) -> bool:
        """Whether an error of a collective means that a rank failed."""
        members = self.session.world.members
        assert members is not None
        if lost_contact(caught):
            return True
        until = time.monotonic() + 2.0  # unknown gloo message: wait for the launcher to report a failure
        theirs = "gloo" in str(caught) or isinstance(caught, dist.DistError | Unreached)
        while theirs and not members.lost and time.monotonic() < until:
            time.sleep(0.01)
        return members.lost

    def _meet(self, limit_s: float) -> None:
        """Re-form the process group, retrying until it succeeds. Errors: the last error if that is impossible."""
        world, members = self.session.world, self.session.world.members
        assert members is not None
        patience_s = self.session.run.launch.timeout_s
        ACTIVITY.set("re-forming the process group")
        self._watch.stop()
        while True:
            members.cut()  # no rank waits for this one from here on
            if self._resharder is not None:
                self._resharder.detach_group(self.session, self._state)
            else:
                _replicas(self.session.strategy).detach_group()
            world.detach_group()
            generation = members.awaited(limit_s, lambda: world.joining and world.stop.came and members.withdraw())
            if generation is None and world.joining and not members.given_up:
                raise SystemExit(STOPPED)  # tells the launcher that all ranks are to stop
            if generation is None and members.given_up:
                raise TrainingFailed(
                    "LS5030",
                    "the surviving ranks cannot continue by themselves; the launcher restarts the job if it can",
                )
            if generation is None:
                raise TrainingFailed(
                    "LS5031", f"rank {world.rank}: a collective failed, but the launcher reported no failed rank"
                )
            if not members.all_come(generation, patience_s):  # a rank may be computing a long micro-batch
                if members.newest() == generation:
                    raise TrainingFailed(
                        "LS5032", f"the surviving ranks did not form a new group within {patience_s:g} s"
                    )
                continue
            try:
                world.attach_group(generation)
                self._agree()
                return
            except (RuntimeError, Unreached) as caught:
                if not self._lost(caught):
                    raise
            limit_s = members.place.soon_s

    def _agree(self) -> None:
        """Agree on the state to continue from, and load it. Collective."""
        session, state, world = self.session, self._state, self.session.world
        assert world.members is not None
        generation = world.members.generation
        first = self._trained.members[:1]
        if len(set(world.all_gather(world.agreed))) > 1:
            raise TrainingFailed(
                "LS5033",
                "a joining rank has another run file, code, data or package version than the others; start it with "
                "the same ones",
            )
        gone = bool(set(first) - set(generation.members))
        positions = world.all_gather((state.step, state.hooks_pending, gone, self._trained.members))
        newest = max(step for step, *_ in positions)
        redone = any(opened or main for step, opened, main, _ in positions if step == newest)
        redone |= any(-1 < step < newest for step, *_ in positions)
        back = False
        if self._resharder is not None:
            self.session, key = self._resharder.restore(session, state)
            vars(session.strategy).clear()  # release everything, also after an interrupted step
            back = key[0] < newest  # some steps are repeated
        else:
            self._level([step for step, *_ in positions])
        session = self.session
        if redone and not back:
            state.rerun_hooks()
        if self._resharder is None:
            _replicas(session.strategy).attach_group()
        session.feed.shares, session.feed.indices = None, list(session.strategy.own_micro_batches())  # equal shares
        if session.checkpoints.regroup(state.step):
            state.rerun_hooks(checkpoint=True)
        self._compare()
        state.fingerprints.regroup(world, state.step, back)
        session.journal.regroup(state.step)
        before = max((members for *_, members in positions), key=len)
        self._trained = generation
        how = f"; back from step {newest}, by copies in memory" if back else ""
        self._on_regroup(state.step, membership_message(before, generation.members) + how)
        self._watch = self._watch.anew()

    def _level(self, steps: list[int]) -> None:
        """Bring ranks that are behind up to date, if each rank holds the whole state. Collective."""
        newest = max(steps)
        if newest < 0:
            raise TrainingFailed("LS5034", "no surviving rank has the training state")
        if any(0 <= step < newest - 1 for step in steps):
            raise TrainingFailed(
                "LS5035", f"internal error: the surviving ranks are at steps {steps}; they may differ by at most one"
            )
        if min(steps) < newest:
            self._hand_on(steps.index(newest), steps[self.session.world.rank] < newest)

    def _hand_on(self, source: int, behind: bool) -> None:
        """Send the tensors and training state of rank `source` to the ranks that are behind. Collective."""
        session, state, world = self.session, self._state, self.session.world
        mine, tensors = None, dict[str, Tensor]()
        if world.rank == source:
            tensors = session.averaged.sharded_state_dict()
            mine = (state.state_dict(), [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
        sent = world.all_gather(mine)[source]
        assert sent is not None
        theirs, names = sent
        arrived = {}
        for name, shape, dtype in names:  # one at a time, in host memory
            tensor = tensors[name].detach().cpu().contiguous() if tensors else torch.empty(shape, dtype=dtype)
            world.send_round(tensor.reshape(-1).view(torch.uint8), source)
            if behind:
                arrived[name] = tensor
        if behind:
            session.averaged.load_sharded_state_dict(WholeState(arrived))
            state.load_state_dict(theirs)

    def _compare(self) -> None:
        """Check that every rank holds the same bits. Collective. Errors: `TrainingFailed`, which restarts the job."""
        session, state = self.session, self._state
        # a resharder has compared the tensors already
        tensors = session.averaged.sharded_state_dict() if self._resharder is None else {}
        mine = state.digest(), combined((n, t.dtype, t.shape, int(hash_sum(t))) for n, t in sorted(tensors.items()))
        if len(set(session.world.all_gather(mine))) > 1:
            raise TrainingFailed(
                "LS5036", f"after a rank failed, the other ranks have different states after step {state.step}"
            )


def reshards(strategy: Strategy) -> bool:
    """Whether recovery reshards this strategy's state."""
    recovery = shard_recovery(type(strategy))
    return recovery is not None and recovery.rebuilds


def unsupported_reason(session: Session) -> str | None:
    """Explain why a rank failure restarts this job, or return None if the other ranks continue."""
    run, strategy = session.run, session.strategy
    if session.world.joining and reshards(strategy):
        return None  # the running ranks have checked this
    job, recovery = replace(session.job, strategy=type(strategy)), shard_recovery(type(strategy))
    if (why := ends_with_a_rank(job)) is not None:
        return why
    if recovery is not None and recovery.rebuilds and recovery.survives(job):
        if not run.launch.replicate_every and not strategy.state.has_copies:
            return (
                f"strategy {run.strategy.name} keeps neither the whole state on every rank nor a copy of each shard "
                "on another: set launch.replicate_every"
            )
        if session.task.needs_reference:
            return f"task {run.task.name} needs the model from before training"
    if session.world.device.type != "cpu":
        return "a collective waiting on a GPU cannot be aborted"
    if strategy.statistics is not None and strategy.statistics.names:
        return "the model keeps running statistics"
    return None


def membership_message(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    """Describe which ranks failed and which joined."""
    lost = [str(rank) for rank, member in enumerate(before) if member not in now]
    came = [str(rank) for rank, member in enumerate(now) if member not in before]
    parts: list[str] = []
    if lost:
        parts.append(f"{_ranks(lost)} {'was' if len(lost) == 1 else 'were'} lost")
    if came:
        parts.append(f"{_ranks(came)} joined with the state of the others")
    return "; ".join(parts) or "the ranks formed a new group"


def _ranks(ranks: list[str]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def _replicas(strategy: Strategy) -> ReplicaRecovery:
    """Return the recovery of a strategy whose ranks hold the whole state."""
    kind = strategy.recovery
    assert isinstance(strategy, ReplicatedStrategy)
    assert kind is not None
    assert issubclass(kind, ReplicaRecovery)
    return kind(strategy)
