"""Resolve a run into a job or refuse it; run one rank from its start to the export."""
