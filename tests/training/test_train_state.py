"""`TrainState`: the state exchanged by checkpoints, recovery and peer checkpoints, and hooks that run again, without a
process."""

import json
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.checkpoint.manifest import Manifest
from lockstep.config.run import Run, load
from lockstep.data.batch import StepResult
from lockstep.data.job import Job
from lockstep.training.fingerprints import Fingerprints
from lockstep.training.hooks import StepHooks
from lockstep.training.train_state import CHECKPOINT, EVALUATION, TrainState

BATCH: Any = SimpleNamespace(examples=4, tokens=40, padded=48, padded_by_chance=60, targets_of=None)

BEST = ("checkpoint.best=accuracy", "evaluate.every=1")


def run_of(*words: str) -> Run:
    return load(None, ["model.type=gpt2", "data.source=builtin/emotion", "track.every=3", *words])


def state_of(run: Run, step: int = 7) -> TrainState:
    state = TrainState(Job.of(run), 100, step=step)
    state.fingerprints._hash = object()  # type: ignore[assignment]  # lines are kept, and written nowhere
    return state


def advance(state: TrainState, loss: float = 2.0) -> None:
    state.advance(BATCH, StepResult(torch.tensor(loss, dtype=torch.float64), torch.tensor(0.5)), 0.1)


def test_hooks_run_again_after_an_update_of_this_job_only() -> None:
    state = state_of(run_of())
    state.rerun_hooks(checkpoint=True)  # that update was made by another start
    assert not state.hooks_pending
    assert not state.pending
    advance(state)
    assert state.hooks_pending
    state.finish()
    assert not state.hooks_pending
    state.rerun_hooks(checkpoint=True)
    assert state.hooks_pending
    assert state.pending == {CHECKPOINT}
    state.finish()
    assert not state.pending


def test_log_line_is_read_once_and_kept_for_repeated_hooks() -> None:
    state = state_of(run_of())
    advance(state)
    assert not state.line  # step 8
    advance(state, 1.5)
    assert state.line["loss"] == 1.5
    assert state.line["learning_rate"] == 0.1
    line = dict(state.line)
    state.finish()
    state.rerun_hooks()
    assert state.line == line
    advance(state)
    assert not state.line
    assert state.meter.state()["line"]["steps"] == 1  # of the next line


def test_a_repeated_evaluation_counts_once() -> None:
    state = state_of(run_of(*BEST, "evaluate.patience=2"))
    advance(state)
    assert not state.count_evaluation({"accuracy": 0.5})
    advance(state)
    for _ in range(3):
        assert not state.count_evaluation({"accuracy": 0.4})
        assert state.progress.since == 1
    advance(state)
    assert state.count_evaluation({"accuracy": 0.4})  # control: a count of another step
    assert state.over


def test_a_state_taken_over_is_equal() -> None:
    run = run_of(*BEST)
    state = state_of(run)
    for loss in (2.0, 1.0, 3.0):
        advance(state, loss)
    state.count_evaluation({"accuracy": 0.5})
    state.pending.add(EVALUATION)
    sent = json.loads(json.dumps(state.state_dict()))  # plain data
    other = state_of(run, -1)
    assert other.digest() != state.digest()
    other.load_state_dict(sent)
    assert other.digest() == state.digest()
    assert json.loads(json.dumps(other.state_dict())) == sent
    assert other.meter.total == state.meter.total
    advance(state)
    assert json.loads(json.dumps(other.state_dict())) == sent  # the copies share nothing
    other.load_state_dict(state.state_dict())
    assert other.step == 11
    assert EVALUATION not in other.pending  # it belongs to the previous step


def test_ranks_that_have_run_more_hooks_hold_the_same_state() -> None:
    run = run_of(*BEST)
    one, two = state_of(run), state_of(run)
    for state in (one, two):
        advance(state)
        advance(state)
    one.count_evaluation({"accuracy": 0.5})
    one.finish()
    assert one.digest() != two.digest()  # one has no pending work
    for state in (one, two):
        state.rerun_hooks()
    assert one.digest() == two.digest()
    advance(two)
    assert one.digest() != two.digest()


def manifest(**values: Any) -> Manifest:
    facts: dict[str, Any] = {"arithmetic": {}, "data": "", "strategy": "single", "world_size": 1, "bits": True}
    facts |= {"device": "cpu", "threads": 1, "versions": {}, "scores": {}, "steps": 100}
    return Manifest(step=20, **facts, **values)


def test_a_checkpoint_restores_the_state() -> None:
    run = run_of(*BEST)
    state = state_of(run, 18)
    advance(state)
    advance(state)
    state.count_evaluation({"accuracy": 0.5})
    state.pending.add(EVALUATION)
    held = state.state_dict()
    saved = manifest(**{name: held[name] for name in ("meter", "progress", "pending")})
    other = state_of(run, 0)
    other.load_state_dict(saved.train_state)
    assert (other.step, other.first, other.pending) == (20, 20, {EVALUATION})
    assert not other.hooks_pending
    assert other.progress == state.progress
    assert other.meter.state() == state.meter.state()
    assert other.meter.total.steps == -2  # steps before the start do not count


def test_fingerprints_of_another_rank_are_taken_over() -> None:
    mine, theirs = Fingerprints(), Fingerprints()
    mine._hash = object()  # type: ignore[assignment]
    mine.step(3, StepResult(torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.2)))
    theirs.load_state_dict(mine.state_dict())
    assert theirs.state_dict() == mine.state_dict()
    assert theirs.state_dict()["waiting"][0][:2] == (3, 0.1)


def test_hooks_have_one_order() -> None:
    names = [type(hook).__name__ for hook in hooks()._hooks]
    assert names == ["Average", "Log", "Profile", "SaveInFlight", "Evaluate", "Checkpoint"]


def hooks() -> StepHooks:
    world = SimpleNamespace(rank=0, device=torch.device("cpu"))
    session: Any = SimpleNamespace(run=run_of(), world=world, strategy=SimpleNamespace(phases=None))
    return StepHooks(session, state_of(session.run), None)


def test_the_average_is_updated_once_per_step() -> None:
    followed: list[int] = []
    made: Any = hooks()._hooks[0]
    made.phases = lambda name: torch.no_grad()
    made.session.averaged = SimpleNamespace(follow=followed.append)
    state = state_of(made.session.run)
    advance(state)
    assert made.after_step(state, False) is False
    assert made.after_step(state, True) is True
    assert followed == [8]
