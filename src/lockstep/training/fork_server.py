"""Imports for the process from which a machine's ranks fork: everything that each rank would import."""

import gc

from lockstep.config.plugins import importing

with importing():
    from lockstep.distributed import hang_watchdog  # noqa: F401 - of several ranks
    from lockstep.training import preload, rank, train_job  # noqa: F401

gc.freeze()  # as in `preload`, for objects created since
