"""Rules on token numbers, their labels and their mask, at the first calls of a model.

Evidence: counts that the tracer takes of inputs (`tracer/inputs.py`), beside the loss functions in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, WRONG, Finding, weakened

Look = tuple[Step, dict[str, Any], dict[str, Any]]  # a step with one call and one loss function: tokens, loss function


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
    """Report labels that are the next tokens already, given to a model that shifts them again.

    The model shifts, because its loss has exactly as many targets as there are labels behind the first position of
    each row. So the output at a token is compared with the token after the next one, which no right causal language
    model does: who shifts labels uses the outputs and a loss of his own, which has a target at the first position.
    Proved for models of transformers only: another one may leave out the first position."""
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
        f"step {step.step}: {look['next']} of {look['labels']} labels are the token after their position, and the loss "
        f"has {function['targets']} targets: the model shifts labels by one position, too"
    )
    cause = "labels are shifted twice, so that the token after the next one is learned: give labels=input_ids"
    shifting = bool(models) and all(m.get("origin") in ("transformers", "peft") for m in models)
    otherwise, decides = "a loss that leaves out the first position", "which outputs the model compares with labels"
    yield weakened(Finding("labels-shifted-twice", what, cause, step.step), shifting, otherwise, decides)


def _copied(looks: list[Look]) -> Iterator[Finding]:
    """Report a loss whose targets are the tokens that the model was given, each at its own position.

    An autoencoder is trained like that, so it is never proved."""
    equal = [(s, t) for s, t, f in looks if (f.get("hashes") or [None])[0] == f"{t['hash'] & (1 << 64) - 1:016x}"]
    if len(equal) < max(PATIENCE, len(looks)):
        return
    step, look = equal[0]
    what = (
        f"step {step.step}: the {look['count']} targets of the loss are the tokens that the model is given, not shifted"
    )
    cause = "a language model learns to copy its input: compare logits[:, :-1] with ids[:, 1:]"
    otherwise, decides = "an autoencoder", "whether an output sees the token at its own position"
    yield Finding("labels-not-shifted", what, cause, step.step, SUSPICIOUS, otherwise, decides)


def _padded(looks: list[Look]) -> Iterator[Finding]:
    """Report a language model that learns padding: labels of positions whose attention_mask is 0, behind others whose
    is, are the tokens there, and the loss counts them.

    The mask says that these tokens are no content, and the loss that they are to be predicted, each from another one
    that is none. Proved where the model shifts labels, as a language model does; another model may learn to repeat its
    whole input, and tokens may be hidden from attention in the midst of a text and predicted. The first token behind a
    text may be its end."""
    rows = [
        (s, t, f)
        for s, t, f in looks
        if t.get("padded") and t["equal"] >= 0.5 * t["labels"] and f.get("targets") in (t["labels"], _behind(t))
    ]
    if len({s.step for s, _, _ in rows}) < PATIENCE:
        return
    step, look, function = rows[0]
    what = f"step {step.step}: {look['padded']} of the loss's {function['targets']} targets are at positions whose "
    what += "attention_mask is 0, behind others like that: padding is learned from padding"
    cause = "give padded positions the label -100: labels.masked_fill(attention_mask == 0, -100)"
    proved = all(t["first"] > 0 and f["targets"] == _behind(t) and not t["holes"] for _, t, f in rows)
    otherwise = "a model that repeats its whole input, or tokens that are hidden at random"
    decides = "whether padding is to be predicted"
    yield weakened(Finding("padding-learned", what, cause, step.step), proved, otherwise, decides)


def _behind(look: Mapping[str, Any]) -> int:
    """Return the number of labels behind the first position of each row."""
    return int(look["labels"] - look["first"])


def _mask(steps: list[Step]) -> Iterator[Finding]:
    """Report an attention mask with zeros between ones, and ones at what looks like padding: another token than that
    of padding is masked. A token that is left out on purpose looks the same if rows end in equal tokens."""
    rows = [(s, t) for s in steps for t in s.tokens if t["holes"] and t["kept"] > 1]
    if len(rows) < PATIENCE:
        return
    step, look = rows[0]
    what = (
        f"step {step.step}: attention_mask is 0 at {look['holes']} tokens between others of their rows, and 1 at "
        f"{look['kept']} equal tokens at the ends of rows, as padding is"
    )
    cause = "the mask is made of another number than that of padding: use the tokenizer's mask, or its pad_token_id"
    otherwise, decides = (
        "tokens that are hidden on purpose, in rows that end in equal tokens",
        "what padding's number is",
    )
    yield Finding("padding-seen", what, cause, step.step, SUSPICIOUS, otherwise, decides)


def _ends(steps: list[Step]) -> Iterator[Finding]:
    """Report rows whose last token counts as content by the mask and as padding by the labels, as it is the token that
    pads: the only one that is never learned.

    A correct program that leaves out the end of a text leaves it out of the input, too, or masks it there. It is
    reported only if no row learns it, and each learns the token before."""
    rows = [(s, t) for s in steps for t in s.tokens if t.get("ends")]
    if len(rows) < PATIENCE or any(t["unlearned"] < t["ends"] or t["learned"] for _, t in rows):
        return
    step, look = rows[0]
    what = f"step {step.step}: {look['ends']} rows end in the token that also pads, attention_mask is 1 there, and its "
    what += "label is -100; no label is this token: the end of a text is never learned"
    cause = "give padding a token of its own, or make labels by attention_mask and not by the token"
    yield Finding("end-not-learned", what, cause, step.step, WRONG)


def _attention(rank: Rank, optimizer: int) -> Iterator[Finding]:
    """Report targets that the model can read from its input, and masks of padding that are inverted.

    A position that attends to the next token, in every attention of the model, and whose target is this token, has
    nothing to predict. Prefixes, encoders and permutations have no targets there. A row whose tokens attend to its
    padding and to nothing else is used by no correct program."""
    looks = [(s, a) for _, s in sorted(rank.steps[optimizer].items()) for a in s.attention or ()]
    if len(looks) < PATIENCE:
        return
    step, look = looks[0]
    shifted = [a["targets"] > 0 and a["next"] >= 0.99 * a["targets"] for _, a in looks]
    if all(shifted) and all(a["attentions"] and a["answered"] == a["attentions"] for _, a in looks):
        what = (
            f"step {step.step}: {look['next']} of {look['targets']} targets are the next token of the input, and each "
        )
        what += f"of their positions attends to it, in all {look['attentions']} attentions: the answer is in the input"
        cause = "make attention causal: is_causal=True, or a mask that is used"
        yield Finding("future-seen", what, cause, step.step, WRONG)
    padded = [(s, a) for s, a in looks if a["padded"]]
    if len(padded) >= PATIENCE and all(a["inverted"] == a["padded"] for _, a in padded):
        step, look = padded[0]
        what = (
            f"step {step.step}: in {look['inverted']} rows that end in padding, attention sees the padding alone, and "
        )
        what += "none of the tokens before it"
        cause = "the mask is inverted: key_padding_mask of torch is True at padding, attention_mask is 1 at tokens"
        yield Finding("mask-inverted", what, cause, step.step, WRONG)
