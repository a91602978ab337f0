"""Work around training: write run files, measure, check machines, try several runs."""
