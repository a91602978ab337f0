"""Checkpoints: what is saved, where it is kept, and whether it may be trusted."""
