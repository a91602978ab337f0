"""Rules on the inputs of classification losses: logits across axes, answers among the inputs, duplicate candidates.

Evidence: the graph of the first losses (`tracer/logits.py`, `tracer/answers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep_trace.read import Step, Trace
from lockstep_trace.rules.finding import PATIENCE, Finding, weakened


def notes(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report faults in what the first losses are given, if they recur in three steps or more.

    `classes-across-axes`: the logits are a view of a layer's output with as many classes as the layer has channels, but
    the class axis is not the channel axis, because the view cuts memory in another order. No correct program gives a
    layer one channel per class and then reads the classes along positions.
    `answer-in-input`: at each position, a causal decoder reads the token that it must predict there, in every loss
    examined. The graph and the numbers exclude a shift inside the model, autoencoders and masked prediction, but not a
    tagger that seldom changes a token, so the finding is only suspected. Targets that equal a column of the input are
    also suspected: autoencoders of tables, class-conditional generators, slowly changing states and classes derived
    from a column have them, too.
    `itself-among-candidates`: embeddings are multiplied by their own transpose, the target of each row is another row,
    and the diagonal is neither removed nor masked. If all embeddings have the same length, the diagonal is the largest
    entry of each row, so no target can win; otherwise, as for consecutive states, the finding is suspected.
    `positive-among-negatives`: the target's logit comes first and occurs a second time among the negatives, in every
    row, so that the loss also pushes the positive away. Accidental copies do not occur in every row. Rows in which most
    candidates occur twice are skipped, and so are candidates without a column of their own, which may be equal."""
    for rank in trace.ranks[:1]:
        rows: dict[str, list[tuple[Step, str]]] = {}
        for _, step in sorted(rank.steps.get(optimizer, {}).items()):
            for note in dict.fromkeys(step.notes or ()):
                kind, _, rest = note.partition(" of ")
                if kind in KINDS or kind == OTHERWISE:
                    rows.setdefault(kind, []).append((step, rest))
        for kind, each in rows.items():
            if kind == OTHERWISE:
                continue
            if len(each) >= PATIENCE and not (kind == "answer at its position" and OTHERWISE in rows):
                yield _finding(kind, *each[0])


OTHERWISE = "another at its position"
KINDS = {
    "classes": (
        "the logits are a view of a layer's output, {}, whose class axis is not the channel axis of the layer, though "
        "both have the same size",
        "move axes with transpose or permute before view or reshape",
    ),
    "answer in a column": (
        "the targets are a column of the model's input, in every row",
        "leave the target out of the features",
    ),
    "answer at its position": (
        "at each position, the input of a causal decoder is the token that it must predict there",
        "shift by one position: input tokens[:, :-1], targets tokens[:, 1:]",
    ),
    "itself among candidates": (
        "each row is one of its own candidates, although its target is another row",
        "mask the diagonal of the similarities (fill it with -inf) before the loss",
    ),
    "itself among products": (
        "each row is one of its own candidates, although its target is another row",
        "mask the diagonal of the similarities (fill it with -inf) before the loss",
    ),
    "positive among negatives": (
        "the logit of each row's target occurs again among its negatives",
        "remove the positive from the negatives: enqueue keys after the loss, or mask them",
    ),
}


MAYBE = {
    "answer at its position": (
        "a tagger that seldom changes a token",
        "whether the targets are the input tokens themselves",
    ),
    "answer in a column": (
        "an autoencoder, a class that is part of the input on purpose, or a state that seldom changes",
        "whether the column is known when the model is used",
    ),
    "itself among products": ("states that may follow themselves", "whether a row may be its own target"),
}


def _code(kind: str) -> str:
    if kind == "classes":
        return "classes-across-axes"
    if kind.startswith("answer"):
        return "answer-in-input"
    if kind.startswith("itself"):
        return "itself-among-candidates"
    return "positive-among-negatives"


def _finding(kind: str, step: Step, rest: str) -> Finding:
    what, cause = KINDS[kind]
    otherwise, decides = MAYBE.get(kind, ("", ""))
    finding = Finding(_code(kind), f"step {step.step}: {what.format(rest)}", cause, step.step)
    return weakened(finding, not otherwise, otherwise, decides)
