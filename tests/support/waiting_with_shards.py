"""Strategies whose ranks shard the state, and wait before a step as long as a test wants: `waiting_at_steps.py`."""

from lockstep.strategies.fsdp2 import FSDP2
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.sharded_optimizer import ShardedOptimizer
from support.waiting_at_steps import Together


class HeldFSDP2(Together, FSDP2):
    """`fsdp2`, which gathers for each micro-batch."""


class HeldShardedOptimizer(Together, ShardedOptimizer):
    """`fsdp2` with `gather: step`."""


class HeldPipeline(Together, Pipeline):
    """`pipeline`."""
