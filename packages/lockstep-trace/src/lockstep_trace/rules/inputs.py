"""Rules on inputs: evaluation inputs on another scale than training inputs, and overlapping parts of the data on ranks.

Evidence: `tracer/inputs.py`, and hashes of examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lockstep_trace.ranks import data_ranks
from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules import premises
from lockstep_trace.rules.epochs import known
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, Finding, weakened

LOOKS = 4  # training calls
FAR = 5.0  # standard deviations
SHARED = 8  # examples
Range = Sequence[float]  # mean, standard deviation, minimum, maximum


def scales(trace: Trace) -> Iterator[Finding]:
    """Report evaluation inputs on another scale than training inputs.

    Evaluating another domain is legitimate, so only one case is proved: in every call examined, one side is
    standardized (mean near 0, deviation near 1, negative numbers) and the other has the range of raw pixels (0 to 1, or
    to 255, nothing negative). The data must come from a loader, and training inputs must recur bit for bit, which
    excludes inputs that look standardized because of added noise. A model trained on standardized inputs is not
    evaluated by raw ones; a correct program normalizes both alike."""
    for rank in trace.ranks[:1]:
        optimizers = sorted(rank.steps)
        trained = [r for o in optimizers[:1] for _, s in sorted(rank.steps[o].items()) for r in s.ranges or ()]
        records = [r for r in rank.evaluations if r.get("trained") and not r.get("between") and r.get("ranges")]
        if len(trained) < LOOKS or not records:
            continue
        fed = {name for o in optimizers for s in rank.steps[o].values() for name, _ in s.fed or ()}
        passes = {r["loader"]: r for r in rank.loaders}
        data = {passes[n]["data"] for n in fed if n in passes}
        for record in records:
            evaluated = record["ranges"]
            own = passes.get(record["loader"] or "")
            raw = (all(map(_standard, trained)) and all(map(_raw, evaluated))) or (
                all(map(_raw, trained)) and all(map(_standard, evaluated))
            )
            mean, deviation = (sum(r[i] for r in trained) / len(trained) for i in (0, 1))
            least, most = min(r[1] for r in trained), max(r[1] for r in trained)
            far = deviation > 0 and all(
                abs(r[0] - mean) > FAR * deviation or r[1] > FAR * most or FAR * r[1] < least for r in evaluated
            )
            if not raw and not far:
                continue
            what = (
                f"training inputs have mean {mean:.3g} and deviation {deviation:.3g}; inputs of the evaluation after "
            )
            what += f"{sum(record['steps'])} steps have mean {evaluated[0][0]:.3g} and deviation {evaluated[0][1]:.3g}"
            cause = "normalize evaluation inputs with the same numbers as training inputs"
            proved = raw and own is not None and own["data"] not in data and _come_again(rank, optimizers)
            otherwise = "evaluation on another domain on purpose"
            finding = Finding("inputs-on-another-scale", what, cause)
            yield weakened(finding, proved, otherwise, "whether both should be normalized alike")
            return


def _come_again(rank: Rank, optimizers: Sequence[int]) -> bool:
    rows = [h for o in optimizers for s in rank.steps[o].values() for h in known(s)]
    return len(rows) >= 1.5 * len(set(rows)) > 0


def _standard(r: Range) -> bool:
    return abs(r[0]) <= 0.25 and 0.75 <= r[1] <= 1.4 and r[2] < -0.5 and r[3] > 0.5


def _raw(r: Range) -> bool:
    return r[2] >= 0 and r[0] > 0.05 and ((r[3] <= 1 and r[1] < 0.5) or (20 < r[3] <= 255 and r[1] > 2))


def overlapping(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report ranks with fixed parts of the data that share examples.

    Each rank must see each example of its part once per epoch in two epochs or more, which excludes sampling with
    replacement and sampling from the whole data set. Shared examples count twice in the averaged gradients. Giving
    examples of rare classes to all ranks, or filling a last batch with first examples, may be intended, so the finding
    is never proved."""
    ranks = data_ranks(trace, optimizer)
    if optimizer != trace.optimizers[0] or len(ranks) < 2 or not trace.complete:
        return
    if not (premises.declared(trace) or premises.sharded(trace) or premises.reduced(trace, optimizer)):
        return
    lists = [[h for _, s in sorted(r.steps.get(optimizer, {}).items()) for h in known(s)] for r in ranks]
    parts = [set(each) for each in lists]
    if not all(_once_an_epoch(each) for each in lists):
        return
    for j in range(len(parts)):
        for i in range(j):
            shared = len(parts[i] & parts[j])
            least = min(len(parts[i]), len(parts[j]))
            if max(SHARED, 2 * len(ranks), 0.01 * least) < shared < 0.9 * least:
                what = f"ranks {ranks[i].number} and {ranks[j].number} train on parts of {len(parts[i])} and "
                what += f"{len(parts[j])} examples in each epoch, and both parts contain {shared} of them"
                cause = "make the parts disjoint: data[rank::world], or begin each part where the previous one ends"
                otherwise, decides = (
                    "examples given to all ranks on purpose, duplicate rows, or filled batches",
                    "how the parts are made",
                )
                yield Finding("parts-overlap", what, cause, None, SUSPICIOUS, otherwise, decides)
                return


def _once_an_epoch(examples: Sequence[str]) -> bool:
    part = len(set(examples))
    if part < SHARED or len(examples) < 2 * part - part // 8:
        return False
    first = len(set(examples[:part]))
    most = max(Counter(examples).values())
    return first >= 0.99 * part and most <= -(-len(examples) // part) + 1


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
    visits: dict[str, list[int]] = {}
    batches: list[tuple[int, ...]] = []
    for _, step in (row for number in trace.steps(optimizer) for row in trace.at(optimizer, number)):
        for examples, classes in batches_with_classes(step):
            batches.append(tuple(sorted(classes)))
            for example, one in zip(examples, classes, strict=True):
                visits.setdefault(example, []).append(one)
    return visits, batches


def batches_with_classes(step: Step) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the examples of each micro-batch and a number of each one's class, where the loss has one for each."""
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
