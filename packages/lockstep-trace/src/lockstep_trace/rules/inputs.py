"""Rules on inputs: scale, parts of the data on ranks, token ids with labels and masks; on random numbers; on how layers
are created.

Evidence: `tracer/inputs.py`, `tracer/modes.py`, `tracer/layouts.py`, hashes of examples, the state of torch's
generator at calls with dropout, and the loss functions in the graph.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep_trace.causes import few
from lockstep_trace.coded import quantity
from lockstep_trace.ranks import data_ranks
from lockstep_trace.read import Rank, Step, Trace, Value
from lockstep_trace.rules import PATIENCE, SUSPICIOUS, WRONG, Finding, premises, weakened
from lockstep_trace.rules.premises import known

LOOKS = 4  # training calls
FAR = 5.0  # standard deviations
SHARED = 8  # examples
Range = Sequence[float]  # mean, standard deviation, minimum, maximum


def scales(trace: Trace) -> Iterator[Finding]:
    """Report evaluation inputs on another scale than training inputs.

    Evaluating another domain is legitimate, so only one case is proved: in every call examined, one side is
    standardized (mean near 0, deviation near 1, negative numbers) and the other has the range of raw pixels (0 to 1, or
    to 255, nothing negative). The data must come from a loader, and training inputs must recur bit for bit, which
    excludes inputs that look standardized because of added noise."""
    for rank in trace.ranks[:1]:
        optimizers = sorted(rank.steps)
        trained = [r for o in optimizers[:1] for _, s in sorted(rank.steps[o].items()) for r in s.ranges or ()]
        records = [r for r in rank.evaluations if r.get("trained") and not r.get("between") and r.get("ranges")]
        if len(trained) < LOOKS or not records:
            continue
        fed = {name for o in optimizers for s in rank.steps[o].values() for name, _ in s.fed or ()}
        passes = {r["loader"]: r for r in rank.loaders}
        data = {passes[n]["data"] for n in fed if n in passes}
        for record in records:
            evaluated = record["ranges"]
            own = passes.get(record["loader"] or "")
            raw = (all(map(_standard, trained)) and all(map(_raw, evaluated))) or (
                all(map(_raw, trained)) and all(map(_standard, evaluated))
            )
            mean, deviation = (sum(r[i] for r in trained) / len(trained) for i in (0, 1))
            least, most = min(r[1] for r in trained), max(r[1] for r in trained)
            far = deviation > 0 and all(
                abs(r[0] - mean) > FAR * deviation or r[1] > FAR * most or FAR * r[1] < least for r in evaluated
            )
            again = _again(trained, evaluated) or _again(evaluated, trained)
            if not raw and not far and not again:
                continue
            what = (
                f"training inputs have mean {mean:.3g} and deviation {deviation:.3g}; inputs of the evaluation after "
            )
            what += f"{sum(record['steps'])} steps have mean {evaluated[0][0]:.3g} and deviation {evaluated[0][1]:.3g}"
            what += "; both are normalized alike, one side once more" if again else ""
            cause = "normalize evaluation inputs with the same numbers as training inputs, once"
            proved = (raw or again) and own is not None and own["data"] not in data and _come_again(rank, optimizers)
            otherwise = "evaluation on another domain on purpose"
            finding = Finding("inputs-on-another-scale", what, cause)
            yield weakened(finding, proved, otherwise, "whether both should be normalized alike")
            return


def _again(rows: Sequence[Range], others: Sequence[Range]) -> bool:
    """Return whether the extremes of inputs are those of others normalized again as they were from 0 to 1, or to 255.
    Both have to reach the extremes in the first calls, so that other inputs meet this only by chance."""
    ends, before = ([min(r[2] for r in each), max(r[3] for r in each)] for each in (rows, others))
    for most in (1, 255) if before[0] < 0 < before[1] else ():
        deviation = most / (before[1] - before[0])
        mean = -before[0] * deviation
        now = [(x - mean) / deviation for x in before]
        if all(math.isclose(x, y, rel_tol=1e-3) for x, y in zip(now, ends, strict=True)):
            return True
    return False


def _come_again(rank: Rank, optimizers: Sequence[int]) -> bool:
    rows = [h for o in optimizers for s in rank.steps[o].values() for h in known(s)]
    return len(rows) >= 1.5 * len(set(rows)) > 0


def _standard(r: Range) -> bool:
    return abs(r[0]) <= 0.25 and 0.75 <= r[1] <= 1.4 and r[2] < -0.5 and r[3] > 0.5


def _raw(r: Range) -> bool:
    return r[2] >= 0 and r[0] > 0.05 and ((r[3] <= 1 and r[1] < 0.5) or (20 < r[3] <= 255 and r[1] > 2))


def overlapping(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report ranks with fixed parts of the data that share examples.

    Each rank must see each example of its part once per epoch in two epochs or more, which excludes sampling with
    replacement and sampling from the whole data set. Shared examples count twice in the averaged gradients. Giving
    examples of rare classes to all ranks, or filling a last batch with first examples, may be intended, so the finding
    is never proved."""
    ranks = data_ranks(trace, optimizer)
    if optimizer != trace.optimizers[0] or len(ranks) < 2 or not trace.complete:
        return
    if not (premises.declared(trace) or premises.sharded(trace) or premises.reduced(trace, optimizer)):
        return
    lists = [[h for _, s in sorted(r.steps.get(optimizer, {}).items()) for h in known(s)] for r in ranks]
    parts = [set(each) for each in lists]
    if not all(_once_an_epoch(each) for each in lists):
        return
    for j in range(len(parts)):
        for i in range(j):
            shared = len(parts[i] & parts[j])
            least = min(len(parts[i]), len(parts[j]))
            if max(SHARED, 2 * len(ranks), 0.01 * least) < shared < 0.9 * least:
                what = f"ranks {ranks[i].number} and {ranks[j].number} train on parts of {len(parts[i])} and "
                what += f"{len(parts[j])} examples in each epoch, and both parts contain {shared} of them"
                cause = "make the parts disjoint: data[rank::world], or begin each part where the previous one ends"
                otherwise, decides = (
                    "examples given to all ranks on purpose, duplicate rows, or filled batches",
                    "how the parts are made",
                )
                yield Finding("parts-overlap", what, cause, None, SUSPICIOUS, otherwise, decides)
                return


def _once_an_epoch(examples: Sequence[str]) -> bool:
    part = len(set(examples))
    if part < SHARED or len(examples) < 2 * part - part // 8:
        return False
    first = len(set(examples[:part]))
    most = max(Counter(examples).values())
    return first >= 0.99 * part and most <= -(-len(examples) // part) + 1


ENOUGH = 16  # examples
BITS = (1 << 64) - 1


def changing(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report examples whose classes change between two visits while the class counts over all examples stay the same:
    inputs and targets were shuffled separately.

    Renumbered clusters of equal size do this, too, so the finding is never proved. If targets are positions in the
    batch (contrastive losses, matching), every batch has the same classes; such batches are excluded."""
    visits, batches = _visits(trace, optimizer)
    both = {e: v for e, v in visits.items() if len(v) > 1}
    counts = Counter(len(v) for v in both.values())
    if len(both) < max(ENOUGH, 0.9 * len(visits)) or counts.most_common(1)[0][1] < 0.9 * len(both):
        return  # some examples are duplicates
    changed = [e for e, v in both.items() if v[0] != v[1]]
    whole = Counter(v[0] for v in both.values()) == Counter(v[1] for v in both.values())
    if len(batches) < PATIENCE or len(set(batches)) < 0.5 * len(batches) or not whole:
        return
    if len(changed) < 0.3 * len(both):
        return
    what = (
        f"{len(changed)} of {len(both)} examples have another class on their next visit, but the counts of all classes "
    )
    what += "are unchanged: examples and classes are paired differently"
    cause = "shuffle inputs and targets together: one permutation, or one data set of both"
    otherwise = "renumbered classes, as of equal-sized clusters in each epoch, or labels permuted as a control"
    decides = "where the targets come from"
    yield Finding("pairs-change", what, cause, None, SUSPICIOUS, otherwise, decides)


def _visits(trace: Trace, optimizer: int) -> tuple[dict[str, list[int]], list[tuple[int, ...]]]:
    visits: dict[str, list[int]] = {}
    batches: list[tuple[int, ...]] = []
    for _, step in (row for number in trace.steps(optimizer) for row in trace.at(optimizer, number)):
        for examples, classes in batches_with_classes(step):
            batches.append(tuple(sorted(classes)))
            for example, one in zip(examples, classes, strict=True):
                visits.setdefault(example, []).append(one)
    return visits, batches


def batches_with_classes(step: Step) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the examples of each micro-batch and a number of each one's class, where the loss has one for each."""
    examples, sizes = list(step.examples or ()), list(step.micro or ())
    without, functions = step.unlabelled, list(step.objectives or ())
    rows = [f.get("classes") for f in functions]
    at = 0
    for i, size in enumerate(sizes):
        part = slice(at, at + size)
        at += size
        if without and len(without) == len(examples):
            pairs = zip(without[part], examples[part], strict=True)
            yield without[part], [(int(both, 16) - int(alone, 16)) & BITS for alone, both in pairs]
        elif len(functions) == len(sizes) and rows[i] is not None and len(rows[i]) == size:
            yield examples[part], rows[i]


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


def seeded_each_step(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report numpy's or Python's generator if each step seeds it with one number, and draws from it: every batch gets
    the same random numbers. Seeds of examples differ within a step. A constant that is drawn anew each time, as a
    projection, looks the same, so the finding is never proved."""
    for rank in trace.ranks[:1]:
        steps = [s for _, s in sorted(rank.steps.get(optimizer, {}).items())][1:]
        for name, generator in (("numpy", "numpy.random"), ("random", "random")):
            rows = [(s, each[1]) for s in steps for each in s.seeds or () if each[0] == name and each[1] and each[2]]
            if len(rows) >= max(LEAST, 0.9 * len(steps)) and len({value for _, value in rows}) == 1:
                step, value = rows[0]
                what = f"{generator} is seeded with {value} in each of {len(rows)} steps, and draws after it: every "
                what += "batch gets the same random numbers"
                cause = "seed once, before training, or with a number of the example"
                finding = Finding("seeded-again", what, cause, step.step)
                yield weakened(finding, False, "numbers that are constant on purpose", "what is drawn", True)


def restarted(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report evaluations that all leave torch's generator in the same state, from which training then draws.

    Training after each evaluation then repeats the random numbers drawn after the first one: the same noise, the same
    masks and, if they are drawn from this generator, the same examples. The finding requires that the generator's state
    changes from step to step, so training does draw from it, and that weights change, so no run is repeated. The
    finding is proved if all evaluations also start in the same state, the first one after steps that drew random
    numbers: then evaluations seed the generator for their own purposes. Otherwise training may seed each epoch on
    purpose."""
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


def made_in_forward(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report layers that each forward pass creates with new random weights, on which the loss depends.

    A correct program that creates layers in the first forward pass keeps them, so later graphs hold registered
    parameters. Excluded: a perturbation of inputs, which is a parameter of no module; a layer that distorts inputs,
    which receives nothing learned; a task-specific layer, which is updated inside the forward pass; and the weights of
    a hypernetwork, which are not parameters."""
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

    The call has as many rows as a loader's batch, and the loader shuffles, so their order has no meaning. Attention
    over the rows of a batch may be intended, and unshuffled rows may be a sequence. The first dimension may also be
    positions, if there happen to be as many as rows; the finding is proved if the second dimension always has the same
    size and that is not a multiple of the number of rows."""
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
    shapes = [(o.get("shape") or [0]) == [look[1]] for s, look in rows for o in s.objectives or ()]
    if not batches and not (shapes and all(shapes)):
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


Look = tuple[Step, dict[str, Any], dict[str, Any]]  # step, token counts of a call, its loss function


def tokens(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report labels and masks that contradict the tokens of a call."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    steps = [s for _, s in sorted(rank.steps[optimizer].items()) if s.tokens]
    looks = [
        (step, look, function)
        for step in steps
        if len(step.tokens) == len(step.micro or ()) == len(step.objectives or ())
        for look, function in zip(step.tokens, step.objectives, strict=True)
    ]
    yield from _shifted_twice(looks, rank.models)
    yield from _copied(looks)
    yield from _padded(looks)
    yield from _mask(steps)
    yield from _ends(steps)
    yield from _attention(rank, optimizer)


def _shifted_twice(looks: list[Look], models: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Report labels that are already the next tokens, passed to a model that shifts them again.

    The model shifts if its loss has exactly as many targets as there are labels after the first position of each row.
    A script that shifts labels itself has a target there. Proved only for models of transformers; others may skip the
    first position."""
    shifted = [
        (s, t, f)
        for s, t, f in looks
        if t["first"] > 0 and f.get("targets") == t["labels"] - t["first"] and t["next"] >= 0.99 * f["targets"] > 0
    ]
    own = [t for _, t, _ in shifted if t["equal"] >= 0.5 * t["labels"]]
    if len(shifted) < max(PATIENCE, len(looks)) or own:
        return
    step, look, function = shifted[0]
    what = (
        f"step {step.step}: {look['next']} of {look['labels']} labels equal the token after their position, and the "
        f"loss has {function['targets']} targets: the model also shifts labels by one position"
    )
    cause = "labels are shifted twice, so the model learns the token after the next one: pass labels=input_ids"
    shifting = bool(models) and all(m.get("origin") in ("transformers", "peft") for m in models)
    otherwise, decides = "a loss that skips the first position", "which outputs the model compares with labels"
    yield weakened(Finding("labels-shifted-twice", what, cause, step.step), shifting, otherwise, decides)


def _copied(looks: list[Look]) -> Iterator[Finding]:
    """Report a loss whose targets are the model's input tokens, each at its own position.

    Never proved: an autoencoder looks the same."""
    equal = [(s, t) for s, t, f in looks if (f.get("hashes") or [None])[0] == f"{t['hash'] & (1 << 64) - 1:016x}"]
    if len(equal) < max(PATIENCE, len(looks)):
        return
    step, look = equal[0]
    what = f"step {step.step}: the {look['count']} targets of the loss are the model's input tokens, not shifted"
    cause = "a language model learns to copy its input: compare logits[:, :-1] with ids[:, 1:]"
    otherwise, decides = "an autoencoder", "whether an output sees the token at its own position"
    yield Finding("labels-not-shifted", what, cause, step.step, SUSPICIOUS, otherwise, decides)


def _padded(looks: list[Look]) -> Iterator[Finding]:
    """Report a language model that learns padding: where attention_mask is 0, after another such position, labels are
    the input tokens, and the loss counts them.

    Proved if the model shifts labels; another model may reproduce its whole input. The first padding token after a text
    may be its end token, and is not counted."""
    rows = [
        (s, t, f)
        for s, t, f in looks
        if t.get("padded") and t["equal"] >= 0.5 * t["labels"] and f.get("targets") in (t["labels"], _behind(t))
    ]
    if len({s.step for s, _, _ in rows}) < PATIENCE:
        return
    step, look, function = rows[0]
    what = f"step {step.step}: {look['padded']} of the loss's {function['targets']} targets are at positions where "
    what += "attention_mask is 0, after another such position: the model learns to predict padding from padding"
    cause = "give padded positions the label -100: labels.masked_fill(attention_mask == 0, -100)"
    proved = all(t["first"] > 0 and f["targets"] == _behind(t) and not t["holes"] for _, t, f in rows)
    otherwise = "a model that reproduces its whole input, or tokens that are masked at random"
    decides = "whether the model should predict padding"
    yield weakened(Finding("padding-learned", what, cause, step.step), proved, otherwise, decides)


def _behind(look: Mapping[str, Any]) -> int:
    return int(look["labels"] - look["first"])


def _mask(steps: list[Step]) -> Iterator[Finding]:
    """Report an attention mask with zeros between ones, and ones at what looks like padding: it masks another token
    than the padding token.

    A token that is hidden on purpose looks the same if rows end in equal tokens."""
    rows = [(s, t) for s in steps for t in s.tokens if t["holes"] and t["kept"] > 1]
    if len(rows) < PATIENCE:
        return
    step, look = rows[0]
    what = (
        f"step {step.step}: attention_mask is 0 at {look['holes']} tokens inside rows, but 1 at {look['kept']} equal "
        "tokens at the ends of rows, which look like padding"
    )
    cause = "the mask is made from another token id than that of padding: use the tokenizer's mask or pad_token_id"
    otherwise, decides = (
        "tokens that are hidden on purpose, in rows that end in equal tokens",
        "the token id of padding",
    )
    yield Finding("padding-seen", what, cause, step.step, SUSPICIOUS, otherwise, decides)


def _ends(steps: list[Step]) -> Iterator[Finding]:
    """Report rows whose last token is content by the mask but padding by the labels, because it equals the padding
    token: it is never learned.

    Requires that no row learns the token, and that each row learns the token before it."""
    rows = [(s, t) for s in steps for t in s.tokens if t.get("ends")]
    if len(rows) < PATIENCE or any(t["unlearned"] < t["ends"] or t["learned"] for _, t in rows):
        return
    step, look = rows[0]
    what = (
        f"step {step.step}: {look['ends']} rows end in the token that is also used as padding; attention_mask "
        "is 1 there, "
    )
    what += "but its label is -100, and no label is this token: the model never learns the end of a text"
    cause = "use a separate padding token, or make labels from attention_mask instead of the token"
    yield Finding("end-not-learned", what, cause, step.step, WRONG)


def _attention(rank: Rank, optimizer: int) -> Iterator[Finding]:
    """Report targets that the model can read from its input, and padding masks that are inverted.

    Prefixes, encoders and permutations have no targets at positions that attend to the next token everywhere."""
    looks = [(s, a) for _, s in sorted(rank.steps[optimizer].items()) for a in s.attention or ()]
    if len(looks) < PATIENCE:
        return
    step, look = looks[0]
    shifted = [a["targets"] > 0 and a["next"] >= 0.99 * a["targets"] for _, a in looks]
    if all(shifted) and all(a["attentions"] and a["answered"] == a["attentions"] for _, a in looks):
        what = f"step {step.step}: {look['next']} of {look['targets']} targets are the next token of the input, and "
        what += f"their positions attend to it in all {look['attentions']} attentions: the answer is in the input"
        cause = "make attention causal: is_causal=True, or a causal mask that has an effect"
        yield Finding("future-seen", what, cause, step.step, WRONG)
    padded = [(s, a) for s, a in looks if a["padded"]]
    if len(padded) >= PATIENCE and all(a["inverted"] == a["padded"] for _, a in padded):
        step, look = padded[0]
        what = f"step {step.step}: in {look['inverted']} rows that end in padding, attention sees only the padding and "
        what += "none of the tokens before it"
        cause = "the mask is inverted: torch's key_padding_mask is True at padding, attention_mask is 1 at tokens"
        yield Finding("mask-inverted", what, cause, step.step, WRONG)
