"""The page of a run, or of several: what OUTPUT remembers, drawn."""
