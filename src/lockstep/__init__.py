"""lockstep: distributed training of text transformers, the same bits on one process or many."""

__version__ = "0.1.0"
