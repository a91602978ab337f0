"""Launchers: start the processes of a run, on this machine and elsewhere, and notice when one dies."""
