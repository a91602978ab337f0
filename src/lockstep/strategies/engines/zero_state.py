"""Weights and optimizer state of a DeepSpeed engine: whole tensors out of its flat shards, and back.

In: an engine, and the cuts of its flat tensors, if lockstep updates them. Out: the tensors of a checkpoint or export.
DeepSpeed gathers one tensor at a time, so every method is collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lockstep.distributed.sharded import Saved
from lockstep.distributed.world import World
from lockstep.strategies.engines.zero_sums import FlatCuts
from lockstep.strategies.exact.stepper import Stepper
from lockstep.strategies.exact.training_state import TrainedWeights, TrainingState


def flat_weights(engine: Any) -> list[Tensor]:
    """Return this rank's fp32 weights as the optimizer has them: a few flat tensors, each of many parameters."""
    inner, stage = engine.optimizer, engine.zero_optimization_stage()
    return inner.fp32_partitioned_groups_flat if stage == 3 else inner.single_partition_of_fp32_groups


class EngineState(TrainedWeights, TrainingState):
    """The weights and the optimizer state of a rank, held by its engine."""

    needs_all_ranks = True  # its flat shards are not slices of tensors

    def __init__(
        self,
        engine: Any,
        model: nn.Module,
        named: dict[str, nn.Parameter],
        shapes: Mapping[str, torch.Size],
        world: World,
        stepper: Stepper,
    ) -> None:
        """`named`: the engine's parameters by name, also frozen ones; `shapes`: those of the whole parameters."""
        self.engine, self.model, self.world, self.stepper = engine, model, world, stepper
        self.named, self.updated, self.shapes = named, named, shapes
        self.trained = {name: p for name, p in named.items() if p.requires_grad}
        self.stage = engine.zero_optimization_stage()
        self.low_precision = False  # weights in bfloat16
        self.flat_cuts: FlatCuts | None = None  # None: DeepSpeed reduces and updates
        self.followers: list[tuple[nn.Parameter, nn.Parameter]] = []  # (lockstep's, DeepSpeed's unaligned one)

    @override
    @property
    def parameter_count(self) -> int:
        return sum(shape.numel() for shape in self.shapes.values())

    @override
    @property
    def trained_count(self) -> int:
        return sum(self.shapes[name].numel() for name in self.trained)

    def _whole_weight(self, name: str) -> Tensor:
        """Return the whole weight in fp32, or a frozen one in its own dtype. Collective."""
        from deepspeed import zero
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        from deepspeed.utils import safe_get_full_fp32_param

        parameter = self.named[name]
        if parameter.requires_grad and self.flat_cuts is not None:
            return self.flat_cuts.assemble(name, self.flat_cuts.parts[name])
        if parameter.requires_grad:
            return safe_get_full_fp32_param(parameter)
        fetched = getattr(parameter, "ds_status", None)
        if self.stage == 3 and fetched == ZeroParamStatus.INFLIGHT:  # prefetched by an evaluation
            self.engine.optimizer.empty_partition_cache()
        with zero.GatheredParameters([parameter], enabled=self.stage == 3):
            return (parameter.detach().float() if self.low_precision else parameter.detach()).clone()

    def moments(self) -> list[str]:
        """Return the names of the optimizer's moments, once they exist."""
        state = self.stepper.state.get(self._first(), {})
        return [key for key in state if key not in self.stepper.rule.counters]

    def _first(self) -> Tensor:
        """Return the tensor of the optimizer's first state."""
        return next(iter(self.flat_cuts.parts.values())) if self.flat_cuts is not None else flat_weights(self.engine)[0]

    def whole(self, name: str, key: str | None) -> Tensor:
        """Return a whole copy of a weight (`key` None) or of a moment. Collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if key is None:
            return self._whole_weight(name).clone()
        if self.flat_cuts is not None:
            return self.flat_cuts.assemble(name, self.stepper.state[self.flat_cuts.parts[name]][key])
        self._link_optimizer_state()
        return safe_get_full_optimizer_state(self.named[name], key).clone()

    def _whole_weights(self, keepers: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Return fp32 weights in host memory of rank 0 (or of each parameter's keeper), empty elsewhere; a rank has at
        most one whole parameter on its device at a time. Collective."""
        weights = {}
        for name, parameter in self.named.items():
            weight = self._whole_weight(name)
            assert weight.shape == self.shapes[name], f"{name}: {weight.shape}, not {self.shapes[name]}"
            if self.stage < 3:  # check the saved weights against the model's whole ones
                assert torch.equal(weight.to(parameter.dtype), parameter.detach()), f"{name}: not the model's weight"
            if self.world.rank == (keepers[name] if keepers else 0):
                weights[name] = weight.to("cpu", copy=True)
        return weights

    @override
    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return whole tensors: DeepSpeed gathers each on every rank, and one rank keeps it."""
        load = [0] * self.world.size  # elements that each rank keeps
        tensors = {f"model.{n}": w for n, w in self._whole_weights(self._keepers(load)).items()}
        if self.flat_cuts is not None:
            self.stepper.saved()  # creates the state of parameters without an update
        for key in self.moments():
            keepers = self._keepers(load)
            for name in self.trained:
                value = self.whole(name, key)
                if self.world.rank == keepers[name]:
                    tensors[f"optimizer.{key}.{name}"] = value.cpu()
        tensors |= {f"model.{n}": b for n, b in self.model.named_buffers()}
        return tensors | {f"optimizer.step.{n}": step for n, step in self._steps().items()}

    def _steps(self) -> dict[str, Tensor]:
        """Return each parameter's number of updates, if the optimizer counts them. DeepSpeed's own step counts every
        parameter in every update."""
        updated = {
            n: self.flat_cuts.parts[n] if self.flat_cuts is not None else flat_weights(self.engine)[0]
            for n in self.trained
        }
        states = {name: self.stepper.state.get(part, {}) for name, part in updated.items()}
        return {name: state["step"].cpu().clone() for name, state in states.items() if "step" in state}

    def _keepers(self, load: list[int]) -> dict[str, int]:
        """Return parameter -> the rank with the smallest load so far, and add the parameter to that load."""
        keepers = {}
        for name, shape in self.shapes.items():
            keepers[name] = load.index(min(load))
            load[keepers[name]] += shape.numel()
        return keepers

    @override
    def load_sharded_state_dict(self, saved: Saved) -> None:
        """Load a state: rank 0 reads and broadcasts every tensor; each rank keeps its shard."""
        names = list(self.trained)
        fresh = self.stepper.rule.begin(self.stepper.param_groups[0], self._first())
        keys = [k for k in fresh if k not in self.stepper.rule.counters and f"optimizer.{k}.{names[0]}" in saved]
        steps = [n for n in names if f"optimizer.step.{n}" in saved]
        if self.flat_cuts is not None:
            self.stepper.places(saved)
        else:
            first = [self._from_main(saved, f"optimizer.step.{n}", torch.Size()) for n in steps[:1]]
            self._make_optimizer_state(keys, float(first[0]) if first else None)
        if self.stage == 3:  # an evaluation may have prefetched frozen weights
            self.engine.optimizer.empty_partition_cache()
        for name in self.named:
            self.set_whole(name, self._from_main(saved, f"model.{name}", self.shapes[name]), None)
        for key in keys:
            for name in names:
                self.set_whole(name, self._from_main(saved, f"optimizer.{key}.{name}", self.shapes[name]), key)
        if self.flat_cuts is not None:
            for name in steps:
                step = self._from_main(saved, f"optimizer.step.{name}", torch.Size())
                self.stepper.state[self.flat_cuts.parts[name]]["step"].copy_(step)
        saved.read({f"model.{n}": b for n, b in self.model.named_buffers()})
        self.refresh()

    def _from_main(self, saved: Saved, name: str, shape: torch.Size) -> Tensor:
        """Return a whole tensor, read by rank 0. Collective."""
        tensor = torch.empty(shape, device=self.world.device)
        saved.read({name: tensor} if self.world.is_main else {})
        dist.broadcast(tensor, src=0)
        return tensor

    def _make_optimizer_state(self, keys: list[str], step: float | None) -> None:
        """Create the state that the optimizer's first step would create, to be filled in."""
        self.stepper.state.clear()
        for flat in flat_weights(self.engine) if keys else ():
            state = self.stepper.state[flat]
            if step is not None:
                state["step"] = torch.tensor(step, device=flat.device if flat.is_cuda else "cpu")
            state |= {key: torch.zeros_like(flat) for key in keys}
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """Tell DeepSpeed's `safe_get` and `safe_set` where the optimizer's state is: stages 1 and 2 look only once,
        after the update of the first parameter group, when the second has no state yet."""
        if self.stage < 3 and self.stepper.state:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def unlink(self) -> None:
        """Forget the optimizer state of a trial step."""
        if self.stage < 3:
            self.engine.optimizer._hp_optimizer_states_linked = False

    def set_whole(self, name: str, whole: Tensor, key: str | None) -> None:
        """Store this rank's shard of a weight (`key` None) or of an optimizer state."""
        from deepspeed import utils, zero

        parameter: Any = self.named[name]
        if parameter.requires_grad and self.flat_cuts is not None:
            part = self.flat_cuts.parts[name]
            place = part.detach() if key is None else self.stepper.state[part][key]
            place.copy_(self.flat_cuts.own[name].of(whole))
        elif not parameter.requires_grad:
            with zero.GatheredParameters([parameter], modifier_rank=0, enabled=self.stage == 3), torch.no_grad():
                parameter.copy_(whole)
        elif self.stage == 3:  # DeepSpeed's `safe_set_full` requires sizes divisible by the ranks
            size = parameter.ds_tensor.numel()
            shard = whole.new_zeros(size)
            mine = whole.reshape(-1)[self.world.rank * size : (self.world.rank + 1) * size]
            shard[: mine.numel()] = mine
            if key is None:
                utils.safe_set_local_fp32_param(parameter, shard)
            else:
                utils.safe_set_local_optimizer_state(parameter, shard, key)
        elif key is None:
            utils.safe_set_full_fp32_param(parameter, whole)
        else:
            utils.safe_set_full_optimizer_state(parameter, whole, key)

    @override
    def changed(self) -> None:
        if self.flat_cuts is not None:  # DeepSpeed's own update has done it
            self.refresh()

    def refresh(self) -> None:
        """Update the model's weights from the optimizer's fp32 ones, as DeepSpeed does after a step. Collective."""
        inner = self.engine.optimizer
        if self.stage < 3:
            inner.update_lp_params()
            for own, parameter in self.followers:
                own.detach().copy_(parameter.detach())
            return
        inner._partition_all_parameters()  # none stays gathered with an old value
        for i in range(len(inner.fp16_groups)):
            inner._reassign_or_swap_out_partitioned_parameters(i)
        if inner.persistent_parameters:
            inner.persistent_parameters[0].all_gather(inner.persistent_parameters)

    @override
    def export(self) -> dict[str, Tensor] | None:
        whole = self._whole_weights()
        if not self.world.is_main:
            return None
        by_identity = {id(p): whole[n] for n, p in self.named.items()}  # tied weights have several names
        by_identity |= {id(p): whole[n] for n, p in self.model.named_parameters()}  # lockstep's own parameters
        return {k: by_identity.get(id(v), v.detach()) for k, v in self.model.state_dict(keep_vars=True).items()}
