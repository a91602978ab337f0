"""ZeRO stage 1: the optimizer's state is shared out; every rank keeps the whole weights and gradients.

Rank r updates the r-th part of the weights and is the only one to hold AdamW's two moments of that part; after the
update the ranks give each other the new weights. Of the 16 bytes a parameter that fp32 AdamW needs (4 weight, 4
gradient, 8 moments) 8 + 8/N remain on each of N ranks, and 4/N for a copy that DeepSpeed keeps of the part it updates.
What travels is what plain data parallelism sends: gradients are reduced once a step, new weights gathered once.
Each rank may do as many pieces as it likes before that; blank pieces are added all the same, so that the three stages
differ in nothing else.
"""

from lockstep.strategies.zero import Zero


class Zero1(Zero):
    """Optimizer state sharded."""

    stage = 1
