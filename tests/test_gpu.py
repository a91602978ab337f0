"""On a CUDA device: exact steps repeat to the bit in both precisions, and agree with the CPU to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import tiny
from task_runs import make
from test_strategies import steps_of

from lockstep.config.run import Run
from lockstep.distributed.phases import NAMES, Phases
from lockstep.distributed.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on(device: str, *overrides: str) -> dict[str, Any]:
    run: Run = tiny("strategy.name=single", f"launch.device={device}", *overrides)
    world = World(run).join()
    torch.use_deterministic_algorithms(device == "cuda", warn_only=True)
    try:
        return steps_of(world, run)
    finally:
        torch.use_deterministic_algorithms(False)
        world.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_repeat_to_the_bit(precision: str) -> None:
    first, second = (on("cuda", f"precision={precision}") for _ in range(2))
    assert first["digest"] == second["digest"]


def test_cuda_and_cpu_agree_to_rounding() -> None:
    still = [f"model.config.{name}_pdrop=0" for name in ("resid", "embd", "attn")]
    assert on("cuda", *still)["loss"] == pytest.approx(on("cpu", *still)["loss"], rel=1e-4)


@pytest.mark.parametrize("chunk", ["7", "liger"])
def test_losses_in_chunks_are_those_of_all_logits(chunk: str, tmp_path: Path) -> None:
    if chunk == "liger":
        pytest.importorskip("liger_kernel")
    still = [f"model.config.{name}_pdrop=0" for name in ("resid", "embd", "attn")]
    given = ("strategy.name=single", "launch.device=cuda", "task.samples=0", *still)
    found = []
    for own in ([], [f"task.loss_chunk={chunk}"], [f"task.loss_chunk={chunk}"]):
        run = make(tmp_path, "prompts", *given, *own)
        world = World(run).join()
        found.append(steps_of(world, run))
        world.close()
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-4)
    assert found[1]["digest"] == found[2]["digest"]


def test_a_phase_is_the_devices_time_and_not_that_of_queueing() -> None:
    """Work that the host only queues counts for the phase it was queued in, though the host is long past it."""
    found = Phases(torch.device("cuda", 0))
    matrix = torch.ones(4096, 4096, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()
    found.take()
    with found("forward"):
        for _ in range(100):
            matrix @ matrix
    with found("optimizer"):
        pass
    seconds = dict(zip(NAMES, found.take(), strict=True))
    assert found.clock == "device"
    assert seconds["forward"] > 20 * seconds["optimizer"]
