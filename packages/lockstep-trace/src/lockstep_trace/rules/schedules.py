"""Rules on learning rate schedulers: stepped too often, too rarely or never, or reset after a state was loaded."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator

from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules import PATIENCE, SUSPICIOUS, Finding, premises, weakened

LENGTH = "a schedule whose length accounts for it"
COUNTS = "the unit of the schedule's length: optimizer steps, micro-batches, examples or epochs"
ENDED = 0.1  # share of the maximum; below it, a schedule may have ended
JUMP, LEAST_GAP = 0.1, 0.05  # shares of the difference between two rates, and of the larger rate
REST = 0.009  # of the sum of all rates; tenths at each quarter of a run leave 0.0099 for its second half
MOST_OF = 20  # steps
LEAST_OF = 8  # steps; a smaller count may match another number by chance
LATER = ("SWALR",)  # schedulers that start at an epoch chosen by the script


def often(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report schedulers that are not stepped exactly once per optimizer step.

    The schedule's length may account for it, unless it is exactly the number of optimizer steps of a whole run."""
    for rank in trace.ranks[:1]:
        steps = [s for n, s in sorted(rank.steps.get(optimizer, {}).items()) if n > 0]
        if len(steps) < PATIENCE:
            return
        for name in sorted({n for s in steps for n in s.schedulers or ()}):
            counts = [(s.schedulers or {}).get(name, 0) for s in steps]
            usual = max(set(counts), key=counts.count)
            if name.endswith(" by accelerate"):
                continue  # once per process, by design: docs/how-to/trace.md
            if usual == 0 and (interval := _seldom(rank, optimizer, name)) is not None:
                why = "step it where the optimizer steps, if its length counts optimizer steps"
                what = f"from step {interval[0]} on {name} is stepped once every {interval[1]} optimizer steps"
                yield Finding("scheduler", what, why, interval[0], SUSPICIOUS, LENGTH, COUNTS)
            if usual < 2 or counts.count(usual) < 0.6 * len(counts):
                continue
            at = steps[counts.index(usual)].step
            whole = trace.complete and len(steps) + 1 >= LEAST_OF
            lengths = [
                r["length"]
                for r in (rank.ended or {}).get("lengths", ())
                if r["opt"] == optimizer and r["name"] != "LinearLR"
            ]
            if trace.complete and sum(s.backwards for s in rank.steps[optimizer].values()) in lengths:
                continue  # it counts micro-batches
            proved = whole and len(steps) + 1 in lengths and len({n.rstrip("'") for n in steps[-1].schedulers}) == 1
            micro = steps[0].backwards
            why = (
                "it is stepped with each micro-batch: step it where the optimizer steps"
                if usual == micro
                else "it is stepped once per rank, or twice: call scheduler.step() once for each optimizer.step()"
            )
            what = f"before step {at} {name} is stepped {usual} times between two optimizer steps"
            if proved:
                what += f"; its length is {len(steps) + 1}, the number of optimizer steps"
            yield weakened(Finding("scheduler", what, why, at), proved, LENGTH, COUNTS, True)


def _seldom(rank: Rank, optimizer: int, name: str) -> tuple[int, int] | None:
    steps = rank.steps[optimizer]
    at = [n for n, s in sorted(steps.items()) if (s.schedulers or {}).get(name)]
    every = {b - a for a, b in itertools.pairwise(at)}
    if len(at) < 3 or len(every) != 1 or name.startswith("ReduceLROnPlateau"):
        return None
    ends = {n for r in (*rank.passed, *rank.evaluations) for n in r["steps"][optimizer : optimizer + 1]}
    return None if ends & set(at) else (at[0], every.pop())


def unit(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a schedule whose length counts optimizer steps but which is stepped once per epoch, and a cosine schedule
    whose length counts epochs but which is stepped with the optimizer.

    The first has hardly begun when the run ends: a length of exactly all optimizer steps means that it should end with
    them, unless it is a round number that a trial of a longer run may share. The second rises and falls many times,
    which may be intended. With two micro-batches a step or two ranks, a run that ends after half of its schedule, as
    planned or early, has the same numbers, so that is not told by default."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None or rank.ended is None or not trace.complete:
        return
    steps, rounds = len(rank.steps[optimizer]), premises.rounds(rank, optimizer)
    batches = "batches" if trace.world == 1 else f"batches on {trace.world} ranks"
    backwards = sum(s.backwards for s in rank.steps[optimizer].values())
    for row in rank.ended.get("lengths", ()):
        name, length, count = row["name"], row["length"], row["count"]
        parts = any(r["resumed"] and r["length"] == length for r in rank.ended["lengths"])  # one run in two halves
        if row["opt"] != optimizer or steps < max(MOST_OF, 4 * rounds) or parts:
            continue
        per_epoch = length == steps and rounds - 1 <= count <= rounds + 1
        slack = max(1, min(count, length // 20))  # a last batch that is dropped, or one more step in each epoch
        near = any(abs(length - n) <= slack for n in (steps, backwards, steps * trace.world)) and count <= 0.6 * length
        if (per_epoch and rounds > 1) or near:
            what = f"{name} has a length of {length}, and is stepped {count} times in {steps} optimizer steps"
            what += f" of {backwards} {batches}: the run ends after {count / length:.0%} of the schedule"
            cause = "step it after each optimizer.step() (interval 'step' in Lightning), or set its length in epochs"
            if not per_epoch and abs(length - backwards) <= slack and steps <= count < backwards:
                cause = f"its length counts micro-batches: divide it by {backwards / steps:.3g}"
            round_ = length % 10 == 0 or length & (length - 1) == 0
            otherwise = "a short trial of a long schedule, whose length equals this number by chance"
            twice = not per_epoch and abs(length - steps) > slack and length < 3 * count
            proved = per_epoch and not round_
            yield weakened(Finding("scheduler-unit", what, cause), proved, otherwise, COUNTS, not twice)
        elif length == rounds > 1 and count >= steps - 1 and name == "CosineAnnealingLR":
            what = f"{name} has a length of {length}, the number of epochs, but is stepped {count} times, with the "
            what += f"optimizer: the learning rate falls and rises {count / length / 2:.3g} times"
            cause = "step it once per epoch, or set its length to all optimizer steps"
            otherwise = "a learning rate that oscillates with this period on purpose"
            yield Finding("scheduler-unit", what, cause, None, SUSPICIOUS, otherwise, COUNTS, True)


def rising(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a rate that rises from the first step to the last and ends far below the optimizer's own: the warm-up is
    longer than the run. A short trial looks the same, so the finding is never proved. A rate that still rises when a
    schedule of transformers is over has a warm-up longer than that schedule: its two numbers may be exchanged."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [] if rank is None else [s for _, s in sorted(rank.steps[optimizer].items())]
    rates = [g.get("lr") or 0.0 for s in steps for g in s.groups[:1]]
    base = steps[-1].groups[0].get("initial_lr") if len(rates) >= MOST_OF and trace.complete else None
    if rank is None or not base or rates != sorted(rates) or rates[0] == rates[-1]:
        return
    stated = [
        r for r in (rank.ended or {}).get("lengths", ()) if r["opt"] == optimizer and r["name"].startswith("LambdaLR")
    ]
    if rates[-2] < rates[-1] and (over := [r["length"] for r in stated if r["length"] < len(rates)]):
        what = f"the learning rate rises to the last of {len(rates)} steps, although the schedule has {over[0]} steps: "
        what += "its warm-up is longer than that"
        cause = "name the arguments: num_warmup_steps=..., num_training_steps=..."
        otherwise, decides = "a rate that should only rise", "which of the two numbers is the larger one"
        yield Finding("scheduler-unit", what, cause, None, SUSPICIOUS, otherwise, decides, True)
    elif rates[-1] < 0.5 * base:
        what = f"the learning rate rises to the last of {len(rates)} steps, where it is {rates[-1]:.3g}, "
        what += f"{rates[-1] / base:.0%} of the optimizer's {base:g}: the warm-up is longer than the run"
        cause = "step the scheduler after each optimizer.step(), or count the warm-up in the scheduler's own steps"
        yield Finding("scheduler-unit", what, cause, None, SUSPICIOUS, "a short trial of a long schedule", COUNTS, True)


def resumed(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an optimizer or a schedule that restarts although its weights continue from an earlier state.

    A new phase may start with empty moments and a new schedule from the weights of the previous one. The schedule
    proves a fault in two cases: in a whole run, its length is exactly the steps of the saved state plus those taken
    here, but it started at its first step; or its state was loaded and the moments were not."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    first = rank.steps[optimizer].get(0) if rank is not None else None
    if rank is None or first is None or not first.resume:
        return
    states, count, loaded = first.resume["states"], len(rank.steps[optimizer]), first.resume["loaded"]
    goes_on = [k for k, by in states if k and (_same_weights(rank, by, first) if by is not None else _read(first))]
    if not goes_on and not loaded:
        return
    lengths = [r for r in (rank.ended or {}).get("lengths", ()) if r["opt"] == optimizer]
    counted = [k for k, _ in states if k] if loaded else goes_on
    anew = [
        (r["name"], k, r["length"])
        for r in lengths
        for k in counted
        if not r["resumed"] and r["length"] == k + count and abs(r["count"] - count) <= 1 and trace.complete
    ]
    midway = [r["name"] for r in lengths if r["resumed"] and not loaded and first.moments]
    kind = first.layout.optimizer
    what = (
        f"{kind} starts with empty moments, although its weights were saved with a state of {(goes_on or [0])[0]} steps"
    )
    if anew:
        name, steps, length = anew[0]
        what = f"{kind} continues after {steps} steps with its state" if loaded else what
        what += (
            f"; {name} has a length of {length}, which is {steps} plus the {count} steps here, but starts at its first"
        )
    elif midway:
        what += f"; {midway[0]} continues where it was"
    elif loaded:
        return
    cause = "load the states of optimizer and scheduler with the weights; check the keys under which they are saved"
    otherwise, decides = (
        "a new phase with new moments",
        "whether the run should continue the checkpoint's optimizer and schedule",
    )
    yield weakened(Finding("state-not-loaded", what, cause, 0), bool(anew or midway), otherwise, decides)


def _read(first: Step) -> bool:
    return bool(first.resume["model_loads"])


def _same_weights(rank: Rank, other: int, first: Step) -> bool:
    steps = rank.steps.get(other)
    last = steps[max(steps)] if steps else None
    if last is None or not (last.measured and first.measured) or last.layout.optimizer != first.layout.optimizer:
        return False
    left, now = ([v.fingerprint for v in values.values()] for values in (last.weights, first.before))
    return len(left) > 0 and left == now


def never(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a scheduler that is never stepped.

    No correct program creates one, never steps it in two or more epochs, and ends with its initial rate. A scheduler
    with a late start may not have begun yet."""
    for rank in trace.ranks[:1]:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items())]
        if len(steps) < PATIENCE or not premises.repeats(rank, optimizer):
            return
        later = (rank.ended or {}).get("stepped", ())
        idle = [name for number, name in steps[-1].idle or () if number not in later]
        rates = {tuple(group.get("lr") for group in s.groups) for s in steps}
        if idle and len(rates) == 1:
            why = "call scheduler.step() after each optimizer.step(), or after each epoch if its length counts epochs"
            rate = ", ".join(f"{x:g}" for x in dict.fromkeys(rates.pop()) if x is not None)
            what = f"{idle[-1]} is never stepped: the learning rate is {rate} in all {len(steps)} steps"
            proved = trace.complete and not any(n in LATER for n in idle) and premises.rounds(rank, optimizer) > 1
            otherwise = "a scheduler that starts at a later step or epoch"
            yield weakened(Finding("scheduler-not-stepped", what, why), proved, otherwise, "a trace of the whole run")


def elsewhere(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a scheduler that is stepped although another optimizer than its own updates the parameters.

    No correct program keeps stepping it after its optimizer's last step; optimizers that alternate both take steps."""
    for rank in trace.ranks[:1]:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items())]
        calls = [s for s in steps if s.elsewhere]
        if len(calls) < 2 or any(s.schedulers for s in steps):
            continue
        name, first = calls[0].elsewhere[0], calls[0].step
        rates = {tuple(group.get("lr") for group in s.groups) for s in steps}
        others = [o for o in rank.steps if o != optimizer]
        kind = steps[0].layout.optimizer
        what = (
            f"{name} is stepped {len(calls)} times from step {first} of {kind} on, but belongs to another optimizer of "
            f"the same parameters: it does not change the learning rate of {kind}"
        )
        cause = "create the scheduler with the optimizer that steps"
        turns = any(_later(rank, o, calls[0]) for o in others)
        proved = len(rates) == 1 and not turns
        otherwise = "optimizers that alternate"
        yield weakened(Finding("scheduler-elsewhere", what, cause, first), proved, otherwise, "which optimizers step")


def _later(rank: Rank, optimizer: int, step: Step) -> bool:
    return any(s.raw["at"] > step.raw["at"] for s in rank.steps[optimizer].values())


def after_load(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a scheduler created after its optimizer's state was loaded, which resets the learning rate.

    No correct program then loads the scheduler's state, with a different rate, and steps with the reset rate. Without
    a loaded scheduler state, the schedule may restart on purpose."""
    for rank in trace.ranks[:1]:
        for number, step in sorted(rank.steps.get(optimizer, {}).items()):
            loaded = step.loaded
            if not loaded or not loaded["scheduler"] or not loaded["set_to"]:
                continue
            now = [group.get("lr") for group in step.groups]
            if _near(now, loaded["rates"]) or not _near(now, loaded["set_to"]):
                continue
            rates = f"{loaded['rates'][0]:g} was loaded, but step {number} uses {now[0]:g}"
            cause = (
                "create the scheduler before loading the optimizer's state (load_state_dict comes last), or with "
                "last_epoch"
            )
            what = (
                f"{loaded['scheduler']} was created after the optimizer's state was loaded, and reset the "
                f"learning rate: {rates}"
            )
            resumed = loaded["resumed"]
            proved = bool(resumed) and not _near(now, resumed)
            if proved:
                what += f"; the scheduler's own state, loaded later, has {resumed[0]:g}"
            otherwise = "a schedule that restarts on purpose"
            finding = Finding("scheduler-after-load", what, cause, number)
            yield weakened(finding, proved, otherwise, "whether the run should continue the schedule that it loads")
            return


def anew(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a schedule that restarts although its optimizer continues with a loaded state.

    A schedule created before the load sets its first learning rate, which the loaded state replaces: the first step
    uses the old schedule's rate, and the next one the second rate of the new schedule. A schedule that continues by an
    offset or `last_epoch` has rates that follow the loaded one; a new phase creates its schedule, or sets its rate,
    after loading. The finding is proved only if both schedules have the same maximum and the old one has not ended."""
    for rank in trace.ranks[:1]:
        steps = rank.steps.get(optimizer, {})
        for number, step in sorted(steps.items()):
            following = [steps[n] for n in (number + 1, number + 2) if n in steps]
            loaded = step.loaded or {}
            if not (loaded.get("earlier") and loaded.get("read")) or len(following) < 2 or not step.groups:
                continue
            rates, (then, later) = loaded["rates"], map(_rates, following)
            if not all(each.schedulers for each in following) or not _near(_rates(step), rates):
                continue
            sizes = {len(each) for each in (rates, then, later, loaded["begun"])}
            if len(sizes) > 1 or not all(map(_begins, loaded["begun"], rates, then, later)):
                continue
            what = f"step {number} uses the learning rate of the loaded state, {rates[0]:g}, and the next step uses "
            what += (
                f"{then[0]:g}: {step.loaded['earlier']} was created before the load, did not load its own "
                "state, and restarts"
            )
            cause = "save and load the scheduler's state_dict with the optimizer's"
            otherwise, decides = (
                "a new phase with its own schedule",
                "whether the run should continue the schedule it loads",
            )
            one = loaded["peaks"] == loaded["own_peaks"] and bool(loaded["peaks"])
            unfinished = one and all(r > ENDED * p for r, p in zip(rates, loaded["peaks"], strict=False))
            yield weakened(Finding("schedule-anew", what, cause, number), unfinished, otherwise, decides)
            return


def _begins(begun: float, rate: float, then: float, later: float) -> bool:
    gap = abs(begun - rate)
    return gap > LEAST_GAP * max(begun, rate) and abs(2 * then - later - begun) < JUMP * gap


def _rates(step: Step) -> list[float]:
    return [float(group["lr"]) for group in step.groups if isinstance(group.get("lr"), int | float)]


def _near(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(one, other, strict=True))


def vanishing(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a learning rate of which the second half of a run has less than a hundredth.

    Either the schedule counts another unit than intended, or training had converged, so the finding is never proved. A
    plateau is measured, and what changes the rate between epochs alone, or by hand, is not stepped too often. A rate of
    exactly 0 is `rate-zero`."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None or not trace.complete:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items())]
    rates = [max((group.get("lr") or 0 for group in s.groups), default=0) for s in steps]
    later = rates[len(rates) // 2 :]
    share = sum(later) / (sum(rates) or 1.0)
    if len(steps) < MOST_OF or rates[-1] <= 0 or share > REST:
        return
    counted = {name for s in steps for name in s.schedulers or () if not name.startswith("ReduceLROnPlateau")}
    begins = {premises.first_step(rank, name, optimizer) for name in premises.examples_of_passes(rank, optimizer)}
    changes = [s.step for s, (a, b) in zip(steps[1:], itertools.pairwise(rates), strict=True) if a != b]
    if not counted or {*changes} <= begins or premises.rounds(rank, optimizer) >= len(steps):
        return
    step = steps[-len(later)].step
    what = (
        f"from step {step} on, the last {len(later)} of {len(steps)} steps have {share:.1g} of the sum of all learning "
    )
    what += f"rates, and hardly change the weights; at the end it is {rates[-1]:.2g}, after {max(rates):.2g}"
    cause = "the schedule is stepped too often, for example once per step where its numbers count epochs"
    otherwise = "a long last phase that hardly changes anything on purpose"
    yield Finding("rate-vanishes", what, cause, step, SUSPICIOUS, otherwise, COUNTS)


def overwritten(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an optimizer created with a different learning rate for each group that uses one rate for all groups in
    every step of a whole run.

    Other code sets one rate for all groups before the first step and at each change, so no step ever uses the rates
    that the script states. A correct program that wants one rate states none per group. A learning rate search, whose
    rate grows from step to step, is the exception."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    first = rank.steps[optimizer].get(0) if rank is not None else None
    if rank is None or first is None or not trace.complete:
        return
    own = first.rates_made or []
    steps = [s for _, s in sorted(rank.steps[optimizer].items())]
    rates = [[group.get("lr") for group in s.groups] for s in steps]
    if len(set(own)) < 2 or not all(own) or len(steps) < LEAST_OF or any(len(row) != len(own) for row in rates):
        return
    if any(None in row or len(set(row)) > 1 for row in rates) or sum(row[0] > 0 for row in rates) < LEAST_OF:
        return
    stated = ", ".join(f"{rate:g}" for rate in dict.fromkeys(own))
    what = f"{first.layout.optimizer} was created with learning rates {stated} for its groups, but in all {len(steps)} "
    what += f"steps all groups have the same rate ({rates[0][0]:g} in the first)"
    cause = (
        "other code sets one rate for all groups: scale each group's own rate (LambdaLR does), or pass a list of rates "
    )
    cause += "(max_lr of OneCycleLR)"
    grows = all(b[0] > a[0] for a, b in itertools.pairwise(rates))
    otherwise = "a learning rate search" if grows else "an optimizer that sets rates itself"
    finding = Finding("rates-overwritten", what, cause, 0)
    yield weakened(finding, not first.layout.own and not grows, otherwise, "which code sets the rates of its groups")


def unread(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an attribute `lr` on a torch optimizer that changes from step to step while the rates of its groups never
    do.

    torch reads only the rates of the groups. A correct program that stores its own number there copies it to the
    groups, or keeps it constant."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [s for _, s in sorted(rank.steps[optimizer].items())] if rank is not None else []
    rates = {tuple(group.get("lr") for group in s.groups) for s in steps}
    written = [s.unread_rate for s in steps if s.unread_rate is not None]
    if len(set(written)) < LEAST_OF or len(rates) != 1 or len(written) < len(steps) - 1:
        return
    rate = next(iter(rates))[0]
    what = (
        f"{steps[0].layout.optimizer} has an attribute lr with {len(set(written))} values, from {min(written):.3g} to "
    )
    what += f"{max(written):.3g}, but the learning rate of its groups is {rate:g} in all {len(steps)} steps"
    cause = "torch does not read optimizer.lr: set group['lr'] for each group of optimizer.param_groups"
    finding = Finding("rate-unread", what, cause, steps[0].step)
    yield weakened(finding, trace.complete, "group rates that are set later", "a trace of the whole run")


def direction(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a ReduceLROnPlateau with mode 'max' whose score falls together with the training loss.

    In failing training, accuracy may fall from the first epoch on, so the finding is never proved."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None or rank.ended is None:
        return
    for row in rank.ended.get("plateaus", ()):
        scores, rates = row["scores"], row["rates"]
        ends = [each[optimizer] if len(each) > optimizer else 0 for each in row["steps"]]
        means = [_mean_loss(rank, optimizer, a, b) for a, b in itertools.pairwise([0, *ends])]
        pairs = [(x, y) for x, y in zip(scores, means, strict=True) if y is not None and math.isfinite(x)]
        if row["mode"] != "max" or len(pairs) < 4 or min(rates) >= rates[0] or len(pairs) < len(scores):
            continue
        fall = all(x < scores[0] for x in scores[1:]) and pairs[-1][1] < 0.8 * pairs[0][1]
        if fall and statistics.correlation(*zip(*pairs, strict=True)) > 0.8:
            what = (
                f"ReduceLROnPlateau has mode='max', but its scores fall with the training loss, from {scores[0]:.4g} "
            )
            what += f"to {scores[-1]:.4g}; meanwhile the learning rate falls from {rates[0]:g} to {rates[-1]:g}"
            cause = "a loss improves by falling: mode='min'"
            otherwise, decides = "a score that worsens from the start", "which number the scheduler receives"
            yield Finding("scheduler-direction", what, cause, None, SUSPICIOUS, otherwise, decides)


def _mean_loss(rank: Rank, optimizer: int, first: int, end: int) -> float | None:
    steps = [rank.steps[optimizer][n] for n in range(first, end) if n in rank.steps[optimizer]]
    losses = [value for s in steps for value, _ in s.losses or () if value is not None and math.isfinite(value)]
    return sum(losses) / len(losses) if losses else None


# -- the score by which a trainer chooses the best weights, or when to stop

ERRORS = {
    "loss",
    "mae",
    "mse",
    "rmse",
    "mape",
    "wer",
    "cer",
    "perplexity",
    "ppl",
    "error",
    "err",
    "brier",
    "ece",
    "nll",
}
SCORES = {"accuracy", "acc", "f1", "auc", "auroc", "precision", "recall", "bleu", "rouge", "ndcg", "mrr", "iou", "dice"}
SCORES |= {"map", "miou", "r2", "psnr", "ssim", "mcc", "kappa", "pearson", "spearman", "correlation", "em"}
OTHER = {
    "neg",
    "negative",
    "minus",
    "inverse",
    "inverted",
    "inv",
    "gain",
    "drop",
    "gap",
    "delta",
    "improvement",
    "scale",
}
# words that do not change a name's meaning, unless it begins with a number ("1-acc")
NEUTRAL = {"eval", "val", "valid", "validation", "dev", "test", "rate", "mean", "avg", "average", "macro", "micro"}
NEUTRAL |= {"weighted", "balanced", "top", "at", "k", "word", "char", "character", "token", "epoch", "step", "score"}


def wrong_way(trace: Trace) -> Iterator[Finding]:
    """Report an error metric whose largest value counts as the best, or a score whose smallest value does.

    The direction is known only for a few names, without a word that reverses it. Metrics with negative values may be
    reversed, too, and are skipped. No correct program keeps the weights with the model's largest error. But the error
    of an adversary, or on data to be forgotten, may be maximized: other words in the name, or a loss that is maximized,
    make the finding a suspicion."""
    raised = any(g.get("maximize") for r in trace.ranks[:1] for s in r.steps.values() for g in s[max(s)].groups)
    rows: dict[tuple[str, str, str], list[float]] = {}
    for rank in trace.ranks[:1]:
        for row in rank.selections:
            rows.setdefault((row["by"], row["metric"], row["mode"]), []).append(row["value"])
    for (by, metric, mode), values in rows.items():
        parts = [w for w in re.split(r"[^a-z0-9]+", metric.lower()) if w]
        words = set(parts)
        is_error, is_score = bool(words & ERRORS), bool(words & SCORES)
        if is_error == is_score or words & OTHER or min(values) < 0 or len(set(values)) < 2:
            continue
        if mode != ("max" if is_error else "min"):
            continue
        best, other = (max, min) if is_error else (min, max)
        which = "largest" if is_error else "smallest"
        what = (
            f"{by} treats the {which} {metric} as the best: {best(values):.4g}, in a range of {other(values):.4g} to "
        )
        what += f"{best(values):.4g} over {len(values)} evaluations"
        usual = f"mode='{'min' if is_error else 'max'}'"
        cause = f"set {f'greater_is_better={not is_error}' if by == 'Trainer' else usual}"
        rest = [w for w in parts if w not in NEUTRAL]
        plain = all(w in ERRORS | SCORES or (i and w.isdigit()) for i, w in enumerate(rest))
        otherwise = "a metric of something that should get worse, such as an adversary"
        yield weakened(
            Finding("best-is-worst", what, cause), plain and not raised, otherwise, "what the metric measures"
        )
