"""`lockstep sweep`: train a run file with several values of its keys."""
