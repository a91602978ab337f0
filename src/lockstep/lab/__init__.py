"""Commands around training: write run files, benchmark, check machines, run sweeps."""
