"""Launchers for managed machines: Kubernetes, Amazon SageMaker and Ray. Found by entry points."""
