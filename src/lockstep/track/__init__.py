"""Where numbers go: the terminal, OUTPUT, trackers, the report."""
