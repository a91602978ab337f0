"""Cross-entropy of a language model without the full matrix of logits: the head processes `task.loss_chunk` tokens at
once.

In: a transformers model with a linear head, and targets beside its inputs. Out: the same model, returning the sum of
the losses in place of logits. Only the head's `forward` is replaced, so wrappers (DDP, FSDP, DeepSpeed) gather the
head's weights and find their gradients as before.

Positions without a target cost nothing. Gradients are computed in the forward pass, chunk by chunk, while a chunk's
logits exist (as in Liger-Kernel), so no logits are computed twice. `Finish` holds the operations that the model applies
to its logits after the head; they are compared with the model when it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutput

from lockstep.config.run import RunError
from lockstep.data import host_facts
from lockstep.data.batch import TARGETS
from lockstep.data.host_facts import TargetPlaces
from lockstep.data.job import Job
from lockstep.tasks.models import head_padding, heads, model_configs

KEY = "task.loss_chunk"
OUT = "; remove it to compute the whole matrix of logits"


def check(job: Job) -> None:
    """Refuse an unsupported `task.loss_chunk` before any rank starts. Errors: `RunError`."""
    run, head = job.run, str(job.task.head)
    if run.task.options.get("loss_chunk") is None:
        return
    if run.strategy.options.get("tensor_parallel", 1) != 1:
        raise RunError("LS3090", f"{KEY}: not supported with strategy.options.tensor_parallel{OUT}")
    if run.precision not in ("fp32", "bf16"):
        raise RunError(
            "LS3091", f"{KEY}: computes gradients before the loss scale that {run.precision} needs is applied{OUT}"
        )
    import transformers

    if not run.model.adapter:  # an adapted model is checked when it is built
        config = model_configs.load_config(run.model)
        for name, value in (model_configs.causal_entries(run.model) if head == "causal" else {}).items():
            setattr(config, name, value)
        for part in model_configs.texts(config):  # `build` sets the tokenizer's
            part.pad_token_id = 0 if model_configs.entry(part, "pad_token_id") is None else part.pad_token_id
        with torch.device("meta"):
            auto = getattr(transformers, heads.of(head).auto)
            model = auto.from_config(config, trust_remote_code=run.model.trust_remote_code)
        layer = head_of(model)
        try:
            with _ValuesOfNothing():
                agree(model, layer, Finish.of(model))
        except RunError:
            raise
        except Exception:  # the forward needs values: ranks check the model when they build it
            return


def head_of(model: Any) -> nn.Linear:
    """Return the layer that computes logits. Errors: `RunError` if it is not a plain linear layer."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        kind = "none" if head is None else f"a {type(head).__module__}.{type(head).__name__}"
        raise RunError("LS3094", f"{KEY}: needs a model whose head is a linear layer, and this model has {kind}{OUT}")
    return head


@dataclass(frozen=True)
class Finish:
    """Operations of a model on its logits after the head: `cap * tanh((logits * scale + bias) / cap)`."""

    scale: float = 1.0  # Cohere, Granite, Falcon-H1
    biased: Any = None  # the module whose buffer `final_logits_bias` [1, V] is added: BART, Marian
    cap: float | None = None  # Gemma

    @property
    def bias(self) -> Tensor | None:
        """The bias [V], looked up on each access because engines move buffers."""
        return None if self.biased is None else self.biased.final_logits_bias.flatten()

    @classmethod
    def of(cls, model: Any) -> Finish:
        """Read the operations from the model's config and buffers; `agree` checks them against the model."""
        config = model.config.get_text_config(decoder=True)
        scale = 1.0
        for entry in ("logit_scale", "lm_head_multiplier"):
            scale *= float(model_configs.entry(config, entry) or 1.0)
        scale /= float(model_configs.entry(config, "logits_scaling") or 1.0)
        biased = next((m for m in model.modules() if "final_logits_bias" in dict(m.named_buffers(recurse=False))), None)
        return cls(scale, biased, model_configs.entry(config, "final_logit_softcapping"))

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply to float32 logits [N, V], in place."""
        if self.scale != 1.0:
            logits *= self.scale
        if self.bias is not None:
            logits += self.bias
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


def install(model: nn.Module, chunk: int | None, smoothing: float = 0.0) -> nn.Module:
    """Make the model compute its loss in chunks.

    Its forward takes `TARGETS` beside its inputs and returns, as `loss`, the sum of their losses (label smoothing as in
    torch) and, as `logits`, each loss [B, T] where known. In evaluation mode `logits` is the input of `scored`. Without
    targets it returns logits. Errors: `RunError` if the model does anything to its logits that `Finish` does not
    describe."""
    if chunk is None:
        return model
    head = head_of(model)
    finish = Finish.of(model)
    if head.weight.device.type != "meta":
        agree(model, head, finish)
    _Installed(model, head, finish, chunk, smoothing)
    return model


class _Installed:
    """Hooks on a model and its head, and the state they share within a forward."""

    def __init__(self, model: nn.Module, head: nn.Linear, finish: Finish, chunk: int, smoothing: float) -> None:
        self.head, self.finish, self.chunk, self.smoothing = head, finish, chunk, smoothing
        self.plain = head.forward
        self.targets: Tensor | None = None  # [B, T], of the current forward
        self.scores: Tensor | None = None  # [B, T, 2]; in training [B, T]
        self.loss: Tensor | None = None
        self.last: Any = None
        head.forward = self.forward  # type: ignore[method-assign]
        model.register_forward_pre_hook(self.begin, with_kwargs=True)
        model.register_forward_hook(self.end)

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        self.targets, self.loss, self.scores = kwargs.pop(TARGETS, None), None, None
        if self.last is not None:  # the last forward did not reach the head (pipeline stage)
            self.last.remove()
        if self.targets is not None:
            # registered at every forward to run last: an engine's hook may add an autograd node to the output
            self.last = self.head.register_forward_hook(self.take)
        return args, kwargs

    def take(self, head: nn.Module, args: Any, output: Tensor) -> None:
        self.loss = output.sum()  # of one number
        self.last.remove()

    def end(self, model: nn.Module, args: Any, output: Any) -> Any:
        if self.targets is None:
            return None
        self.targets = None
        assert self.loss is not None, "the model's forward has not called its head"
        loss, scores, self.loss, self.scores = self.loss, self.scores, None, None
        return CausalLMOutput(loss=loss if model.training else None, logits=scores)

    def forward(self, input: Tensor) -> Tensor:
        """The head's forward: logits if there are no targets; else a placeholder [1, 1, 1] that the rest of the forward
        ignores."""
        if self.targets is None:
            return self.plain(input)
        hidden = input  # [B, T, H]
        if hidden.shape[:2] != self.targets.shape:
            raise RunError(
                "LS3095", f"{KEY}: the head of this model receives other positions than those of the targets{OUT}"
            )
        labels = self.targets.flatten()
        places = host_facts.facts(self.targets, TargetPlaces)
        rows = (labels >= 0).nonzero().flatten() if places is None else places.index  # nonzero synchronizes with CUDA
        states, labels = hidden.flatten(0, 1), labels[rows]

        def placed(tensor: Tensor) -> Tensor:
            """Scatter values to the positions with a target, 0 elsewhere: [B, T, ...]."""
            every = tensor.new_zeros(len(states), *tensor.shape[1:]).index_copy_(0, rows, tensor)
            return every.view(*hidden.shape[:2], *tensor.shape[1:])

        if not self.head.training:
            self.scores = placed(_scores(states[rows], labels, self.plain, self.finish, self.chunk))
            return self.scores.new_zeros(1, 1, 1)
        weight, bias = self.head.weight, self.head.bias
        how = (self.finish, self.chunk, self.smoothing, _compute_dtype(states))
        loss, each = _Loss.apply(states, rows, labels, weight, bias, how)
        self.scores = placed(each)
        return loss.view(1, 1, 1)


def _compute_dtype(states: Tensor) -> torch.dtype:
    """Dtype of the head's matrix product: autocast's if enabled, else that of the head's inputs (a frozen bfloat16
    weight is cast up)."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


class _Loss(torch.autograd.Function):
    """Sum of the cross-entropies of some rows of `states` [N, H], float32 scalar; and each of them, without gradient:
    [n].

    Matrix products use the compute dtype, and their logits are rounded to it, as under autocast. Softmax, loss and the
    sums over chunks of the gradients of weight and bias, in chunk order, are float32."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, rows: Tensor, targets: Tensor, weight: Tensor, bias: Any, how: Any
    ) -> tuple[Tensor, Tensor]:
        finish, size, smoothing, dtype = how
        needs_grad = ctx.needs_input_grad
        used = states[rows].to(dtype)  # [n, H]
        with torch.autocast(weight.device.type, enabled=False):
            missing = head_padding.missing_rows(len(weight), dtype, weight.device)
            matrix = pad(weight.to(dtype), (0, 0, 0, missing)) if missing else weight.to(dtype)
            vector = None if bias is None else bias.to(dtype)
            if vector is not None and missing:
                vector = pad(vector, (0, missing))
            to_states = torch.zeros_like(states) if needs_grad[0] else None
            to_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad[3] else None
            to_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_grad[4] else None
            losses = [states.new_zeros(0, dtype=torch.float32)]
            for start in range(0, len(rows), size):
                part, labels = used[start : start + size], targets[start : start + size]
                logits = linear(part, matrix, vector)[:, : len(weight)].float()  # [n, V]
                loss, slope = _losses(logits, labels, finish, smoothing)  # slope: in the memory of logits
                losses.append(loss)
                if to_bias is not None:
                    to_bias += slope.sum(0)
                slope = pad(slope.to(dtype), (0, missing)) if missing else slope.to(dtype)
                if to_states is not None:
                    to_states[rows[start : start + size]] = (slope @ matrix).to(states.dtype)
                if to_weight is None:
                    continue
                if dtype == torch.float32:
                    to_weight.addmm_(slope.t(), part)
                else:
                    to_weight += (slope.t() @ part)[: len(weight)]
        ctx.gradients, ctx.dtypes = (
            (to_states, to_weight, to_bias),
            (weight.dtype, None if bias is None else bias.dtype),
        )
        each = torch.cat(losses)
        ctx.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_each: None = None) -> Any:
        (states, weight, bias), ctx.gradients = ctx.gradients, None  # freed early: backward runs once
        for each in (states, weight, bias):
            if each is not None:
                each *= gradient
        weight = None if weight is None else weight.to(ctx.dtypes[0])
        return states, None, None, weight, None if bias is None else bias.to(ctx.dtypes[1]), None


def _losses(logits: Tensor, targets: Tensor, finish: Finish, smoothing: float) -> tuple[Tensor, Tensor]:
    """Cross-entropies [n] and their gradients with respect to the head's logits [n, V], float32. The gradients
    overwrite the logits."""
    logits = finish(logits)
    capped = logits.clone() if finish.cap is not None else None
    places = targets[:, None]
    logits -= logits.amax(1, keepdim=True)
    right = logits.gather(1, places).squeeze(1)
    mean = logits.mean(1) if smoothing else right
    sums = logits.exp_().sum(1, keepdim=True)  # [n, 1]
    losses = sums.squeeze(1).log() - (1 - smoothing) * right - smoothing * mean
    slope = logits.div_(sums)
    if smoothing:
        slope -= smoothing / slope.shape[1]
    slope.scatter_add_(1, places, torch.full_like(sums, smoothing - 1.0))
    if capped is not None and finish.cap is not None:
        slope *= 1 - (capped.div_(finish.cap)).square_()
    return losses, slope.mul_(finish.scale) if finish.scale != 1.0 else slope


def _scores(states: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], finish: Finish, size: int) -> Tensor:
    """Per row, the cross-entropy and 1 if the target is the most likely token: float32 [n, 2]."""
    chunks = [torch.zeros(0, 2, device=states.device)]
    for start in range(0, len(states), size):
        part, labels = states[start : start + size], targets[start : start + size]
        logits = finish(head(part).float())
        loss = nn.functional.cross_entropy(logits, labels, reduction="none")
        chunks.append(torch.stack([loss, (logits.argmax(1) == labels).float()], 1))
    return torch.cat(chunks)


class _ValuesOfNothing(TorchDispatchMode):
    """Mode in which reading a number from a meta tensor yields 1, so that masks checked by a model hide nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def agree(model: Any, head: nn.Linear, finish: Finish) -> None:
    """Compare `finish` with what the model does to random logits (on the CPU if the model is on the meta device).

    Errors: `RunError` if they differ; on the meta device also any error raised because values are missing."""
    leaves: list[Tensor] = []
    empty = head.weight.device.type == "meta"
    if empty and finish.bias is not None:
        finish.biased.final_logits_bias = torch.zeros(finish.biased.final_logits_bias.shape)

    def instead(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        drawn = 40 * torch.rand(output.shape, generator=torch.Generator().manual_seed(0)) - 20
        leaves.append((drawn.to(output.dtype) if empty else drawn.to(output)).requires_grad_())
        return leaves[-1]

    ids = torch.tensor([[0, 1] * 4], device=head.weight.device)  # Funnel pools tokens and needs several
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    training = model.training
    hook = head.register_forward_hook(instead)
    try:
        with torch.random.fork_rng(devices=[]):
            logits = model.eval()(**inputs).logits
    except RuntimeError:
        if not (empty and leaves):
            raise
        leaves.clear()  # weights without values (meta) are used after the head
    finally:
        hook.remove()
        model.train(training)
    if len(leaves) == 1 and leaves[0].shape == logits.shape == (*ids.shape, head.out_features) and logits.requires_grad:
        trained = [p for p in model.parameters() if p.requires_grad]  # none of them may be used after the head
        others = torch.autograd.grad(logits.sum(), trained, allow_unused=True) if trained else ()
        near = 1e-5 if logits.dtype == torch.float32 else 2e-2
        with torch.no_grad():
            probe = finish(leaves[0][0].float().clone())
        if all(g is None for g in others) and torch.allclose(probe, logits[0].float(), rtol=near, atol=near):
            return
    raise RunError(
        "LS3097",
        f"{KEY}: a {model.config.model_type} changes its logits in an unknown way before the loss, so the loss "
        f"would differ{OUT}",
    )


def scored(scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Sum the evaluation outputs of `install` [B, T, 2] over the targets [B, T]."""
    real = targets >= 0
    loss, right = scores.double().sum((0, 1))
    return {"loss": loss, "examples": real.any(1).sum().double(), "targets": real.sum().double(), "right": right}
