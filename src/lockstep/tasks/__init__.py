"""What is learned: loss, scores and samples of a kind of task."""
