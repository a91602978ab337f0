"""Communication schedules: every slot arrives, messages are few, and the schedule is what is sent."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lockstep.config.run import Run
from lockstep.distributed.world import World
from lockstep.strategies.exact.exchange import Exchange
from lockstep.strategies.exact.gradient_sum import Node, ReductionTree, layout_of, merged, share
from lockstep.strategies.exact.reduce_schedule import LinkSpeeds, ReduceSchedule
from support.brackets import bracket, leaf
from support.own_modules import job
from support.places import ROOT
from support.simulated import SMALL, on_ranks

sys.path.insert(0, str(ROOT / "benchmarks"))
import exchange_table

CASES = [(2, 8, 1), (3, 8, 3), (5, 5, 2), (7, 16, 3), (12, 20, 5), (30, 64, 8), (64, 64, 8), (100, 1024, 8)]


def named(ranks: int, a_host: int) -> tuple[str, ...]:
    return tuple(f"host-{rank // a_host}" for rank in range(ranks))


def planned(ranks: int, leaves: int, a_host: int) -> ReduceSchedule:
    return ReduceSchedule(leaves, layout_of(leaves, ranks), named(ranks, a_host))


@pytest.mark.parametrize(("ranks", "leaves", "a_host"), CASES)
def test_every_rank_ends_with_the_root_of_its_slot(ranks: int, leaves: int, a_host: int) -> None:
    """The test simulates the messages on sets of tree nodes instead of numbers."""
    plan = planned(ranks, leaves, a_host)
    held: list[tuple[tuple[int, ...], set[Node]]] = []  # for each rank: its slots, and its partial sums of them
    for rank in range(ranks):
        assert sorted(plan.order(rank)) == list(range(ranks))
        held.append((plan.order(rank), set(plan.layout[rank])))
    for height in range(1, plan.height + 1):
        after = list(held)
        for rank in range(ranks):
            for stage in (s for s in plan.stages(rank) if s.height == height):
                slots, nodes = held[rank]
                assert set(stage.nodes) == nodes
                kept = slots[stage.own_rows]
                gathered = list(nodes)
                for peer, theirs in stage.receives:
                    (sent,) = [
                        rows for s in plan.stages(peer) if s.height == height for to, rows in s.sends if to == rank
                    ]
                    assert held[peer][0][sent] == kept
                    assert set(theirs) == held[peer][1]
                    gathered += theirs
                after[rank] = (kept, set(merged(gathered, leaves)))
        held = after
    assert held == [((rank,), set(plan.nodes)) for rank in range(ranks)]
    assert len(plan.nodes) == 1


def test_the_number_of_messages_is_ranks_times_their_logarithm() -> None:
    counts = {n: exchange_table.in_stages(n, n, 8).messages for n in (16, 32, 64, 128, 256, 512, 1024)}
    assert all(count <= 4 * n * math.log2(n) for n, count in counts.items())
    assert all(after < 2.4 * before for before, after in pairwise(counts.values()))
    assert exchange_table.flat(1024, 1024, 8).messages > 70 * counts[1024]


@pytest.mark.parametrize("ranks", [16, 64, 256, 1024])
def test_whole_subtrees_send_the_bytes_of_a_ring(ranks: int) -> None:
    ours, ring = exchange_table.in_stages(4 * ranks, ranks, 8), exchange_table.ring(ranks, 8)
    assert ours.most == pytest.approx(ring.most)
    assert ours.between <= ring.between


@pytest.mark.parametrize("ranks", [96, 100, 1000])
def test_uneven_shares_send_little_more(ranks: int) -> None:
    ours, flat = exchange_table.in_stages(1024, ranks, 8), exchange_table.flat(1024, ranks, 8)
    assert ours.mean < 1.25 * flat.mean
    assert ours.between < flat.between


def test_stages_are_for_hosts_and_for_many_ranks() -> None:
    assert not LinkSpeeds().tree(8)
    assert LinkSpeeds().tree(9)
    assert LinkSpeeds("auto", ("a", "b")).tree(2)
    assert not LinkSpeeds("flat", ("a", "b")).tree(64)
    assert LinkSpeeds("hierarchical").tree(2)


BUCKETS = ([0], [1, 2], [0, 2], [1])


def exchanged(world: World, leaves: int, hosts: tuple[str, ...]) -> list[torch.Tensor]:
    tree = ReductionTree(leaves)
    for k in share(leaves, world.rank, world.size):
        tree.add(k, leaf(k))
    moving = Exchange(leaves, world.rank, world.size, links=LinkSpeeds("hierarchical", hosts))
    for positions in BUCKETS:
        moving.submit({node: [tensors[i] for i in positions] for node, tensors in tree.nodes.items()})
    return [t.clone() for bucket in moving.finish() for t in bucket]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return job(tmp_path, SMALL)


@pytest.mark.parametrize(("ranks", "leaves", "a_host"), CASES[:-1])
def test_sent_bytes_equal_the_counted_ones(ranks: int, leaves: int, a_host: int, run: Run) -> None:
    hosts = named(ranks, a_host)
    found, traffic = on_ranks(run, hosts, lambda world: exchanged(world, leaves, hosts))
    wanted = [bracket([leaf(k)[i] for k in range(leaves)]) for positions in BUCKETS for i in positions]
    for tensors in found:
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, wanted, strict=True))
    counted = exchange_table.in_stages(leaves, ranks, a_host)
    assert sum(traffic.messages.values()) == len(BUCKETS) * counted.messages
    slots = sum(-(-sum(leaf(0)[i].numel() for i in positions) // ranks) for positions in BUCKETS)  # numbers
    assert sum(traffic.bytes.values()) == pytest.approx(4 * slots * ranks * counted.mean * ranks)
    away = sum(count for (one, other), count in traffic.bytes.items() if hosts[one] != hosts[other])
    assert away == pytest.approx(4 * slots * ranks * counted.between)
