"""Optimizers: the update of a weight by its gradient, one file each."""

SHARED = {"optimizer"}  # the files here that are no plug-ins
