"""`launch.on_rank_failure: continue` on two machines, network namespaces, with sharded state. Each shard's copy is on
the other machine, so a rank and then a machine fail and return, with the bits of one process."""

import json
import os
import signal
from pathlib import Path

import pytest

from support import hosts
from support.command import each_step_once, finish, step_of
from support.host_jobs import (
    LOST_S,
    QUICK,
    begun,
    bits,
    hold,
    regrouped,
    release,
    torchrun,
    two,
    until,
    untouched,
    write,
)
from support.hosts import Hosts
from support.marks import long

__all__ = ["two"]  # fixtures

pytestmark = [*hosts.cluster, pytest.mark.timeout(1500)]
CONTINUE = [*QUICK, "launch.on_rank_failure=continue", "launch.replicate_every=2", "launch.processes=2"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        long(("HeldFSDP2", "strategy.options.gather=micro_batch")),
        long(("HeldShardedOptimizer", "strategy.options.gather=step")),
        long(("HeldPipeline", "model.config.n_layer=4")),
    ],
    ids=lambda words: words[0],
)
def test_a_rank_and_then_its_host_are_lost_and_rejoin(
    words: tuple[str, str], two: Hosts, tmp_path: Path, cache: Path
) -> None:
    """Two ranks on each of two hosts lose one rank and then one host; both return."""
    alone = write(tmp_path / "alone")
    finish(alone, cache, *(word for word in words if word.startswith("model")))
    every = [*CONTINUE, f"strategy.name=support.waiting_with_shards.{words[0]}", words[1]]
    first, second = begun(two, shared := write(tmp_path / "shared"), words=every)

    def came(since: int) -> bool:
        """Return whether four ranks train again."""
        return sum(what.count("joined") for what in regrouped(shared)[since:]) > 0 and ranks_of(shared) == 4

    before = len(regrouped(shared))
    os.kill(two.youngest(1), signal.SIGKILL)  # a rank
    second.says("was killed by SIGKILL; the other ranks continue; a replacement is started (3")
    until(lambda: came(before), first)
    hold(step_of(shared) + 3, shared)
    before = len(regrouped(shared))
    two.kill(1)
    first.says(f"no heartbeat from host-1 for {LOST_S} s; the other machines continue")
    until(lambda: len(regrouped(shared)) > before, first)
    assert regrouped(shared)[before].startswith("ranks 2, 3 were lost")
    again = torchrun(two, 1, *every, folder=shared, machines="1:2")
    again.says("joins the running job")
    until(lambda: came(before), first)
    release(shared)
    assert (first.ended(), again.ended()) == (0, 0), first.err + again.err
    assert bits(shared) == bits(alone)
    each_step_once(shared, alone)
    untouched(shared, first, again)


def ranks_of(folder: Path) -> int:
    """Return the number of ranks since the job last formed."""
    told = map(json.loads, (folder / "out/events.jsonl").read_text().splitlines())
    return [event["processes"] for event in told if event["event"] == "regroup"][-1]
