"""`--check`: see `checker.py`."""
