"""Builds small models from a run's config, and batches to run them on, for trials of a model family.

In: a config, and the head of its model. Out: the config with narrow layers and few tokens, its model with fixed
weights, examples of every shape, and the results of forward and backward.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lockstep.config.run import RunError
from lockstep.config.sections import ModelSection
from lockstep.distributed.randomness import seed_libraries
from lockstep.tasks.models import adapters, heads, model_configs

T = TypeVar("T")
# Lengths of the examples of each trial batch, and of their decoder inputs. Attention has separate code paths for texts
# of equal length, for a single text, and for texts longer than `unpadded.SHORT`.
BATCHES = (
    ((11, 5, 8), (4, 13, 6)),
    ((9, 9, 9), (7, 7, 7)),
    ((10,), (6,)),
    ((1, 1), (1, 1)),
    ((1, 12, 3), (9, 1, 2)),
    ((70, 66, 81), (67, 82, 69)),
    ((72, 72), (68, 68)),
)
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")  # entries of configs, in tokens
NARROW_AND_WIDE = (4, 1000)  # windows shorter than most texts, and longer than all
PAD, START, END, TOKENS = 1, 3, 2, 60
FEWEST_POSITIONS, ROOM = 16, 128  # positions that the first batch needs, and that all batches need
LARGE = 1_000_000_000  # models with more parameters are not tried
NEAR = 1e-4  # tolerance, relative to the largest value


def small(section: ModelSection, head: str, config: Any, attention: str | None) -> nn.Module:
    """A small model of this config, dropout disabled. Errors: `RunError` if it is still large."""
    import transformers

    auto = getattr(transformers, heads.of(head).auto)
    options = {"attn_implementation": attention} if attention else {}
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(copy.deepcopy(config), **options).parameters())
    if size > LARGE:
        raise RunError("LS3180", f"it has {size / 1e6:.0f}M parameters")
    transformers.logging.set_verbosity_error()
    seed_libraries(0)
    model: nn.Module = auto.from_config(copy.deepcopy(config), **options)
    if section.adapter:
        model = adapters.wrap(section, model, head)
    return model.float().eval()


def examples(head: str, lengths: Sequence[int], targets: Sequence[int]) -> dict[str, Tensor]:
    """Right-padded examples of these lengths, with decoder inputs for seq2seq models."""
    draw = torch.Generator().manual_seed(0)

    def batch(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()  # [B, T]
        ids = torch.randint(5, TOKENS, mask.shape, generator=draw)
        ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = END
        return ids * mask + PAD * (1 - mask), mask

    ids, mask = batch(lengths)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if head == "seq2seq":
        read, mask = batch(targets)
        inputs |= {"decoder_input_ids": read, "decoder_attention_mask": mask}
    return inputs


def typed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add token types of text pairs: 1 from the third token on."""
    return {"token_type_ids": inputs["attention_mask"] * (torch.arange(inputs["input_ids"].shape[1]) >= 2)}


def smaller(config: Any, head: str) -> Iterator[Any]:
    """Yield the config with narrow layers, then with its own widths, both with a small vocabulary. All layers are kept
    because layer types may alternate."""
    for narrow in (True, False):
        small = copy.deepcopy(config)
        try:
            for part in model_configs.texts(small) if narrow else ():
                _narrow(part)
            yield _prepared(small, head)
        except Exception:  # a config that rejects the change
            continue


def tried(config: Any, head: str, attempt: Callable[[Any], T]) -> T:
    """Return the result of `attempt` for the first of the `smaller` configs on which it succeeds: narrowed entries may
    be inconsistent. Leaves torch's random state unchanged. Errors: the last error that `attempt` raised."""
    failure: Exception = ValueError("no small config of this family can be built")
    with torch.random.fork_rng([]):
        for variant in smaller(config, head):
            try:
                return attempt(variant)
            except Exception as error:
                failure = error
    raise failure


def windows(config: Any) -> Iterator[Any]:
    """Yield the config and, if its attention has windows, copies with narrow and with wide windows."""
    yield config
    inside = [(part, name) for part in model_configs.texts(config) for name in WINDOWS]
    if any(isinstance(model_configs.entry(part, name), int) for part, name in inside):
        for size in NARROW_AND_WIDE:
            other = copy.deepcopy(config)
            for part in model_configs.texts(other):
                for name in WINDOWS:
                    if isinstance(model_configs.entry(part, name), int):
                        setattr(part, name, size)
            yield other


def _narrow(config: Any) -> None:
    """Set four heads of size 16, in place; four key-value heads, or two if they are shared."""
    heads, shared = (model_configs.entry(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    narrow = {"num_attention_heads": 4, "hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    narrow |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    narrow |= {f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")}
    narrow |= {"num_key_value_heads": 4 if shared == heads else 2, "moe_intermediate_size": 32}
    for name, value in narrow.items():
        if isinstance(model_configs.entry(config, name), int):
            setattr(config, name, value)


def _prepared(config: Any, head: str) -> Any:
    """Set the vocabulary, special tokens and positions of `examples`, and disable the cache as in training."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    for part in model_configs.texts(config):
        part.vocab_size, part.use_cache = TOKENS, False
        positions = model_configs.entry(part, "max_position_embeddings")
        if isinstance(positions, int) and 0 < positions < FEWEST_POSITIONS:  # more rows of the same table
            part.max_position_embeddings = ROOM
        for name, token in (("pad", PAD), ("bos", START), ("eos", END), ("decoder_start", START)):
            setattr(part, f"{name}_token_id", token)
        for name in ("decoder_vocab_size", "vocab_size_per_layer_input"):
            if model_configs.entry(part, name) is not None:
                setattr(part, name, TOKENS)
    if head == "causal" and config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        config.is_decoder = True  # as in the task `language_modeling`
    return config


def computed(model: Any, head: str, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Logits of real tokens (or of examples), and the gradient of each parameter."""
    logits = model(**inputs)[0]  # or hidden states of a model without a head
    if head != "classification":
        real = inputs["decoder_attention_mask" if head == "seq2seq" else "attention_mask"].bool()
        logits = logits[real]
    return logits.detach(), gradients(model, logits)


def gradients(model: nn.Module, logits: Tensor) -> list[Tensor | None]:
    """Gradient of a weighted sum of logits with respect to each parameter."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel()).sin().view_as(logits)
    (logits.float() * weights).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@contextmanager
def counted(model: nn.Module, tokens: Sequence[int]) -> Iterator[list[str]]:
    """Record the blocks that receive unpadded examples, [1, one of `tokens`, ...], while the context is active."""
    from lockstep.tasks.models import unpadded  # with transformers' models

    blocks: list[str] = []

    def count(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shapes = [value.shape[:2] for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any((1, n) in shapes for n in tokens):
            blocks.append(type(block).__name__)

    inside = [block for stack in unpadded.stacks(model) for block in stack]
    hooks = [block.register_forward_pre_hook(count, with_kwargs=True) for block in inside]
    try:
        yield blocks
    finally:
        for hook in hooks:
            hook.remove()


def near(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    """Whether two lists of tensors are equal within rounding, relative to the largest value."""
    if [one is None for one in ours] != [other is None for other in theirs]:
        return False
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one is not None and other is not None]
    largest = _largest([one for one, _ in pairs])
    return _largest([one - other for one, other in pairs]) <= NEAR * largest < math.inf


def _largest(tensors: Sequence[Tensor]) -> float:
    """Largest absolute value; infinite if any value is not finite."""
    return max((float(t.abs().max().double().nan_to_num(nan=math.inf)) for t in tensors if t.numel()), default=0.0)


def brief(error: Exception) -> str:
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return message if len(message) <= 120 else f"{message[:117]}..."
