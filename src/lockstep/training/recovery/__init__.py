"""Recovery from rank failures in the surviving processes; used only with `launch.on_rank_failure: continue`."""
