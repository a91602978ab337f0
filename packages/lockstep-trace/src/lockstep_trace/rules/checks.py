"""Rules on checked steps (`record --check`): compare the gradient, the update and a repeated call of the model with
references that the tracer computed on copies inside the process.

A reference may differ from training for many legitimate reasons, so each finding is `suspicious` or `info`: in-batch
negatives mix rows, losses may be sums, code may modify gradients or weights. A recomputation that was impossible is
`info`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lockstep_trace.causes import few
from lockstep_trace.read import OptimizerLayout, Rank, Step, Trace, Value, decode
from lockstep_trace.rules import INFO, SUSPICIOUS, Finding
from lockstep_trace.rules.premises import declared

ROUNDING = 2e-3  # relative; sketches are float32, and repeated forward passes may round differently
ROUNDING_HALF = 5e-2
Values = dict[str, Value]


def checked(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report the differences of all checked steps of an optimizer, each kind once."""
    reported: set[tuple[str, str]] = set()
    for step in sorted({int(c["step"]) for r in trace.ranks for c in r.checks if c["opt"] == optimizer}):
        for finding in _of_step(trace, optimizer, step):
            if (finding.code, finding.level) not in reported:
                reported.add((finding.code, finding.level))
                yield finding


def _of_step(trace: Trace, optimizer: int, step: int) -> Iterator[Finding]:
    checks = [(r, c) for r in trace.ranks for c in r.checks if c["opt"] == optimizer and c["step"] == step]
    ranks = [(rank, s, c) for rank, c in checks if (s := rank.steps.get(optimizer, {}).get(step)) is not None]
    if not ranks:
        return
    yield from _gradient(trace, [(s, c) for _, s, c in ranks], step)
    yield from _not_made(ranks[0][2].get("references", ()), step)
    findings: dict[tuple[str, str], list[tuple[int, Finding]]] = {}
    for rank, record, check in ranks:
        updates = [u for u in rank.check_updates if u["opt"] == optimizer and u["step"] == step]
        rows = [("", finding) for finding in _accumulated(record, check, step)]
        references = [
            {**r, "loaded": _loaded(rank, record, r)} for r in check.get("references", ()) if _differs_from(r)
        ]
        rows += [(r["reference"], _of_reference(r, step)) for r in references]
        rows += [("update", finding) for update in updates for finding in _updated(update, step)]
        for reference, finding in rows:
            findings.setdefault((reference, finding.code), []).append((rank.number, finding))
    for each in findings.values():
        number, finding = each[0]
        some = len(each) < len(ranks)
        what = finding.what.replace(f"step {step}:", f"step {step}, rank {number}:", 1) if some else finding.what
        yield replace(finding, what=what)


def _differs_from(reference: Mapping[str, Any]) -> bool:
    return bool(reference["result"] == "differs")


def _loaded(rank: Rank, step: Step, reference: Mapping[str, Any]) -> bool:
    names = {name for name, _ in step.fed or ()}
    targets = any((o.get("shape") or [0])[0] == reference.get("rows") for o in step.objectives or ())
    return targets or any(r["loader"] in names and r.get("batch") == reference.get("rows") for r in rank.loaders)


def _of_reference(reference: Mapping[str, Any], step: int) -> Finding:
    return DESCRIBED[reference["reference"]](reference, step)


# -- the gradient ----------------------------------------------------------------------------------------------------


def values_of(packed: Any, of: list[int], layout: OptimizerLayout) -> Values:
    """Decode measured tensors of an optimizer's parameters."""
    chosen = [layout.parameters[i] for i in of]
    return dict(zip([p.name for p in chosen], decode(packed, [p.width for p in chosen]), strict=False))


def _joined(values: Values, names: list[str]) -> Any:
    return np.concatenate([v.sketch for n in names if (v := values[n]).sketch is not None] or [np.zeros(1)])


def _mean(rows: list[Values], names: list[str]) -> Values:
    means = {}
    for name in names:
        sketch = np.mean([s for row in rows if (s := row[name].sketch) is not None], axis=0)
        means[name] = Value(0, float(sketch @ sketch), sketch)
    return means


def _gradient(trace: Trace, rows: list[tuple[Step, Mapping[str, Any]]], step: int) -> Iterator[Finding]:
    reasons = [c["reason"] for _, c in rows if "reason" in c]
    excluded = {n: why for _, c in rows for n, why in c.get("excluded", {}).items()}
    if reasons or any(not c.get("of") for _, c in rows):
        why = reasons[0] if reasons else next(iter(excluded.values()), "no gradient arrived")
        what = f"the gradient of step {step} was not recomputed: {why}"
        yield Finding("check-gradient", what, "no conclusion is drawn", step, INFO)
        return
    received = [s.unclipped for s, _ in rows]
    own = [values_of(c["recomputed"], c["of"], s.layout) for s, c in rows]
    names = [n for n in own[0] if all(n in v for v in (*received, *own))]
    if not names or any(received[0][n].sketch is None for n in names):
        return
    if any(s.closure and (s.backwards or 0) > c["backwards"] for s, c in rows):
        what = f"the gradient of step {step} was not compared: the optimizer computes several gradients in a step"
        yield Finding("check-gradient", what, "no conclusion is drawn", step, INFO)
        return
    if any(len(s.clips or ()) > 1 for s, _ in rows):
        what = f"the gradient of step {step} was not compared: it is clipped more than once"
        yield Finding("check-gradient", what, "no conclusion is drawn", step, INFO)
        return
    group = declared(trace)
    references = [_mean(own, names)] * len(rows) if group else own
    for rank, ((record, check), got, reference) in enumerate(zip(rows, received, references, strict=True)):
        limit = ROUNDING_HALF if check.get("autocast") or record.layout.parameters[0].dtype != "float32" else ROUNDING
        a, b = _joined(got, names), _joined(reference, names)
        size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
        distance = float(np.linalg.norm(a - b)) / size if size else 0.0
        if distance <= limit:
            continue
        worst = max(names, key=lambda n: float(np.linalg.norm(_joined(got, [n]) - _joined(reference, [n]))))
        kind = _kind(trace, rows, rank, (a, b), names, limit)
        yield _differs(kind, distance, worst, record, check, step, rank, len(rows))
        return


def _kind(
    trace: Trace,
    rows: list[tuple[Step, Mapping[str, Any]]],
    rank: int,
    vectors: tuple[Any, Any],
    names: list[str],
    limit: float,
) -> tuple[str, float]:
    got, reference = vectors
    record, check = rows[rank]
    left = values_of(check.get("left"), check.get("left_of", []), record.layout)
    if left:
        previous = np.concatenate([left[n].sketch if n in left else np.zeros(record_width(record, n)) for n in names])
        rest = got - reference
        size = float(np.linalg.norm(got))
        if float(np.linalg.norm(rest - previous)) <= limit * max(size, float(np.linalg.norm(previous))):
            return "left", float(np.linalg.norm(previous)) / size if size else 0.0
    if len(rows) > 1:
        own = [values_of(c["recomputed"], c["of"], s.layout) for s, c in rows]
        alone, total = _joined(own[rank], names), sum(_joined(o, names) for o in own)
        for kind, vector in (("own", alone), ("sum", total), ("mean", total / len(rows))):
            size = float(np.linalg.norm(vector))
            if size and float(np.linalg.norm(got - vector)) <= limit * size:
                return kind, 0.0
    norms = float(np.linalg.norm(got)), float(np.linalg.norm(reference))
    if not all(norms):
        return "other", 0.0
    factor = float(got @ reference) / norms[1] ** 2
    if float(np.linalg.norm(got - factor * reference)) <= limit * norms[0]:
        return "factor", factor
    return "other", float(got @ reference) / (norms[0] * norms[1])


def record_width(record: Step, name: str) -> int:
    return next(p.width for p in record.layout.parameters if p.name == name)


def _differs(
    kind: tuple[str, float],
    distance: float,
    worst: str,
    record: Step,
    check: Mapping[str, Any],
    step: int,
    rank: int,
    world: int,
) -> Finding:
    name, number = kind
    at = f"step {step}" + (f", rank {rank}" if world > 1 else "")
    count = check["backwards"]
    of = f"the sum over its {count} calls of backward" if count > 1 else "the one recomputed from its inputs"
    what = f"{at}: the gradient in the optimizer differs from {of} by {distance:.3g} (most in {worst})"
    level = SUSPICIOUS
    if name == "left":
        what += (
            f"; the difference equals the gradient before this step's backward: {number:.2f} of the norm is "
            "left from other steps"
        )
        cause = "call zero_grad() before the first backward of each step, also after the backward of another loss"
        otherwise, decides = (
            "gradients that are summed over steps on purpose",
            "whether gradients are meant to accumulate over steps",
        )
    elif name == "own":
        what += f"; it is the gradient of rank {rank} alone, not the mean over {world} ranks"
        cause = "average gradients over ranks before the step"
        otherwise, decides = "ranks that are averaged later (local SGD)", "whether weights are averaged"
    elif name == "sum":
        what += f"; it is the sum over {world} ranks"
        cause = f"divide by {world}, unless the learning rate accounts for the sum"
        otherwise, decides = "a loss that is divided by the number of all examples", "the divisor of the loss"
    elif name == "mean":
        what = f"{at}: gradients are averaged over {world} ranks outside of DistributedDataParallel"
        level, cause, otherwise, decides = INFO, "they equal the recomputed mean", "", ""
    elif name == "factor":
        what += f"; it is {number:.6g} times the recomputed one"
        cause = (
            "something multiplies gradients after backward"
            if record.rewritten
            else "a factor is applied outside of the loss"
        )
        otherwise = "a loss that is a sum and is divided later; gradients that are normalized by hand"
        decides = "whether the factor is intended"
    else:
        what += f"; their cosine is {number:.3f}"
        written = bool(record.rewritten)
        cause = (
            "code modified the gradients between backward and step"
            if written
            else "a part of the gradient is not traced"
        )
        level = INFO
        otherwise = "noise, surgery or clipping of gradients by hand; losses of parameters themselves"
        decides = "which code modifies them"
    return Finding("check-gradient", what, cause, step, level, otherwise, decides)


def _accumulated(record: Step, check: Mapping[str, Any], step: int) -> Iterator[Finding]:
    factors, targets = check.get("factors"), check.get("targets", ())
    if not factors or not check.get("means") or len(factors) < 2:
        return
    count, total = len(factors), sum(factors)
    otherwise = "a weight of the loss, or a learning rate that accounts for it"
    if max(factors) - min(factors) <= 1e-3 * abs(max(factors)):
        if abs(total - count) < 1e-3 * count:
            what = f"step {step}: the gradient is {count} times that of the mean over its {count} micro-batches: no "
            what += "micro-batch's loss is divided"
            cause = f"divide each loss by {count}"
            decides = "whether the gradient should grow with the number of micro-batches"
            yield Finding("check-accumulation", what, cause, step, SUSPICIOUS, otherwise, decides)
        elif abs(total * count - 1) < 1e-3:
            what = f"step {step}: the loss of each of {count} micro-batches has a factor of {factors[0]:.4g}, which is "
            what += f"1 / {count} applied twice: the gradient is {count} times smaller than that of their mean"
            cause = f"divide by {count} only once: Accelerate and Trainer already divide"
            yield Finding("check-accumulation", what, cause, step, SUSPICIOUS, otherwise, "who divides the loss")
    union = values_of(check.get("of_union"), check["of"], record.layout) if check.get("of_union") else {}
    own = values_of(check["recomputed"], check["of"], record.layout)
    names = [n for n in own if n in union and union[n].sketch is not None]
    if names:
        a, b = _joined(own, names), _joined(union, names)
        size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
        if size and (distance := float(np.linalg.norm(a - b)) / size) > ROUNDING_HALF:
            what = (
                f"step {step}: micro-batches of {few([str(n) for n in targets])} targets do not count in "
                "proportion; the "
            )
            what += f"gradient differs by {distance:.2g} from that of one batch with all targets"
            cause = "divide the sum of losses by the number of targets of the whole step"
            decides = "whether every target or every micro-batch should count equally"
            yield Finding(
                "check-tokens", what, cause, step, SUSPICIOUS, "micro-batches that count equally on purpose", decides
            )


# -- references of one call ------------------------------------------------------------------------------------------


def _place(reference: Mapping[str, Any]) -> str:
    module, operation = reference.get("module", ""), reference.get("operation", "")
    inside = f"in {module}" if module else f"in {reference['model']} itself"
    return f"{inside} ({operation})" if operation else inside


def _not_made(references: Sequence[Mapping[str, Any]], step: int) -> Iterator[Finding]:
    reasons: dict[str, list[str]] = {}
    for reference in references:
        if reference["result"] == "not made":
            reasons.setdefault(reference["why"], []).append(reference["reference"])
    if reasons:
        text = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
        yield Finding("check-not-made", f"step {step}: not compared: {text}", "no conclusion is drawn", step, INFO)


def _mixed(reference: Mapping[str, Any], step: int) -> Finding:
    reordered = reference["reference"] == "order"
    how = "in another order" if reordered else f"{reference['of']} of {reference['rows']} without the others"
    what = (
        f"step {step}: with rows {how} and dropout off, outputs of the same rows differ by {reference['apart']:.2g}, "
    )
    what += f"first {_place(reference)}"
    if reference.get("batch_norm"):
        return Finding("check-rows", f"{what}: statistics of the batch", "expected with batch norm", step, INFO)
    if not reference["loaded"]:
        cause = (
            "rows may not be examples: no loader batch has as many, and the loss has no target for each; if the first "
        )
        cause += "dimension is time, recurrent layers and attention mix rows by design"
        return Finding("check-rows", what, cause, step, INFO)
    cause = (
        "an output depends on its row's position in the batch: look for positions or masks along the first dimension"
        if reordered
        else "rows influence each other: look for swapped dimensions (batch_first, dim=0)"
    )
    otherwise = "in-batch negatives, experts with a capacity, sets and graphs, inputs whose first dimension is time"
    return Finding(
        "check-rows",
        what,
        cause,
        step,
        SUSPICIOUS,
        otherwise,
        "whether rows are examples, and may influence each other",
    )


def _padded(reference: Mapping[str, Any], step: int) -> Finding:
    how = "the attention mask" if reference["how"] == "mask" else "runs of one value at the ends of rows"
    what = (
        f"step {step}: row {reference['row']} ({reference['tokens']} tokens, {reference['padding']} of padding on the "
        f"{'left' if reference['left'] else 'right'}, by {how}) without its padding has outputs that differ by "
        f"{reference['apart']:.2g}, first {_place(reference)}"
    )
    cause = (
        "pass an attention mask, and position_ids that start at the first token"
        if reference["left"]
        else "pass the padding mask to attention and pooling, and read the last token, not the last position"
    )
    otherwise = "convolutions or pooling that include padding on purpose"
    return Finding("check-padding", what, cause, step, SUSPICIOUS, otherwise, "whether outputs may depend on padding")


def _padded_targets(reference: Mapping[str, Any], step: int) -> Finding:
    what = (
        f"step {step}: {reference['positions']} of {reference['counted']} positions that get a gradient from the loss "
    )
    what += f"are padding ({reference['apart']:.2g} of the gradient's squared norm)"
    cause = "give padded positions the label -100 (ignore_index), or mask the loss"
    otherwise = "a repeated value at the ends of rows that is not padding"
    return Finding("check-padding", what, cause, step, SUSPICIOUS, otherwise, "whether the model should learn padding")


def _twice(reference: Mapping[str, Any], step: int) -> Finding:
    what = (
        f"step {step}: two forward passes with the same inputs differ by {reference['apart']:.2g}, first "
        f"{_place(reference)}"
    )
    cause = (
        "the result depends on state besides inputs, weights, buffers and random numbers, or on a changing "
        "summation order"
    )
    level = SUSPICIOUS if reference["apart"] > 1e-3 else INFO
    otherwise = "nondeterministic kernels (torch.use_deterministic_algorithms finds them)"
    return Finding("check-twice", what, cause, step, level, otherwise, "what that module reads")


def _eager(reference: Mapping[str, Any], step: int) -> Finding:
    what = f"step {step}: the compiled model's outputs differ from the eager ones by {reference['apart']:.2g}"
    cause = "the compiler changes the result: try backend='aot_eager', then 'eager'"
    otherwise = "random numbers other than dropout's, or sums in low precision"
    return Finding("check-eager", what, cause, step, SUSPICIOUS, otherwise, "the first backend with which it appears")


def _float32(reference: Mapping[str, Any], step: int) -> Finding:
    what = (
        f"step {step}: outputs in {reference['dtype']} differ from float32 by {reference['apart']:.2g}, where rounding "
        f"explains about {reference['expected']:.2g}; most of it arises {_place(reference)}"
    )
    cause = "compute that part in float32"
    otherwise = "outputs near zero, or discrete choices (argmax, routing) that change"
    return Finding("check-float32", what, cause, step, SUSPICIOUS, otherwise, "whether the loss differs in float32")


def _one_batch(reference: Mapping[str, Any], step: int) -> Finding:
    count, inside = reference["micro"], reference["loss"]
    what = f"step {step}: computed as one batch with dropout off, the gradient of its {count} micro-batches differs by "
    what += f"{reference['apart']:.2g}"
    if inside and not reference["module"]:
        what += ": the model's loss of the whole batch is not the combination of the micro-batches' losses"
        cause = "divide the sum of losses by the number of targets of the whole step"
        otherwise = "micro-batches that count equally whatever their size; a loss over pairs of examples"
        decides = "whether every target or every micro-batch should count equally"
    else:
        what += f", first {_place(reference)}"
        cause = "examples of a micro-batch influence each other, so the gradient depends on how a batch is split"
        otherwise = "losses over pairs, experts with a capacity, statistics of a batch"
        decides = "whether examples may influence each other; if so, whether each micro-batch is large enough"
    return Finding("check-one-batch", what, cause, step, SUSPICIOUS, otherwise, decides)


def _seed(reference: Mapping[str, Any], step: int) -> Finding:
    what = f"step {step}: with another seed all {reference['masks']} dropout masks stay the same, first "
    what += _place(reference)
    cause = "the forward pass seeds torch's generators (torch.manual_seed), so every step has the same masks"
    otherwise = "masks that are fixed on purpose"
    return Finding("check-seed", what, cause, step, SUSPICIOUS, otherwise, "whether the forward pass calls manual_seed")


def _seed_in_evaluation(reference: Mapping[str, Any], step: int) -> Finding:
    what = f"step {step}: in evaluation mode outputs depend on the seed, by {reference['apart']:.2g}, first "
    what += _place(reference)
    if not reference["dropout"]:
        return Finding("check-seed", what, "the model draws random numbers, as a sampler does", step, INFO)
    cause = "dropout stays on: use nn.Dropout, or give functional.dropout training=self.training"
    otherwise = "dropout that samples predictions (Monte Carlo dropout)"
    return Finding("check-seed", what, cause, step, SUSPICIOUS, otherwise, "whether predictions should be random")


DESCRIBED = {
    "accumulation": _one_batch,
    "seed": _seed,
    "seed in evaluation": _seed_in_evaluation,
    "order": _mixed,
    "alone": _mixed,
    "padding": _padded,
    "padded targets": _padded_targets,
    "twice": _twice,
    "eager": _eager,
    "float32": _float32,
}


def _updated(update: Mapping[str, Any], step: int) -> Iterator[Finding]:
    formula = update["formula"]
    if formula:
        name = max(formula, key=lambda n: formula[n])
        what = f"step {step}: {len(formula)} weights do not follow from their gradients by the optimizer's formula, "
        what += f"most {name} (by {formula[name]:.2g} of its update)"
        cause = "other code writes to weights during the step, or the optimizer deviates from torch's formula"
        otherwise = "a hook that clips, masks or averages weights"
        yield Finding("check-update", what, cause, step, SUSPICIOUS, otherwise, "which code writes to them")
    share = update["lost_share"]
    if share is not None and share > 0.5:
        what = (
            f"step {step}: {share:.0%} of the elements of half-precision weights that have a gradient did not change: "
        )
        what += "their update is less than half a unit in the last place"
        cause = "keep weights in float32 and use autocast, or an optimizer with stochastic rounding or Kahan summation"
        otherwise = "gradients of nearly zero, or a warm-up"
        yield Finding("check-lost-update", what, cause, step, SUSPICIOUS, otherwise, "this share after the warm-up")
