"""Rules on the inputs of evaluation beside those of training, and on parts of the data that ranks share.

Evidence: `tracer/input_ranges.py`, and hashes of examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lockstep_trace.ranks import data_ranks
from lockstep_trace.read import Rank, Trace
from lockstep_trace.rules import premises
from lockstep_trace.rules.epochs import known
from lockstep_trace.rules.finding import SUSPICIOUS, Finding, weakened

LOOKS = 4  # calls of training
FAR = 5.0  # deviations
SHARED = 8  # examples
Range = Sequence[float]  # mean, deviation, least, greatest


def scales(trace: Trace) -> Iterator[Finding]:
    """Report evaluation inputs on another scale than training inputs.

    Another domain may be evaluated, so only one case is proved: one side is standardized (a mean near 0, a deviation
    near 1, numbers below zero) and the other one has the range of raw pixels (0 to 1, or to 255, none below zero), in
    every call looked at, with data from a loader, and training inputs come again bit for bit, so that they are not
    standard because noise is added to them. What a model has learned of standardized inputs says nothing of raw ones,
    which a right program normalizes alike."""
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
            what = f"inputs of training have a mean of {mean:.3g} and a deviation of {deviation:.3g}, those of the "
            what += f"evaluation after {sum(record['steps'])} steps {evaluated[0][0]:.3g} and {evaluated[0][1]:.3g}"
            cause = "normalize inputs of evaluation as those of training, by the same numbers"
            proved = raw and own is not None and own["data"] not in data and _come_again(rank, optimizers)
            otherwise = "other data on purpose"
            finding = Finding("inputs-on-another-scale", what, cause)
            yield weakened(finding, proved, otherwise, "whether both are meant to be normalized alike")
            return


def _come_again(rank: Rank, optimizers: Sequence[int]) -> bool:
    """Return whether as many training examples as half of all distinct ones are repetitions of earlier ones."""
    rows = [h for o in optimizers for s in rank.steps[o].values() for h in known(s)]
    return len(rows) >= 1.5 * len(set(rows)) > 0


def _standard(r: Range) -> bool:
    return abs(r[0]) <= 0.25 and 0.75 <= r[1] <= 1.4 and r[2] < -0.5 and r[3] > 0.5


def _raw(r: Range) -> bool:
    return r[2] >= 0 and r[0] > 0.05 and ((r[3] <= 1 and r[1] < 0.5) or (20 < r[3] <= 255 and r[1] > 2))


def overlapping(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report fixed parts of the data, one for each rank, that share examples.

    Each rank sees each example of its part once an epoch, in two epochs or more, so that the parts are parts, and
    neither a draw with replacement nor one from the whole data set. Some examples are then seen by two ranks in each
    epoch, and count twice in the gradients that replicas share. Examples of rare classes may be given to all ranks,
    and a last batch be filled with first examples, so it is never proved."""
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
                what += f"{len(parts[j])} examples in each epoch, and {shared} of them are in both parts"
                cause = "parts have to be disjoint: data[rank::world], or the bounds of each part where the last ends"
                otherwise, decides = (
                    "examples that are given to all ranks, equal rows, filled batches",
                    "how parts are made",
                )
                yield Finding("parts-overlap", what, cause, None, SUSPICIOUS, otherwise, decides)
                return


def _once_an_epoch(examples: Sequence[str]) -> bool:
    """Return whether a rank has a fixed part: all its examples come before any comes again, twice or more."""
    part = len(set(examples))
    if part < SHARED or len(examples) < 2 * part - part // 8:
        return False
    first = len(set(examples[:part]))
    most = max(Counter(examples).values())
    return first >= 0.99 * part and most <= -(-len(examples) // part) + 1
