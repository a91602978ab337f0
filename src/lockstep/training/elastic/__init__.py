"""Training that outlives the loss of its ranks, in the same processes; used only for `launch.on_rank_failure:
continue`."""
