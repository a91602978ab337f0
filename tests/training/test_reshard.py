"""After a failure, ranks resume from the newest complete state; they keep copies for one another. Starts no process."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.distributed.sharded import Incomplete, PeerReader, TensorSlice
from lockstep.training.errors import TrainingFailed
from lockstep.training.recovery.peer_checkpoints import PeerCheckpoints, neighbours
from lockstep.training.recovery.reshard import newest_complete
from lockstep.training.resolve import resolve_strategy
from lockstep.training.train_state import TrainState
from support.messages import raises

ZERO = ("strategy.name=zero2", "launch.on_rank_failure=continue")
LIVE, COPIED = (9, 2, "live"), (8, 2, "copied")


@pytest.mark.parametrize(
    "hosts", [["a"] * 4, ["a", "a", "b", "b"], ["a", "b", "a", "b", "c"], ["a", "b"], ["a", "b", "b"]]
)
def test_copies_are_on_other_hosts_if_possible(hosts: list[str]) -> None:
    pairs = [neighbours(hosts, rank) for rank in range(len(hosts))]
    for rank, (after, before) in enumerate(pairs):
        assert pairs[after][1] == rank
        assert pairs[before][0] == rank
        assert after != rank
    apart = all(hosts[rank] != hosts[after] for rank, (after, _) in enumerate(pairs))
    assert apart == (max(Counter(hosts).values()) * 2 <= len(hosts))


def test_the_newest_complete_state_is_used() -> None:
    copies = [(COPIED, [0, 2], 3), ((6, 2, "copied"), [0, 2], 3)]
    assert newest_complete([[(LIVE, [0], 2)], [(LIVE, [1], 2)], []]) == LIVE
    assert newest_complete([[(LIVE, [0], 3), *copies], [(LIVE, [2], 3), (COPIED, [1, 0], 3)]]) == COPIED
    # the last copy had not arrived at all ranks
    assert newest_complete([[(LIVE, [0], 3), *copies], [((6, 2, "copied"), [1, 0], 3)]]) == (6, 2, "copied")


def test_missing_state_is_named() -> None:
    with raises("LS5042", "1", "3", error=TrainingFailed):
        newest_complete([[(LIVE, [0], 3), (COPIED, [0, 2], 3)]])
    with raises("LS5041", error=TrainingFailed):
        newest_complete([[], []])


class Alone:
    """A world of one rank."""

    rank, size = 0, 1

    def all_gather(self, value: object) -> list[object]:
        return [value]


def test_slices_are_assembled_and_a_missing_one_is_detected() -> None:
    whole = torch.arange(12.0).view(4, 3)
    places = [TensorSlice("w", (row, 0), (2, 3), (4, 3), torch.float32) for row in (0, 2)]
    pieces = {place: whole[place.offsets[0] : place.offsets[0] + 2] for place in places}
    target = torch.empty(4, 3)
    together = PeerReader(pieces, Sending())  # type: ignore[arg-type]
    together.read({"w": target})
    assert torch.equal(target, whole)
    assert "w" in together
    with raises("LS7050", error=Incomplete):
        PeerReader({places[0]: pieces[places[0]]}, Alone())  # type: ignore[arg-type]


class Sending(Alone):
    def send_round(self, tensor: object, source: int) -> None:
        """Do nothing: there is no other rank."""


def test_useless_copies_are_refused() -> None:
    def run(*words: str) -> Run:
        return load(None, ["model.type=gpt2", "data.source=builtin/emotion", "launch.replicate_every=5", *words])

    with raises("LS1134"):
        run("strategy.name=fsdp2")
    with raises("LS5136", "hf_accelerate"):
        resolve_strategy(
            run("strategy.name=hf_accelerate", "strategy.options.fsdp={}", "launch.on_rank_failure=continue"), 2
        )
    for name in ("fsdp2", "zero2"):
        assert run(f"strategy.name={name}", "launch.on_rank_failure=continue").launch.replicate_every == 5


@pytest.mark.parametrize("torn", [True, False])
def test_a_lone_rank_copies_its_state_before_another_joins(torn: bool) -> None:
    """A rank alone copies its state before another joins: DeepSpeed's state is unreadable once its group is closed."""
    state = {"model.w": torch.arange(6.0).view(2, 3), "optimizer.step.w": torch.tensor(4.0)}
    members = SimpleNamespace(generation=SimpleNamespace(number=3))
    world = SimpleNamespace(
        rank=0, size=1, hosts=["a"], is_main=True, members=members, all_gather=lambda value: [value],
        all_reduce_max=lambda number: lambda: number,
    )  # fmt: skip
    run = load(None, ["model.type=gpt2", "data.source=builtin/emotion", "launch.replicate_every=1", *ZERO])
    session: Any = SimpleNamespace(
        job=Job.of(run),
        run=run,
        world=world,
        strategy=SimpleNamespace(state=SimpleNamespace(needs_all_ranks=torn, sharded_state_dict=lambda: state)),
    )
    copies, state_of_training = PeerCheckpoints(session), TrainState(session.job, 20, step=9)
    copies.form(session, state_of_training)
    copies.after_step(state_of_training)
    assert copies.detach_group() == []  # no rank could use them
    copies.before_join(state_of_training)
    if not torn:
        assert copies.detach_group() == []
        return
    state["model.w"] += 1  # a later change
    (version,) = copies.detach_group()
    assert newest_complete([[(version.key, list(version.shares), version.count)], []]) == (9, 3, "copied")
    pieces = {place.name: piece for place, piece in version.shares[0].items()}
    assert pieces.keys() == state.keys()
    assert torch.equal(pieces["model.w"], torch.arange(6.0).view(2, 3))
