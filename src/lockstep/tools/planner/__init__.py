"""`lockstep plan --simulate`: what a run takes on machines that are not there."""
