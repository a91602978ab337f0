"""What the fork server does once for all tests: import engines, which takes seconds, also of what they leave for their
first use, and lockstep's own plug-ins, which every rank would import anew."""

import contextlib
import gc
import importlib
import os
from pathlib import Path
from typing import Any

from lockstep.config import plugins, user_code

gc.disable()  # as in `lockstep.training.preload`
os.environ.setdefault("DS_ACCELERATOR", "cpu")
for engine in (
    "accelerate.commands.launch",
    "transformers.trainer",
    "torch.distributed.pipelining",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(engine)
with contextlib.suppress(ImportError):
    importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018 - looks for compilers, once
with contextlib.suppress(ImportError):  # of all models, compiled at the first export
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("gpt2")
for kind in ("tasks", "strategies", "optimizers"):
    for name in plugins.names(kind):
        with contextlib.suppress(ImportError):
            plugin: Any = plugins.find(kind, name)
            if kind == "tasks":  # a rank looks up its data by what this file says
                user_code.fingerprint(Path(importlib.import_module(plugin.__module__).__file__ or ""))
gc.freeze()
gc.enable()
