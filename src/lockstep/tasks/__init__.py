"""Tasks: the loss, scores and samples of each kind of training."""
