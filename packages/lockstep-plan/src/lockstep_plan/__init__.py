"""Plan jobs without their machines: simulate ranks, and measure a machine's rates. Loaded through entry points."""
