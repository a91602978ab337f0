"""Options of a model's layers: compiled, recomputed in backward, saved activations on the host.

In: the keys `compile`, `checkpoint_activations` and `offload_activations` of `model`, and a model that no engine has
wrapped. Out: the same model with the same names. Only each layer's `forward` is replaced: hooks of engines stay outside
and run once. Compiled code runs in training only: evaluation computes the model like any user of the export. Equal
layers and all lengths share one code, the same on every rank.

The compiler's choices depend on the sizes that it sees first, by which it weighs fusions and loops. So code is compiled
in `warm_up` only, from examples that are the same on every rank at any number of processes. A layer that later sees
inputs without matching code (a mask where there was none) runs uncompiled, which again depends on its inputs only.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.data.batch import StepBatch
from lockstep.data.cache import cache_folder
from lockstep.data.job import Job
from lockstep.distributed.randomness import seed_everything
from lockstep.strategies.engines import layers
from lockstep.strategies.engines.side_effects import Writes
from lockstep.strategies.exact.gradient_sum import SMALL as FEW_ROWS
from lockstep.strategies.exact.step_totals import averaged_buffers
from lockstep.tasks.models import heads
from lockstep.tasks.models.model_configs import ModelChoice, load_config, with_architectures
from lockstep.tasks.task import Task
from lockstep.track.busy import ACTIVITY

if TYPE_CHECKING:
    from lockstep.strategies.exact.tensor_leaves import LeafRanks
    from lockstep.strategies.strategy import Strategy


KEYS = ("compile", "checkpoint_activations", "offload_activations")  # of `model`
_ENGINES_OWN = {
    "compile": ("torch_compile",),
    "checkpoint_activations": ("gradient_checkpointing", "activation_checkpointing"),
}
SMALL = 64 * 1024  # bytes; smaller tensors stay on the device

Forward = Callable[..., Any]


def check(job: Job, here: bool) -> None:
    """Check the options before any process starts. `here`: the ranks will run on machines like this one. Errors:
    `RunError`."""
    run, task = job.run, job.task
    layer_options = _layer_options(run.model)
    if run.model.compiled and here and not task.own_model:
        check_compiler(on_gpu=run.launch.device != "cpu" and torch.cuda.is_available())
    if not layer_options or task.own_model:  # the task reports that `model` has no effect
        return
    options = run.strategy.options | dict(run.strategy.options.get("fsdp") or {})
    for key, theirs in _ENGINES_OWN.items():
        if key in layer_options and (twice := next((option for option in theirs if options.get(option)), None)):
            raise RunError("LS4040", f"model.{key}: strategy.options.{twice} has the same effect; remove one of them")
    gpu = run.launch.device != "cpu" and not (here and not torch.cuda.is_available())
    if run.model.offload_activations and not gpu:
        raise RunError(
            "LS4041",
            "model.offload_activations: it moves activations from GPU memory to host memory, and this job "
            "has no GPU; use model.checkpoint_activations instead",
        )
    if task.built_in():
        _check_model(run.model, layer_options)
        if run.model.compiles_layers and here:
            _check_traced(job)


def _layer_options(section: ModelSection) -> list[str]:
    """Return those of `KEYS` that the run sets."""
    return [key for key in KEYS if getattr(section, key) and (key != "compile" or section.compiles_layers)]


def _check_model(section: ModelSection, layer_options: list[str]) -> None:
    """Check the family's layers on the meta device. Models that cannot be built so are checked when they are built."""
    if (model := layers.empty_model(section, with_architectures(load_config(section)))) is not None:
        _layers_of(model, layer_options)


def _check_traced(job: Job) -> None:
    """Refuse layers that torch.compile cannot trace, by trying a small model. Errors: `RunError`."""
    from lockstep.tasks.models import padding

    run, head = job.run, job.task.head
    if head is None or not heads.of(head).reads_texts:
        return
    laid = padding.unsupported_reason(ModelChoice.of(run), head) is None
    reason = padding.kept_trial(run.model, head, load_config(run.model), traced, laid, run.precision == "bf16")
    if reason is not None:
        raise _not_compiled(reason)


def traced(section: ModelSection, head: str, config: Any, laid: bool, autocast: bool) -> str | None:
    """Explain why Dynamo cannot trace a layer of a model of this config; None if it can, or no small model can be
    built. `laid`: whether padding is left out. Compiles no code. Restores torch's random state."""
    from torch._dynamo.exc import TorchDynamoException

    from lockstep.tasks.models import small_models, unpadded  # imports transformers' models

    attention = unpadded.NAME if laid else section.attention
    batches = [small_models.examples(head, *batch) for batch in small_models.BATCHES[:3]]
    reason = None
    with torch.random.fork_rng([]), torch.autocast("cpu", torch.bfloat16, autocast):
        for variant in small_models.smaller(config, head):
            torch.compiler.reset()  # equal layers share their code
            try:
                model = small_models.small(section, head, variant, attention).train()
                if attention == unpadded.NAME:
                    unpadded.install(model)
                for inputs in batches:
                    model(**inputs)
            except Exception:  # inconsistent config entries
                continue
            for block in layers.blocks(model):
                if not _looks_up_tokens(block):
                    block.forward = in_training(block, block.forward, "eager")
            try:
                with making():
                    for inputs in batches:
                        model(**inputs)
                return None
            except TorchDynamoException as error:
                reason = _brief(error)
    return reason


def _brief(error: Exception) -> str:
    return " ".join(str(error).partition("\n\nSet TORCH")[0].split())[:300]


def _not_compiled(reason: str) -> RunError:
    return RunError(
        "LS4048", f"model.compile: torch.compile fails on a layer of this model: {reason}; remove model.compile"
    )


def _layers_of(model: nn.Module, layer_options: list[str]) -> list[nn.Module]:
    """Return the layers of a model, which support all of `layer_options`. Errors: `RunError`."""
    blocks = layers.blocks(model)
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if not blocks:
        raise RunError(
            "LS4042",
            f"model.{layer_options[0]}: {kind} has no layers that each run exactly once; remove "
            f"model.{layer_options[0]}",
        )
    if "checkpoint_activations" not in layer_options:
        return blocks
    instead = "leave it out, or use more micro_batches, which need less memory"
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise RunError(
            "LS4043",
            f"model.checkpoint_activations: transformers does not support recomputing layers of {kind}; {instead}",
        )
    if any(averaged_buffers(block) for block in blocks):
        raise RunError(
            "LS4044",
            f"model.checkpoint_activations: layers of {kind} keep running statistics, which would be updated "
            f"twice; {instead}",
        )
    return blocks


def prepare(section: ModelSection, model: nn.Module, leaves: int = 1, ranks: LeafRanks | None = None) -> None:
    """Replace the layers' `forward` as configured, in place. `leaves`: `strategy.tensor_leaves`; `ranks`: the
    tensor-parallel ranks. Errors: `RunError`."""
    if leaves > 1:
        from lockstep.strategies.engines import tensor_plans

        tensor_plans.install(section, model, leaves, ranks)
    layer_options = _layer_options(section)
    for block in _layers_of(model, layer_options) if layer_options else ():
        forward: Forward = block.forward
        if section.compiles_layers and not _looks_up_tokens(block):
            forward = in_training(block, forward)
        if section.checkpoint_activations:
            forward = partial(_again, block, forward)
        if section.offload_activations:
            forward = partial(_on_host, block, forward)
        block.forward = forward


def _looks_up_tokens(block: nn.Module) -> bool:
    """Whether a block contains a large embedding, like transformers' BertEmbeddings. On a CPU its gradient is
    row-sparse (`row_sparse`), with a number of rows that a compiler cannot know. Such blocks are not compiled anywhere,
    so that a run is bitwise reproducible across devices."""
    return any(isinstance(module, nn.Embedding) and module.num_embeddings > FEW_ROWS for module in block.modules())


def saves(block: nn.Module) -> bool:
    """Whether a layer now saves activations for backward."""
    return block.training and torch.is_grad_enabled()


# -- recomputed in backward -------------------------------------------------------------------------------------------


def _again(block: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Save only the inputs, and rerun `forward` in backward, with the same random numbers and autocast. The graph is
    the first run's, so gradients are summed in the same order."""
    if not saves(block):
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=_same_numbers)


def _same_numbers() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts for `checkpoint`'s first and second run. They restore Python's and numpy's generators;
    `checkpoint` restores torch's."""
    return nullcontext(), _from(random.getstate(), np.random.get_state())


@contextmanager
def _from(python: Any, numpy: Any) -> Iterator[None]:
    now = random.getstate(), np.random.get_state()
    random.setstate(python)
    np.random.set_state(numpy)
    try:
        yield
    finally:
        random.setstate(now[0])
        np.random.set_state(now[1])


# -- on the host -----------------------------------------------------------------------------------------------------


def _on_host(block: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run `forward` with saved activations on the host. With `_again` inside, only the layer's inputs are moved."""
    if not saves(block):
        return forward(*args, **kwargs)
    with OnHost({p.untyped_storage().data_ptr() for p in block.parameters()}):
        return forward(*args, **kwargs)


class OnHost(saved_tensors_hooks):
    """A context in which tensors that autograd saves are kept in page-locked host memory. Weights stay on the device,
    where they are needed anyway. The host waits for each copy, so that device memory is freed at once."""

    def __init__(self, weights: set[int], device: str = "cuda") -> None:
        """`weights`: addresses of their storages; `device`: the device type whose tensors are moved."""

        def pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
            stays = tensor.device.type != device or tensor.nbytes < SMALL
            if stays or tensor.untyped_storage().data_ptr() in weights:
                return None, tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=device == "cuda")
            return tensor.device, host.copy_(tensor)

        def unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
            place, tensor = packed
            return tensor if place is None else tensor.to(place, non_blocking=True, copy=True)

        super().__init__(pack, unpack)


_stance = ["eager_on_recompile"]  # process-wide stance: use existing compiled code; `warm_up` compiles
BACKEND = "inductor"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
_AS_THEY_SAY = {f"torch.amp.autocast_mode._{word}_autocast": torch.__version__ for word in ("enter", "exit")}


def check_compiler(on_gpu: bool) -> None:
    """Refuse a machine without a working compiler. Errors: `RunError`."""
    if on_gpu:
        if find_spec("triton") is None:
            raise RunError(
                "LS4045", "model.compile: compiling for GPUs needs triton, which is not installed: pip install triton"
            )
        return
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise RunError(
            "LS4046",
            f"model.compile: this machine has no C++ compiler {name!r}; install one (apt-get install g++), "
            "name one in CXX, or remove model.compile",
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        raise RunError(
            "LS4047",
            "model.compile: compiled code needs the headers of Python (Python.h), which are not installed; "
            "install them (apt-get install python3-dev), or remove model.compile",
        )


def in_training(block: nn.Module, forward: Forward, backend: str | None = None) -> Forward:
    """Return a layer's `forward`, compiled in training."""
    # Symbolic sizes from the first call on, and no silent graph breaks.
    code = torch.compile(forward, dynamic=True, fullgraph=True, backend=backend or BACKEND)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()) or isinstance(_get_current_dispatch_mode(), Writes):
            return forward(*args, **kwargs)  # torch does not compile under a dispatch mode
        with torch.compiler.set_stance(_stance[0]):
            return code(*args, **kwargs)

    return run


def warm_up(strategy: Strategy, task: Task) -> None:
    """Compile all code for training, by steps that leave no trace. Collective. Errors: `RunError`."""
    if not strategy.run.model.compiles_layers:
        return
    ACTIVITY.set("compiling the layers")
    torch.compiler.reset()  # code of an earlier run in this process was compiled for other sizes
    from torch._dynamo.exc import TorchDynamoException

    batches = list(examples(strategy, task))
    with shared_cache(batches), making():
        for batch in batches:
            try:
                strategy.dry_run(batch.to(strategy.world.device))
            except TorchDynamoException as error:
                raise _not_compiled(_brief(error)) from error


def shared_cache(batches: Sequence[StepBatch]) -> AbstractContextManager[None]:
    """Return `shared_cache_of` for the sizes of these steps' first micro-batches."""
    return shared_cache_of(
        [
            (batch.tokens, [(name, list(value.shape)) for name, value in batch.micro_batches[0].inputs.items()])
            for batch in batches
        ]
    )


@contextmanager
def shared_cache_of(sizes: Sequence[Any]) -> Iterator[None]:
    """A context with inductor's cache for these sizes, unless TORCHINDUCTOR_CACHE_DIR is set. Ranks of a machine share
    it: one compiles, the others wait under inductor's locks. Later starts with examples of these sizes share it, too. A
    common cache would contain code for other sizes, and a run's results would depend on what else ran on the
    machine."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    before = os.environ.get(CACHE)
    if before not in (None, default_cache_dir()):  # torch itself sets the default
        yield
        return
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
    """A context in which layers are compiled on new inputs."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config

    _stance[0] = "default"
    try:
        with (
            # recompile_limit: equal layers share one code object, with and without a mask, in encoder and decoder.
            # specialize_float: numbers such as dropout's are constants from the start; else torch finds out after
            # compiling, and compiles again.
            torch._dynamo.config.patch(recompile_limit=64, optimize_ddp=False, specialize_float=True),
            # no worker processes, which may outlive a rank; `autocast` in a layer depends on its arguments only
            torch._inductor.config.patch(compile_threads=1, unsafe_marked_cacheable_functions=_AS_THEY_SAY),
            # ranks share cached code, also for unpadded texts (`unpadded.py`)
            torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True),
            # sizes that are equal in one call may differ in the next
            torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        _stance[0] = "eager_on_recompile"


def examples(strategy: Strategy, task: Task) -> Iterator[StepBatch]:
    """Yield steps of identical micro-batches: with padding, without padding, and with a single example."""
    run = task.run
    columns = task.splits["train"]
    order = np.argsort(-columns.lengths, kind="stable")
    longest, shortest = int(order[0]), int(order[-1])
    for rows in ([longest, shortest], [longest, longest], [longest]):
        if rows == [longest, shortest] and columns.lengths[longest] == columns.lengths[shortest]:
            continue
        chosen = np.array(rows, dtype=np.int64)
        seed_everything(run.seed, -3)  # for a task whose collate draws random numbers
        micro = task.collate(columns, chosen, 0)
        mine = [replace(micro, index=i) for i in strategy.own_micro_batches()]
        targets = run.micro_batches * task.count_targets(columns, chosen)
        tokens = run.micro_batches * int(columns.lengths[chosen].sum())
        yield StepBatch(0, mine, run.micro_batches, run.batch_size, targets, tokens, tokens, tokens, chosen)
