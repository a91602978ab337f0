"""From files and the Hub to tokens, and from tokens to micro-batches."""
