"""Launchers: start the processes of a run, on this machine and elsewhere."""
