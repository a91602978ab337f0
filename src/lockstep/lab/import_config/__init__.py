"""Configurations of other systems become run files: a table for each, and what reads, converts and writes."""
