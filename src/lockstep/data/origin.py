"""Where a model comes from that lockstep has trained: `model.source` may be an output folder, or a checkpoint in one.

In: a path as it is written. Out: the folder that `from_pretrained` loads. Imports no torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from lockstep.config.run import RunError
from lockstep.data.cache import cache_folder

MANIFEST = "manifest.json"


def parts(given: Path) -> tuple[Path, Path | None]:
    """The output folder, and the checkpoint if a path names one (`OUTPUT/checkpoints/step-N`, or `.../latest`)."""
    if given.parent.name == "checkpoints":
        return given.parent.parent, given.resolve() if given.is_symlink() else given
    return given, None


def of_checkpoint(checkpoint: Path) -> Path:
    """Where in the cache the model of a checkpoint lies, as an export of it; it may not be there yet."""
    return cache_folder() / "models" / hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def model_folder(source: str, key: str = "model.source") -> str:
    """What `model.source` or `tokenizer.source` names: of an output folder its export, of a checkpoint its model in the
    cache, anything else as it is. Errors: `RunError` for a run that has no export."""
    path = Path(source).expanduser()
    output, checkpoint = parts(path)
    if checkpoint is not None and (checkpoint / MANIFEST).is_file():
        return str(of_checkpoint(checkpoint))
    if not (path / "run.yaml").is_file() or (path / "config.json").is_file():
        return source
    if not (path / "export" / "config.json").is_file():
        raise RunError(
            f"{key}: the run of {output} is not finished, and has no export; name one of its checkpoints, for example "
            f"{output}/checkpoints/latest, or finish it"
        )
    return str(path / "export")
