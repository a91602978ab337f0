"""Launchers of lockstep for machines that others keep: Kubernetes, Amazon SageMaker and Ray. Found by entry points."""
