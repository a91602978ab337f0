"""From a run to its processes: check everything that can be checked, then start or join them.

In: a run. Out: an exit status. Nothing here imports torch at the top.
"""

from __future__ import annotations

import importlib.util
import os
import time
from typing import TYPE_CHECKING, Any

from lockstep import launched, plugins
from lockstep.console import Console
from lockstep.run import Run, RunError, keep

if TYPE_CHECKING:
    from lockstep.data.tokens import Prepared
    from lockstep.launchers.launcher import Launcher, Plan


def train(run: Run) -> int:
    """`lockstep train`: to the end, or on from the newest checkpoint; under torchrun and its like, as one rank."""
    if joining():
        from lockstep import worker

        return worker.main(run)
    launcher, plan = planned(run)
    from lockstep import hub

    for note in hub.check(run):
        Console(True).say(f"note: {note}")
    prepared = checked(run, plan)
    from lockstep.manifest import check_resumable, finished

    manifest = check_resumable(run, prepared)
    if finished(run, manifest) and not launcher.joins:
        assert manifest is not None
        Console(True).say(f"{run.folder} is finished ({manifest.steps} steps); the model is in {run.folder}/export")
        return hub.push_pending(run, Console(True).say)
    if plan.variables.get("RANK", "0") == "0":
        keep(run)
    return launcher.start(run, plan)


def verify(run: Run, steps: int) -> int:
    """`lockstep verify`: a few steps, and the same as one process."""
    launcher = None
    if not joining():
        launcher, plan = planned(run)
        checked(run, plan)
    from lockstep.verify import verify

    return verify(run, launcher, steps)


def joining() -> bool:
    """Whether this process was started as a rank: torchrun, accelerate launch and srun set the six variables."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launcher_of(run: Run) -> Launcher:
    """The launcher of a run. Errors: `RunError`."""
    return _find("launch.name", "launchers", run.launch.name)()


def launcher_named(name: str) -> Launcher:
    """The launcher that OUTPUT/launch.json names; what was started by hand is looked after as `local` is. Errors:
    `RunError`."""
    return _find("launcher", "launchers", name or "local")()


def planned(run: Run) -> tuple[Launcher, Plan]:
    """The launcher and its plan; what workers import is being imported while this process goes on."""
    launcher = launcher_of(run)
    plan = launcher.plan(run)
    if plan.processes > 1 and run.launch.name == "local":
        from lockstep.launchers.local import prestart

        prestart()
    return launcher, plan


def checked(run: Run, plan: Plan) -> Prepared:
    """Data, tokens, and every check that needs no process group. Errors: `RunError`."""
    from lockstep.data.prepare import prepare
    from lockstep.strategies import strategy as strategies

    _find("strategy.name", "strategies", run.strategy.name)
    for name in run.track.to:
        tracker: Any = _find("track.to", "track", name)
        tracker.check()
    strategies.checked(run, plan.processes)
    return prepare(run, plugins.find("tasks", run.task.name), fresh=True)


def _find(key: str, kind: str, name: str) -> type:
    try:
        return plugins.find(kind, name)
    except (plugins.PluginError, ImportError) as error:
        raise RunError(f"{key}: {error}") from error
