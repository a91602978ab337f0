"""The plain reference: the same training, written as the field writes it, slow and without a line of lockstep's.

In: a run file as a mapping, a tokenizer's folder, which examples were in which step. Out: losses, gradients, weights.
Nothing here imports another part of lockstep, so that a mistake of lockstep's is not made twice.
"""
