"""Processes and how they reach each other; what each of them measures about itself."""
