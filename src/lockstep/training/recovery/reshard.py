"""Assemble the training state from the surviving ranks' memory and reshard it for the new world size.

In: each rank's part of the state, if the interrupted step left it consistent, and peer copies (`peer_checkpoints.py`).
Out: a strategy for the current world size, loaded with the newest state for which every shard is available. Its hash
must equal that of the held state; otherwise the job restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.tensor import DTensor

from lockstep.checkpoint.shard_files import StateHash, hashed, held_here
from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.distributed.sharded import Incomplete, PeerReader, SliceMap
from lockstep.distributed.tensor_hashes import hash_sum
from lockstep.distributed.torch_internals import local
from lockstep.distributed.world import World
from lockstep.strategies.engines.fsdp import cuts
from lockstep.strategies.exact.training_state import Averaged
from lockstep.strategies.strategy import Strategy, make_strategy, shard_recovery
from lockstep.training.errors import TrainingFailed
from lockstep.training.recovery.peer_checkpoints import Key, PeerCheckpoints, Version
from lockstep.training.session import Session
from lockstep.training.train_state import TrainState
from lockstep_trace.coded import quantity


class Resharder:
    """Move the training state of one rank into a strategy for another number of ranks."""

    def __init__(self, session: Session) -> None:
        self.copies = PeerCheckpoints(session)
        self.options: dict[str, Any] | None = None  # strategy options at the start of the job; sent to joining ranks
        if not session.world.joining:
            self.options = dict(session.strategy.run.strategy.options)
        self._formed = 0  # generation that this rank's part is sharded for
        self._versions: list[Version] = []  # during regrouping, every version that this rank holds
        self._live: Version | None = None  # during regrouping, the part after the last update
        self._before: Version | None = None  # its previous part, until all ranks train with the new one

    def after_step(self, state: TrainState) -> None:
        """Free the previous part, and advance peer copies. Collective."""
        self._before = None
        self.copies.after_step(state)

    def detach_group(self, session: Session, state: TrainState) -> None:
        """Record what this rank holds before its group is destroyed. Only the first call of a regrouping counts,
        however often regrouping is retried: slices belong to the ranks they were cut for."""
        copied = self.copies.detach_group()
        strategy = session.strategy
        trains = self._live is None and state.step >= 0  # a rank that joins has no update yet
        if trains and not (strategy.state.needs_all_ranks or strategy.update.incomplete):
            number, count = strategy.state.part
            shares = {number: held_here(strategy.state.own())}
            self._live = Version((state.step, self._formed, "live"), shares, count, state.state_dict())
        self._versions = [*copied, *(each for each in (self._before, self._live) if each is not None)]

    def restore(self, session: Session, state: TrainState) -> tuple[Session, Key]:
        """Load the newest state for which every shard is available into a strategy for the current ranks. Returns a
        session with that strategy and the key of the state; `state` becomes its training state. The shards that ranks
        hold do not change, except by a deferred update. Collective. Errors: `TrainingFailed`."""
        world, strategy = session.world, session.strategy
        self._apply_missed_update(session, state)
        offers = world.all_gather(
            (
                [(v.key, list(v.shares), v.count) for v in self._versions],
                self.options,
                world.members and world.members.me,
            )
        )
        key = newest_complete([each for each, *_ in offers])
        source = next(rank for rank, (versions, *_) in enumerate(offers) if any(k == key for k, *_ in versions))
        mine = next((version for version in self._versions if version.key == key), None)
        theirs = world.all_gather(mine.train_state if mine is not None and world.rank == source else None)[source]
        options = next(options for _, options, _ in offers if options is not None)
        run = session.run.model_copy(
            update={"strategy": session.run.strategy.model_copy(update={"options": dict(options)})}
        )
        strategy = build_strategy(session, session.job.having(run))
        try:
            saved = PeerReader(_slices_of(mine), world)
        except Incomplete as caught:
            raise TrainingFailed(caught.code, caught.message) from None
        expected = _hash_of_held(saved, mine, session)
        strategy.state.load_sharded_state_dict(saved)
        if StateHash(world).of(strategy.state.sharded_state_dict()) != expected:
            raise TrainingFailed(
                "LS5040", f"the restored state after step {key[0]} differs from the state of the surviving ranks"
            )
        _compare(strategy, world)
        assert world.members is not None
        self._formed = world.members.generation.number
        self._before, self._live = self._live or self._before, None
        self.options = dict(options)
        state.load_state_dict(theirs if mine is None else mine.train_state)
        return replace(session, strategy=strategy, averaged=Averaged(strategy)), key

    def _apply_missed_update(self, session: Session, state: TrainState) -> None:
        """Apply an update that other ranks have made and for which this rank has all the data. Collective."""
        strategy = session.strategy
        steps = session.world.all_gather(state.step)
        newest = session.world.all_gather(state.state_dict() if state.step == max(steps) else None)
        if 0 <= state.step == max(steps) - 1 and strategy.update.ready is not None:
            strategy.update.apply_ready()
            theirs = next(each for each in newest if each is not None)
            state.load_state_dict(theirs)
            assert self._live is not None
            tensors = strategy.state.own()
            for share in self._live.shares.values():
                share.update({place: local(tensors[place.name]) for place in share})
            self._live.key, self._live.train_state = (state.step, *self._live.key[1:]), theirs


def build_strategy(session: Session, job: Job) -> Strategy:
    """Build the job's strategy for the current ranks, without weights. Collective. Errors: `TrainingFailed`."""
    run, world = job.run, session.world
    recovery = shard_recovery(job.strategy)
    assert recovery is not None, job.strategy
    options = dict(recovery.fit_options(run.strategy, world.size))
    run = run.with_keys("strategy", options=options)
    job = replace(job.having(run), processes=world.size)
    try:
        job.strategy.check(job)
    except RunError as caught:
        raise TrainingFailed(
            caught.code, f"training cannot continue with {quantity(world.size, 'rank')}: {caught.message}"
        ) from None
    strategy = make_strategy(job, world)
    strategy.build_empty = True
    strategy.build(session.task)
    return strategy


def newest_complete(offers: list[list[tuple[Key, list[int], int]]]) -> Key:
    """Return the key of the newest state for which every shard is available, from each rank's offers. Errors:
    `TrainingFailed`."""
    shares: dict[Key, set[int]] = {}
    counts: dict[Key, int] = {}
    for versions in offers:
        for key, numbers, count in versions:
            shares.setdefault(key, set()).update(numbers)
            counts[key] = count
    if not counts:
        raise TrainingFailed("LS5041", "no surviving rank has the training state")
    able = [key for key, numbers in shares.items() if len(numbers) == counts[key]]
    if able:
        return max(able, key=lambda key: (key[0], key[2] == "live", key[1]))
    nearest = max(shares, key=lambda key: (len(shares[key]) / counts[key], key))
    gone = sorted(set(range(counts[nearest])) - shares[nearest])
    raise TrainingFailed(
        "LS5042",
        f"shard{'s' * (len(gone) > 1)} {', '.join(map(str, gone))} of {counts[nearest]} of the state "
        f"{'are' if len(gone) > 1 else 'is'} lost with every rank that held "
        f"{'them' if len(gone) > 1 else 'it'}",
    )


def _compare(strategy: Strategy, world: World) -> None:
    """Check that all copies of each slice have the same bits, and that none is missing. Collective. Errors:
    `TrainingFailed`."""
    state = strategy.state.own()
    cut = {place: t for place, t in held_here(state).items() if isinstance(state[place.name], DTensor)}
    every = world.all_gather({place: int(hash_sum(t, place.whole, place.offsets)) for place, t in cut.items()})
    for place in {place for each in every for place in each}:
        sums = [each[place] for each in every if place in each]
        holders = world.size // cuts(state[place.name])  # each tensor-parallel rank has a copy of unsharded tensors
        if len(sums) != holders or len(set(sums)) > 1:
            raise TrainingFailed("LS5043", f"internal error: {place.name} was not resharded correctly")


def _slices_of(mine: Version | None) -> SliceMap:
    return {place: piece for share in (mine.shares.values() if mine else ()) for place, piece in share.items()}


def _hash_of_held(saved: PeerReader, mine: Version | None, session: Session) -> Mapping[str, str]:
    """Hash of the held state. Collective. Errors: `TrainingFailed`, if two ranks hold different bits of the same
    slice."""
    own = {place: int(hash_sum(part, place.whole, place.offsets)) for place, part in _slices_of(mine).items()}
    every = session.world.all_gather(own)
    sums: dict[str, int] = {}
    for name, pieces in saved.holders.items():
        for place, rank in pieces.items():
            if any(each.get(place, every[rank][place]) != every[rank][place] for each in every):
                raise TrainingFailed("LS5044", f"the surviving ranks have different values of {name}")
            sums[name] = sums.get(name, 0) + every[rank][place]
    layouts = {
        name: (str(next(iter(pieces)).dtype), next(iter(pieces)).whole) for name, pieces in saved.holders.items()
    }
    return hashed(layouts, {name: _signed(value) for name, value in sums.items()})


def _signed(value: int) -> int:
    """Reduce modulo 2^64 to the int64 range."""
    return (value + 2**63) % 2**64 - 2**63
