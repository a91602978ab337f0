"""A folder in OUTPUT (checkpoints, profiles, TensorBoard's) that nothing is written into once a link has replaced it.

In: OUTPUT and the folder's name, as training begins. Out: later, why nothing may be written there, or None.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.config.run import led_away


class FolderInside:
    """A folder in OUTPUT, which may be a link to another disk from the start but must not become one later."""

    def __init__(self, output: Path, name: str) -> None:
        """As it is now, also if it is not there yet."""
        self.path, self._output = output / name, output.resolve()
        target = self.path.resolve()
        self._target = None if target == self._output / name else target  # of a link that is there from the start

    def led_away(self) -> str | None:
        """Why nothing is written there any more, or None: OUTPUT or this folder is a link to another place now."""
        if (fault := led_away(self._output)) is not None:
            return fault
        if (now := self.path.resolve()) == (self._target or self._output.resolve() / self.path.name):
            return None
        return f"{self.path} was replaced by a link to {now}, where nothing is written; restart the run to write there"
