"""Pipeline stages: a model of a known family split between its layers, or a user's `nn.Sequential`.

In: a model, and the number of stages. Out: a `StagePart` per stage. For a transformers model, a part takes the hidden
states of the previous stage and runs the model's own `forward`, with stand-ins for other stages' modules, from its
first layer to its last. Embeddings belong to the stage of the first layer that needs them; final norm, pooler and head
to that of the last layer. For an `nn.Sequential`, a `SequentialPart` runs its own modules in order; a layer is a module
with weights and the modules without weights after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.config.run import RunError
from lockstep.data.job import Job
from lockstep.strategies.engines.layers import StandIn
from lockstep.strategies.exact.gradient_sum import share
from lockstep.tasks.models import unpadded
from lockstep.tasks.models.model_configs import leaves_out_layers, load_config
from lockstep.tasks.modules import dataset, wrapped_module
from lockstep.tasks.modules.dataset import INPUT


@dataclass(frozen=True)
class Stack:
    """Layers that hidden states pass in sequence; paths are relative to the base model."""

    layers: str  # path of the list
    front: tuple[str, ...]  # modules before the first layer, in the same stage
    count: str  # the config's entry for the number of layers


_DECODER = (Stack("layers", ("embed_tokens",), "num_hidden_layers"),)
_ENCODER = (Stack("encoder.layer", ("embeddings",), "num_hidden_layers"),)


def _two_stacks(*front: str) -> tuple[Stack, Stack]:
    encoder, decoder = (tuple(f"{side}.{name}" for name in front) for side in ("encoder", "decoder"))
    return Stack("encoder.layers", encoder, "encoder_layers"), Stack("decoder.layers", decoder, "decoder_layers")


FAMILIES: dict[str, tuple[Stack, ...]] = {  # by the config's model_type; two stacks: an encoder, then a decoder
    "gpt2": (Stack("h", ("wte", "wpe"), "num_hidden_layers"),),
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "xlm-roberta": _ENCODER,
    "distilbert": (Stack("transformer.layer", ("embeddings",), "num_hidden_layers"),),
    "bart": _two_stacks("embed_tokens", "embed_positions", "layernorm_embedding"),
    "marian": _two_stacks("embed_tokens", "embed_positions"),
}


def layers_of(job: Job) -> int:
    """Return the number of layers between which a run's model can be split. Errors: `RunError` if it cannot be
    split."""
    config: Any = load_config(job.run.model)
    count = layer_count(config)
    if job.task.head == "causal" and len(FAMILIES[config.model_type]) > 1:  # the decoder of an encoder-decoder model
        raise RunError(
            "LS4066",
            f"strategy.name: pipeline cannot split the decoder of a {config.model_type} without its encoder; use "
            "strategy.name=ddp or another strategy, or a decoder-only model.type",
        )
    return count


def layer_count(config: Any) -> int:
    """Return the number of layers between which a model of this config can be split. Errors: `RunError` if it cannot be
    split."""
    ours = type(config).__module__.startswith("transformers.")  # code from the Hub may use the name of a known family
    if config.model_type not in FAMILIES or not ours:
        raise RunError(
            "LS4060",
            f"strategy.name: pipeline cannot split a model of the type {config.model_type!r}; it can split "
            f"{', '.join(sorted(FAMILIES))}. Use strategy.name=ddp or another strategy",
        )
    if (entry := leaves_out_layers(config)) is not None:
        raise RunError("LS4061", f"model.config.{entry}: a pipeline cannot skip whole layers at random; set it to 0")
    return sum(int(getattr(config, stack.count)) for stack in FAMILIES[config.model_type])


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device: shapes without memory; tied weights stay tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)


class Cut:
    """A model split into `stages` parts with equally many layers, up to one."""

    def __init__(self, model: nn.Module, stages: int) -> None:
        """Split `model`, which is only read and may be a skeleton."""
        base: Any = model.base_model
        prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
        self.whole, self.stages = skeleton(model), stages
        config: Any = model.config
        self.width = int(config.hidden_size)
        stacks = FAMILIES[config.model_type]
        self.sizes = [len(base.get_submodule(stack.layers)) for stack in stacks]
        self.layers = [f"{prefix}{s.layers}.{i}" for s, n in zip(stacks, self.sizes, strict=True) for i in range(n)]
        self._stage: dict[str, int] = {}  # path of a layer, or of a module before the layers -> its stage
        for stage in range(stages):
            self._stage |= {self.layers[i]: stage for i in self.own(stage)}
        for stack in stacks:
            self._stage |= {f"{prefix}{path}": self._stage[f"{prefix}{stack.layers}.0"] for path in stack.front}
        self.name_tensors()

    def name_tensors(self) -> None:
        """Find the names of each tensor, and the stages that use it."""
        self.canonical: dict[str, str] = {}  # every name of a parameter or buffer -> the first name of the same tensor
        first: dict[int, str] = {}
        for name, tensor in [
            *self.whole.named_parameters(remove_duplicate=False),
            *self.whole.named_buffers(remove_duplicate=False),
        ]:
            self.canonical[name] = first.setdefault(id(tensor), name)
        self.holders: dict[str, list[int]] = {}  # first name -> the stages that compute with it, ascending
        for name, canonical in self.canonical.items():
            self.holders[canonical] = sorted({*self.holders.get(canonical, []), self.stage_of(name)})

    def own(self, stage: int) -> range:
        """Return the layers of a stage, counted through all stacks."""
        return share(len(self.layers), stage, self.stages)

    def stage_of(self, path: str) -> int:
        """Return the stage of a module or tensor: the last one, if it is neither in a layer nor before the first."""
        while path:
            if path in self._stage:
                return self._stage[path]
            path = path.rpartition(".")[0]
        return self.stages - 1

    def part(self, stage: int) -> StagePart:
        """Return a stage's part, without memory: call `StagePart.place` with its weights before use."""
        return StagePart(self, stage)


class _Reached(Exception):
    """Raised to end a forward after a stage's last layer; carries the hidden states."""


class _Absent(StandIn):
    """Stand-in for a module of another stage: passes hidden states through, and returns zeros for token or position
    ids."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tokens = args[0] if args else kwargs["input_ids"]
        if not isinstance(tokens, Tensor):
            return torch.zeros(*tokens, self.width)  # some position embeddings take a shape
        if tokens.is_floating_point() and tokens.ndim == 3:
            return tokens
        return torch.zeros(*tokens.shape, self.width, device=tokens.device)


class _Entry(StandIn):
    """Stand-in for the layer before a stage's first one: returns that layer's output, received from the previous
    stage."""

    hidden: Tensor | None = None
    resume: Callable[[], None] | None = None

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, resume = self.hidden, self.resume
        self.hidden = self.resume = None
        assert hidden is not None
        if resume is not None:
            resume()
        return hidden


class StagePart(nn.Module):
    """One stage of a model."""

    def __init__(self, cut: Cut, stage: int) -> None:
        super().__init__()
        self.cut, self.stage = cut, stage
        self.first, self.last = stage == 0, stage == cut.stages - 1
        self.model = skeleton(cut.whole)
        self._start, self._end = cut.own(stage).start, cut.own(stage).stop
        self.receives = 0 if self.first else self._crossing(self._start)  # hidden states from the previous stage
        self.sends = 0 if self.last else self._crossing(self._end)
        self._encoded: list[Tensor] = []
        self._entries: list[_Entry] = []
        self._replace_foreign()
        self._hook()
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for name in (*module._parameters, *module._buffers):
                if module._parameters.get(name) is not None or module._buffers.get(name) is not None:
                    place = self._places.setdefault(cut.canonical[f"{path}.{name}" if path else name], [])
                    place.append((module, name))

    def _crossing(self, layer: int) -> int:
        """Return the number of hidden states that cross the boundary before a layer: in the decoder, the encoder's
        output is sent along."""
        return 2 if layer > self.cut.sizes[0] else 1

    def _replace_foreign(self) -> None:
        """Replace other stages' modules by stand-ins."""
        cut = self.cut
        paths = {path for path, stage in cut._stage.items() if stage != self.stage}
        for path, module in list(self.model.named_modules()):
            if module._parameters and cut.stage_of(path) != self.stage:
                paths.add(path)
        # Drop paths below other paths.
        paths = {p for p in paths if not any(p != q and p.startswith(f"{q}.") for q in paths)}
        for path in paths:
            self.model.set_submodule(path, _Absent(cut.width))
        if self.receives == 2:  # every layer of the decoder reads the encoder's output
            self._enter(cut.sizes[0] - 1)
        if self.receives:
            self._enter(self._start - 1)

    def _enter(self, layer: int) -> None:
        self._entries.append(_Entry())
        self.model.set_submodule(self.cut.layers[layer], self._entries[-1])

    def _hook(self) -> None:
        """Keep the encoder's output, and stop after the stage's last layer."""
        if self.sends == 2:
            encoder = self.model.get_submodule(self.cut.layers[self.cut.sizes[0] - 1])
            encoder.register_forward_hook(lambda module, args, output: self._encoded.append(output))
        if self._end > self._start:  # hidden states are sent padded, even if a stage unpads them
            last = self.model.get_submodule(self.cut.layers[self._end - 1])
            last.register_forward_hook(unpadded.take_apart, with_kwargs=True)
        if not self.last:
            self.model.get_submodule(self.cut.layers[self._end - 1]).register_forward_hook(self._stop)

    def _stop(self, module: nn.Module, args: Any, output: Tensor) -> None:
        raise _Reached(output)

    # -- weights -----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """First names of the parameters and buffers that this part uses, in the order of the whole model."""
        return [name for name in dict.fromkeys(self.cut.canonical.values()) if name in self._places]

    def place(self, name: str, tensor: Tensor) -> None:
        """Give this part its own copy of a tensor of the whole model, by first name, if the part uses it."""
        places = self._places.get(name, ())
        mine = tensor.detach().clone() if places else tensor
        for module, attribute in places:
            if attribute in module._buffers:
                module._buffers[attribute] = mine
            else:
                if not isinstance(mine, nn.Parameter):
                    old = module._parameters[attribute]
                    assert old is not None
                    mine = nn.Parameter(mine, old.requires_grad)
                module._parameters[attribute] = mine

    def tensor(self, name: str) -> Tensor:
        """Return a parameter or buffer of this part, by first name."""
        module, attribute = self._places[name][0]
        tensor: Tensor = getattr(module, attribute)
        return tensor

    # -- running -----------------------------------------------------------------------------------------------------

    def arriving(self, inputs: Mapping[str, Tensor]) -> list[tuple[int, int, int]]:
        """Return the shapes of the hidden states that the previous stage sends for these inputs: [B, T, width] each."""
        if not self.receives:
            return []
        source = inputs["input_ids"].shape
        target = inputs.get("decoder_input_ids", inputs["input_ids"]).shape
        shapes = [source] if self._start <= self.cut.sizes[0] else [source, target]
        return [(shape[0], shape[1], self.cut.width) for shape in shapes]

    @override
    def forward(
        self, received: Sequence[Tensor], inputs: Mapping[str, Tensor], resume: Callable[[], None] | None = None
    ) -> Any:
        """Return hidden states for the next stage, or the model's output on the last one.

        `resume` is called where the model continues to draw random numbers, because the stand-ins before may have drawn
        some.
        """
        for entry, hidden in zip(self._entries, received, strict=True):
            # A view: autocast caches a leaf's bf16 copy, and would sum the gradients of all its uses in bf16.
            entry.hidden = hidden.view_as(hidden)
        if self._entries:
            self._entries[-1].resume = resume
        try:
            return self.model(**inputs)
        except _Reached as reached:
            hidden = reached.args[0]
        encoded, self._encoded = self._encoded, []
        return tuple(tensor.contiguous() for tensor in (*encoded, hidden))


def count_sequential_layers(job: Job) -> int:
    """Return the number of layers between which the user's model can be split. Errors: `RunError` if it cannot be
    split."""
    run = job.run
    model = dataset.model(dataset.OwnCode.of(run), empty=True)
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise RunError(
            "LS4062",
            "strategy.name: pipeline can split a custom model only if it is an nn.Sequential, and "
            f"{type(model).__name__} is not one; build it as nn.Sequential(first, second, ...), or use ddp or "
            "fsdp2",
        )
    if run.precision != "fp32":
        raise RunError(
            "LS4063",
            "precision: pipeline stages exchange fp32 tensors only; use precision=fp32, or strategy.name=ddp or fsdp2",
        )
    if run.task.options.get("generate") is not None:
        raise RunError(
            "LS4064",
            "task.generate: no rank of a pipeline holds the whole model, so it cannot generate; remove task.generate",
        )
    return len(_layers(model))


def _layers(model: nn.Sequential) -> list[list[str]]:
    """Return the names of the modules of each layer."""
    layers: list[list[str]] = [[]]
    for name, module in model.named_children():
        if any(True for _ in module.parameters()) and any(
            True for earlier in layers[-1] for _ in model.get_submodule(earlier).parameters()
        ):
            layers.append([])
        layers[-1].append(name)
    return layers


class SequentialCut(Cut):
    """An `nn.Sequential` split into `stages` parts with equally many layers, up to one."""

    def __init__(self, model: nn.Module, stages: int) -> None:
        """Split `model`, which is only read and may be a skeleton."""
        assert isinstance(model, nn.Sequential)
        self.whole, self.stages = skeleton(model), stages
        self.groups = _layers(model)
        self.layers = [names[0] for names in self.groups]
        self._stage = {name: stage for stage in range(stages) for name in self.names_of(stage)}
        self._shapes: dict[Any, tuple[int, ...]] = {}
        self.name_tensors()

    def names_of(self, stage: int) -> list[str]:
        """Return the modules of a stage."""
        return [name for i in self.own(stage) for name in self.groups[i]]

    @override
    def part(self, stage: int) -> StagePart:
        return SequentialPart(self, stage)

    def shape_before(self, stage: int, first: Tensor) -> tuple[int, ...]:
        """Return the shape of the previous stage's output, from the shape of the model's input; computed on the meta
        device. Errors: `RunError`."""
        key = (stage, first.shape, first.dtype)
        if key not in self._shapes:
            hidden: Any = torch.empty_like(first, device="meta")
            self.whole.eval()
            with torch.no_grad():
                for name in (n for before in range(stage) for n in self.names_of(before)):
                    hidden = self.whole.get_submodule(name)(hidden)
            self._shapes[key] = checked_hidden(hidden, self.names_of(stage)[0]).shape
        return self._shapes[key]


def checked_hidden(hidden: Any, name: str) -> Tensor:
    """Check that a module's output can travel between stages. Errors: `RunError`."""
    if not isinstance(hidden, Tensor) or hidden.dtype != torch.float32:
        raise RunError(
            "LS4065",
            f"strategy.name: pipeline: module {name} of the model receives {wrapped_module.kind_of(hidden)}, "
            "but stages exchange a single float32 tensor; merge it with the module before it, or change "
            "strategy.options.stages",
        )
    return hidden


class SequentialPart(StagePart):
    """One stage of an `nn.Sequential`."""

    cut: SequentialCut

    @override
    def _crossing(self, layer: int) -> int:
        return 1

    @override
    def _replace_foreign(self) -> None:
        for name, _ in list(self.model.named_children()):
            if name not in self.cut.names_of(self.stage):
                self.model.set_submodule(name, nn.Identity())

    @override
    def _hook(self) -> None:
        """Nothing to stop: `forward` runs only this stage's modules."""

    def _arguments(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """Return the whole model's input, and the inputs of the loss."""
        calling: Any = self.cut.whole.lockstep_calling
        (positional, named), loss_inputs = calling.arguments(inputs[INPUT].batch)
        return next(iter([*positional, *named.values()])), loss_inputs

    @override
    def arriving(self, inputs: Mapping[str, Any]) -> list[tuple[int, ...]]:  # type: ignore[override]
        """Return the shape of the previous stage's output for these inputs."""
        return [] if self.first else [tuple(self.cut.shape_before(self.stage, self._arguments(inputs)[0]))]

    @override
    def forward(
        self, received: Sequence[Tensor], inputs: Mapping[str, Any], resume: Callable[[], None] | None = None
    ) -> Any:
        """Return the input of the next stage, or a `Computed` on the last one."""
        arguments, loss_inputs = self._arguments(inputs)
        hidden = arguments if self.first else received[0].view_as(received[0])
        if resume is not None:
            resume()
        names = self.cut.names_of(self.stage)
        for name in names:
            hidden = self.model.get_submodule(name)(hidden)
        if not self.last:
            return (checked_hidden(hidden, self.cut.names_of(self.stage + 1)[0]).contiguous(),)
        calling: Any = self.cut.whole.lockstep_calling
        return wrapped_module.finished(calling, hidden, loss_inputs, inputs[INPUT], self.model.training)
