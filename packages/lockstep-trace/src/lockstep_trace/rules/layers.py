"""Rules on how layers are made: inside of a forward, all units alike, one object several times in a list.

Evidence: `tracer/layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep_trace.causes import few
from lockstep_trace.plurals import quantity
from lockstep_trace.read import Trace, Value
from lockstep_trace.rules.finding import PATIENCE, SUSPICIOUS, WRONG, Finding, weakened


def made_in_forward(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report layers that each forward makes anew, on whose random weights the loss depends.

    What such a layer learns is dropped with it, and its weights are drawn again in the next step. A right program that
    makes layers at the first forward keeps them, so that later graphs hold registered parameters. A perturbation of
    inputs is a parameter of no module, a layer that distorts inputs is given nothing that was learned, and a task's own
    layer is updated in the forward; the weights of a hypernetwork are no parameters."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if s.born] if rank is not None else []
    if rank is None or len(steps) < PATIENCE or steps[0].step or steps[PATIENCE - 1].step != PATIENCE - 1:
        return
    what = f"from step {steps[0].step} on the forward makes {few(list(steps[0].born))} with new random weights, and the"
    what += f" loss depends on them, in {len(steps)} steps: they are in no optimizer and are drawn again in each step"
    cause = "make layers in __init__, and call them in forward"
    yield Finding("layers-in-forward", what, cause, steps[0].step, WRONG)


def alike(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report layers all of whose units have equal weights after some steps that changed them.

    Equal units get equal gradients, and stay equal for ever: the layer is one unit. Random weights break this at the
    start; weights that begin at zero get different gradients where the rest of the model is random, also where an
    optimizer looks at signs alone: so gradients have to be equal, too. No right program trains a layer of many units to
    be one."""
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
            what = (
                f"before step {step.step} all {count} rows of {few(names)} are equal, bit for bit, and were trained: "
            )
            what += "equal units get equal gradients and stay equal, so that each of these layers is one unit"
            cause = "draw the weights of layers at random: constants give every unit the same gradient"
            yield Finding("units-alike", what, cause, step.step, WRONG)
            return


def _changed(name: str, before: Mapping[str, Value], now: Mapping[str, Value]) -> bool:
    return name in now and before[name].fingerprint != now[name].fingerprint


def over_examples(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report a recurrent layer, or attention, that takes its first dimension for time and is given examples there.

    The rows of the call are those of a loader's batch, and shuffled: their order has no meaning, so nothing can be
    learned from one row to the next. Attention over the rows of a batch may be meant, and rows that are not shuffled
    may be a sequence. A batch may have as many positions as rows: it is proved if the second dimension is one number,
    no multiple of the rows, so that rows, or views of them, cannot be there."""
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
    what = f"step {step.step}: {kind} takes its first dimension for time (batch_first=False), and is given [{first}, "
    what += f"{second}, ...] where {first} is the number of examples: it runs over the batch"
    cause = "make it with batch_first=True, or swap the first two dimensions of what it is given"
    ambiguous = len({look[2] for _, look in rows}) > 1 or any(look[2] % look[3] == 0 for _, look in rows)
    proved = batches and all(r.get("shuffle") for r in fed) and kind != "MultiheadAttention" and not ambiguous
    otherwise, decides = "rows of a batch that are a sequence, or meet on purpose", "whether rows are examples"
    yield weakened(Finding("examples-as-time", what, cause, step.step), proved, otherwise, decides)


def repeated(trace: Trace) -> Iterator[Finding]:
    """Report lists of modules all of whose entries are one layer: [layer] * n makes no copies.

    Sharing weights over depth may be meant, so it is never proved."""
    for rank in trace.ranks[:1]:
        for model in rank.models:
            for name, kind, count in model.get("repeated") or ():
                what = (
                    f"{name} of {model['name']} is a list of {quantity(count, kind)}, and all of them are one object:"
                )
                what += " they share their weights"
                cause = f"make each of them: [{kind}(...) for _ in range({count})]; [{kind}(...)] * {count} copies none"
                otherwise, decides = "weights that are shared over depth on purpose", "how many layers are meant"
                yield Finding("one-layer", what, cause, None, SUSPICIOUS, otherwise, decides)
                return


def adapters(trace: Trace) -> Iterator[Finding]:
    """Report a model with low-rank adapters none of which is trained, where other parts of it are.

    Adapters may stay as they are while a head is trained, so it is never proved."""
    for rank in trace.ranks[:1]:
        for model in rank.models:
            count, trained = model.get("adapters") or (0, 0)
            if count and not trained and model["training"]:
                what = f"{count} matrices of adapters of {model['name']} are frozen, and other "
                what += "parts of it are trained"
                cause = "load the adapter with is_trainable=True: peft loads it for inference"
                otherwise, decides = "a head that is trained on a finished adapter", "what is to be trained"
                yield Finding("adapter-frozen", what, cause, None, SUSPICIOUS, otherwise, decides)
                return
