"""Randomly drawn runs: each is run and compared; a failing one is reduced and saved as a test (tests/README.md)."""
