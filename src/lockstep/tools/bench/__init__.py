"""`lockstep bench`: a job's speed and memory over processes, strategies and micro-batches."""
