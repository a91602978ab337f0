"""Peer: transformers.Trainer tuned for speed: batches of like length, fused AdamW, no needless work.
The settings are TUNED in trainer.py; all else is that script's.
The command line is common.py's."""

from common import sort_fifty_batches
from trainer import TUNED, main

if __name__ == "__main__":
    sort_fifty_batches()
    main("trainer_tuned", TUNED, "grouped")
