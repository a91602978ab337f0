"""transformers' Trainer as the engine of a step: its `training_step` runs every micro-batch.

In: this rank's micro-batches. Out: the same update on every rank, equal to that of `Trainer.train()` on the same
micro-batches. Unlike in `hf_accelerate.py`, Trainer wraps the model and calls both forward and backward. The loss is
passed as `compute_loss_func`, so the model's own loss does not interfere (transformers 5.23 multiplies the mean of
classifiers by the number of processes).
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lockstep.config.plugins import require
from lockstep.config.run import RunError
from lockstep.config.sections import StrategySection
from lockstep.data.batch import MicroBatch
from lockstep.data.job import Job
from lockstep.strategies.engines.accelerated import Accelerated, prepared, release
from lockstep.strategies.engines.hooked_ddp import Hooked, WrapperRecovery

# TrainingArguments that control how a step is computed, except those that keys of the run file set.
_KNOWN = {"ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "gradient_checkpointing"}
_KNOWN |= {"gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32"}
_KNOWN |= {"torch_empty_cache_steps", "use_liger_kernel", "liger_kernel_config"}

# Arguments that change results compared to the other strategies.
_OTHER_KERNELS = {"torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32", "use_liger_kernel"}


class TrainerRecovery(WrapperRecovery):
    """Recovery of Trainer: wraps the model again in the new process group."""

    strategy: HFTrainer

    @override
    def detach_group(self) -> None:
        release(self.strategy.accelerator)
        self.strategy.trainer.model_wrapped = self.strategy.model
        super().detach_group()


class HFTrainer(Accelerated, Hooked):
    """`strategy.options` are TrainingArguments that control how a step is computed (`ddp_bucket_cap_mb`,
    `gradient_checkpointing`, `torch_compile`, ...)."""

    facts = dataclasses.replace(Hooked.facts, engine_casts=True)
    recovery = TrainerRecovery

    @override
    @classmethod
    def inexact_options(cls, section: StrategySection) -> list[str]:
        return [f"strategy.options.{key}" for key in sorted(_OTHER_KERNELS & set(section.options))]

    @override
    @classmethod
    def check(cls, job: Job) -> None:
        run = job.run
        require(cls.needs, "strategy.name: hf_trainer")
        from transformers import TrainingArguments

        every = {field.name for field in dataclasses.fields(TrainingArguments)}
        for name in run.strategy.options:
            if name not in _KNOWN & every:
                why = "is set by other keys of the run file" if name in every else "is not a field of TrainingArguments"
                raise RunError(
                    "LS4210", f"strategy.options.{name}: {why}; hf_trainer takes {', '.join(sorted(_KNOWN & every))}"
                )

    @override
    def wrap(self) -> nn.Module:
        from transformers import Trainer, TrainingArguments

        options = dict(self.run.strategy.options)
        # Trainer creates its output folder and writes nothing: delete it now, so that a killed rank leaves none
        with self.world.variables_for_engines(), tempfile.TemporaryDirectory(prefix="lockstep-trainer-") as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                use_cpu=self.world.device.type == "cpu",
                bf16=self.run.precision == "bf16" and not self.run.model.trained_in_bfloat16,
                average_tokens_across_devices=False,  # `Hooked` divides once
                ddp_broadcast_buffers=False,
                ddp_find_unused_parameters=options.pop("ddp_find_unused_parameters", False),
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                **options,
            )
            self.trainer = Trainer(
                self.model,
                arguments,
                compute_loss_func=self.loss,
                optimizers=(self.update.stepper, None),
            )
        if self.run.precision == "fp16":  # lockstep's autocast and scale: Accelerate supports fp16 on GPUs only
            autocast: Any = self.precision.autocast
            self.trainer.compute_loss_context_manager = autocast  # type: ignore[method-assign]
        self.accelerator = engine = self.trainer.accelerator
        assert engine.num_processes == self.world.size, f"Trainer sees {engine.num_processes} processes"
        engine.ddp_handler = ddp_options(arguments)
        model, self.update.optimizer = prepared(engine, self.model, self.update.stepper)
        self.trainer.model_wrapped, self.trainer.optimizer = model, self.update.optimizer
        self.overlap.primed = not (arguments.ddp_static_graph and self.world.size > 1)
        return model

    def loss(self, outputs: Any, targets: Tensor, num_items_in_batch: float) -> Tensor:
        """Trainer's `compute_loss_func`; `num_items_in_batch` is the divisor passed to `run_micro_batch`."""
        loss = self.totals.loss_sum(self.task, outputs, self.micro, self.observer)
        self.loss_of_micro = loss.detach()
        with self.precision.autocast(False):
            return self.precision.scaled(loss / num_items_in_batch)

    @override
    def run_micro_batch(self, micro: MicroBatch, divisor: float) -> Tensor:
        inputs, self.micro = {**self.inputs_of(micro), "labels": micro.targets}, micro
        phase = self.phases("overlapped" if self.travelling else "forward+backward")
        with phase, self.precision.autocast(False):  # Trainer enters its own around forward, and none around backward
            self.trainer.training_step(self.wrapped, inputs, num_items_in_batch=divisor)  # type: ignore[arg-type]
        return self.loss_of_micro

    @override
    def close(self) -> None:
        super().close()
        del self.trainer


def ddp_options(arguments: Any) -> Any:
    """Return the arguments that Trainer passes to DistributedDataParallel, with gradients as bucket views."""
    from accelerate import DistributedDataParallelKwargs

    options = {"bucket_cap_mb": arguments.ddp_bucket_cap_mb, "static_graph": arguments.ddp_static_graph}
    return DistributedDataParallelKwargs(
        find_unused_parameters=bool(arguments.ddp_find_unused_parameters),
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        **{name: value for name, value in options.items() if value is not None},
    )
