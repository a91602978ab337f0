"""Set up both sides of a comparison with the plain reference: the run's model and examples, and those of transformers.

In: a run that is built, and the raw rows kept of its data. Out: `Sides`, whose plain model shares the run's parameters
and buffers, so that no second model is in memory; both without dropout, with perturbed weights, or with fixed masks.
The reference itself (`lockstep.plain`) does not depend on this module. To compare whole steps, every rank of a job
records: a folder with `plain.json` (the examples of each micro-batch of each step, losses and norms) and tensor files:
weights and optimizer state before, gradients and weights after.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.config.lazy import lazy
from lockstep.config.output_files import wrapped_os_errors
from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import IGNORED, MicroBatch
from lockstep.data.job import Job, TaskRules
from lockstep.data.raw_rows import RawRows
from lockstep.distributed.randomness import own_generators, seed_everything, seed_libraries
from lockstep.distributed.world import World
from lockstep.plain.examples import Plain
from lockstep.plain.rows import NotCovered
from lockstep.plain.scores import LONGEST
from lockstep.plain.train import build_model
from lockstep.strategies.exact.training_state import make_model
from lockstep.strategies.observer import GradientRecorder, listening
from lockstep.strategies.single import ReplicatedStrategy
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.models import model_configs, storage_dtype
from lockstep.tasks.task import Generates, Task, UsesReference
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate_with_tables
from lockstep.training.session import Session, build_session, join_ranks

if TYPE_CHECKING:
    from lockstep.data import hub
    from lockstep.strategies.engines import blocks
    from lockstep.tasks.models import adapters, quantized
    from lockstep.tasks.models.inference import Decoding
    from lockstep.tasks.module import Module
    from lockstep.tasks.modules.dataset import OwnCode
else:
    (hub,) = lazy("lockstep.data", "hub")
    (blocks,) = lazy("lockstep.strategies.engines", "blocks")
    adapters, quantized = lazy("lockstep.tasks.models", "adapters", "quantized")


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Context without dropout and router noise (`router_jitter_noise`): sets them to 0 in modules, module attributes
    and the config."""
    before: list[tuple[Any, str, Any]] = []
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) and hasattr(c, "__dict__")}
    for holder in [*model.modules(), *configs.values()]:
        for name, value in list(vars(holder).items()):
            drops = (
                "drop" in name or "jitter" in name or (name == "p" and type(holder).__module__ == nn.Dropout.__module__)
            )
            if drops and isinstance(value, float) and value:
                before.append((holder, name, value))
                setattr(holder, name, 0.0)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


@torch.no_grad()
def perturb_(model: nn.Module, precision: str, seed: int = 0) -> None:
    """Move every weight one unit in the last place of the computing precision (8 bits for bfloat16), up or down at
    random."""
    draw, unit = torch.Generator().manual_seed(seed), 2.0**-23 if precision == "fp32" else 2.0**-9
    for parameter in model.parameters():
        signs = torch.where(torch.rand(parameter.shape, generator=draw) < 0.5, 1.0, -1.0).to(parameter)
        parameter.mul_(1 + signs * unit)


@contextmanager
def perturbed(model: nn.Module, precision: str, seed: int = 0) -> Iterator[None]:
    """Context with perturbed weights (`perturb_`); restores them."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        perturb_(model, precision, seed)
        yield
    finally:
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[name])


def masked(job: Any, example: dict, read: list[int], predicted: list[int]) -> dict[str, Any]:
    """An example with given masks, after checking that they fit the example and the run file's masking rate. Errors:
    `ValueError`."""
    ids, task = example["input_ids"], job.run["task"]
    hidden = [label != IGNORED for label in predicted]
    right = all(
        (label if has else token) == own for token, label, has, own in zip(read, predicted, hidden, ids, strict=True)
    )
    special = {*job.tokenizer.all_special_ids} - {job.tokenizer.unk_token_id}
    most = max(1, round(task["mlm_probability"] * (sum(token not in special for token in ids) or len(ids))))
    if len(read) != len(ids) or not right or (sum(hidden) != most and not task["whole_word_mask"]):
        raise ValueError(f"{sum(hidden)} tokens are masked, {most} were expected, or they belong to another text")
    return example | {"input_ids": read, "next": predicted}


def drawn_examples(
    code: OwnCode, job: Plain, split: str, rows: Sequence[int], place: tuple[int, int], device: torch.device
) -> list[dict[str, Any]]:
    """The plain path's batch of a user's own items. Random numbers of items, collate and forward count as data:
    generators are seeded as in the run's own path. `place`: step and micro-batch."""
    from lockstep.tasks.modules import dataset as own_data

    data = job.splits[split]
    items = [own_data.item(code, data.dataset, data.indices[row], place[0]) for row in rows]
    seed_everything(code.seed, *place, 1)
    (example,) = job.encode(items)
    seed_everything(code.seed, *place)
    return [{name: (own_data.Bundle(batch, 0, 0).to(device).batch, count) for name, (batch, count) in example.items()}]


_OF_MODULE = 3  # items of a user module to compare for each of: first, longest, shortest
WHOLE = 100_000_000  # maximum parameters to build a second model if no rank holds the whole one


@dataclass(frozen=True)
class Sides:
    """Everything that two computations of the same examples need."""

    run: Run
    task: Task
    model: nn.Module  # the run's model, with lockstep's changes
    plain: nn.Module  # transformers' model, sharing the tensors of `model`
    job: Plain
    columns: Columns  # the run's examples
    at: np.ndarray  # row numbers in `columns`
    examples: list[dict[str, Any]]  # plain examples, as many; empty for a user module, whose items are drawn per batch
    first: list[int]  # indices into `at` of the first micro-batch; empty if its rows were not kept


class Elsewhere(Exception):
    """A run cannot be compared; the message gives the reason."""


class PlainFailed(Exception):
    """An unexpected error in the plain path."""


class OtherTokens(Exception):
    """An export would be tokenized differently than in training; the message gives the reason."""


@contextmanager
def plain_path() -> Iterator[None]:
    """Context that converts unexpected exceptions to `PlainFailed`. Refusals and out-of-memory errors pass through."""
    try:
        yield
    except (Elsewhere, NotCovered, PlainFailed, OtherTokens, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PlainFailed(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from error


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's first parameter."""
    return next(model.parameters()).device


def sides_of(task: Task, strategy: Strategy, micro_batch: Sequence[int] | np.ndarray = ()) -> Sides:
    """Set up both sides of a run. `micro_batch`: training examples of the first micro-batch. Errors: `Elsewhere`,
    `NotCovered`, `PlainFailed`."""
    run = task.run
    if task.own_model:
        from lockstep.tasks.module import Module

        if isinstance(task, Module):
            return _module_sides(task, strategy, micro_batch)
    if task.own_model or not task.built_in():
        raise Elsewhere("the task is your own class, whose loss has no reference implementation")
    if run.model.trust_remote_code:
        raise Elsewhere("the model may be code from the Hub (model.trust_remote_code)")
    raw_rows = RawRows.of(task.prepared.facts)
    if raw_rows is None:
        raise Elsewhere("no raw rows of its data were stored")
    with plain_path():
        job = job_of(task)
        examples = job.encode(task.plain_rows(raw_rows.rows))[: len(raw_rows.at)]
        check_tokenizer(task, job, examples)
    columns = task.splits[raw_rows.split] if raw_rows.examples is None else raw_rows.examples
    model = whole_model(task, strategy)
    plain = plain_model(job, model)
    job.reference = plain  # before training, the reference is the model itself
    of_split = raw_rows.split == "train" and raw_rows.examples is None
    first = np.flatnonzero(np.isin(raw_rows.at, micro_batch)).tolist() if of_split else []
    return Sides(run, task, model, plain, job, columns, raw_rows.at, examples, first)


def _module_sides(task: Module, strategy: Strategy, micro_batch: Sequence[int] | np.ndarray) -> Sides:
    """Set up both sides of a user module: the plain model is the same one, called as its class defines. Errors:
    `Elsewhere`, `PlainFailed`."""
    from lockstep.tasks.modules.wrapped_module import Adapted

    run = task.run
    model = whole_model(task, strategy)
    if strategy.dry_run.effects.evaluated or strategy.dry_run.effects.written:
        raise Elsewhere("your model changes its own weights when it is called")
    if names := own_generators(task, model):
        raise Elsewhere(f"your code draws from {', '.join(names)}, which lockstep does not seed")
    plain = copy.copy(model)
    plain.__class__ = next(kind for kind in type(model).__mro__[1:] if kind is not Adapted)
    with plain_path():
        seed_libraries(run.seed)
        job = Plain(run.model_dump(mode="json"), "")
        columns = task.splits["train"]
        if len(job.splits["train"]) != len(columns):
            raise PlainFailed(
                f"task.data: {len(columns)} items here, {len(job.splits['train'])} when it is called again"
            )
    by_length = np.argsort(-columns.lengths, kind="stable")
    first = np.asarray(micro_batch, np.int64)[:_OF_MODULE]
    at = np.array(list(dict.fromkeys([*first, *by_length[:_OF_MODULE], *by_length[-_OF_MODULE:]])), np.int64)
    return Sides(run, task, model, plain, job, columns, at, [], list(range(len(first))))


def job_of(task: Task, tokenizer: str | None = None) -> Plain:
    """The run for the plain path, with the kept rows. `tokenizer`: folder, if not the run's."""
    raw_rows = RawRows.of(task.prepared.facts)
    rows = [] if raw_rows is None else task.plain_rows(raw_rows.rows)
    return Plain(plain_file(task), tokenizer or task.prepared.tokenizer, {"train": rows}, labels_of(task))


def check_tokenizer(task: Task, job: Plain, examples: list[dict[str, Any]]) -> None:
    """Check that the tokenizer, as loaded from an export, gives the same tokens: for some families transformers chooses
    the tokenizer class by the model family, whatever was saved. Errors: `OtherTokens`."""
    from transformers.models.auto import tokenization_auto as auto

    family = model_configs.load_config(task.run.model).model_type
    kind = auto.TOKENIZER_MAPPING_NAMES.get(family) or "TokenizersBackend"
    fixed = family in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS and kind != "TokenizersBackend"
    if not fixed or type(job.tokenizer).__name__ == kind:
        return
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(task.prepared.tokenizer, folder, dirs_exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
        other = job_of(task, folder)
        if other.encode(other.splits["train"])[: len(examples)] != examples:
            raise OtherTokens(
                f"tokenizer: transformers loads the tokenizer of every {family} as a {kind}, which tokenizes this "
                "run's texts differently: the export would not work as trained. Set tokenizer.source to a tokenizer "
                "of that class, or use another model.type"
            )


def labels_of(task: Task) -> list[Any] | None:
    """Label values, in the order of their codes; None if there are none."""
    facts = task.prepared.facts
    labels = facts.get("label_values", facts.get("labels"))
    return None if labels is None else list(labels)


def with_defaults(task: TaskRules) -> dict[str, Any]:
    """The run file with defaults filled in that depend on other keys and the model's files."""
    values: dict[str, Any] = task.run.model_dump(mode="json")
    values["task"] |= task.plain_options()
    return values


def plain_file(task: Task) -> dict[str, Any]:
    """The run file for the plain path: with the column names of the kept rows, and numeric label weights where these
    depend on all rows."""
    run = task.run
    values = with_defaults(type(task)(run))
    values["model"] |= {"quantization": None, "dtype": "float32"}  # the plain model has float32 weights
    if run.model.source is not None:
        values["model"]["source"] = hub.model_folder(run.model.source)  # for an output folder, its export
    options = values["task"]
    options |= task.plain_columns
    weights = getattr(getattr(task, "objective", None), "weights", None)
    if weights is not None:
        options["class_weights"] = {}
        facts = task.prepared.facts
        for names in (facts["labels"], map(str, facts["label_values"])):
            options["class_weights"] |= dict(zip(names, map(float, weights), strict=True))
    return values


def whole_model(task: Task, strategy: Strategy) -> nn.Module:
    """The model that the strategy trains, if this rank holds all of it; else a new one in its initial state. Errors:
    `Elsewhere`, if that is too large."""
    run = task.run
    if isinstance(strategy, ReplicatedStrategy):
        return strategy.model
    if strategy.weights.parameter_count > WHOLE:
        raise Elsewhere(
            f"no rank holds the whole model under {run.strategy.name}, and it is too large to build a second one in "
            "memory"
        )
    model = make_model(task).to(strategy.world.device)
    blocks.prepare(run.model, model, run.strategy.tensor_leaves)
    return model.train()


def plain_model(job: Plain, model: nn.Module) -> nn.Module:
    """Build a transformers model (and peft adapter, if any) that shares the parameters and buffers of `model` where
    they are float32. Errors: `PlainFailed`, if names or shapes differ; `Elsewhere`, if too many weights would have to
    be converted."""
    has_adapter = bool(job.run["model"]["adapter"])
    with plain_path(), adapters.peft_without_warnings() if has_adapter else nullcontext():
        try:
            plain = build_model(job, empty=True)
        except NotCovered:
            raise
        except Exception:  # a family that cannot be built on the meta device
            plain = build_model(job)
    with_tensors_of(plain, model)
    return plain.to(device_of(model)).train()


def with_tensors_of(plain: nn.Module, model: nn.Module) -> None:
    """Put the parameters and buffers of `model` into `plain`, which has the same names, in float32."""
    own = dict(model.named_parameters(remove_duplicate=False))
    if sum(p.numel() for p in model.parameters() if p.dtype != torch.float32) > WHOLE:
        raise Elsewhere("the model has too many quantized weights for a float32 copy")
    tensors = quantized.unpacked(model) if storage_dtype.count(model) else {}
    packed = {n: nn.Parameter(t, requires_grad=False) for n, t in tensors.items()}
    for name in packed:
        for part in ("packed", "absmax"):
            del own[f"{name.removesuffix('weight')}{part}"]
    own |= packed
    theirs = dict(plain.named_parameters(remove_duplicate=False))
    if own.keys() != theirs.keys():
        raise PlainFailed(
            f"the names of the plain model's weights differ: {', '.join(sorted(own.keys() ^ theirs.keys())[:3])}"
        )
    shared: dict[int, nn.Parameter] = {}
    for name, parameter in own.items():
        if parameter.shape != theirs[name].shape:
            raise PlainFailed(f"the plain model's {name} has another shape")
        wide = parameter.dtype == torch.float32
        kept_parameter = (
            parameter if wide else nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
        )
        holder, _, last = name.rpartition(".")
        setattr(plain.get_submodule(holder), last, shared.setdefault(id(parameter), kept_parameter))
    modules = dict(model.named_modules())
    for path, module in plain.named_modules():
        others = vars(modules[path]) | dict(modules[path].named_buffers(recurse=False)) if path in modules else {}
        meta_tensors = {n: v for n, v in vars(module).items() if isinstance(v, Tensor) and v.is_meta}
        for name in [*meta_tensors, *dict(module.named_buffers(recurse=False))]:
            if isinstance(other := others.get(name), Tensor):
                setattr(module, name, other.float() if other.dtype == torch.bfloat16 else other)


FOLDER, FILE = "plain", "plain.json"
UNTRAINED = "untrained.safetensors"
EVALUATED = 6  # validation examples whose loss is compared: one batch
LOOKED_AT = 100  # first steps, from which one with the highest learning rate is chosen


@dataclass(frozen=True)
class PlainStep:
    """One step by the run's own path."""

    number: int  # step of the run, from 0
    loss: float
    norm: float  # gradient norm before clipping
    micro_batches: list[list[int]]  # row numbers in the training split
    masked: dict[str, list[list[list[int]]]]  # inputs and labels of a masked language model, by micro-batch


@dataclass(frozen=True)
class PlainRecord:
    """A job as plain data, for the plain reference."""

    tokenizer: str  # folder
    total: int  # steps of the run
    steps: list[PlainStep]
    evaluated: list[int] = field(default_factory=list)  # row numbers of validation examples evaluated before the steps
    scores: dict[str, float] = field(default_factory=dict)  # scores of `evaluated`
    evaluation_masked: dict[str, list[list[list[int]]]] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> PlainRecord:
        """Read a folder written by `record_session`."""
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return PlainRecord(**{**values, "steps": [PlainStep(**step) for step in values["steps"]]})


def record_plain(job: Job, world: World, count: str = "2") -> int:
    """Build the run and record `count` steps from its start; the function that each rank calls. Collective."""
    join_ranks(job, world)
    session = build_session(job, world)
    record_session(session, int(count))
    session.strategy.close()
    return 0


def save_untrained(session: Session) -> None:
    """Write the initial weights to OUTPUT/plain, for a task whose loss needs them. Collective."""
    if isinstance(session.task, UsesReference):
        save_on_main(session.run.folder / FOLDER / UNTRAINED, session.strategy.state.state_dict(), session.world)


def record_session(session: Session, count: int = 2) -> None:
    """Record up to `count` steps from the session's state into OUTPUT/plain; changes the state. Rank 0 writes the
    files. Collective."""
    strategy, feed, world = session.strategy, session.feed, session.world
    folder, recorder = session.run.folder / FOLDER, GradientRecorder(world)
    save_on_main(folder / "start.safetensors", strategy.state.state_dict(), world)
    held_out = session.task.splits["validation"]
    rows = np.arange(min(EVALUATED, len(held_out)))
    rows = rows[np.argsort(-held_out.lengths[rows], kind="stable")]  # in the order that evaluations use
    scores = _scores(session, held_out, rows)
    hides = session.task.draws_targets
    from lockstep.data.masking import WITHOUT_STEP

    masked_ids = _masked(session, held_out, [rows], WITHOUT_STEP) if hides else {}
    steps = []
    with without_dropout(strategy.model), listening(strategy, recorder):
        for place, number in enumerate(plain_numbers_of(feed, count)):
            batch = feed.make(number)
            groups = [batch.ids[group] for group in feed.task.split_micro_batches(feed.columns, batch.ids)]
            masked = _masked(session, feed.columns, groups, number) if hides else {}
            rate = learning_rate(session.run.optim, number, feed.total)
            result = strategy.train_step(batch.to(world.device), rate)
            micro_batches = [group.tolist() for group in groups]
            steps.append(PlainStep(number, float(result.loss), float(result.grad_norm), micro_batches, masked))
            gradients = {f"gradient.{name}": tensor for name, tensor in recorder.gradients.items()}
            save_on_main(folder / f"step-{place}.safetensors", gradients | strategy.state.state_dict(), world)
    if world.is_main:
        tokenizer = session.task.prepared.tokenizer
        record = PlainRecord(tokenizer, feed.total, steps, rows.tolist(), scores, masked_ids)
        (folder / FILE).write_text(json.dumps(asdict(record)), encoding="utf-8")


def _scores(session: Session, columns: Columns, rows: np.ndarray) -> dict[str, float]:
    """The run's own scores of some examples, with generated texts limited to a few tokens. Collective."""
    strategy = session.strategy

    def briefly(inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        return strategy.generate(inputs, replace(how, new_tokens=min(LONGEST, how.new_tokens)))

    texts = isinstance(session.task, Generates)
    scores, _ = evaluate_with_tables(session.world, session.task, strategy, columns, rows, texts, generate=briefly)
    return {name: float(value) for name, value in scores.items() if isinstance(value, int | float)}


def plain_numbers_of(feed: StepLoader, count: int) -> list[int]:
    """Steps to record: an early one with a high learning rate, the last of an epoch, which may be short, then others
    from the start."""
    first = range(min(feed.total, LOOKED_AT))
    rates = [learning_rate(feed.task.run.optim, number, feed.total) for number in first]
    last = min(feed.order.steps_per_epoch, feed.total) - 1
    return sorted([*dict.fromkeys([rates.index(max(rates)), last, *first])][:count])


def _masked(
    session: Session, columns: Columns, groups: Sequence[np.ndarray], step: int
) -> dict[str, list[list[list[int]]]]:
    """Input tokens and labels of all micro-batches: masks are random, so they are recorded as data."""
    tokens: dict[str, Any] = {"read": [], "predicted": []}
    for index, rows in enumerate(groups):
        micro: MicroBatch = session.task.collate_at(columns, rows, index, step)
        lengths = columns.lengths[rows].tolist()
        for key, ids in (("read", micro.inputs["input_ids"]), ("predicted", micro.targets)):
            tokens[key].append([row[:n] for row, n in zip(ids.tolist(), lengths, strict=False)])
    return tokens


def save_on_main(path: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Write tensors to a safetensors file; only rank 0 writes."""
    if world.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        with wrapped_os_errors(path):
            save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, path)
