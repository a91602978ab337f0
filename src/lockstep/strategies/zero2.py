"""ZeRO stage 2: the optimizer's state and the gradients are sharded; every rank keeps the whole weights.

Backward reduces gradients bucket by bucket: each goes to the rank that updates those weights, and is freed elsewhere.
Of fp32 AdamW's 16 bytes per parameter, each of N ranks holds 4 + 16/N, plus a bucket in flight (stage 1: 8 + 12/N; both
include the copy, 4/N, that DeepSpeed keeps of the part it updates). The price: gradients are reduced after *every*
micro-batch, not once per step, because no rank accumulates them whole. With few micro-batches per rank, it is the
cheapest way to save memory; with many, stage 1 communicates less.
"""

from dataclasses import replace

from lockstep.strategies.engines.zero import Zero
from lockstep.strategies.strategy import WeightFormats


class Zero2(Zero):
    """ZeRO stage 2 on DeepSpeed: the optimizer's state and the gradients are sharded."""

    stage = 2
    facts = replace(
        Zero.facts,
        weight_formats=WeightFormats.FOUR_BITS,  # stored in buffers, replicated
        waits_inside=("backward", "reduction", "optimizer"),
    )
