"""ZeRO stage 1: the optimizer's state is shared out; every rank keeps the whole weights and gradients.

Rank r updates the r-th part of the weights and is the only one to hold AdamW's two moments of that part; after the
update the ranks give each other the new weights. Of the 16 bytes a parameter that fp32 AdamW takes (4 weight, 4
gradient, 8 moments) each of N ranks holds 8 + 12/N: DeepSpeed also keeps a copy (4/N) of the part it updates.
What travels is what plain data parallelism sends: gradients are reduced once a step, new weights gathered once. Where
DeepSpeed reduces by itself, ranks that have fewer micro-batches than others run blank ones, as under the other stages.
"""

from lockstep.strategies.engines.zero import Zero
from lockstep.strategies.strategy import WeightFormats


class Zero1(Zero):
    """Optimizer state sharded."""

    stage = 1
    weight_formats = WeightFormats.FOUR_BITS  # which are in buffers, whole on every rank
    waits_inside = ("backward", "reduction", "optimizer")
