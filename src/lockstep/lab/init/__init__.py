"""`lockstep init`: a run file from what the data holds."""
