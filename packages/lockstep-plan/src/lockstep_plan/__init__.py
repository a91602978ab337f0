"""Plan jobs without their machines: simulated ranks, and measured rates of a machine. Found by entry points."""
