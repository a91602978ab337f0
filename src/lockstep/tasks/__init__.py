"""What is learned: loss, scores and samples of a kind of task."""

SHARED = {
    "abilities",
    "answer_pairs",
    "label_task",
    "length_curves",
    "metric_arrays",
    "own_metrics",
    "per_token",
    "task",
    "text_task",
}  # the files here that are no plug-ins
