"""The loader reads every example once, for any number of ranks, and raises errors when the batch is requested."""

import threading

import numpy as np
import pytest
import torch

from lockstep.config.run import Run
from lockstep.data.arrow_cache import Columns
from lockstep.data.batch import IGNORED, MicroBatch
from lockstep.data.job import Job
from lockstep.strategies.exact.gradient_sum import share
from lockstep.tasks.classification import Classification
from lockstep.training.data_loader import StepLoader
from support.expected_batches import CPU, rows_in, wanted_rows
from support.harness import tiny


def task_of(run: Run) -> Classification:
    return Classification(run).opened(Job.of(run).with_data().data)


def feed_of(run: Run, rank: int = 0, ranks: int = 1) -> StepLoader:
    return StepLoader(task_of(run), share(run.micro_batches, rank, ranks), CPU)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_the_examples_of_a_step_without_overlap(ranks: int, group: int) -> None:
    run = tiny(f"data.group_by_length={group}")
    feeds = [feed_of(run, rank, ranks) for rank in range(ranks)]
    for step in range(5):  # the last step of an epoch is short: 100 = 4 * 22 + 12
        parts = [feed.make(step) for feed in feeds]
        rows = feeds[0].order.step(step)
        assert len(rows) == (22 if step < 4 else 12)
        assert sorted(row for part in parts for row in rows_in(part)) == sorted(wanted_rows(feeds[0], rows))
        assert sorted(m.index for p in parts for m in p.micro_batches) == list(range(8))
        for part in parts:
            assert part.ids.tolist() == rows.tolist()
            assert (part.examples, part.targets, part.count, part.step) == (len(rows), len(rows), 8, step)
            assert part.tokens == feeds[0].columns.lengths[rows].sum()
            assert part.tokens <= part.padded


def test_an_epoch_covers_every_example_once() -> None:
    feed = feed_of(tiny())
    ids = np.concatenate([feed.make(step).ids for step in range(feed.order.steps_per_epoch)])
    assert sorted(ids.tolist()) == list(range(100))


def test_the_counted_padding_is_the_computed_one() -> None:
    batch = feed_of(tiny("data.padding=batch")).make(1)
    assert batch.padded == sum(m.inputs["input_ids"].numel() for m in batch.micro_batches)
    assert batch.tokens == sum(int(m.inputs["attention_mask"].sum()) for m in batch.micro_batches)


def test_fewer_examples_than_micro_batches_give_padding_micro_batches() -> None:
    run = tiny("batch_size=8", "data.limit=20", "steps=3")
    batch = feed_of(run).make(2)  # 20 = 8 + 8 + 4
    assert (batch.examples, len(batch.micro_batches)) == (4, 8)
    blank = [m for m in batch.micro_batches if bool((m.targets == IGNORED).all())]
    assert len(blank) == 4
    assert all(m.inputs["input_ids"].shape[0] == 1 for m in blank)


@pytest.mark.parametrize("after", [0, 1, 4, 5, 6])
def test_the_loader_yields_the_batches_of_make_from_any_step(after: int) -> None:
    feed = feed_of(tiny())
    found = list(feed.steps(after=after))
    assert [batch.step for batch in found] == list(range(after, 6))
    for batch in found:
        again = feed.make(batch.step)
        assert batch.ids.tolist() == again.ids.tolist()
        for one, other in zip(batch.micro_batches, again.micro_batches, strict=True):
            assert one.index == other.index
            assert torch.equal(one.targets, other.targets)
            assert all(torch.equal(one.inputs[k], other.inputs[k]) for k in other.inputs)


@pytest.mark.parametrize(("length", "total"), [("epochs=2", 10), ("epochs=0.5", 2), ("epochs=0.01", 1), ("steps=7", 7)])
def test_the_number_of_steps(length: str, total: int) -> None:
    run = tiny(length)
    assert feed_of(run).total == total


def test_an_error_is_raised_at_the_batch_and_the_thread_ends() -> None:
    feed = feed_of(tiny())
    whole = feed.task.collate

    third = feed.make(3).ids

    def collate(columns: Columns, rows: np.ndarray, index: int) -> MicroBatch:
        if np.isin(rows, third).any():
            raise RuntimeError("the data went away")
        return whole(columns, rows, index)

    feed.task.collate = collate  # type: ignore[method-assign]
    stream = feed.steps(after=0)
    assert [next(stream).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="the data went away"):
        next(stream)
    assert not [t for t in threading.enumerate() if t.name == "lockstep-feed"]


def test_closing_early_ends_the_thread() -> None:
    stream = feed_of(tiny("steps=50")).steps(after=0)
    next(stream)
    assert [t for t in threading.enumerate() if t.name == "lockstep-feed"]
    stream.close()
    assert not [t for t in threading.enumerate() if t.name == "lockstep-feed"]


def test_the_seed_decides_the_order() -> None:
    first, again, other = (feed_of(tiny(f"seed={s}")).make(0).ids.tolist() for s in (0, 0, 1))
    assert first == again != other


def test_grouping_by_length_over_steps_pads_less_with_fewer_pieces() -> None:
    plain, grouped = (
        feed_of(tiny("micro_batches=2", "data.padding=batch", f"data.group_by_length={n}")) for n in (1, 5)
    )
    padded = [sum(feed.make(step).padded for step in range(5)) for feed in (plain, grouped)]
    assert padded[1] < 0.95 * padded[0]


def test_loader_without_micro_batches_returns_the_step() -> None:
    """`lockstep plan` has such a loader."""
    run = tiny()
    batch = StepLoader(task_of(run), [], torch.device("cpu")).make(0)
    assert batch.targets == 22
    assert batch.own_tokens == 0


class Drawing(Classification):
    """A task whose collate draws random numbers, like one that shuffles words."""

    collates_ahead = False
    drawn: dict[tuple[int, int], float]

    def collate_at(self, columns: Columns, rows: np.ndarray, index: int, step: int) -> MicroBatch:
        self.drawn[step, index] = float(torch.rand(()))
        return super().collate_at(columns, rows, index, step)


def test_random_draws_of_collate_depend_on_step_and_micro_batch_alone() -> None:
    run = tiny()
    found = []
    for ranks in (1, 2):
        task = Drawing(run).opened(Job.of(run).with_data().data)
        task.drawn = {}
        feeds = [StepLoader(task, share(run.micro_batches, rank, ranks), CPU) for rank in range(ranks)]
        for step in range(3):
            for feed in feeds:
                feed.make(step)
        found.append(task.drawn)
    assert found[0] == found[1]
    assert len({*found[0].values()}) == len(found[0]) == 3 * run.micro_batches
