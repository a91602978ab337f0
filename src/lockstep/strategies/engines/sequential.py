"""Pipeline stages of an `nn.Sequential` of the user's, which is cut between its modules.

In: the model of the task `module`. Out: for each stage a `SequentialPart`, which runs the modules from its first own
one to its last. A layer is a module with weights and those without any that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, RunError
from lockstep.strategies.engines.cuts import Cut, StagePart, skeleton
from lockstep.tasks.modules import user_functions, wrapped_module
from lockstep.tasks.modules.dataset import INPUT


def layer_count(run: Run) -> int:
    """The number of layers between which the user's model is cut. Errors: `RunError` where it cannot be cut."""
    model = user_functions.model(run, empty=True)
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise RunError(
            "strategy.name: pipeline cuts a model of your own where it is an nn.Sequential, and "
            f"{type(model).__name__} is none; give its modules in a row, nn.Sequential(first, second, ...), or use "
            "ddp or fsdp2"
        )
    if run.precision != "fp32":
        raise RunError("precision: what travels between the stages of a pipeline is fp32; use fp32, or ddp or fsdp2")
    if run.task.options.get("generate") is not None:
        raise RunError("task.generate: a pipeline holds no whole model that could write; leave it out")
    return len(_layers(model))


def _layers(model: nn.Sequential) -> list[list[str]]:
    """Names of the modules of each layer."""
    layers: list[list[str]] = [[]]
    for name, module in model.named_children():
        if any(True for _ in module.parameters()) and any(
            True for held in layers[-1] for _ in model.get_submodule(held).parameters()
        ):
            layers.append([])
        layers[-1].append(name)
    return layers


class SequentialCut(Cut):
    """An `nn.Sequential` cut into `stages` parts of as many layers each, give or take one."""

    def __init__(self, model: nn.Module, stages: int) -> None:
        """`model` is only read; a skeleton will do."""
        assert isinstance(model, nn.Sequential)
        self.whole, self.stages = skeleton(model), stages
        self.groups = _layers(model)
        self.layers = [names[0] for names in self.groups]
        self._stage = {name: stage for stage in range(stages) for name in self.names_of(stage)}
        self._shapes: dict[Any, tuple[int, ...]] = {}
        self.name_tensors()

    def names_of(self, stage: int) -> list[str]:
        """The modules of a stage."""
        return [name for i in self.own(stage) for name in self.groups[i]]

    def part(self, stage: int) -> StagePart:
        return SequentialPart(self, stage)

    def shape_before(self, stage: int, first: Tensor) -> tuple[int, ...]:
        """Of what the stage before gives, from the shape of what the model is given: found on the meta device. Errors:
        `RunError`."""
        key = (stage, first.shape, first.dtype)
        if key not in self._shapes:
            hidden: Any = torch.empty_like(first, device="meta")
            self.whole.eval()
            with torch.no_grad():
                for name in (n for before in range(stage) for n in self.names_of(before)):
                    hidden = self.whole.get_submodule(name)(hidden)
            self._shapes[key] = checked(hidden, self.names_of(stage)[0]).shape
        return self._shapes[key]


def checked(hidden: Any, name: str) -> Tensor:
    """What travels between two stages. Errors: `RunError`."""
    if not isinstance(hidden, Tensor) or hidden.dtype != torch.float32:
        raise RunError(
            f"strategy.name: pipeline: module {name} of the model is given {wrapped_module.kind_of(hidden)}, and what "
            "travels between stages is one float32 tensor; put it together with the module before, or change "
            "strategy.options.stages"
        )
    return hidden


class SequentialPart(StagePart):
    """One stage."""

    cut: SequentialCut

    def _crossing(self, layer: int) -> int:
        return 1

    def _replace_foreign(self) -> None:
        for name, _ in list(self.model.named_children()):
            if name not in self.cut.names_of(self.stage):
                self.model.set_submodule(name, nn.Identity())

    def _hook(self) -> None:
        """Nothing to stop: the modules of this stage are run one by one."""

    def _given(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """What the whole model is given, and what the loss sees."""
        calling: Any = self.cut.whole.lockstep_calling
        (positional, named), seen = calling.arguments(inputs[INPUT].batch)
        return next(iter([*positional, *named.values()])), seen

    def arriving(self, inputs: Mapping[str, Any]) -> list[tuple[int, ...]]:  # type: ignore[override]
        """Shape of what the stage before gives for these inputs."""
        return [] if self.first else [tuple(self.cut.shape_before(self.stage, self._given(inputs)[0]))]

    def forward(
        self, received: Sequence[Tensor], inputs: Mapping[str, Any], resume: Callable[[], None] | None = None
    ) -> Any:
        """What the next stage is given, or a `Computed` on the last one."""
        arguments, seen = self._given(inputs)
        hidden = arguments if self.first else received[0].view_as(received[0])
        if resume is not None:
            resume()
        names = self.cut.names_of(self.stage)
        for name in names:
            hidden = self.model.get_submodule(name)(hidden)
        if not self.last:
            return (checked(hidden, self.cut.names_of(self.stage + 1)[0]).contiguous(),)
        calling: Any = self.cut.whole.lockstep_calling
        return wrapped_module.finished(calling, hidden, seen, inputs[INPUT], self.model.training)
