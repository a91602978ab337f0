"""Run one rank from its start to the export: session, training loop, evaluation."""
