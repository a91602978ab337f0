"""Check computations: a job against one process, two runs, a recomputed step, an attested run."""
