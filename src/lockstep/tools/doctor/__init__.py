"""`lockstep doctor`: what this machine can run, and what differs between ranks."""
