"""Arithmetic that was wrong once and was corrected: a run does not change from one to the other in its middle.

In: a run, and what its checkpoint says. Out: why the run must not go on, or None. A manifest holds the number of each
correction that concerns its run; older ones hold none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockstep.config import optim, plugins
from lockstep.config.run import Run

REASONS = {
    "data.padding": "while data.padding=none let windowed attention see later tokens in batches of texts of one "
    "length; that was corrected. Its weights are of little use: train anew with",
    "model.config": "with another model: what its family derives from entries of model.config (the size of a head, "
    "the kinds of layers) did not follow them; that was corrected. Train it anew with",
    "task.name": "while the task preference let a language model of an encoder's family read the tokens after each; "
    "that was corrected. Train it anew with",
    "model.type": "while decoders of its family started from padding; that was corrected. Train it anew with",
}


def revisions_of(run: Run) -> dict[str, int]:
    """Keys of a run whose arithmetic was corrected, with the number of the correction: runs that no correction concerns
    have none. Errors: `RunError` where the model's config cannot be read."""
    head = plugins.find("tasks", run.task.name).head  # type: ignore[attr-defined]
    if not head:
        return {}
    from lockstep.tasks.models import model_configs, padding

    concerned = {
        "data.padding": run.data.padding == "none" and padding.windowed(run, head),
        "model.config": model_configs.derives(run),
        "task.name": run.task.name == "preference" and model_configs.needs_decoder(run),
        "model.type": head == "seq2seq" and run.model.type in model_configs.FROM_FIRST_TOKEN,
    }
    return {key: 2 for key, concerns in concerned.items() if concerns}


def refusal(run: Run, step: int, revisions: Mapping[str, int], differing: Iterable[str], other: str) -> str | None:
    """`step`, `revisions`: of the checkpoint. `differing`: the keys of the arithmetic that differ. `other`: what a run
    of its own is given."""
    for key, number in revisions_of(run).items():
        if revisions.get(key, 1) < number:
            return f"a checkpoint (step {step}) that was trained {REASONS[key]} {other}"
    if set(differing) == {optim.REVISION}:
        return (
            f"a checkpoint (step {step}) that was trained with other learning rates: optim.schedule="
            f"{run.optim.schedule} was corrected ({optim.REVISION} 2), so the run would change its rates in the "
            f"middle. Train it anew with {other}, or go on with the version of lockstep that began it"
        )
    return None
