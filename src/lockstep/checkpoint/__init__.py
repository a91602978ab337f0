"""What is kept on disk: checkpoints, the export, and its way to the Hub."""
