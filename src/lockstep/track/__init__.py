"""Where numbers go: the terminal, OUTPUT, trackers, the report."""

SHARED = {"console", "tracker", "trackers"}  # the files here that are no plug-ins
