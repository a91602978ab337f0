"""Faults in the order of examples: epochs and evaluation passes of data loaders.

In: a trace. Out: (code, what, cause, first step of the epoch). Only passes over a loader that came to their end count,
of loaders whose data set has a length.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep_trace.ranks import data_ranks
from lockstep_trace.read import Rank, Trace

Row = tuple[str, str, str, int | None]


def findings(trace: Trace) -> Iterator[Row]:
    yield from _set_epoch(trace)
    yield from _counts(trace)
    yield from _evaluations(trace)
    yield from _workers(trace)


def _passes(rank: Rank) -> dict[str, Mapping[str, Any]]:
    """Passes that ended while steps were recorded, by name, with what they began with."""
    last = {o: max(steps) + 1 for o, steps in rank.steps.items()}
    cut = rank.ended is None or any(n > last.get(o, 0) for o, n in enumerate(rank.ended["steps"]))
    ended = {  # of a trace that was cut off, not the last one: a loader that reads ahead ends before its last step
        r["loader"] for r in rank.passed if all(n + cut <= last.get(o, 0) for o, n in enumerate(r["steps"]))
    }
    return {record["loader"]: record for record in rank.loaders if record["loader"] in ended}


def _examples(rank: Rank) -> dict[str, list[str]]:
    """Training examples by pass, in order."""
    by_epoch: dict[str, list[str]] = {}
    for optimizer in sorted(rank.steps)[:1]:
        for _, step in sorted(rank.steps[optimizer].items()):
            if step.loader is not None:
                by_epoch.setdefault(step.loader, []).extend(step.examples or ())
    return by_epoch


def repeats(rank: Rank, optimizer: int) -> bool:
    """Whether a rank has gone once through what it trains on: a pass over a loader ended, or, without a loader, the
    examples of the first step came again."""
    if loaders := _examples(rank).keys():
        now = rank.steps[optimizer][max(rank.steps[optimizer])].loader
        return bool(loaders & _passes(rank).keys() - ({now} if rank.ended is None else set()))
    first, *later = [set(s.examples or ()) for _, s in sorted(rank.steps[optimizer].items())]
    return bool(first) and first <= set().union(*later)


def _first(rank: Rank, name: str) -> int | None:
    """The first step of a pass."""
    steps = (n for o in sorted(rank.steps)[:1] for n, s in sorted(rank.steps[o].items()) if s.loader == name)
    return next(steps, None)


def _set_epoch(trace: Trace) -> Iterator[Row]:
    rank = trace.ranks[0]
    passes, examples = _passes(rank), _examples(rank)
    trained = [name for name in passes if name in examples]
    by_loader: dict[str, list[str]] = {}
    for name in trained:
        by_loader.setdefault(name.partition(".")[0], []).append(name)
    for names in by_loader.values():
        for one, other in itertools.pairwise(names):
            shuffled = passes[one]["shuffle"] and passes[other]["shuffle"]
            if shuffled and len(examples[one]) > 4 and examples[one] == examples[other] and len(set(examples[one])) > 4:
                sampler = passes[one]["sampler"]
                cause = (
                    "call sampler.set_epoch(epoch) before each epoch"
                    if sampler == "DistributedSampler"
                    else "the sampler is seeded anew for each epoch: seed it once, or with the epoch's number"
                )
                at = [_first(rank, name) for name in (one, other)]
                what = (
                    f"the epochs from step {at[0]} and from step {at[1]} on have the same order of examples, of a "
                    f"shuffled loader ({sampler}; rank {rank.number})"
                )
                yield ("same-order", what, cause, at[1])
                return
    for one, other in itertools.pairwise(sorted(trained, key=lambda name: _first(rank, name) or 0)):
        rest, whole = examples[one], examples[other]
        if passes[other]["shuffle"] and len(set(rest)) > 4 and len(rest) < len(whole) and whole[-len(rest) :] == rest:
            at = [_first(rank, name) for name in (one, other)]
            what = (
                f"the epoch from step {at[1]} on ends with the examples of that from step {at[0]} on, in the same "
                f"order, of a shuffled loader ({passes[other]['sampler']}; rank {rank.number})"
            )
            cause = (
                "the rest of an epoch was resumed, and the next epoch has its order again: call "
                "loader.set_epoch(epoch) before each epoch (Accelerate's skip_first_batches counts on a copy)"
            )
            yield ("same-order", what, cause, at[1])
            return


def _counts(trace: Trace) -> Iterator[Row]:
    """Whether an epoch over all ranks has as many examples as the data set."""
    optimizer = trace.optimizers[0]
    ranks = data_ranks(trace, optimizer)
    passes = [_passes(rank) for rank in ranks]
    examples = [_examples(rank) for rank in ranks]
    for name, begun in passes[0].items():
        if not all(name in p for p in passes) or not all(name in e for e in examples) or begun["replacement"]:
            continue
        size, batch = begun["size"], begun["batch"] or 1
        if not size or _skipped(trace) or not _plain_sampler(begun):
            continue
        counts = [len(e[name]) for e in examples]
        total, slack = sum(counts), len(ranks) * (batch + 1) * max(_micro(ranks[0], optimizer), 1)
        counts_of_examples = Counter(h for e in examples for h in e[name])
        at = _first(ranks[0], name)
        epoch = f"the epoch from step {at} on has"
        if len(ranks) > 1 and total > size + slack and total >= 1.5 * size:
            cause = "each rank goes over the whole data set: divide it (DistributedSampler, accelerator.prepare)"
            yield ("seen-often", f"{epoch} {total} examples over {len(ranks)} ranks, the data set {size}", cause, at)
            return
        if total < size - slack and total < 0.75 * size:
            cause = "the data set is divided twice, or batches are skipped on each rank"
            what = f"{epoch} {total} of the data set's {size} examples over {len(ranks)} rank(s)"
            yield ("seen-part", what, cause, at)
            return
        own = sum(n - 1 for e in examples for n in Counter(e[name]).values())  # equal rows of the data set
        twice = sum(n - 1 for n in counts_of_examples.values()) - 2 * own * len(ranks)
        padding = slack if "accelerate" in begun["kind_of"] else len(ranks)
        if total <= size + slack and twice > padding and twice > 0.1 * total:
            cause = "ranks share examples in an epoch: their samplers need one seed, and one epoch number"
            text = (
                f"{epoch} {total} examples, of which {twice} are seen on two ranks, and so many others never; "
                f"{_seen_at(ranks, optimizer, name, counts_of_examples)}"
            )
            yield ("seen-twice", text, cause, at)
            return


def _seen_at(ranks: Sequence[Rank], optimizer: int, name: str, counts_of_examples: Counter[str]) -> str:
    """Where one of the examples that are seen more than once is."""
    places: dict[str, list[str]] = {}
    for rank in ranks:
        for number, step in sorted(rank.steps[optimizer].items()):
            for i, each in enumerate(step.examples or () if step.loader == name else ()):
                if counts_of_examples[each] > 1:
                    places.setdefault(each, []).append(f"{i} of step {number} on rank {rank.number}")
    shared = next((at for at in places.values() if len({p.rpartition(" ")[2] for p in at}) > 1), [])
    return f"one of them is number {' and number '.join(shared[:2])}"


def _plain_sampler(begun: Mapping[str, Any]) -> bool:
    """A sampler that is meant to give each example once."""
    known = (
        "RandomSampler",
        "SequentialSampler",
        "DistributedSampler",
        "SeedableRandomSampler",
        "LengthGroupedSampler",
    )
    return begun["sampler"] in known


def _micro(rank: Rank, optimizer: int) -> int:
    return max((step.forwards or 1 for step in rank.steps[optimizer].values()), default=1)


def _skipped(trace: Trace) -> bool:
    return any(rank.skipped for rank in trace.ranks)


def _evaluations(trace: Trace) -> Iterator[Row]:
    """Passes without gradients: examples counted twice or left out."""
    rows: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for rank in trace.ranks:
        passes = _passes(rank)
        trained = set(_examples(rank))
        for record in rank.evaluations:
            name = record["loader"]
            if name in passes and name not in trained and record["count"]:
                rows.setdefault(name, []).append((record, passes[name]))
    for pairs in rows.values():
        row = _evaluation(trace, pairs)
        if row is not None:
            yield row
            return


def _evaluation(trace: Trace, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Row | None:
    begun = pairs[0][1]
    size, counts = begun["size"], [record["count"] for record, _ in pairs]
    if not size or not _plain_sampler(begun) or "accelerate" in begun["kind_of"]:
        return None  # Accelerate's gather_for_metrics takes repeated examples off again
    total = sum(counts)
    if all(n == size for n in counts):
        return None  # by each rank, or by one alone
    if begun["drop"] and total < size:
        text = f"the evaluation after {_steps_before(pairs)} steps goes over {total} of {size} examples"
        cause = "drop_last=True leaves out the last, smaller batch: set it to False for evaluation"
        return ("evaluation-part", text, cause, _steps_before(pairs))
    if size < total < 1.5 * size and begun["replicas"] and len(pairs) > 1:
        text = f"the evaluation after {_steps_before(pairs)} steps counts {total - size} of {size} examples twice"
        cause = (
            "DistributedSampler repeats examples until all ranks have as many: leave the repeated ones "
            "out of the scores"
        )
        return ("evaluation-twice", text, cause, _steps_before(pairs))
    return None


def _steps_before(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> int | None:
    """Steps of the first optimizer that were made before an evaluation ended."""
    return next((int(n) for record, _ in pairs for n in record["steps"][:1]), None)


def _workers(trace: Trace) -> Iterator[Row]:
    """Workers of one pass whose generator of random numbers began in the same state and was drawn from."""
    for rank in trace.ranks[:1]:
        alike: Counter[tuple[str, str, str]] = Counter()
        for worker in rank.workers:
            for name, (before, after) in worker["generators"].items():
                if before != after:
                    alike[(worker["loader"], name, before)] += 1
        for (loader, name, _), count in alike.items():
            if count > 1:
                cause = (
                    "seed it in worker_init_fn from torch.initial_seed(), which is another one in each worker and "
                    "epoch, or draw from torch"
                )
                what = f"{count} workers of a loader of rank {rank.number} draw the same random numbers from {name}"
                yield ("same-workers", what, cause, _first(rank, loader))
                return
