"""A Python without DeepSpeed, as most users have it. Where it is installed, transformers imports it when a model is
saved, and with it all that DeepSpeed looks for (mlflow, a web framework): two of the four seconds of processor time
that a small job of a new interpreter takes. For jobs in interpreters of their own; others are forked."""

import sys

sys.modules["deepspeed"] = None  # type: ignore[assignment]
