"""ZeRO stage 2: the optimizer's state and the gradients are shared out; every rank keeps the whole weights.

Backward hands gradients over bucket by bucket: each goes to the rank that will update those weights, and is forgotten
elsewhere. Of fp32 AdamW's 16 bytes a parameter each of N ranks holds 4 + 16/N, beside a bucket in flight (stage 1: 8 +
12/N; both with the copy, 4/N, that DeepSpeed keeps of the part it updates). The price: gradients travel after *every*
micro-batch of a step, not once a step, because nobody keeps them whole to add to. With few micro-batches a rank it is
the cheapest way to save memory; with many, stage 1 sends less.
"""

from lockstep.strategies.engines.zero import Zero
from lockstep.strategies.strategy import WeightFormats


class Zero2(Zero):
    """Optimizer state and gradients sharded."""

    stage = 2
    weight_formats = WeightFormats.FOUR_BITS  # which are in buffers, whole on every rank
    waits_inside = ("backward", "reduction", "optimizer")
