"""What lockstep takes for granted of accelerate, DeepSpeed, TRL and Liger: signatures, private names, one process."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn

from support.assumed import rests_on_it


def accelerator(**options: object) -> object:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, **options)


@rests_on_it("src/lockstep/strategies/hf_accelerate.py", "src/lockstep/lab/import_config/loops.py")
def test_accelerate_divides_by_accumulation_steps() -> None:
    """Accelerator.backward divides the loss by gradient_accumulation_steps, and by nothing at 1."""
    for steps in (1, 4):
        engine = accelerator(gradient_accumulation_steps=steps)
        layer = nn.Linear(1, 1, bias=False)
        model = engine.prepare(layer)  # type: ignore[attr-defined]
        engine.backward(model(torch.ones(1, 1)).sum())  # type: ignore[attr-defined]
        assert layer.weight.grad is not None
        assert layer.weight.grad.item() == 1 / steps


@rests_on_it("src/lockstep/strategies/engines/accelerated.py")
def test_accelerate_marks_what_it_prepared() -> None:
    """prepare sets `_is_accelerate_prepared`, and with mixed precision puts the model's own forward aside as
    `_original_forward`; both are in the module's __dict__."""
    layer = nn.Linear(1, 1)
    accelerator(mixed_precision="bf16").prepare(layer)  # type: ignore[attr-defined]
    assert "_is_accelerate_prepared" in vars(layer)
    assert "_original_forward" in vars(layer)


@rests_on_it("src/lockstep/strategies/engines/accelerated.py")
def test_accelerate_returns_float32_under_bf16() -> None:
    """A model prepared with mixed precision bf16 computes under autocast and returns float32."""
    seen = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            y = self.layer(x)
            seen.append(y.dtype)
            return y

    output = accelerator(mixed_precision="bf16").prepare(Looks())(torch.ones(1, 2))  # type: ignore[attr-defined]
    assert seen == [True, torch.bfloat16]
    assert output.dtype == torch.float32


@rests_on_it("src/lockstep/strategies/hf_accelerate.py")
def test_an_optimizer_steps_when_gradients_are_synced() -> None:
    """A prepared optimizer passes over step() and zero_grad() within accumulation, until the last micro-batch."""
    engine = accelerator(gradient_accumulation_steps=2)
    layer = nn.Linear(1, 1, bias=False)
    model, optimizer = engine.prepare(layer, torch.optim.SGD(layer.parameters(), lr=1.0))  # type: ignore[attr-defined]
    before, moved = layer.weight.item(), []
    for _ in range(2):
        with engine.accumulate(model):  # type: ignore[attr-defined]
            engine.backward(model(torch.ones(1, 1)).sum())  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
        moved.append(round(before - layer.weight.item(), 5))
    assert moved == [0.0, 1.0]


@rests_on_it("src/lockstep/strategies/hf_accelerate.py")
def test_options_of_ddp_by_their_names() -> None:
    """DistributedDataParallelKwargs has the fields that lockstep passes on or takes away."""
    from dataclasses import fields

    accelerate = pytest.importorskip("accelerate")
    known = {field.name for field in fields(accelerate.DistributedDataParallelKwargs)}
    assert {"broadcast_buffers", "gradient_as_bucket_view", "find_unused_parameters", "bucket_cap_mb"} <= known
    assert {"static_graph", "dim", "comm_hook", "comm_wrapper", "comm_state_option"} <= known


@rests_on_it("packages/lockstep-trace/src/lockstep_trace/tracer/hooks.py")
def test_accelerate_shards_batches_in_turns() -> None:
    """BatchSamplerShard gives process r every n-th batch, and fills the last turn with the first rows."""
    pytest.importorskip("accelerate")
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    shards = [list(BatchSamplerShard(BatchSampler(range(10), 4, False), 2, rank)) for rank in range(2)]
    assert shards == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]


@rests_on_it("src/lockstep/lab/import_config/loops.py", "packages/lockstep-trace/src/lockstep_trace/rules/data.py")
def test_accelerate_loses_batches_that_are_short() -> None:
    """BatchSamplerShard loses a batch below its sampler's batch_size that is not the last: lockstep's own batches never
    go through it."""
    pytest.importorskip("accelerate")
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    class Budget(BatchSampler):
        def __init__(self) -> None:
            self.sampler, self.batch_size, self.drop_last = range(7), 4, False

        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from ([0, 1], [2], [3, 4, 5, 6], [])

        def __len__(self) -> int:
            return 4

    rows = [
        row for rank in range(2) for batch in BatchSamplerShard(Budget(), 2, rank, even_batches=False) for row in batch
    ]
    assert 0 not in rows


DEEPSPEED = """
import os, sys, torch, torch.distributed as dist
os.environ |= {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"}
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import deepspeed
assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.utils import groups
assert hasattr(groups, "_WORLD_GROUP") and hasattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP")
assert parameter_offload.FWD_MODULE_STACK == [] and partition_parameters.Init.param_id == 0
assert parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0] == [0]
torch.manual_seed(0)
layer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
start = [p.detach().clone() for p in layer.parameters()]
engine, *_ = deepspeed.initialize(
    model=layer,
    optimizer=torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)
engine.backward(layer[0](torch.ones(1, 2)).sum())
engine.step()
moved = [float((p.detach().cpu() - s).abs().max()) for p, s in zip(layer.parameters(), start)]
assert moved[0] > 0
print("unused weights are decayed:", moved[1] > 0)
"""


@pytest.mark.processes
@rests_on_it(
    "src/lockstep/strategies/engines/zero.py",
    "src/lockstep/strategies/engines/zero_partition.py",
    "src/lockstep/strategies/engines/zero_agreement.py",
)
def test_deepspeed_updates_weights_without_a_gradient() -> None:
    """DeepSpeed gives weights without a gradient zeros, so that AdamW decays them; its process-wide state has the
    names that lockstep resets, and is empty in a new process."""
    pytest.importorskip("deepspeed")
    done = subprocess.run([sys.executable, "-c", DEEPSPEED], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "unused weights are decayed: True" in done.stdout


@rests_on_it("src/lockstep/config/foreign_keys/trl.yaml", "src/lockstep/lab/import_config/trainer.py")
def test_trl_trains_in_bfloat16_unless_told_otherwise() -> None:
    """SFTConfig and DPOConfig have bf16 on, unlike transformers' TrainingArguments."""
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments

    assert "bf16" in inspect.signature(TrainingArguments).parameters
    for kind in (trl.SFTConfig, trl.DPOConfig):
        made = kind(output_dir="unused", use_cpu=True, report_to=[], bf16=None)
        assert made.bf16 is True


@rests_on_it("src/lockstep/config/foreign_keys/trl.yaml")
def test_usual_numbers_of_trl() -> None:
    """SFTConfig cuts at 1024 tokens and DPOConfig has beta 0.1."""
    trl = pytest.importorskip("trl")
    assert inspect.signature(trl.SFTConfig).parameters["max_length"].default == 1024
    assert inspect.signature(trl.DPOConfig).parameters["beta"].default == 0.1
