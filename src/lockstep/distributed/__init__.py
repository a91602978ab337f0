"""The ranks of a job among each other: process groups, hangs, determinism, and measurements."""
