"""Engines that take seconds to import, or in parts when they are first used: the fork server imports them once for all
tests."""

import contextlib
import gc
import importlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for engine in (
    "accelerate.commands.launch",
    "transformers.trainer",
    "torch.distributed.pipelining",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(engine)
with contextlib.suppress(ImportError):
    importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018 - looks for compilers, once
gc.freeze()
