"""What the command line does beside training."""
