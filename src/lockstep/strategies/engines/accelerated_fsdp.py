"""FSDP2 as Accelerate applies it: `strategy.options.fsdp` of hf_accelerate.

In: this rank's micro-batches. Out: the same update. The difference from `fsdp2.py` is who shards and who wraps the
optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lockstep.config.plugins import require
from lockstep.config.run import Run, RunError
from lockstep.strategies.engines import layers
from lockstep.strategies.engines.accelerated import Accelerated, accelerator, only, prepared
from lockstep.strategies.exact.param_groups import ParamGroupSpec
from lockstep.strategies.fsdp2 import FSDP2
from lockstep.strategies.strategy import WeightFormats


class AcceleratedFSDP2(Accelerated, FSDP2):
    """`strategy.options.fsdp`: the fields of Accelerate's `FullyShardedDataParallelPlugin`."""

    weight_formats = WeightFormats.NONE
    supports_reshard = False  # Accelerate keeps its state for the whole process

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        key = "strategy.options.fsdp"
        section = only(run, "fsdp")
        if layers.own_model(run):
            raise RunError(f"{key}: Accelerate knows no layers of a model of your own; use strategy.name=fsdp2")
        require(cls.needs, key)
        layers.check_layers(run, "FSDP2 through Accelerate")
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
        if shared := layers.sharing_embeddings(run):
            raise RunError(
                f"{key}: Accelerate's FSDP2 cannot shard embeddings whose weights {', '.join(shared)} holds, too; use "
                "strategy.name=fsdp2, which can"
            )
        if processes == 1:
            raise RunError(f"{key}: Accelerate shards over several processes only, this job has one; use hf_accelerate")

    @classmethod
    def needs_memory_to_resolve(cls, run: Run) -> bool:
        return False

    @classmethod
    def gives_bits(cls, run: Run) -> bool:
        own = "mixed_precision_policy" in run.strategy.options["fsdp"]
        return run.strategy.exact and run.precision != "bf16" and not own  # in bf16 Accelerate gathers bf16 weights

    @classmethod
    def rounding(cls, run: Run) -> float:
        return 0.1 if run.precision == "bf16" else 1e-4

    def apply_shards(self, treated: Mapping[str, ParamGroupSpec]) -> None:
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
        self.model, self.optimizer = prepared(self.accelerator, self.model, self.make_stepper(treated))
