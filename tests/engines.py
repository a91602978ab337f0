"""Engines that take seconds to import: the fork server imports them once for all tests."""

import contextlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for engine in ("accelerate", "transformers.trainer", "torch.distributed.pipelining", "deepspeed"):
    with contextlib.suppress(ImportError):
        __import__(engine)
