"""The steps that `lockstep.plain` is compared with: a run's own path, without dropout, written down.

In: a built session, in every rank of the job. Out: a folder with `plain.json` (which examples were in which micro-batch
of which step, losses and norms) and files of tensors: weights and optimizer state before, gradients and weights after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from lockstep.config.run import Run
from lockstep.data.batch import MicroBatch
from lockstep.data.masking import WITHOUT_STEP
from lockstep.data.tokens import Columns
from lockstep.distributed.world import World
from lockstep.plain.scores import LONGEST
from lockstep.strategies.exact import optim
from lockstep.strategies.observer import GradientRecorder, listening
from lockstep.tasks.abilities import Generates
from lockstep.tasks.models.decoding import Decoding
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate_with_tables
from lockstep.training.plain_measures import without_dropout
from lockstep.training.resolve import Job
from lockstep.training.session import Session, build_session, join_ranks

FOLDER, FILE = "plain", "plain.json"
EVALUATED = 6  # examples of the validation split whose loss is compared: one batch
LOOKED_AT = 100  # steps among which one with the highest learning rate is chosen


@dataclass(frozen=True)
class PlainStep:
    """One step of the run's own path."""

    number: int  # of the run's steps, from 0
    loss: float
    norm: float  # of the gradient before clipping
    micro_batches: list[list[int]]  # numbers of examples in the training split
    masked: dict[str, list[list[list[int]]]]  # what a masked language model reads and predicts, by micro-batch


@dataclass(frozen=True)
class PlainRecord:
    """A job as plain data, for the plain reference."""

    tokenizer: str  # folder
    total: int  # steps of the run
    steps: list[PlainStep]
    evaluated: list[int] = field(default_factory=list)  # numbers of validation examples, before the steps
    scores: dict[str, float] = field(default_factory=dict)  # of these
    evaluation_masked: dict[str, list[list[list[int]]]] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> PlainRecord:
        """Read a folder of `record_session`."""
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return PlainRecord(**{**values, "steps": [PlainStep(**step) for step in values["steps"]]})


def record(job: Job, world: World, count: str = "2") -> int:
    """The job of a rank: build the run and record `count` steps from its start. Collective."""
    join_ranks(job, world)
    session = build_session(job, world)
    record_session(session, int(count))
    session.strategy.close()
    return 0


def record_session(session: Session, count: int = 2) -> None:
    """Record up to `count` steps from the state that the session is in, into OUTPUT/plain; changes the state. The files
    are rank 0's. Collective."""
    strategy, feed, world = session.strategy, session.feed, session.world
    folder, recorder = session.run.folder / FOLDER, GradientRecorder(world)
    _save(folder / "start.safetensors", strategy.state_dict(), world)
    held_out = session.task.splits["validation"]
    rows = np.arange(min(EVALUATED, len(held_out)))
    rows = rows[np.argsort(-held_out.lengths[rows], kind="stable")]  # as evaluations have them in a batch
    scores = _scores(session, held_out, rows)
    hides = session.run.task.name == "masked_language_modeling"
    shown = _masked(session, held_out, [rows], WITHOUT_STEP) if hides else {}
    steps = []
    with without_dropout(strategy.model), listening(strategy, recorder):
        for place, number in enumerate(numbers_of(session.run, feed, count)):
            batch = feed.make(number)
            groups = [batch.ids[group] for group in feed.task.cut(feed.columns, batch.ids)]
            masked = _masked(session, feed.columns, groups, number) if hides else {}
            rate = optim.learning_rate(session.run.optim, number, feed.total)
            result = strategy.train_step(batch.to(world.device), rate)
            micro_batches = [group.tolist() for group in groups]
            steps.append(PlainStep(number, float(result.loss), float(result.grad_norm), micro_batches, masked))
            gradients = {f"gradient.{name}": tensor for name, tensor in recorder.gradients.items()}
            _save(folder / f"step-{place}.safetensors", gradients | strategy.state_dict(), world)
    if world.is_main:
        tokenizer = session.task.prepared.tokenizer
        record = PlainRecord(tokenizer, feed.total, steps, rows.tolist(), scores, shown)
        (folder / FILE).write_text(json.dumps(asdict(record)), encoding="utf-8")


def _scores(session: Session, columns: Columns, rows: np.ndarray) -> dict[str, float]:
    """The run's own scores of some examples; texts are written to a few tokens. Collective."""
    strategy = session.strategy

    def briefly(inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        return strategy.generate(inputs, replace(how, new_tokens=min(LONGEST, how.new_tokens)))

    texts = isinstance(session.task, Generates)
    scores, _ = evaluate_with_tables(
        session.run, session.world, session.task, strategy, columns, rows, texts, generate=briefly
    )
    return {name: float(value) for name, value in scores.items() if isinstance(value, int | float)}


def numbers_of(run: Run, feed: StepLoader, count: int) -> list[int]:
    """Numbers of steps to look at: a first one with a high learning rate, and the last of an epoch, which may be short;
    then others from the start."""
    first = range(min(feed.total, LOOKED_AT))
    rates = [optim.learning_rate(run.optim, number, feed.total) for number in first]
    last = min(feed.order.steps_per_epoch, feed.total) - 1
    return sorted([*dict.fromkeys([rates.index(max(rates)), last, *first])][:count])


def _masked(
    session: Session, columns: Columns, groups: Sequence[np.ndarray], step: int
) -> dict[str, list[list[list[int]]]]:
    """Tokens that are read and that are predicted, of all micro-batches: which are masked is drawn, so it is data."""
    tokens: dict[str, Any] = {"read": [], "predicted": []}
    for index, rows in enumerate(groups):
        micro: MicroBatch = session.task.collate_at(columns, rows, index, step)
        lengths = columns.lengths[rows].tolist()
        for key, ids in (("read", micro.inputs["input_ids"]), ("predicted", micro.targets)):
            tokens[key].append([row[:n] for row, n in zip(ids.tolist(), lengths, strict=False)])
    return tokens


def _save(path: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    if world.is_main:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, path)
