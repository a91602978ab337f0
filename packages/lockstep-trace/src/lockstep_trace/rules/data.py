"""Faults in what is trained and evaluated on: orders that repeat, examples that come too often or never, rows of an
evaluation that were trained on.

Examples are known by hashes of what the model is given. A size that a loader says is its own data set's: behind a
partition that is made by hand it is a part, so that nothing here is proved by sizes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep_trace.ranks import data_ranks
from lockstep_trace.read import Rank, Trace
from lockstep_trace.rules.epochs import batches_of_passes, examples_of_passes, first_step, known, passes_of
from lockstep_trace.rules.finding import INFO, PATIENCE, SUSPICIOUS, WRONG, Finding, weakened

DISTINCT = 8  # examples, whose order is no chance: 1 in 40,320
PLAIN = ("RandomSampler", "SequentialSampler", "DistributedSampler", "SeedableRandomSampler")  # give each once
TWICE = "ranks that draw from the whole data set each, on purpose"


def same_order(trace: Trace) -> Iterator[Finding]:
    """Two passes of one optimizer over shuffled loaders with the same order. No right program asks for an order that is
    drawn anew, and gets the same; one that takes a pass back does so from the weights that it began with."""
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
            else "the sampler is seeded anew for each epoch: seed it once, or with the epoch's number"
        )
        at = [first_step(rank, name, optimizer) for name in (one, other)]
        what = (
            f"the epochs from step {at[0]} and from step {at[1]} on have the same order of examples, of a "
            f"shuffled loader ({sampler}; rank {rank.number})"
        )
        return Finding("same-order", what, cause, at[1], WRONG)
    return None


def _taken_back(rank: Rank, optimizer: int, one: str, other: str) -> bool:
    """Whether a pass begins with the weights that an earlier one began with: it is made again on purpose."""
    steps = rank.steps[optimizer]
    numbers = [first_step(rank, name, optimizer) for name in (one, other)]
    weights = [steps[n].before for n in numbers if n is not None]
    prints = [{name: v.fingerprint for name, v in each.items()} for each in weights]
    return len(prints) == 2 and bool(prints[0]) and prints[0] == prints[1]


def _resumed(rank: Rank, optimizer: int) -> Finding | None:
    """A pass over the rest of an epoch, and one over a whole epoch that ends in the same order."""
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
                f"the epoch from step {at[1]} on ends with the examples of that from step {at[0]} on, in the same "
                f"order, of a shuffled loader ({passes[other]['sampler']}; rank {rank.number})"
            )
            cause = (
                "the rest of an epoch was resumed, and the next epoch has its order again: call "
                "loader.set_epoch(epoch) before each epoch (Accelerate's skip_first_batches counts on a copy)"
            )
            return Finding("same-order", what, cause, at[1], WRONG)
    return None


def one_batch(trace: Trace) -> Iterator[Finding]:
    """A pass begun in each step for its first batch, which is always the same. No right program asks a loader of many
    batches again and again for the same one; a trial on one batch asks once."""
    for optimizer, rank in itertools.product(trace.optimizers, trace.ranks[:1]):
        begun = {r["loader"]: r for r in rank.loaders}
        batches = batches_of_passes(rank, optimizer)
        firsts = [n for n, b in batches.items() if set(b) == {0} and (begun[n].get("length") or 0) > 1]
        lists = [batches[n][0] for n in firsts]
        if len(lists) < PATIENCE or len(firsts) != len(batches) or any(each != lists[0] for each in lists):
            continue
        length = begun[firsts[0]]["length"]
        what = (
            f"all {len(lists)} batches are the first one of a loader of {length}: a pass is begun for each, and its "
            "first batch taken"
        )
        cause = "call iter(loader) once, or loop over the loader: next(iter(loader)) begins anew"
        yield Finding("one-batch", what, cause, first_step(rank, firsts[0], optimizer), WRONG)
        return


def whole_stream(trace: Trace) -> Iterator[Finding]:
    """A stream that every worker of a loader yields whole: each batch comes once from each worker, one after another.
    No right program repeats each batch at once, as often as there are workers."""
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
                what = f"each of {len(equal)} batches of a stream comes {workers} times, once from each worker"
                cause = "let each worker yield its share: torch.utils.data.get_worker_info() in the data set's __iter__"
                yield Finding("whole-stream", what, cause, first_step(rank, name, optimizer), WRONG)
                return


# -- an epoch over ranks ---------------------------------------------------------------------------------------------


def counts(trace: Trace) -> Iterator[Finding]:
    """What an epoch over all ranks has seen."""
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
    """A DistributedSampler gives each rank its share, of which each rank takes every N-th batch, N the number of ranks,
    or which Accelerate divides again. No right program leaves out just those."""
    world = len(ranks)
    if world < 2 or any(b["sampler"] != "DistributedSampler" or b["replicas"] != world for b in begins):
        return None
    cause = "the data set is divided twice: by the DistributedSampler, and again by rank: leave one of them out"
    offsets = []
    for rank, begun in zip(ranks, begins, strict=True):
        taken, batches = sorted(batches_of_passes(rank, optimizer)[name]), begun["batches"] or 0
        offset = taken[0] if taken else 0
        if batches >= 2 * world and taken == list(range(offset, batches, world)):
            offsets.append(offset)
    if len(offsets) == world and len(set(offsets)) == world:
        what = (
            f"the epoch from step {at} on: a DistributedSampler gives each of {world} ranks its share, and each takes "
            f"every {'second' if world == 2 else f'{world}-th'} of its batches alone"
        )
        return Finding("seen-part", what, cause, at, WRONG)
    size = begins[0]["size"]
    distinct = len({h for each in lists for h in each})
    if size and all("accelerate" in b["kind_of"] for b in begins) and distinct <= 1.2 * size / world:
        what = f"the epoch from step {at} on has {distinct} of the data set's {size} examples over {world} ranks"
        return Finding("seen-part", what, cause, at, WRONG)
    return None


def _often(lists: Sequence[Sequence[str]], at: int | None) -> Finding | None:
    """Ranks that see the same examples in an epoch, in other orders."""
    if len(lists) < 2:
        return None
    sets = [set(each) for each in lists]
    shared = set.intersection(*sets)
    if len(shared) < DISTINCT or len(shared) < 0.9 * max(len(s) for s in sets):
        return None
    what = f"the epoch from step {at} on: each of {len(lists)} ranks sees the same {len(shared)} examples"
    cause = "each rank goes over the whole data set: divide it (DistributedSampler, accelerator.prepare)"
    return Finding("seen-often", what, cause, at, SUSPICIOUS, TWICE, "how many examples an epoch is meant to have")


def _twice(
    ranks: Sequence[Rank],
    optimizer: int,
    name: str,
    begins: Sequence[Mapping[str, Any]],
    lists: Sequence[Sequence[str]],
    at: int | None,
) -> Finding | None:
    """Ranks that share examples though a DistributedSampler divides them. No right program gives its samplers other
    seeds or epochs; where those agree, rows are equal, or ranks hold the data set in other orders."""
    world = len(ranks)
    if world < 2 or any(b["sampler"] != "DistributedSampler" or b["replicas"] != world for b in begins):
        return None
    total = sum(map(len, lists))
    every = Counter(h for each in lists for h in each)
    own = sum(n - 1 for each in lists for n in Counter(each).values())  # equal rows of the data set
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
        f"the epoch from step {at} on has {total} examples, of which {twice} are seen on two ranks, and so many others "
        f"never; {_seen_at(ranks, optimizer, name, every)}{why}"
    )
    cause = "ranks share examples in an epoch: their samplers need one seed, one epoch number, and data in one order"
    proved = len(seeds) > 1 or own == 0
    otherwise = "rows of the data set that are equal"
    return weakened(Finding("seen-twice", text, cause, at), proved, otherwise, "whether rows of the data set are equal")


def _seen_at(ranks: Sequence[Rank], optimizer: int, name: str, every: Counter[str]) -> str:
    """Where one of the examples that are seen more than once is."""
    places: dict[str, list[str]] = {}
    for rank in ranks:
        for number, step in sorted(rank.steps[optimizer].items()):
            for i, each in enumerate(step.examples or () if step.loader == name else ()):
                if every[each] > 1:
                    places.setdefault(each, []).append(f"{i} of step {number} on rank {rank.number}")
    shared = next((at for at in places.values() if len({p.rpartition(" ")[2] for p in at}) > 1), [])
    return f"one of them is number {' and number '.join(shared[:2])}"


def _part(
    trace: Trace, begins: Sequence[Mapping[str, Any]], lists: Sequence[Sequence[str]], at: int | None
) -> Finding | None:
    """Less than the loader's data set: what was left out may have been left out on purpose."""
    size, total = begins[0]["size"], sum(map(len, lists))
    if not size or begins[0]["sampler"] not in PLAIN or any(rank.skipped for rank in trace.ranks):
        return None
    if total >= 0.75 * size or total < DISTINCT or any(b["drop"] for b in begins):
        return None
    what = f"the epoch from step {at} on has {total} of the data set's {size} examples over {len(lists)} rank(s)"
    cause = "the data set is divided twice, or batches are skipped on each rank"
    return Finding("seen-part", what, cause, at, INFO, "batches that are left out on purpose", "what the script skips")


# -- evaluations -----------------------------------------------------------------------------------------------------


def trained_on(trace: Trace) -> Iterator[Finding]:
    """Rows of an evaluation that the evaluated model was trained on before. All of them may be there to score training
    itself; no right program has a set of which some rows, and not all, were trained on, unless rows are often equal, or
    trains on one part of a random split and scores another that it trained on as well."""
    for rank in trace.ranks[:1]:
        passes = {r["loader"]: r for r in rank.loaders}
        for record in rank.evaluations:
            if record.get("trained") and (finding := _overlap(rank, record, passes)) is not None:
                yield finding
                return


def _overlap(rank: Rank, record: Mapping[str, Any], passes: Mapping[str, Mapping[str, Any]]) -> Finding | None:
    optimizers = [o for o in record.get("optimizers", ()) if o in rank.steps]
    before = [s for o in optimizers for n, s in sorted(rank.steps[o].items()) if n < record["steps"][o]]
    rows = [h for s in before for h in known(s)]
    final = {h for o in optimizers for s in rank.steps[o].values() for h in known(s)}
    evaluated, trained = record["known"], set(rows)
    if trained != final or not evaluated or not trained:
        return None  # more is trained on later: what is not trained on yet is no other set
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
    cause = "keep rows of the evaluation out of training: split once, by index, before anything else"
    finding = Finding("trained-on", what, cause, steps)
    partial = part < 0.95 and len(share) < 0.95 * len(trained) and equal < part / 10
    declared = split is not None and bool(splits) and all(each != split for each in splits) and equal < part / 10
    if partial or declared:
        return weakened(finding, True, "", "")
    if part >= 0.95:
        return Finding(*_head(finding), INFO, "an evaluation of training itself", "what its scores are called")
    return weakened(finding, False, "rows of the data that are equal", "whether rows of the data set are equal")


def _head(finding: Finding) -> tuple[str, str, str, int | None]:
    return finding.code, finding.what, finding.cause, finding.step


def _first_epoch(rank: Rank, optimizers: Sequence[int]) -> list[str]:
    """The first pass over a training loader, or the first steps until an example comes again."""
    for optimizer in optimizers:
        rows: list[str] = []
        first = None
        for _, step in sorted(rank.steps[optimizer].items()):
            names = {name for name, _ in step.fed or ()}
            first = names if first is None else first
            if names != first and None not in names:
                break
            rows += known(step)
        return rows
    return []


def evaluations(trace: Trace) -> Iterator[Finding]:
    """Passes without gradients: examples counted twice or left out. What a script does with them after the forward is
    not seen: it may take the repeated ones off again."""
    rows: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for rank in trace.ranks:
        passes = passes_of(rank)
        trained = set(examples_of_passes(rank))
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
        return None  # Accelerate's gather_for_metrics takes repeated examples off again
    total = sum(numbers)
    if all(n == size for n in numbers):
        return None  # by each rank, or by one alone
    after = next((int(n) for record, _ in pairs for n in record["steps"][:1]), None)
    if begun["drop"] and total < size:
        what = f"the evaluation after {after} steps goes over {total} of {size} examples"
        cause = "drop_last=True leaves out the last, smaller batch: set it to False for evaluation"
        otherwise, decides = "batches of one size on purpose", "how many examples the scores are meant to be of"
        return Finding("evaluation-part", what, cause, after, SUSPICIOUS, otherwise, decides)
    if size < total < 1.5 * size and begun["replicas"] and len(pairs) > 1:
        what = f"the evaluation after {after} steps counts {total - size} of {size} examples twice"
        cause = (
            "DistributedSampler repeats examples until all ranks have as many: leave the repeated ones "
            "out of the scores"
        )
        otherwise, decides = "they are taken off again before scores are computed", "how outputs of ranks are gathered"
        return Finding("evaluation-twice", what, cause, after, SUSPICIOUS, otherwise, decides)
    return None


def workers(trace: Trace) -> Iterator[Finding]:
    """Workers of one pass whose generator began in the same state, and was in the same state again after the first
    examples of each: these were given the same random numbers. No right program draws the same for other examples
    because another process loads them; one that seeds by the example has other states."""
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
                    "seed it in worker_init_fn from torch.initial_seed(), which is another one in each worker and "
                    "epoch, or draw from torch"
                )
                what = f"{count} workers of a loader of rank {rank.number} draw the same random numbers from {name}"
                finding = Finding("same-workers", what, cause, first_step(rank, loader))
                yield weakened(
                    finding, bool(first), "a generator that is seeded by the example", "the data set's source"
                )
                return
