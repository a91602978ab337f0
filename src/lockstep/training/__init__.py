"""One rank from its start to the export: session, loop, evaluation."""
