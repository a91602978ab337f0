"""Sharding by Accelerate: `strategy.options.fsdp` and `strategy.options.deepspeed` of hf_accelerate.

In: this rank's micro-batches. Out: the same update. Unlike in `fsdp2.py`, Accelerate shards the model and wraps the
optimizer; unlike in `zero.py`, Accelerate creates the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import override

from lockstep.config.plugins import require
from lockstep.config.run import RunError
from lockstep.config.sections import StrategySection
from lockstep.data.job import Job
from lockstep.strategies.engines import fsdp, layers, zero_config
from lockstep.strategies.engines.accelerated import Accelerated, accelerator, only, prepared
from lockstep.strategies.engines.zero import DeepSpeedStrategy
from lockstep.strategies.exact.stepper import ParamGroupSpec, Stepper
from lockstep.strategies.fsdp2 import FSDP2, EngineShards, MeshRecovery
from lockstep.strategies.strategy import WeightFormats
from lockstep.tasks.models import storage_dtype


class NoRecovery(MeshRecovery):
    """No recovery: Accelerate keeps process-wide state."""

    rebuilds = False


class AcceleratedFSDP2(Accelerated, FSDP2):
    """FSDP2 by Accelerate. `strategy.options.fsdp`: the fields of its `FullyShardedDataParallelPlugin`."""

    facts = replace(FSDP2.facts, weight_formats=WeightFormats.NONE, engine_casts=True, bench_options={})
    memory = EngineShards()
    recovery = NoRecovery

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        run, processes = job.run, job.processes
        key = "strategy.options.fsdp"
        section = only(run.strategy, "fsdp")
        if job.task.own_model:
            raise RunError(
                "LS4030", f"{key}: Accelerate does not know the layers of a custom model; use strategy.name=fsdp2"
            )
        require(cls.needs, key)
        fsdp.check_not_shared(run.launch)
        layers.check_layers(job, "FSDP2 through Accelerate")
        layers.check_writes(job, key, "FSDP", "strategy.name=ddp")
        from accelerate import FullyShardedDataParallelPlugin

        known = {field.name for field in dataclasses.fields(FullyShardedDataParallelPlugin)}
        # without FSDP1's options and those set by the run file or this module
        known -= {"sharding_strategy", "use_orig_params", "sync_module_states", "backward_prefetch", "param_init_fn"}
        known -= {"forward_prefetch", "limit_all_gathers", "state_dict_type", "state_dict_config", "fsdp_version"}
        known -= {"optim_state_dict_config", "cpu_ram_efficient_loading", "auto_wrap_policy"}
        if unknown := set(section) - known:
            raise RunError(
                "LS4031",
                f"{key}: Accelerate's FSDP2 plug-in has no option {', '.join(sorted(unknown))}; it has "
                f"{', '.join(sorted(known))}",
            )
        if shared := layers.sharing_embeddings(job):
            raise RunError(
                "LS4032",
                f"{key}: Accelerate's FSDP2 cannot shard embeddings that share their weights with "
                f"{', '.join(shared)}; use strategy.name=fsdp2",
            )
        if processes == 1:
            raise RunError(
                "LS4033",
                f"{key}: Accelerate needs several processes to shard, and this job has one; use "
                f"strategy.name=hf_accelerate without {key}, or more processes",
            )

    @override
    @classmethod
    def inexact_options(cls, section: StrategySection) -> list[str]:
        key = "mixed_precision_policy"
        return [f"strategy.options.fsdp.{key}"] if key in section.options["fsdp"] else []

    @override
    @classmethod
    def rounding(cls, job: Job) -> float:
        return 0.1 if job.run.precision == "bf16" else 1e-4

    @override
    def apply_shards(self, treated: Mapping[str, ParamGroupSpec]) -> None:
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.utils import DistributedType

        # Accelerate's bf16 gathers bf16 weights, which changes results: exact runs use autocast.
        precision = {"mixed_precision": "no"} if self.in_tree_order else {}
        if self.run.precision == "bf16" and not precision:
            storage_dtype.keep_narrow(self.model)
        section = dict(self.run.strategy.options["fsdp"])
        try:
            embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        except NotImplementedError:  # many image models have none, and Accelerate asks too
            embedding = None
            self.model.get_input_embeddings = lambda: None  # type: ignore[assignment]
        # Accelerate 1.15 shards the embedding separately, and would shard it twice within a block
        inner = [b for b in self.blocks if embedding not in b.modules()]
        section.setdefault("transformer_cls_names_to_wrap", sorted({type(b).__name__ for b in inner}))
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, **section
        )
        self.accelerator = accelerator(self.job, self.world, [], fsdp_plugin=plugin, **precision)
        assert self.accelerator.distributed_type == DistributedType.FSDP, self.accelerator.distributed_type
        stepper = self.make_stepper(treated)
        self.model, optimizer = prepared(self.accelerator, self.model, stepper)
        self.hold(stepper)
        self.update.optimizer = optimizer


class AcceleratedZero(Accelerated, DeepSpeedStrategy):
    """DeepSpeed ZeRO as Accelerate starts it.

    Boundary, backward and step are called on the engine itself: Accelerate's wrapper steps inside backward, too early
    to set the learning rate.
    """

    needs: ClassVar[tuple[str, ...]] = ("accelerate", "deepspeed")  # type: ignore[assignment]
    options_key = "strategy.options.deepspeed"
    facts = replace(DeepSpeedStrategy.facts, engine_casts=True)

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        run = job.run
        key = cls.options_key
        section = only(run.strategy, "deepspeed")
        require(cls.needs, key)
        layers.check_layers(job, "DeepSpeed")
        if section.get("zero_stage") not in (1, 2, 3):
            raise RunError(
                "LS4034", f"{key}.zero_stage: invalid value {section.get('zero_stage')!r}; expected 1, 2 or 3"
            )
        if section["zero_stage"] == 3:
            layers.check_gathered(job)
            layers.check_writes(job, f"{key}.zero_stage", "ZeRO-3", "stage 2")
        zero_config.check(job, section["zero_stage"], cls.options_of(run.strategy), key)

    @override
    @classmethod
    def stage_of(cls, section: StrategySection) -> int:
        return int(section.options["deepspeed"]["zero_stage"])

    @override
    @classmethod
    def options_of(cls, section: StrategySection) -> Mapping[str, Any]:
        return {k: v for k, v in section.options["deepspeed"].items() if k != "zero_stage"}

    @override
    def start_engine(self, optimizer: Stepper) -> Any:
        from accelerate import DeepSpeedPlugin, InitProcessGroupKwargs
        from accelerate.utils import DistributedType
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        backend = "nccl" if self.world.device.type == "cuda" else "gloo"
        # Not `cpu=True`: Accelerate would silently use plain DDP.
        handlers = [InitProcessGroupKwargs(backend=backend)]
        plugin = DeepSpeedPlugin(hf_ds_config=self.config)
        # With mixed_precision=bf16, Accelerate makes DeepSpeed use bf16 weights. The model already has an autocast.
        precision = {"mixed_precision": "bf16" if self.low_precision else "no"}
        self.accelerator = accelerator(self.job, self.world, handlers, cpu=False, deepspeed_plugin=plugin, **precision)
        assert self.accelerator.distributed_type == DistributedType.DEEPSPEED, self.accelerator.distributed_type
        engine, _ = self.accelerator.prepare(self.model, optimizer)
        assert engine.optimizer.optimizer is optimizer
        unset_hf_deepspeed_config()  # or transformers would shard models that only rank 0 creates, for the export
        return engine
