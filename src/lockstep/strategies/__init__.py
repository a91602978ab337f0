"""Strategies: one optimizer step, computed by all ranks together."""

SHARED = {"fsdp2_step", "native", "observer", "strategy"}  # the files here that are no plug-ins
