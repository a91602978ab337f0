"""Optimizers: the update of a weight by its gradient, one file each."""
