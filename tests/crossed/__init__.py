"""Runs that nobody thought of: drawn, run, compared, shrunk and written down (tests/README.md)."""
