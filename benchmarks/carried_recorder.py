"""Run a training script of another system and record each of its optimizer steps.

In: a folder, and the script's path with its arguments. Out, in the folder: `steps.json` (per step: the sum of what
`backward()` was called on, examples, rates; and once the weight decay of each weight) and `weights.pt` (before the
first step and after the last). `carried_scripts.py` starts it; it imports nothing of lockstep.
"""

from __future__ import annotations

import gc
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Recorder:
    """Steps of the first optimizer that steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, Any]] = []
        self.decays: dict[str, float] = {}
        self.model: Any = None
        self.before: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []
        self.examples = 0
        self.depth = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss.detach()))

    def forward(self, module: Any, keywords: dict[str, Any], positional: tuple[Any, ...]) -> None:
        """Count the rows that a model learns from: the first tensor's, of the outermost model with gradients."""
        tensors = [each for each in (*keywords.values(), *positional) if isinstance(each, torch.Tensor) and each.ndim]
        if tensors and torch.is_grad_enabled() and module.training and module is self._outermost(module):
            self.examples += tensors[0].shape[0]

    def _outermost(self, module: Any) -> Any:
        """Return the module that training calls: the first that is called after a step."""
        if self.model is None:
            self.model = module
        return self.model

    def before_step(self, optimizer: Any, *_: Any) -> None:
        groups = optimizer.param_groups
        if not self.steps:
            names = self._names({id(weight) for group in groups for weight in group["params"]})
            for group in groups:
                for weight in group["params"]:
                    self.decays[names.get(id(weight), "?")] = group.get("weight_decay", 0.0)
            self.before = {n: w.detach().clone() for n, w in self._weights.items()}
        rates = sorted({group["lr"] for group in groups})
        self.steps.append({"loss": sum(self.losses), "examples": self.examples, "rates": rates})
        self.losses, self.examples = [], 0

    def _names(self, wanted: set[int]) -> dict[int, str]:
        """Return the names of weights, by the smallest module that holds all of them."""
        holders = [m for m in gc.get_objects() if isinstance(m, torch.nn.Module)]
        holding = [m for m in holders if wanted <= {id(w) for w in m.parameters()}]
        model = next((m for m in holding if hasattr(m, "save_pretrained")), holding[-1] if holding else self.model)
        self._weights = dict(model.named_parameters())
        return {id(weight): name for name, weight in self._weights.items()}

    def after_step(self, *_: Any) -> None:
        after = {n: w.detach().clone() for n, w in self._weights.items()}
        torch.save({"before": self.before, "after": after}, self.folder / "weights.pt")
        self.folder.joinpath("steps.json").write_text(json.dumps({"steps": self.steps, "decays": self.decays}))


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    recorder = Recorder(folder)
    backward = torch.Tensor.backward

    def seen(loss: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        recorder.backward(loss)
        return backward(loss, *arguments, **keywords)

    torch.Tensor.backward = seen  # type: ignore[method-assign]
    called = torch.nn.Module.__call__

    def calling(module: Any, *arguments: Any, **keywords: Any) -> Any:
        recorder.forward(module, keywords, arguments)
        return called(module, *arguments, **keywords)

    torch.nn.Module.__call__ = calling  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
