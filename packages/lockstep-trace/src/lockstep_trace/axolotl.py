"""Plug-in of axolotl: the lines `plugins:` and `- lockstep_trace.axolotl.Plugin` of its YAML trace a training.

In: axolotl's calls. Out: a callback for its Trainer. Imported by axolotl alone.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found, unused-ignore]

from lockstep_trace.doors import Callback


class Plugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """Traces a training of axolotl into $LOCKSTEP_TRACE, else lockstep-trace."""

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Callback]:
        """Return the callback that axolotl gives to its Trainer."""
        return [Callback()]
