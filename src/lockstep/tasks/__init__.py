"""What is learned: loss, scores and samples of a kind of task."""

SHARED = {"per_token", "task"}  # the files here that are no plug-ins
