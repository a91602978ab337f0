"""The plain reference: an independent, simple and slow implementation of the same training with the usual libraries.

In: a run file as a mapping, a tokenizer's folder, the examples of each step. Out: losses, gradients, weights. Imports
no other part of lockstep, so that an error in lockstep is not repeated here.
"""
