"""Launchers for managed machines: Kubernetes, Amazon SageMaker and Ray. Loaded through entry points."""
