"""Everything that touches the inside of an engine: torch, transformers, accelerate, deepspeed."""
