"""Imports needed by every rank; done once in the fork server if there is one, else in the rank."""

import gc

from lockstep.config.plugins import importing

with importing():
    from lockstep.tasks.models import unpadded  # noqa: F401

# otherwise each garbage collection would scan these objects (a third of a second) and make ranks copy their pages
gc.freeze()
