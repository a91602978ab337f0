"""Sinks of a run's numbers: the terminal, OUTPUT, trackers, the report."""
