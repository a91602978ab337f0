"""Where numbers go: sinks behind one `log(step, split, numbers)`; one file each."""
