"""`accelerate launch` as the launcher `accelerate` starts it: a stop signal ends it without a traceback.

In: the options of `accelerate launch`. Out: its exit status. torch elastic, which it runs, logs each signal as a
warning and raises its own exception; the ranks' messages about the stop suffice.
"""

from __future__ import annotations

import logging
import sys


def run() -> int:
    """Run `accelerate launch`, and return its exit status: 128 + the number of a signal that ended it."""
    import torch.distributed.run  # noqa: F401  # accelerate imports it later, and with it the loggers
    from accelerate.commands.launch import main
    from torch.distributed.elastic.multiprocessing.api import SignalException

    for name in logging.root.manager.loggerDict:  # each module has a level of its own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    try:
        main()
    except SignalException as caught:
        return 128 + int(caught.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(run())
