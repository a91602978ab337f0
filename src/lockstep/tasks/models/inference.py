"""Answers of an exported model to many texts, and decoding: what a model writes, one token after another.

In: rows of texts, one or two each, asked in batches of like length. Out: an answer a row, in the order of the rows.

Decoding by repeated `forward` works wherever a strategy has one; transformers' own `generate` (KV cache, beams,
sampling) where a rank can run the whole model. Out: the new tokens, int64 [B, N], `pad` after each row's end token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from lockstep.data import lm_documents

AT_ONCE = 32  # rows of a batch
SORTED = 16  # batches whose rows are sorted by length together

Row = Sequence[str]  # a text, or the two of a pair


def answers(
    rows: Sequence[Row], answer: Callable[[list[Row]], list[dict[str, Any]]], at_once: int = AT_ONCE
) -> Iterator[dict[str, Any]]:
    """The answer to each row."""
    for start in range(0, len(rows), at_once * SORTED):
        window = rows[start : start + at_once * SORTED]
        order = sorted(range(len(window)), key=lambda place: sum(map(len, window[place])))
        by_place: dict[int, dict[str, Any]] = {}
        for first in range(0, len(order), at_once):
            places = order[first : first + at_once]
            with torch.no_grad():
                results = answer([window[place] for place in places])
            by_place |= dict(zip(places, results, strict=True))
        yield from (by_place[place] for place in range(len(window)))


def padded(encoded: Sequence[dict[str, list[int]]], pads: dict[str, int]) -> dict[str, Tensor]:
    """Encoded texts as a batch, padded on the right as in training: name -> int64 [B, T], `attention_mask` beside."""
    longest = max(1, *(len(each["input_ids"]) for each in encoded))
    mask = [[1] * len(each["input_ids"]) for each in encoded]
    columns = {name: [each[name] for each in encoded] for name in pads if name in encoded[0]}
    columns["attention_mask"] = mask
    return {
        name: torch.tensor([row + [pads.get(name, 0)] * (longest - len(row)) for row in rows])
        for name, rows in columns.items()
    }


@dataclass(frozen=True)
class Decoding:
    """Parameters of decoding."""

    new_tokens: int  # at most
    pad: int
    end: int | None  # the token after which nothing follows
    start: int | None = None  # the decoder's first token; None: the model continues its input
    beams: int = 1  # 1: greedy, or drawn where there is a temperature
    temperature: float = 0.0  # 0: the likeliest token
    seed: int = 0  # of what is drawn


def by_forward(
    forward: Callable[[Mapping[str, Tensor]], Tensor],
    unfinished: Callable[[Tensor], Tensor],
    inputs: Mapping[str, Tensor],
    how: Decoding,
) -> Tensor:
    """Greedy decoding where only `forward` is there: the whole text goes through the model for every token.

    Collective: all ranks take the same number of turns, because `unfinished` sums each rank's open rows over the ranks;
    who has written all it may goes on computing, for the others' sake.
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
            done |= (token == how.end) | (turn + 1 == how.new_tokens)
        if int(unfinished((~done).sum())) == 0:  # the host waits for the device here
            break
    return tokens


def by_transformers(model: Any, inputs: Mapping[str, Tensor], how: Decoding, synced: bool = False) -> Tensor:
    """Decode with `model.generate`. `synced`: collective, all ranks do as many forwards as the slowest (shards)."""
    options: dict[str, Any] = {
        "max_new_tokens": how.new_tokens,
        "num_beams": how.beams,
        "do_sample": how.temperature > 0,
        "pad_token_id": how.pad,
        "eos_token_id": how.end,
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
    tokens = model.generate(**model_inputs, **options)[:, skipped:]
    torch.set_rng_state(state)
    return torch.nn.functional.pad(tokens, (0, how.new_tokens - tokens.shape[1]), value=how.pad)


def _to_the_right(ids: Tensor, mask: Tensor | None, pad: int) -> dict[str, Tensor]:
    """Rows padded on the right -> on the left, where the next token follows the last one."""
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
    template: Callable[[str], str] | None,
    most: int,
    tokens: int,
    temperature: float = 0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """What is `written` by an exported causal language model after each text, put into the chat template if there is
    one."""
    spoken = template is not None

    def answer(rows: list[Row]) -> list[dict[str, Any]]:
        ((text,),) = rows  # each has room of its own to write, and draws of its own
        text = template(text) if template else text
        return [{"written": continuation(model, tokenizer, text, spoken, most, tokens, temperature, seed)}]

    return answers(rows, answer, at_once=1)


def continuation(
    model: Any, tokenizer: Any, text: str, spoken: bool, most: int, tokens: int, temperature: float = 0, seed: int = 0
) -> str:
    """What an exported model writes after a text: `tokens` at most, `most` with the text, whose beginning is left out
    where it is longer. `spoken`: a chat template has put the special tokens there."""
    end = lm_documents.end_of(tokenizer)
    ids = tokenizer(text, verbose=False, add_special_tokens=not spoken)["input_ids"]
    ids = ids[:-1] if ids and ids[-1] == end and not spoken else ids  # of raw text, which is to go on
    ids = ids[-(most - 1) :] or [lm_documents.end_or_padding(tokenizer)]
    room = min(tokens, most - len(ids))
    how = Decoding(room, tokenizer.pad_token_id, end, temperature=temperature, seed=seed)
    (written,) = by_transformers(model, {"input_ids": torch.tensor([ids])}, how).tolist()
    return str(tokenizer.decode(written, skip_special_tokens=True))
