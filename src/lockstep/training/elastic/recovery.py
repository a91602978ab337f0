"""Training that outlives its ranks: those that are left finish the step in which one was lost, with the same bits.

In: a session whose launcher keeps a roster of ranks (`distributed/membership.py`). Out: the same as `train` gives,
however many ranks were killed or came on the way. What happens, in this order, on every rank that is left:

  1. It notices: a collective fails because a connection was closed, or the launcher posts the next generation, and
     what waits is cut off. It cuts off and destroys its group, so that whoever waits for it does not wait for ever.
  2. It waits for the newest generation that it is in, and until all members of that one have come to it.
  3. They form a group, and each says after how many updates its state is. Updates are atomic on a rank, and none can be
     made without the gradients of all: these numbers differ by one at most.
  4. Ranks that are behind, and those that are new, take weights, optimizer state and counters from one that is not. All
     compare the hash of all of it: where one differs, the job starts again from its checkpoint.
  5. Micro-batches are dealt anew. What was due after the last update is done once more where somebody had not done it,
     or where rank 0, which writes it down, was lost; lines that are there already are not written twice.
  6. They train on: the step that was broken off is computed from its beginning.

A rank that is lost meanwhile makes all of them begin again at 1, with the generation after. Nothing is written into a
rank's state before all of what it is to hold has arrived. Where ranks share the state out, `reshard.py` takes the
place of 4: it brings the newest state together that those that are left hold, and they may go back some steps. Anything
else that fails ends the rank, and with it this formation of the job: the launcher starts all of them again from the
last checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.storage import summed
from lockstep.config.errors import STOPPED
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.membership import Generation
from lockstep.distributed.rendezvous import Unreached
from lockstep.distributed.sharded import WholeState
from lockstep.distributed.watchdog import Watchdog, lost_contact
from lockstep.strategies.abilities import ShardedRecovery
from lockstep.strategies.native import WholeStateRecovery
from lockstep.strategies.strategy import Strategy
from lockstep.training import sdc_check
from lockstep.training.elastic.reshard import Resharder
from lockstep.training.errors import Regroup, TrainingFailed
from lockstep.training.session import Session
from lockstep.training.train_state import TrainState


def recovery_for(
    session: Session, state: TrainState, watch: Watchdog, on_regroup: Callable[[int, str], None]
) -> Recovery | None:
    """A `Recovery` that trains a session whose ranks may be lost; None, and a note, where that is not possible. Errors:
    `RunError`, where the run asks for evictions that are not possible either."""
    run, members = session.run, session.world.members
    why = (
        unsupported_reason(session) if members else "it takes launch.name=local, torchrun, or slurm with ranks=elastic"
    )
    sdc_check.check_eviction(run, why)
    if members is not None and why is None:
        return Recovery(session, state, watch, on_regroup)
    if run.launch.on_rank_failure == "continue" and session.world.size > 1:
        session.checkpoints.say(
            f"launch.on_rank_failure: continue is not possible ({why}): a lost rank ends the others"
        )
    return None


class Recovery:
    """Trains one session, and replaces parts of it when ranks fail or join."""

    def __init__(
        self, session: Session, state: TrainState, watch: Watchdog, on_regroup: Callable[[int, str], None]
    ) -> None:
        """`on_regroup` is called once ranks have met again: after so many updates, and what happened, in words."""
        self.session = replace(session, between_steps=self._between_steps)
        self._state, self._watch, self._on_regroup = state, watch, on_regroup
        self._resharder = Resharder(session) if reshards(session.strategy) else None
        self._trained = Generation(-1, ())  # the last in which this rank was training

    def run(self, train: Callable[[Session, TrainState], TrainState]) -> None:
        """Call `train` until it comes to its end, and bring the ranks together in between. Collective. Errors: what it
        raises of another kind than the loss of a rank; `TrainingFailed`."""
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
        """Watch over nobody any more."""
        self._watch.stop()

    def _between_steps(self, state: TrainState) -> None:
        """All hooks have run, and a step follows: copy the state, or let another rank in. Collective. Errors:
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
        """Whether this is what a collective says when a rank is gone."""
        members = self.session.world.members
        assert members is not None
        if lost_contact(caught):
            return True
        until = time.monotonic() + 2.0  # some words of gloo's that are not known here: the launcher is about to tell
        theirs = "gloo" in str(caught) or isinstance(caught, dist.DistError | Unreached)
        while theirs and not members.lost and time.monotonic() < until:
            time.sleep(0.01)
        return members.lost

    def _meet(self, limit_s: float) -> None:
        """Meet the others again, until that has gone well. Errors: whatever made it impossible."""
        world, members = self.session.world, self.session.world.members
        assert members is not None
        patience_s = self.session.run.launch.timeout_s
        ACTIVITY.at("meeting the other ranks again")
        self._watch.stop()
        while True:
            members.cut()  # nobody waits from here on
            if self._resharder is not None:
                self._resharder.detach_group(self.session, self._state)
            else:
                strategy: Any = self.session.strategy
                strategy.detach_group()
            world.detach_group()
            generation = members.awaited(limit_s, lambda: world.joining and world.stop.came and members.withdraw())
            if generation is None and world.joining and not members.given_up:
                raise SystemExit(STOPPED)  # by which its launcher knows that all are asked to stop
            if generation is None and members.given_up:
                raise TrainingFailed(
                    "LS5030",
                    "the surviving ranks cannot continue by themselves; the launcher restarts the job if it can",
                )
            if generation is None:
                raise TrainingFailed(
                    "LS5031", f"rank {world.rank}: a collective failed, but the launcher reported no failed rank"
                )
            if not members.all_come(generation, patience_s):  # one may be in the middle of a long micro-batch
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
        """Settle where all go on, and go there. Collective."""
        session, state, world = self.session, self._state, self.session.world
        assert world.members is not None
        generation = world.members.generation
        first = self._trained.members[:1]
        if len(set(world.all_gather(world.agreed))) > 1:
            raise TrainingFailed(
                "LS5033",
                "a joining rank has another run file, code, data or package version than the others; start it "
                "with the same",
            )
        gone = bool(set(first) - set(generation.members))
        positions = world.all_gather((state.step, state.hooks_pending, gone, self._trained.members))
        newest = max(step for step, *_ in positions)
        redone = any(opened or main for step, opened, main, _ in positions if step == newest)
        redone |= any(-1 < step < newest for step, *_ in positions)
        back = False
        if self._resharder is not None:
            self.session, key = self._resharder.restore(session, state)
            strategy: Any = session.strategy
            strategy.discard()
            back = key[0] < newest  # steps are made again
        else:
            self._level([step for step, *_ in positions])
        session = self.session
        if redone and not back:
            state.rerun_hooks()
        if isinstance(session.strategy, WholeStateRecovery):
            session.strategy.attach_group()
        session.feed.shares, session.feed.indices = None, list(session.strategy.own_micro_batches())  # even ones
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
        """Where each rank holds the whole state: those that are behind take it from one that is not. Collective."""
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
        """Tensors and training state of one rank to those that are behind. Collective."""
        session, state, world = self.session, self._state, self.session.world
        mine, tensors = None, dict[str, Tensor]()
        if world.rank == source:
            tensors = session.averaged.sharded_state_dict()
            mine = (state.state_dict(), [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
        sent = world.all_gather(mine)[source]
        assert sent is not None
        theirs, names = sent
        arrived = {}
        for name, shape, dtype in names:  # in host memory, one after another
            tensor = tensors[name].detach().cpu().contiguous() if tensors else torch.empty(shape, dtype=dtype)
            world.send_round(tensor.reshape(-1).view(torch.uint8), source)
            if behind:
                arrived[name] = tensor
        if behind:
            session.averaged.load_sharded_state_dict(WholeState(arrived))
            state.load_state_dict(theirs)

    def _compare(self) -> None:
        """Every rank holds the same bits, or the job starts again. Collective. Errors: `TrainingFailed`."""
        session, state = self.session, self._state
        digest = hashlib.sha256(state.digest().encode())
        tensors = session.averaged.sharded_state_dict() if self._resharder is None else {}  # else it has compared them
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {int(summed(tensor.detach()))}\n".encode())
        if len(set(session.world.all_gather(digest.hexdigest()))) > 1:
            raise TrainingFailed(
                "LS5036", f"after a rank failed, the other ranks have different states after step {state.step}"
            )


def reshards(strategy: Strategy) -> TypeGuard[ShardedRecovery]:
    """Whether the state of a strategy is cut anew for the ranks that are left."""
    return isinstance(strategy, ShardedRecovery) and strategy.supports_reshard


def unsupported_reason(session: Session) -> str | None:
    """Why the loss of a rank starts this job again; None: the others go on without it."""
    run, strategy = session.run, session.strategy
    if session.world.joining and reshards(strategy):
        return None  # those that it comes to have answered
    if reshards(strategy) and strategy.survives_rank_failure(run):
        if not run.launch.replicate_every and not strategy.keeps_copies:
            return (
                f"strategy {run.strategy.name} does not keep a whole copy of the state on every rank, nor a copy of "
                "each part on another: set launch.replicate_every"
            )
        if session.task.needs_reference:
            return f"task {run.task.name} asks the model before training"
    elif not isinstance(strategy, WholeStateRecovery) or not strategy.gives_bits(run):
        return f"strategy {run.strategy.name} does not keep a whole copy of the state on every rank for itself"
    if session.world.device.type != "cpu":
        return "what waits on a GPU cannot be cut off"
    if strategy.statistics is not None and strategy.statistics.names:
        return "the model keeps running statistics"
    if run.average.ema is not None or strategy.stepper.rule.averages:
        return "weights are averaged"
    if run.remote_dir is not None:
        return "checkpoints are mirrored by rank 0"
    if run.model.compile:
        return "the model is compiled"
    return None


def membership_message(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    """Describe which ranks failed and which joined."""
    lost = [str(rank) for rank, member in enumerate(before) if member not in now]
    came = [str(rank) for rank, member in enumerate(now) if member not in before]
    parts = [f"{_ranks(lost)} {'was' if len(lost) == 1 else 'were'} lost"] if lost else []
    parts += [f"{_ranks(came)} came in, with the state of the others"] if came else []
    return "; ".join(parts) or "the ranks met again"


def _ranks(ranks: list[str]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
