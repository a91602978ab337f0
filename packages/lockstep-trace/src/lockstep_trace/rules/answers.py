"""Rules on what a loss over classes is given: logits across axes, answers among the inputs, and one embedding twice.

Evidence: `tracer/logits.py` and `tracer/answers.py`, by the graph of the first losses.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep_trace.read import Step, Trace
from lockstep_trace.rules.finding import PATIENCE, Finding, weakened


def notes(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report what the first losses are given, if it holds in three steps or more.

    `classes-across-axes`: as many classes as a layer has channels, which are not its channels, because a view cuts
    memory elsewhere. No correct program gives a layer one channel for each class and reads classes of positions.
    `answer-in-input`: a decoder that hides later tokens reads at each position the very token that it has to predict
    there, in each loss that is looked at. A shift inside of the model, an autoencoder and a mask of what is predicted
    are told apart by the graph and the numbers; a tagger that seldom changes a token is not, so this is suspected.
    Targets that are a column of the input are suspected: autoencoders of
    tables, generators for a class, states that seldom change and classes made of a column have such ones.
    `itself-among-candidates`: embeddings times their own transpose, where the target of each row is another row, and
    its product with itself is neither left out nor masked. Among embeddings of one length it is the largest of its
    row, so that no target can ever win; among others, as of states that follow each other, it is suspected.
    `positive-among-negatives`: the target's logit, put before
    the others, stands among these again, in all rows: the positive is pushed away, too. Copies by chance are not in all
    rows, nor where
    most candidates come twice; candidates that are no column of their own may be equal, and are not looked at."""
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
        "logits of as many classes as the layer has channels are a view of its output, {}, in which classes are not "
        "its channels",
        "move axes by transpose or permute, before view or reshape",
    ),
    "answer in a column": (
        "the targets are a column of the model's input, in every row",
        "leave the target out of the features",
    ),
    "answer at its position": (
        "a causal decoder is given at each position the token that it has to predict there",
        "shift one of them: give it tokens[:, :-1], and take tokens[:, 1:] as targets",
    ),
    "itself among candidates": (
        "rows are compared with themselves among the candidates, and the target of each is another one",
        "mask the diagonal of the similarities (fill it with -inf) before the loss",
    ),
    "itself among products": (
        "rows are compared with themselves among the candidates, and the target of each is another one",
        "mask the diagonal of the similarities (fill it with -inf) before the loss",
    ),
    "positive among negatives": (
        "the logit of each row's target stands among its negatives again",
        "leave the positive out of the negatives: put keys into the queue after the loss, or mask them",
    ),
}


MAYBE = {
    "answer at its position": ("a tagger that seldom changes a token", "whether targets are the tokens themselves"),
    "answer in a column": (
        "an autoencoder, a class that the input is made of, or a state that seldom changes",
        "whether the column is known where the model is to be used",
    ),
    "itself among products": ("a row that may follow itself", "whether a row may be its own target"),
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
