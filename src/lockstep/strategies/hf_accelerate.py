"""Hugging Face Accelerate as the engine: it wraps model and optimizer (`prepare`) and runs backward.

In: this rank's micro-batches. Out: the same update on every rank. The difference from `ddp.py` is who wraps and who
calls backward. Accelerate averages over processes and divides by accumulation steps behind one's back; here it does
neither, because the loss is divided once, by the targets of the whole step, and `parts/hooked.py` sums.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from lockstep.batch import MicroBatch
from lockstep.models import models
from lockstep.run import Run, RunError
from lockstep.strategies.fsdp2 import FSDP2
from lockstep.strategies.parts import zero_config
from lockstep.strategies.parts.hooked import Hooked
from lockstep.strategies.parts.zero import Sharded
from lockstep.strategies.strategy import Strategy
from lockstep.world import World


class HFAccelerate(Hooked):
    """`strategy.options` are those of Accelerate's `DistributedDataParallelKwargs` (`bucket_cap_mb`,
    `static_graph`, ...), or one mapping: `fsdp`, the fields of its `FullyShardedDataParallelPlugin` (FSDP2), or
    `deepspeed`, `zero_stage` and DeepSpeed's own config for its `DeepSpeedPlugin`."""

    needs = ("accelerate",)

    @classmethod
    def variant(cls, run: Run) -> type[Strategy]:
        found: dict[str, type[Strategy]] = {"fsdp": _AcceleratedFSDP2, "deepspeed": _AcceleratedZero}
        return next((found[name] for name in found if name in run.strategy.options), cls)

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        cls.require("strategy.name: hf_accelerate")
        from accelerate import DistributedDataParallelKwargs

        known = {field.name for field in dataclasses.fields(DistributedDataParallelKwargs)}
        known -= {"dim", "comm_hook", "comm_wrapper", "comm_state_option"}  # the hook is the exact reduction
        if unknown := set(run.strategy.options) - known:
            raise RunError(
                f"strategy.options: hf_accelerate has no option {', '.join(sorted(unknown))}; "
                f"it has {', '.join(sorted(known))} (of Accelerate's DistributedDataParallelKwargs), fsdp and deepspeed"
            )

    def wrap(self) -> nn.Module:
        from accelerate import DistributedDataParallelKwargs

        options: dict[str, Any] = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        options |= self.run.strategy.options
        self.accelerator = accelerator(self.run, self.world, [DistributedDataParallelKwargs(**options)])
        model, self.optimizer = prepared(self.accelerator, self.model, self.optimizer)
        self.primed = not (options.get("static_graph") and self.world.size > 1)
        return model

    def run_piece(self, micro: MicroBatch, divisor: float) -> Tensor:
        with self.phases("forward"):
            loss = self.task.loss_sum(self.wrapped(**micro.inputs), micro.targets)
        with self.phases("overlapped" if self.travelling else "backward"), self.autocast(False):
            self.accelerator.backward(loss / divisor)
        return loss.detach()

    def close(self) -> None:
        super().close()
        release(self.accelerator)
        del self.accelerator


class _AcceleratedFSDP2(FSDP2):
    """FSDP2 as Accelerate applies it."""

    needs = ("accelerate",)

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        key = "strategy.options.fsdp"
        section = _only(run, "fsdp")
        cls.require(key)
        models.check_layers(run, "FSDP2 through Accelerate")
        from accelerate import FullyShardedDataParallelPlugin

        known = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
        # FSDP1's, and what the run file or this file says
        known -= {"sharding_strategy", "use_orig_params", "sync_module_states", "backward_prefetch", "param_init_fn"}
        known -= {"forward_prefetch", "limit_all_gathers", "state_dict_type", "state_dict_config", "fsdp_version"}
        known -= {"optim_state_dict_config", "cpu_ram_efficient_loading", "auto_wrap_policy"}
        if unknown := set(section) - known:
            raise RunError(
                f"{key}: Accelerate's plug-in for FSDP2 has no option {', '.join(sorted(unknown))}; it has "
                f"{', '.join(sorted(known))}"
            )
        if processes == 1:
            raise RunError(f"{key}: Accelerate shards over several processes only, this job has one; use hf_accelerate")

    @classmethod
    def gives_bits(cls, run: Run) -> bool:
        own = "mixed_precision_policy" in run.strategy.options["fsdp"]
        return run.strategy.exact and run.precision == "fp32" and not own  # in bf16 Accelerate gathers bf16 weights

    @classmethod
    def rounding(cls, run: Run) -> float:
        return 1e-4 if run.precision == "fp32" else 0.1

    def apply_shards(self, exempt: set[str]) -> None:
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils import DistributedType

        section = dict(self.run.strategy.options["fsdp"])
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        # Accelerate 1.15 shards this one by itself, and would shard it twice inside of a block
        inner = [b for b in self.blocks if embedding not in b.modules()]
        section.setdefault("transformer_cls_names_to_wrap", sorted({type(b).__name__ for b in inner}))
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, **section
        )
        self.accelerator = accelerator(self.run, self.world, [], fsdp_plugin=plugin)
        assert self.accelerator.distributed_type == DistributedType.FSDP, self.accelerator.distributed_type
        self.model, self.optimizer = prepared(self.accelerator, self.model, self.make_optimizer(exempt))

    def close(self) -> None:
        super().close()
        release(self.accelerator)
        del self.accelerator


class _AcceleratedZero(Sharded):
    """DeepSpeed ZeRO as Accelerate starts it.

    Boundary, backward and step are called on the engine itself: Accelerate's wrapper steps inside of backward, which
    leaves no moment to set the rate in.
    """

    needs: ClassVar[tuple[str, ...]] = ("accelerate", "deepspeed")  # type: ignore[assignment]

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        key = "strategy.options.deepspeed"
        section = _only(run, "deepspeed")
        cls.require(key)
        models.check_layers(run, "DeepSpeed")
        if section.get("zero_stage") not in (1, 2, 3):
            raise RunError(f"{key}.zero_stage: 1, 2 or 3 is needed, it is {section.get('zero_stage')!r}")
        options = {k: v for k, v in section.items() if k != "zero_stage"}
        zero_config.check(run, processes, section["zero_stage"], options, key)

    def __init__(self, run: Run, world: World) -> None:
        super().__init__(run, world)
        self.stage = run.strategy.options["deepspeed"]["zero_stage"]

    def options(self) -> Mapping[str, Any]:
        return {k: v for k, v in self.run.strategy.options["deepspeed"].items() if k != "zero_stage"}

    def start_engine(self) -> Any:
        from accelerate import DeepSpeedPlugin, InitProcessGroupKwargs
        from accelerate.utils import DistributedType

        backend = "nccl" if self.world.device.type == "cuda" else "gloo"
        # Not `cpu=True`: with it Accelerate silently takes plain DDP.
        handlers = [InitProcessGroupKwargs(backend=backend)]
        plugin = DeepSpeedPlugin(hf_ds_config=self.config)
        self.accelerator = accelerator(self.run, self.world, handlers, cpu=False, deepspeed_plugin=plugin)
        assert self.accelerator.distributed_type == DistributedType.DEEPSPEED, self.accelerator.distributed_type
        engine, _ = self.accelerator.prepare(self.model, self.optimizer)
        self.optimizer = engine.optimizer.optimizer  # ours still
        return engine

    def close(self) -> None:
        super().close()
        release(self.accelerator)
        del self.accelerator


def _only(run: Run, name: str) -> Mapping[str, Any]:
    """The mapping that is the whole of `strategy.options`. Errors: `RunError`."""
    section = run.strategy.options[name]
    if not isinstance(section, Mapping):
        raise RunError(f"strategy.options.{name}: {section!r} is not a mapping of options")
    if others := set(run.strategy.options) - {name}:
        raise RunError(f"strategy.options: {', '.join(sorted(others))} cannot be given beside {name}")
    return section


def accelerator(run: Run, world: World, handlers: list[Any], **options: Any) -> Any:
    """An `Accelerator` in the process group that is there, checked to span it: under the wrong variables Accelerate
    silently makes worlds of one process."""
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    sharded = "fsdp_plugin" in options
    with world.variables_for_engines():
        if sharded and world.device.type == "cpu":  # Accelerate shards on GPUs only, unless it takes CPUs for them
            PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        found = Accelerator(
            mixed_precision="bf16" if run.precision == "bf16" else "no",
            kwargs_handlers=handlers,
            **({"cpu": world.device.type == "cpu"} | options),
        )
    assert found.num_processes == world.size, f"Accelerate sees {found.num_processes} of {world.size} processes"
    assert found.device.type == world.device.type, f"Accelerate is on {found.device}, the run on {world.device}"
    return found


def prepared(engine: Any, model: nn.Module, optimizer: Any) -> Any:
    """`engine.prepare(model, optimizer)`."""
    with warnings.catch_warnings():
        # torch 2.13 renamed an option of DistributedDataParallel, Accelerate 1.15 knows its old name only
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        return engine.prepare(model, optimizer)


def release(found: Any) -> None:
    """Let go of models and of Accelerate's process-wide state."""
    from accelerate.state import AcceleratorState

    found.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
