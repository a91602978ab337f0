"""ZeRO stage 3: the optimizer's state, the gradients and the weights are shared out; nobody keeps the model whole.

A module's weights are gathered just before it computes, forward and backward, and forgotten afterwards. Each of N
ranks holds 20/N bytes a parameter of fp32 AdamW's 16 and DeepSpeed's copy, beside the modules at work and buckets in
flight. At the start rank 0 reads the model and hands it out module by module, so the others never hold more than one.
Parameters of at most `zero_optimization.stage3_param_persistence_threshold` elements stay whole everywhere.
The price: the weights travel twice and the gradients once for every *micro-batch*, so make micro-batches large.
With `precision: bf16` autocast keeps a bf16 copy of every weight for backward (2 bytes a parameter, whole, on every
rank); `strategy.options.bf16: {enabled: true}` keeps bf16 weights instead, sharded, beside an fp32 master copy: 16/N
bytes in all. Its master copy starts from the weights rounded to bf16.
"""

from lockstep.strategies.engines.zero import Zero


class Zero3(Zero):
    """Optimizer state, gradients and weights sharded."""

    stage = 3
