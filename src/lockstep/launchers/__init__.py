"""How processes are started, on this machine and elsewhere."""

SHARED = {"further", "launcher", "start"}  # the files here that are no plug-ins
