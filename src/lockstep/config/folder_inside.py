"""Detects that a folder in OUTPUT (checkpoints, profiles, TensorBoard) was replaced by a symbolic link during a run.

In: OUTPUT and the folder's name, when training begins. Out: later, why nothing may be written there, or None.
"""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.config.run import redirected


class FolderInside:
    """A folder in OUTPUT that may be a link from the start, but must not become or change one during the run."""

    def __init__(self, output: Path, name: str) -> None:
        """Record the folder's present target. The folder need not exist yet."""
        self.path, self._output = output / name, output.resolve()
        target = _real(self.path)
        self._target = None if target == self._output / name else target  # target of an initial link

    def redirected(self) -> str | None:
        """Return why nothing may be written if OUTPUT or this folder now links elsewhere, else None."""
        if (fault := redirected(self._output)) is not None:
            return fault
        if (now := _real(self.path)) == (self._target or self._output.resolve() / self.path.name):
            return None
        return f"{self.path} was replaced by a link to {now}, where nothing is written; restart the run to write there"

    def not_of_run(self, pattern: str) -> str | None:
        """Return why a resumed run may not write here: the folder is a link to one without a file of this `pattern`,
        so it was linked since the run wrote such files. None if it may."""
        if self._target is None or any(self.path.glob(pattern)):
            return None
        return (
            f"{self.path} is a link to {self._target}, which has nothing of this run ({pattern}); remove the link, or "
            "move the run's files there"
        )


def _real(path: Path) -> Path:
    """Resolve a path's links; a link to itself is resolved as far as possible."""
    return Path(os.path.realpath(path))
