"""`--check`: recompute a chosen step inside the traced process, on copies, and compare with what training used.

`calls.py` records the calls of a step. `replay.py` repeats them on a copy of the model. `gradients.py`, `rows.py`,
`precision.py` and `update.py` hold the references. `checker.py` decides when, and writes `check` records. Nothing of
the training is written to: its weights, gradients, buffers, modes, random numbers and hooks stay as they are.
"""
