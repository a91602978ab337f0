"""How one optimizer step is computed by all ranks together."""
