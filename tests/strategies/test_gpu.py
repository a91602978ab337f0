"""On a CUDA device: the bits of `single` under every exact strategy, with ranks that share the device over gloo; the
same bits on a second run; and the CPU's numbers within rounding."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.run import Run
from lockstep.distributed.step_timer import NAMES as PHASES
from lockstep.distributed.step_timer import StepTimer
from lockstep.tasks.models import repeatable  # noqa: F401 - the operations of lockstep
from support.harness import rank_0_of, tiny
from support.strategy_runs import EXACT, steps_of, worlds
from support.task_runs import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALONE = ("pipeline", "zero1", "zero2", "zero3")  # they need a GPU that no other process uses
STILL = [f"model.config.{name}_pdrop=0" for name in ("resid", "embd", "attn")]
PLACE = ("launch.device=cuda", "launch.processes_per_gpu=4")
LLAMA = ("model.type=llama", "model.config={hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, "
         "num_attention_heads: 4, num_key_value_heads: 2}")  # fmt: skip
BERT = ("model.type=bert", "model.config={hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, "
        "num_attention_heads: 4, hidden_dropout_prob: 0, attention_probs_dropout_prob: 0}")  # fmt: skip


@cache  # several tests use one job
def of(name: str, ranks: int, *overrides: str, place: tuple[str, ...] = PLACE, again: int = 0) -> dict[str, Any]:
    """Return rank 0's results, which all ranks must share. `again` forces a second run."""
    options = ("strategy.options.gather=step",) if name == "fsdp2" else ()
    return first_of(ranks, tiny(f"strategy.name={name}", *options, *place, *overrides))


def first_of(ranks: int, run: Run) -> dict[str, Any]:
    return rank_0_of(ranks, steps_of, run, alike=("loss", "norm"))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("name", "ranks"), [(n, r) for n in EXACT if n not in ALONE for r in worlds(n)])
def test_exact_means_the_bits_of_single(name: str, ranks: int, precision: str) -> None:
    found, single = (of(*which, f"precision={precision}") for which in ((name, ranks), ("single", 1)))
    assert found["digest"] == single["digest"]
    assert found["loss"] == single["loss"]
    assert found["norm"] == single["norm"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_repeat_to_the_bit(precision: str) -> None:
    first, second = (of("single", 1, f"precision={precision}", again=again) for again in range(2))
    assert first["digest"] == second["digest"]


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_deepspeed_has_the_bits_of_ddp(name: str, tmp_path: Path) -> None:
    """DeepSpeed runs in new interpreters and on GPUs of its own: it chooses devices and backends, and the tests' fork
    server has imported DeepSpeed for the CPU."""
    found = []
    for strategy in (name, "ddp"):
        keys = (
            f"strategy.name={strategy}",
            f"output={tmp_path / strategy}",
            "steps=20",
            "launch.processes=1",
            PLACE[0],
        )
        subprocess.run([sys.executable, "-m", "lockstep", "train", *keys], check=True, timeout=200)
        lines = (tmp_path / strategy / "metrics.jsonl").read_text().splitlines()
        weights = (tmp_path / strategy / "export" / "model.safetensors").read_bytes()
        found.append((weights, [line["loss"] for line in map(json.loads, lines) if "loss" in line]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("model.compile=true",), marks=pytest.mark.timeout(600)),
        ("model.checkpoint_activations=true",),
        ("model.offload_activations=true",),
        ("model.dtype=bfloat16",),
        ("data.padding=none",),
        (*BERT, "data.padding=none", "precision=bf16"),
        (*LLAMA, "data.padding=none", "precision=bf16"),
    ],
)
def test_model_options_keep_the_bits(keys: tuple[str, ...]) -> None:
    found = {name: of(name, ranks, *keys) for name, ranks in (("single", 1), ("ddp", 2), ("fsdp2", 2))}
    assert len({each["digest"] for each in found.values()}) == 1


@pytest.mark.parametrize("family", [BERT, LLAMA])
def test_variable_length_attention_equals_padded_attention_within_rounding(family: tuple[str, ...]) -> None:
    """In bf16 and without dropout, torch's variable-length attention computes it."""
    none, batch = (
        of("single", 1, *family, "precision=bf16", f"data.padding={padding}") for padding in ("none", "batch")
    )
    assert none["loss"] == pytest.approx(batch["loss"], rel=2e-2)
    assert none["loss"][0] == pytest.approx(batch["loss"][0], rel=2e-3)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", [(), BERT])
def test_texts_padded_to_few_lengths_and_compiled_whole(family: tuple[str, ...], precision: str) -> None:
    """Compiled by inductor for the GPU, with causal attention and with attention to both sides: the bits of one process
    under every strategy with the whole model, and an uncompiled run's numbers to rounding."""
    keys = (f"precision={precision}", "batch_size=16", *(family or STILL))
    whole = (*keys, "model.compile=whole", "model.compile_lengths=[16, 32]")
    one, plain = of("single", 1, *whole), of("single", 1, *keys)
    assert one["digest"] != plain["digest"]
    assert one["loss"] == pytest.approx(plain["loss"], rel=2e-2 if precision == "bf16" else 1e-4)
    assert of("single", 1, *whole, again=1)["digest"] == one["digest"]
    for name in ("ddp", "fsdp2"):
        assert of(name, 2, *whole)["digest"] == one["digest"], name
    for name, ranks in (("single", 1), ("ddp", 2), ("fsdp2", 2)):
        graphs = of(name, ranks, *whole, "model.cuda_graphs=true")
        assert graphs["digest"] == one["digest"], name
        assert not graphs["remarks"], name  # why it did without


def repeated(work: Callable[[], tuple[torch.Tensor, ...]]) -> bool:
    """Whether a computation gives the same bits ten times."""
    first = work()
    return all(torch.equal(a, b) for _ in range(9) for a, b in zip(work(), first, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_that_compiled_code_may_call_repeat_their_bits(dtype: torch.dtype) -> None:
    """With torch's deterministic switch off, as within a compiled micro-batch. Indices occur many times."""
    drawn = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "generator": drawn}
    rows, slopes = torch.randint(0, 50, (8192,), **options), torch.randn(8192, 256, dtype=dtype, **options)
    into = torch.zeros(50, 256, dtype=dtype, device="cuda")
    left, right = (torch.randn(1024, 1024, dtype=dtype, **options) for _ in range(2))
    assert not torch.are_deterministic_algorithms_enabled()
    assert repeated(lambda: (torch.ops.lockstep.embedding_backward(slopes, rows, 50, -1),))
    assert repeated(lambda: (torch.ops.lockstep.index_put_sum(into, [rows], slopes),))
    assert repeated(lambda: (left @ right, torch.addmm(left[0], left, right), torch.bmm(left[None], right[None])))
    if dtype == torch.float32:  # flash attention has 16 bits
        return
    query, key, value = (torch.randn(2, 8, 1024, 64, dtype=dtype, **options) for _ in range(3))
    for causal, dropout in ((True, 0.0), (False, 0.0), (True, 0.1)):

        def both(causal: bool = causal, dropout: float = dropout) -> tuple[torch.Tensor, ...]:
            torch.manual_seed(1)
            out = torch.ops.lockstep.attention(query, key, value, causal, dropout, None)
            gradients = torch.ops.lockstep.attention_backward(query, query, key, value, *out, causal, dropout, None)
            return out[0], *gradients

        assert repeated(both), (causal, dropout)


def test_cuda_and_cpu_agree_to_rounding() -> None:
    cuda, cpu = of("single", 1, *STILL), of("single", 1, *STILL, place=("launch.device=cpu",))
    assert cuda["loss"] == pytest.approx(cpu["loss"], rel=1e-4)


def test_chunked_losses_equal_the_loss_of_all_logits(tmp_path: Path) -> None:
    given = ("strategy.name=single", "launch.device=cuda", "task.samples=0", *STILL)
    found = [
        first_of(1, make(tmp_path, "prompts", *given, *own))
        for own in ([], ["task.loss_chunk=7"], ["task.loss_chunk=7"])
    ]
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-4)
    assert found[1]["digest"] == found[2]["digest"]


def test_phases_measure_device_time() -> None:
    """Work that the host only enqueues counts in the phase that enqueued it, even if the host has moved on."""
    found = StepTimer(torch.device("cuda", 0))
    matrix = torch.ones(4096, 4096, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    found.take()
    with found("forward"):
        for _ in range(100):
            matrix @ matrix
    with found("optimizer"):
        pass
    seconds = dict(zip(PHASES, found.take(), strict=True))
    assert found.clock == "device"
    assert seconds["forward"] > 20 * seconds["optimizer"]
