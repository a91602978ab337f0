"""transformers' Trainer as the engine of a step: its `training_step` runs every micro-batch.

In: this rank's micro-batches. Out: the same update on every rank, equal to what `Trainer.train()` does on the same
micro-batches. The difference from `hf_accelerate.py` is that Trainer wraps and calls both forward and backward; the
loss goes in by `compute_loss_func`, so that no head's own mean (multiplied by the number of processes for classifiers
in transformers 5.23) has a say.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

from torch import Tensor, nn

from lockstep.config.plugins import require
from lockstep.config.run import Run, RunError
from lockstep.data.batch import MicroBatch
from lockstep.strategies.engines.accelerated import Accelerated, prepared, release
from lockstep.strategies.engines.hooked_ddp import Hooked

# TrainingArguments that say how a step is computed and that no key of the run file says already.
_KNOWN = {"ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "gradient_checkpointing"}
_KNOWN |= {"gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32"}
_KNOWN |= {"torch_empty_cache_steps", "use_liger_kernel", "liger_kernel_config"}

# Of these, the ones that compute in another way than the other strategies do.
_OTHER_KERNELS = {"torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32", "use_liger_kernel"}


class HFTrainer(Accelerated, Hooked):
    """`strategy.options` are TrainingArguments about how a step is computed (`ddp_bucket_cap_mb`,
    `gradient_checkpointing`, `torch_compile`, ...)."""

    @classmethod
    def inexact_options(cls, run: Run) -> list[str]:
        return [f"strategy.options.{key}" for key in sorted(_OTHER_KERNELS & set(run.strategy.options))]

    @classmethod
    def check(cls, run: Run, processes: int) -> None:
        require(cls.needs, "strategy.name: hf_trainer")
        from transformers import TrainingArguments

        every = {field.name for field in dataclasses.fields(TrainingArguments)}
        for name in run.strategy.options:
            if name not in _KNOWN & every:
                why = "is said by other keys of the run file" if name in every else "is no TrainingArgument"
                raise RunError(
                    "LS4210", f"strategy.options.{name}: {why}; hf_trainer takes {', '.join(sorted(_KNOWN & every))}"
                )

    def wrap(self) -> nn.Module:
        from transformers import Trainer, TrainingArguments

        options = dict(self.run.strategy.options)
        # Trainer makes the folder it is given, and writes nothing there: a rank that is killed later leaves none
        with self.world.variables_for_engines(), tempfile.TemporaryDirectory(prefix="lockstep-trainer-") as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                use_cpu=self.world.device.type == "cpu",
                bf16=self.run.precision == "bf16" and not self.run.model.trained_in_bfloat16,
                average_tokens_across_devices=False,  # `Hooked` has the one divisor
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
                optimizers=(self.stepper, None),
            )
        if self.run.precision == "fp16":  # by our own autocast and scale: Accelerate's are of GPUs only
            self.trainer.compute_loss_context_manager = self.autocast  # type: ignore[method-assign, assignment]
        self.accelerator = engine = self.trainer.accelerator
        assert engine.num_processes == self.world.size, f"Trainer sees {engine.num_processes} processes"
        engine.ddp_handler = self.handler(arguments)
        model, self.optimizer = prepared(engine, self.model, self.stepper)
        self.trainer.model_wrapped, self.trainer.optimizer = model, self.optimizer
        self.primed = not (arguments.ddp_static_graph and self.world.size > 1)
        return model

    def handler(self, arguments: Any) -> Any:
        """The arguments that Trainer gives to DistributedDataParallel, with gradients that live in its buckets."""
        from accelerate import DistributedDataParallelKwargs

        options = {"bucket_cap_mb": arguments.ddp_bucket_cap_mb, "static_graph": arguments.ddp_static_graph}
        return DistributedDataParallelKwargs(
            find_unused_parameters=bool(arguments.ddp_find_unused_parameters),
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            **{name: value for name, value in options.items() if value is not None},
        )

    def loss(self, outputs: Any, targets: Tensor, num_items_in_batch: float) -> Tensor:
        """Trainer's `compute_loss_func`; `num_items_in_batch` is the divisor that `run_micro_batch` was given."""
        loss = self.loss_sum(outputs, self.micro)
        self.loss_of_micro = loss.detach()
        with self.autocast(False):
            return self.scaled(loss / num_items_in_batch)

    def run_micro_batch(self, micro: MicroBatch, divisor: float) -> Tensor:
        inputs, self.micro = {**micro.inputs, "labels": micro.targets}, micro
        phase = self.phases("overlapped" if self.travelling else "forward+backward")
        with phase, self.autocast(False):  # Trainer has its own around forward; backward runs outside of it
            self.trainer.training_step(self.wrapped, inputs, num_items_in_batch=divisor)  # type: ignore[arg-type]
        return self.loss_of_micro

    def detach_group(self) -> None:
        release(self.accelerator)
        self.trainer.model_wrapped = self.model
        super().detach_group()

    def close(self) -> None:
        super().close()
        del self.trainer
