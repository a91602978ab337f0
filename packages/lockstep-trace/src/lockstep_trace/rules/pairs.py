"""A rule on (example, class) pairs: the same examples and the same classes, but paired differently.

Evidence: hashes of examples, and the classes that a loss compares them with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lockstep_trace.read import Step, Trace
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, Finding

ENOUGH = 16  # examples
BITS = (1 << 64) - 1


def changing(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report examples whose classes change between two visits while the class counts over all examples stay the same:
    inputs and targets are shuffled separately.

    Targets that are drawn or estimated again (pseudo-labels, noise, rotations) seldom have exactly the same class
    counts, but renumbered clusters of equal size do, so the finding is never proved. Positions in a batch as targets
    (contrastive losses, matching) give every batch the same classes; such batches are excluded."""
    visits, batches = _visits(trace, optimizer)
    both = {e: v for e, v in visits.items() if len(v) > 1}
    counts = Counter(len(v) for v in both.values())
    if len(both) < max(ENOUGH, 0.9 * len(visits)) or counts.most_common(1)[0][1] < 0.9 * len(both):
        return  # some examples are duplicates
    changed = [e for e, v in both.items() if v[0] != v[1]]
    whole = Counter(v[0] for v in both.values()) == Counter(v[1] for v in both.values())
    if len(batches) < PATIENCE or len(set(batches)) < 0.5 * len(batches) or not whole:
        return
    if len(changed) < 0.3 * len(both):
        return
    what = (
        f"{len(changed)} of {len(both)} examples have another class on their next visit, but the counts of all classes "
    )
    what += "are unchanged: examples and classes are paired differently"
    cause = "shuffle inputs and targets together: one permutation, or one data set of both"
    otherwise = "renumbered classes, as of equal-sized clusters in each epoch, or labels permuted as a control"
    decides = "where the targets come from"
    yield Finding("pairs-change", what, cause, None, SUSPICIOUS, otherwise, decides)


def _visits(trace: Trace, optimizer: int) -> tuple[dict[str, list[int]], list[tuple[int, ...]]]:
    """Return example -> its classes at each visit, and the sorted classes of each batch."""
    visits: dict[str, list[int]] = {}
    batches: list[tuple[int, ...]] = []
    for _, step in (row for number in trace.steps(optimizer) for row in trace.at(optimizer, number)):
        for examples, classes in _batches(step):
            batches.append(tuple(sorted(classes)))
            for example, one in zip(examples, classes, strict=True):
                visits.setdefault(example, []).append(one)
    return visits, batches


def _batches(step: Step) -> Iterator[tuple[list[str], list[int]]]:
    """Yield examples and classes of each micro-batch, if each has one loss with a class for each example."""
    examples, sizes = list(step.examples or ()), list(step.micro or ())
    without, functions = step.unlabelled, list(step.objectives or ())
    rows = [f.get("classes") for f in functions]
    at = 0
    for i, size in enumerate(sizes):
        part = slice(at, at + size)
        at += size
        if without and len(without) == len(examples):
            pairs = zip(without[part], examples[part], strict=True)
            yield without[part], [(int(both, 16) - int(alone, 16)) & BITS for alone, both in pairs]
        elif len(functions) == len(sizes) and rows[i] is not None and len(rows[i]) == size:
            yield examples[part], rows[i]
