"""Imports made once by the fork server for all tests: engines and metric libraries, including their lazy parts, and
what every rank or command would import of lockstep.
"""

import contextlib
import ctypes
import gc
import importlib
import os
from pathlib import Path
from typing import Any

from lockstep.config import plugins, user_code

LARGE, COLLAPSE = 2 << 20, 25  # bytes of a large page, MADV_COLLAPSE of <linux/mman.h>


def in_large_pages() -> None:
    """Move this process's memory into large pages, if Linux can (6.1 and later): a fork copies the whole page table,
    and its end walks it again, up to a tenth of a small job's time."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, access, _, _, file, *_ = line.split()
        first, end = (int(place, 16) for place in span.split("-"))
        first, end = -(-first // LARGE) * LARGE, end // LARGE * LARGE
        if access == "rw-p" and file == "0" and first < end:
            size = ctypes.c_size_t(end - first)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, COLLAPSE)  # on failure nothing changes


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
    "torch.profiler._cupti_monitor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.marian.modeling_marian",
    "sacrebleu.tokenizers.tokenizer_13a",
    "scipy.io",
    "scipy.stats",
    "sklearn.metrics",
    "rich._emoji_codes",
    "lockstep.checkpoint.export",
    "lockstep.checkpoint.hub_push",
    "lockstep.launchers.local",
    "lockstep.launchers.start",
    "lockstep.plain.scores",
    "lockstep.tasks.models.models",
    "lockstep.commands.first_steps",
    "lockstep.training.checkpoint_model",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(engine)
with contextlib.suppress(ImportError):
    importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018 - looks for compilers, once
with contextlib.suppress(ImportError):  # of all models, compiled at the first export
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("gpt2")
importlib.import_module("lockstep.track.report.report").templates().get_template("run.html.jinja")
plugins.refuse_old(["torch"])  # reads this distribution's requirements
for kind in ("tasks", "strategies", "optimizers"):
    for name in plugins.names(kind):
        with contextlib.suppress(ImportError):
            plugin: Any = plugins.find(kind, name)
            if kind == "tasks":  # a rank looks up its data by this file's hash
                user_code.fingerprint(Path(importlib.import_module(plugin.__module__).__file__ or ""))
gc.freeze()
gc.enable()
in_large_pages()
