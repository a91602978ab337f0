"""How processes are started, on this machine and elsewhere."""
