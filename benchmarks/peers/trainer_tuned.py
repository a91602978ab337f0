"""Peer: transformers.Trainer tuned for speed: batches of like length, fused AdamW, no needless work.
The settings are TUNED in trainer.py; all else is that script's.
The command line is common.py's."""

from trainer import TUNED, main

if __name__ == "__main__":
    main("trainer_tuned", TUNED)
