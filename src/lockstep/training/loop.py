"""The training loop: one line per event, in order.

In: a fully built session and the state to start from. Out: trained weights in the strategy, numbers in the trackers,
checkpoints on disk.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from lockstep.config.lazy import lazy
from lockstep.config.schedules import learning_rate
from lockstep.data.batch import StepBatch
from lockstep.strategies.strategy import NotFinite
from lockstep.track.busy import ACTIVITY
from lockstep.training.data_loader import stopping
from lockstep.training.errors import CorruptionDetected, not_finite
from lockstep.training.hooks import StepHooks
from lockstep.training.session import Session
from lockstep.training.train_state import TrainState

if TYPE_CHECKING:
    from lockstep.training import rebalance, sdc_check
else:
    rebalance, sdc_check = lazy("lockstep.training", "rebalance", "sdc_check")


def train(session: Session, state: TrainState) -> TrainState:
    """Train to the run's last step, or until asked to stop. Returns `state`. Collective.

    Makes fewer than `feed.total` updates after a request to stop or early stopping (`evaluate.patience`), and writes
    their checkpoint. Errors: `TrainingFailed`; with recovery enabled, also the errors of collectives, and `Regroup` if
    a rank joins or leaves.
    """
    run, strategy, feed = session.run, session.strategy, session.feed
    check = sdc_check.SdcCheck(session) if run.sdc_check.every else None
    train_step = strategy.train_step if check is None else check.train_step
    hooks = StepHooks(session, state, check)
    state.meter.restart_clock()
    if hooks.make_up(state):  # a skipped evaluation; or early stopping applied before
        return state
    strategy.phases.report()  # discard times from before the first step
    steps = batches(session, state.step)
    try:
        over = state.hooks_pending and hooks.after_step(state)  # interrupted by a rank failure
        for batch in () if over else steps:
            ACTIVITY.set(f"step {state.step}")
            rate = learning_rate(run.optim, state.step, feed.total)
            result = train_step(batch, rate)  # forward, backward, sum over ranks, update
            state.advance(batch, result, rate, strategy.precision.loss_scale)
            if hooks.after_step(state):  # average, log, evaluate, save: each if due
                break
    except NotFinite as caught:
        raise not_finite(caught, feed, feed.order.step(caught.step)) from caught
    except CorruptionDetected as caught:
        assert check is not None
        raise sdc_check.evict(session, state, caught, check.agrees) from caught
    finally:
        steps.close()
    hooks.close(state)
    return state


def batches(session: Session, step: int) -> Generator[StepBatch]:
    """Iterate over this rank's batches after `step` updates. Collective if rebalancing is enabled."""
    ends = stopping(session.world)
    if session.run.launch.rebalance_every and session.world.size > 1:
        steps = rebalance.LoadBalancer(session).steps(step, ends)
    else:
        steps = session.feed.steps(step, ends)
    return session.strategy.phases.during("data", steps)
