"""Check computations: compare a job with one process, compare two runs, recompute a step, audit an attested run."""
