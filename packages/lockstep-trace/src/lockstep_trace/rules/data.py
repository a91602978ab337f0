"""Rules on training and evaluation data: repeated orders, examples repeated or left out, evaluation rows that were
trained on.

Examples are identified by hashes of the model's inputs. A loader reports the size of its own data set, which may be a
partition made by hand, so sizes alone prove nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep_trace.coded import quantity
from lockstep_trace.ranks import data_ranks
from lockstep_trace.read import Rank, Trace
from lockstep_trace.rules import INFO, PATIENCE, SUSPICIOUS, WRONG, Finding, weakened
from lockstep_trace.rules.inputs import batches_with_classes
from lockstep_trace.rules.premises import batches_of_passes, examples_of_passes, first_step, known, passes_of

DISTINCT = 8  # examples; the chance that they repeat an order is 1 in 40,320
PLAIN = ("RandomSampler", "SequentialSampler", "DistributedSampler", "SeedableRandomSampler")  # yield each example once
TWICE = "ranks that each draw from the whole data set on purpose"


def same_order(trace: Trace) -> Iterator[Finding]:
    """Report two passes of one optimizer over shuffled loaders in the same order.

    No correct program requests a new shuffle and gets the same order. A pass that is repeated on purpose restarts from
    its initial weights."""
    for optimizer in trace.optimizers:
        for rank in trace.ranks:
            if (finding := _same_order(rank, optimizer)) is not None:
                yield finding
                return
            if (finding := _resumed(rank, optimizer)) is not None:
                yield finding
                return


def _same_order(rank: Rank, optimizer: int) -> Finding | None:
    begun = {r["loader"]: r for r in rank.loaders}
    examples, batches = examples_of_passes(rank, optimizer), batches_of_passes(rank, optimizer)
    shuffled = [n for n in examples if n in begun and begun[n]["shuffle"] and len(batches[n]) > 1]
    for one, other in itertools.pairwise(shuffled):
        length = min(len(examples[one]), len(examples[other]))
        first, second = examples[one][:length], examples[other][:length]
        distinct = len(set(first))
        if (
            first != second
            or distinct < DISTINCT
            or distinct < 0.5 * length
            or _taken_back(rank, optimizer, one, other)
        ):
            continue
        sampler = begun[other]["sampler"]
        cause = (
            "call sampler.set_epoch(epoch) before each epoch"
            if sampler == "DistributedSampler"
            else "the sampler is reseeded with one number in each epoch: seed it once, or with the epoch's number"
        )
        at = [first_step(rank, name, optimizer) for name in (one, other)]
        what = (
            f"the epochs that begin at step {at[0]} and step {at[1]} have the same order of examples, although the "
            f"loader shuffles ({sampler}; rank {rank.number})"
        )
        return Finding("same-order", what, cause, at[1], WRONG)
    return None


def _taken_back(rank: Rank, optimizer: int, one: str, other: str) -> bool:
    steps = rank.steps[optimizer]
    numbers = [first_step(rank, name, optimizer) for name in (one, other)]
    weights = [steps[n].before for n in numbers if n is not None]
    prints = [{name: v.fingerprint for name, v in each.items()} for each in weights]
    return len(prints) == 2 and bool(prints[0]) and prints[0] == prints[1]


def _resumed(rank: Rank, optimizer: int) -> Finding | None:
    passes, examples = passes_of(rank), examples_of_passes(rank, optimizer)
    trained = [name for name in passes if name in examples]
    ordered = sorted(trained, key=lambda name: first_step(rank, name, optimizer) or 0)
    for one, other in itertools.pairwise(ordered):
        rest, full = examples[one], examples[other]
        if not passes[other]["shuffle"] or len(set(rest)) < DISTINCT or len(rest) >= len(full):
            continue
        if full[-len(rest) :] == rest:
            at = [first_step(rank, name, optimizer) for name in (one, other)]
            what = (
                f"the epoch that begins at step {at[1]} ends with the examples of the one that begins at "
                f"step {at[0]}, in "
                f"the same order, although the loader shuffles ({passes[other]['sampler']}; rank {rank.number})"
            )
            cause = (
                "after a resume in mid-epoch, the next epoch repeats the order of the resumed one: call "
                "loader.set_epoch(epoch) before each epoch (Accelerate's skip_first_batches counts epochs on a copy)"
            )
            return Finding("same-order", what, cause, at[1], WRONG)
    return None


def one_batch(trace: Trace) -> Iterator[Finding]:
    """Report a loader that is restarted in each step, so that every step takes the loader's first batch.

    No correct program requests the same batch again and again from a loader of many; a program that overfits one batch
    requests it once."""
    for optimizer, rank in itertools.product(trace.optimizers, trace.ranks[:1]):
        begun = {r["loader"]: r for r in rank.loaders}
        batches = batches_of_passes(rank, optimizer)
        firsts = [n for n, b in batches.items() if set(b) == {0} and (begun[n].get("length") or 0) > 1]
        lists = [batches[n][0] for n in firsts]
        if len(lists) < PATIENCE or len(firsts) != len(batches) or any(each != lists[0] for each in lists):
            continue
        length = begun[firsts[0]]["length"]
        what = (
            f"all {len(lists)} steps train on the first of the loader's {length} batches: each step starts a new pass "
            "and takes only its first batch"
        )
        cause = (
            "loop over the loader, or call iter(loader) once: next(iter(loader)) starts from the first batch each time"
        )
        yield Finding("one-batch", what, cause, first_step(rank, firsts[0], optimizer), WRONG)
        return


def whole_stream(trace: Trace) -> Iterator[Finding]:
    """Report a stream that every data loader worker yields completely, so that each batch occurs once per worker.

    No correct program repeats each batch immediately, once per worker. If workers yield in different orders, the
    finding is proved only if a pass ends after each worker has yielded the same examples once and the stream's length
    is their number: workers that shuffle a stream on purpose make a pass of several epochs, whose length is another
    one."""
    for optimizer, rank in itertools.product(trace.optimizers, trace.ranks[:1]):
        begun = {r["loader"]: r for r in rank.loaders}
        for name, batches in batches_of_passes(rank, optimizer).items():
            workers = begun[name].get("workers", 0) if name in begun and begun[name].get("streamed") else 0
            if workers < 2:
                continue
            rows = [[batches.get(i + k, []) for k in range(workers)] for i in range(0, max(batches) + 1, workers)]
            rows = [row for row in rows if all(row)]
            equal = [row for row in rows if all(each == row[0] for each in row)]
            if len(equal) >= PATIENCE and len(equal) >= 0.9 * len(rows) and len({tuple(r[0]) for r in equal}) > 2:
                what = f"each of {len(equal)} batches of a stream occurs {workers} times, once from each worker"
                cause = (
                    "yield only the worker's share in __iter__ of the data set, by torch.utils.data.get_worker_info()"
                )
                yield Finding("whole-stream", what, cause, first_step(rank, name, optimizer), WRONG)
                return
            lists = [[h for i, b in sorted(batches.items()) if i % workers == k for h in b] for k in range(workers)]
            once = all(len(set(each)) == len(each) >= DISTINCT for each in lists)
            both = set.intersection(*map(set, lists))
            if once and len(both) >= max(DISTINCT, 0.5 * max(map(len, lists))):
                what = (
                    f"{len(both)} examples of a stream occur once from each of {workers} workers, in different orders"
                )
                cause = (
                    "yield only the worker's share in __iter__ of the data set, by torch.utils.data.get_worker_info()"
                )
                otherwise, decides = "workers that each shuffle all rows on purpose", "the intended length of a pass"
                at = first_step(rank, name, optimizer)
                proved = any(r["loader"] == name for r in rank.passed) and all(set(each) == both for each in lists)
                proved = proved and begun[name].get("size") == len(both)
                yield weakened(Finding("whole-stream", what, cause, at), proved, otherwise, decides)
                return


def unreached(trace: Trace) -> Iterator[Finding]:
    """Report a WeightedRandomSampler with fewer weights than its data set has rows: it never draws the remaining rows.

    A weight of zero excludes a row on purpose, and weights for only the first rows may be intended. The finding is
    proved if there are at most an eighth as many weights as rows and at least as many draws as rows: these are weights
    of classes, not rows."""
    for rank in trace.ranks[:1]:
        for begun in rank.loaders:
            size = begun.get("size") or 0
            count, draws = begun.get("weights") or (size, 0)
            if 0 < count < size:
                what = (
                    f"a WeightedRandomSampler has {quantity(count, 'weight')} for {size} rows: it draws only the first "
                )
                what += f"{count} rows, {draws} times in an epoch"
                cause = "give it one weight for each row: weights_of_classes[labels]"
                otherwise, decides = (
                    "weights for only the first rows on purpose",
                    "whether the weights belong to rows or to classes",
                )
                proved = draws >= size >= 8 * count
                yield weakened(Finding("rows-unreached", what, cause), proved, otherwise, decides)
                return


def orders(trace: Trace) -> Iterator[Finding]:
    """Report an evaluation loader that shuffles, if the model sees one complete pass over it and another pass goes by
    without the model: labels taken from the second pass are in another order than the model's outputs.

    Counts and means over a pass need no order, so the finding is never proved. Excluded are loaders that also feed
    training steps (statistics of the inputs), and passes that begin in the same state of the generator (the same
    order)."""
    for rank in trace.ranks[:1]:
        ended = {r["loader"] for r in rank.passed}
        fed = {name for o in rank.steps for name in examples_of_passes(rank, o)}
        evaluated = {r["loader"] for r in rank.evaluations if r.get("trained")}
        passes = [r for r in rank.loaders if r["loader"] in ended and r["sampler"] == "RandomSampler" and r["shuffle"]]
        trained = {name.partition(".")[0] for name in fed}
        for unseen in (r for r in passes if r["loader"] not in evaluated):
            number = unseen["loader"].partition(".")[0]
            pairs = [r for r in passes if r["loader"] in evaluated and r["loader"].partition(".")[0] == number]
            pairs = [r for r in pairs if r["steps"] == unseen["steps"] and r["generators"] != unseen["generators"]]
            if number in trained or not pairs or unseen["replacement"]:
                continue
            what = f"after {sum(unseen['steps'])} steps the model sees one pass over an evaluation loader that "
            what += "shuffles, and another pass over it goes by without the model: their orders differ"
            cause = "take outputs and labels from the same pass, or set shuffle=False for evaluation"
            otherwise, decides = "counts or means, which need no order", "what is taken from the pass without the model"
            at = next(iter(unseen["steps"]), None)
            yield Finding("orders-differ", what, cause, at, SUSPICIOUS, otherwise, decides)
            return


# -- an epoch over ranks ---------------------------------------------------------------------------------------------


def counts(trace: Trace) -> Iterator[Finding]:
    """Report examples that all ranks together repeat or omit in an epoch."""
    optimizer = trace.optimizers[0]
    ranks = data_ranks(trace, optimizer)
    passes = [passes_of(rank) for rank in ranks]
    examples = [examples_of_passes(rank, optimizer) for rank in ranks]
    for name, begun in passes[0].items():
        if not all(name in p for p in passes) or not all(e.get(name) for e in examples) or begun["replacement"]:
            continue
        lists = [e[name] for e in examples]
        at = first_step(ranks[0], name, optimizer)
        begins = [p[name] for p in passes]
        finding = (
            _divided_twice(ranks, optimizer, name, begins, lists, at)
            or _often(lists, at)
            or _twice(ranks, optimizer, name, begins, lists, at)
            or _part(trace, begins, lists, at)
        )
        if finding is not None:
            yield finding
            return


def _divided_twice(
    ranks: Sequence[Rank],
    optimizer: int,
    name: str,
    begins: Sequence[Mapping[str, Any]],
    lists: Sequence[Sequence[str]],
    at: int | None,
) -> Finding | None:
    """Return a finding if a rank's DistributedSampler share is divided a second time, else None.

    Each rank takes every N-th batch of its share (N ranks), or Accelerate divides it again."""
    world = len(ranks)
    if world < 2 or any(b["sampler"] != "DistributedSampler" or b["replicas"] != world for b in begins):
        return None
    cause = "the data set is divided twice, by the DistributedSampler and again by rank: remove one of the two"
    offsets = []
    for rank, begun in zip(ranks, begins, strict=True):
        taken, batches = sorted(batches_of_passes(rank, optimizer)[name]), begun["batches"] or 0
        offset = taken[0] if taken else 0
        if batches >= 2 * world and taken == list(range(offset, batches, world)):
            offsets.append(offset)
    if len(offsets) == world and len(set(offsets)) == world:
        what = (
            f"the epoch that begins at step {at}: a DistributedSampler gives each of {world} ranks its share, of which "
            f"the rank takes only every {'second' if world == 2 else f'{world}-th'} batch"
        )
        return Finding("seen-part", what, cause, at, WRONG)
    size = begins[0]["size"]
    distinct = len({h for each in lists for h in each})
    if size and all("accelerate" in b["kind_of"] for b in begins) and distinct <= 1.2 * size / world:
        what = f"the epoch that begins at step {at} has {distinct} of the data set's {size} examples over {world} ranks"
        return Finding("seen-part", what, cause, at, WRONG)
    return None


def _often(lists: Sequence[Sequence[str]], at: int | None) -> Finding | None:
    if len(lists) < 2:
        return None
    sets = [set(each) for each in lists]
    shared = set.intersection(*sets)
    if len(shared) < DISTINCT or len(shared) < 0.9 * max(len(s) for s in sets):
        return None
    what = f"the epoch that begins at step {at}: each of {len(lists)} ranks sees the same {len(shared)} examples"
    cause = "each rank iterates over the whole data set: divide it (DistributedSampler, accelerator.prepare)"
    return Finding("seen-often", what, cause, at, SUSPICIOUS, TWICE, "the intended number of examples in an epoch")


def _twice(
    ranks: Sequence[Rank],
    optimizer: int,
    name: str,
    begins: Sequence[Mapping[str, Any]],
    lists: Sequence[Sequence[str]],
    at: int | None,
) -> Finding | None:
    """Return a finding if ranks share examples although a DistributedSampler divides them, else None.

    If its seeds and epochs agree, rows are equal, or ranks hold the data set in different orders."""
    world = len(ranks)
    if world < 2 or any(b["sampler"] != "DistributedSampler" or b["replicas"] != world for b in begins):
        return None
    total = sum(map(len, lists))
    every = Counter(h for each in lists for h in each)
    own = sum(n - 1 for each in lists for n in Counter(each).values())  # duplicate rows of the data set
    twice = sum(n - 1 for n in every.values()) - 2 * own * world
    if twice <= world or twice <= 0.1 * total:
        return None
    seeds = {(b.get("seed"), b.get("epoch")) for b in begins}
    why = (
        f"; seeds and epochs of the samplers: {', '.join(f'{s}, {e}' for s, e in sorted(seeds))}"
        if len(seeds) > 1
        else ""
    )
    text = (
        f"the epoch that begins at step {at}: of {total} examples, {twice} are seen on two ranks, and as "
        "many others on "
        f"none; {_seen_at(ranks, optimizer, name, every)}{why}"
    )
    cause = "give the samplers of all ranks one seed, one epoch number, and the data in one order"
    proved = len(seeds) > 1 or own == 0
    otherwise = "duplicate rows in the data set"
    return weakened(
        Finding("seen-twice", text, cause, at), proved, otherwise, "whether the data set has duplicate rows"
    )


def _seen_at(ranks: Sequence[Rank], optimizer: int, name: str, every: Counter[str]) -> str:
    places: dict[str, list[str]] = {}
    for rank in ranks:
        for number, step in sorted(rank.steps[optimizer].items()):
            for i, each in enumerate(step.examples or () if step.loader == name else ()):
                if every[each] > 1:
                    places.setdefault(each, []).append(f"{i} of step {number} on rank {rank.number}")
    shared = next((at for at in places.values() if len({p.rpartition(" ")[2] for p in at}) > 1), [])
    return f"for example, number {' and number '.join(shared[:2])}"


def _part(
    trace: Trace, begins: Sequence[Mapping[str, Any]], lists: Sequence[Sequence[str]], at: int | None
) -> Finding | None:
    size, total = begins[0]["size"], sum(map(len, lists))
    if not size or begins[0]["sampler"] not in PLAIN or any(rank.skipped for rank in trace.ranks):
        return None
    if total >= 0.75 * size or total < DISTINCT or any(b["drop"] for b in begins):
        return None
    what = (
        f"the epoch that begins at step {at} has {total} of the data set's {size} examples over "
        f"{quantity(len(lists), 'rank')}"
    )
    cause = "the data set is divided twice, or batches are skipped on each rank"
    return Finding(
        "seen-part", what, cause, at, INFO, "batches that the script skips on purpose", "what the script skips"
    )


# -- evaluations -----------------------------------------------------------------------------------------------------


def trained_on(trace: Trace) -> Iterator[Finding]:
    """Report evaluation rows that the model was trained on before.

    If all rows were, the evaluation may measure the training set on purpose. The finding is proved in three cases,
    which no correct program has: only some rows of the evaluation set were trained on, and duplicate rows do not
    explain it; a part of a random split overlaps its training part; or the rows shared with the training set are of one
    class, whose rows occur several times while other rows occur once, so that class was copied before the data was
    divided."""
    for rank in trace.ranks[:1]:
        passes = {r["loader"]: r for r in rank.loaders}
        if (finding := _left_out(rank)) is not None:
            yield finding
            return
        known_rows: dict[tuple[int, ...], tuple[set[str], int]] = {}
        for record in rank.evaluations:
            if record.get("trained") and (finding := _overlap(rank, record, passes, known_rows)) is not None:
                yield finding
                return


def _overlap(
    rank: Rank,
    record: Mapping[str, Any],
    passes: Mapping[str, Mapping[str, Any]],
    known_rows: dict[tuple[int, ...], tuple[set[str], int]],
) -> Finding | None:
    optimizers = tuple(o for o in record.get("optimizers", ()) if o in rank.steps)
    if optimizers not in known_rows:  # all rows, and the steps after which none is new
        first: dict[str, int] = {}
        for step in sorted((s for o in optimizers for s in rank.steps[o].values()), key=lambda s: s.raw["at"]):
            for row in known(step):
                first.setdefault(row, step.raw["at"] + 1)
        known_rows[optimizers] = set(first), max(first.values(), default=0)
    evaluated = record["known"]
    trained, complete = known_rows[optimizers]
    if sum(record["steps"]) < complete or not evaluated or not trained:
        return None  # training continues later: rows not trained on yet may belong to the same set
    share = set(evaluated) & trained
    part = len(share) / len(set(evaluated))
    if len(share) < DISTINCT or part < 0.05:
        return None
    epoch = _first_epoch(rank, optimizers)
    equal = max(1 - len(set(each)) / len(each) for each in (evaluated, epoch) if each)
    own = passes.get(record["loader"] or "", {})
    fed = [passes[n] for o in optimizers for n in examples_of_passes(rank, o) if n in passes]
    if own and any(own["data"] == each["data"] for each in fed):
        return None  # the training data itself
    split, splits = own.get("split"), [each.get("split") for each in fed]
    steps = next((int(n) for n in record["steps"][:1]), None)
    what = f"the evaluation after {steps} steps: {len(share)} of its {len(set(evaluated))} rows were trained on before"
    cause = "keep evaluation rows out of training: split once, by index, before anything else"
    finding = Finding("trained-on", what, cause, steps)
    partial = part < 0.95 and len(share) < 0.95 * len(trained) and equal < part / 10
    declared = split is not None and bool(splits) and all(each != split for each in splits) and equal < part / 10
    if partial or declared:
        return weakened(finding, True, "", "")
    if (copied := _copies(rank, optimizers[0])) and len(share & copied) >= 0.95 * len(share) and part < 0.95:
        what += f"; all are of one class, whose {len(copied)} rows come several times in an epoch, and other rows once"
        cause = "divide the data first, then copy rows of the rare class in the training part only"
        return Finding("trained-on", what, cause, steps, WRONG)
    if part >= 0.95:
        return Finding(
            *_head(finding), INFO, "an evaluation on the training set on purpose", "what its scores are called"
        )
    return weakened(finding, False, "duplicate rows in the data", "whether the data set has duplicate rows")


def _copies(rank: Rank, optimizer: int) -> set[str]:
    """Return the rows of a class that the data set itself repeats, if it repeats no row of another class."""
    first, counts, classes = None, Counter[str](), dict[str, int]()
    begun = {r["loader"]: r for r in rank.loaders}
    for _, step in sorted(rank.steps[optimizer].items()):
        names = {name for name, _ in step.fed or ()}
        first = names if first is None else first
        if names != first or any(n not in begun or begun[n]["replacement"] or begun[n].get("weights") for n in names):
            break
        for examples, numbers in batches_with_classes(step):
            counts.update(examples)
            classes.update(zip(examples, numbers, strict=True))
    rows: dict[int, list[str]] = {}
    for example, number in classes.items():
        rows.setdefault(number, []).append(example)
    again = {c: sum(counts[e] > 1 for e in each) / len(each) for c, each in rows.items()}
    copied = [c for c, share in again.items() if share > 0.8 and len(rows[c]) >= DISTINCT]
    once = [c for c, share in again.items() if share < 0.01 and len(rows[c]) >= DISTINCT]
    if len(copied) != 1 or len(once) + 1 != len(rows) or len(rows) < 2:
        return set()
    return set(rows[copied[0]]) if sum(counts[e] for e in rows[copied[0]]) >= 3 * len(rows[copied[0]]) else set()


def _left_out(rank: Rank) -> Finding | None:
    """Return a finding if none of an evaluation's rows are in the training steps before it, but an earlier optimizer
    trained on them and training continued from its last weights: cross-validation folds that share one model.

    Never proved: an evaluation of what the model retains looks the same."""
    rows = {o: {h for s in steps.values() for h in known(s)} for o, steps in rank.steps.items()}
    for optimizer, steps in rank.steps.items():
        earlier = [o for o in rank.steps if o < optimizer and rank.steps[o] and steps]
        if not earlier or len(rows[optimizer]) < DISTINCT:
            continue
        last, begin = rank.steps[earlier[-1]][max(rank.steps[earlier[-1]])].weights, steps[min(steps)].before
        same = begin and {n: v.fingerprint for n, v in last.items()} == {n: v.fingerprint for n, v in begin.items()}
        if not same or len(rows[optimizer] & rows[earlier[-1]]) < 0.25 * len(rows[optimizer]):
            continue
        for record in rank.evaluations:
            evaluated = set(record["known"])
            if not record.get("trained") or optimizer not in record.get("optimizers", ()) or len(evaluated) < DISTINCT:
                continue
            share = len(evaluated & rows[earlier[-1]]) / len(evaluated)
            if share >= 0.5 and not evaluated & rows[optimizer]:
                what = (
                    f"{share:.0%} of an evaluation's {len(evaluated)} rows are in no step of the current "
                    "optimizer, but an "
                    "earlier one trained on them, and this one continued from its last weights"
                )
                cause = "create a new model for each fold, before its optimizer"
                otherwise, decides = "an evaluation on training rows of an earlier phase", "what the scores are called"
                return Finding("trained-on", what, cause, None, SUSPICIOUS, otherwise, decides)
    return None


def _head(finding: Finding) -> tuple[str, str, str, int | None]:
    return finding.code, finding.what, finding.cause, finding.step


def _first_epoch(rank: Rank, optimizers: Sequence[int]) -> list[str]:
    for optimizer in optimizers:
        rows: list[str] = []
        first = None
        for _, step in sorted(rank.steps[optimizer].items()):
            names = {name for name, _ in step.fed or ()}
            first = names if first is None else first
            if names != first and None not in names:
                break
            rows += known(step)
        counts = Counter(rows)
        usual = statistics.mode(counts.values()) if first and None in first else 1  # epochs without a loader
        return [row for row, count in counts.items() for _ in range(max(1, round(count / usual)))]
    return []


def evaluations(trace: Trace) -> Iterator[Finding]:
    """Report examples that passes without gradients count twice or omit.

    The script may drop repeated examples after the forward pass, which a trace does not show."""
    rows: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for rank in trace.ranks:
        passes = passes_of(rank)
        trained = {name for optimizer in rank.steps for name in examples_of_passes(rank, optimizer)}
        for record in rank.evaluations:
            name = record["loader"]
            if name in passes and name not in trained and record["count"]:
                rows.setdefault(name, []).append((record, passes[name]))
    for pairs in rows.values():
        if (finding := _evaluation(pairs)) is not None:
            yield finding
            return


def _evaluation(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Finding | None:
    begun = pairs[0][1]
    size, numbers = begun["size"], [record["count"] for record, _ in pairs]
    plain = (
        "RandomSampler",
        "SequentialSampler",
        "DistributedSampler",
        "SeedableRandomSampler",
        "LengthGroupedSampler",
    )
    if not size or begun["sampler"] not in plain or "accelerate" in begun["kind_of"]:
        return None  # Accelerate's gather_for_metrics drops repeated examples
    total = sum(numbers)
    if all(n == size for n in numbers):
        return None  # complete on each rank, or on only one
    after = next((int(n) for record, _ in pairs for n in record["steps"][:1]), None)
    if begun["drop"] and total < size:
        what = f"the evaluation after {after} steps covers {total} of {size} examples"
        cause = "drop_last=True drops the last, smaller batch: set it to False for evaluation"
        otherwise, decides = "batches of one size on purpose", "how many examples the scores should cover"
        return Finding("evaluation-part", what, cause, after, SUSPICIOUS, otherwise, decides)
    if size < total < 1.5 * size and begun["replicas"] and len(pairs) > 1:
        what = f"the evaluation after {after} steps counts {total - size} of {size} examples twice"
        cause = (
            "DistributedSampler repeats examples until all ranks have equally many: exclude the repeated ones "
            "from the scores"
        )
        otherwise, decides = (
            "code that removes the repeated ones before computing scores",
            "how outputs of ranks are gathered",
        )
        return Finding("evaluation-twice", what, cause, after, SUSPICIOUS, otherwise, decides)
    return None


def workers(trace: Trace) -> Iterator[Finding]:
    """Report data loader workers that draw the same random numbers: their generators had equal states at the start of a
    pass and after their first examples.

    No correct program draws equal numbers for different examples; seeding by example gives different states."""
    for rank in trace.ranks[:1]:
        alike: Counter[tuple[str, str, str, str]] = Counter()
        for worker in rank.workers:
            for name, (before, after) in worker["generators"].items():
                first = worker.get("first", {}).get(name)
                if before != after:
                    alike[(worker["loader"], name, before, first if first not in (None, before) else "")] += 1
        for (loader, name, _, first), count in alike.items():
            if count > 1:
                cause = (
                    "seed it in worker_init_fn from torch.initial_seed(), which differs by worker and epoch, or draw "
                    "from torch"
                )
                what = f"{count} workers of a loader of rank {rank.number} draw the same random numbers from {name}"
                finding = Finding("same-workers", what, cause, first_step(rank, loader))
                yield weakened(
                    finding, bool(first), "a generator that is seeded by the example", "the code of the data set"
                )
                return


def flags(trace: Trace) -> Iterator[Finding]:
    """Report a data set that was split, and a setting of it that was changed afterwards: both parts have it.

    Only if it has the new value in each pass over two parts or more: scripts that switch it show both values. What was
    None before the split, as a transform made from the training rows, is no such setting."""
    for rank in trace.ranks[:1]:
        rows: dict[int, list[Any]] = {}
        for each in rank.loaders:
            if each.get("flags"):
                rows.setdefault(each["flags"][0], []).append(each)
        for passes in rows.values():
            first = passes[0]["flags"][1]
            if first and len({e["data"] for e in passes}) > 1 and all(e["flags"][1] == first for e in passes):
                name = next(iter(first))
                what = f"{name} of a data set was changed after it was split: all its parts have the new value"
                cause = "make a data set for each part, or let a wrapper of each part transform its rows"
                otherwise, decides = "a setting for all rows", f"whether training should have another {name}"
                yield Finding("flag-shared", what, cause, None, SUSPICIOUS, otherwise, decides)
