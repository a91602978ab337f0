"""ZeRO stage 3: the optimizer's state, the gradients and the weights are sharded; no rank keeps the whole model.

A module's weights are gathered just before it computes, in forward and backward, and freed afterwards. Each of N ranks
holds 20/N bytes per parameter (fp32 AdamW's 16 and DeepSpeed's copy), plus the modules in use and buckets in flight. At
the start rank 0 loads the model and distributes it module by module, so the others never hold more than one.
Parameters of at most `zero_optimization.stage3_param_persistence_threshold` elements stay whole on every rank.
The price: for every *micro-batch*, weights are gathered twice and gradients reduced once, so use large micro-batches.
With `precision: bf16`, autocast keeps a bf16 copy of every weight for backward (2 bytes per parameter, whole, on every
rank). `strategy.options.bf16: {enabled: true}` instead keeps bf16 weights, sharded, plus an fp32 master copy: 16/N
bytes in total. Its master copy starts from the weights rounded to bf16.
"""

from lockstep.strategies.engines.zero import Zero


class Zero3(Zero):
    """ZeRO stage 3 on DeepSpeed: the optimizer's state, the gradients and the weights are sharded."""

    stage = 3
