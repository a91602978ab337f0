"""Strategies: one optimizer step, computed by all ranks together."""
