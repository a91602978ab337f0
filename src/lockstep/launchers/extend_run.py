"""More epochs for a run that is finished: `epochs` or `steps` raised, and nothing else changed.

In: a run. Out: the run that trains on from its export, into a folder of its own; or the same run. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.checkpoint import exported
from lockstep.checkpoint.manifest import Manifest, ended, newest_first
from lockstep.config.optim import REVISION
from lockstep.config.run import Run, load


def further(run: Run, say: Callable[[str], object]) -> Run:
    """The schedule of a finished run is at its end, and its weights with it: going on cannot give what a longer run
    would have given. So what is added is a run of its own, and `say` hears what that means."""
    if run.model.source is None and run.model.type is None:  # a module of one's own, which starts from no folder
        return run
    manifest = next((found for _, found in newest_first(run)), None)
    added = None if manifest is None else _added(run, manifest)
    if manifest is None or added is None or not ended(run, manifest) or exported.damage(run.folder) is not None:
        return run
    key, more = added
    whole = run.epochs if key == "epochs" else run.steps
    output = f"{run.output}-{whole:g}-{key}"
    values: dict[str, Any] = run.model_dump(mode="json")
    left = ("source", "revision", "type", "config")  # the export has all of these
    model_keys = {name: value for name, value in values["model"].items() if name not in left}
    values |= {"name": f"{run.name}-{whole:g}-{key}", "output": output, key: more}
    if run.remote_dir is not None:
        values["remote_dir"] = f"{run.remote_dir}-{whole:g}-{key}"
    values |= {"model": model_keys | {"source": str(run.folder)}, "tokenizer": {}}
    say(
        f"{run.folder} is finished (step {manifest.step}) and stays as it is; {more:g} {key} more start from its "
        f"export, in {output}: a run of its own, with a new optimizer and the whole schedule again, so its weights are "
        f"not those of {whole:g} {key} trained at once"
    )
    return load(None, [], values, str(run.folder / "run.yaml"))


def _added(run: Run, manifest: Manifest) -> tuple[str, float] | None:
    """`epochs` or `steps`, and by how much it was raised, if that is all that differs."""
    now, then = run.arithmetic(), manifest.arithmetic
    differing = [key for key in now if now[key] != (then[key] if key in then else run.default(key))]
    differing = [key for key in differing if key != REVISION]  # a run of its own has the schedule as it is now
    if differing not in (["epochs"], ["steps"]):
        return None
    (key,) = differing
    before, after = then.get(key), now[key]
    return (key, after - before) if before is not None and after is not None and after > before else None
