"""Plans of jobs without their machines: simulated ranks, and rates of a machine. Found by entry points."""
