"""Rules on values observed in the first losses, on the inputs of classification losses and on settings of a model.

Evidence: `tracer/evidence.py`, `tracer/logits.py`, `tracer/graph.py`, `tracer/layouts.py`. Each kind of note is a row
of `KINDS`: the evidence, the change to make, and, unless it is proved, other explanations and how to decide. A note is
reported if it holds in three steps or more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from lockstep_trace.read import Rank, Trace
from lockstep_trace.rules import PATIENCE, SUSPICIOUS, WRONG, Finding, premises, weakened

SHAPES = "give both the same shape (squeeze or unsqueeze the last dimension of one)"
FIRST = "pass the output of log_softmax to kl_div as its first argument, then the target"
ITSELF = (
    "itself-among-candidates",
    "each row is one of its own candidates, although its target is another row",
    "mask the diagonal of the similarities (fill it with -inf) before the loss",
)
BEYOND = "binary cross entropy is given targets below 0 or above 1: the loss has no minimum there"

# kind of note -> (code, evidence, cause, otherwise, decides)
# proved: torch excludes these values, and the loss has no gradient or minimum for them; or a sum over all pairs is the
# product of two sums, in which no weight belongs to an example.
# Differences of all pairs: the mean of all (output i - target j)^2 is the mean of (output i - mean target)^2 plus a
# constant: the assignment of targets to outputs has no effect, which no correct program wants. The same holds for any
# function of differences if the targets come from a loader's batch, which assigns one to each example. Otherwise
# absolute differences of all pairs, other pair weights and sums weighted by probabilities may be intended.
# kl_div expects log-probabilities; with the output of a softmax its result is no divergence. The output of a layer may
# be the logarithm of a rate.
# Classes: the logits are a view of a layer's output with as many classes as the layer has channels, but the class axis
# is not the channel axis, because the view cuts memory in another order. No correct program gives a layer one channel
# per class and then reads the classes along positions.
# Answers: at each position, a causal decoder reads the token that it must predict there, in every loss examined. The
# graph and the numbers exclude a shift inside the model, autoencoders and masked prediction, but not a tagger that
# seldom changes a token, so it is only suspected, as are targets that equal a column of the input.
# Candidates: embeddings are multiplied by their own transpose, the target of each row is another row, and the diagonal
# is neither removed nor masked. If all embeddings have the same length, the diagonal is the largest entry of each row,
# so no target can win; otherwise, as for consecutive states, it is suspected. A positive among negatives: the target's
# logit comes first and occurs a second time among the negatives, in every row, so that the loss also pushes the
# positive away. Accidental copies do not occur in every row. Rows in which most candidates occur twice are skipped, and
# so are candidates without a column of their own, which may be equal.
KINDS = {
    "spread over targets": (
        "loss-broadcast",
        "the loss compares each output [N, 1] with the targets [N] of all examples of the batch, and all pairs count "
        "equally: the assignment of targets to examples has no effect",
        SHAPES,
        "",
        "",
    ),
    "spread squares": (
        "loss-broadcast",
        "the loss has {0} x {0} differences: an output [{0}, 1] minus targets [{0}]; their mean square is minimal if "
        "every output is the mean of all targets",
        SHAPES,
        "",
        "",
    ),
    "kl of probabilities": (
        "loss-of-probabilities",
        "the loss has the form of kl_div, but its input is the output of a softmax",
        "kl_div expects log-probabilities: use log_softmax",
        "a sum weighted by probabilities on purpose",
        "whether it should be a divergence",
    ),
    "kl_div of probabilities": (
        "loss-of-probabilities",
        "the input of kl_div is the output of a softmax, not log-probabilities",
        FIRST,
        "",
        "",
    ),
    "kl_div of logits": (
        "loss-of-logits",
        "the input of kl_div is the output of a layer, not log-probabilities",
        FIRST,
        "a divergence of unnormalized rates, with an extra term",
        "what is added to kl_div",
    ),
    "narrow": (
        "logits-too-close",
        "similarities of unit vectors are multiplied by {0} is that of equal scores)",
        "divide by a temperature below 1, or multiply by its inverse",
        "weak training on purpose",
        "whether the number is a temperature",
    ),
    "classes": (
        "classes-across-axes",
        "the logits are a view of a layer's output, {0}, whose class axis is not the channel axis of the layer, though "
        "both have the same size",
        "move axes with transpose or permute before view or reshape",
        "",
        "",
    ),
    "answer in a column": (
        "answer-in-input",
        "the targets are a column of the model's input, in every row",
        "leave the target out of the features",
        "an autoencoder, a class that is part of the input on purpose, or a state that seldom changes",
        "whether the column is known when the model is used",
    ),
    "answer at its position": (
        "answer-in-input",
        "at each position, the input of a causal decoder is the token that it must predict there",
        "shift by one position: input tokens[:, :-1], targets tokens[:, 1:]",
        "a tagger that seldom changes a token",
        "whether the targets are the input tokens themselves",
    ),
    "itself among candidates": (*ITSELF, "", ""),
    "itself among products": (*ITSELF, "states that may follow themselves", "whether a row may be its own target"),
    "positive among negatives": (
        "positive-among-negatives",
        "the logit of each row's target occurs again among its negatives",
        "remove the positive from the negatives: enqueue keys after the loss, or mask them",
        "",
        "",
    ),
    "blank": (
        "target-is-blank",
        "ctc_loss is given targets that contain class {0}, its blank: they can never be recognized",
        "keep one class for the blank: number the letters from 1, or make the blank the last class",
        "",
        "",
    ),
    "target outside": (
        "target-out-of-range",
        BEYOND,
        "give it probabilities or labels 0 and 1 (-1 and 1 belong to soft_margin_loss)",
        "",
        "",
    ),
    "target beyond": (
        "target-out-of-range",
        BEYOND,
        "give it probabilities or labels 0 and 1",
        "labels divided by the probability that they are observed, which are between 0 and 1 on average",
        "how targets are computed",
    ),
    "target 0": (
        "target-out-of-range",
        "soft_margin_loss is given labels 0 and 1: a label of 0 has a constant loss and no gradient",
        "give it labels -1 and 1",
        "",
        "",
    ),
    "own weights": (
        "loss-broadcast",
        "weights of the batch, [{0}], multiply values [{0}, 1] and make [{0}, {0}]: the sum takes all pairs, so that "
        "no weight belongs to an example",
        SHAPES,
        "",
        "",
    ),
    "all pairs": (
        "loss-broadcast",
        "values [{0}, 1] of a layer are combined with others to [{0}, {0}], and all pairs count equally",
        SHAPES,
        "all pairs on purpose, as of two sets",
        "whether each output belongs to one target",
    ),
    "ctc": (
        "loss-of-logits",
        "ctc_loss is given the output of a layer or softmax, whose exponentials do not add to 1: raising all lowers "
        "the loss without end",
        "give it log_softmax(-1) of the logits",
        "",
        "",
    ),
    "weights of others": (
        "weights-reversed",
        "the weights of cross entropy are inverse frequencies of the targets, but those of other classes",
        "compute them in the order of the class numbers",
        "weights that are like that by chance",
        "how the weights are computed",
    ),
    "bounded": (
        "logits-bounded",
        "cross entropy is given the output of {0}: classes get probabilities of a part of 0 to 1, or do not add to 1",
        "give it the output of the last layer",
        "a bounded score on purpose",
        "whether the model ends in an activation by mistake",
    ),
    "start twice": (
        "start-twice",
        "all rows begin with the same token twice, which comes nowhere else",
        "add the start token once: in the text or by the tokenizer (add_special_tokens=False)",
        "two start tokens on purpose",
        "whether the model is later given both",
    ),
    "pairs of 0": (
        "target-out-of-range",
        "{0} is given labels 0 and 1, and takes -1 and 1",
        "give it 2 * label - 1",
        "0 for pairs that do not count",
        "what 0 means",
    ),
    "target of kl_div": (
        "target-out-of-range",
        "kl_div is given {0}",
        "targets are probabilities, or with log_target=True their logarithms",
        "numbers that are no distribution on purpose",
        "how targets are computed",
    ),
    "ascends": (
        "update-ascends",
        "parameters move along their gradients, so that the mean error grows",
        "subtract the gradient",
        "examples to forget",
        "whether the loss should grow",
    ),
    "rare weighs": (
        "weights-reversed",
        "pos_weight makes the rarer class of the targets weigh less",
        "pos_weight is negatives / positives",
        "a preference for the frequent class on purpose",
        "how the weight is computed",
    ),
    "frequent weighs": (
        "weights-reversed",
        "cross entropy weighs classes more the more often they come",
        "weigh classes by the inverse of their frequency",
        "classes that matter more and come more often",
        "how the weights are computed",
    ),
    "softmax over the batch": (
        "examples-mixed",
        "a softmax of shape {0} normalizes over the batch: each example's output depends on the other examples",
        "normalize over the classes or features: dim=-1",
        "examples that form one set, like the instances of a bag",
        "whether each example is to be predicted independently",
    ),
    "batch": (
        "examples-mixed",
        "a view changes {0} without moving the batch axis: rows of the result mix several examples",
        "move axes with transpose or permute before view or reshape",
        "an axis that is as long as the batch by chance",
        "whether it happens with another batch size",
    ),
    "softmax": (
        "attention-axis",
        "attention weights are normalized over {0}: those of one query do not add to 1",
        "apply the softmax over the axis that the product sums over",
        "weights that divide each position's contribution, as in slot attention",
        "whether each query's weights should add to 1",
    ),
    # updates may still be too small to change what a model computes in half precision
    "margins of zero": (
        "reference-is-policy",
        "logsigmoid takes zeros alone, though steps change weights: both sides of a margin are one model",
        "the reference must be a copy made before adapters are added, or run without adapters",
        "steps that are too small to change the outputs, or a head that starts at zero and is not trained yet",
        "whether both sides are computed by one model",
    ),
    "summed over ranks": (
        "ranks-undivided",
        "gradients of means are summed over {0} ranks and not divided",
        "divide by the number of ranks after all_reduce",
        "a learning rate that accounts for it",
        "whether a step should equal that of one large batch",
    ),
    "padding reaches": (
        "padding-used",
        "rows end in padding, and at least half of the padded positions get a gradient at their embedding: outputs or "
        "loss depend on padding",
        "mask padding in attention, pooling and loss, read the last real position, or pack the sequences",
        "a symbol that the model should see",
        "whether a row's output may depend on how far it is padded",
    ),
    # it may stand for the row if it sees all of it
    "padding picked": (
        "padding-picked",
        "rows end in padding, which a mask of the call leaves out, and the loss reads the output at the last position",
        "read the last real position: output[range(B), lengths - 1]",
        "padding that stands for its row, as a token for classes",
        "whether the position should be a real one",
    ),
    "padding index": (
        "padding-is-data",
        "index {0} pads rows, is the embedding's padding_idx, and is inside of rows and a target of the loss as well",
        "keep one index for padding: number items from 1",
        "items that are hidden on purpose",
        "whether {0} is an item",
    ),
    "item is padding": (
        "padding-is-data",
        "index {0} is the embedding's padding_idx, and stands for examples of one index each, which need no padding: "
        "its row is zero and is never trained",
        "keep one index for padding: number items from 1, or leave padding_idx out",
        "an index for missing values",
        "whether {0} is an item",
    ),
    "mean beside sum": (
        "mean-beside-sum",
        "the loss adds a mean over the batch and a sum over {0}: the sum's weight grows with the batch size",
        "give both terms one reduction, or divide the sum by the number of examples",
        "a weight that was tuned for this batch size",
        "whether the weight of the sum should depend on the batch size",
    ),
    "masked mean": (
        "mean-over-padding",
        "a loss is multiplied by a mask that leaves out the ends of rows, and .mean() divides by all positions: the "
        "more padding a batch has, the less its positions count",
        "divide by the mask: (loss * mask).sum() / mask.sum()",
        "one divisor for all batches on purpose",
        "whether padding should weaken a batch",
    ),
    "advantage with a gradient": (
        "weight-with-gradient",
        "the loss multiplies an advantage (a constant minus a predicted value) that is not detached: besides its own "
        "squared error, this product trains the value, too",
        "detach it: advantage = (returns - value).detach()",
        "a value that both losses train on purpose",
        "which losses should train the value",
    ),
    "target with a gradient": (
        "target-with-gradient",
        "an error compares an output with a target (a constant plus a multiple of another output), and both have a "
        "gradient: training moves the target, too",
        "compute the target under torch.no_grad(), or detach it",
        "residual gradients on purpose",
        "whether the target should move",
    ),
    "padding learned": (
        "padding-learned",
        "rows end in padding, and the cross entropy counts all padded positions, each with the same class",
        "exclude them: ignore_index, or -100 as their target",
        "a model that should generate padding",
        "whether padding should be learned",
    ),
    "copies learned": (
        "copies-learned",
        "most targets are the token at their own position, and others are not: most of the loss is copying",
        "of masked language modelling, set the targets of all unmasked positions to -100",
        "a corrector or a denoising autoencoder",
        "whether unchanged tokens should count",
    ),
    "updates lost": (
        "updates-lost",
        "most weights of half precision that have a gradient do not change: their updates are less than half of the "
        "last bit",
        "keep the weights in float32 and compute under autocast",
        "a first phase with a small rate",
        "how many weights change later, or an optimizer that keeps what rounding loses",
    ),
    "step while accumulating": (
        "step-while-accumulating",
        "an optimizer makes steps while Accelerate accumulates gradients: each has a part of the gradient",
        "pass the optimizer through accelerator.prepare, or step it if accelerator.sync_gradients",
        "an optimizer of another model, which accumulates nothing",
        "whether it should step with each micro-batch",
    ),
    "heads": (
        "attention-axis",
        "a view takes {0} and moves no axis: each head gets parts of several positions",
        "split heads by view [B, T, heads, width] and transpose(1, 2), and join them the other way round",
        "heads that are meant to mix positions",
        "which numbers belong to a position",
    ),
    "accumulation unset": (
        "step-while-accumulating",
        "gradient_accumulation_steps is {0}, but Accelerator accumulates 1: accumulate() has no effect",
        "Accelerator(gradient_accumulation_steps={0})",
        "a setting that other code reads",
        "how many backwards a step should have",
    ),
    "state carried": (
        "state-carried",
        "a call gets the state that the call with the previous batch returned, but the loader shuffles: each example "
        "continues from the state of an unrelated one",
        "start each batch with a new state; carry it only where batches continue each other",
        "a state that belongs to no example",
        "whose state it is",
    ),
    "noise in no": (
        "noise-not-in-input",
        "targets are normal noise, and the model's input of the same size is uncorrelated with them: the model cannot "
        "know which noise to predict",
        "add the noise that is the target to the model's input",
        "random numbers to measure speed",
        "where noise is drawn",
    ),
    "load overwritten": (
        "load-overwritten",
        "between loading weights and the model's next call, {0} of the loaded matrices get unrelated values",
        "initialize before loading",
        "random weights on purpose (a baseline, pruned weights that are reinitialized)",
        "whether training should start from the checkpoint",
    ),
    "new and frozen": (
        "new-and-frozen",
        "{0}: not in the loaded checkpoint, so random, and frozen",
        "train it: with PEFT, name it in modules_to_save; else requires_grad_(True)",
        "a fixed random projection",
        "whether it should be trained",
    ),
    "column removed": (
        "column-removed",
        "Trainer removes the column {0}, which compute_loss or the collator names: the model's forward has no such "
        "argument",
        "remove_unused_columns=False",
        "a column that may be missing",
        "what the code does without it",
    ),
    "mean of batches": (
        "mean-of-batches",
        "a score that is no mean over examples is averaged over batches: it depends on how examples are batched",
        "collect outputs or sums of all batches, and compute it once",
        "a score of each batch on purpose",
        "whether another batch size should give another number",
    ),
    "never reset": (
        "never-reset",
        "it includes the counts of all epochs before, which nothing resets",
        "set the counts to zero before each epoch or evaluation",
        "a mean since the start on purpose",
        "what the number is compared with",
    ),
    "logits above": (
        "logits-above-half",
        "the model gives logits, whose threshold for a probability of 0.5 is 0",
        "compare the sigmoid with 0.5, or the logit with 0",
        "a threshold of 0.62 on purpose, or a model that applies a sigmoid in evaluation",
        "what the compared numbers are",
    ),
    "codes": (
        "codes-of-split",
        "computed again from held-out rows: their numbers mean something else than in training",
        "fit on the training rows, and apply that to the others",
        "splits that each have a model of their own",
        "whether both splits have the same numbers",
    ),
    # entries of a list that are one object hold one state; a script that wants that appends it once
    "aliases": (
        "one-object",
        "all entries of the list are one object, which the loop changes in place: each has its last state",
        "append a copy: .clone(), .copy()",
        "a list of which only the length or the last entry counts",
        "what reads the list",
    ),
    # adding a number changes no gradient; a script may add one to show it with the loss
    "number in a term": (
        "term-without-gradient",
        "this summand of the loss is a number (.item(), .detach()): it changes the value, and trains nothing",
        "add the tensor itself, or leave it out",
        "a number that is added to be shown",
        "whether the term should train anything",
    ),
    "term cut": (
        "term-without-gradient",
        "the loss before has a term whose gradients only another optimizer's parameters get; they are cleared, and the "
        "term trains nothing",
        "compute it from the trained network's output itself, not from data or .detach()",
        "a term that is added to be shown",
        "which parameters the term should train",
    ),
    "two orders": (
        "orders-differ",
        "one more permutation is drawn: rows no longer belong together",
        "draw the permutation once, and index all with it",
        "rows that should not belong together",
        "whether the row numbers should match",
    ),
}
# a kind of note -> other kinds in the same run that explain it
UNLESS = {
    "noise in no": ("noise in an",),
    "target beyond": ("target outside",),
    "all pairs": ("own weights", "spread squares", "spread over targets"),
    "spread squares": ("spread over targets",),
    "kl of probabilities": ("kl_div of probabilities", "kl_div of logits"),
    "answer at its position": ("another at its position",),
}


def notes(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report the kinds of notes that recur."""
    for rank in trace.ranks[:1]:
        rows: dict[str, dict[int, str]] = {}
        for number, step in sorted(rank.steps.get(optimizer, {}).items()):
            for kind, argument in step.observed or ():
                rows.setdefault(kind, {}).setdefault(number, argument)
        for kind, by_step in rows.items():
            if kind not in KINDS or any(other in rows for other in UNLESS.get(kind, ())):
                continue
            if kind == "state carried" and not any(
                e["shuffle"] and e["loader"] in by_step.values() for e in rank.loaders
            ):
                continue
            if kind == "margins of zero" and not _moves(rank, optimizer, [*by_step][:-1]):
                continue
            if kind == "summed over ranks" and _share_examples(trace, optimizer, by_step):
                continue  # tensor parallelism by hand: the sum of parts of a gradient
            if len(by_step) >= PATIENCE:
                number, argument = next(iter(by_step.items()))
                text = f"step {number}: {{}}; so in {len(by_step)} of the first steps"
                yield _finding(kind, text, argument, number)


def _moves(rank: Rank, optimizer: int, numbers: Iterable[int]) -> bool:
    """Return whether updates in these steps add up to more than rounding in half precision: 1e-4 of the weights."""
    steps = [rank.steps[optimizer][n] for n in numbers]
    sizes = [[sum(v.square for v in each.values()) ** 0.5 for each in (s.updates, s.weights)] for s in steps]
    return sum(update for update, _ in sizes) > 1e-4 * max((weights for _, weights in sizes), default=0.0)


def _share_examples(trace: Trace, optimizer: int, numbers: Iterable[int]) -> bool:
    each = [[set(s.examples or ()) for _, s in trace.at(optimizer, number)] for number in numbers]
    return any(a & b for rows in each for a, b in itertools.combinations(rows, 2))


def facts(trace: Trace) -> Iterator[Finding]:
    """Report facts that are recorded once and may be intended."""
    for record in trace.ranks[0].facts:
        yield _finding(record["fact"], "{}", record["argument"])


def _finding(kind: str, text: str, argument: str = "", number: int | None = None) -> Finding:
    code, what, cause, otherwise, decides = KINDS[kind]
    finding = Finding(code, text.format(what.format(argument)), cause.format(argument), number)
    return weakened(finding, not otherwise, otherwise, decides.format(argument))


def settings(trace: Trace, optimizer: int) -> Iterator[Finding]:
    """Report settings that follow another library's convention.

    Setting an attribute `requires_grad` on a module has no effect, since none of its classes reads or writes it. This
    is proved in two cases: it is False, but the module's parameters get gradients and change, in a parameter group with
    others, so no code separated them; or it is True and an optimizer holds its parameters, which all stay frozen to the
    end."""
    rank = next((r for r in trace.ranks if r.steps.get(optimizer)), None)
    if rank is None:
        return
    last = rank.steps[optimizer][max(rank.steps[optimizer])].layout
    for name, count in last.thawed[:1] if trace.complete else ():
        what = (
            f"requires_grad = True is set on the module {name}, and its {count} parameters in the optimizer stay frozen"
        )
        yield Finding("setting-unread", what, "module.requires_grad_(True) unfreezes its parameters", None, WRONG)
    for kind, name, number in rank.models[0].get("odd", ())[:1] if rank.models else ():
        if kind == "frozen":
            if not _trained(rank, optimizer, name):
                continue
            what = f"requires_grad = False is set on the module {name}, and its parameters require gradients"
            yield Finding("setting-unread", what, "module.requires_grad_(False) freezes its parameters", None, WRONG)
            continue
        what, cause = f"batch norm {name} has momentum {number:g}", f"torch's momentum is 1 - this: {1 - number:.2g}"
        what += ": running statistics are nearly those of the last batch"
        if kind == "dropout":
            what, cause = (
                f"dropout {name} drops {number:.0%}",
                f"p is the share that is dropped, not kept: {1 - number:.2g}",
            )
        yield Finding("setting-unusual", what, cause, None, SUSPICIOUS, "a number on purpose", "where it comes from")
    step = next(iter(rank.steps[optimizer].values()))
    for group in step.groups[:1]:
        betas = list(group.get("betas") or ())
        if len(betas) == 2 and betas[0] >= 0.98 and betas[1] <= betas[0] - 0.04:
            what = f"betas are {tuple(betas)}: the mean of gradients is longer than that of their squares"
            swapped = f"betas=({betas[1]:g}, {betas[0]:g})"
            yield Finding("setting-unusual", what, swapped, None, SUSPICIOUS, "a number on purpose", "their order")


def _trained(rank: Rank, optimizer: int, module: str) -> bool:
    steps = [s for s in rank.steps[optimizer].values() if s.measured]
    if not steps:
        return False
    inside = [p for p in steps[-1].layout.parameters if p.name.startswith(f"{module}.")]
    groups = {p.group for p in steps[-1].layout.parameters if p not in inside}
    updated = {n for s in steps for n, v in s.updates.items() if v.square}
    return bool(inside) and all(p.name in updated and p.group in groups for p in inside)


def statements(trace: Trace) -> Iterator[Finding]:
    """Report statements without effect, from the script's source.

    They are: a method that is named but not called, a context that is not entered, and a parameter's method whose
    result, a new tensor, is dropped. No correct program needs one, even if it never runs."""
    for rank in trace.ranks[:1]:
        for kind, text, where in (rank.ended or {}).get("idle", ()):
            if kind in KINDS:
                what = f"{where}: `{text}`: ".replace("{", "{{").replace("}", "}}")
                yield _finding(kind, what + "{}")
                continue
            what = f"{where}: `{text}` has no effect: " + STATEMENTS[kind][0]
            yield Finding("no-effect", what, STATEMENTS[kind][1], None, WRONG)


STATEMENTS = {
    "method": ("the method is named, but not called", "call it: add ()"),
    "context": ("the context is not entered", "with ...:, or as a decorator"),
    "result": (
        "it returns a new tensor, and the script drops it",
        "the method with an underscore changes the tensor itself; or assign the result",
    ),
}


def split_apart(trace: Trace) -> Iterator[Finding]:
    """Report ranks that train one model but split its data set at random into different parts.

    Other ranks then train on the validation rows of a rank. The finding is proved if each rank reads two parts of one
    TensorDataset; otherwise each rank may have its own data."""
    rows: list[dict[tuple[int, ...], list[Any]]] = [
        {tuple(e["split"]): e["rows"] for e in r.loaders if e.get("split") and e.get("rows")} for r in trace.ranks
    ]
    trained = [_fed(rank) for rank in trace.ranks]
    replicas = premises.declared(trace) or any(premises.reduced(trace, o) for o in trace.optimizers)
    for split in rows[0] if len(rows) > 1 and replicas else {}:
        each = [row[split] for row in rows if split in row]
        parts = [other for row in rows for other in row if other[0] == split[0] and other != split]
        both = any(len(fed & {s for s in row if s[0] == split[0]}) > 1 for fed, row in zip(trained, rows, strict=True))
        if len(each) < len(rows) or len({e[0] for e in each}) == 1 or len(parts) < len(rows) or both:
            continue  # both: no part is held back
        same = each[0][1] is not None and len({e[1] for e in each}) == 1
        what = "random_split gives each rank different parts, and ranks train one model: rows that one rank holds back "
        cause = "split with a generator of one seed on all ranks: generator=torch.Generator().manual_seed(0)"
        finding = Finding("split-by-rank", what + "are trained on by another", cause)
        yield weakened(finding, same, "data of its own on each rank", "whether all ranks load the same data set")
        return


def _fed(rank: Rank) -> set[tuple[int, ...]]:
    split = {e.get("loader"): tuple(e["split"]) for e in rank.loaders if e.get("split")}
    fed = (name for steps in rank.steps.values() for s in steps.values() for name, _ in s.fed or ())
    return {split[name] for name in fed if name in split}
