"""`launch.processes_per_gpu`: the GPU of each rank, and what cannot share a GPU. The test needs no GPU."""

import pytest
import torch

from lockstep.config.run import QUICK_START, load
from lockstep.distributed.world import pick_device
from lockstep.launchers.local import Local, processes_of
from lockstep.training.resolve import resolve_strategy
from support.harness import tiny
from support.messages import raises

FOUR = "launch.processes_per_gpu=4"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_neighbouring_ranks_share_a_gpu(device: str) -> None:
    run = tiny(f"launch.device={device}", FOUR)
    assert [pick_device(run.launch, run.precision, rank, 8).index for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert processes_of(tiny("strategy.name=ddp", f"launch.device={device}", FOUR, "micro_batches=16")) == 8


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_no_rank_runs_on_the_cpu(device: str) -> None:
    """A rank on the CPU would compute other bits than the others."""
    run = tiny(f"launch.device={device}", "launch.processes=3", "strategy.name=ddp")
    for rank in range(3):
        with raises("LS7070", "2", "1"):
            pick_device(run.launch, run.precision, rank, 3)
    with raises("LS7290", "2", "3"):
        Local().plan(run)
    assert pick_device(tiny("launch.device=cpu").launch, "fp32", 2, 3) == torch.device("cpu")


def test_the_quick_start_runs_on_a_machine_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run = load(None, [], QUICK_START)
    assert Local().plan(run).processes == 2
    assert {pick_device(run.launch, run.precision, rank, 2) for rank in range(2)} == {torch.device("cuda", 0)}
    with raises("LS7290"):
        Local().plan(load(None, ["launch.processes_per_gpu=1"], QUICK_START))


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        (("strategy.name=zero2",), "LS4141"),
        (("strategy.name=pipeline", "strategy.options.stages=2"), "LS4242"),
        (("strategy.name=fsdp2", "strategy.options.gather=micro_batch"), "LS4073"),
        (("strategy.name=fsdp2", "strategy.options.cpu_offload=true"), "LS4073"),
        (("strategy.name=hf_accelerate", "strategy.options={fsdp: {}}"), "LS4073"),
        (("strategy.name=hf_accelerate", "strategy.options={deepspeed: {zero_stage: 2}}"), "LS4141"),
    ],
)
def test_strategies_that_cannot_share_a_gpu(keys: tuple[str, ...], code: str) -> None:
    with raises(code, "launch.processes_per_gpu: "):
        resolve_strategy(tiny(*keys, FOUR, "launch.device=cuda"), 2)
    for place in ("auto", "cpu"):  # without a GPU, nothing is shared
        resolve_strategy(tiny(*keys, FOUR, f"launch.device={place}"), 2)


@pytest.mark.usefixtures("two_gpus")
def test_fsdp2_gathers_once_per_step_on_a_shared_gpu() -> None:
    run = tiny("strategy.name=fsdp2", "strategy.options.gather=step", FOUR, "launch.device=auto")
    run = run.model_copy(update={"strategy": run.strategy.model_copy(update={"options": {}})})
    assert resolve_strategy(run, 2).__name__ == "ShardedOptimizer"
