"""All trackers of a run behind one."""
