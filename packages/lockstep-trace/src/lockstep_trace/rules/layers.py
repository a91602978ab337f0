"""Rules on how layers are created: inside a forward pass, with identical units, or one object several times in a list.

Evidence: `tracer/layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep_trace.causes import few
from lockstep_trace.plurals import quantity
from lockstep_trace.read import Trace, Value
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, WRONG, Finding, weakened


def made_in_forward(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report layers that each forward pass creates with new random weights, on which the loss depends.

    What such a layer learns is lost, because the next step draws its weights again. A correct program that creates
    layers in the first forward pass keeps them, so later graphs hold registered parameters. Excluded: a perturbation of
    inputs, which is a parameter of no module; a layer that distorts inputs, which receives nothing learned; a
    task-specific layer, which is updated inside the forward pass; and the weights of a hypernetwork, which are not
    parameters."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if s.born] if rank is not None else []
    if rank is None or len(steps) < PATIENCE or steps[0].step or steps[PATIENCE - 1].step != PATIENCE - 1:
        return
    what = f"from step {steps[0].step} on the forward pass creates {few(list(steps[0].born))} with new random weights, "
    what += (
        f"and the loss depends on them, in {len(steps)} steps: no optimizer holds them, and each step draws new ones"
    )
    cause = "create layers in __init__, and call them in forward"
    yield Finding("layers-in-forward", what, cause, steps[0].step, WRONG)


def alike(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report layers whose units all have equal weights after some training steps changed them.

    Equal units get equal gradients and stay equal, so the layer acts as one unit. Random initial weights prevent this.
    Weights that start at zero get different gradients if the rest of the model is random, but an optimizer that uses
    only signs may still keep them equal; so the gradients must be equal, too. No correct program trains a layer of many
    units as one unit."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    first = rank.steps[optimizer].get(0)
    for step in rank.steps[optimizer].values():
        if not step.alike or first is None or not (first.measured and step.measured):
            continue
        parameters = {p.name: p for p in step.layout.parameters if p.whole}
        names = [
            n for n in step.alike if n in parameters and n in first.before and _changed(n, first.before, step.before)
        ]
        names = [n for n in names if n in step.grads and step.grads[n].square > 0]
        if names:
            count = parameters[names[0]].shape[0]
            what = f"before step {step.step} all {count} rows of {few(names)} are bitwise equal after training: equal "
            what += "units get equal gradients and stay equal, so each of these layers acts as one unit"
            cause = "initialize weights at random: constants give every unit the same gradient"
            yield Finding("units-alike", what, cause, step.step, WRONG)
            return


def _changed(name: str, before: Mapping[str, Value], now: Mapping[str, Value]) -> bool:
    return name in now and before[name].fingerprint != now[name].fingerprint


def over_examples(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a recurrent layer or attention that treats its first dimension as time although it holds examples.

    The call has as many rows as a loader's batch, and the loader shuffles: their order has no meaning. Attention over
    the rows of a batch may be intended, and rows that are not shuffled may be a sequence. The first dimension may still
    be positions, if there happen to be as many as rows; this is excluded, and the finding proved, if the second
    dimension has one size throughout that is not a multiple of the number of rows."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    loaders = {r["loader"]: r for r in rank.loaders}
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if s.sequences]
    rows = [(s, look) for s in steps for look in s.sequences]
    rows = [(s, look) for s, look in rows if look[1] == look[3] != look[2] > 1]
    if len({s.step for s, _ in rows}) < PATIENCE:
        return
    step, (kind, first, second, _, _) = rows[0]
    fed = [loaders.get(name) or {} for _, (*_, name) in rows]
    batches = all(r.get("batch") for r in fed) and max(look[1] for _, look in rows) == fed[0]["batch"]
    targets = all((o.get("shape") or [0]) == [look[1]] for s, look in rows for o in s.objectives or ())
    if not batches and not targets:
        return
    what = (
        f"step {step.step}: {kind} treats its first dimension as time (batch_first=False), but its input is [{first}, "
    )
    what += f"{second}, ...], where {first} is the number of examples: it runs over the batch"
    cause = "pass batch_first=True, or swap the first two dimensions of the input"
    ambiguous = len({look[2] for _, look in rows}) > 1 or any(look[2] % look[3] == 0 for _, look in rows)
    proved = batches and all(r.get("shuffle") for r in fed) and kind != "MultiheadAttention" and not ambiguous
    otherwise, decides = "rows of a batch that form a sequence, or interact on purpose", "whether rows are examples"
    yield weakened(Finding("examples-as-time", what, cause, step.step), proved, otherwise, decides)


def repeated(trace: Trace) -> Iterator[Finding]:
    """Report module lists in which all entries are the same layer: [layer] * n makes no copies.

    Sharing weights across depth may be intended, so the finding is never proved."""
    for rank in trace.ranks[:1]:
        for model in rank.models:
            for name, kind, count in model.get("repeated") or ():
                what = f"{name} of {model['name']} is a list of {quantity(count, kind)} that are all the same object:"
                what += " they share their weights"
                cause = (
                    f"create each one: [{kind}(...) for _ in range({count})]; [{kind}(...)] * {count} makes no copies"
                )
                otherwise, decides = (
                    "weights that are shared across depth on purpose",
                    "how many distinct layers are intended",
                )
                yield Finding("one-layer", what, cause, None, SUSPICIOUS, otherwise, decides)
                return


def adapters(trace: Trace) -> Iterator[Finding]:
    """Report a model whose low-rank adapters are all frozen while other parts of it train.

    A head may be trained on finished adapters, so the finding is never proved."""
    for rank in trace.ranks[:1]:
        for model in rank.models:
            count, trained = model.get("adapters") or (0, 0)
            if count and not trained and model["training"]:
                what = f"all {count} adapter matrices of {model['name']} are frozen, while other "
                what += "parts of it are trained"
                cause = "load the adapter with is_trainable=True: peft loads adapters frozen by default"
                otherwise, decides = "a head that is trained on a finished adapter", "which parts should be trained"
                yield Finding("adapter-frozen", what, cause, None, SUSPICIOUS, otherwise, decides)
                return
