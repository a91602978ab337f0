"""`lockstep init`: write a run file for the user's data."""
