"""Each moment belongs to one phase; every strategy says what it does when."""

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.data.job import strategy_class
from lockstep.distributed import step_timer
from lockstep.distributed.step_timer import NAMES, StepTimer
from lockstep.distributed.world import World
from support.harness import build_with_feed, run_on, tiny
from support.marks import long


class Clock:
    """Seconds that pass only when told to."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(step_timer, "time", found)
    return found


def told(found: list[float]) -> dict[str, float]:
    return {name: seconds for name, seconds in zip(NAMES, found, strict=True) if seconds}


def test_an_inner_phase_is_not_the_outer_one_and_nothing_is_lost(clock: Clock) -> None:
    found = StepTimer(torch.device("cpu"))
    clock.now += 1
    with found("evaluation"):
        clock.now += 2
        with found("forward"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    seconds = found.report()
    assert told(seconds[: len(step_timer.NAMES)]) == {"other": 17, "evaluation": 10, "forward": 4}
    assert seconds[len(step_timer.NAMES) :] == [1, 0, 0, 0]  # a return to a phase does not begin it
    assert set(found.report()) == {0}


def test_a_phase_ends_with_an_error(clock: Clock) -> None:
    found = StepTimer(torch.device("cpu"))
    with contextlib.suppress(ValueError), found("backward"):
        clock.now += 1
        raise ValueError
    clock.now += 2
    assert told(found.take()) == {"backward": 1, "other": 2}


def test_waiting_for_items_is_timed_and_their_use_is_not(clock: Clock) -> None:
    closed = []

    def items() -> Any:
        try:
            for i in range(5):
                clock.now += 1
                yield i
        finally:
            closed.append(True)

    found = StepTimer(torch.device("cpu"))
    for item in found.during("data", items()):
        clock.now += 10
        if item == 2:
            break
    assert closed  # the thread behind a feed ends with the loop
    assert told(found.take()) == {"data": 3, "other": 30}


def test_cuda_phases_are_timed_by_events_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that runs behind: events get their times when the device comes to them."""
    waits = []

    class Stream:
        host, device = 0.0, 0.0  # what was queued, how far the device is

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.at = Stream.host

        def query(self) -> bool:
            return self.at <= Stream.device

        def synchronize(self) -> None:
            waits.append(self.at)
            Stream.device = max(Stream.device, self.at)

        def elapsed_time(self, end: "Event") -> float:
            assert end.query()
            return (end.at - self.at) * 1e3

    fake = SimpleNamespace(Event=Event, current_stream=lambda device: None)
    monkeypatch.setattr(step_timer, "torch", SimpleNamespace(cuda=fake))
    found = StepTimer(torch.device("cuda", 0))
    assert found.clock == "device"
    for _ in range(step_timer._MOST_EVENTS):
        with found("forward"):
            Stream.host += 1.0
        with found("backward"):
            Stream.host += 2.0
        Stream.device = Stream.host - 3.0
    assert waits == []
    assert len(found._marks) <= step_timer._MOST_EVENTS + 1  # those that the device has passed are given back
    assert told(found.take()) == {"forward": step_timer._MOST_EVENTS, "backward": 2 * step_timer._MOST_EVENTS}
    assert len(waits) == 1


def a_step(world: World, run: Run) -> tuple[dict[str, float], tuple[str, ...]]:
    _, strategy, feed = build_with_feed(run, world)
    strategy.phases.take()
    strategy.train_step(feed.make(0), 1e-3)
    found = told(strategy.phases.take())
    inside = strategy.facts.waits_inside
    strategy.close()
    return found, inside


@pytest.mark.processes
# zero3 does what zero1 and zero2 do
@pytest.mark.parametrize("name", [long(n) if n in ("zero1", "zero2") else n for n in plugins.names("strategies")])
def test_every_strategy_times_its_phases(name: str) -> None:
    """Computing, the wait for gradients and the update each take time; what waits inside of computing says so."""
    run = tiny(f"strategy.name={name}")
    if plugins.lacking(strategy_class(run).needs):
        pytest.skip(f"{name} needs {plugins.lacking(strategy_class(run).needs)[0]}")
    for found, inside in run_on(1 if name == "single" else 2, a_step, run):
        assert {"reduction", "optimizer"} <= set(found)
        assert {"forward", "backward"} <= set(found) or "forward+backward" in found
        assert set(inside) <= set(NAMES)
        assert "reduction" in inside


def test_changing_phase_costs_little() -> None:
    """Counted in function calls, which a busy machine does not change."""
    found, calls = StepTimer(torch.device("cpu")), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        with found("forward"):
            pass
    finally:
        sys.setprofile(None)
    assert calls <= 12
