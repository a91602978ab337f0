"""How a step is computed: one file a strategy, each a small difference from `single.py`."""
