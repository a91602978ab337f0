"""How processes are started, on this machine and elsewhere."""

SHARED = {"launcher", "start"}  # the files here that are no plug-ins
