"""Load this rank's training batches, prefetched by a thread if the task allows it; the position is the step number.

In: a task, the order of the examples, and the micro-batch indices of this rank. Out: one `StepBatch` per step, on the
device, with the counts of the whole step.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from lockstep.config.errors import coded
from lockstep.config.lazy import lazy
from lockstep.config.sections import DataSection
from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.data.order import (
    ByLength,
    ByShard,
    MixedOrder,
    MixedShards,
    Order,
    by_chance,
    equal_micro_batches,
    total_steps,
)
from lockstep.data.streamed import Streamed, Unreadable
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.world import World
from lockstep.strategies.exact.gradient_sum import Shares
from lockstep.tasks.task import Task
from lockstep.track.console import error

if TYPE_CHECKING:
    from lockstep.data import remote
else:
    (remote,) = lazy("lockstep.data", "remote")

AHEAD = 2  # steps to prefetch
LOOKED_AT = 200  # steps whose micro-batches are looked at to choose lengths
FORESEEN = 2  # steps of a stream prepared before one is yielded: ranks agree on a stop one step after the request


def stopping(world: World) -> Callable[[Unreadable], None]:
    """Return a function that stops all ranks before an unreadable shard is needed, and prints the reason."""

    def ends(caught: Unreadable) -> None:
        if world.local_rank == 0:  # ranks on a machine read the same files
            error(coded("LS5020", f"{caught}\nTraining stops before it needs that data"), world.log)
        world.stop.came = True

    return ends


class StepLoader:
    """Training batches of one rank."""

    def __init__(self, task: Task, indices: Iterable[int], device: torch.device) -> None:
        run = task.run
        self.task, self.indices, self.device = task, list(indices), device
        self.shares: Shares | None = None  # micro-batches of all ranks, if shared unevenly
        self.columns = task.splits["train"]
        self.sources = task.sources(self.columns)
        self.order = self._order(run.data, run.batch_size, run.seed)
        order = self.order.order if isinstance(self.order, ByLength) else self.order
        self.mixed = order if isinstance(order, MixedOrder) else None
        self.micro_batches, self.seed = run.micro_batches, run.seed
        self.lengths = run.model.fixed_lengths
        self.pads = task.padded_because is not None or bool(self.lengths)
        self.total = total_steps(run.epochs, run.steps, self.order.steps_per_epoch)

    def _order(self, data: DataSection, batch_size: int, seed: int) -> Order:
        how = batch_size, seed
        streamed = self.columns if isinstance(self.columns, Streamed) else None
        if data.sources is not None:
            schedules = [each.schedule for each in data.sources]
            if streamed:
                return MixedShards(streamed.sizes_of_sources, schedules, *how, data.stream_window)
            order: Order = MixedOrder([len(rows) for rows in self.sources.values()], schedules, *how)
        elif streamed:
            return ByShard(streamed.shard_sizes, *how, data.stream_window)
        else:
            order = Order(len(self.columns), *how)
        together = data.group_by_length
        return ByLength(order, self.columns.lengths, together) if together > 1 else order

    @property
    def mixture(self) -> dict[str, str]:
        """Opening lines about a mixture's sources, a stream's shards and fixed lengths; empty for one source that is
        not streamed."""
        lines = {} if self.mixed is None else {"mixture": self.mixed.summary(list(self.sources), self.total)}
        if self.lengths:
            lines["lengths"] = (
                f"texts are padded to {', '.join(map(str, self.lengths))} tokens (model.compile: whole); "
                f"{self.padding_share():.0%} of the computed tokens are padding"
            )
        if isinstance(self.columns, Streamed):
            most = len(self.columns) if self.mixed is None else int(self.mixed.sizes.max())
            window = f"{min(self.task.run.data.stream_window, most):,} examples"
            some = window if self.mixed is None else f"up to {window} of each source"
            lines["stream"] = f"{len(self.columns.shard_sizes):,} shards, {some} shuffled together"
        return lines

    def _looked_at(self) -> Iterator[np.ndarray]:
        """Yield the rows of some steps, evenly spaced over an epoch."""
        per_epoch = self.order.steps_per_epoch
        for step in np.unique(np.linspace(0, per_epoch - 1, min(LOOKED_AT, per_epoch)).astype(int)).tolist():
            yield self.order.step(step)

    def equal_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the number of examples and the longest example of micro-batches with equal numbers of examples."""
        for rows in self._looked_at():
            lengths = self.columns.lengths[rows]
            groups = equal_micro_batches(lengths, self.micro_batches)
            yield from ((len(group), int(lengths[group].max())) for group in groups if len(group))

    def padding_share(self) -> float:
        """Share of the computed tokens that are padding."""
        steps = [(rows, self.task.split_micro_batches(self.columns, rows)) for rows in self._looked_at()]
        real = sum(int(self.columns.lengths[rows].sum()) for rows, _ in steps)
        return 1 - real / sum(self._tokens(rows, groups) for rows, groups in steps)

    def deal(self, shares: Shares, rank: int) -> None:
        """Set which micro-batches each rank runs, from the next batch that `steps` yields; `rank` is this rank."""
        self.shares, self.indices = shares, list(shares[rank])

    def interval(self, every: int | Literal["epoch"]) -> int:
        """Convert an interval to steps."""
        return self.order.steps_per_epoch if every == "epoch" else every

    def make(self, step: int, from_workers: Iterator[MicroBatch] | None = None) -> StepBatch:
        """Create one step's batch: every rank cuts the same micro-batches and collates its own, or takes collated ones
        `from_workers`."""
        if isinstance(self.columns, Streamed) and isinstance(self.order, ByShard | MixedShards):
            behind = self.order.next_shards(step, remote.AHEAD) if self.columns.elsewhere else []
            self.columns.hold(self.order.resident_ranges(step), behind)
        return self._batch(step, self.order.step(step), from_workers)

    def one(self, step: int, index: int) -> MicroBatch:
        """One micro-batch of a step, of any rank, in host memory."""
        rows = self.order.step(step)
        return self._collated(step, rows[self.task.split_micro_batches(self.columns, rows)[index]], index)

    def longest(self, count: int | None = None) -> StepBatch:
        """Batch of the longest examples, not a step of the run: no step needs more memory. `count`: number of examples,
        if not the batch size."""
        return self._batch(0, np.sort(self.columns.longest(count or self.order.batch_size)))

    def _batch(self, step: int, rows: np.ndarray, from_workers: Iterator[MicroBatch] | None = None) -> StepBatch:
        lengths = self.columns.lengths[rows]
        groups = self.task.split_micro_batches(self.columns, rows)
        targets_of = None if self.mixed is None else self._targets_of(rows, step)
        own, shares = self.indices, self.shares
        micro_batches = [
            self._collated(step, rows[groups[k]], k) if from_workers is None else next(from_workers) for k in own
        ]
        if self.device.type == "cuda":
            micro_batches = [m.pinned() for m in micro_batches]
        tokens = self._tokens(rows, groups)
        return StepBatch(
            step=step,
            micro_batches=micro_batches,
            count=self.micro_batches,
            examples=len(rows),
            targets=self.task.count_targets_at(self.columns, rows, step),
            tokens=int(lengths.sum()),
            padded=tokens,
            padded_by_chance=self.task.padded(self.columns, rows, by_chance(len(rows), self.micro_batches)),
            ids=rows,
            shares=shares,
            own_tokens=tokens if len(own) == len(groups) else self._tokens(rows, [groups[k] for k in own]),
            targets_of=targets_of,
        )

    def _tokens(self, rows: np.ndarray, groups: Sequence[np.ndarray]) -> int:
        """Tokens computed for these micro-batches of a step, including padding if there is any."""
        if self.pads:
            return self.task.padded(self.columns, rows, groups)
        return int(self.columns.lengths[rows[np.concatenate(groups)]].sum()) if len(groups) else 0

    def _source_of(self, rows: np.ndarray) -> np.ndarray:
        """Index of the mixture source of each row: int64, same shape."""
        return np.searchsorted([span.stop for span in self.sources.values()], rows, side="right")

    def _targets_of(self, rows: np.ndarray, step: int) -> np.ndarray:
        """Targets of each mixture source: float64 [S]."""
        of = self._source_of(rows)
        some = [rows[of == source] for source in range(len(self.sources))]
        counts = [self.task.count_targets_at(self.columns, r, step) if len(r) else 0 for r in some]
        return np.array(counts, dtype=np.float64)

    def _collated(self, step: int, rows: np.ndarray, index: int) -> MicroBatch:
        if not self.task.collates_in_thread():  # may use random numbers; a collate in a thread does not
            seed_everything(self.seed, step, index, 1)
        micro = self.task.collate_at(self.columns, rows, index, step)
        if self.lengths:
            micro = self.task.widened(micro, self.lengths)
        if self.mixed is None:
            return micro
        of = self._source_of(rows if len(rows) else np.zeros(1, dtype=np.int64))  # a padding micro-batch has one row
        return replace(micro, sources=torch.from_numpy(of))

    def _jobs(self, after: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Iterate over this rank's micro-batches from step `after` on: (step, index, rows)."""
        for step in range(after, self.total):
            rows = self.order.step(step)
            groups = self.task.split_micro_batches(self.columns, rows)
            yield from ((step, k, rows[groups[k]]) for k in self.indices)

    def steps(self, after: int, ends: Callable[[Unreadable], None] = lambda error: None) -> Generator[StepBatch]:
        """Yield the batches of steps `after`, `after + 1`, ... to the end of the run. `ends` is called with the error
        of an unreadable shard while there are still steps to stop at. Errors: `Unreadable`, when the shard is needed.
        """
        while after < self.total:
            shares = self.shares
            with closing(self._dealt(after, ends)) as batches:
                for batch in batches:
                    after += 1
                    yield batch
                    if self.shares is not shares:  # prefetched batches have the old micro-batches
                        break

    def _dealt(self, after: int, ends: Callable[[Unreadable], None]) -> Generator[StepBatch]:
        """Yield the batches from step `after` on, with the present shares."""
        if self.task.collates_in_thread():
            yield from self._foreseen(self._made_ahead(after), ends)
        else:
            from_workers = self.task.in_workers(self.columns, self._jobs(after))
            for step in range(after, self.total):
                yield self._there(self.make(step, from_workers))

    def _there(self, batch: StepBatch) -> StepBatch:
        return batch if self.device.type == "cpu" else batch.to(self.device)

    def _foreseen(
        self, ahead: Generator[StepBatch | BaseException], ends: Callable[[Unreadable], None]
    ) -> Iterator[StepBatch]:
        """Yield batches on demand; for a stream, prepare several in advance."""
        foreseen = FORESEEN if isinstance(self.columns, Streamed) else 0
        waiting: deque[StepBatch | BaseException] = deque()
        over = False
        try:
            while waiting or not over:
                while not over and len(waiting) <= foreseen:
                    item = next(ahead, None)
                    over = item is None or isinstance(item, BaseException)
                    waiting += [] if item is None else [item]
                    if len(waiting) > 1 and isinstance(item, Unreadable):
                        ends(item)
                if waiting:
                    item = waiting.popleft()
                    if isinstance(item, BaseException):
                        raise item
                    yield self._there(item)
        finally:
            ahead.close()

    def _made_ahead(self, after: int) -> Generator[StepBatch | BaseException]:
        ready: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=AHEAD)
        over = threading.Event()

        def put(item: StepBatch | BaseException) -> bool:
            while not over.is_set():
                try:
                    ready.put(item, timeout=0.2)
                    return True
                except queue.Full:
                    continue
            return False

        def produce() -> None:
            try:
                for step in range(after, self.total):
                    if not put(self.make(step)):
                        return
            except BaseException as error:  # re-raised by the consumer
                put(error)

        thread = threading.Thread(target=produce, name="lockstep-feed", daemon=True)
        thread.start()
        try:
            for _ in range(after, self.total):
                yield ready.get()
        finally:
            over.set()
            thread.join()


def usual_batch(task: Task) -> int:
    """Default number of examples in a batch without backward; depends only on keys that determine the weights."""
    run = task.run
    return max(32, 4 * run.batch_size // run.micro_batches)
