"""The export of a module of the user's: its weights, and the name of the code that makes it. Nothing is pickled.

In: weights by name. Out: `model.safetensors` and `config.json`; later the model again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep._version import __version__
from lockstep.config import plugins
from lockstep.config.run import RunError

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write(folder: Path, weights: Mapping[str, Tensor], build: str, arguments: Mapping[str, Any]) -> None:
    """Tied weights are written under each of their names."""
    save_file({n: t.detach().cpu().clone().contiguous() for n, t in weights.items()}, folder / WEIGHTS)
    config = {"library": "lockstep", "version": __version__, "model": build, "model_arguments": dict(arguments)}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> nn.Module:
    """The trained model of an export, in evaluation mode: the code that `config.json` names is imported and run.
    Errors: `RunError`."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        build, arguments = config["model"], config["model_arguments"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(
            f"{folder} holds no model of the task module; from_pretrained loads those of transformers"
        ) from None
    try:
        model = plugins.attribute(build)(**arguments)
    except plugins.PluginError as error:
        raise RunError(f"{folder}: {error}; its code has to be where Python finds it (PYTHONPATH)") from error
    fill(model, folder)
    return model.eval()


def fill(model: nn.Module, folder: Path) -> None:
    """Give a model the weights of an export. Errors: `RunError`."""
    try:
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, RuntimeError) as error:
        raise RunError(f"{folder / WEIGHTS} is not of this model: {' '.join(str(error).split())[:300]}") from error
