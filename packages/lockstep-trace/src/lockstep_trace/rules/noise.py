"""Rules on random numbers: dropout that stays on in evaluation mode, and generators that every step reseeds.

Evidence: `tracer/evaluation_noise.py`, and the state of torch's generator at calls with dropout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lockstep_trace.read import Rank, Step, Trace
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, WRONG, Finding, weakened

LEAST = 8  # steps


def in_evaluation(trace: Trace) -> Iterator[Finding]:
    """Report dropout that draws random numbers while every module is in evaluation mode and gradients are off.

    torch's functional dropout is on unless its argument `training` is False, and fused attention drops whatever the
    mode. A correct program that wants random predictions (Monte Carlo dropout) passes the argument, and predicts each
    example several times to average them. Permanent noise (a prenet) passes training=True. Models of images or sounds,
    models that average several draws inside their forward pass, and models that explore may pass nothing. So the
    finding is proved only for attention and for models trained by cross entropy, if the argument is not passed and no
    example is predicted twice with the same weights."""
    for rank in trace.ranks[:1]:
        rows = [r for r in rank.noise if r["of"] in ("dropout", "attention")]
        if not rows or _repeats(rank):
            continue
        silent = [r for r in rows if not r["stated"]]
        row = (silent or rows)[0]
        which = "functional.dropout" if row["of"] == "dropout" else "scaled_dot_product_attention"
        what = f"{row['model']} is evaluated in evaluation mode, but {which} at {row['where']} still drops at random"
        cause = "pass training=self.training to functional.dropout, or use nn.Dropout"
        if row["of"] == "attention":
            cause = "pass dropout_p=self.p if self.training else 0.0: the function ignores the module's mode"
        finding = Finding("dropout-in-evaluation", what, cause)
        otherwise = "random outputs on purpose" + ("" if silent else ", as its argument training is passed")
        objectives = [o for steps in rank.steps.values() for s in steps.values() for o in s.objectives or ()]
        certain = row["of"] == "attention" or any(o["kind"] == "cross entropy" for o in objectives)
        yield weakened(finding, bool(silent) and certain, otherwise, "whether predictions should be random")
        return


def _repeats(rank: Rank) -> bool:
    by_steps: dict[tuple[int, ...], list[str]] = {}
    for record in rank.evaluations:
        if record.get("trained") and not record["training"]:
            by_steps.setdefault(tuple(record["steps"]), []).extend(record["examples"])
    return any(len(set(each)) < 0.9 * len(each) for each in by_steps.values()) or not by_steps


def seeded_again(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a random generator in the same state at the forward pass of every step, with dropout on: every step draws
    the same masks, so the same units are never trained.

    The finding is proved on a CPU, whose generator provides the masks, if the forward pass changes the state; otherwise
    dropout may use another generator. Programs that repeat a draw on purpose do so within a step."""
    for rank in trace.ranks[:1]:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items()) if s.drawn and _drops(s)]
        states = {s.drawn[0] for s in steps}
        cpu = bool(steps) and all(p.device == "cpu" for p in steps[0].layout.parameters)
        draws = all(len(s.drawn) > 1 and s.drawn[0] != s.drawn[1] for s in steps)
        if len(steps) >= LEAST and len(states) == 1 and cpu and draws and not any(s.closure for s in steps):
            what = (
                f"torch's generator is in the same state at the forward pass of each of {len(steps)} steps, "
                "and dropout "
            )
            what += "is on: every step drops the same units"
            cause = "seed once, before training: manual_seed in the loop or in forward restarts the same random numbers"
            yield Finding("seeded-again", what, cause, steps[0].step, WRONG)


def restarted(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report evaluations that all leave torch's generator in one state, in which training then draws again.

    The steps after each evaluation draw the numbers of those after the first one: the same noise, masks and, where they
    are drawn, the same examples. The states differ from step to step, so that training does draw from this generator,
    and weights change, so that no run is repeated. Code that needs fixed numbers in an evaluation takes a generator of
    its own or restores the state, and then the states after evaluations differ. It is proved if all evaluations begin
    in one state, too, the first one after steps that drew other numbers: then evaluations seed the generator, for
    numbers of their own. Else training may seed each of its epochs, for noise that belongs to a batch."""
    for rank in trace.ranks[:1]:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items())]
        after = [s for s in steps[1:] if s.evaluated and s.drawn]
        between = [s for s in steps[1:] if not s.evaluated and s.drawn]
        states = {s.drawn[0] for s in after}
        cpu = bool(steps) and all(p.device == "cpu" for p in steps[0].layout.parameters)
        if len(after) < PATIENCE or len(states) > 1 or not cpu or any(s.closure or s.loaded_model for s in after):
            continue
        if len({s.drawn[0] for s in between} - states) < PATIENCE or len(after) < len(
            [s for s in steps if s.evaluated]
        ):
            continue
        if not all(s.drawn[-1] != s.drawn[0] or _moves(steps, s) for s in after):
            continue
        gaps = {b.step - a.step for a, b in itertools.pairwise(after)}
        what = f"each of {len(after)} evaluations leaves torch's generator in one state: from step {after[0].step} on, "
        what += "training draws the same random numbers again after each of them"
        if len(gaps) == 1:
            what += f", every {next(iter(gaps))} steps"
        cause = "give the evaluation a generator of its own, or put it into `with torch.random.fork_rng():`"
        begins = [r["drawn"] for r in rank.evaluations if r.get("drawn") and any(r["steps"])]
        proved = len(begins) >= len(after) and all(each == begins[0] for each in begins)
        proved = proved and bool(steps[0].drawn) and steps[0].drawn[0] not in states
        otherwise, decides = "epochs that each draw the same numbers on purpose", "which code seeds the generator"
        yield weakened(Finding("seeded-again", what, cause, after[0].step), proved, otherwise, decides)


def _moves(steps: list[Step], step: Step) -> bool:
    later = next((s for s in steps if s.step == step.step + 1), None)
    return later is None or not later.drawn or later.evaluated or later.drawn[0] != step.drawn[0]


def _drops(step: Step) -> bool:
    return bool((step.mode or {}).get("dropout", [0, 0])[0])


def equal_masks(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report ranks that draw the same random numbers for different examples: the generator's state changes from step to
    step, but is equal on all ranks.

    One seed on all ranks may be intended for the weights only, and shared masks may be intended, so the finding is
    never proved."""
    if trace.world < 2:
        return
    rows = [[s for _, s in sorted(r.steps.get(optimizer, {}).items())] for r in trace.ranks]
    steps = list(zip(*rows, strict=False))
    equal = [each for each in steps if all(s.drawn for s in each) and len({s.drawn[0] for s in each}) == 1]
    equal = [each for each in equal if len({tuple(s.examples or ()) for s in each}) == len(each)]
    states = {each[0].drawn[0] for each in equal}
    cpu = bool(equal) and all(p.device == "cpu" for p in equal[0][0].layout.parameters)
    if len(equal) < LEAST or len(states) < 0.9 * len(equal) or not cpu:
        return
    what = f"step {equal[0][0].step}: torch's generator is in the same state on all {trace.world} ranks at the forward "
    what += f"pass, as in {len(equal)} steps: ranks draw the same dropout and noise for different examples"
    cause = "seed by rank after creating the model: torch.manual_seed(seed + rank)"
    otherwise, decides = "one seed on all ranks on purpose", "whether noise should be independent across ranks"
    yield Finding("equal-masks", what, cause, equal[0][0].step, SUSPICIOUS, otherwise, decides)
