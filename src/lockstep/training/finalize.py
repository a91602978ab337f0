"""End of training: choose the exported model and evaluate it.

In: a session whose last step is done. Out: the strategy holds the exported model (last, best, or an average); its
metrics and tables by split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.checkpoint.manifest import score_of
from lockstep.tasks.abilities import Calibrates
from lockstep.track.console import Console
from lockstep.training.errors import EvaluationInterrupted
from lockstep.training.evaluation import evaluate_with_tables
from lockstep.training.model_stats import validation_rows
from lockstep.training.session import Session, Sinks
from lockstep.training.summary import best_so_far, precisions
from lockstep.training.train_state import TrainState

Final = tuple[dict[str, float], dict[str, Any]]  # (metrics, tables) of a split


def final_scores(
    session: Session, console: Console, sinks: Sinks, state: TrainState
) -> tuple[int, dict[str, Final]] | None:
    """Load the exported model into the strategy and evaluate it. Returns its step, and metrics and tables by split.
    None if all ranks were asked to stop and the next start can resume from the last step. Collective."""
    run, world, task, strategy, step = session.run, session.world, session.task, session.strategy, state.step
    console.detail({"precision": precisions(strategy)})

    def final(split: str) -> Final:
        def stop() -> bool:
            return world.asked_to_stop(by_clock=False) and session.checkpoints.newest == step

        rows = validation_rows(task, task.splits[split]) if split == "validation" else None
        return evaluate_with_tables(world, task, strategy, task.splits[split], rows, stop=stop)

    with strategy.phases("evaluation"):
        splits = [split for split in ("validation", "test") if split in task.splits]
        try:
            exported = step
            finals: dict[str, Final] = {}
            if run.average.last is not None:
                steps = session.checkpoints.take_mean(session.averaged, step)
                console.say(f"the mean of the weights after steps {', '.join(map(str, steps))} is exported")
            session.averaged.exchange()
            if run.export == "best":
                exported, finals = best_model(session, console, state, final)
                if exported != step and finals:
                    sinks.log(step, "validation", finals.pop("validation")[0])
            for split in splits:  # validation first: it calibrates the scores of the others
                finals[split] = finals[split] if split in finals else final(split)
                if split == "validation" and isinstance(task, Calibrates):
                    task.calibrate(finals[split][0])
            return exported, finals
        except EvaluationInterrupted:
            return None


def best_model(
    session: Session, console: Console, state: TrainState, final: Callable[[str], Final]
) -> tuple[int, dict[str, Final]]:
    """Load the best evaluated model that has a checkpoint into the strategy, unless the last model is better. Returns
    its step, and the last model's score if it was evaluated. Collective. Errors: `EvaluationInterrupted`."""
    run, checkpoints, progress, step = session.run, session.checkpoints, state.progress, state.step
    finals = {}
    if state.over:  # the last model was evaluated already
        by = f" by more than {run.evaluate.min_delta:g}" if run.evaluate.min_delta else ""
        console.say(
            f"training ends after step {step} of {session.feed.total}: {progress.since} evaluations since step "
            f"{progress.step} were not better{by or f' by {run.checkpoint.best}'} (evaluate.patience)"
        )
    else:
        finals["validation"] = final("validation")
    last = score_of(run.checkpoint.best, finals["validation"][0]) if finals else None
    exported, notes = checkpoints.take_best(session.averaged, step, last)
    if exported != step:
        session.averaged.exchange()  # swap: the loaded average is in the average's buffers
    for text in notes:
        console.note(text)
    which = "that of the last step" if exported == step else f"that of step {exported} of {step}"
    best = best_so_far(session.job, step if session.world.is_main else 0).step
    gone = best not in (None, exported, step)  # without checkpoint.best only the newest checkpoints are there
    if gone:
        console.note(f"there is no usable checkpoint of step {best}, which was evaluated as the best")
    those = "the best model of those with a checkpoint" if gone else "the best model"
    console.say(f"{those} by {run.checkpoint.best} is {which}, and is exported")
    return exported, finals
