"""Bodies that several strategies share."""
