"""Models of transformers: building them, adapters, cutting them up, what they write."""
