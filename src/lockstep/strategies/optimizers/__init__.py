"""How a weight becomes the next one of its gradient: a file an optimizer."""
