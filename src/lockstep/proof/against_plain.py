"""Compare steps of a run with `lockstep.plain`, and report losses, gradients and weights that differ by more than
rounding.

In: the steps that `training/plain_sides.py` recorded, and the run. Out: lines that name each difference and its likely
cause (`lockstep_trace/causes.py`), and the parts of the run that plain does not cover. A second plain run whose weights
differ in their last bit measures the tolerance (TTrace, arXiv:2506.09280); in half precision a third one in float32
does so too.

`compare_traces.py` of lockstep-trace is not used, for three reasons. Plain judges all other code, so whole tensors are
compared by torch alone, without code of the tracer. A sketch has an error of about 4 % of a difference, too much for
the narrow tolerances of half precision. And a trace has a single perturbed companion, but Muon needs four, the norm has
its own tolerance, and for some optimizers only the first gradient is known.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.config.run import Run
from lockstep.data import source
from lockstep.data.job import Job, OptimizerRules
from lockstep.distributed.randomness import seed_libraries
from lockstep.distributed.system_metrics import capacity
from lockstep.plain.examples import Plain
from lockstep.plain.rows import NotCovered
from lockstep.plain.scores import scores
from lockstep.plain.train import TrainedStep, build_model, train_steps
from lockstep.track.busy import ACTIVITY
from lockstep.track.console import Console
from lockstep.training import plain_sides
from lockstep.training.plain_sides import (
    FOLDER,
    UNTRAINED,
    PlainRecord,
    PlainStep,
    drawn_examples,
    masked,
    perturb_,
    without_dropout,
)
from lockstep_trace import causes

COLUMNS = ["step", "loss", "norm", "gradients", "changes"]  # relative differences
TENSORS = ("gradient", "change")
STEPS = 2  # compared steps
MORE = 4  # perturbed runs if a step differs with one: in a chaotic model its effect may be small by chance
FACTOR, LOW = 10.0, 5.0  # allowed difference, as a multiple of the effect of a last bit: float32, bfloat16
LEAST = {"loss": 2e-6, "norm": 1e-5, "gradient": 2e-5, "change": 1e-3}  # relative differences always allowed
LEAST_LOW = {"loss": 1e-3, "norm": 2**-8, "gradient": 2**-8, "change": 2**-6}  # under autocast, whose unit is 2^-8
FLOOR = 1e-3  # smallest norm used for a parameter, relative to all: terms that cancel leave only rounding
LOSS_LIBRARIES = {  # task -> (distribution, releases whose losses plain calls, module with the losses)
    "embedding": ("sentence-transformers", "6.", "sentence_transformers"),
    **dict.fromkeys(("preference", "reward"), ("trl", "1.16.", "trl.experimental.cpo")),
}
LAST_BIT = 2.0**-23  # rounding of a gradient whose terms cancel, relative to the loss, at most FLOOR of the whole
NOTHING = 1e-5  # relative to the whole: a smaller gradient is zero within rounding
MOST = 0.9  # largest tolerance in float32, or twice the effect of a last bit: a missing gradient differs by 1


@dataclass(frozen=True)
class StepComparison:
    """Relative differences between a step of the run and the plain one, with their tolerances."""

    number: int
    differences: dict[str, float]  # loss, norm, gradient, change: the largest one
    allowed: dict[str, float]
    where: dict[str, str]  # gradient, change: the parameter with the largest difference
    gradients: dict[str, float]  # relative difference of each
    unexpected: list[str] = field(default_factory=list)  # parameters that change though plain has no gradient

    @property
    def differs(self) -> bool:
        """Whether a difference exceeds its tolerance or is NaN, or a parameter changes that plain leaves unchanged."""
        return bool(self.unexpected) or not all(size <= self.allowed[key] for key, size in self.differences.items())


@dataclass(frozen=True)
class PlainComparison:
    """The result of a comparison."""

    steps: list[StepComparison] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)  # empty: matches plain
    uncovered: str | None = None  # description of what plain does not compute
    scores: list[str] = field(default_factory=list)  # names of compared evaluation metrics


def train_beside_plain(run: Run, steps: int = 2) -> PlainComparison:
    """Train a few steps in this process under `single`, and compare them with plain. Errors: `RunError`."""
    from lockstep.distributed.world import World
    from lockstep.training.resolve import for_rank

    values = run.as_one_process().model_dump(mode="json")
    with tempfile.TemporaryDirectory(prefix="lockstep-plain-", ignore_cleanup_errors=True) as folder:
        alone = Run.load(values | {"output": folder, "launch": {"device": run.launch.device, "processes": 1}})
        with closing(World(alone)) as world:
            plain_sides.record_plain(for_rank(alone, world), world, str(steps))
            return compare_with_plain(Job.of(run), Path(folder) / FOLDER)


def tell(console: Console, job: Job, output: Path, verdict: Path | None = None) -> int:
    """Compare the steps of a job recorded in OUTPUT/plain and print the result. `verdict`: JSON file that the result is
    added to. Returns the exit status."""
    console.say("training the plain reference (lockstep.plain) without dropout ...")
    ACTIVITY.set("computing the same steps by the plain reference")
    folder = output / FOLDER
    if not folder.exists():
        result = PlainComparison(uncovered=f"task.name: {job.run.task.name} is your own code")
    elif (needed := _bytes(folder, _draws(job.optimizer))) > (free := capacity(torch.device("cpu"), 1)):
        result = PlainComparison(
            uncovered=f"it needs {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
        )
    else:
        result = compare_with_plain(job, folder)
    if result.steps:
        rows = [_row(step.number, step.differences) for step in result.steps]
        console.table("relative differences from the plain reference", COLUMNS, rows, key="plain")
        for limits, numbers in _tolerances(result.steps).items():
            where = "" if len(numbers) == len(result.steps) else f" in step {' and '.join(numbers)}"
            console.say(f"tolerance{where}: {limits}", 2)
    if verdict is not None:
        content = json.loads(verdict.read_text(encoding="utf-8")) if verdict.exists() else {"agrees": True}
        content["agrees"] = content["agrees"] and not result.differences
        plain_result = {"differences": result.differences, "not_covered": result.uncovered}
        verdict.write_text(json.dumps(content | {"plain": plain_result}), encoding="utf-8")
    if result.scores:
        console.say(f"metrics compared with other libraries: {', '.join(sorted(result.scores))}", 2)
    if result.uncovered is not None:
        console.say(f"not compared with the plain reference: {result.uncovered}", 2)
    if result.differences:
        console.say("result: DIFFERENT from the plain reference")
        for line in result.differences:
            console.say(f"  {line}", 4)
    elif result.steps:
        console.say("result: matches the plain reference, within rounding")
    return int(bool(result.differences))


def _bytes(folder: Path, draws: int) -> int:
    """Return the bytes of memory that parallel plain runs need: weights, gradients, optimizer state, records."""
    return 3 * (1 + draws) * sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _row(number: int, sizes: Mapping[str, float]) -> list[str]:
    """Return a table row."""
    return [str(number), *(f"{sizes[key]:.1e}" if key in sizes else "" for key in ("loss", "norm", *TENSORS))]


def _tolerances(steps: Sequence[StepComparison]) -> dict[str, list[str]]:
    """Return tolerance, as text -> numbers of the steps that have it."""
    steps_of: dict[str, list[str]] = {}
    for step in steps:
        number, *allowed = _row(step.number, step.allowed)
        limits = ", ".join(f"{name} {size}" for name, size in zip(COLUMNS[1:], allowed, strict=True) if size)
        steps_of.setdefault(limits, []).append(number)
    return steps_of


@dataclass(frozen=True)
class PlainSide:
    """What plain computes a job's steps from."""

    job: Job
    plain: Plain

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() and self.job.run.launch.device != "cpu" else "cpu")

    def in_float32(self) -> PlainSide:
        """Return a copy without autocast."""
        plain = copy.copy(self.plain)
        plain.run = {**self.plain.run, "precision": "fp32"}
        return replace(self, plain=plain)

    def examples(self, split: str, rows: Sequence[int], step: int, index: int) -> list[dict]:
        """Return the examples of a micro-batch."""
        if self.plain.own_model:
            from lockstep.tasks.modules.dataset import OwnCode

            return drawn_examples(OwnCode.of(self.job.run), self.plain, split, rows, (step, index), self.device)
        examples = self.plain.examples(split)
        return [examples[row] for row in rows]


def compare_with_plain(job: Job, folder: Path) -> PlainComparison:
    """Compare the steps of a job recorded in a folder with plain's."""
    verdict = _compared(job, folder, _draws(job.optimizer))
    again = any(step.differs for step in verdict.steps) and _draws(job.optimizer) < MORE
    if again and _bytes(folder, MORE) <= capacity(torch.device("cpu"), 1):
        return _compared(job, folder, MORE)
    return verdict


def _compared(job: Job, folder: Path, draws: int) -> PlainComparison:
    """Call `compare_with_plain` with a given number of perturbed runs, which measure the tolerance."""
    record, verdict = PlainRecord.read(folder), PlainComparison()
    try:
        seed_libraries(job.run.seed)  # data of the user's own may be drawn
        side = PlainSide(job, plain := Plain(plain_run(job, folder), record.tokenizer))
        plain.libraries = _library_has_loss(job.run.task.name)
        _check_numbers(plain, record)
        if record.evaluated:
            verdict.differences.extend(_evaluation(side, record, folder, verdict.scores))
        if job.run.precision == "bf16":  # its steps take their divisors from a step in float32
            exact, *counted = itertools.tee(_trained(side.in_float32(), record, folder, 0), 2 + draws)
            divisors = [(step.targets for step in each) for each in counted]
            first, *others = (_trained(side, record, folder, d, divisors[d]) for d in range(1 + draws))
            others.append(exact)
        else:
            first, *others = (_trained(side, record, folder, draw) for draw in range(1 + draws))
        start = _named("model.", load_file(folder / "start.safetensors"))  # these show which weights are tied
        parameters = [name for name, _ in build_model(plain, start, empty=True).named_parameters()]
        for place, (ours, theirs, *rounded) in enumerate(zip(_recorded(record, folder), first, *others, strict=True)):
            comparison = _compare_step(ours, theirs, rounded, record.steps[place].number, job.run.precision)
            comparison.unexpected.extend(_unexpected_changes(ours, theirs, parameters))
            verdict.steps.append(comparison)
            if lines := _lines(comparison, ours, theirs):
                verdict.differences.extend(lines)
                break  # what comes after a wrong step differs because of it
    except NotCovered as error:
        return replace(verdict, uncovered=str(error))
    return verdict


def _library_has_loss(task: str) -> bool:
    """Return whether the library that defines a task's loss is installed in a release whose function plain can call."""
    distribution, release, module = LOSS_LIBRARIES.get(task, ("", "", ""))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experimental functions, which may change; the release is known
            return bool(module) and version(distribution).startswith(release) and bool(import_module(module))
    except (PackageNotFoundError, ImportError):
        return False


def plain_run(job: Job, folder: Path) -> dict[str, Any]:
    """Return the job's run as plain reads it. Rows that only lockstep can create are written to files first."""
    run = job.run
    values = plain_sides.with_defaults(job.task(run))
    if run.data.source == source.BUILTIN:
        rows = source.load(run.data.model_copy(update={"filter": {}, "limit": None}), run.seed)
        (folder / "rows").mkdir(exist_ok=True)
        for split, dataset in rows.splits.items():
            text = "".join(json.dumps(row) + "\n" for row in dataset)
            (folder / "rows" / f"{split}.jsonl").write_text(text, encoding="utf-8")
        values["data"] |= {"source": str(folder / "rows"), "validation": None, "test": None}
        if "label_names" in values["task"] and not values["task"]["label_names"]:
            values["task"]["label_names"] = rows.splits["train"].features["label"].names
    return values


def _check_numbers(job: Plain, record: PlainRecord) -> None:
    count = len(job.splits["train"] if job.own_model else job.examples("train"))
    most = max(i for step in record.steps for group in step.micro_batches for i in group)
    if most >= count:
        raise ValueError(f"the run trains example {most}, but plain makes only {count} examples of the same data")


def _evaluation(side: PlainSide, record: PlainRecord, folder: Path, names: list[str]) -> list[str]:
    """Return the differences in metrics of a few validation examples before the steps. `names`: compared metrics are
    appended to it."""
    precision = side.job.run.precision
    low = precision != "fp32"
    factor, least = (LOW, LEAST_LOW["loss"]) if low else (FACTOR, LEAST["loss"])

    def scored(model: nn.Module) -> dict[str, float]:
        examples = side.examples("validation", record.evaluated, -1, 0)
        if masked_ids := record.evaluation_masked:
            examples = [
                masked(side.plain, *each)
                for each in zip(examples, masked_ids["read"][0], masked_ids["predicted"][0], strict=True)
            ]
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, precision == "bf16"):
            return scores(side.plain, model, examples)

    model = _model(side, folder)
    plain = scored(model)
    perturb_(model, precision)
    perturbed, lines = scored(model), []
    for name in plain.keys() & record.scores.keys():
        ours, theirs = record.scores[name], plain[name]
        if math.isnan(ours) and math.isnan(theirs):
            continue
        names.append(name)
        allowed = _allowed(least, factor, [_relative(perturbed[name], theirs)])
        difference = 0.0 if abs(ours - theirs) <= least else _relative(ours, theirs)
        if difference > allowed:
            limit = f"difference {difference:.1e}, tolerance {allowed:.1e}"
            count = len(record.evaluated)
            lines.append(f"evaluation: {name} of {count} examples is {ours!r}; plain has {theirs!r} ({limit})")
    return sorted(lines)


def _model(side: PlainSide, folder: Path) -> nn.Module:
    """Build the model with the weights before the steps; sets plain's reference model if the task needs one."""
    job, device, untrained = side.plain, side.device, folder / UNTRAINED
    weights = _named("model.", load_file(folder / "start.safetensors"))
    if job.reference is None and job.needs_reference:
        first = _named("model.", load_file(untrained)) if untrained.exists() else weights
        job.reference = build_model(job, first).to(device).eval()
    return build_model(job, weights).to(device)


def _draws(optimizer: type[OptimizerRules]) -> int:
    """Return the number of plain runs with perturbed last bits that measure rounding: several if an update enlarges a
    last bit, as a single perturbed run may leave a loss unchanged by chance."""
    return 4 if optimizer.enlarges_rounding else 1


def _trained(
    side: PlainSide, record: PlainRecord, folder: Path, perturb: int, divisors: Iterable[float] | None = None
) -> Iterator[TrainedStep]:
    """Yield the plain steps, without dropout. `perturb`: 0, or the number of the perturbation of the first weights."""
    state = _named("optimizer.", load_file(folder / "start.safetensors"))
    job, model = side.plain, _model(side, folder)
    if perturb:
        perturb_(model, job.run["precision"], perturb - 1)
    steps = (_micro_batches(side, step) for step in record.steps)
    with without_dropout(model):
        yield from train_steps(job, model, steps, record.total, [step.number for step in record.steps], state, divisors)


def _micro_batches(side: PlainSide, step: PlainStep) -> Iterator[list[dict]]:
    """Yield the examples of each non-empty micro-batch of a step, with their masks."""
    for index, rows in enumerate(step.micro_batches):
        examples = side.examples("train", rows, step.number, index) if rows else []
        if step.masked:
            drawn = (step.masked[key][index] for key in ("read", "predicted"))
            examples = [masked(side.plain, *each) for each in zip(examples, *drawn, strict=True)]
        if examples:
            yield examples


def _recorded(record: PlainRecord, folder: Path) -> Iterator[TrainedStep]:
    """Yield the recorded steps of the run."""
    before = _named("model.", load_file(folder / "start.safetensors"))
    for place, step in enumerate(record.steps):
        tensors = load_file(folder / f"step-{place}.safetensors")
        gradients, after = _named("gradient.", tensors), _named("model.", tensors)
        changed_names = [name for name in after if name in gradients or not torch.equal(after[name], before[name])]
        changes = {name: after[name] - before[name] for name in changed_names if after[name].is_floating_point()}
        yield TrainedStep(step.loss, 0.0, step.norm, gradients, changes)
        before = after


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose name begins with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


# -- comparing ---------------------------------------------------------------------------------------------------------


def _compare_step(
    ours: TrainedStep, plain: TrainedStep, rounded: Sequence[TrainedStep], number: int, precision: str
) -> StepComparison:
    """Compare a step of the run with the plain one. `rounded`: the plain step, rounded in other ways."""
    factor, least = (FACTOR, LEAST) if precision == "fp32" else (LOW, LEAST_LOW)
    differences, where, gradients = _differences(ours, plain, least["gradient"])
    spreads = [_differences(other, plain, least["gradient"])[0] for other in rounded]
    most = MOST if precision == "fp32" else math.inf  # half precision may leave nothing of terms that nearly cancel out
    allowed = {key: _allowed(least[key], factor, (spread[key] for spread in spreads), most) for key in differences}
    return StepComparison(number, differences, allowed, where, gradients)


def _allowed(least: float, factor: float, spreads: Iterable[float], most: float = math.inf) -> float:
    """Return the tolerance of a relative difference. `spreads`: effects of last bits; those that are not finite are
    ignored."""
    largest = max(filter(math.isfinite, spreads), default=0.0)
    return max(least, min(factor * largest, max(most, 2 * largest)))


def _differences(
    a: TrainedStep, b: TrainedStep, least: float
) -> tuple[dict[str, float], dict[str, str], dict[str, float]]:
    """Return the relative differences of two records of a step, the parameters with the largest ones, and those of all
    gradients. `least`: the difference of gradients that is always allowed."""
    differences, where = {"loss": _relative(a.loss, b.loss), "norm": _relative(a.norm, b.norm)}, {}
    every = {}
    sizes, whole = _sizes(b.gradients)
    bit = min(LAST_BIT * abs(b.loss), FLOOR * whole)  # a gradient below this may be only rounding
    scales = {n: max(size, FLOOR * whole, bit / least if size <= bit else 0.0) for n, size in sizes.items()}
    kinds = [("gradient", a.gradients, b.gradients, scales)]
    if b.changes:  # Adam makes full steps even for a gradient that is only rounding
        updated = [name for name, size in sizes.items() if size > NOTHING * whole]
        kinds.append(("change", a.changes, b.changes, dict.fromkeys(updated, _sizes(b.changes)[1])))
    for kind, mine, theirs, scale_of in kinds:
        differences_of = {}
        for name, scale in scale_of.items():
            difference = float((mine.get(name, 0.0 * theirs[name]).double() - theirs[name].double()).norm())
            differences_of[name] = difference / scale if math.isfinite(difference) else math.inf
        where[kind] = max(differences_of, key=lambda name: differences_of[name], default="")
        differences[kind] = differences_of.get(where[kind], 0.0)
        every[kind] = differences_of
    return differences, where, every["gradient"]


def _unexpected_changes(ours: TrainedStep, plain: TrainedStep, parameters: Iterable[str]) -> list[str]:
    """Return the parameters that the run changes though plain has no gradient for them (frozen ones, for example)."""
    still = (name for name in parameters if name not in plain.gradients and name in ours.changes)
    return [name for name in still if bool(ours.changes[name].any())]


def _sizes(tensors: Mapping[str, Tensor]) -> tuple[dict[str, float], float]:
    """Return the 2-norm of each tensor, and of all together."""
    sizes = {name: float(tensor.double().norm()) for name, tensor in tensors.items()}
    return sizes, math.sqrt(sum(size**2 for size in sizes.values() if math.isfinite(size))) or 1.0


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-30) if math.isfinite(a) and math.isfinite(b) else math.inf


def _lines(comparison: StepComparison, ours: TrainedStep, plain: TrainedStep) -> list[str]:
    """Return a line for each difference of a step, and its likely cause."""
    at, lines = f"step {comparison.number}", []
    for key, difference in comparison.differences.items():
        if difference <= comparison.allowed[key]:
            continue
        limit = f"difference {difference:.1e}, tolerance {comparison.allowed[key]:.1e}"
        if key in ("loss", "norm"):
            name = "loss" if key == "loss" else "gradient norm"
            lines.append(f"{at}: {name} {getattr(ours, key)!r}; plain has {getattr(plain, key)!r} ({limit})")
        else:
            lines.append(f"{at}: {key} of {comparison.where[key]} ({limit})")
    if extra := sorted(ours.gradients.keys() - plain.gradients.keys()):
        nonzero = [name for name in extra if bool(ours.gradients[name].any())]
        lines += [f"{at}: {name} has a gradient; plain has none" for name in nonzero[:1]]
    lines += [f"{at}: {name} changes; plain has no gradient for it" for name in comparison.unexpected[:1]]
    return [*lines, f"  likely: {_cause(comparison, ours, plain)}"] if lines else []


def _cause(comparison: StepComparison, ours: TrainedStep, plain: TrainedStep) -> str:
    """Return the likely cause of the first difference, in the order of computation."""
    if not (math.isfinite(plain.loss) and math.isfinite(plain.norm)):
        return causes.NOT_FINITE
    first = next(
        (k for k in ("loss", "gradient", "norm", "change") if comparison.differences[k] > comparison.allowed[k]), ""
    )
    if not first and comparison.unexpected:
        return causes.UPDATE
    if first != "gradient":
        of_kind = {"loss": causes.of_loss_function(), "norm": causes.NORM, "change": causes.UPDATE}
        return of_kind.get(first, causes.MISSING_GRADIENT)
    wrong = [name for name, difference in comparison.gradients.items() if difference > comparison.allowed["gradient"]]
    pairs = [
        (plain.gradients[n].double().flatten(), ours.gradients[n].double().flatten())
        for n in wrong
        if n in ours.gradients
    ]
    factors = [float(x @ y / (x @ x)) for x, y in pairs if float(x @ y) > causes.COSINE * float(x.norm() * y.norm())]
    return causes.of_sums(wrong, len(plain.gradients), factors if len(factors) >= 0.9 * len(wrong) else [])
