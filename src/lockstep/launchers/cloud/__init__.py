"""What schedulers and clouds are asked for."""
