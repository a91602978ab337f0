"""The ranks of a job: their process groups, failure detection, determinism, and measurements."""
