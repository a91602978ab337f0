"""Optimizers: the update of a weight by its gradient, one file each, and a line in `config/plugins.py`."""
