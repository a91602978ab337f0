"""Where a run's model and data come from: described in the run file, or made by the task itself.

In: a run and the class of its task. Out: what is wrong, by key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.config import streaming
from lockstep.config.sections import ONE_ORIGIN

if TYPE_CHECKING:
    from lockstep.config.run import Run


def wrong(run: Run, task: Any) -> dict[str, str]:
    """Key -> what is missing there, or of no use."""
    if task.own_model:
        return dict(task.unsupported_keys(run)) | streaming.wrong(run, task)
    found = {key: "missing, and it has no default" for key in ("data", "model") if key not in run.model_fields_set}
    if not found and run.model.source is None and run.model.type is None:
        found["model"] = ONE_ORIGIN
    if run.data.workers:
        found["data.workers"] = (
            f"the task {run.task.name} reads prepared tokens and has no use for workers; set it to 0"
        )
    return found or {**task.unsupported_keys(run), **streaming.wrong(run, task)}
