"""Whether a run that is to be written down can be planned.

In: a run. Out: what this machine lacks for it; an error for a fault of the run file.
"""

from __future__ import annotations

from lockstep.config.run import Run, RunError
from lockstep.tools.init import machine_defaults

# what `plan` says of a machine that lacks something, and not of a run file
_OF_MACHINE = (
    *("not installed", "CUDA device(s)", "runs on GPUs only", "this job has no GPU", "this job has none"),
    *("couldn't connect", "HF_HUB_OFFLINE", "cannot be reached"),
)


def plan(run: Run) -> list[str]:
    """Make the checks of `lockstep plan`, but for those of the data. Returns what this machine lacks for the run; then
    a small model stands in for its own, so that the rest is checked. Errors: `RunError` for a fault of the run file."""
    from lockstep.launchers import start

    lacking: list[str] = []
    for each in (run, with_small_model(run)):
        try:
            start.resolve_options(each)
            break
        except RunError as error:
            if not any(mark in str(error) for mark in _OF_MACHINE):
                raise
            lacking.append(str(error))
    return lacking


def with_small_model(run: Run) -> Run:
    """The run with a small model from scratch in place of its own; a model of the user's stays."""
    if run.task.name == "module" or "." in run.task.name:
        return run
    small = machine_defaults.scratch(run.task.name, 128, 0)["model"]
    model = {"source": None, "adapter": {}, "quantization": None, "dtype": "float32", "attention": None, **small}
    return run.model_copy(update={"model": run.model.model_copy(update=model)})
