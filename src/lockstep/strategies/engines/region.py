"""A micro-batch as one compiled function, from the embedding to the loss: `model.compile: whole`.

In: a strategy whose ranks hold the whole model, and micro-batches of few shapes, known before training: without
padding, or of texts padded to a few lengths (`model.compile_lengths`). Out: the same loss and gradient for each of
them, from one code per shape. Other micro-batches (with padding among examples of one length, or of a shape that has no
code) run uncompiled, which depends on their inputs only.

Exactness requires that a micro-batch has the same bits in every process. torch's switch for deterministic algorithms is
off within a region, because it also slows down kernels that are deterministic anyway. Three things replace it:

- the compiler decides nothing by timing (`_inductor_options`), so every process generates the same code;
- the generated code is checked: it may call only operations of `REPEATING`, and must not use atomic additions;
- before training, each shape's micro-batch is computed twice on every rank, and all gradients must be equal in bits.

One micro-batch is also compared with the uncompiled model, unless the model draws random numbers (dropout).

If a check fails, `whole` is refused, and `auto` runs uncompiled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from typing_extensions import override

from lockstep.config.run import Run, RunError
from lockstep.data import fixed_lengths, host_facts
from lockstep.data.batch import MicroBatch
from lockstep.data.host_facts import RealTokens
from lockstep.data.job import Job
from lockstep.distributed.hardware import available_cores
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.tensor_hashes import hash_text
from lockstep.strategies.engines import blocks
from lockstep.strategies.exact.step_totals import LossOutput
from lockstep.tasks.models import masks, padding, repeatable
from lockstep.tasks.models.model_configs import ModelChoice
from lockstep.tasks.task import Task
from lockstep.track.busy import ACTIVITY

if TYPE_CHECKING:
    from lockstep.data.arrow_cache import Columns
    from lockstep.strategies.strategy import Strategy

TARGETS = "lockstep_region_targets"  # input name of the targets of a micro-batch that is compiled whole
PAYS_AFTER = 500  # steps; compiling took 60 to 80 s more than eager starts and saved 0.17 to 0.3 s a step (H100)
ALIKE, ALIKE_LOW = 1e-3, 5e-2  # relative differences of loss and gradient's norm: float32, half precision
WORKERS = 8  # processes that compile a rank's kernels for a GPU
OF_ONE_LENGTH = 0.9  # share of the examples that must have the longest one's length

# Operations outside of generated kernels that give the same bits for the same shapes on one kind of device: cuBLAS
# products (with CUBLAS_WORKSPACE_CONFIG), cuDNN's deterministic convolutions, lockstep's own replacements
# (`tasks/models/repeatable.py`), seeded random numbers, and copies.
REPEATING = re.compile(
    r"extern_kernels\.(mm|addmm|bmm|baddbmm|_mm_plus_mm|convolution|bias_addmm|_scaled_mm)$"
    r"|torch\.ops\.lockstep\.\w+\.default$"
    r"|(torch\.ops\.)?aten\.(convolution_backward|randint|view|as_strided|reshape|_foreach_\w+)\.\w+$"
    r"|torch\.ops\.inductor\.\w+(\.\w+)?$|inductor_ops\.\w+$"
    r"|torch\.ops\.mkldnn\._\w+\.\w+$|torch\.ops\.mkl\._\w+(\.\w+)?$"
)

# A call of an operation, in an assignment or alone (in place); `aten` and `inductor_ops` are names of the module.
_CALL = re.compile(r"(?<![\w.'\"])((?:extern_kernels|torch\.ops|aten|inductor_ops|_quantized)(?:\.\w+)+)\(")
IN_PARTS = "with these options, no rank runs the whole model in one piece under strategy.name="


class NotRepeating(Exception):
    """The reason why compiled code does not have the same bits in every process."""


class WrongCode(Exception):
    """Compiled code computes something else than the model that it was compiled from."""


# -- before any process ------------------------------------------------------------------------------------------------


def refusal(job: Job) -> str | None:
    """Explain why this run file's micro-batches cannot be compiled whole; None if they can."""
    run, strategy, task = job.run, job.strategy, job.task
    if not task.built_in() or task.own_model:
        return "a custom model decides itself what to compile (torch.compile in its own code)"
    if not strategy.memory.needs_choice(job) and not strategy.facts.runs_whole_model:
        return f"{IN_PARTS}{run.strategy.name}"
    if engine := next((key for key in ("torch_compile", "static_graph") if run.strategy.options.get(key)), None):
        return f"strategy.options.{engine} changes how the model is called"
    for key in ("checkpoint_activations", "offload_activations", "quantization"):
        if getattr(run.model, key):
            return f"model.{key} works layer by layer"
    if task.chunks_loss and task(run).options.loss_chunk is not None:
        return "task.loss_chunk computes the loss outside of the model"
    if run.data.stream:
        return "the examples of a stream, and so their lengths, are not known before training"
    assert task.head is not None, "only a custom model has no head"
    why = padding.unsupported_reason(ModelChoice.of(run), task.head)
    return None if why is None else f"it uses transformers' attention, whose gradient may not be deterministic ({why})"


def _of_lengths(columns: Columns) -> str | None:
    """Explain why examples of these lengths cannot be compiled whole without padding; None if they can."""
    longest = int(columns.lengths[columns.longest(1)][0])
    count = sum(int((part == longest).sum()) for _, part in columns.lengths.parts())
    if count < OF_ONE_LENGTH * len(columns):
        return (
            f"only {count} of {len(columns)} examples have the same length (the longest); packing (data.pack) "
            "makes all lengths equal"
        )
    return None


def decided(
    job: Job, task: Task, steps: int, sizes: Iterable[tuple[int, int]], resumed: Mapping[str, Any]
) -> tuple[Run, list[str]]:
    """Decide `model.compile` and `model.compile_lengths`; return the run and notes. `task`: with its data; `sizes`:
    examples and longest text of some micro-batches; `resumed`: the arithmetic of the checkpoint that the run starts
    from, if any. Errors: `RunError` if the run file asks for `whole` and that is impossible."""
    run, lengths = job.run, _of_lengths(task.splits["train"])
    reason = refusal(job) or lengths
    resumes = resumed.get("model.compile") == "whole"
    if run.model.compile == "whole":
        if refusal(job) is None and (lengths is not None or run.model.compile_lengths):
            return run.with_keys("model", compile_lengths=_fixed_lengths(task, sizes, resumed, lengths)), []
        if reason is not None:
            raise _refused(reason)
        return run, []
    if reason is not None:
        elsewhere = reason.startswith(IN_PARTS) and steps >= PAYS_AFTER and lengths is None
        return run.with_keys("model", compile=False), [
            f"not compiled under {run.strategy.name}; single, ddp and others would compile this run, so their "
            "results differ in bits (with model.compile=false all are bitwise equal)"
        ] * elsewhere
    if steps < PAYS_AFTER and not resumes:
        return run.with_keys("model", compile=False), [
            f"not compiled: compiling pays from about {PAYS_AFTER} steps on, and this run has {steps}"
        ]
    return run.with_keys("model", compile="whole"), []


def _fixed_lengths(
    task: Task, sizes: Iterable[tuple[int, int]], resumed: Mapping[str, Any], unequal: str | None
) -> list[int]:
    """Return the lengths to which a run's texts are padded: those of the run file or of the checkpoint, or chosen for
    micro-batches of these sizes. Errors: `RunError`."""
    columns, own = task.splits["train"], sorted({*(task.run.model.compile_lengths or ())})
    longest = int(columns.lengths[columns.longest(1)][0])
    micro = task.collate(columns, columns.longest(1), 0)
    if task.targets_by_token is None or not set(micro.inputs) <= set(fixed_lengths.PADDED):
        cannot = "examples of this task cannot be padded to model.compile_lengths"
        raise _refused(cannot if own or unequal is None else unequal)
    if own and own[-1] < longest:
        raise RunError(
            "LS4052",
            f"model.compile_lengths: the longest text has {longest} tokens, more than {own[-1]}; add {longest}",
        )
    before = list(resumed.get("model.compile_lengths") or [0])
    if own or before[-1] >= longest:
        return own or before
    return fixed_lengths.choose(sizes, longest)


def _refused(reason: str) -> RunError:
    return RunError(
        "LS4051",
        f"model.compile: whole is not possible: {reason}; set model.compile=true to compile layer by layer, or "
        "model.compile=false",
    )


def fitted(job: Job) -> Job:
    """Return the job for a strategy that was chosen by memory: uncompiled if it shards the model. Errors: `RunError`,
    instead, if the run file asks for `whole`."""
    run = job.run
    if run.model.compile != "whole" or job.strategy.facts.runs_whole_model:
        return job
    if run.wrote("model.compile"):
        raise _refused(f"{IN_PARTS}{run.strategy.name}, as its weights do not fit into the memory of one process")
    return job.having(run.with_keys("model", compile=False))


# -- in every process --------------------------------------------------------------------------------------------------


class Region:
    """The compiled function of one model."""

    def __init__(self, strategy: Strategy, task: Task, model: nn.Module) -> None:
        """Replace the model's `forward`; calls without `TARGETS` still run the original one."""
        self.run, self.task, self.device = strategy.run, task, strategy.world.device
        self.autocast = strategy.precision.autocast
        self.each = bool(self.run.data.sources) and task.reports_example_losses
        self.plain = model.forward
        self.code = torch.compile(self._loss, fullgraph=True, dynamic=False, backend=blocks.BACKEND)
        self.shapes: set[tuple[Any, ...]] = set()  # with code
        self.names: set[str] = set()  # of the model's inputs
        self.compiling = False
        self.graphs: Any = None  # of the code: `cuda_graphs.MicroBatchGraphs`, if the run uses them
        self.exact = bool(self.run.strategy.exact)
        self.padded = bool(self.run.model.fixed_lengths)
        repeatable.install(model)
        # not a bound method, whose function Accelerate binds to the model under mixed precision
        model.forward = partial(self.forward)

    def has_code(self, micro: MicroBatch) -> bool:
        """Whether a micro-batch is computed by compiled code."""
        return self.compiling or shapes_of(self._without_masks(micro)) in self.shapes

    def inputs(self, micro: MicroBatch) -> Mapping[str, Tensor]:
        """Return the inputs of `forward` for a micro-batch, which select compiled code if it exists."""
        inputs = self._without_masks(micro)
        if self.compiling:
            self.shapes.add(shapes_of(inputs))
            self.names |= inputs.keys() - {TARGETS}
        return inputs if shapes_of(inputs) in self.shapes else micro.inputs

    def _without_masks(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Return a micro-batch's inputs and targets, without masks that mask nothing. Among padded texts all keep
        their mask, without facts about its values, which the compiler would take for constants."""
        if self.padded:
            inputs = {name: v.detach() if name in host_facts.MASKS else v for name, v in micro.inputs.items()}
        else:
            inputs = {name: v for name, v in micro.inputs.items() if name not in host_facts.MASKS or not _full(v)}
        return {**inputs, TARGETS: micro.targets}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        targets = kwargs.pop(TARGETS, None)
        if targets is None:
            return self.plain(*args, **kwargs)
        # A failing guard would recompile, and this process would run other code than the others.
        stance = "default" if self.compiling else "fail_on_recompile"
        with masks.region(), self.autocast(False), torch.compiler.set_stance(stance):
            # engines add inputs of their own, such as Trainer's `num_items_in_batch`
            return LossOutput(*self.code({name: kwargs[name] for name in sorted(self.names)}, targets))

    def _loss(self, inputs: Mapping[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor | None]:
        with self.autocast():
            outputs = self.plain(**inputs)
            if self.each:
                return self.task.loss_each(outputs, targets)
            return self.task.loss_sum(outputs, targets), None

    def check(self, micro: MicroBatch) -> None:
        """Check that a micro-batch has neither padding nor several texts in a row. Errors: `NotRepeating`."""
        if host_facts.POSITIONS in micro.inputs:
            raise NotRepeating("its rows hold several texts with separate attention")
        if not self.padded and any(name in self._without_masks(micro) for name in host_facts.MASKS):
            raise NotRepeating("its examples are padded")

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """A context for forward and backward of a micro-batch with code, on CUDA: without torch's deterministic
        switch."""
        if self.device.type != "cuda" or not self.exact:
            yield
            return
        mode, cudnn = torch.get_deterministic_debug_mode(), torch.backends.cudnn.deterministic
        torch.set_deterministic_debug_mode("default")
        torch.backends.cudnn.deterministic = True
        try:
            yield
        finally:
            torch.backends.cudnn.deterministic = cudnn
            torch.set_deterministic_debug_mode(mode)


def _full(mask: Tensor) -> bool:
    """Whether a mask masks nothing; a mask on a GPU is not read."""
    about = host_facts.facts(mask, RealTokens)
    if about is not None:
        return about.full
    return mask.device.type == "cpu" and bool(mask.all())


def shapes_of(inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return a key for compiled code: names, shapes and dtypes of inputs."""
    return tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(inputs.items()))


# -- compiling ---------------------------------------------------------------------------------------------------------


def warm_up(strategy: Strategy, task: Task) -> None:
    """Compile a run's micro-batches and check that they are deterministic. If they are not, or the model cannot be
    compiled whole, all ranks run it uncompiled, with the reason in `strategy.remarks`. Collective. Errors: `RunError`,
    instead, if the run file asks for `whole`."""
    region, run, world = getattr(strategy, "region", None), strategy.run, strategy.world
    if region is None:
        return
    ACTIVITY.set("compiling a micro-batch")
    torch.compiler.reset()  # code of an earlier run in this process was compiled for other sizes
    digests, reason = list[str](), None
    try:
        micros = [micro.to(world.device) for micro in examples(task)]
        with _making(region, micros):
            digests += [_repeated(region, strategy.model, micro) for micro in micros]
            _compare(region, strategy.model, micros[0])
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # of the compiler, or of a model that it does not support
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    answers = world.all_gather((reason, digests))
    reason = next((each for each, _ in answers if each is not None), None)
    if reason is None and (others := [rank for rank, (_, other) in enumerate(answers) if other != answers[0][1]]):
        reason = f"gradients of rank {', '.join(map(str, others))} differ in bits from those of rank 0"
    if reason is None:
        return
    if run.wrote("model.compile"):
        raise _refused(reason)
    strategy.region = None  # type: ignore[attr-defined]
    strategy.remarks = (*strategy.remarks, f"runs uncompiled (slower), because {reason}")


def examples(task: Task) -> Iterator[MicroBatch]:
    """Yield a micro-batch of the longest examples for each number of examples that a run's micro-batches have, and for
    each length to which they are padded."""
    run = task.run
    columns = task.splits["train"]
    sizes = {-(-run.batch_size // run.micro_batches), run.batch_size // run.micro_batches}
    for size in sorted(sizes - {0}, reverse=True):
        for length in reversed(run.model.compile_lengths or [0]):
            seed_everything(run.seed, -3)  # for a task whose collate draws random numbers
            if not length:
                yield task.collate(columns, np.asarray(columns.longest(size), dtype=np.int64), 0)
            elif len(rows := _of_at_most(columns, length, size)):
                yield task.widened(task.collate(columns, rows, 0), [length])


def _of_at_most(columns: Columns, length: int, size: int) -> np.ndarray:
    """Return `size` rows of texts with at most `length` tokens, longest first. The last one is the shortest of all such
    texts, so that the rows probably have padding. Empty if there is no such text."""
    lengths = np.asarray(columns.lengths)
    rows = np.flatnonzero(lengths <= length)
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    chosen = np.resize(rows, size) if len(rows) else rows
    chosen[-1:] = rows[-1:]
    return chosen


def _repeated(region: Region, model: nn.Module, micro: MicroBatch) -> str:
    """Compute a micro-batch twice and return the hash of its loss and gradients. Errors: `NotRepeating`."""
    first, second = (_computed(region, model, micro) for _ in range(2))
    if first != second:
        raise NotRepeating("computing the same micro-batch twice gave different bits")
    return first


def _computed(region: Region, model: nn.Module, micro: MicroBatch) -> str:
    region.check(micro)
    loss, gradients = _by_code(region, model, micro)
    tensors = (loss.detach(), *gradients)
    return hash_text(*(tensor for tensor in tensors if tensor is not None))


def _by_code(region: Region, model: nn.Module, micro: MicroBatch) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return loss sum and gradients of a micro-batch from compiled code."""
    seed_everything(region.run.seed, -3, 0)
    with region.arithmetic():
        loss = model(**region.inputs(micro)).loss
        return loss, torch.autograd.grad(loss, _trained(model), allow_unused=True)


def _uncompiled(region: Region, model: nn.Module, micro: MicroBatch, seed: int) -> Tensor:
    """Return the loss sum of a micro-batch, with its graph, from the uncompiled model."""
    seed_everything(region.run.seed, -3, seed)
    with region.autocast():
        loss: Tensor = region.task.loss_sum(model(**micro.inputs), micro.targets)
    return loss


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _compare(region: Region, model: nn.Module, micro: MicroBatch) -> None:
    """Compare compiled code with the uncompiled model, unless the model draws random numbers. Errors: `WrongCode`."""
    with torch.no_grad():
        if not torch.equal(_uncompiled(region, model, micro, 0), _uncompiled(region, model, micro, 1)):
            return
    plain = _uncompiled(region, model, micro, 0)
    plain_norm = _norm(torch.autograd.grad(plain, _trained(model), allow_unused=True))
    loss, gradients = _by_code(region, model, micro)
    low = region.run.precision != "fp32" or region.run.model.trained_in_bfloat16
    pairs = {"loss": (float(loss.detach()), float(plain.detach())), "gradient's norm": (_norm(gradients), plain_norm)}
    for name, (code, own) in pairs.items():
        if not abs(code - own) <= (ALIKE_LOW if low else ALIKE) * abs(own):
            raise WrongCode(
                f"the {name} of a micro-batch is {code:.7g} with the compiled code, and {own:.7g} without it"
            )


def _norm(gradients: Sequence[Tensor | None]) -> float:
    norms = [gradient.detach().float().norm() for gradient in gradients if gradient is not None]
    return float(torch.stack(norms).norm())


@contextmanager
def _making(region: Region, micros: Sequence[MicroBatch]) -> Iterator[None]:
    """A context in which the region is compiled on new shapes; afterwards the generated code is checked. Errors:
    `NotRepeating`."""
    region.compiling = True
    try:
        with ExitStack() as stack:
            stack.enter_context(blocks.shared_cache_of([_described(micro) for micro in micros]))
            stack.enter_context(blocks.making())
            stack.enter_context(_inductor_options(region))
            yield
            if region.exact and blocks.BACKEND == "inductor":
                _check_generated(Path(os.environ[blocks.CACHE]))
    finally:
        region.compiling = False


def _check_generated(folder: Path) -> None:
    """Check the modules in inductor's cache folder that this process has loaded, whether new or cached. Errors:
    `NotRepeating`."""
    from torch._inductor.codecache import PyCodeCache

    files = [Path(str(module.__file__)) for module in PyCodeCache.modules]
    texts = [file.read_text() for file in files if file.is_relative_to(folder)]
    if not any("def call(" in text for text in texts):
        raise NotRepeating(f"no generated code is in {folder}, so it cannot be checked")
    for text in texts:
        check_code(text)


def _described(micro: MicroBatch) -> Any:
    return [(name, list(value.shape)) for name, value in sorted(micro.inputs.items())]


@contextmanager
def _inductor_options(region: Region) -> Iterator[None]:
    """A context in which the compiler decides nothing by timing. torch's `deterministic` (from 2.11) also fixes the
    choice of reductions. On CUDA, worker processes compile kernels, and end with the context."""
    import torch._inductor.config
    from torch._inductor.async_compile import shutdown_compile_workers

    cuda = region.device.type == "cuda"
    options: dict[str, Any] = {"compile_threads": min(WORKERS, available_cores())} if cuda else {}
    try:
        with torch._inductor.config.patch(
            deterministic=region.exact,
            post_grad_custom_pre_pass=_Sums(),
            shape_padding=False,
            coordinate_descent_tuning=False,
            max_autotune=False,
            cpp_wrapper=False,  # whose code `check_code` could not read
            **options,
        ):
            yield
    finally:
        if cuda:
            shutdown_compile_workers()


class _Sums(CustomGraphPass):
    """The compiler's pass `repeatable.replace_sums`."""

    @override
    def __call__(self, graph: torch.fx.Graph) -> None:
        repeatable.replace_sums(graph)

    @override
    def uuid(self) -> str:
        """Identify the pass in the key of cached code."""
        return "lockstep::index_put_sum 1"


def check_code(text: str) -> None:
    """Check a module that inductor generated. Errors: `NotRepeating` if it uses atomic additions, or calls an operation
    that is not known to be deterministic."""
    if "atomic_add" in text:
        raise NotRepeating("the compiled code uses atomic additions, whose order varies")
    body = text.partition("def call(")[2].partition("def get_args(")[0].partition("def benchmark_compiled_module")[0]
    for name in _CALL.findall(re.sub(r"#.*", "", body)):
        if not REPEATING.match(name):
            raise NotRepeating(f"the compiled code calls {name}, which is not known to be deterministic")
