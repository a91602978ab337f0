"""Imported by the fork server before its other modules: it ends with its launcher, at once, and with a message on a
machine that has no threads for it. Until then its imports and native libraries would ignore every signal.

In: the launcher, its parent. Out: nothing.
"""

import atexit
import os
import signal
import sys

from lockstep.config.errors import BAD, coded
from lockstep.distributed.process_limits import lacking_threads
from lockstep.track.console import error

if sys.platform == "linux":
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; ranks have the same of this process
atexit.register(os._exit, 0)  # ranks end otherwise; libraries have nothing to finish here, and may wait forever
if (text := lacking_threads()) is not None:
    error(coded("LS7512", text))
    os._exit(BAD)
