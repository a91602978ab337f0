"""Files of a run: checkpoints and the export, and their copies in object stores and on the Hub."""
