"""The hooks that follow an update, in a fixed order: average, log, profile, save in flight, evaluation, checkpoint.

In: the training state after an update. Out: lines, scores and files; and whether training ends here, the same on every
rank. Each hook is idempotent for `state.step`: where the loss of a rank breaks hooks off, all of them run again.
"""

from __future__ import annotations

from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.step_timer import Profiler
from lockstep.training.evaluation import evaluate_during_training
from lockstep.training.sdc_check import SdcCheck
from lockstep.training.session import Session
from lockstep.training.train_state import CHECKPOINT, EVALUATION, TrainState, is_due


class Hook:
    """Something that is done after every update."""

    def __init__(self, session: Session) -> None:
        self.session, self.phases = session, session.strategy.phases

    def after_step(self, state: TrainState, last: bool) -> bool:
        """`last`: no step follows, as far as is known. Returns the same, as it is afterwards. Collective."""
        raise NotImplementedError


class Average(Hook):
    """Follows the weights with their moving average (`average.ema`)."""

    def __init__(self, session: Session, step: int) -> None:
        """`step`: updates that the average has followed."""
        super().__init__(session)
        self._step = step

    def after_step(self, state: TrainState, last: bool) -> bool:
        if self._step < state.step:
            self._step = state.step
            with self.phases("optimizer"):
                self.session.averaged.follow(state.step)
        return last


class Log(Hook):
    """Writes a line where one is due; sinks drop a line that they have."""

    def after_step(self, state: TrainState, last: bool) -> bool:
        session = self.session
        session.sinks.advance(state.step)
        session.journal.answer()
        if state.line:  # none where a run was stopped on the way
            session.sinks.log(state.step, "train", state.line)
            session.journal.times(state.step, self.phases.take())
            if session.world.is_main and (text := session.checkpoints.room.warning(last)) is not None:
                session.checkpoints.say(text)
        return last


class Profile(Hook):
    """Traces some steps (`profile.steps`)."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._profiler = Profiler(session.run, session.world)

    def after_step(self, state: TrainState, last: bool) -> bool:
        with state.meter.paused(), self.phases("profile"):
            self._profiler.advance(state.step)
        return last

    def close(self) -> None:
        with self.phases("profile"):
            self._profiler.close()


class SaveInFlight(Hook):
    """Moves a checkpoint on that is being written beside training."""

    def after_step(self, state: TrainState, last: bool) -> bool:
        with state.meter.paused(), self.phases("checkpoint"):
            self.session.checkpoints.advance()
        self.session.journal.saved(self.session.checkpoints.newest)
        return last


class Evaluate(Hook):
    """Evaluates where that is due, but not after the last step, which is scored by itself."""

    def after_step(self, state: TrainState, last: bool) -> bool:
        session = self.session
        every = session.feed.interval(session.run.evaluate.every)
        if not is_due(state.step, every, False) or state.step == session.feed.total:
            return last
        session.strategy.settle()
        with state.meter.paused():
            scores = evaluate_during_training(session, state.step, last)
        if not scores:  # all were asked to stop: the next start makes up for it
            state.pending.add(EVALUATION)
            return True
        return state.count_evaluation(scores) or last

    def make_up(self, state: TrainState) -> bool:
        """Make the evaluation that a request to stop has left out. Returns whether training ends here. Collective."""
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
    """Saves where that is due, hashes the state for the fingerprints, and writes these where the log has waited for the
    device already."""

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
                session.strategy.settle()
                with self.phases("checkpoint"):
                    state.fingerprints.state(session.strategy)
            if saves:
                self._save(state)
            if is_due(step, run.track.every, last):
                state.fingerprints.write()
        return last

    def _save(self, state: TrainState) -> None:
        """The step waits for a copy into memory, and for the save before."""
        session = self.session
        ACTIVITY.at(f"saving after step {state.step}")
        if self._check is not None:
            self._check.agree(state.step)  # what is saved is what all ranks hold
        with self.phases("checkpoint"):
            session.checkpoints.save(state.step, session.averaged, state.scores, state.state_dict())


class StepHooks:
    """All of them, for one call of `train`."""

    def __init__(self, session: Session, state: TrainState, check: SdcCheck | None) -> None:
        """`check`: compares what ranks hold before it is saved; None: nobody does."""
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
        """Make the evaluation of a start before that it was too late for. Returns whether training is over.
        Collective."""
        return not state.hooks_pending and self._evaluate.make_up(state)

    def after_step(self, state: TrainState) -> bool:
        """Returns whether no step follows, the same on every rank. Collective. Errors: `Regroup`."""
        session = self._session
        last = session.world.asked_to_stop() or state.step == session.feed.total
        for hook in self._hooks:
            last = hook.after_step(state, last)
        state.finish()
        if not last:
            session.between_steps(state)
        return last

    def close(self, state: TrainState) -> None:
        """After the last step: wait for what is being written. Collective."""
        session, phases = self._session, self._session.strategy.phases
        ACTIVITY.at("waiting for the last checkpoint")
        with phases("checkpoint"):
            session.checkpoints.settle()
        session.journal.saved(session.checkpoints.newest)
        self._profile.close()
        session.journal.last_times(state.step, phases.take())
