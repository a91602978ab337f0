"""DeepSpeed ZeRO as Accelerate starts it: `strategy.options.deepspeed` of hf_accelerate.

In: this rank's micro-batches. Out: the same update. The difference from `zero.py` is who makes the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lockstep.config.plugins import require
from lockstep.config.run import Run, RunError
from lockstep.distributed.world import World
from lockstep.strategies.engines import layers, zero_config
from lockstep.strategies.engines.accelerated import Accelerated, accelerator, only
from lockstep.strategies.engines.zero import Sharded


class AcceleratedZero(Accelerated, Sharded):
    """DeepSpeed ZeRO as Accelerate starts it.

    Boundary, backward and step are called on the engine itself: Accelerate's wrapper steps inside of backward, which
    leaves no moment to set the rate in.
    """

    needs: ClassVar[tuple[str, ...]] = ("accelerate", "deepspeed")  # type: ignore[assignment]

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        key = "strategy.options.deepspeed"
        section = only(run, "deepspeed")
        require(cls.needs, key)
        layers.check_layers(run, "DeepSpeed")
        if section.get("zero_stage") not in (1, 2, 3):
            raise RunError(f"{key}.zero_stage: 1, 2 or 3 is needed, it is {section.get('zero_stage')!r}")
        options = {k: v for k, v in section.items() if k != "zero_stage"}
        zero_config.check(run, processes, section["zero_stage"], options, key)

    @classmethod
    def stage_of(cls, run: Run) -> int:
        return int(run.strategy.options["deepspeed"]["zero_stage"])

    def __init__(self, run: Run, world: World) -> None:
        super().__init__(run, world)
        self.stage = self.stage_of(run)

    def options(self) -> Mapping[str, Any]:
        return {k: v for k, v in self.run.strategy.options["deepspeed"].items() if k != "zero_stage"}

    def start_engine(self) -> Any:
        from accelerate import DeepSpeedPlugin, InitProcessGroupKwargs
        from accelerate.utils import DistributedType
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        backend = "nccl" if self.world.device.type == "cuda" else "gloo"
        # Not `cpu=True`: with it Accelerate silently takes plain DDP.
        handlers = [InitProcessGroupKwargs(backend=backend)]
        plugin = DeepSpeedPlugin(hf_ds_config=self.config)
        self.accelerator = accelerator(self.run, self.world, handlers, cpu=False, deepspeed_plugin=plugin)
        assert self.accelerator.distributed_type == DistributedType.DEEPSPEED, self.accelerator.distributed_type
        engine, _ = self.accelerator.prepare(self.model, self.optimizer)
        self.optimizer = engine.optimizer.optimizer  # ours still
        unset_hf_deepspeed_config()  # or transformers would shard models that rank 0 makes alone, for the export
        return engine
