"""`accelerate launch` as the launcher `accelerate` starts it: a stop signal ends it without a traceback.

In: the options of `accelerate launch`. Out: its exit status. torch elastic, which it runs, logs each signal as a
warning and raises an exception of its own; the ranks have said that they stopped, and where.
"""

from __future__ import annotations

import logging
import sys

import torch.distributed.run  # noqa: F401  # accelerate imports it later, and with it the loggers
from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException


def quiet() -> None:
    """Log only errors of torch elastic, whose modules have a logger each."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    quiet()
    try:
        main()
    except SignalException as caught:
        sys.exit(128 + caught.sigval)
