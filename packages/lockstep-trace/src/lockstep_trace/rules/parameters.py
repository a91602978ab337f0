"""Rules on parameters that are not trained: in no optimizer, without gradient, unchanged, untied, cast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_trace.causes import few
from lockstep_trace.merge import merged
from lockstep_trace.read import Step, Trace, Value
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, WRONG, Finding, weakened


def stale(trace: Trace, optimizer: int) -> Finding | None:
    """Return a finding if no called model holds the optimizer's parameters, else None.

    A gradient at one of them proves use. No correct program steps an optimizer whose parameters never get gradients
    while the called model's parameters do, and are in no optimizer."""
    records = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    if not records or any(p.held for s in records for p in s.layout.parameters) or _arrives(records):
        return None
    if not any(s.layout.parameters for s in records) or not any(s.forwards for s in records):
        return None
    outside = sorted({n for s in records for n, has in (s.outside or {}).items() if has})
    what = f"no model that was called holds the parameters of {records[0].layout.optimizer}, and they get no gradient"
    if outside:
        what += f"; {few(outside)} get gradients and are in no optimizer"
    cause = (
        "make the optimizer after the model is moved, wrapped or replaced, from the parameters of the model that is "
        "called"
    )
    finding = Finding("stale-optimizer", what, cause)
    otherwise = "an optimizer of a model that is trained later"
    return weakened(
        finding, bool(outside) and len(records) >= PATIENCE, otherwise, "whether its parameters ever change"
    )


def _arrives(records: list[Step]) -> bool:
    """Return whether a parameter of an optimizer gets a nonzero gradient; True if unknown."""
    measured = [s for s in records if s.measured]
    return not measured or any(v.square != 0 for s in measured for v in s.grads.values())


def in_no_optimizer(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters with gradients that are in no optimizer.

    A body that is excluded on purpose, or another network's loss, looks the same. A part created after the optimizer,
    in a model whose other parameters are in it, is a fault."""
    if optimizer != trace.optimizers[0]:
        yield from _replaced(trace, optimizer)
        return
    records = [s for o in trace.optimizers for r in trace.ranks for s in r.steps.get(o, {}).values()]
    optimized = {p.name for s in records for p in s.layout.parameters}
    last = [r.steps[optimizer][max(r.steps[optimizer])] for r in trace.ranks if r.steps.get(optimizer)]
    outside = {n: has for s in last for n, has in (s.outside or {}).items() if n not in optimized and n != "?"}
    trained = [n for n, has in outside.items() if has]
    if not trained:
        return
    empty = [s.layout.optimizer for s in records if any(group.get("of") == 0 for group in s.groups)]
    late = sorted({n for s in last for n in s.late or ()} & set(trained))
    cause = "add them to the optimizer, or set requires_grad to False; modules made after the optimizer are not in it"
    otherwise = "a part that is left alone on purpose, or that other code than an optimizer of torch updates"
    decides = "whether they are meant to be trained: requires_grad_(False) says that they are not"
    if late:
        what = f"{few(late)}: made after the optimizer, get gradients and are in no optimizer"
        proved = trace.complete and _with_others(trace, optimizer, late)
        yield weakened(Finding("in-no-optimizer", what, cause), proved, otherwise, decides)
        return
    what = f"{few(trained)}: get gradients and are in no optimizer"
    if empty:
        what += f", and a group of {empty[0]} has no parameter"
        cause = "make a list of what is given to the optimizer: a generator that was used up is an empty group"
        yield Finding("in-no-optimizer", what, cause, None, WRONG)
        return
    if (twins := _twins(trace)) is not None:
        what += f"; optimizers {twins[0]} and {twins[1]} take turns and hold the same parameters"
        cause = "give each optimizer the parameters of its own model"
        yield weakened(Finding("in-no-optimizer", what, cause), trace.complete, otherwise, decides)
        return
    yield Finding("in-no-optimizer", what, cause, None, SUSPICIOUS, otherwise, decides)


def _twins(trace: Trace) -> tuple[int, int] | None:
    """Return two optimizers of the same parameters that take turns from the start, as two models' do. Another phase's
    optimizer follows, and parameters that the script leaves alone make no second optimizer."""
    rank = trace.ranks[0]
    for one, other in itertools.combinations(rank.steps, 2):
        a, b = ([s for _, s in sorted(rank.steps[o].items())] for o in (one, other))
        names = [{p.name for p in steps[-1].layout.parameters} for steps in (a, b) if steps]
        turns = len(a) >= PATIENCE <= len(b) and a[1].raw["at"] > b[0].raw["at"] and b[1].raw["at"] > a[0].raw["at"]
        if turns and names[0] == names[1] and a[-1].raw["at"] > b[PATIENCE - 1].raw["at"]:
            return one, other
    return None


def in_two(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an optimizer that holds all parameters of another one, and more, and takes turns with it.

    Two losses may share a part on purpose. It is proved if its gradients of these parameters oppose those of the other
    one nearly always, and several models are called: then each undoes what the other has made, as where a generator's
    optimizer holds the discriminator. Layers of one model may be perturbed against its training on purpose."""
    rank = trace.ranks[0]
    for other in rank.steps:
        a, b = ([s for _, s in sorted(rank.steps.get(o, {}).items())] for o in (optimizer, other))
        if other == optimizer or min(len(a), len(b)) < PATIENCE:
            continue
        own, others = ({p.name for p in steps[-1].layout.parameters if p.trained} for steps in (a, b))
        turns = a[1].raw["at"] > b[0].raw["at"] and b[1].raw["at"] > a[0].raw["at"]
        if turns and others and others < own and a[-1].raw["at"] > b[PATIENCE - 1].raw["at"]:
            what = f"optimizers {optimizer} and {other} take turns, and the first holds all {len(others)} parameters of"
            what += f" the second ({few(sorted(others))}) beside {len(own - others)} of its own: its loss trains both"
            cosines = _cosines(a, b)
            opposed = [c for c in cosines if c < OPPOSED]
            proved = len(a[-1].layout.models) > 1 and len(cosines) >= ENOUGH and len(opposed) >= 0.9 * len(cosines)
            if proved:
                what += (
                    f"; its gradients of these oppose the second's (cosine {min(cosines):.2f} to {max(cosines):.2f})"
                )
            cause = "give each optimizer the parameters of its own model"
            otherwise, decides = "a part that both losses are meant to train", "which loss is to train which part"
            yield weakened(Finding("in-two-optimizers", what, cause), proved, otherwise, decides)
            return


OPPOSED, ENOUGH = -0.5, 8  # cosine; pairs of steps


def _cosines(a: list[Step], b: list[Step]) -> list[float]:
    """Return the cosines of the gradients of each step of `b` and the next one of `a`, of the parameters of `b`."""
    cosines, later = list[float](), iter(a)
    one = next(later, None)
    for other in b:
        while one is not None and one.raw["at"] < other.raw["at"]:
            one = next(later, None)
        if one is None:
            break
        both = ((one.grads[n].sketch, v.sketch) for n, v in other.grads.items() if n in one.grads)
        pairs: list[tuple[Any, Any]] = [(x, y) for x, y in both if x is not None and y is not None and len(x) == len(y)]
        sizes = sum(float(x @ x) for x, _ in pairs) * sum(float(y @ y) for _, y in pairs)
        if sizes > 0:
            cosines.append(sum(float(x @ y) for x, y in pairs) / sizes**0.5)
    return cosines


def unregistered(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters with gradients that no called model has registered and no optimizer holds.

    Layers in a list of Python are not registered, and neither trained nor saved. A frozen network (a random prior or
    target, too) is hidden from a model in the same way, often with requires_grad left on, so that is never proved. It
    is proved of parameters made one by one (nn.Parameter) in a list of a called model: who makes one, and gives it to
    the loss, means it to be trained, and nothing, not even other code than an optimizer, has changed it."""
    if optimizer != trace.optimizers[0]:
        return
    for rank in trace.ranks[:1]:
        steps = [s for s in rank.steps.get(optimizer, {}).values() if s.unregistered]
        if len(steps) < PATIENCE:
            return
        bare = [s for s in rank.steps[optimizer].values() if s.bare and not any(changed for _, _, changed in s.bare)]
        changed = any(each[2] for s in rank.steps[optimizer].values() for each in s.bare or ())
        proved = len(bare) >= PATIENCE and not changed and trace.complete
        shapes = [str(shape) for shape in steps[-1].unregistered]
        what = (
            f"{len(shapes)} parameters of shapes {few(shapes)} get gradients in {len(steps)} steps; no model that is "
        )
        what += "called has registered them, and no optimizer holds them"
        if proved:
            what += f"; {few(sorted({where for where, _, _ in bare[0].bare}))} holds parameters that never change"
        cause = (
            "keep layers in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList: a list of Python is "
        )
        cause += "not looked into by parameters(), to() and state_dict()"
        otherwise = (
            "a network that is hidden and not trained on purpose (a perceptual loss, a prior), or updates by hand"
        )
        decides = "whether they are meant to be trained: requires_grad_(False) says that they are not"
        yield weakened(Finding("unregistered", what, cause, steps[0].step), proved, otherwise, decides)


def _replaced(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a part that was replaced after a later optimizer was made, which holds the old part and trains the rest.

    The old parameters belong to no called model and never get a gradient, or keep one of before, as many new ones get
    gradients in each step and are in no optimizer. No correct program keeps the former and leaves the latter."""
    steps = [s for r in trace.ranks for _, s in sorted(r.steps.get(optimizer, {}).items())]
    if not steps or not any(s.measured for s in steps):
        return
    last = steps[-1]
    late = sorted(
        {n for n in last.late or () if (last.outside or {}).get(n)} - {p.name for p in last.layout.parameters}
    )
    old = [p.name for p in last.layout.parameters if not p.held]
    silent = all(_silent([s.grads[n] for s in steps if n in s.grads]) for n in old)
    if not late or len(old) != len(late) or not silent or not _with_others(trace, optimizer, late):
        return
    what = (
        f"{few(late)}: get gradients and are in no optimizer; {last.layout.optimizer} holds {len(old)} parameters "
        "of no model that is called, which get no new ones"
    )
    cause = "make the optimizer after the part is replaced"
    otherwise, decides = "a part that is trained later", "a trace of the whole run"
    yield weakened(Finding("in-no-optimizer", what, cause), trace.complete, otherwise, decides)


def _silent(gradients: list[Value]) -> bool:
    """Return whether no gradient arrives: each is zero, or all are the same bits."""
    return not any(v.square for v in gradients) or len({v.fingerprint for v in gradients}) == 1


def _with_others(trace: Trace, optimizer: int, late: list[str]) -> bool:
    """Return whether late parameters get gradients in nearly every step, along with parameters in a torch optimizer."""
    steps = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    always = all(sum(bool((s.outside or {}).get(n)) for s in steps) >= 0.9 * len(steps) for n in late)
    return always and len(steps) >= PATIENCE and any(p.held for s in steps for p in s.layout.parameters)


def frozen(trace: Trace, optimizer: int) -> Finding | None:
    """Return a finding if all parameters of the optimizer are frozen throughout a completed run, else None.

    No correct program steps such an optimizer; one that sets gradients itself (evolution strategies) has gradients."""
    records = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    parameters = [p for s in records for p in s.layout.parameters]
    if len(records) < PATIENCE or not parameters or any(p.trained for p in parameters):
        return None
    if any(v.square != 0 for s in records for v in s.grads.values()) or not any(s.measured for s in records):
        return None
    kind, names = records[0].layout.optimizer, [p.name for p in records[0].layout.parameters]
    what = (
        f"{kind} makes {len(records)} steps, and requires_grad is False for all of its {len(names)} parameters "
        f"({few(names)})"
    )
    cause = "set requires_grad to True for what is to be trained, or leave the optimizer out"
    otherwise, decides = "they may be set free later", "a trace of the whole run"
    return weakened(Finding("frozen-optimizer", what, cause), trace.complete, otherwise, decides)


def frozen_moves(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters with requires_grad False that the optimizer changes although their gradient is zero: by its
    moments, or by decay.

    Who freezes a parameter means it to stay. Gradients written by hand, as to master weights, are not zero."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    rows: dict[str, list[int]] = {}
    own = False
    for number, step in sorted(rank.steps[optimizer].items()) if rank is not None else ():
        frozen = [p.name for p in step.layout.parameters if not p.trained]
        if not step.measured or any(step.grads[n].square for n in frozen if n in step.grads):
            continue
        own = own or step.layout.own
        for name in frozen:
            if step.weights[name].fingerprint != step.before[name].fingerprint:
                rows.setdefault(name, []).append(number)
    names = [n for n, numbers in rows.items() if len(numbers) >= PATIENCE]
    if names and rank is not None:
        first = rows[names[0]]
        kind = rank.steps[optimizer][first[0]].layout.optimizer
        what = f"from step {first[0]} on {kind} changes {few(names)} in {len(first)} steps although requires_grad is "
        what += "False and the gradient is zero"
        cause = "moments and decay still move what the optimizer holds: set .grad to None (zero_grad does so by "
        cause += "default), or leave frozen parameters out of the optimizer"
        otherwise = "an optimizer that keeps averages of its own in the weights"
        finding = Finding("frozen-moves", what, cause, first[0])
        yield weakened(finding, not own, otherwise, "whether frozen parameters may change")


def still(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters that never get a gradient, and those that never change although they have one."""
    steps = trace.measured(optimizer)
    if len(steps) < PATIENCE:
        return
    never: set[str] | None = None
    same: set[str] | None = None
    changing: set[str] = set()
    for step in steps:
        records = trace.at(optimizer, step)
        grads = merged(trace, optimizer, step, lambda s: s.grads)
        names = {p.name for _, s in records for p in s.layout.parameters if p.trained}
        none = {n for n in names if n not in grads or grads[n].value.square == 0}
        rates = {p.name: s.groups[p.group].get("lr") for _, s in records for p in s.layout.parameters}
        changed = {n for _, s in records for n, w in s.weights.items() if w.fingerprint != s.before[n].fingerprint}
        unchanged = {n for n in names - none if n not in changed and (rates.get(n) or 0) > 0}
        changing |= changed
        never = none if never is None else never & none
        same = unchanged if same is None else same & unchanged
    if same:
        yield _unchanged(trace, optimizer, same, changing, steps)
    if never:
        yield _never(trace, optimizer, never, steps)


def _unchanged(trace: Trace, optimizer: int, same: set[str], changing: set[str], steps: list[int]) -> Finding:
    """Return the finding of weights that never change.

    No correct program makes all its steps with gradients and a learning rate without changing a bit of nearly all
    weights. Single tensors in half precision may stay equal, and custom optimizers may update parts in turn."""
    records = [s for _, s in trace.at(optimizer, steps[0])]
    dtypes = {p.name: p.dtype for s in records for p in s.layout.parameters}
    half = all("16" in dtypes[n] for n in same)
    cause = (
        "the change is smaller than the last bit of half precision: keep the weights in float32"
        if half
        else "the optimizer's step does not reach them: the parameter was replaced, or its gradient is "
        "cleared before the step"
    )
    what = f"{few(sorted(same))}: have gradients and do not change in {len(steps)} steps"
    what += f" ({len(same)} parameters, {len(changing)} others do)"
    own = any(s.layout.own for s in records)
    proved = trace.complete and not own and len(same) >= 9 * len(changing)
    otherwise = "a rate that is still in its warm-up, or an optimizer that updates parts in turn"
    return weakened(Finding("unchanged", what, cause), proved, otherwise, "a trace of more steps")


def _never(trace: Trace, optimizer: int, never: set[str], steps: list[int]) -> Finding:
    listed = sorted(never)
    records = trace.at(optimizer, steps[0])
    every = {p.name for _, s in records for p in s.layout.parameters if p.trained}
    cut = [s for _, s in records if s.cut]
    if cut and len(never) < len(every):
        what = (
            f"{few(listed)}: get no gradient in {len(steps)} steps ({len(listed)} of {len(every)}), and a reentrant "
            "checkpoint is given inputs none of which has a gradient"
        )
        cause = "call checkpoint(..., use_reentrant=False), or let an input require a gradient: it computes none else"
        return Finding("no-gradient", what, cause, None, WRONG)
    if len(never) < len(every):
        cause = (
            "the computation is cut (detach, no_grad, argmax, .item()), or these parameters are "
            "not used; freeze them if that is meant"
        )
        what = f"{few(listed)}: get no gradient in {len(steps)} steps ({len(listed)} of {len(every)})"
        otherwise = "parts of the model that this training does not use"
        return Finding("no-gradient", what, cause, None, SUSPICIOUS, otherwise, "whether they are meant to be trained")
    what = f"no parameter of {records[0][1].layout.optimizer} gets a gradient in {len(steps)} steps"
    why, known = _why_zero(trace, optimizer)
    otherwise = "an optimizer whose part of the loss is not yet switched on"
    finding = Finding("all-zero", what + known, why)
    return weakened(finding, trace.complete, otherwise, "a trace of the whole run")


def _why_zero(trace: Trace, optimizer: int) -> tuple[str, str]:
    """Return (cause, further evidence) of zero gradients."""
    steps = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    backwards = any(s.backwards for s in steps)
    losses = [value for s in steps for value, _ in s.losses or () if value is not None]
    targets = [o["targets"] for s in steps for o in s.objectives or () if "targets" in o]
    targets += [n for s in steps for n in s.targets or () if n is not None]
    if losses and not any(map(math.isfinite, losses)):
        empty = targets and not any(targets)
        numbers = f"; the loss is {losses[0]} in each of them" + (", and no target counts" if empty else "")
        return (
            "no target counts: every label is ignored (-100), so that the mean is one over nothing: look at how labels "
            "are made and masked"
            if empty
            else "the loss is not a finite number: look at what it is made of (a mean over nothing, a logarithm of 0)"
        ), numbers
    if losses and not any(losses):
        return (
            "the loss is 0 in each step, whatever the model computes: cross entropy over a single class, or a mask "
            "that leaves nothing"
        ), "; the loss is 0 in each of them"
    called = "; backward is called in each of them"
    if backwards and any(s.rewritten for s in steps):
        return "gradients are zeroed between backward and step: call zero_grad() before backward or after step", called
    if backwards:
        return (
            "the loss does not depend on them, or only through zeros: the computation is cut (detach, no_grad, argmax, "
            ".item()), or both factors of a product begin at zero"
        ), f"{called}, and gradients are not seen to change after it"
    return "backward is not called between steps", ""


def self_loads(trace: Trace) -> Iterator[Finding]:
    """Report a model that loads its own tensors after some steps.

    A state_dict references the model's tensors, so this changes nothing. No correct program does it repeatedly, or at
    the end, to restore other weights. Where other weights were written to the model and evaluated before, the tensors
    hold these: what is meant to be put back is lost. A checkpoint that is read into the model's own tensors writes to
    them after the evaluation, which versions tell."""
    for rank in trace.ranks[:1]:
        if not rank.loads:
            continue
        record = next((r for r in rank.loads if r.get("instead")), rank.loads[0])
        same = [r for r in rank.loads if r.get("instead") == record.get("instead")]
        times = f", {len(same)} times" if len(same) > 1 else ""
        what = f"after {sum(record['steps'])} steps {record['model']} loads a state_dict of its own tensors, which "
        what += f"changes nothing{times}"
        if record.get("instead"):
            what += "; they hold the weights that were written to it for an evaluation, not the trained ones"
        cause = "keep copies (copy.deepcopy(model.state_dict())), or a model of its own (copy.deepcopy(model))"
        yield Finding("self-load", what, cause, next(iter(record["steps"]), None), WRONG)


def empty_loads(trace: Trace) -> Iterator[Finding]:
    """Report a state_dict of which no key is the model's, loaded with strict=False into a model that is used then.

    Such a load changes nothing. A program that looks at what it returned may go on without, and one that gives the same
    state_dict to several parts has parts without any. So it is proved only if all names are the model's but for a
    prefix, what it returned is dropped, and neither another load nor other code wrote to the weights before the model
    was called."""
    for rank in trace.ranks[:1]:
        for record in rank.empty_loads[:1]:
            what = (
                f"{record['model']} loads a state_dict with strict=False: none of its {record['given']} keys is one of "
            )
            what += (
                f"the model's {record['own']} ({record['unexpected']}; the model has {record['missing']}), so nothing "
            )
            what += "is loaded, and the model is used as it was"
            otherwise = "a checkpoint that is tried, where the model can do without; or one of other parts"
            decides = "what the script does if keys are missing"
            proved = record["dropped"] and record["prefixed"]
            cause = _other_keys(record)
            yield weakened(Finding("loaded-nothing", what, cause), proved, otherwise, decides)


def _other_keys(record: Mapping[str, Any]) -> str:
    key, own = record["unexpected"], record["missing"]
    if record["prefixed"]:
        longer, shorter = sorted((key, own), key=len, reverse=True)
        prefix = longer.removesuffix(shorter)
        where = "of the checkpoint" if longer == key else "of the model"
        return f"keys {where} begin with {prefix!r}: a wrapper saved or loads them; load with strict=True"
    return "give it the part of the checkpoint that holds the model's weights, and load with strict=True"


def dtypes(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters whose dtype changes during training."""
    for rank in trace.ranks[:1]:
        known: dict[str, str] = {}
        for number, step in sorted(rank.steps.get(optimizer, {}).items()):
            now = {p.name: p.dtype for p in step.layout.parameters}
            changed = [n for n in now if n in known and known[n] != now[n]]
            if changed:
                n = changed[0]
                cause = "something casts the model while it trains (.half(), .to(dtype), loading a checkpoint)"
                what = f"step {number}: {few(changed)} turned from {known[n]} into {now[n]}"
                otherwise, decides = "a phase in another precision", "whether the script means to cast the model here"
                yield Finding("dtype", what, cause, number, SUSPICIOUS, otherwise, decides)
                return
            known = now


def ties(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report tied weights that become untied.

    A model whose config ties its embeddings is saved with one of the two, so no correct program trains them to
    different values. Without a config they may be untied on purpose, even during the run."""
    for rank in trace.ranks[:1]:
        steps = sorted(rank.steps.get(optimizer, {}).items())
        first = steps[0][1].layout.ties if steps else ()
        names = {p.name for p in steps[0][1].layout.parameters} if steps else set()
        for number, step in steps:
            lost = [t for t in first if t not in step.layout.ties and set(t) & names]
            if step.layout.untied:
                cause = (
                    "call model.tie_weights() after embeddings are replaced, resized or loaded; both "
                    "halves train apart else"
                )
                what = "the model's config ties input and output embeddings, and they are two parameters"
                yield Finding("untied", what, cause, number if lost else None, WRONG)
                return
            if lost and step.layout.ties != first:
                cause = (
                    "one of the names was given a new parameter: tie it again, unless they are to be two from here on"
                )
                what = f"step {number}: {' and '.join(lost[0])} were one parameter and are two"
                otherwise, decides = "weights that are untied on purpose", "whether the script replaces one on purpose"
                yield Finding("untied", what, cause, number, SUSPICIOUS, otherwise, decides)
                return


def rate_zero(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a learning rate of 0 until the end: no correct program continues to compute gradients that change nothing.

    Excludes runs that recompute batch-norm statistics, or switch to another optimizer."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None or not trace.complete:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items())]
    zero = [all(group.get("lr") == 0 for group in s.groups) for s in steps]
    tail = next((i for i, z in enumerate(reversed(zero)) if not z), len(zero))
    if tail < max(PATIENCE, 0.1 * len(steps)) or tail == len(steps):
        return
    if any(w.fingerprint != s.before[n].fingerprint for s in steps[-tail:] for n, w in s.weights.items()):
        return  # the rate is in another option
    step = steps[-tail].step
    what = f"from step {step} on the learning rate is 0: the last {tail} of {len(steps)} steps change nothing"
    cause = "the schedule is over too early: it is stepped more often than it is long, or its length is too small"
    alone = len(trace.optimizers) == 1 and not any((s.mode or {}).get("norms", [0, 0])[0] for s in steps[-tail:])
    otherwise = "statistics that are computed anew, or another optimizer that goes on"
    yield weakened(Finding("rate-zero", what, cause, step), alone, otherwise, "what the last steps are for")


def decay(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report weight decay on vectors (biases, norms) alone, beside matrices that have none: groups that are swapped.

    Any choice of decay is possible, so it is never proved."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    step = rank.steps[optimizer][min(rank.steps[optimizer])]
    decays = {p.name: step.groups[p.group].get("weight_decay") for p in step.layout.parameters if p.trained}
    dims = {p.name: len(p.shape) for p in step.layout.parameters}
    decayed = [n for n, x in decays.items() if x]
    without = [n for n, x in decays.items() if x == 0]
    matrices = [n for n in without if dims[n] > 1]
    if not decayed or len(matrices) < 2 or any(dims[n] > 1 for n in decayed):
        return
    what = (
        f"weight decay ({max(decays[n] or 0 for n in decayed):g}) is given to {few(decayed)} and no other: all of them "
        f"are vectors; {few(matrices)} have none"
    )
    cause = "swap the groups: decay is for weight matrices, and left out for biases and norms"
    otherwise, decides = "matrices that other code decays", "which group is meant to decay"
    yield Finding("decay-of-vectors", what, cause, None, SUSPICIOUS, otherwise, decides)
