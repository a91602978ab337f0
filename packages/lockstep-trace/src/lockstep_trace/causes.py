"""Derives the likely cause of a difference between two trainings from its kind and pattern: the one table of causes.

Differences are measured; a cause is a guess. In: counts, factors and records. Out: one sentence on what is likely wrong
and what to change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep_trace.ranks import Losses, agreeing, data_ranks, examples_of
from lockstep_trace.read import Step, Trace

COSINE = 0.99  # below it a factor is meaningless
ROUNDING = 5e-6  # relative loss difference; more is not float32 rounding
NEAR = 0.01  # relative: a factor equals a number
ROUGHLY = 0.1  # relative: a factor is about a number, if means over unequal counts are added

MISSING_GRADIENT = (
    "these parameters take part in the computation on one side only: a branch that depends on the rank, or parameters "
    "that one side freezes"
)
OTHER_DRAWS = (
    "random numbers (dropout, augmentation) differ between the runs; the losses are nearly equal, so gradients show "
    "it first: compare without dropout"
)
SYNC = "SyncBatchNorm computes them over all ranks, and a norm without batch statistics needs none"
CLIPPED_ELSEWHERE = (
    "gradients are clipped by hand on one side: by the norm of a rank's own shard, or before they are reduced; or "
    "the number of clipping calls differs"
)
LEFT_OUT = "a part of the step's examples was left out, or went through the model twice"
NORM = "the gradients agree but their norm does not: it does not include all gradients, or all ranks"
NOT_FINITE = "non-finite values cannot be compared, even if equal on both sides: check the loss"
PRECISION = "matrix products are computed in different precisions: compare autocast and the model's dtype"
ELSEWHERE = (
    "gradients differ in direction though the losses agree: some contributions were left out or counted twice, or a "
    "gradient was modified"
)
BY_ROUNDING = (
    "they differ only by rounding, which --exact does not allow: other kernels, threads or orders of sums, or last "
    "bits of frozen weights (an adapter that was merged and unmerged)"
)
RANDOM = (
    "random numbers (dropout, augmentation), the loss function, or inputs without a hash (such as a mask) differ "
    "between the runs"
)
UPDATE = (
    "gradients and learning rates agree: look at the optimizer's state (moments, steps counted), "
    "weight decay and its order"
)
OTHER_LABELS = (
    "the model gets the same inputs with other labels: compare how labels are built, shifted and masked, and "
    "whether they match their inputs"
)
OTHER_TARGETS = (
    "the model gets the same inputs, but the loss other targets: compare how targets are built, masked and ordered"
)
LENGTHS = (
    "one run took more steps: compare the number of batches of an epoch, the accumulation steps and how the "
    "last, smaller batch is treated"
)


def of_lengths(a: Trace, b: Trace, optimizer: int) -> str:
    """Return the cause of unequal numbers of steps: an optimizer that was recreated, or `LENGTHS`."""
    counts = [len(t.steps(optimizer)) for t in (a, b)]
    short = (a, b)[counts[1] < counts[0]]
    side = "here" if short is b else "in the reference"
    for other in (o for o in short.optimizers if o > optimizer):
        if _names(short, other) == _names(short, optimizer) and counts[short is b] + len(short.steps(other)) == max(
            counts
        ):
            return (
                f"after {min(counts)} steps the optimizer is recreated {side} with the same parameters, so its "
                "moments restart at zero. Keep it, or load its state"
            )
    return LENGTHS


def _names(trace: Trace, optimizer: int) -> set[str]:
    steps = (s for rank in trace.ranks for s in list(rank.steps.get(optimizer, {}).values())[:1])
    return {p.name for s in steps for p in s.layout.parameters}


def of_start(differing: int, among: int, ranks_apart: Sequence[int]) -> str:
    if ranks_apart:
        return (
            f"ranks start from different weights (rank {ranks_apart[0]} and others): seed every rank alike before the "
            "model is made, or wrap the model in DDP, which sends rank 0's weights"
        )
    if differing < among / 2:
        return (
            "only some weights differ: a layer that is newly initialized (a new head), loaded from another file, or "
            "tied on one side"
        )
    return (
        "the models are initialized with different random numbers or loaded from different files: set the seed "
        "before the model is built"
    )


def of_dtypes(there: str, here: str) -> str:
    return (
        f"the same weights, stored in {here} here and in {there} in the reference: compare where the model is cast. "
        "Updates smaller than the last bit of a half-precision weight are lost"
    )


def of_scores(one: float, other: float) -> str:
    if not (math.isfinite(one) and math.isfinite(other)):
        return NOT_FINITE
    return "the models are not the same, or evaluation changes them"


def of_names(tied: Sequence[str], here: bool = False) -> str:
    """Return the cause of different parameter names. `tied`: names tied on one side only; `here`: in this run."""
    if tied:
        which = ("here", "the reference") if here else ("the reference", "here")
        what = f"{', '.join(tied[:3])} is tied to another parameter in {which[0]}, and not in {which[1]}"
        if here:
            return f"{what}: it was tied, or the reference became untied".replace("in here", "here")
        return f"{what}: tie it again".replace("in here", "here")
    return "the optimizers hold different parameters: some are frozen, new or left out on one side"


def of_examples(
    reference: Trace, trace: Trace, optimizer: int, step: int, one: Counter[str], other: Counter[str]
) -> str:
    ranks = data_ranks(trace, optimizer)
    lists = [tuple(r.steps[optimizer][step].examples or ()) for r in ranks if step in r.steps[optimizer]]
    n, m = one.total(), other.total()
    if n == m and _unlabelled(reference, optimizer, step) == _unlabelled(trace, optimizer, step) != Counter():
        return OTHER_LABELS
    if len(lists) > 1 and len({tuple(sorted(each)) for each in lists}) == 1:
        return (
            "all ranks got the same examples: give each its share (DistributedSampler, or "
            "accelerator.prepare of the loader)"
        )
    if m > n and len(set(other)) < m and set(other) == set(one):
        return (
            f"each example goes through the model {m // n} times in a step: forward and backward run "
            "more than once, or ranks repeat"
        )
    if m > n and m % n == 0:
        if m // n == len(lists):
            return (
                f"the batch size is per process: {len(lists)} processes take {m} examples a step; "
                f"divide it by {len(lists)}"
            )
        return (
            f"a step takes {m // n} times the examples: compare batch size, accumulation steps and number of processes"
        )
    if m < n and n % m == 0:
        return (
            f"a step takes 1/{n // m} of the examples: compare batch size, accumulation steps and number of processes "
            "(a loader that is divided twice, an accumulation that is not counted)"
        )
    if len(set(other)) < m and len(set(one)) == n:
        return (
            "some examples are in the step more than once: ranks share examples, or a sampler pads with repeated ones"
        )
    if n == m and (again := _more_often(reference, trace, optimizer)):
        return (
            f"{again} examples occur more often than any does in as many steps of the reference: a run that lost its "
            "position in the epoch when it was resumed (a state of another number of processes or workers), or "
            "ranks or a "
            "sampler that repeat examples"
        )
    if n == m:
        return (
            "the same number of examples, but in another order: the sampler's seed or epoch (set_epoch), or shuffling "
            "that depends on the process"
        )
    return "steps start at different examples: compare batch size, the last, smaller batch (drop_last) and the sampler"


def _unlabelled(trace: Trace, optimizer: int, step: int) -> Counter[str]:
    records = [r.steps[optimizer][step] for r in data_ranks(trace, optimizer) if step in r.steps[optimizer]]
    return Counter(h for s in records for h in s.unlabelled or ())


def _more_often(reference: Trace, trace: Trace, optimizer: int) -> int:
    steps = sorted(set(reference.steps(optimizer)) & set(trace.steps(optimizer)))
    one, other = (Counter(h for s in steps for h in examples_of(t, optimizer, s)) for t in (reference, trace))
    most = max(one.values(), default=0)
    return sum(n > most for n in other.values())


def of_loss(
    one: Losses,
    other: Losses,
    ours: Sequence[Step],
    theirs: Sequence[Step],
    stochastic: bool = True,
    micro_batches: Sequence[tuple[int, int, float, float]] | None = None,
    exact: bool = False,
) -> str:
    """Return the cause of different losses. `stochastic`: a model has dropout modules. `micro_batches`: (number, rank,
    reference loss, loss) of those with different losses; None if unknown. `exact`: no difference is allowed."""
    if not (math.isfinite(one.summed) and math.isfinite(other.summed)):
        return NOT_FINITE
    ratio = other.summed / one.summed if one.summed else math.nan
    rounded = exact and not micro_batches and abs(ratio - 1) <= ROUNDING
    if micro_batches is not None and not rounded:
        return _of_micro_batches(micro_batches, stochastic)
    if (cause := _of_records(other, ours, theirs)) is not None:
        return cause
    if rounded:
        return BY_ROUNDING
    targets = targets_of(ours)
    for way, name in _factors(len(other.each), other.micro_batches, one.micro_batches):
        if math.isfinite(ratio) and abs(ratio / way - 1) < NEAR and abs(way - 1) > NEAR:
            return (
                f"the loss is {name} times what it should be: {_why_factor(way, len(other.each), other.micro_batches)}"
            )
    examples = sum(n for s in ours for n in s.micro or ())
    alike = one.equal_counts and other.equal_counts  # otherwise a mean of means can be near an integer by chance
    if alike and (divided := _divided(targets, examples, ratio)) is not None:
        return (
            f"the loss is divided by the wrong number: by {divided[1]}, but the step has {divided[0]} targets "
            "(a count of other examples, or of padding)"
        )
    if (len(theirs), other.micro_batches) != (len(ours), one.micro_batches) and _batch_norm(theirs):
        return f"batch norm computes statistics of each rank's or micro-batch's own examples: {SYNC}"
    if not one.equal_counts or not other.equal_counts:
        return (
            "losses are means over unequal numbers of targets: divide the sum of all ranks' and micro-batches' losses "
            "by the number of all targets"
        )
    if {s.autocast for s in ours} != {s.autocast for s in theirs}:
        return PRECISION
    for way, name in _factors(len(other.each), other.micro_batches, one.micro_batches):
        if math.isfinite(ratio) and abs(ratio / way - 1) < ROUGHLY:
            return (
                f"the loss is about {name} times what it should be: "
                f"{_why_factor(way, len(other.each), other.micro_batches)}, and numbers of targets are unequal"
            )
    cut_alike = (len(theirs), other.micro_batches) == (len(ours), one.micro_batches)
    return RANDOM if stochastic else of_loss_function(len(theirs) != len(ours), not cut_alike and targets is None)


def of_loss_function(ranks: bool = False, uncounted: bool = False) -> str:
    """Return the cause of different losses without random numbers. `ranks`: the number of ranks differs. `uncounted`:
    micro-batches are split differently, with unknown numbers of targets."""
    if uncounted:
        return (
            "a mean of means, if ranks or micro-batches have unequal numbers of targets (padding that the loss leaves "
            "out): divide the sum of all losses by the number of all targets. Else " + of_loss_function(ranks)
        )
    term = ", or an auxiliary term that is multiplied by the number of ranks" if ranks else ""
    return (
        f"the loss function or its options differ (label smoothing, weights, reduction{term}), or inputs that no "
        "hash sees, such as a mask; the model has no dropout"
    )


def _of_records(other: Losses, ours: Sequence[Step], theirs: Sequence[Step]) -> str | None:
    modes = {s.training for s in ours} | {s.training for s in theirs}
    if modes >= {True, False}:
        side = "here" if any(s.training is False for s in theirs) else "in the reference"
        return f"the model is in evaluation mode {side} and in training mode in the other: call model.train()"
    silent = [i for i, own in enumerate(other.each) if own and not any(own)]
    if silent and any(any(own) for own in other.each):
        return f"the loss of rank {silent[0]} is 0: its examples are masked, or it skips the loss"
    if (left := _left_out(theirs)) and not _left_out(ours):
        return f"backward is not called for {left} of the micro-batches that went through the model"
    if (text := _of_functions(ours, theirs)) is not None:
        return text
    targets = [targets_of(records) for records in (ours, theirs)]
    if None not in targets and targets[0] != targets[1]:
        return (
            f"the step has {targets[1]} targets here and {targets[0]} in the reference: padding counts as a target "
            "(label -100 leaves it out), or labels are masked differently"
        )
    return None


def _of_functions(ours: Sequence[Step], theirs: Sequence[Step]) -> str | None:
    sides = [[each for s in records for each in s.objectives or ()] for records in (ours, theirs)]
    if not all(sides):
        return None
    kinds = [Counter(str(each["kind"]) for each in side) for side in sides]
    if kinds[0].keys() != kinds[1].keys():
        names = [", ".join(sorted(each)) for each in kinds]
        return f"the loss function differs: {names[1]} here, {names[0]} in the reference"
    spread = [sum(bool(each.get("expanded")) for each in side) for side in sides]
    if bool(spread[0]) != bool(spread[1]):
        return (
            "predictions are broadcast against targets of another shape "
            f"{'here' if spread[1] else 'in the reference'}: give both the same shape"
        )
    counts = [[each.get("targets") for each in side] for side in sides]
    if None in counts[0] or None in counts[1]:
        return None
    if sum(counts[0]) != sum(counts[1]):
        return (
            f"the step has {sum(counts[1])} targets here and {sum(counts[0])} in the reference: padding counts as a "
            "target (label -100 leaves it out), or labels are masked differently"
        )
    if len(sides[0]) == len(sides[1]):  # split in the same way
        ordered, any_order = ([[each["hashes"][i] for each in side] for side in sides] for i in (0, 1))
        if any_order[0] == any_order[1] and ordered[0] != ordered[1]:
            return (
                f"the loss has the same targets in another order: they do not belong to their inputs. {OTHER_TARGETS}"
            )
        if Counter(any_order[0]) != Counter(any_order[1]):
            return OTHER_TARGETS
    before = [Counter(tuple(each["before"][:2]) for each in side) for side in sides]
    if before[0].keys() != before[1].keys():
        names = [" and ".join(sorted(" after ".join(b) for b in each)) for each in before]
        return f"the input of the loss is computed differently: {names[1]} here, {names[0]} in the reference"
    return None


def _of_micro_batches(differing: Sequence[tuple[int, int, float, float]], stochastic: bool) -> str:
    if not differing:
        return (
            "the loss of each micro-batch agrees, but their sum does not: some are missing from it or counted twice, "
            "or means over unequal numbers of targets are averaged"
        )
    if all(loss == 0 for *_, loss in differing):
        number, rank = differing[0][:2]
        return f"the loss of micro-batch {number} on rank {rank} is 0: its examples are masked, or it is left out"
    if not stochastic:
        return "the loss function or its options differ, or the code of the model depends on the rank"
    if all(rank for _, rank, *_ in differing):
        return "random numbers (dropout, augmentation) depend on the rank: seed them by the example, or by its place"
    return RANDOM


def _divided(targets: int | None, examples: int, ratio: float) -> tuple[int, int] | None:
    if not targets or not math.isfinite(ratio) or ratio <= 0:
        return None
    for count in (targets, targets - examples):
        near = round(count / ratio)
        if 0 < near < 2000 and near != count and abs(count / ratio / near - 1) < 1e-5:
            return count, near
    return None


def _left_out(records: Sequence[Step]) -> int:
    return sum(max((s.forwards or 0) - (s.backwards or 0), 0) for s in records if s.backwards)


def targets_of(records: Sequence[Step]) -> int | None:
    counts = [n for s in records for n in s.targets or [None]]
    return None if None in counts else sum(n for n in counts if n is not None)


def _batch_norm(records: Sequence[Step]) -> bool:
    return any("running_mean" in name for s in records for name, *_ in s.raw.get("buffers_of", ()))


def _factors(world: int, micro: int, reference_micro: int) -> list[tuple[float, str]]:
    factors: list[tuple[float, str]] = []
    for value, name in (
        (world, f"{world} (the number of ranks)"),
        (1 / world, f"1/{world} (ranks)"),
        (micro, f"{micro} (the micro-batches of a step)"),
        (1 / micro, f"1/{micro} (the micro-batches of a step)"),
        (1 / reference_micro, f"1/{reference_micro} (the reference's micro-batches)"),
        (world * micro, f"{world * micro} (ranks times micro-batches)"),
        (1 / (world * micro), f"1/{world * micro} (ranks times micro-batches)"),
    ):
        if value != 1:
            factors.append((float(value), name))
    return factors


def _why_factor(value: float, world: int, micro: int) -> str:
    if value == world and micro == world:
        return "sums over ranks where a mean is meant, or micro-batches that are added without dividing by their number"
    if value == world:
        return "gradients or losses are summed over ranks where they should be averaged"
    if value == 1 / world and micro == world:
        return "divided twice, by the ranks or by the micro-batches"
    if value == 1 / world:
        return "averaged over ranks where they should be summed, or divided by the number of ranks twice"
    if value == micro:
        return "losses of micro-batches are added without dividing by their number (gradient accumulation)"
    if value == 1 / micro:
        return "divided by the number of micro-batches twice, or only one of them counts"
    return "a sum where a mean is meant, or the reverse, over ranks and micro-batches"


def of_gradient(
    trace: Trace,
    optimizer: int,
    step: int,
    sides: tuple[Mapping[str, float], Mapping[str, float], Mapping[str, tuple[float, float]]],
    split: set[str],
    losses: tuple[Losses, Losses, str] | None,
    stochastic: bool = False,
) -> str:
    """Return the cause of different gradients. `sides`: differences beyond the limit, all differences, (factor, cosine)
    of those beyond. `split`: parameters whose gradients differ between ranks. `stochastic`: a model has dropout."""
    wrong, every, factors = sides
    if any(math.isnan(d) for d in wrong.values()):
        return NOT_FINITE
    ranks = data_ranks(trace, optimizer)
    if split:
        return _not_reduced(split, len(every))
    records = [r.steps[optimizer][step] for r in ranks if step in r.steps[optimizer]]
    if any("not zeroed" in note for r in records for note in r.notes or []):
        return "gradients of the step before were not zeroed: call optimizer.zero_grad() in each step"
    micro = (losses[1].micro_batches, losses[0].micro_batches) if losses else (1, 1)
    unequal = losses is not None and not (losses[0].equal_counts and losses[1].equal_counts)
    pure = [f for f, cosine in factors.values() if cosine > COSINE]
    scale = next((s.scale for s in records if s.scale), None)
    most = len(wrong) > len(every) / 2 and len(pure) < 0.9 * len(factors)
    if stochastic and most and losses and agreeing(losses[0], losses[1], ROUNDING)[0] is None:
        return OTHER_DRAWS  # an untrained model has nearly the same loss for all dropout masks
    return of_sums(
        list(wrong), len(every), pure if len(pure) >= 0.9 * len(factors) else [], (len(ranks), *micro), unequal, scale
    )


def of_sums(
    wrong: Sequence[str],
    among: int,
    factors: Sequence[float],
    sizes: tuple[int, int, int] = (1, 1, 1),
    unequal: bool = False,
    scale: float | None = None,
) -> str:
    """Return the cause of different sums over micro-batches and ranks. `factors`: ratio of each; empty if the
    difference is not a factor. `sizes`: ranks, micro-batches per rank here and in the reference. `unequal`: losses have
    unequal numbers of targets. `scale`: loss scale."""
    if factors and min(factors) > 0 and max(factors) / min(factors) - 1 < 2 * NEAR:
        middle = sorted(factors)[len(factors) // 2]
        if abs(middle - 1) > NEAR / 10:
            return _of_factor(middle, wrong, among, sizes, scale)
    if len(wrong) <= among / 2:
        also = "they may not be reduced over all ranks, or look" if sizes[0] > 1 else "look"
        return (
            f"only a part of the parameters ({few(wrong)}): {also} at what computes these gradients (checkpointing, a "
            "layer, a hook)"
        )
    if unequal:
        return (
            "a mean of means: losses of ranks or micro-batches with unequal numbers of targets are averaged; divide "
            "their sum by the number of all targets. If that is done: a part of the gradients was left out or "
            "counted twice"
        )
    return ELSEWHERE


def few(names: Sequence[str], most: int = 3) -> str:
    """List at most `most` names, and the number of further ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _not_reduced(split: set[str], among: int) -> str:
    if len(split) >= 0.9 * among:
        return (
            "gradients are not reduced over ranks: the model is not wrapped (DDP, FSDP), the forward pass bypasses "
            "the wrapper (model.module), or backward ran under no_sync in the step"
        )
    names = ", ".join(sorted(split)[:3])
    return (
        f"{names}: the gradient is not reduced over ranks; each rank keeps its own (DDP ignores it, or "
        "it was added after wrapping)"
    )


def _of_factor(f: float, wrong: Sequence[str], among: int, sizes: tuple[int, int, int], scale: float | None) -> str:
    world, micro, reference = sizes
    if len(wrong) <= 0.9 * among:
        return (
            f"only a part of the parameters ({few(wrong)}), by the factor {f:.4g}: look at what computes these "
            "gradients (a custom function, a hook, a layer that is used twice), and at how they are reduced"
        )
    which = "every gradient is"
    if scale and abs(f / scale - 1) < NEAR:
        return f"{which} multiplied by the loss scale {scale:g}: the gradients were not unscaled"
    for value, name in _factors(world, micro, reference):
        if abs(f / value - 1) < NEAR:
            return f"{which} {name} times what it should be: {_why_factor(value, world, micro)}"
    above_one = f if f >= 1 else 1 / f
    near = round(above_one)
    text = f"{f:.4g}"
    if near > 1 and abs(above_one / near - 1) < NEAR:
        text = f"{near}" if f >= 1 else f"1/{near}"
    return (
        f"{which} {text} times what it should be: a sum counted twice, or a mean where a sum is meant "
        "(loss and its divisor)"
    )


def of_clip_limits(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str:
    if len(one) != len(other):
        return "gradients are clipped more often, or not at all, on one side"
    kinds = {str(c.get("how")) for c in one}, {str(c.get("how")) for c in other}
    if kinds[0] != kinds[1]:
        return f"gradients are clipped differently: {', '.join(kinds[0])} and {', '.join(kinds[1])}"
    return "another limit of the gradient norm"


def own_norms(scales: Mapping[int, float]) -> str | None:
    """Return the cause if ranks clip by different factors, else None. `scales`: rank -> factor."""
    low, high = min(scales, key=lambda r: scales[r]), max(scales, key=lambda r: scales[r])
    if scales[high] <= (1 + NEAR) * scales[low]:
        return None
    return (
        f"each rank clips by the norm of its own shards (rank {low} scales by {scales[low]:.3g}, rank {high} by "
        f"{scales[high]:.3g}): the norm has to be that of the gradient over all ranks"
    )


def of_clipping(factors: Mapping[str, tuple[float, float]]) -> str:
    values = [f for f, cosine in factors.values() if cosine > COSINE]
    if len(values) == len(factors):
        return (
            "clipping scales by a different factor: each rank clips by the norm of its own shards, or by "
            "a norm of other "
            "parameters, or before gradients were unscaled"
        )
    return "clipping treats parameters differently: by value, or only some of them"


def of_rate(key: str, x: Any, y: Any, trace: Trace, ours: Sequence[Step], theirs: Sequence[Step]) -> str:
    world = len(trace.ranks)
    if key != "lr":
        return f"the optimizers are created with a different {key}, or their parameter groups are split differently"
    counts = [sum((s.schedulers or {}).values()) for s in (ours[0], theirs[0])]
    if counts[0] != counts[1]:
        by = (
            " (Accelerate steps a prepared scheduler once a process)"
            if any("accelerate" in k for k in theirs[0].schedulers or {})
            else ""
        )
        return (
            f"the scheduler is stepped {counts[1]} times between these steps, and {counts[0]} times in "
            f"the reference{by}"
        )
    if isinstance(x, float) and isinstance(y, float) and x > 0 and abs(y / x / world - 1) < 1e-6 and world > 1:
        return f"the learning rate is scaled by the number of ranks, {world}"
    return "a different learning rate or schedule: its length may count epochs, batches of one rank, or micro-batches"


def of_update(factors: Mapping[str, tuple[float, float]], ours: Sequence[Step], theirs: Sequence[Step]) -> str:
    if any(not math.isfinite(v.square) for s in (*ours, *theirs) for v in s.updates.values()):
        return NOT_FINITE
    kinds = ours[0].layout.optimizer, theirs[0].layout.optimizer
    still = [n for n, (f, _) in factors.items() if math.isnan(f) or f == 0]
    if still and len(still) == len(factors):
        return (
            f"gradients agree but {', '.join(still[:3])} does not change: the optimizer does not hold the model's "
            "parameters, the step was skipped, or the change is lost in rounding"
        )
    if kinds[0] != kinds[1]:
        return f"gradients and learning rates agree, the optimizers are {kinds[0]} and {kinds[1]}"
    return UPDATE


def of_buffers(names: Sequence[str]) -> str:
    if any("running" in n or "num_batches" in n for n in names):
        return f"batch-norm statistics are those of each rank's own batch: {SYNC}"
    return "a buffer that the forward changes depends on the rank or on how the batch is split"
