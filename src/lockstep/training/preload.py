"""Imports of a process that ranks fork from: everything that each of them needs, once for all."""

import gc

from lockstep.config.plugins import importing

with importing():
    from lockstep.tasks.models import unpadded  # noqa: F401

gc.freeze()  # ranks that collect garbage would look through all of this, and copy it to do so
