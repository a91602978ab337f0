"""torch.compile of a model's layers: one code for all alike layers and all lengths, the same on every rank.

In: a layer. Out: a `forward` that runs compiled code in training, and the layer's own otherwise: evaluation scores the
model as whoever loads the export computes it.

What the compiler makes depends on the sizes that it meets first: they are what it weighs fusions and loops by. So code
is made in `warm_up` only, of examples that are the same on every rank at any number of processes. Later a layer that
meets what none of this code is for (a mask where there was none) runs as it is, which again depends on its inputs only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.fx.experimental._config
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lockstep.config.run import Run, RunError
from lockstep.data.batch import StepBatch
from lockstep.data.cache import cache_folder
from lockstep.distributed.activity import ACTIVITY
from lockstep.distributed.randomness import seed_everything
from lockstep.strategies.engines.writes import Writes
from lockstep.tasks.task import Task

if TYPE_CHECKING:
    from lockstep.strategies.strategy import Strategy

Forward = Callable[..., Any]

_stance = ["eager_on_recompile"]  # of this process: compiled code is used where there is some, and made in `warm_up`
BACKEND = "inductor"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
_AS_THEY_SAY = {f"torch.amp.autocast_mode._{word}_autocast": torch.__version__ for word in ("enter", "exit")}


def check(on_gpu: bool) -> None:
    """Refuse a machine on which nothing can be compiled. Errors: `RunError`."""
    if on_gpu:
        if find_spec("triton") is None:
            raise RunError("model.compile: triton is not installed, which compiles for GPUs: pip install triton")
        return
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise RunError(
            f"model.compile: this machine has no C++ compiler {name!r}; install one (apt-get install g++), name one in "
            "CXX, or leave model.compile out"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise RunError(
            "model.compile: Python's headers are missing (Python.h), which compiled code needs; install them "
            "(apt-get install python3-dev), or leave model.compile out"
        )


def in_training(block: nn.Module, forward: Forward) -> Forward:
    """A layer's `forward`, compiled where it trains."""
    # Symbolic sizes from the first call on, and no part that is left out in silence.
    code = torch.compile(forward, dynamic=True, fullgraph=True, backend=BACKEND)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()) or isinstance(_get_current_dispatch_mode(), Writes):
            return forward(*args, **kwargs)  # torch compiles nothing while operations are looked at
        with torch.compiler.set_stance(_stance[0]):
            return code(*args, **kwargs)

    return run


def warm_up(run: Run, strategy: Strategy, task: Task) -> None:
    """Make all code that training uses, by steps that leave no trace. Collective. Errors: `RunError`."""
    if not run.model.compile:
        return
    ACTIVITY.at("compiling the layers")
    torch.compiler.reset()  # what was made for another run in this process met other sizes
    batches = list(examples(run, strategy, task))
    with shared_cache(batches), making():
        for batch in batches:
            try:
                strategy.dry_run(batch.to(strategy.world.device))
            except torch._dynamo.exc.TorchDynamoException as error:
                said = " ".join(str(error).partition("\n\nSet TORCH")[0].split())[:300]
                raise RunError(
                    f"model.compile: torch.compile cannot take a layer of this model: {said}; leave model.compile out"
                ) from error


@contextmanager
def shared_cache(batches: Sequence[StepBatch]) -> Iterator[None]:
    """Inductor's cache in here, unless TORCHINDUCTOR_CACHE_DIR names one. The ranks of a machine share it: what one of
    them compiles, the others wait for, under inductor's own locks. So do later starts with examples of these sizes.
    Inductor would also take what was made for others, and a run's bits would depend on what else ran on the machine."""
    before = os.environ.get(CACHE)
    if before not in (None, default_cache_dir()):  # the latter is what torch itself puts there
        yield
        return
    sizes = [
        (batch.tokens, [(name, list(value.shape)) for name, value in batch.micro_batches[0].inputs.items()])
        for batch in batches
    ]
    folder = cache_folder() / "compiled" / hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ[CACHE] = str(folder)
    try:
        yield
    finally:
        del os.environ[CACHE]
        if before is not None:
            os.environ[CACHE] = before


@contextmanager
def making() -> Iterator[None]:
    """What layers meet in here is compiled."""
    _stance[0] = "default"
    try:
        with (
            # of one compiler for all layers that are alike, with and without a mask; an encoder and a decoder
            # Numbers such as dropout's are constants at once: otherwise they turn out to be when a layer has been
            # compiled, and it is compiled again.
            torch._dynamo.config.patch(recompile_limit=64, optimize_ddp=False, specialize_float=True),
            # no further processes, which may outlive a rank; `autocast` in a layer is what its arguments say
            torch._inductor.config.patch(compile_threads=1, unsafe_marked_cacheable_functions=_AS_THEY_SAY),
            # a rank takes from the cache what another one has made, with texts laid end to end (`unpadded.py`), too
            torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True),
            # sizes that are equal once need not stay so
            torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        _stance[0] = "eager_on_recompile"


def examples(run: Run, strategy: Strategy, task: Task) -> Iterator[StepBatch]:
    """Steps whose micro-batches are all the same: padded ones, such without padding, and single examples."""
    columns = task.splits["train"]
    order = np.argsort(-columns.lengths, kind="stable")
    longest, shortest = int(order[0]), int(order[-1])
    for rows in ([longest, shortest], [longest, longest], [longest]):
        if rows == [longest, shortest] and columns.lengths[longest] == columns.lengths[shortest]:
            continue
        chosen = np.array(rows, dtype=np.int64)
        seed_everything(run.seed, -3)  # for a task whose collate draws
        micro = task.collate(columns, chosen, 0)
        mine = [replace(micro, index=i) for i in strategy.own_micro_batches()]
        targets = run.micro_batches * task.count_targets(columns, chosen)
        tokens = run.micro_batches * int(columns.lengths[chosen].sum())
        yield StepBatch(0, mine, run.micro_batches, run.batch_size, targets, tokens, tokens, tokens, chosen)
