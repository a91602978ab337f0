"""Rules on token ids, their labels and their attention mask, at the first calls of a model.

Evidence: counts that the tracer takes of inputs (`tracer/inputs.py`), and the loss functions in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, WRONG, Finding, weakened

Look = tuple[Step, dict[str, Any], dict[str, Any]]  # step, token counts of a call, its loss function


def tokens(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report labels and masks that contradict the tokens of a call."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if s.tokens]
    looks = [
        (step, look, function)
        for step in steps
        if len(step.tokens) == len(step.micro or ()) == len(step.objectives or ())
        for look, function in zip(step.tokens, step.objectives, strict=True)
    ]
    yield from _shifted_twice(looks, rank.models)
    yield from _copied(looks)
    yield from _padded(looks)
    yield from _mask(steps)
    yield from _ends(steps)
    yield from _attention(rank, optimizer)


def _shifted_twice(looks: list[Look], models: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Report labels that are already the next tokens, passed to a model that shifts them again.

    The model shifts if its loss has exactly as many targets as there are labels after the first position of each row.
    The output at a token is then compared with the token after the next one, which no correct causal language model
    does: a script that shifts labels uses the outputs and its own loss, which has a target at the first position. The
    finding is proved only for models of transformers; other models may skip the first position."""
    shifted = [
        (s, t, f)
        for s, t, f in looks
        if t["first"] > 0 and f.get("targets") == t["labels"] - t["first"] and t["next"] >= 0.99 * f["targets"] > 0
    ]
    own = [t for _, t, _ in shifted if t["equal"] >= 0.5 * t["labels"]]
    if len(shifted) < max(PATIENCE, len(looks)) or own:
        return
    step, look, function = shifted[0]
    what = (
        f"step {step.step}: {look['next']} of {look['labels']} labels equal the token after their position, and the "
        f"loss has {function['targets']} targets: the model also shifts labels by one position"
    )
    cause = "labels are shifted twice, so the model learns the token after the next one: pass labels=input_ids"
    shifting = bool(models) and all(m.get("origin") in ("transformers", "peft") for m in models)
    otherwise, decides = "a loss that skips the first position", "which outputs the model compares with labels"
    yield weakened(Finding("labels-shifted-twice", what, cause, step.step), shifting, otherwise, decides)


def _copied(looks: list[Look]) -> Iterator[Finding]:
    """Report a loss whose targets are the model's input tokens, each at its own position.

    An autoencoder is trained like that, so the finding is never proved."""
    equal = [(s, t) for s, t, f in looks if (f.get("hashes") or [None])[0] == f"{t['hash'] & (1 << 64) - 1:016x}"]
    if len(equal) < max(PATIENCE, len(looks)):
        return
    step, look = equal[0]
    what = f"step {step.step}: the {look['count']} targets of the loss are the model's input tokens, not shifted"
    cause = "a language model learns to copy its input: compare logits[:, :-1] with ids[:, 1:]"
    otherwise, decides = "an autoencoder", "whether an output sees the token at its own position"
    yield Finding("labels-not-shifted", what, cause, step.step, SUSPICIOUS, otherwise, decides)


def _padded(looks: list[Look]) -> Iterator[Finding]:
    """Report a language model that learns padding: where attention_mask is 0, after another such position, labels are
    the input tokens, and the loss counts them.

    The mask declares these tokens as no content, but the loss trains to predict each from another padding token. The
    finding is proved if the model shifts labels, as a language model does. Another model may reproduce its whole input,
    and tokens inside a text may be hidden from attention and predicted. The first padding token after a text may be its
    end token, and is not counted."""
    rows = [
        (s, t, f)
        for s, t, f in looks
        if t.get("padded") and t["equal"] >= 0.5 * t["labels"] and f.get("targets") in (t["labels"], _behind(t))
    ]
    if len({s.step for s, _, _ in rows}) < PATIENCE:
        return
    step, look, function = rows[0]
    what = f"step {step.step}: {look['padded']} of the loss's {function['targets']} targets are at positions where "
    what += "attention_mask is 0, after another such position: the model learns to predict padding from padding"
    cause = "give padded positions the label -100: labels.masked_fill(attention_mask == 0, -100)"
    proved = all(t["first"] > 0 and f["targets"] == _behind(t) and not t["holes"] for _, t, f in rows)
    otherwise = "a model that reproduces its whole input, or tokens that are masked at random"
    decides = "whether the model should predict padding"
    yield weakened(Finding("padding-learned", what, cause, step.step), proved, otherwise, decides)


def _behind(look: Mapping[str, Any]) -> int:
    return int(look["labels"] - look["first"])


def _mask(steps: list[Step]) -> Iterator[Finding]:
    """Report an attention mask with zeros between ones, and ones at what looks like padding: it masks another token
    than the padding token.

    A token that is hidden on purpose looks the same if rows end in equal tokens."""
    rows = [(s, t) for s in steps for t in s.tokens if t["holes"] and t["kept"] > 1]
    if len(rows) < PATIENCE:
        return
    step, look = rows[0]
    what = (
        f"step {step.step}: attention_mask is 0 at {look['holes']} tokens inside rows, but 1 at {look['kept']} equal "
        "tokens at the ends of rows, which look like padding"
    )
    cause = "the mask is made from another token id than that of padding: use the tokenizer's mask or pad_token_id"
    otherwise, decides = (
        "tokens that are hidden on purpose, in rows that end in equal tokens",
        "the token id of padding",
    )
    yield Finding("padding-seen", what, cause, step.step, SUSPICIOUS, otherwise, decides)


def _ends(steps: list[Step]) -> Iterator[Finding]:
    """Report rows whose last token is content by the mask but padding by the labels, because it equals the padding
    token: it is never learned.

    A correct program that excludes the end of a text also removes it from the input, or masks it there. The finding
    requires that no row learns the token, and that each row learns the token before it."""
    rows = [(s, t) for s in steps for t in s.tokens if t.get("ends")]
    if len(rows) < PATIENCE or any(t["unlearned"] < t["ends"] or t["learned"] for _, t in rows):
        return
    step, look = rows[0]
    what = (
        f"step {step.step}: {look['ends']} rows end in the token that is also used as padding; attention_mask "
        "is 1 there, "
    )
    what += "but its label is -100, and no label is this token: the model never learns the end of a text"
    cause = "use a separate padding token, or make labels from attention_mask instead of the token"
    yield Finding("end-not-learned", what, cause, step.step, WRONG)


def _attention(rank: Rank, optimizer: int) -> Iterator[Finding]:
    """Report targets that the model can read from its input, and padding masks that are inverted.

    A position that attends to the next token in every attention of the model, and whose target is this token, has
    nothing to predict. Prefixes, encoders and permutations have no targets at such positions. No correct program uses a
    row whose tokens attend only to its padding."""
    looks = [(s, a) for _, s in sorted(rank.steps[optimizer].items()) for a in s.attention or ()]
    if len(looks) < PATIENCE:
        return
    step, look = looks[0]
    shifted = [a["targets"] > 0 and a["next"] >= 0.99 * a["targets"] for _, a in looks]
    if all(shifted) and all(a["attentions"] and a["answered"] == a["attentions"] for _, a in looks):
        what = f"step {step.step}: {look['next']} of {look['targets']} targets are the next token of the input, and "
        what += f"their positions attend to it in all {look['attentions']} attentions: the answer is in the input"
        cause = "make attention causal: is_causal=True, or a causal mask that has an effect"
        yield Finding("future-seen", what, cause, step.step, WRONG)
    padded = [(s, a) for s, a in looks if a["padded"]]
    if len(padded) >= PATIENCE and all(a["inverted"] == a["padded"] for _, a in padded):
        step, look = padded[0]
        what = f"step {step.step}: in {look['inverted']} rows that end in padding, attention sees only the padding and "
        what += "none of the tokens before it"
        cause = "the mask is inverted: torch's key_padding_mask is True at padding, attention_mask is 1 at tokens"
        yield Finding("mask-inverted", what, cause, step.step, WRONG)
