"""From any source to the rank's next StepBatch: source -> tokens -> order -> pieces -> feed."""
