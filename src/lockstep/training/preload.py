"""What each rank imports, in the process that ranks fork from, once for all; else in the rank."""

import gc

from lockstep.config.plugins import importing

with importing():
    from lockstep.tasks.models import unpadded  # noqa: F401

# who collects garbage would look through all of this, a third of a second each time, and ranks would copy it to do so
gc.freeze()
