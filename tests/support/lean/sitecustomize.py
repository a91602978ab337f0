"""Hide DeepSpeed, as for most users. If it is installed, transformers imports it when saving a model, with everything
DeepSpeed looks for (mlflow, a web framework): two of four CPU seconds of a small job in a new interpreter.
"""

import sys

sys.modules["deepspeed"] = None  # type: ignore[assignment]
