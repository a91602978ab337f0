"""The interface of a strategy: how one optimizer step is computed by all ranks together.

In: a `StepBatch` with this rank's micro-batches, and the learning rate. Out: a `StepResult`, and weights that are
the same on all ranks.
Every method is collective: every rank enters it, in the same order. A strategy keeps no schedule, step count, log
or file.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.data.batch import MicroBatch, StepBatch, StepResult
from lockstep.distributed.randomness import seed_everything
from lockstep.distributed.sharded import Given, Saved, gather
from lockstep.distributed.step_timer import StepTimer
from lockstep.distributed.transfers import ToHost
from lockstep.distributed.world import World
from lockstep.strategies.engines import side_effects
from lockstep.strategies.engines.side_effects import SideEffects
from lockstep.strategies.engines.writes import preserved
from lockstep.strategies.exact import held_state, masters, optim
from lockstep.strategies.exact.data_parallel import DataParallel as DataParallel
from lockstep.strategies.exact.data_parallel import summing as summing
from lockstep.strategies.exact.gradient import Gradient
from lockstep.strategies.exact.gradient import NotFinite as NotFinite
from lockstep.strategies.exact.reduction import share
from lockstep.strategies.exact.scaling import LOWEST, LossScale
from lockstep.strategies.exact.source_sums import SourceSums
from lockstep.strategies.exact.statistics import Statistics
from lockstep.strategies.observer import StepObserver
from lockstep.strategies.optimizers import optimizer as optimizers
from lockstep.tasks.models import decoding
from lockstep.tasks.models.decoding import Decoding
from lockstep.tasks.task import Task


class Strategy(ABC):
    """One optimizer step, exactly: weights after `train_step` are those of one update with the gradient of
    `sum of losses / targets`, over all micro-batches of all ranks, clipped once, at the rate given."""

    plugin: ClassVar[str] = "strategies"
    exact: ClassVar[bool] = False  # whether it can give the same bits as `single` at every number of processes
    needs: ClassVar[tuple[str, ...]] = ()  # packages beyond the core, as they are imported; extras have their names
    summary_suffix: ClassVar[str] = ""  # after its name in the opening lines

    trains_bfloat16: ClassVar[bool] = False  # whether weights may be trained in bfloat16
    without_masters: ClassVar[bool] = False  # also without float32 ones beside them
    flat_parts: ClassVar[bool] = False  # whether an engine hands the optimizer parts of tensors laid end to end
    casts_inside: ClassVar[bool] = False  # whether its engine puts an autocast of its own into the model's forward
    takes_4_bits: ClassVar[bool] = False  # whether an adapter's base may be kept in 4 bits
    supports_reshard: ClassVar[bool] = False  # whether it is a `ShardedRecovery`
    gloo_threads: ClassVar[int] = 1  # 2 where, as long as it is exact, it makes no functional collectives
    waits_inside: ClassVar[tuple[str, ...]] = ("reduction", "overlapped")
    """Phases of a step (phases.py) in which this rank also waits for other ranks."""

    task: Task
    model: nn.Module  # what this rank holds of the model, under the task's own parameter names
    named: dict[str, nn.Parameter]  # those of them that are trained
    optimizer: Any  # the stepper, or an engine's around it
    stepper: optim.Stepper
    data_parallel: DataParallel
    statistics: Statistics | None = None  # the model's running statistics, where the strategy brings them together
    effects: SideEffects = SideEffects()  # what forward changes by itself, once `dry_run` has looked
    switched = 0  # micro-batches that switched off a weight's `requires_grad`; counted where there is a whole model
    observer: StepObserver | None = None  # listens to every `train_step`; the same kind on every rank

    def __init__(self, run: Run, world: World) -> None:
        """Topology only, nothing is built and nothing communicated."""
        self.run, self.world = run, world
        self.phases = StepTimer(world.device)
        self.data_parallel = DataParallel(world.rank, world.size, world.sum)
        # whether a step was usable: while the next one is computed
        self.asks_late = world.device.type == "cuda" and optimizers.rule(run.optim).heeds_skipped
        self.scaling = LossScale(world.device) if run.precision == "fp16" else None
        self.sources = SourceSums(len(run.data.sources or ()))
        self._doubt: tuple[int, ToHost] | None = None  # step; losses, norm and maybe scale that were not looked at

    @classmethod
    @abstractmethod
    def check(cls, run: Run, processes: int) -> None:
        """Refuse what cannot work, before any process starts. Errors: `RunError`."""

    @classmethod
    def lacking(cls) -> list[str]:
        """Packages that it needs and that are not installed. Nothing is imported."""
        return [package for package in cls.needs if importlib.util.find_spec(package) is None]

    @classmethod
    def require(cls, key: str) -> None:
        """Errors: `RunError`, with the command that installs it, when a package is missing."""
        if lacking := cls.lacking():
            raise RunError(
                f"{key} needs {lacking[0]}, which is not installed: pip install 'lockstep-train[{lacking[0]}]'"
            )

    @classmethod
    def resolve_class(cls, run: Run) -> type[Strategy]:
        """The class that does the work under these options, where one name stands for several engines."""
        return cls

    @classmethod
    def gives_bits(cls, run: Run) -> bool:
        """Whether this run ends with the bits of `single`, rather than equal to rounding."""
        return cls.exact and run.strategy.exact

    @classmethod
    def rounding(cls, run: Run) -> float:
        """The relative tolerance of loss, norm and gradients beside those of `single`, where bits are not promised.
        Sums of float32 in two orders stay well below this."""
        return 1e-4

    @classmethod
    def bytes_held(cls, run: Run, processes: int, state: float | None = None) -> dict[str, float]:
        """Bytes that a process holds for each parameter of the model between two micro-batches: `weights`, and of those
        that are trained `gradients`, `optimizer`, `average`; a mean over processes, the sums of docs/strategies.md.
        `state`: of the optimizer's alone, where it is known better than its rule says."""
        state = optimizers.rule(run.optim).bytes_held() if state is None else state
        held = {"weights": 4.0, "gradients": 4.0, "optimizer": state}
        if run.model.trained_in_bfloat16:
            held |= {"weights": 2.0, "optimizer": held["optimizer"] + 4.0 * masters.wanted(run)}
        return held if run.average.ema is None else held | {"average": 4.0}

    @classmethod
    def partial_sums(cls, run: Run, processes: int) -> float:
        """Bytes for each trained parameter that a process holds besides, at most, while the micro-batches of a step are
        added over the tree."""
        return 0.0

    @classmethod
    def needs_memory_to_resolve(cls, run: Run) -> bool:
        """Whether an option that is not given depends on the memory of the machines: `resolve_options` gives it
        then."""
        return False

    @classmethod
    def resolve_options(cls, run: Run, processes: int, parameters: int, trained: int, memory: int) -> Run:
        """The run with that option. `parameters`: of the model, and those of them that are trained; `memory`: bytes of
        the device that has least of it, for one process. Never changes bits."""
        return run

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Parameters of the whole model."""

    @property
    @abstractmethod
    def trained_count(self) -> int:
        """Those of them that are trained: all, but with an adapter, or where a model has frozen some."""

    def own_micro_batches(self) -> Iterable[int]:
        """The micro-batches of a step that this rank runs, ascending."""
        return share(self.run.micro_batches, self.data_parallel.rank, self.data_parallel.size)

    def autocast(self, enabled: bool = True) -> torch.autocast:
        """bf16 or fp16 where the run asks for it; weights, gradients and moments stay fp32."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.run.precision)
        wanted = enabled and low is not None and not self.run.model.trained_in_bfloat16
        return torch.autocast(self.world.device.type, low or torch.bfloat16, wanted)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, where there is one: backward is called on it."""
        return loss if self.scaling is None else loss * self.scaling.value

    def loss_sum(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """The loss sum of a micro-batch, of what the model gave for it: a scalar with its graph."""
        loss = self.sources.loss_sum(self.task, outputs, micro)
        if self.observer is not None:
            self.observer.loss(micro.index, loss)
        return loss

    @contextmanager
    def listening(self, observer: StepObserver | None) -> Iterator[None]:
        """In here `observer` listens, or nobody, in the place of the one before."""
        before, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = before

    @contextmanager
    def observed(self, index: int) -> Iterator[None]:
        """In here micro-batch `index` runs, forward and backward: the observer hears of each parameter's gradient."""
        observer, hooks = self.observer, list[Any]()
        if observer is None or not observer.hears(index):
            yield
            return

        def register(module: nn.Module, inputs: Any) -> None:  # by now an engine has put the weights in their places
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    hooks.append(parameter.register_hook(partial(observer.gradient, index, name)))

        hooks.append(self.model.register_forward_pre_hook(register))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @abstractmethod
    def build(self, task: Task) -> None:
        """Model, wrapping, optimizer."""

    @abstractmethod
    def train_step(self, batch: StepBatch, learning_rate: float) -> StepResult:
        """One update."""

    def optimizer_step(
        self, step: int, gradient: Gradient, learning_rate: float, losses: Tensor, uses: Sequence[int]
    ) -> tuple[Tensor, Tensor | bool]:
        """Look at the gradient, see that it is finite, clip, set the rate, one step of the optimizer. `losses` and
        `uses` are what `agree` gave. Returns the norm before clipping, and whether the update was made: on CUDA that is
        still on the device, which then leaves the weights as they are by itself, and the host hears of it in the next
        update. Collective. Errors: `NotFinite`, also of the update before."""
        scale = None
        if self.scaling is not None:
            gradient.scale_(1 / (scale := self.scaling.value))
        norm = gradient.norm()
        if self.observer is not None:
            self.observer.reduced(gradient)
        return norm.to(self.world.device), self.apply_gradient(step, gradient, norm, scale, learning_rate, losses, uses)

    def apply_gradient(
        self,
        step: int,
        gradient: Gradient,
        norm: Tensor,
        scale: Tensor | None,
        learning_rate: float,
        losses: Tensor,
        uses: Sequence[int],
    ) -> Tensor | bool:
        """The rest of `optimizer_step`, once all that it needs of other ranks is here."""
        if self.scaling is not None:
            self.scaling.follow(losses, norm)
        used = (self.check_finite_async if self.asks_late else self.check_finite)(step, losses, norm, scale)
        if used is not False:
            gradient.clip_(norm, self.run.optim.max_grad_norm)
            gradient.give(uses)
            optim.set_rate(self.optimizer, learning_rate, used if isinstance(used, Tensor) else None)
            self.optimizer.step()
            self.round_masters()
        gradient.take_back()
        return used

    def round_masters(self) -> None:  # noqa: B027 - most have none
        """After an update: master weights into the weights of the model, where there are any."""

    def weights_changed(self) -> None:
        """Copy new values of what the optimizer updates into the model. Collective."""
        self.round_masters()

    def updated_parts(self) -> list[tuple[str, Tensor]]:
        """This rank's part of each trained parameter, in memory; DTensors of parts; tied ones maybe repeated."""
        return [(name, parameter.detach()) for name, parameter in self.named.items()]

    def averaged(self) -> AbstractContextManager[bool]:
        """In here the model is what is evaluated and exported, where that is something else than what is trained."""
        return self.stepper.averaged(self.weights_changed)

    def exported(self) -> dict[str, Tensor] | None:
        """`export`, of what was evaluated. Collective."""
        with self.averaged() as other:
            weights = self.export()
            return {n: t.clone() for n, t in weights.items()} if other and weights is not None else weights

    def check_finite(self, step: int, losses: Tensor, norm: Tensor, scale: Tensor | None = None) -> bool:
        """Whether an update may be made of a gradient with this norm and these losses of the step's micro-batches
        (summed over ranks: [M]): the same on every rank. The host waits for the device here. `scale`: that of the loss;
        a step that it made overflow is left out, whatever the run says of others. Errors: `NotFinite`, unless the run
        says to skip such steps."""
        bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        if not bad and bool(torch.isfinite(norm)):
            return True
        if not bad and scale is not None and float(scale) > LOWEST:
            return False
        if self.run.on_nonfinite == "stop":
            raise NotFinite(step, bad, float(norm))
        return False

    def check_finite_async(self, step: int, losses: Tensor, norm: Tensor, scale: Tensor | None = None) -> Tensor:
        """Check an update without waiting for this step: a bool scalar on the device. What it says of it is raised by
        the next call, or by `settle`. Errors: `NotFinite` of the step before."""
        self.settle()
        self._doubt = step, ToHost(losses, norm, *([] if scale is None else [scale]))
        return torch.isfinite(losses).all() & torch.isfinite(norm).to(losses.device)

    def settle(self) -> None:
        """Wait for the last update. Errors: `NotFinite`, where it was not made and the run says to stop then."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            step, results = doubt
            self.check_finite(step, *results.wait())

    def agree(self, losses: Tensor, uses: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Sums over ranks: the losses of the step's micro-batches [M], and how many of them gave each trainable
        parameter a gradient. Collective. Errors: `RunError` when there is no gradient at all, on every rank."""
        losses, counts = self.sums_of_step(losses, [*uses, self.switched, self.sources.noted])
        self.sources.agree(counts.pop(), losses, self.sum_of_step)
        if counts.pop():
            self.effects = self.take_effects(replace(self.effects, switched=frozenset(["weights"])))
        if not any(counts):
            raise RunError(
                "no weight of the model gets a gradient: the loss does not depend on its trainable weights (look at "
                "the task's loss, and at what is frozen or detached)"
            )
        return losses, counts

    def sums_of_step(self, losses: Tensor, numbers: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Over ranks. The numbers never were on the device, so nobody waits for it. Collective."""
        counts = torch.tensor(numbers, dtype=torch.float64)
        if losses.device.type == "cpu":  # in one message
            losses, counts = self.sum_of_step(torch.cat([losses, counts])).split([len(losses), len(counts)])
        else:
            losses, counts = self.sum_of_step(losses), self.sum_of_step(counts)
        return losses, [int(count) for count in counts.tolist()]

    def sum_of_step(self, tensor: Tensor) -> Tensor:
        """Over the ranks that have losses and gradients of their own, in place. Collective."""
        return self.data_parallel.sum(tensor)

    def dry_run(self, batch: StepBatch, then: Callable[[], None] = lambda: None) -> None:
        """Forward, backward and update of a step before all others, leaving no trace: memory that does not suffice is
        found here. `then`: what is tried while there is a state of the optimizer. Collective. Errors: `RunError` when
        forward changes what each rank would keep for itself."""
        names = () if self.statistics is None else self.statistics.names
        self.effects = self.take_effects(side_effects.effects_of(self.model, self.forwards(batch), names))
        scaling = self.scaling.aside() if self.scaling else nullcontext()
        with preserved(self.model, self.effects.written) as changed, scaling:
            self.train_step(batch, 0.0)  # at this rate weights stay what they are
            self.settle()
            then()
            self.optimizer.state.clear()
        changed -= {*self.effects.written, *names}
        self.effects = self.take_effects(replace(self.effects, written=self.effects.written | changed))

    def forwards(self, batch: StepBatch) -> list[Callable[[], None]]:
        """Calls of forward with this rank's first and last micro-batch, to see what else it does; none where no rank
        calls the model as a whole."""

        def call(micro: MicroBatch) -> None:
            seed_everything(self.run.seed, batch.step, micro.index)
            with self.autocast():
                self.model(**micro.inputs)

        return [partial(call, micro) for micro in (batch.micro_batches[0], batch.micro_batches[-1])]

    def take_effects(self, effects: SideEffects) -> SideEffects:
        """Those of all ranks. Collective. Errors: `RunError`, on every rank, for what this strategy cannot keep."""
        agreed = effects.together(self.world.all_gather)
        if agreed.replaced:
            raise RunError(f"model(): {side_effects.replacement(agreed.replaced)}")
        if agreed.per_process and self.world.size > 1:
            raise RunError(
                side_effects.refusal(self.run.strategy.name, agreed, self.model, self.statistics is not None)
            )
        return agreed

    @abstractmethod
    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits without a gradient, in evaluation mode."""

    def generate(self, inputs: Mapping[str, Tensor], how: Decoding) -> Tensor:
        """The tokens that the model writes, int64 [B, N]. Every rank gives inputs of its own. Collective."""
        assert (how.beams, how.temperature) == (1, 0), "`checked` refuses what is not greedy"
        return decoding.by_forward(self.forward, lambda count: self.data_parallel.sum(count.float()), inputs, how)

    def sharded_state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the weights (`model.NAME`) and the optimizer state (`optimizer.KEY.NAME`) under the
        task's own parameter names, not copied where it need not be.

        A DTensor where the strategy cuts tensors: each rank of its mesh has its part. Otherwise a whole tensor: on
        every rank where the strategy keeps copies (the same bits on each), on one where only that one holds or has
        gathered it. All ranks together hold everything, and the same names and shapes at every call after a step.
        """
        return held_state.sharded(held_state.tensors_of(self.model), self.stepper, self.scaling)

    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Take over what all ranks' `sharded_state_dict` gave together, on this or another strategy at this or another
        number of processes. Each rank reads what it will hold; none is given all of it."""
        held_state.load(saved, held_state.tensors_of(self.model), self.stepper, self.scaling)

    def state_dict(self) -> dict[str, Tensor]:
        """The state, whole on rank 0; on other ranks what is there without gathering it."""
        return gather(self.sharded_state_dict(), self.world)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what rank 0's `state_dict` gave; every rank is given all of it. For small models, and tests."""
        self.load_sharded_state_dict(Given(state))

    @abstractmethod
    def export(self) -> dict[str, Tensor] | None:
        """Full weights under the model's own names on rank 0, None elsewhere."""

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give everything back."""


def strategy_class(run: Run) -> type[Strategy]:
    """The class a run's strategy is of. Errors: `PluginError`, `ImportError`."""
    cls: type[Strategy] = plugins.find("strategies", run.strategy.name)
    return cls.resolve_class(run)
