"""Where numbers go: the terminal, OUTPUT, trackers, the report."""

SHARED = {"best", "busy", "console", "samples", "tracker", "trackers"}  # the files here that are no plug-ins
