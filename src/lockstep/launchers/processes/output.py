"""Is OUTPUT a folder that a run may write into? Empty, or of a run: what else is there belongs to somebody.

In: a run. Out: nothing, or a `RunError` that names what is there. Nothing here imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from lockstep.config.run import Run, RunError
from lockstep.distributed import job_record

# What a start may find in a folder that no run has got far in: of a scheduler, of a sweep, of a disk of its own.
_HARMLESS = ("lost+found", "log.txt", "launch", "job.sbatch", "train.out", "train.err")


def check_ours(run: Run) -> None:
    """OUTPUT is empty, or of a run, and its export can be replaced. Errors: `RunError`, naming what is there."""
    folder, export = run.folder, run.folder / "export"
    if not folder.is_dir():
        return
    if export.is_symlink() or (export.exists() and not export.is_dir()):
        what = f"a link to {os.readlink(export)}" if export.is_symlink() else "a file"
        raise RunError(
            f"output: {export} is {what}, and the model would be written there as a folder: remove it, or give another "
            "output=FOLDER"
        )
    try:  # before looking whose they are: another start of this run may be writing its first ones
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as caught:
        raise RunError(f"output: cannot read {folder}: {caught.strerror}") from None
    own = job_record.read(folder) is not None or _written_for(folder)
    if own or any(folder.glob("checkpoints/step-*/manifest.json")):
        return
    strange = [name for name in names if name not in _HARMLESS and not name.startswith("slurm-")]
    if strange:
        more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
        raise RunError(
            f"output: {folder} is not empty, and it is no output folder of a run: it holds {', '.join(strange[:5])}"
            f"{more}. A run would write over run.yaml, export and others there: give another output=FOLDER"
        )


def _written_for(folder: Path) -> bool:
    """Whether its run.yaml is one that lockstep wrote for this folder: with every key, as no person writes it."""
    try:
        values = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    if not isinstance(values, dict) or not set(Run.model_fields) <= values.keys():
        return False
    return Path(str(values["output"])).name == folder.resolve().name
