"""Where in a text an answer begins and ends: a model's two numbers for each token, the best span of them, and SQuAD's
scores of what stands there.

In: a model of transformers with a head for questions. Out: the same model, whose output has both numbers as `logits`,
float32 [B, T, 2], least where there is padding.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.data.qa_features import TokenWindow


def install(model: nn.Module) -> nn.Module:
    """The model, which gives both numbers at once."""
    model.register_forward_hook(_both, with_kwargs=True)
    return model


def _both(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    from transformers.modeling_outputs import TokenClassifierOutput

    return TokenClassifierOutput(logits=numbers(output, kwargs["attention_mask"]))


def numbers(output: Any, mask: Tensor) -> Tensor:
    """For each token the scores of the answer's beginning and of its end."""
    import torch

    logits = torch.stack([output.start_logits, output.end_logits], -1).float()
    return logits.masked_fill(mask.unsqueeze(-1) == 0, torch.finfo(torch.float32).min)


@dataclass(frozen=True)
class Span:
    """An answer: where it stands in its context. Both 0: there is none."""

    start: int = 0
    end: int = 0


def best(logits: Tensor, windows: Sequence[Sequence[TokenWindow]], tokens: int, unanswerable: bool) -> list[Span]:
    """The likeliest answer of each question, of at most so many tokens: the span within a window's context whose two
    numbers have the greatest sum; none, where that is less than the least sum of any window for its first token (as of
    transformers' scripts for SQuAD 2, with their threshold of 0). `logits` [R, T, 2] are of all windows in order."""
    import torch

    flat = [window for each in windows for window in each]
    place = torch.arange(logits.shape[1], device=logits.device)
    first, last = (torch.tensor([getattr(w, name) for w in flat], device=logits.device) for name in ("first", "last"))
    inside = (place >= first[:, None]) & (place <= last[:, None])  # [R, T]
    starts, ends = (logits[: len(flat), :, side].masked_fill(~inside, -torch.inf) for side in (0, 1))
    scores, froms, lengths = torch.full_like(starts[:, 0], -torch.inf), torch.zeros_like(first), torch.zeros_like(first)
    for length in range(min(tokens, logits.shape[1])):
        score, where = (starts[:, : logits.shape[1] - length] + ends[:, length:]).max(1)
        better = score > scores
        scores, froms = torch.where(better, score, scores), torch.where(better, where, froms)
        lengths = lengths.masked_fill(better, length)
    none = logits[: len(flat), 0].sum(-1).tolist()
    values, begin, size = scores.tolist(), froms.tolist(), lengths.tolist()
    spans, read = [], 0
    for each in windows:
        here = range(read, read + len(each))
        chosen = max(here, key=values.__getitem__)
        empty = unanswerable and min(none[r] for r in here) > values[chosen]
        window = flat[chosen]
        span = Span(window.begins[begin[chosen]], window.ends[begin[chosen] + size[chosen]])
        spans.append(Span() if empty else span)
        read += len(each)
    return spans


# -- SQuAD's scores (Rajpurkar et al. 2016, arXiv:1606.05250; its evaluate-v1.1.py and evaluate-v2.0.py) ---------------


def normal(text: str) -> str:
    """Lower case, without punctuation, articles and more than one space."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def scores(answer: str, right: Sequence[str]) -> tuple[float, float]:
    """Whether it is one of the right answers, and the greatest F1 of its words beside one of them; of a question
    without an answer both are 1 for none."""
    one, others = normal(answer), [each for each in map(normal, right) if each] or [""]
    return max(float(one == other) for other in others), max(_f1(one.split(), other.split()) for other in others)


def _f1(one: list[str], other: list[str]) -> float:
    if not one or not other:
        return float(one == other)
    both = (Counter(one) & Counter(other)).total()
    precision, recall = both / len(one), both / len(other)
    return 2 * precision * recall / (precision + recall) if both else 0.0
