"""How a weight becomes the next one of its gradient: a file an optimizer."""

SHARED = {"optimizer"}  # the files here that are no plug-ins
