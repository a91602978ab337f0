"""The files of a run: checkpoints, the export, and its way to the Hub."""
