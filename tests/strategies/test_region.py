"""`model.compile: whole`: a micro-batch is one compiled function, with the same bits under every strategy that runs the
whole model. Code that would not repeat its bits is detected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lockstep.checkpoint import manifest
from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.data.job import Job, arithmetic_of
from lockstep.distributed.world import World
from lockstep.strategies.engines import blocks, cuda_graphs, region
from lockstep.tasks.models import masks, repeatable
from lockstep.training import resolve
from support.harness import build_with_feed, rank_0_of
from support.marks import long
from support.messages import raises
from support.own_modules import NET, NET_FUNCTIONS, job
from support.recorded_graphs import RerunRecorder
from support.strategy_runs import steps_of
from support.task_runs import make

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

WHOLE = "model.compile=whole"
PLAIN = tuple(f"model.config.{name}_pdrop=0.0" for name in ("resid", "embd", "attn"))  # no dropout
LIMIT_S = 900


class Code:
    """A compiler backend that runs the graph as it is, and counts calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        number = len(self.calls)
        self.calls.append(0)

        def code(*args: Any) -> Any:
            self.calls[number] += 1
            return graph(*args)

        return code


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    backend = Code()
    monkeypatch.setattr(blocks, "BACKEND", backend)
    return backend


def packed(folder: Path, *overrides: str) -> Run:
    return make(folder, "packed", "strategy.name=single", *overrides)


def test_each_shape_is_compiled_once_and_the_last_block_not(
    tmp_path: Path, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of texts is shorter: its micro-batch runs uncompiled. A CUDA graph is of the compiled code, which
    takes other parameters of the same memory."""
    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", RerunRecorder)
    run = packed(tmp_path, WHOLE, "batch_size=6", "micro_batches=4")  # micro-batches of two and of one
    _, strategy, feed = build_with_feed(run.with_keys("model", cuda_graphs=True), World(run))
    assert strategy.region is not None
    assert strategy.region.graphs is not None
    assert len(code.calls) == 2
    before, full, others = sum(code.calls), 0, 0
    for step in range(feed.order.steps_per_epoch):
        batch = feed.make(step)
        for micro in batch.micro_batches:
            fits = micro.targets.shape[1] == 24 and bool(micro.inputs["attention_mask"].all())
            full, others = full + fits, others + (not fits)
        strategy.train_step(batch, learning_rate(run.optim, step, 6))
    assert len(code.calls) == 2
    assert others > 0
    assert sum(code.calls) - before == full > others
    assert not [name for name in strategy.state.state_dict() if "_orig_mod" in name]
    strategy.close()


def test_results_equal_an_uncompiled_run_within_rounding(tmp_path: Path, code: Code) -> None:
    compiled, eager = (steps_of(World(run), run) for run in (packed(tmp_path, *PLAIN, WHOLE), packed(tmp_path, *PLAIN)))
    assert sum(code.calls) > 6
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert compiled["norm"] == pytest.approx(eager["norm"], rel=1e-4)
    for name, weight in eager["weights"].items():
        torch.testing.assert_close(compiled["weights"][name], weight, rtol=1e-4, atol=1e-5)


def test_losses_of_several_sources_are_recorded(tmp_path: Path, code: Code) -> None:
    (tmp_path / "other.txt").write_text("the old dog sees a red house .\n" * 60)
    one = packed(tmp_path).data.source
    other = f"{{name: other, train: {tmp_path / 'other.txt'}}}"
    sources = f"data.sources=[{{name: one, source: {one}}}, {other}]"
    alike = []
    for choice in (WHOLE, "model.compile=false"):
        run = packed(tmp_path, *PLAIN, choice, "data.source=null", sources)
        _, strategy, feed = build_with_feed(run, World(run))
        alike.append(strategy.train_step(feed.make(0), 0.0).loss_sums_of)
        strategy.close()
    assert code.calls
    torch.testing.assert_close(alike[0], alike[1], rtol=1e-5, atol=1e-5)


# -- the same bits --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT_S)
def test_every_strategy_with_the_whole_model_has_the_bits_of_one_process(folder: Path) -> None:
    """Code compiled by inductor, in processes with separate caches, keeps the bits, also with dropout, whose random
    numbers are the compiler's own."""

    def of(name: str, ranks: int, *overrides: str) -> tuple[str, list[float]]:
        run = make(folder, "packed", f"strategy.name={name}", "precision=bf16", "model.config.n_layer=1", *overrides)
        result = rank_0_of(ranks, steps_of, run, alike=("loss",), timeout_s=LIMIT_S)
        return result["digest"], result["loss"]

    one = of("single", 1, WHOLE)
    for name, *options in (("ddp",), ("fsdp2", "strategy.options.gather=step"), ("hf_trainer",)):
        assert of(name, 2, WHOLE, *options) == one, name
    assert of("single", 1, "model.compile=false") != one


# -- code that does not repeat --------------------------------------------------------------------------


CALLS = "def call(self, args):\n        {}\n\ndef get_args():\n    pass\n"


@pytest.mark.parametrize(
    "line",
    [
        "buf0 = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(buf1)",
        "buf0 = torch.ops.aten.index_put.default(buf1, [buf2], buf3, True)",
        "extern_kernels.something_new(buf0, out=buf1)",
        "aten.index_put_(buf0, [buf1], buf2, True)",
        "torch.ops.aten.scatter_reduce_.two(buf0, 0, buf1, buf2, reduce='sum')",
        "tl.atomic_add(out_ptr0 + (tmp0), tmp1, None, sem='relaxed')",
    ],
)
def test_generated_code_with_other_operations_is_refused(line: str) -> None:
    with pytest.raises(region.NotRepeating):
        region.check_code(CALLS.format(line))


@pytest.mark.parametrize(
    "line",
    [
        "extern_kernels.mm(buf0, primals_3, out=buf2)",
        "extern_kernels.addmm(primals_4, buf1, buf2, alpha=1, beta=1, out=buf4)",
        "buf9 = torch.ops.lockstep.attention_backward.default(buf1, buf2)",
        "assert_size_stride(buf2, (2, 1), (1, 1), 'torch.ops.aten.index_put.default')  # aten.index_put(...)",
        "triton_red_fused_add_0.run(buf0, buf1, 1024, 768, stream=stream0)",
    ],
)
def test_deterministic_generated_code_is_used(line: str) -> None:
    region.check_code(CALLS.format(line))


def drifting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    calls = [0]

    def code(*args: Any) -> Any:
        calls[0] += 1
        return tuple(each * (1 + 1e-6 * calls[0]) if each.is_floating_point() else each for each in graph(*args))

    return code


def failing(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    raise NotImplementedError("no kernel for this")


def wrong(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Code of a broken compiler: floats are 10 % too large."""

    def code(*args: Any) -> Any:
        return tuple(each * 1.1 if each.is_floating_point() else each for each in graph(*args))

    return code


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(drifting, "different bits"), long(failing, "no kernel for this"), (wrong, "with the compiled code")],
)
def test_nondeterministic_wrong_or_missing_code(
    backend: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run file that asks for such code is refused; if lockstep chose to compile, the run goes on uncompiled."""
    monkeypatch.setattr(blocks, "BACKEND", backend)
    run = packed(tmp_path, *PLAIN, WHOLE)
    with raises("LS4051", reason):
        steps_of(World(run), run)
    plain = packed(tmp_path, *PLAIN)
    run = plain.with_keys("model", compile="whole")
    _, strategy, feed = build_with_feed(run, World(run))
    assert reason in "".join(strategy.remarks)
    assert strategy.region is None
    strategy.train_step(feed.make(0), 1e-3)
    strategy.close()


def test_a_shape_without_compiled_code_is_an_error(tmp_path: Path, code: Code) -> None:
    """It is an error if compiled code no longer fits: a rank that ran uncompiled would have other bits."""
    run = packed(tmp_path, WHOLE)
    _, strategy, feed = build_with_feed(run, World(run))
    for module in strategy.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    with pytest.raises(RuntimeError, match="recompile"):
        strategy.train_step(feed.make(0), 1e-3)


# -- the decision to compile --------------------------------------------------------------------------


def decided(run: Run, monkeypatch: pytest.MonkeyPatch, gpus: int = 1) -> tuple[Any, list[str]]:
    monkeypatch.setattr(resolve, "gpus_of", lambda run: gpus)
    run, notes = resolve._compiled(Job.of(run, 1).with_data())
    return run.model.compile, notes


def test_auto_compiles_long_runs_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = packed(tmp_path, f"steps={region.PAYS_AFTER}", "epochs=null")
    assert long.model.compile == "auto"
    assert not long.model.compiled
    assert decided(long, monkeypatch) == ("whole", [])
    assert decided(long, monkeypatch, gpus=0) == (False, [])
    choice, notes = decided(packed(tmp_path, "steps=20", "epochs=null"), monkeypatch)
    assert not choice
    assert notes == ["not compiled: compiling pays from about 500 steps on, and this run has 20"]


def test_auto_keeps_the_checkpoints_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run keeps its checkpoint's choice, with or without a GPU, and however many steps are left."""
    run = packed(tmp_path, "steps=20", "epochs=null")
    for then, gpus in (("whole", 0), (False, 1)):
        made = SimpleNamespace(arithmetic=arithmetic_of(run.with_keys("model", compile=then)))
        monkeypatch.setattr(manifest, "Manifest", SimpleNamespace)
        monkeypatch.setattr(manifest, "candidates", lambda run, made=made: iter([(None, made)]))
        assert decided(run, monkeypatch, gpus) == (then, [])


def test_a_users_module_has_no_such_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision would add a key to `model`, which ranks refuse for a user's module."""
    monkeypatch.syspath_prepend(tmp_path)
    run = job(tmp_path, NET, functions=NET_FUNCTIONS)
    for gpus in (0, 1):
        assert decided(run, monkeypatch, gpus) == ("auto", [])


@pytest.mark.parametrize(
    ("kind", "key", "reason"),
    [
        ("packed", "strategy.name=pipeline", "in one piece"),
        ("packed", "strategy.name=zero3", "in one piece"),
        ("packed", "model.checkpoint_activations=true", "layer by layer"),
        ("packed", "task.loss_chunk=16", "loss_chunk"),
        ("packed", "data.padding=batch", "transformers' attention"),
        ("reward", "seed=1", "have the same length (the longest)"),
    ],
)
def test_models_that_cannot_be_compiled_whole(
    kind: str, key: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run file that asks for it is refused; `auto` does not choose it, and notes if another strategy would
    compile."""
    steps = (f"steps={region.PAYS_AFTER}", "epochs=null")
    with raises("LS4051", reason):
        decided(make(tmp_path, kind, key, WHOLE, *steps), monkeypatch)
    choice, notes = decided(make(tmp_path, kind, key, *steps), monkeypatch)
    assert choice is False
    assert ["would compile this run" in note for note in notes] == [True] * key.startswith("strategy.name")


def test_fsdp2_that_shards_for_lack_of_memory_is_not_compiled_whole(tmp_path: Path) -> None:
    run = make(tmp_path, "packed", "strategy.name=fsdp2", "strategy.options.gather=micro_batch")
    assert region.fitted(Job.of(run.with_keys("model", compile="whole"))).run.model.compile is False
    asked = make(tmp_path, "packed", "strategy.name=fsdp2", "strategy.options.gather=micro_batch", WHOLE)
    with raises("LS4051", "memory"):
        region.fitted(Job.of(asked))


# -- operators --------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
def test_compiled_attention_matches_torch(causal: bool, heads: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, 16, 8, generator=drawn).requires_grad_() for h in (4, heads, heads))
    out = repeatable.attention(query, key, value, causal, 0.0, None)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    above = torch.randn(out.shape, generator=drawn)
    for mine, theirs in zip(
        torch.autograd.grad(out, (query, key, value), above),
        torch.autograd.grad(expected, (query, key, value), above),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("padding", [None, 3])
def test_compiled_embedding_matches_torch(padding: int | None) -> None:
    module = nn.Embedding(11, 8, padding_idx=padding)
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(1))
    above = torch.randn(4, 6, 8)
    (expected,) = torch.autograd.grad(module(ids), module.weight, above)
    repeatable.install(module)
    with masks.region():
        out = module(ids)
    torch.testing.assert_close(out, F.embedding(ids, module.weight), rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(out, module.weight, above)[0], expected)


def test_operations_match_the_signatures_of_cuda_kernels() -> None:
    """Meta tensors are used: CUDA kernels cannot run here, but their signatures are checked."""
    with FakeTensorMode(), torch.no_grad():
        query = torch.empty(2, 4, 16, 8, device="cuda", dtype=torch.bfloat16)
        out = torch.ops.lockstep.attention(query, query, query, True, 0.1, None)
        assert out[0].shape == query.shape
        gradients = torch.ops.lockstep.attention_backward(query, query, query, query, *out, True, 0.1, None)
        assert [each.stride() for each in gradients] == [out[0].stride()] * 3
        real = torch.ops.aten._scaled_dot_product_flash_attention(query, query, query, 0.1, True, False, scale=None)
        assert [each.shape for each in out[1:]] == [real[1].shape, real[6].shape, real[7].shape]
        sizes = (None, None, 16, 16)
        slopes = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            query, query, query, query, real[0], real[1], *sizes, 0.1, True, real[6], real[7], scale=None
        )
        assert [each.shape for each in slopes] == [query.shape] * 3
