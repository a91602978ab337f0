"""Batched inference with an exported model, and decoding token by token.

In: rows of one or two texts, batched by similar length. Out: one answer per row, in row order.

Greedy decoding by repeated `forward` works under every strategy; transformers' `generate` (KV cache, beams, sampling)
needs the whole model on one rank. Out: the new tokens, int64 [B, N], `pad` after each row's end token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lockstep.data import conversations, lm_documents
from lockstep.data.conversations import Question, Writing

AT_ONCE = 32  # rows of a batch
SORTED = 16  # batches per window of rows sorted by length

Row = Sequence[Any]  # a text, the two of a pair, or a `Question`


def answers(
    rows: Sequence[Row], answer: Callable[[list[Row]], list[dict[str, Any]]], at_once: int = AT_ONCE
) -> Iterator[dict[str, Any]]:
    """Yield the answer to each row, in order."""
    for start in range(0, len(rows), at_once * SORTED):
        window = rows[start : start + at_once * SORTED]
        order = sorted(range(len(window)), key=lambda place: sum(len(str(each)) for each in window[place]))
        by_place: dict[int, dict[str, Any]] = {}
        for first in range(0, len(order), at_once):
            places = order[first : first + at_once]
            with torch.no_grad():
                results = answer([window[place] for place in places])
            by_place |= dict(zip(places, results, strict=True))
        yield from (by_place[place] for place in range(len(window)))


def padded(encoded: Sequence[dict[str, list[int]]], pads: dict[str, int], left: bool = False) -> dict[str, Tensor]:
    """Batch encoded texts, padded on the right, or `left`, as in training: name -> int64 [B, T], with
    `attention_mask`."""
    longest = max(1, *(len(each["input_ids"]) for each in encoded))
    mask = [[1] * len(each["input_ids"]) for each in encoded]
    columns = {name: [each[name] for each in encoded] for name in pads if name in encoded[0]}
    columns["attention_mask"] = mask
    missing = {name: [[pads.get(name, 0)] * (longest - len(row)) for row in rows] for name, rows in columns.items()}
    return {
        name: torch.tensor([more + row if left else row + more for row, more in zip(rows, missing[name], strict=True)])
        for name, rows in columns.items()
    }


@dataclass(frozen=True)
class Decoding:
    """Decoding parameters."""

    new_tokens: int  # at most
    pad: int
    end: int | None  # end token
    start: int | None = None  # the decoder's first token; None: the model continues its input
    beams: int = 1  # 1: greedy, or sampling if temperature > 0
    temperature: float = 0.0  # 0: greedy
    seed: int = 0  # for sampling
    turn_end: int | None = None  # another end token, of a conversation's turn

    @property
    def ends(self) -> list[int]:
        return [token for token in (self.end, self.turn_end) if token is not None]


def by_forward(
    forward: Callable[[Mapping[str, Tensor]], Tensor],
    unfinished: Callable[[Tensor], Tensor],
    inputs: Mapping[str, Tensor],
    how: Decoding,
) -> Tensor:
    """Decode greedily with `forward` alone: the whole text goes through the model for every token.

    Collective: `unfinished` sums the unfinished rows over all ranks, so all ranks run the same number of iterations; a
    rank whose rows are finished keeps computing until then.
    """
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    rows = torch.arange(len(ids), device=ids.device)
    lengths = mask.sum(1) if how.start is None else torch.ones_like(rows)  # [B] of what the decoder reads
    prefix = ids * mask + how.pad * (1 - mask) if how.start is None else torch.full_like(ids[:, :1], how.start)
    grown = torch.nn.functional.pad(prefix, (0, how.new_tokens), value=how.pad)  # [B, T+N]
    tokens = torch.full_like(grown[:, : how.new_tokens], how.pad)  # [B, N]
    done = torch.zeros_like(rows, dtype=torch.bool)
    for turn in count():
        read = grown[:, : min(prefix.shape[1] + turn, grown.shape[1] - 1)]
        if how.start is None:
            own = (torch.arange(read.shape[1], device=ids.device) < lengths[:, None]).to(ids.dtype)
            logits = forward({"input_ids": read, "attention_mask": own})
        else:
            logits = forward({**inputs, "decoder_input_ids": read})
        if turn < how.new_tokens:
            token = logits[rows, lengths - 1].argmax(-1).masked_fill(done, how.pad)
            tokens[:, turn] = token
            grown[rows, lengths] = token
            lengths = lengths + (~done).long()
            done |= turn + 1 == how.new_tokens
            for end in how.ends:
                done |= token == end
        if int(unfinished((~done).sum())) == 0:  # synchronizes with the device
            break
    return tokens


def by_transformers(model: Any, inputs: Mapping[str, Tensor], how: Decoding, synced: bool = False) -> Tensor:
    """Decode with `model.generate`, by the parameters in `how` instead of the model's generation config. `synced`:
    collective; all ranks run as many forwards as the slowest (sharded models)."""
    options: dict[str, Any] = {
        "max_new_tokens": how.new_tokens,
        "num_beams": how.beams,
        "do_sample": how.temperature > 0,
        "pad_token_id": how.pad,
        "eos_token_id": how.ends or None,
        "use_cache": True,
        "synced_gpus": synced,
    }
    if how.temperature > 0:
        options |= {"temperature": how.temperature, "top_k": 0}
    model_inputs = {k: v for k, v in inputs.items() if k in ("input_ids", "attention_mask")}
    if how.start is not None:
        options["decoder_start_token_id"] = how.start
        skipped = 1
    else:
        model_inputs = _to_the_right(model_inputs["input_ids"], model_inputs.get("attention_mask"), how.pad)
        skipped = model_inputs["input_ids"].shape[1]
    state = torch.get_rng_state()
    if how.temperature > 0:
        torch.manual_seed(how.seed)
    with _without_generation_config(model):
        tokens = model.generate(**model_inputs, **options)[:, skipped:]
    torch.set_rng_state(state)
    return torch.nn.functional.pad(tokens, (0, how.new_tokens - tokens.shape[1]), value=how.pad)


@contextmanager
def _without_generation_config(model: Any) -> Iterator[None]:
    """Ignore a pretrained model's generation config (BART: no repeated n-grams, an end token at the limit), so that all
    strategies generate the same text, also those that decode by `forward`."""
    from transformers import GenerationConfig

    holders = [module for module in model.modules() if "generation_config" in vars(module)]  # peft wraps a model
    own = [module.generation_config for module in holders]
    for module in holders:
        module.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for module, config in zip(holders, own, strict=True):
            module.generation_config = config


def _to_the_right(ids: Tensor, mask: Tensor | None, pad: int) -> dict[str, Tensor]:
    """Convert right-padded rows to left padding, so that the next token follows the last one."""
    if mask is None or bool(mask.all()):
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    width = ids.shape[1]
    place = torch.arange(width, device=ids.device) - (width - mask.sum(1, keepdim=True))  # [B, T], < 0 where padded
    real = place >= 0
    aligned_ids = ids.gather(1, place.clamp(min=0)).masked_fill(~real, pad)
    return {"input_ids": aligned_ids, "attention_mask": real.to(ids.dtype)}


def continuations(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Row],
    talks: Writing | None,
    most: int,
    tokens: int,
    temperature: float = 0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Generate a continuation (`written`) of each text with an exported causal language model. `talks`: of
    conversations, which the model answers."""
    by_template = talks
    if talks is None and conversations.require_template(tokenizer, rows):
        by_template = Writing("messages", tools="tools")
    other = None if by_template is None else conversations.turn_end(tokenizer, by_template)

    def answer(rows: list[Row]) -> list[dict[str, Any]]:
        ((text,),) = rows  # one at a time: each has its own length limit and random draws
        spoken = talks is not None or isinstance(text, Question)
        if spoken and by_template is not None:
            text = conversations.prompt_text(tokenizer, by_template, text)
        return [{"written": continuation(model, tokenizer, text, spoken, most, tokens, temperature, seed, other)}]

    return answers(rows, answer, at_once=1)


def continuation(
    model: Any,
    tokenizer: Any,
    text: str,
    spoken: bool,
    most: int,
    tokens: int,
    temperature: float = 0,
    seed: int = 0,
    turn_end: int | None = None,
) -> str:
    """Generate the continuation of a text: at most `tokens` new tokens, and `most` including the text, whose beginning
    is dropped if it is too long. `spoken`: the chat template has already added the special tokens."""
    end = lm_documents.end_of(tokenizer)
    ids = tokenizer(text, verbose=False, add_special_tokens=not spoken)["input_ids"]
    ids = ids[:-1] if ids and ids[-1] == end and not spoken else ids  # plain text is to be continued, not ended
    ids = ids[-(most - 1) :] or [lm_documents.end_or_padding(tokenizer)]
    room = min(tokens, most - len(ids))
    how = Decoding(room, tokenizer.pad_token_id, end, temperature=temperature, seed=seed, turn_end=turn_end)
    (written,) = by_transformers(model, {"input_ids": torch.tensor([ids])}, how).tolist()
    return str(tokenizer.decode(written, skip_special_tokens=True))
