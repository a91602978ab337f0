"""Strategies whose ranks share the state out, and wait before a step for as long as a test wants: `held_steps.py`."""

from lockstep.strategies.fsdp2 import FSDP2, FSDP2Step
from lockstep.strategies.pipeline import Pipeline
from support.held_steps import Together


class HeldFSDP2(Together, FSDP2):
    """`fsdp2`, which gathers for each micro-batch."""


class HeldFSDP2Step(Together, FSDP2Step):
    """`fsdp2` with `gather: step`."""


class HeldPipeline(Together, Pipeline):
    """`pipeline`."""
