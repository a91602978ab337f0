"""How processes are started, on this machine and elsewhere."""

SHARED = {"extend_run", "launcher", "start"}  # the files here that are no plug-ins
