"""`lockstep plan --simulate` held to what real ranks take, counted storage by storage."""

from typing import Any

import pytest
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.strategies.engines.fsdp import roomy
from lockstep_plan.fake_world import Simulated
from lockstep_plan.simulated import Ledger, on_meta, without_numbers
from support.harness import run_on, tiny
from support.marks import long, slow
from support.planned_memory import DEEP, MODEL, NEAR, measure_memory, planned

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("single", {}),
    "allreduce": ("allreduce", {}),
    "ddp": ("ddp", {}),
    "hf_accelerate": ("hf_accelerate", {}),
    "hf_trainer": ("hf_trainer", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "fsdp2 step": ("fsdp2", {"gather": "step"}),
    "fsdp2 micro_batch": ("fsdp2", {"gather": "micro_batch"}),
    "pipeline": ("pipeline", {}),
}


def of(case: str, **values: Any) -> Run:
    """Four micro-batches: ranks have 4, 2, 2 or 1, and 1 of them."""
    name, options = CASES[case]
    model = DEEP if name in ("fsdp2", "pipeline") else MODEL
    return tiny(**{"model": model, "micro_batches": 4, "strategy": {"name": name, "options": options}, **values})


# Asked each time: every way to hold weights, and every number of ranks. The others are `long`.
EACH_TIME: dict[str, tuple[int, ...]] = {
    "single": (1,),
    "allreduce": (3,),
    "ddp": (),
    "hf_accelerate": (),
    "hf_trainer": (),
    "zero1": (),
    "zero2": (),
    "zero3": (),
    "fsdp2 step": (),
    "fsdp2 micro_batch": (4,),
    "pipeline": (2,),
}


def worlds() -> list[Any]:
    """Every strategy at 1, 2, 3 and 4 ranks: a real run and two simulations each, which take a while."""
    found = []
    for case, asked in EACH_TIME.items():
        for ranks in (1, 2, 3, 4):
            if not (ranks > 1 and case == "single") and not (ranks == 1 and case == "pipeline"):
                found.append(slow(case, ranks) if ranks in asked else long(case, ranks))
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("case", "ranks"), worlds())
def test_a_plan_shows_the_memory_of_a_rank(case: str, ranks: int) -> None:
    run = of(case)
    real = run_on(ranks, measure_memory, run)
    for rank in sorted({0, ranks - 1}):
        plan: Simulated = run_on(1, planned, run, ranks, rank, joined=False)[0]
        assert plan.peak == pytest.approx(real[rank].peak, rel=NEAR), plan
        assert sum(plan.at_rest.values()) == pytest.approx(real[rank].at_rest, rel=NEAR), plan
        assert sum(plan.kinds.values()) == plan.peak


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("again", [False, True])
def test_casts_of_float32_weights_are_counted(again: bool) -> None:
    """Autocast keeps a bf16 copy of every matrix, which FSDP does not cut: until backward has used it, and where layers
    are recomputed until forward is over."""
    wide = {"n_layer": 6, "n_head": 4, "n_embd": 256, "n_positions": 32}
    model = {"type": "gpt2", "config": wide, "checkpoint_activations": again}
    run = of("fsdp2 micro_batch", model=model, precision="bf16")
    real = run_on(2, measure_memory, run)[0]
    plan: Simulated = run_on(1, planned, run, 2, 0, joined=False)[0]
    assert plan.peak == pytest.approx(real.peak, rel=NEAR), plan


def test_every_strategy_is_planned() -> None:
    assert {name for name, _ in CASES.values()} == set(plugins.names("strategies"))
    assert EACH_TIME.keys() == CASES.keys()
    assert {ranks for asked in EACH_TIME.values() for ranks in asked} == {1, 2, 3, 4}


@pytest.mark.processes
def test_a_plan_shows_the_parts_of_the_memory() -> None:
    run = of("ddp", micro_batches=8)  # two a rank: the first one's gradient is there while the second is computed
    plan: Simulated = run_on(1, planned, run, 4, 0, run=tiny(), joined=False)[0]
    trained = 4 * plan.trained
    assert plan.at_rest["weights"] == pytest.approx(trained, rel=0.01)
    assert plan.at_rest["optimizer"] == pytest.approx(2 * trained, rel=0.01)
    rows = 4 * 400 * 64  # of the embedding: of its gradient only those that are used are made
    assert trained - rows < plan.kinds["gradients"] < trained
    exchanged = sum(size * n for _, name, _, size, _, n in plan.sent if name == "alltoall_base")
    assert trained - rows <= exchanged < trained
    assert {len(group) for _, _, group, _, _, _ in plan.sent} == {4}
    assert sum(flops * n for _, flops, _, n in plan.ops) > 0


def test_a_rank_s_share_of_a_large_model_takes_no_memory() -> None:
    """Weights that FSDP shards are on the CPU without data: a share of 8 billion weights would take 12 GB."""
    with without_numbers(Ledger()):
        model = roomy(on_meta(lambda: nn.Linear(100, 10, device="meta")))
        assert all(isinstance(p.data, FakeTensor) and p.device.type == "cpu" for p in model.parameters())
