"""The museum of silent faults: small training scripts with one fault each, and healthy ones.

`exhibits.py` lists them, `loop.py`, `text.py` and `engines.py` hold the scripts; `benchmarks/silent_faults.py` runs
them.
"""
