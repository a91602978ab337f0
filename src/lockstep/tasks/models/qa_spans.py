"""Answer spans: start and end scores of each token, the best span, and SQuAD's scores of its text.

In: a transformers model with a question-answering head. Out: the same model, with start and end scores as `logits`,
float32 [B, T, 2], minimal at padding.
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
    """Make the model return start and end scores in one tensor."""
    model.register_forward_hook(_both, with_kwargs=True)
    return model


def _both(model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
    from transformers.modeling_outputs import TokenClassifierOutput

    return TokenClassifierOutput(logits=numbers(output, kwargs["attention_mask"]))


def numbers(output: Any, mask: Tensor) -> Tensor:
    """Start and end score of each token: [B, T, 2]."""
    import torch

    logits = torch.stack([output.start_logits, output.end_logits], -1).float()
    return logits.masked_fill(mask.unsqueeze(-1) == 0, torch.finfo(torch.float32).min)


@dataclass(frozen=True)
class Span:
    """Position of an answer in its context, in characters; both 0 if there is none."""

    start: int = 0
    end: int = 0


def best(logits: Tensor, windows: Sequence[Sequence[TokenWindow]], tokens: int, unanswerable: bool) -> list[Span]:
    """The most likely answer of each question: the span of at most `tokens` tokens in a window's context with the
    largest sum of start and end score.

    No answer if that sum is below the smallest first-token sum of any window (as in transformers' SQuAD 2 scripts,
    threshold 0). `logits` [R, T, 2]: all windows in order."""
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
    """Lower-case a text and remove punctuation, articles and repeated spaces."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def scores(answer: str, right: Sequence[str]) -> tuple[float, float]:
    """Exact match and the best word F1 against the correct answers; if there are none, both are 1 for an empty
    answer."""
    one, others = normal(answer), [each for each in map(normal, right) if each] or [""]
    return max(float(one == other) for other in others), max(_f1(one.split(), other.split()) for other in others)


def _f1(one: list[str], other: list[str]) -> float:
    if not one or not other:
        return float(one == other)
    both = (Counter(one) & Counter(other)).total()
    precision, recall = both / len(one), both / len(other)
    return 2 * precision * recall / (precision + recall) if both else 0.0
