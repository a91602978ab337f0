"""Reintroduce faults that a library had once: each patch reverts the few lines of its repair.

In: the name of a patch. Out: the library's functions in this process compute as they did before the repair; no file is
written. If `old` is not in the library's source, that source has changed, and nothing is patched.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Patch:
    """`where`: the report or repair. `edits`: lines as they are, and as they were."""

    where: str
    module: str
    edits: tuple[tuple[str, str], ...]

    @property
    def lines(self) -> int:
        return sum(len(was.splitlines()) for _, was in self.edits)

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


ZERO = "deepspeed.runtime.zero.stage_1_and_2"
PATCHES = {
    "offload-drops": Patch(
        "deepspeedai/DeepSpeed#7967",
        ZERO,
        (
            (
                "        copy_gradients_to_cpu()\n        self._record_offload_copy()\n",
                "        else:\n            copy_gradients_to_cpu()\n        self._record_offload_copy()\n",
            ),
        ),
    ),
    "offload-boundary": Patch(
        "deepspeedai/DeepSpeed#7981",
        ZERO,
        (
            (
                "if self.micro_step_id > 0 or not self.is_gradient_accumulation_boundary():",
                "if self.gradient_accumulation_steps > 1:",
            ),
        ),
    ),
    "warmup-groups": Patch(
        "deepspeedai/DeepSpeed#8171",
        "deepspeed.runtime.lr_schedules",
        (
            (
                "warmup_max_lr = [group['lr'] for group in self.optimizer.param_groups]\n",
                "warmup_max_lr = [group['lr'] for group in self.optimizer.param_groups][0]\n",
            ),
        ),
    ),
    "cosine-groups": Patch(
        "deepspeedai/DeepSpeed#7969",
        "deepspeed.runtime.lr_schedules",
        (("            return [0.0 for _ in self.org_lrs]\n", "            return [0.0]\n"),),
    ),
    "resumed-order": Patch(
        "huggingface/accelerate#4071",
        "accelerate.data_loader",
        (("            iteration=dataloader.iteration,\n", "            iteration=0,\n"),),
    ),
    "numpy-workers": Patch(
        "pytorch/pytorch#5059",
        "torch.utils.data._utils.worker",
        (("            np.random.seed(np_seed)\n", "            pass\n"),),
    ),
    "local-norm": Patch(
        "pytorch/pytorch#170862",
        "torch.nn.utils.clip_grad",
        (
            (
                "    total_norm = _get_total_norm(grads,",
                "    total_norm = _get_total_norm([g.to_local() for g in grads],",
            ),
        ),
    ),
    "ranks-not-counted": Patch(
        "huggingface/transformers#37474",
        "transformers.trainer",
        (("            loss *= loss_scale if self.args.n_gpu <= 1 else self.args.n_gpu\n", "            pass\n"),),
    ),
    "smoothed-mean": Patch(
        "huggingface/transformers#46731",
        "transformers.trainer_pt_utils",
        (
            (
                "        if num_items_in_batch is None:\n            denominator",
                "        if True:\n            denominator",
            ),
        ),
    ),
    "distilled-mean": Patch(
        "huggingface/trl#6006",
        "trl.experimental.gkd.gkd_trainer",
        (("        if num_items_in_batch is not None:\n", "        if False:\n"),),
    ),
    "first-label-counts": Patch(
        "huggingface/transformers#46204",
        "transformers.trainer",
        (("                    if self._loss_shifts_labels\n", "                    if len(batch) < 0\n"),),
    ),
}


def apply(name: str) -> None:
    """Patch the library in this process. Errors: `RuntimeError` where the library has other lines now."""
    patch = PATCHES[name]
    module = importlib.import_module(patch.module)
    path = str(module.__file__)
    source = Path(path).read_text(encoding="utf-8")
    before = dict(_functions(compile(source, path, "exec")))
    for now, was in patch.edits:
        if now not in source:
            raise RuntimeError(f"{patch.module} has other lines than the patch {name} knows: {now.strip()!r}")
        source = source.replace(now, was)
    after = dict(_functions(compile(source, path, "exec")))
    changed = {name for name, code in after.items() if _words(code) != _words(before[name])}
    functions = {name: f for name, f in _defined(module) if name in changed}
    if not changed or set(functions) != changed:
        raise RuntimeError(f"the patch {name} cannot be applied to {sorted(changed) or patch.module}")
    for each, function in functions.items():
        function.__code__ = after[each]


def _words(code: types.CodeType) -> tuple[object, ...]:
    """Return bytecode, names and constants of a code object, without file and line numbers."""
    inner = tuple(_words(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, inner


def _functions(code: types.CodeType, prefix: str = "") -> Iterator[tuple[str, types.CodeType]]:
    """Functions of a module and of its classes."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            path = f"{prefix}{inner.co_name}"
            if inner.co_flags & inspect.CO_NEWLOCALS and inner.co_flags & inspect.CO_OPTIMIZED:
                yield path, inner
            else:
                yield from _functions(inner, f"{path}.")


def _defined(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            for key, member in vars(value).items():
                inner = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)))
                if isinstance(inner, types.FunctionType):
                    yield f"{name}.{key}", inner
        elif isinstance(function := inspect.unwrap(value), types.FunctionType):
            yield name, function
