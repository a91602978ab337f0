"""Sinks for the metrics and texts of a run: the terminal, files in OUTPUT, trackers, the report page."""
