"""`--check`: recompute a chosen step inside the traced process, on copies, and compare with what training used.

`replay.py` records the calls of a step and repeats them on a copy of the model. `gradients.py` and `rows.py` hold the
references. `checker.py` decides when, and writes `check` records. Nothing of the training is written to: its weights,
gradients, buffers, modes, random numbers and hooks stay as they are.
"""
