"""Launchers: from a run to its processes, on this machine and elsewhere."""
