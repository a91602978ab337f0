"""The version, below every room, so that whoever writes it down imports nothing else."""

__version__ = "0.1.0"
