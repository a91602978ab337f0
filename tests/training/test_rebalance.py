"""`launch.rebalance_every`: a rank that is slow for a while gets fewer micro-batches meanwhile, and the bits are those
of equal shares."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.run import Run, load
from lockstep.distributed import step_timer
from lockstep.distributed.world import World
from lockstep.strategies.exact.gradient_sum import even, partial_nodes
from lockstep.training.rebalance import (
    ALIKE,
    BACK,
    PAYS,
    LoadBalancer,
    decided,
    expected,
    partial_sums,
    quickest,
    rebalance_message,
)
from lockstep.training.resolve import resolve_strategy
from support.command import (
    LOCKSTEP,
    RUN,
    STEPS,
    bits,
    each_step_once,
    ended,
    finish,
    ranks_of,
    start,
    step_of,
    until,
    write,
)
from support.harness import TINY, build_with_feed, digest, run_on, tiny
from support.marks import slow as marked
from support.messages import raises

RATES = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=5)


def counts(shares: Any) -> list[int]:
    return [len(each) for each in shares]


# -- the decision ----------------------------------------------------------------------------------------------------


@given(RATES, st.integers(5, 12))
def test_the_chosen_shares_are_optimal(rates: list[float], leaves: int) -> None:
    found = quickest(rates, leaves)
    assert [k for each in found for k in each] == list(range(leaves))
    assert all(found)
    every = [
        [range(a, b) for a, b in itertools.pairwise((0, *ends, leaves))]
        for ends in itertools.combinations(range(1, leaves), len(rates) - 1)
    ]
    least = min(expected(shares, rates) for shares in every)
    assert expected(found, rates) == pytest.approx(least)

    def sent(shares: Any) -> int:
        return sum(len(partial_nodes(each.start, each.stop, leaves)) for each in shares)

    assert sent(found) == min(sent(shares) for shares in every if expected(shares, rates) <= least * (1 + 1e-9))


@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 8, 11, 16, 21])
def test_partial_sums_are_counted_as_the_tree_leaves_them(leaves: int) -> None:
    for first, end in itertools.combinations(range(leaves + 1), 2):
        assert partial_sums(first, end, leaves) == len(partial_nodes(first, end, leaves))


def test_shares_of_many_ranks_are_computed_quickly() -> None:
    rates = [1.0] * 255 + [3.0]
    found = quickest(rates, 1024)
    assert sum(counts(found)) == 1024
    assert counts(found)[-1] == 1
    assert max(counts(found)) == 5


def test_a_rank_of_half_speed_gets_a_smaller_share() -> None:
    equal = even(8, 2)
    slow = decided(equal, equal, [1.0, 2.0])
    assert counts(slow) == [6, 2]  # 5 and 3 would take as long, and send four partial sums instead of three
    assert decided(slow, equal, [1.0, 2.0]) == slow
    assert decided(slow, equal, [1.0, 1.0]) == equal


@given(st.integers(8, 64), st.floats(0.92, 1.08), st.floats(0.92, 1.08))
def test_noise_moves_no_micro_batches(leaves: int, one: float, other: float) -> None:
    equal = even(leaves, 2)
    if expected(equal, [1.0, 1.0]) * 2 == leaves:
        assert decided(equal, equal, [one, other]) == equal


@given(RATES, RATES, st.integers(5, 24))
def test_shares_stay_until_another_move_pays(one: list[float], two: list[float], leaves: int) -> None:
    rates = [a * b for a, b in zip(one, two, strict=False)]
    if len(rates) < 2:
        return
    equal = even(leaves, len(rates))
    first = decided(equal, equal, one[: len(rates)])
    then = decided(first, equal, rates)
    assert decided(then, equal, rates) == then
    # equally fast ranks get equal shares again, whatever that saves
    if then != first and max(rates) > (1 + ALIKE) * min(rates):
        least = BACK if then == equal else PAYS
        assert expected(then, rates) <= (1 - least) * expected(first, rates) + 1e-9


def test_a_temporarily_slow_rank_gets_its_share_back() -> None:
    """After any slowdown that moved micro-batches, equally fast ranks get equal shares again."""
    for leaves, others in itertools.product((4, 8, 16, 64, 256), (1, 2, 3)):
        equal = even(leaves, others + 1)
        for tenths in range(10, 60):
            slow = decided(equal, equal, [*[1.0] * others, tenths / 10])
            assert decided(slow, equal, [1.0] * (others + 1)) == equal, (leaves, tenths)


def test_the_message_of_a_move() -> None:
    equal, hosts = even(8, 3), ["a", "b", "c"]
    assert rebalance_message(quickest([1, 3, 1], 8), equal, [1, 3, 1], hosts, 12) == (
        "rebalanced: from step 13 on rank 1 on b runs 1 of 8 micro-batches, not 3: its time per token is 3.0 times "
        "that of the others"
    )
    assert "from step 41 on ranks share micro-batches equally again" in rebalance_message(
        equal, equal, [1, 1, 1], hosts, 40
    )


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["strategy.name=zero1"], "LS5134"),
        (["strategy.name=pipeline"], "LS5134"),
        (["strategy.name=fsdp2", "strategy.options.gather=micro_batch"], "LS5134"),
        (["strategy.exact=false"], "LS5135"),
    ],
)
def test_strategies_without_uneven_shares_are_refused(words: list[str], code: str) -> None:
    with raises(code, "launch.rebalance_every: "):
        resolve_strategy(load(None, ["launch.rebalance_every=5", *words], TINY), 2)


# -- in training -----------------------------------------------------------------------------------------------------

SHORT = 16
SLOW = range(2, 10)


class Clock:
    """A clock that advances one second per computed token, or two on a rank while it is slow."""

    def __init__(self, slow: bool) -> None:
        self.now, self.step, self._slow = 0.0, 0, slow

    def perf_counter(self) -> float:
        return self.now

    def forward(self, module: Any, given: Any, named: dict[str, Any]) -> None:
        self.now += named["input_ids"].numel() * (2 if self._slow and self.step in SLOW else 1)


def trained(world: World, run: Run, slow: int) -> dict[str, Any]:
    """Train steps, during some of which a rank is slow."""
    _, strategy, feed = build_with_feed(run, world)
    clock = Clock(world.rank == slow)
    step_timer.time = clock  # type: ignore[assignment]
    strategy.model.register_forward_pre_hook(clock.forward, with_kwargs=True)
    said, ran = [], []
    events: list[dict[str, Any]] = []
    session: Any = SimpleNamespace(
        run=run,
        world=world,
        feed=feed,
        strategy=strategy,
        journal=SimpleNamespace(event=lambda name, step, **facts: events.append({"step": step, **facts})),
        checkpoints=SimpleNamespace(say=said.append),
    )
    balanced = LoadBalancer(session) if run.launch.rebalance_every else feed
    for batch in balanced.steps(0, lambda caught: None):
        clock.step = batch.step
        ran.append([micro.index for micro in batch.micro_batches])
        strategy.train_step(batch, 1e-3)
    state = strategy.state.state_dict()
    strategy.close()
    return {"digest": digest(state) if world.is_main else None, "ran": ran, "events": events, "said": said}


@cache
def alone() -> str:
    return str(run_on(1, trained, tiny("strategy.name=single", f"steps={SHORT}"), -1)[0]["digest"])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "ranks", "slow"),
    [("allreduce", 2, 1), ("ddp", 3, 1), ("fsdp2", 3, 2), marked("hf_accelerate", 2, 0), marked("hf_trainer", 2, 1)],
)
def test_moving_shares_back_and_forth_keeps_the_bits(name: str, ranks: int, slow: int) -> None:
    options = ["strategy.options.gather=step"] if name == "fsdp2" else []
    run = tiny(f"strategy.name={name}", *options, f"steps={SHORT}", "launch.rebalance_every=2")
    found = run_on(ranks, trained, run, slow)
    assert found[0]["digest"] == alone()
    assert all(rank["events"] == found[0]["events"] for rank in found)
    first, last = found[0]["events"][0], found[0]["events"][-1]
    assert SLOW.start < first["step"] <= SLOW.start + 6
    assert len(found[slow]["ran"][first["step"]]) < len(even(8, ranks)[slow])
    assert first["seconds_a_token"][slow] == pytest.approx(2.0, abs=0.3)
    assert SLOW.stop < last["step"] < SHORT
    assert last["micro_batches"] == counts(even(8, ranks))
    for step in range(SHORT):  # each micro-batch runs once
        assert [k for rank in found for k in rank["ran"][step]] == list(range(8)), step
    assert f"rank {slow} on" in found[0]["said"][0]
    assert "equally again" in found[0]["said"][-1]
    assert not found[1]["said"]


@pytest.mark.processes
def test_equally_fast_ranks_move_nothing() -> None:
    run = tiny("strategy.name=allreduce", f"steps={SHORT}", "launch.rebalance_every=2")
    for rank in run_on(2, trained, run, -1):
        assert rank["events"] == []


@pytest.mark.processes
@pytest.mark.slow
def test_a_job_with_a_rank_that_is_suspended_repeatedly(tmp_path: Path, cache: Path) -> None:
    """The rank is suspended by SIGSTOP for three quarters of the time, as if other work used its core."""
    for name in ("untouched", "slowed"):
        write(tmp_path / name, micro_batches=8, launch={**RUN["launch"], "rebalance_every": 2})
    finish(tmp_path / "untouched", cache, "launch.rebalance_every=0")
    folder = tmp_path / "slowed"
    process = start([*LOCKSTEP, "train", "run.yaml"], folder, cache)
    until(lambda: step_of(folder) >= 2, "two steps", process)
    victim = ranks_of(process, folder)[1]
    with contextlib.suppress(ProcessLookupError):
        while step_of(folder) < STEPS // 2:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(0.06)
            os.kill(victim, signal.SIGCONT)
            time.sleep(0.02)
    status, out, err = ended(process)
    assert status == 0, err
    assert bits(folder) == bits(tmp_path / "untouched")
    each_step_once(folder, tmp_path / "untouched")
    found = [json.loads(line) for line in (folder / "out/events.jsonl").read_text().splitlines()]
    moved = [each["micro_batches"] for each in found if each["event"] == "hand_over"]
    assert any(len(set(each)) > 1 for each in moved)
    assert "rebalanced: from step" in " ".join(out.split())
