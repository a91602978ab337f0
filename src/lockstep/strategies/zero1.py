"""ZeRO stage 1: the optimizer's state is sharded; every rank keeps the whole weights and gradients.

Rank r updates the r-th part of the weights and holds AdamW's two moments of that part only; after the update, the ranks
all-gather the new weights. Of the 16 bytes per parameter of fp32 AdamW (4 weight, 4 gradient, 8 moments), each of N
ranks holds 8 + 12/N: DeepSpeed also keeps a copy (4/N) of the part it updates.
Communication equals that of plain data parallelism: gradients are reduced once per step, new weights gathered once. If
DeepSpeed itself reduces, ranks with fewer micro-batches run padding micro-batches, as in the other stages.
"""

from dataclasses import replace

from lockstep.strategies.engines.zero import Zero
from lockstep.strategies.strategy import WeightFormats


class Zero1(Zero):
    """ZeRO stage 1 on DeepSpeed: the optimizer's state is sharded."""

    stage = 1
    facts = replace(
        Zero.facts,
        weight_formats=WeightFormats.FOUR_BITS,  # stored in buffers, replicated
        waits_inside=("backward", "reduction", "optimizer"),
    )
