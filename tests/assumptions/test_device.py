"""Assumptions about torch on a CUDA device: events, streams, copies, generators and what a device says."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from support.assumed import rests_on_it

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@rests_on_it(
    "src/lockstep/distributed/step_timer.py",
    "src/lockstep/distributed/torch_internals.py",
    "src/lockstep/checkpoint/shard_files.py",
    "src/lockstep/training/utilization.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/records.py",
)
def test_synchronize_of_events_streams_and_devices() -> None:
    """A non_blocking copy is complete after `synchronize` of an event recorded after it, of the current stream, or of
    the device. `elapsed_time` between two such events is in milliseconds and not negative, and `query` is then true."""
    device = torch.device("cuda", 0)
    numbers = torch.arange(1 << 20, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    doubled = (numbers * 2).to("cpu", non_blocking=True)
    end.record(stream)
    end.synchronize()
    assert (begin.query(), end.query()) == (True, True)
    assert begin.elapsed_time(end) >= 0
    assert torch.equal(doubled, torch.arange(1 << 20) * 2)
    for wait in (stream.synchronize, lambda: torch.cuda.synchronize(device)):
        room = torch.empty(1 << 20, dtype=torch.int64, pin_memory=True)
        room.copy_(numbers * 3, non_blocking=True)
        wait()
        assert torch.equal(room, torch.arange(1 << 20) * 3)


@rests_on_it(
    "src/lockstep/strategies/exact/tensor_leaves.py",
    "packages/lockstep-trace/src/lockstep_trace/tracer/replay.py",
)
def test_device_generators_can_be_saved_and_restored() -> None:
    """default_generators has one generator per device, whose get_state and set_state repeat draws. manual_seed_all,
    get_rng_state_all and set_rng_state_all cover all devices."""
    assert len(torch.cuda.default_generators) >= torch.cuda.device_count()
    generator = torch.cuda.default_generators[0]
    before = generator.get_state()
    drawn = torch.randn(8, device="cuda:0")
    generator.set_state(before)
    assert torch.equal(torch.randn(8, device="cuda:0"), drawn)
    torch.cuda.manual_seed_all(5)
    states = torch.cuda.get_rng_state_all()
    assert len(states) == torch.cuda.device_count()
    seeded = torch.randn(8, device="cuda:0")
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(torch.randn(8, device="cuda:0"), seeded)


@rests_on_it(
    "src/lockstep/distributed/system_metrics.py",
    "src/lockstep/distributed/world.py",
    "src/lockstep/distributed/event_log.py",
    "src/lockstep/checkpoint/manifest.py",
    "src/lockstep/training/summary.py",
    "src/lockstep/training/timing.py",
)
def test_device_name_memory_and_utilization() -> None:
    """get_device_name returns a string. total_memory and max_memory_allocated are bytes; the latter is at least the
    size of a tensor that was allocated. is_bf16_supported without emulation returns a bool. `utilization` is a
    percentage, or raises ImportError, RuntimeError or AttributeError. After set_device, tensors on "cuda" without an
    index are on that device."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    assert torch.cuda.get_device_name(device)
    total = torch.cuda.get_device_properties(device).total_memory
    room = torch.zeros(1 << 20, device=device)
    assert room.nbytes <= torch.cuda.max_memory_allocated(device) <= total
    assert torch.cuda.is_bf16_supported(including_emulation=False) in (True, False)
    with suppress(ImportError, RuntimeError, AttributeError):
        assert 0 <= float(torch.cuda.utilization(device)) <= 100
    before = torch.cuda.current_device()
    torch.cuda.set_device(device)
    assert torch.zeros(1, device="cuda").device == device
    torch.cuda.set_device(before)
