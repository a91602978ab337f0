"""Prove what was computed: a job against one process, two runs, one step again, an attested run."""
