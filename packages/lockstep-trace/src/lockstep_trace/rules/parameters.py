"""Rules on parameters that do not train: in no optimizer, without a gradient, unchanged, untied, cast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep_trace.causes import few
from lockstep_trace.ranks import merged
from lockstep_trace.read import Step, Trace, Value
from lockstep_trace.rules import PATIENCE, SUSPICIOUS, WRONG, Finding, weakened


def stale(trace: Trace, optimizer: int) -> Finding | None:
    """Return a finding if no called model holds the optimizer's parameters, else None.

    A gradient at one of them proves that it is used. No correct program steps an optimizer whose parameters never get
    gradients while the called model's parameters get gradients and are in no optimizer."""
    records = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    if not records or any(p.held for s in records for p in s.layout.parameters) or _arrives(records):
        return None
    if not any(s.layout.parameters for s in records) or not any(s.forwards for s in records):
        return None
    outside = sorted({n for s in records for n, has in (s.outside or {}).items() if has})
    what = f"no called model holds the parameters of {records[0].layout.optimizer}, and they get no gradient"
    if outside:
        what += f"; {few(outside)} get gradients and are in no optimizer"
    cause = (
        "create the optimizer after the model is moved, wrapped or replaced, from the parameters of the model that "
        "is called"
    )
    finding = Finding("stale-optimizer", what, cause)
    otherwise = "an optimizer of a model that is trained later"
    return weakened(
        finding, bool(outside) and len(records) >= PATIENCE, otherwise, "whether its parameters ever change"
    )


def _arrives(records: list[Step]) -> bool:
    measured = [s for s in records if s.measured]
    return not measured or any(v.square != 0 for s in measured for v in s.grads.values())


def in_no_optimizer(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters with gradients that are in no optimizer.

    A body that is excluded on purpose, or another network's loss, looks the same. A part created after the optimizer is
    a fault if the optimizer holds the model's other parameters. So are gradients that nothing clears, if the script
    clips by a norm that includes them: it grows with each step and shrinks the gradients that are used. A correct
    program leaves such a part out of both, clears its gradients, or does not compute them. An optimizer that holds no
    parameter of a called model has copies of them (master weights).

    A part that replaces another one counts from its first step. A probe or a fixed part that is added has gradients
    off or an optimizer; one updated by hand is not `late`."""
    if optimizer != trace.optimizers[0]:
        yield from _replaced(trace, optimizer)
        return
    records = [s for o in trace.optimizers for r in trace.ranks for s in r.steps.get(o, {}).values()]
    ends = [steps[max(steps)] for r in trace.ranks for steps in r.steps.values() if steps]
    last = [r.steps[optimizer][max(r.steps[optimizer])] for r in trace.ranks if r.steps.get(optimizer)]
    new = {n for s in last for n in s.late or ()}  # a new part may have the old one's names
    optimized = {p.name for s in records for p in s.layout.parameters if p.name not in new}
    optimized |= {p.name for s in ends for p in s.layout.parameters}
    outside = {n: has for s in last for n, has in (s.outside or {}).items() if n not in optimized and n != "?"}
    trained = [n for n, has in outside.items() if has]
    if not trained:
        return
    empty = [s.layout.optimizer for s in records if any(group.get("of") == 0 for group in s.groups)]
    late = sorted(new & set(trained))
    cause = (
        "add them to the optimizer, or set requires_grad to False; modules created after the optimizer are not in it"
    )
    otherwise = "a part that is excluded on purpose, or that code other than a torch optimizer updates"
    decides = "whether they should be trained; requires_grad_(False) states that they should not"
    if late:
        what = f"{few(late)}: created after the optimizer, get gradients and are in no optimizer"
        proved = trace.complete and _with_others(trace, optimizer, late)
        yield weakened(Finding("in-no-optimizer", what, cause), proved, otherwise, decides, True)
        return
    what = f"{few(trained)}: get gradients and are in no optimizer"
    if empty:
        what += f", and a group of {empty[0]} has no parameter"
        cause = "pass a list to the optimizer: an exhausted generator gives an empty group"
        yield Finding("in-no-optimizer", what, cause, None, WRONG)
        return
    if (twins := _twins(trace)) is not None:
        what += f"; optimizers {twins[0]} and {twins[1]} alternate and hold the same parameters"
        cause = "give each optimizer the parameters of its own model"
        yield weakened(Finding("in-no-optimizer", what, cause), trace.complete, otherwise, decides)
        return
    clipped = _clipped_with(trace, optimizer, trained)
    if clipped:
        what += f"; nothing clears them, and the norm by which gradients are clipped includes their sum over {clipped} "
        what += "steps"
    own = any(p.held for s in last for p in s.layout.parameters)
    # in a run that failed early, an optimizer may have made no step
    whole = not trace.about.get("status") or len(trace.steps(optimizer)) >= ENOUGH
    yield weakened(Finding("in-no-optimizer", what, cause), own and clipped > 0, otherwise, decides, own and whole)


def _clipped_with(trace: Trace, optimizer: int, names: list[str]) -> int:
    """Return in how many steps clipping includes gradients of `names` that add up; 0 if not in nearly all."""
    for rank in trace.ranks[:1]:
        steps = [s for n, s in sorted(rank.steps.get(optimizer, {}).items()) if n]
        rows = [s for s in steps if set(names) <= set(s.piled or ()) and s.clips and not s.scale]
        rows = [s for s in rows if all(math.isfinite(c.get("limit") or math.inf) for c in s.clips)]
        return len(rows) if len(rows) >= max(PATIENCE, 0.9 * len(steps) - 1) else 0
    return 0


def _twins(trace: Trace) -> tuple[int, int] | None:
    """Return two optimizers of the same parameters that alternate from the start, like those of two models, or None.

    Excluded: an optimizer of a later phase, which follows the first one, and parameters without an optimizer of their
    own."""
    rank = trace.ranks[0]
    for one, other in itertools.combinations(rank.steps, 2):
        a, b = ([s for _, s in sorted(rank.steps[o].items())] for o in (one, other))
        names = [{p.name for p in steps[-1].layout.parameters} for steps in (a, b) if steps]
        turns = len(a) >= PATIENCE <= len(b) and a[1].raw["at"] > b[0].raw["at"] and b[1].raw["at"] > a[0].raw["at"]
        if turns and names[0] == names[1] and a[-1].raw["at"] > b[PATIENCE - 1].raw["at"]:
            return one, other
    return None


def in_two(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report an optimizer that holds all parameters of another one, and more, and alternates with it.

    Two losses may share a part on purpose. The finding is proved if several models are called and the gradients of the
    two optimizers for these parameters nearly always oppose each other: each undoes the other's work, as when a
    generator's optimizer also holds the discriminator. Layers of one model may be perturbed against its training on
    purpose."""
    rank = trace.ranks[0]
    for other in rank.steps:
        a, b = ([s for _, s in sorted(rank.steps.get(o, {}).items())] for o in (optimizer, other))
        if other == optimizer or min(len(a), len(b)) < PATIENCE:
            continue
        own, others = ({p.name for p in steps[-1].layout.parameters if p.trained} for steps in (a, b))
        turns = a[1].raw["at"] > b[0].raw["at"] and b[1].raw["at"] > a[0].raw["at"]
        if turns and others and others < own and a[-1].raw["at"] > b[PATIENCE - 1].raw["at"]:
            what = f"optimizers {optimizer} and {other} alternate, and the first holds all {len(others)} parameters of"
            what += f" the second ({few(sorted(others))}) besides {len(own - others)} others: its loss trains both"
            cosines = _cosines(a, b)
            opposed = [c for c in cosines if c < OPPOSED]
            proved = len(a[-1].layout.models) > 1 and len(cosines) >= ENOUGH and len(opposed) >= 0.9 * len(cosines)
            if proved:
                what += (
                    f"; for these, the two gradients oppose each other (cosine {min(cosines):.2f} to "
                    f"{max(cosines):.2f})"
                )
            cause = "give each optimizer the parameters of its own model"
            otherwise, decides = "a part that both losses train on purpose", "which loss should train which part"
            yield weakened(Finding("in-two-optimizers", what, cause), proved, otherwise, decides)
            return


OPPOSED, ENOUGH = -0.5, 8  # cosine; pairs of steps


def _cosines(a: list[Step], b: list[Step]) -> list[float]:
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

    Layers in a Python list are not registered, so they are neither trained nor saved. A frozen network (a random prior,
    a target) is hidden from a model in the same way, often with requires_grad left on, so layers are never proved.
    Parameters created directly (nn.Parameter) in a list of a called model are proved if nothing changes them: code that
    creates a parameter and uses it in the loss intends to train it."""
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
            f"{len(shapes)} parameters of shapes {few(shapes)} get gradients in {len(steps)} steps, but no "
            "called model "
        )
        what += "registers them and no optimizer holds them"
        if proved:
            what += f"; {few(sorted({where for where, _, _ in bare[0].bare}))} holds parameters that nothing changes"
        cause = (
            "keep layers in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList: parameters(), to() and "
        )
        cause += "state_dict() ignore Python lists"
        otherwise = "a network that is hidden and frozen on purpose (a perceptual loss, a prior), or updates by hand"
        decides = "whether they should be trained; requires_grad_(False) states that they should not"
        yield weakened(Finding("unregistered", what, cause, steps[0].step), proved, otherwise, decides)


def _replaced(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a part that was replaced after a later optimizer was created, which still holds the old part.

    The old parameters belong to no called model and get no new gradients; as many new ones do, in no optimizer."""
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
        "that belong to no called model and get no new gradients"
    )
    cause = "create the optimizer after replacing the part"
    otherwise, decides = "a part that is trained later", "a trace of the whole run"
    yield weakened(Finding("in-no-optimizer", what, cause), trace.complete, otherwise, decides)


def _silent(gradients: list[Value]) -> bool:
    return not any(v.square for v in gradients) or len({v.fingerprint for v in gradients}) == 1


def _with_others(trace: Trace, optimizer: int, late: list[str]) -> bool:
    steps = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    rows = [[bool((s.outside or {}).get(n)) for s in steps if n in (s.outside or {})] for n in late]
    always = all(len(row) >= PATIENCE and sum(row) >= 0.9 * len(row) for row in rows)
    return always and any(p.held for s in steps for p in s.layout.parameters)


def frozen(trace: Trace, optimizer: int) -> Finding | None:
    """Return a finding if all parameters of the optimizer are frozen throughout a completed run, else None.

    No correct program steps such an optimizer; code that writes gradients itself (evolution strategies) has nonzero
    ones."""
    records = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    parameters = [p for s in records for p in s.layout.parameters]
    if len(records) < PATIENCE or not parameters or any(p.trained for p in parameters):
        return None
    if any(v.square != 0 for s in records for v in s.grads.values()) or not any(s.measured for s in records):
        return None
    kind, names = records[0].layout.optimizer, [p.name for p in records[0].layout.parameters]
    what = (
        f"{kind} takes {len(records)} steps, but requires_grad is False for all of its {len(names)} parameters "
        f"({few(names)})"
    )
    cause = "set requires_grad to True for the parameters to train, or remove the optimizer"
    otherwise, decides = "parameters that are unfrozen later", "a trace of the whole run"
    return weakened(Finding("frozen-optimizer", what, cause), trace.complete, otherwise, decides)


def frozen_moves(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters with requires_grad False that the optimizer changes by its moments or by decay, although their
    gradient is zero.

    Freezing a parameter means that it should stay. Gradients written by hand, as for master weights, are not zero."""
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
        cause = (
            "moments and decay still change parameters with a zero gradient: set .grad to None (zero_grad does so by "
        )
        cause += "default), or keep frozen parameters out of the optimizer"
        otherwise = "an optimizer that stores averages in the weights"
        finding = Finding("frozen-moves", what, cause, first[0])
        yield weakened(finding, not own, otherwise, "whether frozen parameters should change")


def still(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters that never get a gradient, also of another optimizer, and those that never change with one."""
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
        unchanged -= {n for _, s in records for n in unchanged if _rounds_away(s, n)}
        changing |= changed
        never = none if never is None else never & none
        same = unchanged if same is None else same & unchanged
    if same:
        yield _unchanged(trace, optimizer, same, changing, steps)
    if never != names:
        others = (
            s for r in trace.ranks for o, steps_of in r.steps.items() if o != optimizer for s in steps_of.values()
        )
        never = (never or set()) - {n for s in others for n, gradient in s.grads.items() if gradient.square}
    if never:
        yield _never(trace, optimizer, never, steps)


BITS = {"float32": 2.0**-23, "float64": 2.0**-52}  # updates lost in half precision are a fault


def _rounds_away(step: Step, name: str) -> bool:
    """Return whether an update may be below the last bit of each weight, like that of a bias before a batch norm.

    The largest gradient is at least their root mean square, and no weight is above the norm of all."""
    parameter = next((p for p in step.layout.parameters if p.name == name), None)
    if parameter is None or parameter.dtype not in BITS or name not in step.grads:
        return False
    group, largest = step.groups[parameter.group], (step.grads[name].square / math.prod(parameter.size)) ** 0.5
    if step.layout.optimizer in BY_MOMENTS:
        largest /= largest + (group.get("eps") or 0)
    return group["lr"] * largest < BITS[parameter.dtype] * step.before[name].norm


def _unchanged(trace: Trace, optimizer: int, same: set[str], changing: set[str], steps: list[int]) -> Finding:
    """Return the finding for weights that never change.

    Single tensors in half precision may stay equal, and custom optimizers may update parts in turn."""
    records = [s for _, s in trace.at(optimizer, steps[0])]
    dtypes = {p.name: p.dtype for s in records for p in s.layout.parameters}
    half = all("16" in dtypes[n] for n in same)
    cause = (
        "updates are smaller than the last bit of half precision: keep the weights in float32"
        if half
        else "the optimizer's step does not reach them: the parameter was replaced, or its gradient is "
        "cleared before the step"
    )
    what = f"{few(sorted(same))}: have gradients but do not change in {len(steps)} steps"
    what += f" ({len(same)} parameters, {len(changing)} others do)"
    own = any(s.layout.own for s in records)
    proved = trace.complete and not own and len(same) >= 9 * len(changing)
    otherwise = "a learning rate that is still warming up, or an optimizer that updates parts in turn"
    return weakened(Finding("unchanged", what, cause), proved, otherwise, "a trace of more steps")


def _never(trace: Trace, optimizer: int, never: set[str], steps: list[int]) -> Finding:
    listed = sorted(never)
    records = trace.at(optimizer, steps[0])
    every = {p.name for _, s in records for p in s.layout.parameters if p.trained}
    cut = [s for _, s in records if s.cut]
    if cut and len(never) < len(every):
        what = (
            f"{few(listed)}: get no gradient in {len(steps)} steps ({len(listed)} of {len(every)}), and a reentrant "
            "checkpoint has no input that requires a gradient"
        )
        cause = (
            "call checkpoint(..., use_reentrant=False), or let an input require a gradient; otherwise it computes none"
        )
        return Finding("no-gradient", what, cause, None, WRONG)
    if len(never) < len(every):
        cause = (
            "the graph is cut (detach, no_grad, argmax, .item()), or these parameters are not "
            "used; freeze them if that is intended"
        )
        what = f"{few(listed)}: get no gradient in {len(steps)} steps ({len(listed)} of {len(every)})"
        shapes = {p.name: p.shape for _, s in records for p in s.layout.parameters}
        if factors := _zero_factors(trace, optimizer, listed, steps):
            what += (
                f"; {' and '.join(factors)} have a common dimension and are zero from the first step to the last: of "
            )
            what += "a product of two zeros, neither factor ever gets a gradient"
            cause = "start one of the two factors at random (LoRA: A at random, B at zero)"
            return Finding("no-gradient", what, cause, None, WRONG)
        otherwise = "parts of the model that this training does not use"
        matrices = any(len(shapes[n]) > 1 for n in listed)  # a last bias may cancel exactly, as a critic's
        finding = Finding("no-gradient", what, cause)
        return weakened(finding, False, otherwise, "whether they should be trained", matrices)
    what = f"no parameter of {records[0][1].layout.optimizer} gets a gradient in {len(steps)} steps"
    why, known = _why_zero(trace, optimizer)
    otherwise = "an optimizer whose part of the loss is switched on later"
    finding = Finding("all-zero", what + known, why)
    return weakened(finding, trace.complete, otherwise, "a trace of the whole run")


def _zero_factors(trace: Trace, optimizer: int, names: list[str], steps: list[int]) -> list[str]:
    """Return two matrices of one module that are multiplied with each other, and are zero in a whole run, with
    gradients of zero; else an empty list.

    Gradients that are zero, not missing, prove that the loss depends on both, and no step can ever change them."""
    records = [s for n in steps for _, s in trace.at(optimizer, n)]
    zero = {n for n in names if all(n in s.grads and n in s.weights and s.weights[n].square == 0 for s in records)}
    zero &= {n for n in names if n in records[0].before and records[0].before[n].square == 0}
    shapes = {p.name: p.shape for p in records[0].layout.parameters if p.whole and len(p.shape) == 2}
    for one, other in itertools.permutations(sorted(zero & shapes.keys()), 2):
        same = one.rpartition(".")[0] == other.rpartition(".")[0] or _adapter(one) == _adapter(other)
        (_, inner), (rank_, _) = shapes[one], shapes[other]
        if trace.complete and same and inner == rank_ < min(shapes[one][0], shapes[other][1]):
            return [one, other]
    return []


def _adapter(name: str) -> str:
    return name.replace("lora_A", "lora").replace("lora_B", "lora")


def _why_zero(trace: Trace, optimizer: int) -> tuple[str, str]:
    steps = [s for r in trace.ranks for s in r.steps.get(optimizer, {}).values()]
    backwards = any(s.backwards for s in steps)
    losses = [value for s in steps for value, _ in s.losses or () if value is not None]
    targets = [o["targets"] for s in steps for o in s.objectives or () if "targets" in o]
    targets += [n for s in steps for n in s.targets or () if n is not None]
    if losses and not any(map(math.isfinite, losses)):
        empty = targets and not any(targets)
        numbers = f"; the loss is {losses[0]} in each of them" + (", and no target counts" if empty else "")
        return (
            "no target counts: every label is ignored (-100), so the mean divides by 0; check how labels are made and "
            "masked"
            if empty
            else "the loss is not finite: check its terms (a mean over nothing, a logarithm of 0)"
        ), numbers
    if losses and not any(losses):
        return (
            "the loss is 0 in each step whatever the model computes: cross entropy over a single class, or a mask that "
            "excludes everything"
        ), "; the loss is 0 in each of them"
    called = "; backward is called in each of them"
    if backwards and any(s.rewritten for s in steps):
        return "gradients are zeroed between backward and step: call zero_grad() before backward or after step", called
    if backwards:
        return (
            "the loss does not depend on them, or only through zeros: the graph is cut (detach, no_grad, argmax, "
            ".item()), or both factors of a product start at zero"
        ), f"{called}, and nothing changes gradients after it"
    return "backward is not called between steps", ""


def self_loads(trace: Trace) -> Iterator[Finding]:
    """Report a model that loads its own tensors after some steps.

    A state_dict references the model's tensors, so this changes nothing; no correct program does it to restore other
    weights. If the script wrote other weights to the model for an evaluation before, the tensors hold those, and the
    trained weights are lost. Reading a checkpoint into the model's own tensors writes to them after the evaluation,
    which tensor versions show."""
    for rank in trace.ranks[:1]:
        if not rank.loads:
            continue
        record = next((r for r in rank.loads if r.get("instead")), rank.loads[0])
        same = [r for r in rank.loads if r.get("instead") == record.get("instead")]
        times = f", {len(same)} times" if len(same) > 1 else ""
        what = f"after {sum(record['steps'])} steps {record['model']} loads a state_dict of its own tensors, which "
        what += f"changes nothing{times}"
        if record.get("instead"):
            what += "; the tensors hold the weights that were written for an evaluation, not the trained ones"
        cause = "keep a copy: copy.deepcopy(model.state_dict()), or copy.deepcopy(model)"
        yield Finding("self-load", what, cause, next(iter(record["steps"]), None), WRONG)


def empty_loads(trace: Trace) -> Iterator[Finding]:
    """Report a state_dict with none of the model's keys, loaded with strict=False into a model that is used afterwards.

    Such a load changes nothing. A program that checks the result may continue without it, and one that passes a
    state_dict to several parts may have parts that take nothing. So the finding is proved only if the names match
    except for a prefix, the script drops the result, and nothing else writes to the weights before the model is
    called."""
    for rank in trace.ranks[:1]:
        for record in rank.empty_loads[:1]:
            what = (
                f"{record['model']} loads a state_dict with strict=False: none of its {record['given']} keys is one of "
            )
            what += (
                f"the model's {record['own']} ({record['unexpected']}; the model has {record['missing']}), so nothing "
            )
            what += "is loaded, and the model is used unchanged"
            otherwise = "an optional checkpoint, or one that belongs to other parts"
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
        return f"keys {where} begin with {prefix!r}: a wrapper saved them or loads them; load with strict=True"
    return "pass the part of the checkpoint that holds the model's weights, and load with strict=True"


def dtypes(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report parameters whose dtype changes during training."""
    for rank in trace.ranks[:1]:
        known: dict[str, str] = {}
        for number, step in sorted(rank.steps.get(optimizer, {}).items()):
            now = {p.name: p.dtype for p in step.layout.parameters}
            changed = [n for n in now if n in known and known[n] != now[n]]
            if changed:
                n = changed[0]
                cause = "code casts the model during training (.half(), .to(dtype), loading a checkpoint)"
                what = f"step {number}: {few(changed)} changed from {known[n]} to {now[n]}"
                otherwise, decides = (
                    "a phase in another precision",
                    "whether the script casts the model here on purpose",
                )
                yield Finding("dtype", what, cause, number, SUSPICIOUS, otherwise, decides)
                return
            known = now


def ties(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report tied weights that become untied.

    A model whose config ties its embeddings saves only one of the two, so no correct program trains them to different
    values. Without a config, they may be untied on purpose, even during the run."""
    for rank in trace.ranks[:1]:
        steps = sorted(rank.steps.get(optimizer, {}).items())
        first = steps[0][1].layout.ties if steps else ()
        names = {p.name for p in steps[0][1].layout.parameters} if steps else set()
        for number, step in steps:
            lost = [t for t in first if t not in step.layout.ties and set(t) & names]
            if step.layout.untied:
                cause = (
                    "call model.tie_weights() after embeddings are replaced, resized or loaded; "
                    "otherwise both train separately"
                )
                what = "the model's config ties input and output embeddings, but they are two parameters"
                yield Finding("untied", what, cause, number if lost else None, WRONG)
                return
            if lost and step.layout.ties != first:
                cause = (
                    "one of the two was replaced by a new parameter: tie it again, unless they should be "
                    "separate from now on"
                )
                what = f"step {number}: {' and '.join(lost[0])} were one parameter and are now two"
                otherwise, decides = "weights that are untied on purpose", "whether the script replaces one on purpose"
                yield Finding("untied", what, cause, number, SUSPICIOUS, otherwise, decides)
                return


def rate_zero(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a learning rate of 0 until the end: no correct program keeps computing gradients that change nothing.

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
    cause = "the schedule ends too early: it is stepped too often, or its length is too small"
    alone = len(trace.optimizers) == 1 and not any((s.mode or {}).get("norms", [0, 0])[0] for s in steps[-tail:])
    otherwise = "recomputed batch-norm statistics, or another optimizer that continues"
    yield weakened(Finding("rate-zero", what, cause, step), alone, otherwise, "what the last steps are for")


def decay(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report weight decay on vectors (biases, norms) only, while matrices have none: swapped parameter groups.

    Any choice of decay is possible, so the finding is never proved."""
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
        f"weight decay ({max(decays[n] or 0 for n in decayed):g}) applies only to {few(decayed)}, which are all "
        f"vectors; {few(matrices)} have none"
    )
    cause = "swap the groups: decay applies to weight matrices, not to biases and norms"
    otherwise, decides = "matrices that other code decays", "which group should decay"
    yield Finding("decay-of-vectors", what, cause, None, SUSPICIOUS, otherwise, decides)


def one_memory(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report two parameters of one optimizer that share memory, each with its own gradient.

    Each update uses its own half of the gradient, divided by its own moments. The finding is proved if the update is
    not linear in the gradient, and both gradients and rates are above 0 in several steps; two updates by SGD add up
    correctly."""
    for rank in trace.ranks[:1]:
        step = next((s for s in rank.steps.get(optimizer, {}).values() if s.one_memory), None)
        if step is not None:
            what = f"{' and '.join(step.one_memory[0])} are parameters of {step.layout.optimizer} in one memory: each "
            what += "step updates it for each of them, by gradients that are never added, and decays it as often"
            cause = "tie the parameter itself, not its .data: a.weight = b.weight"
            steps = [s for s in rank.steps[optimizer].values() if s.measured and _both(s, step.one_memory[0])]
            proved = len(steps) > 2 and step.layout.optimizer in BY_MOMENTS
            yield weakened(Finding("tied-by-data", what, cause), proved, "gradients that are added", "who adds them")


BY_MOMENTS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")


def _both(step: Step, names: list[str]) -> bool:
    rates = [group.get("lr") for group in step.groups]
    return all(n in step.grads and step.grads[n].square > 0 for n in names) and all(rates) and not step.rewritten
