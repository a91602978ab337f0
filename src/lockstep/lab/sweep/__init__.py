"""`lockstep sweep`: trials over values of a run file's keys."""
