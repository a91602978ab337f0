"""Schedulers of learning rates: stepped too often, too seldom or never, or made after a state was loaded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules import epochs
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, Finding, weakened

LENGTH = "the schedule may be as long as that"
COUNTS = "what the schedule's length counts: steps of the optimizer, micro-batches, examples or epochs"
LATER = ("SWALR",)  # that begin at an epoch of the script's choice


def often(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """More, or less, than one step of a scheduler for one of its optimizer. A schedule may be made as long as that, so
    none of these is proved."""
    for rank in trace.ranks[:1]:
        steps = [s for n, s in sorted(rank.steps.get(optimizer, {}).items()) if n > 0]
        if len(steps) < PATIENCE:
            return
        for name in sorted({n for s in steps for n in s.schedulers or ()}):
            counts = [(s.schedulers or {}).get(name, 0) for s in steps]
            usual = max(set(counts), key=counts.count)
            if name.endswith(" by accelerate"):
                continue  # once a process, by design: docs/how-to/trace.md
            if usual == 0 and (interval := _seldom(rank, optimizer, name)) is not None:
                why = "step it where the optimizer steps: its length counts the optimizer's steps"
                what = f"from step {interval[0]} on {name} is stepped once in {interval[1]} steps of the optimizer"
                yield Finding("scheduler", what, why, interval[0], SUSPICIOUS, LENGTH, COUNTS)
            if usual < 2 or counts.count(usual) < 0.6 * len(counts):
                continue
            at = steps[counts.index(usual)].step
            micro = steps[0].backwards
            why = (
                "it is stepped with each micro-batch: step it where the optimizer steps"
                if usual == micro
                else "it is stepped with each rank or twice: call scheduler.step() once for each optimizer.step()"
            )
            what = f"before step {at} {name} is stepped {usual} times between two steps of the optimizer"
            yield Finding("scheduler", what, why, at, SUSPICIOUS, LENGTH, COUNTS)


def _seldom(rank: Rank, optimizer: int, name: str) -> tuple[int, int] | None:
    """(first step, every how many) where a scheduler is stepped at each N-th step, which is the end of neither an epoch
    nor an evaluation."""
    steps = rank.steps[optimizer]
    at = [n for n, s in sorted(steps.items()) if (s.schedulers or {}).get(name)]
    every = {b - a for a, b in itertools.pairwise(at)}
    if len(at) < 3 or len(every) != 1 or name.startswith("ReduceLROnPlateau"):
        return None
    ends = {n for r in (*rank.passed, *rank.evaluations) for n in r["steps"][optimizer : optimizer + 1]}
    return None if ends & set(at) else (at[0], every.pop())


def never(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """A scheduler that a whole run goes by without. No right program makes one, never steps it in two epochs or more,
    and ends with the rate that it set at first; one that begins later may be cut off before."""
    for rank in trace.ranks[:1]:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items())]
        if len(steps) < PATIENCE or not epochs.repeats(rank, optimizer):
            return
        later = (rank.ended or {}).get("stepped", ())
        idle = [name for number, name in steps[-1].idle or () if number not in later]
        rates = {tuple(group.get("lr") for group in s.groups) for s in steps}
        if idle and len(rates) == 1:
            why = (
                "call scheduler.step() after each optimizer.step(), or after each epoch where its length counts epochs"
            )
            rate = ", ".join(f"{x:g}" for x in dict.fromkeys(rates.pop()) if x is not None)
            what = f"{idle[-1]} is never stepped: the learning rate is {rate} in all {len(steps)} steps"
            proved = trace.complete and not any(n in LATER for n in idle) and epochs.rounds(rank, optimizer) > 1
            otherwise = "a scheduler that begins at a later step or epoch"
            yield weakened(Finding("scheduler-not-stepped", what, why), proved, otherwise, "a trace of the whole run")


def elsewhere(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """A scheduler that is stepped while another optimizer than its own updates the same parameters. No right program
    goes on stepping it when its optimizer makes no step any more; two optimizers that take turns both do."""
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
            f"{name} is stepped {len(calls)} times from step {first} of {kind} on, and belongs to another optimizer of "
            f"the same parameters: the rate of {kind} is not changed by it"
        )
        cause = "make the scheduler of the optimizer that steps, after that is made"
        turns = any(_later(rank, o, calls[0]) for o in others)
        proved = len(rates) == 1 and not turns
        otherwise = "optimizers that take turns"
        yield weakened(Finding("scheduler-elsewhere", what, cause, first), proved, otherwise, "which optimizers step")


def _later(rank: Rank, optimizer: int, step: Step) -> bool:
    """Whether an optimizer makes a step after one of another was made, by the order of their lines."""
    return any(s.raw["at"] > step.raw["at"] for s in rank.steps[optimizer].values())


def after_load(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """A scheduler that was made after the optimizer's state was loaded sets the rate of its own first step. No right
    program then loads the scheduler's state, which says another rate, and steps with the one that was set at first.
    Without such a state the schedule may begin anew on purpose."""
    for rank in trace.ranks[:1]:
        for number, step in sorted(rank.steps.get(optimizer, {}).items()):
            loaded = step.loaded
            if not loaded or not loaded["scheduler"] or not loaded["set_to"]:
                continue
            now = [group.get("lr") for group in step.groups]
            if _near(now, loaded["rates"]) or not _near(now, loaded["set_to"]):
                continue
            rates = f"{loaded['rates'][0]:g} was loaded, step {number} is made with {now[0]:g}"
            cause = (
                "make the scheduler before the optimizer's state is loaded (load_state_dict comes last), or with "
                "last_epoch"
            )
            what = f"{loaded['scheduler']} was made after the optimizer's state was loaded, and set its rate: {rates}"
            resumed = loaded["resumed"]
            proved = bool(resumed) and not _near(now, resumed)
            if proved:
                what += f"; the scheduler's own state, which was loaded later, says {resumed[0]:g}"
            otherwise = "a schedule that begins anew on purpose"
            finding = Finding("scheduler-after-load", what, cause, number)
            yield weakened(finding, proved, otherwise, "whether the run goes on with the schedule of the one it loads")
            return


def _near(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(one, other, strict=True))
