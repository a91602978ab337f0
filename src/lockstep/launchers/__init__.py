"""How processes start: one file a launcher. Nothing here imports torch at the top."""
