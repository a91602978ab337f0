"""The two ways of a step with a DeepSpeed engine: sums in tree order by lockstep, or DeepSpeed's own.

In: a `DeepSpeedStrategy` whose model is placed. Out: its engine, and one update per step. `TreeSteps` has the bits of
`single`: gradients are summed over the tree (`zero_sums.py`), and each rank's optimizer updates its shard. With
`EngineSteps`, DeepSpeed reduces, clips and updates, in an order that depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.config.run import Run, RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.step_timer import StepTimer
from lockstep.distributed.world import DataShard, World
from lockstep.strategies.engines import layers, zero_graph
from lockstep.strategies.engines.zero_state import EngineState, flat_weights
from lockstep.strategies.engines.zero_sums import CutGradient, FlatCuts, LocalSums, Owned, OwnedRange, TurnSums
from lockstep.strategies.exact import stepper
from lockstep.strategies.exact.step_totals import Statistics, StepTotals
from lockstep.strategies.exact.training_state import ALIGNED
from lockstep.strategies.exact.update import Gradient, Part, WeightUpdate
from lockstep.strategies.observer import StepObserver, listening, observing
from lockstep.tasks.task import Task


class ZeroModel(Protocol):
    """What a step reads of a `DeepSpeedStrategy`: the model that it placed, its engine, and its parts."""

    run: Run
    task: Task
    world: World
    data_parallel: DataShard
    phases: StepTimer
    totals: StepTotals
    statistics: Statistics
    observer: StepObserver | None
    update: WeightUpdate
    weights: EngineState

    model: nn.Module
    stage: int  # of ZeRO
    config: dict[str, Any]  # DeepSpeed's
    shapes: dict[str, torch.Size]  # of the whole parameters
    trained: dict[str, nn.Parameter]
    engine: Any  # DeepSpeed's
    saving: AbstractContextManager[Any]  # around forward

    def start_engine(self, optimizer: stepper.Stepper) -> Any: ...

    def hold(self, optimizer: stepper.Stepper) -> None: ...

    def run_micro_batch(self, micro: MicroBatch, targets: float) -> Tensor: ...

    def optimizer_step(
        self, batch: StepBatch, gradient: Gradient, learning_rate: float, losses: Tensor, uses: Sequence[int]
    ) -> StepResult: ...


class TreeSteps:
    """Steps in tree order, with the bits of `single`."""

    def __init__(self, strategy: ZeroModel) -> None:
        self.strategy = strategy

    def build(self, optimizer: stepper.Stepper) -> None:
        """Start the engine with `optimizer`, and replace its reduction and update. Collective."""
        strategy = self.strategy
        for group in optimizer.param_groups:  # parameters that would misalign their successor come last
            group["params"].sort(key=lambda p: p.numel() * p.element_size() % ALIGNED != 0)
        treated = stepper.assigned(strategy.run.optim, strategy.model)
        strategy.engine = strategy.start_engine(optimizer)
        # As within DeepSpeed's `coalesce_grad_reduction`, so that it does not reduce gradients.
        strategy.engine.inside_no_sync_ctxt = strategy.engine.optimizer._coalesce_grad_reduction = True
        strategy.engine.optimizer.optimizer.state.clear()  # DeepSpeed filled it; the stepper has the state
        trained, followers = strategy.trained, list[tuple[nn.Parameter, nn.Parameter]]()
        shapes = {name: strategy.shapes[name] for name in trained}
        self.flat_cuts = FlatCuts(strategy.world, shapes, flat_weights(strategy.engine), self._owned(trained))
        if strategy.stage == 3:
            leaves: Mapping[str, nn.Parameter] = trained
            zero_graph.keep_sums(strategy.model)
            coordinator = strategy.engine.optimizer.parameter_offload.get_param_coordinator()
            strategy.saving = zero_graph.SavedByName(strategy.model, coordinator)
        else:
            leaves, followers = self._compute_with_own(trained)
        sums = LocalSums if strategy.stage == 1 else TurnSums
        bucket = 4 * int(strategy.config["zero_optimization"]["reduce_bucket_size"])
        self.sums = sums(strategy.world, [*leaves.values()], self.flat_cuts.by_rank, bucket)
        groups = stepper.groups(strategy.run.optim, self.flat_cuts.parts.items(), treated)
        strategy.hold(stepper.Stepper(strategy.run.optim, groups))
        strategy.weights.flat_cuts, strategy.weights.followers = self.flat_cuts, followers

    def _owned(self, trained: Mapping[str, Any]) -> list[Owned]:
        """Return, by rank, the range of each parameter that DeepSpeed assigns to the rank, and its position in the flat
        tensors."""
        strategy = self.strategy
        inner, ranks = strategy.engine.optimizer, range(strategy.world.size)
        if strategy.stage == 3:
            groups, names = inner.fp16_groups, {id(p): name for name, p in trained.items()}
            owned: list[Owned] = [{} for _ in ranks]
            for flat, group in enumerate(groups):
                offset = 0
                for parameter in group:
                    size, whole = parameter.partition_numel(), parameter.ds_numel
                    for rank in ranks if id(parameter) in names else ():
                        start = min(rank * size, whole)
                        part = OwnedRange(start, min(size, whole - start))
                        owned[rank][names[id(parameter)]] = part, flat, offset
                    offset += size
            return [{name: each[name] for name in trained} for each in owned]
        places = {
            id(p): (flat, offset)
            for flat, group in enumerate(inner.round_robin_bit16_groups)
            for p, offset in zip(group, inner.round_robin_bit16_offsets[flat], strict=True)
        }
        owned = [
            {name: _of_flat(p, *places[id(p)], inner.partition_size, rank) for name, p in trained.items()}
            for rank in ranks
        ]
        own = owned[strategy.world.rank]
        assert all(_fragment(p._hp_mapping) in (own[name], None) for name, p in trained.items()), "other ranges"
        return owned

    def _compute_with_own(
        self, trained: Mapping[str, nn.Parameter]
    ) -> tuple[Mapping[str, nn.Parameter], list[tuple[nn.Parameter, nn.Parameter]]]:
        """Replace the model's parameters by lockstep's, which share memory with DeepSpeed's, or, if those are not
        aligned (`make_model` explains why they must be), are copied after every update."""
        strategy = self.strategy
        own, followers = {name: nn.Parameter(p.detach()) for name, p in trained.items()}, []
        for name, parameter in own.items():
            if parameter.data_ptr() % ALIGNED:
                parameter.data = parameter.data.clone()
                followers.append((parameter, trained[name]))
        by_identity = {id(p): own[name] for name, p in trained.items()}
        for module in strategy.model.modules():
            for name, theirs in module._parameters.items():
                if id(theirs) in by_identity:
                    module._parameters[name] = by_identity[id(theirs)]
        return own, followers

    def backward(self, loss: Tensor, targets: float) -> None:
        """Run the engine's backward of a micro-batch."""
        self.strategy.engine.backward(loss / targets, scale_wrt_gas=False)

    def train(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """Run one step: all micro-batches, one update. Collective."""
        strategy = self.strategy
        losses = strategy.totals.start(batch.count)
        self.sums.start(batch.count)
        strategy.statistics.start(batch.count)
        for micro in batch.micro_batches:
            self.sums.begin(micro.index)
            seed_everything(strategy.run.seed, batch.step, micro.index)
            with observing(strategy.observer, micro.index, strategy.model):
                losses[micro.index] = strategy.run_micro_batch(micro, batch.targets)
            self.sums.end()
            strategy.statistics.take(micro)
        if len(batch.micro_batches) < -(-batch.count // strategy.world.size) and strategy.stage > 1:
            self._level(batch)
        with strategy.phases("reduction"):
            gradients = self.sums.finish()
            losses, uses = strategy.totals.all_reduce(losses, self.sums.grad_counts)
        if strategy.stage == 3:
            refuse_unequal_uses(dict(zip(self.flat_cuts.parts, uses, strict=True)), batch.count, strategy.world)
        parts = [Part(n, p, g) for (n, p), g in zip(self.flat_cuts.parts.items(), gradients, strict=True)]
        gradient = CutGradient(parts, list(self.flat_cuts.parts), self.flat_cuts, strategy.world)
        return strategy.optimizer_step(batch, gradient, learning_rate, losses, uses)

    def _level(self, batch: StepBatch) -> None:
        """Run a turn in which this rank has no micro-batch but others do: receive what they send. In stage 3, also
        gather the weights with them. Collective."""
        strategy = self.strategy
        self.sums.begin(None)
        if strategy.stage == 3:
            with listening(strategy, None):
                strategy.run_micro_batch(batch.micro_batches[-1].blank(), batch.targets)
            strategy.statistics.reset()
        self.sums.end()


@dataclass(frozen=True)
class EngineGradient:
    """A gradient reduced by DeepSpeed; `whole` gathers it."""

    gather: Callable[[], dict[str, Tensor]]

    def whole(self, world: World) -> dict[str, Tensor]:
        """Gather the whole gradient by parameter. Collective."""
        return self.gather()


class EngineSteps:
    """Steps that DeepSpeed reduces and updates."""

    def __init__(self, strategy: ZeroModel) -> None:
        self.strategy = strategy

    def build(self, optimizer: stepper.Stepper) -> None:
        """Start the engine. Collective."""
        strategy = self.strategy
        self.counting = True
        self.grad_counts = dict.fromkeys(strategy.trained, 0)  # number of this rank's micro-batches with a gradient
        for name, parameter in strategy.trained.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._count(name))
        strategy.engine = strategy.start_engine(optimizer)
        strategy.hold(optimizer)
        if strategy.stage == 3 and strategy.task.own_model:
            coordinator = strategy.engine.optimizer.parameter_offload.get_param_coordinator()
            zero_graph.wait_where_read(strategy.model, coordinator)

    def backward(self, loss: Tensor, targets: float) -> None:
        """Run the engine's backward of a micro-batch. DeepSpeed averages over ranks: multiply back."""
        self.strategy.engine.backward(loss * self.strategy.world.size / targets, scale_wrt_gas=False)

    def train(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """Run one step: all micro-batches, one update. Collective."""
        strategy = self.strategy
        losses = strategy.totals.start(batch.count)
        micro_batches = self._levelled(batch)
        self.grad_counts = dict.fromkeys(self.grad_counts, 0)
        strategy.statistics.start(batch.count)
        for i, micro in enumerate(micro_batches):
            self.counting = i < len(batch.micro_batches)  # padding micro-batches do not count
            seed_everything(strategy.run.seed, batch.step, micro.index)
            strategy.engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            heard = observing(strategy.observer, micro.index, strategy.model)
            with heard if self.counting else listening(strategy, None):
                losses[micro.index] += strategy.run_micro_batch(micro, batch.targets)
            if i < len(batch.micro_batches):
                strategy.statistics.take(micro)
            else:
                strategy.statistics.reset()
        with strategy.phases("reduction"):
            losses, uses = strategy.totals.all_reduce(losses, list(self.grad_counts.values()))
            strategy.update.finite.check(batch.step, losses, losses.sum())
        unused = self._unused(uses, batch.count)
        if strategy.observer is not None:
            strategy.observer.reduced(EngineGradient(self._whole_gradient))
        stepper.set_rate(strategy.update.stepper, learning_rate)
        with strategy.phases("optimizer"):
            frozen = [
                (name, key, strategy.weights.whole(name, key))
                for name in unused
                for key in (None, *strategy.weights.moments())
            ]
            strategy.engine.step()
            for name, key, whole in frozen:  # undo decay and momentum, which DeepSpeed applied with zero gradients
                strategy.weights.set_whole(name, whole, key)
            if frozen:
                strategy.weights.refresh()
        norm = torch.as_tensor(strategy.engine.get_global_grad_norm(), dtype=torch.float32, device=losses.device)
        strategy.update.finite.check(batch.step, losses, norm)
        strategy.statistics.finish(strategy.data_parallel.all_reduce)
        return StepResult(losses.sum() / batch.targets, norm, loss_sums_of=strategy.totals.loss_sums_of)

    def _count(self, name: str) -> None:
        self.grad_counts[name] += self.counting

    def _unused(self, uses: list[int], micro_batches: int) -> list[str]:
        """Return the parameters without a gradient from any micro-batch. Errors: `RunError`, on every rank, if only
        some micro-batches gave one, because the ranks then reduced different parameters together."""
        counts = dict(zip(self.grad_counts, uses, strict=True))
        refuse_unequal_uses(counts, micro_batches, self.strategy.world)
        return [name for name, count in counts.items() if not count]

    def _levelled(self, batch: StepBatch) -> list[MicroBatch]:
        """Return this rank's micro-batches, padded to the largest number on any rank: gradients are reduced after every
        micro-batch."""
        strategy = self.strategy
        most = -(-batch.count // strategy.world.size)
        blank = batch.micro_batches[-1].blank()
        return batch.micro_batches + [blank] * (most - len(batch.micro_batches))

    def _whole_gradient(self) -> dict[str, Tensor]:
        """Return the whole gradient by parameter name on rank 0; empty elsewhere. Collective."""
        strategy = self.strategy
        from deepspeed.utils import safe_get_full_grad

        gradients = {}
        for name, parameter in strategy.trained.items():
            gradient = safe_get_full_grad(parameter)
            if strategy.world.is_main:
                gradients[name] = gradient.float().clone()
        return gradients


def refuse_unequal_uses(counts: Mapping[str, int], micro_batches: int, world: World) -> None:
    """Refuse steps in which only some micro-batches used a weight. Errors: `RunError`, on every rank."""
    name = next((name for name, count in counts.items() if 0 < count < micro_batches), None)
    if name is not None and world.size > 1:
        raise RunError(
            "LS4120",
            "strategy.name: DeepSpeed needs every micro-batch of a step to use the same weights, but only "
            f"{counts[name]} of {micro_batches} used {name}; no weight was updated. Use strategy.name=ddp "
            "or fsdp2",
        )


@contextmanager
def gathering_in_time(strategy: ZeroModel) -> Iterator[None]:
    """A context that replaces DeepSpeed's error of thousands of characters, raised if weights are used in another
    order than in the first step, by a `RunError`."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("tracing error"):
            raise
        raise layers.not_in_time(strategy.run.model.checkpoint_activations) from error


def _of_flat(parameter: Tensor, flat: int, offset: int, sizes: Sequence[int], rank: int) -> tuple[OwnedRange, int, int]:
    """Return the part of a parameter, at an offset of a flat tensor, that lies within a rank's part of that tensor."""
    begin = int(sizes[flat]) * rank
    start = max(offset, begin)
    length = max(0, min(offset + parameter.numel(), begin + int(sizes[flat])) - start)
    return (OwnedRange(start - offset, length), flat, start - begin) if length else (OwnedRange(0, 0), flat, 0)


def _fragment(parameter: Any) -> tuple[OwnedRange, int, int] | None:
    """Return DeepSpeed's own `tensor_fragment` of a parameter, None if this rank has no part of it."""
    if parameter is None:
        return None
    whole, flat = parameter.lp_fragment_address, parameter.hp_fragment_address
    return OwnedRange(whole.start, whole.numel), parameter.param_group_index, flat.start
