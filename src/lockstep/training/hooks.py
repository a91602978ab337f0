"""Hooks after each update, in a fixed order: average, log, profile, save in flight, evaluation, checkpoint.

In: the training state after an update. Out: log lines, scores and files; and whether training ends here, equal on every
rank. Each hook is idempotent for `state.step`: if a rank failure interrupts the hooks, all of them run again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.distributed.step_timer import Profiler
from lockstep.track.busy import ACTIVITY
from lockstep.training.evaluation import evaluate_during_training
from lockstep.training.session import Session
from lockstep.training.train_state import CHECKPOINT, EVALUATION, TrainState, is_due

if TYPE_CHECKING:
    from lockstep.training.sdc_check import SdcCheck


class Hook:
    """A hook that runs after every update."""

    def __init__(self, session: Session) -> None:
        self.session, self.phases = session, session.strategy.phases

    def after_step(self, state: TrainState, last: bool) -> bool:
        """Run the hook. `last`: whether this is the last step, as far as known. Returns `last`, updated. Collective."""
        raise NotImplementedError


class Average(Hook):
    """Update the moving average of the weights (`average.ema`)."""

    def __init__(self, session: Session, step: int) -> None:
        """`step`: number of updates already averaged."""
        super().__init__(session)
        self._step = step

    def after_step(self, state: TrainState, last: bool) -> bool:
        if self._step < state.step:
            self._step = state.step
            with self.phases("optimizer"):
                self.session.averaged.follow(state.step)
        return last


class Log(Hook):
    """Log a line if one is due. Sinks drop duplicate lines."""

    def after_step(self, state: TrainState, last: bool) -> bool:
        session = self.session
        session.sinks.advance(state.step)
        session.journal.answer()
        if state.line:  # empty: no line is due
            session.sinks.log(state.step, "train", state.line)
            session.journal.times(state.step, self.phases.report())
            if session.world.is_main and (text := session.checkpoints.disk.warning(last)) is not None:
                session.checkpoints.say(text)
        return last


class Profile(Hook):
    """Trace some steps (`profile.steps`)."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._profiler = Profiler(session.run.profile, session.run.folder, session.world)

    def after_step(self, state: TrainState, last: bool) -> bool:
        with state.meter.paused(), self.phases("profile"):
            self._profiler.advance(state.step)
        return last

    def close(self) -> None:
        with self.phases("profile"):
            self._profiler.close()


class SaveInFlight(Hook):
    """Advance a checkpoint that is being written in the background."""

    def after_step(self, state: TrainState, last: bool) -> bool:
        with state.meter.paused(), self.phases("checkpoint"):
            self.session.checkpoints.advance()
        self.session.journal.saved(self.session.checkpoints.newest)
        return last


class Evaluate(Hook):
    """Evaluate if due, except after the last step, which is evaluated separately."""

    def after_step(self, state: TrainState, last: bool) -> bool:
        session = self.session
        every = session.feed.interval(session.run.evaluate.every)
        if not is_due(state.step, every, False) or state.step == session.feed.total:
            return last
        session.strategy.update.settle()
        with state.meter.paused():
            scores = evaluate_during_training(session, state.step, last)
        if not scores:  # interrupted by a request to stop: the next start evaluates
            state.pending.add(EVALUATION)
            return True
        return state.count_evaluation(scores) or last

    def make_up(self, state: TrainState) -> bool:
        """Run the evaluation that a request to stop interrupted. Returns whether training ends here. Collective."""
        session = self.session
        if EVALUATION not in state.pending or not is_due(
            state.step, session.feed.interval(session.run.evaluate.every), False
        ):
            return state.over
        with state.meter.paused():
            scores = evaluate_during_training(session, state.step)
        if not scores:
            return True
        over = state.count_evaluation(scores)
        session.checkpoints.add_scores(scores, state.state_dict())
        return over


class Checkpoint(Hook):
    """Save if due, hash the state for the fingerprints, and write these when the log has already synchronized with the
    device."""

    def __init__(self, session: Session, check: SdcCheck | None) -> None:
        super().__init__(session)
        self._check = check

    def after_step(self, state: TrainState, last: bool) -> bool:
        session, run, step = self.session, self.session.run, state.step
        with state.meter.paused():
            saves = CHECKPOINT in state.pending
            saves |= is_due(step, session.feed.interval(run.checkpoint.every), last or step in run.checkpoint.at)
            saves = saves or bool(state.scores and session.checkpoints.is_best(state.scores))
            if saves or is_due(step, session.feed.interval(run.fingerprint.every), False):
                session.strategy.update.settle()
                with self.phases("checkpoint"):
                    state.fingerprints.state(session.strategy)
            if saves:
                self._save(state)
            if is_due(step, run.track.every, last):
                state.fingerprints.write()
        return last

    def _save(self, state: TrainState) -> None:
        """Start a save. The step waits for the copy into memory, and for the previous save."""
        session = self.session
        ACTIVITY.set(f"saving after step {state.step}")
        if self._check is not None:
            self._check.agree(state.step)  # save only a state that all ranks agree on
        with self.phases("checkpoint"):
            session.checkpoints.save(state.step, session.averaged, state.scores, state.state_dict())


class StepHooks:
    """All hooks, for one call of `train`."""

    def __init__(self, session: Session, state: TrainState, check: SdcCheck | None) -> None:
        """`check`: compares the state across ranks before a save; None: no comparison."""
        self._session = session
        self._evaluate, self._profile = Evaluate(session), Profile(session)
        self._hooks: tuple[Hook, ...] = (
            Average(session, state.step),
            Log(session),
            self._profile,
            SaveInFlight(session),
            self._evaluate,
            Checkpoint(session, check),
        )

    def make_up(self, state: TrainState) -> bool:
        """Run the evaluation that a previous start had to skip. Returns whether training is over. Collective."""
        return not state.hooks_pending and self._evaluate.make_up(state)

    def after_step(self, state: TrainState) -> bool:
        """Run all hooks. Returns whether this was the last step, equal on every rank. Collective. Errors: `Regroup`."""
        session = self._session
        last = session.world.asked_to_stop() or state.step == session.feed.total
        for hook in self._hooks:
            last = hook.after_step(state, last)
        state.finish()
        if not last:
            session.between_steps(state)
        return last

    def close(self, state: TrainState) -> None:
        """Wait, after the last step, for files being written. Collective."""
        session, phases = self._session, self._session.strategy.phases
        ACTIVITY.set("waiting for the last checkpoint")
        with phases("checkpoint"):
            session.checkpoints.settle()
        session.journal.saved(session.checkpoints.newest)
        self._profile.close()
        session.journal.last_times(state.step, phases.report())
