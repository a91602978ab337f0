"""Memory that each rank holds, measured on live tensors, against the formulas of the ZeRO paper (arXiv:1910.02054)."""

import ctypes
import os
import resource
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from lockstep.config import plugins
from lockstep.distributed import torch_internals
from lockstep.distributed.system_metrics import keep_freed_memory, tensor_bytes
from lockstep.distributed.world import KEPT_KERNELS, World
from support.counted_memory import MODEL, measured_bytes, near, settled
from support.harness import run_on, tiny
from support.marks import long, slow

BUCKETS = {"zero_optimization": {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}}
PREFETCH = {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}


def of(name: str, ranks: int, moments: dict[str, float], **options: Any) -> list[dict[str, int]]:
    strategy = {"name": name, "exact": options.pop("exact", True), "options": options.pop("options", {})}
    run = tiny(model=MODEL, strategy=strategy, **options)
    return run_on(ranks, measured_bytes, run, moments)


# Bytes per parameter at the update on n ranks: weights + gradients + AdamW's two moments, all float32. DeepSpeed also
# keeps a float32 copy of its shard of the weights.
AT_UPDATE = {
    "single": lambda n: 4 + 4 + 8,
    "allreduce": lambda n: 4 + 4 + 8,
    "ddp": lambda n: 4 + 4 + 8,
    "hf_accelerate": lambda n: 4 + 4 + 8,
    "hf_trainer": lambda n: 4 + 4 + 8,
    "fsdp2": lambda n: (4 + 4 + 8) / n,
    "zero1": lambda n: 4 + (4 + 8 + 4) / n,
    "zero2": lambda n: 4 + (4 + 8 + 4) / n,
    "zero3": lambda n: (4 + 4 + 8 + 4 + 4) / n if n > 1 else 20,
}
# DeepSpeed's own update also copies its shard of the gradients, as if they were bf16.
OF_ENGINE = {
    "zero1": lambda n: 4 + (4 + 8 + 4 + 4) / n,
    "zero2": lambda n: 4 + (4 + 8 + 4 + 4) / n,
    "zero3": lambda n: (4 + 4 + 8 + 4 + 4) / n,
}


# their memory does not depend on n; one and four ranks run by hand
WHOLE = ("allreduce", "ddp", "hf_accelerate", "hf_trainer")
BY_HAND = [(name, 4) for name in ("fsdp2", "zero1", "zero2")]  # two numbers of ranks determine a formula with two terms
ASKED = [(name, n) for name in AT_UPDATE for n in (1, 2, 4) if n == 1 or name != "single"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks"),
    [long(*c) if c in BY_HAND or (c[0] in WHOLE and c[1] != 2) else slow(*c) if c[1] > 2 else c for c in ASKED],
)
def test_memory_at_the_update(name: str, ranks: int) -> None:
    options: dict[str, Any] = {}
    if name.startswith("zero"):
        extra = PREFETCH if name == "zero3" else {}
        options = {"zero_optimization": BUCKETS["zero_optimization"] | extra}
    formula = AT_UPDATE[name](ranks)
    for rank in of(name, ranks, {"update": formula}, options=options):
        assert near(rank["update"], formula * rank["all"]), f"{rank['update'] / rank['all']:.2f} bytes a parameter"


@pytest.mark.processes
# By hand: stage 1, for which DeepSpeed has the code of stage 2, and one rank of stage 3, whose formula has one term
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(slow(*c) for c in (("zero2", 1), ("zero2", 2), ("zero3", 2))),
        *(long(*c) for c in (("zero1", 1), ("zero1", 2), ("zero3", 1))),
    ],
)
def test_memory_at_deepspeeds_own_update(name: str, ranks: int) -> None:
    extra = PREFETCH if name == "zero3" else {}
    options = {"zero_optimization": BUCKETS["zero_optimization"] | extra}
    formula = OF_ENGINE[name](ranks)
    for rank in of(name, ranks, {"update": formula}, options=options, exact=False):
        assert near(rank["update"], formula * rank["all"]), f"{rank['update'] / rank['all']:.2f} bytes a parameter"


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, long(4)])
def test_gather_step_shards_the_optimizer_state(ranks: int) -> None:
    """`gather: step` shards the optimizer state always (ZeRO-1), and at the update the gradients too (ZeRO-2)."""
    moments = {"rest": 4 + 8 / ranks, "update": 4 + 12 / ranks}
    for rank in of("fsdp2", ranks, moments, options={"gather": "step"}):
        for moment, formula in moments.items():
            found = rank[moment]
            assert near(found, formula * rank["all"]), f"{moment}: {found / rank['all']:.2f} bytes a parameter"


def test_every_strategy_is_measured() -> None:
    assert set(AT_UPDATE) | {"pipeline"} == set(plugins.names("strategies"))


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stage_of_a_pipeline_holds_its_layers(ranks: int) -> None:
    found = of("pipeline", ranks, {})
    for rank in found:
        assert near(rank["update"], 16 * rank["own"])
    assert sum(rank["own"] for rank in found) == found[0]["all"]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, long(4)])
def test_stage_2_holds_fewer_gradients_between_micro_batches_than_stage_1(ranks: int) -> None:
    options = {"options": BUCKETS, "exact": False}
    for stage, formula in ((1, 4 + 4 + 12 / ranks), (2, 4 + 4 / ranks + 12 / ranks)):
        for rank in of(f"zero{stage}", ranks, {"between": formula}, **options):
            assert near(rank["between"], formula * rank["all"]), f"{rank['between'] / rank['all']:.2f}"


@pytest.mark.processes
def test_exact_stage_2_holds_no_whole_gradient_between_micro_batches() -> None:
    """On four ranks, a rank holds up to two partial sums of its shard, and buckets in flight: here a tenth of the
    model."""
    formula = 4 + 12 / 4 + 2 * 4 / 4
    for rank in of("zero2", 4, {"between": formula}, options=BUCKETS):
        assert rank["between"] <= (formula + 1) * rank["all"], f"{rank['between'] / rank['all']:.2f}"
        assert rank["between"] < (4 + 4 + 12 / 4) * rank["all"]  # what a full gradient would take


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stage", "formula", "factor"),
    [(1, lambda n: 2 + 2 + 12 / n, 1.6), (2, lambda n: 2 + (2 + 12) / n, 16 / 9), (3, lambda n: (2 + 2 + 12) / n, 2.0)],
)
def test_with_bf16_weights_the_factors_equal_those_of_the_paper(stage: int, formula: Any, factor: float) -> None:
    """One rank takes 16 bytes per parameter; two ranks take 1.6, 1.78 and 2 times less."""
    section = BUCKETS["zero_optimization"] | (PREFETCH if stage == 3 else {})
    options = {"bf16": {"enabled": True}, "zero_optimization": section}
    for rank in of(f"zero{stage}", 2, {"between": formula(2)}, precision="bf16", options=options):
        assert near(rank["between"], formula(2) * rank["all"]), f"{rank['between'] / rank['all']:.2f} bytes a parameter"
        assert 16 / formula(2) == pytest.approx(factor)


def faults(world: World) -> int:
    """Return the page faults of allocating the same 48 MiB ten times, after many such allocations."""

    def made(times: int) -> int:
        for _ in range(times):
            torch.ones(12 << 20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    keep_freed_memory()
    return -made(20) + made(10)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="is about glibc's malloc")
def test_freed_memory_is_reused() -> None:
    assert run_on(1, faults)[0] < 2000  # 12,288 pages would fault each time otherwise


def test_the_measure_counts_a_storage_once() -> None:
    before = tensor_bytes()
    tensor = torch.zeros(1000)
    views = [tensor[:500], tensor.view(10, 100)]
    assert tensor_bytes() - before == 4000
    del tensor, views
    assert tensor_bytes() == before


def test_waiting_for_memory_ignores_only_freed_memory() -> None:
    before = tensor_bytes()
    kept = torch.zeros(1000)
    late = [torch.zeros(500)]
    thread = threading.Timer(0.3, late.clear)
    thread.start()
    assert settled(before, 4000) == 4000
    assert settled(before, 3999, patience_s=0.1) == 4000
    thread.join()
    del kept


@pytest.mark.parametrize("theirs", [None, "17"])
def test_the_kernel_cache_is_limited_by_default(theirs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEPT_KERNELS:
        monkeypatch.setenv(name, theirs or "")  # so that the test restores it afterwards
        if theirs is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch_internals, "gloo_threads", lambda count: None)
    world = World(tiny())
    monkeypatch.setattr(world.stop, "listen", lambda: None)
    world.join()
    assert [os.environ[name] for name in KEPT_KERNELS] == ([theirs] * 2 if theirs else ["256", "64"])


@pytest.mark.processes
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here")
def test_kernels_of_new_sizes_do_not_accumulate() -> None:
    """From the 300th size of a bfloat16 product to the 450th, a process with lockstep's limit grows by less than half
    of what one with torch's default grows by. Pages of files are not counted: a busy machine takes them back."""
    script = """
import os, torch
from pathlib import Path
torch.set_num_threads(1)
from lockstep.distributed.world import KEPT_KERNELS
if {ours}:
    os.environ.update(KEPT_KERNELS)
weight = torch.ones(384, 384, dtype=torch.bfloat16)
for rows in range(1, 451):
    torch.nn.functional.linear(torch.ones(rows, 384, dtype=torch.bfloat16), weight)
    if rows in (300, 450):
        lines = Path("/proc/self/status").read_text().splitlines()
        print(next(line.split()[1] for line in lines if "RssAnon" in line))
"""
    growth = {}
    environment = {name: value for name, value in os.environ.items() if name not in KEPT_KERNELS}  # as a user's
    for ours in (True, False):
        command = [sys.executable, "-c", script.format(ours=ours)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        before, after = ended.stdout.split()
        growth[ours] = int(after) - int(before)
    assert growth[True] < growth[False] / 2, growth
