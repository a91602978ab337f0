"""What the process that the ranks of a machine fork from imports: all that each of them would import by itself."""

import gc

from lockstep.config.plugins import importing

with importing():
    from lockstep.training import preload, rank  # noqa: F401

gc.freeze()  # once more, as in `preload`: of what came since
