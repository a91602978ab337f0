"""ZeRO stage 3: the optimizer's state, the gradients and the weights are shared out; nobody keeps the model whole.

A module's weights are gathered just before it computes, forward and backward, and forgotten afterwards. Of fp32
AdamW's 16 bytes a parameter 16/N remain on each of N ranks, beside the modules at work; at the start rank 0 reads the
model and hands it out module by module, so the others never hold more than one. Parameters of fewer elements than
`zero_optimization.stage3_param_persistence_threshold` stay whole everywhere: gathering them costs more than it saves.
The price: the weights travel twice and the gradients once for every *piece*, so make pieces large.
With `precision: bf16` autocast keeps a bf16 copy of every weight for backward (2 bytes a parameter, whole, on every
rank); `strategy.options.bf16: {enabled: true}` keeps bf16 weights instead, sharded, with an fp32 master copy.
"""

from lockstep.strategies.zero import Zero


class Zero3(Zero):
    """Optimizer state, gradients and weights sharded."""

    stage = 3
