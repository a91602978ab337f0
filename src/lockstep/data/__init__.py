"""Read data from files and the Hub, encode it to tokens, and split it into micro-batches."""
