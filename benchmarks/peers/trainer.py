"""Peer: transformers.Trainer as it comes, with a collator that pads each batch to its longest example.
trainer_tuned.py and trainer_rebalanced.py run the same with the settings that Trainer's users reach for when they want
speed. The command line is common.py's."""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from common import BETAS, EPS, Meter, accuracy, check_world, load, parse_arguments, report, world_size
from transformers import (
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

QUICK: dict[str, Any] = {
    "optim": "adamw_torch_fused",  # already the default on torch 2.8 and later; said, not left to the version
    "ddp_find_unused_parameters": False,  # every parameter has a gradient: no walk over the graph
    "dataloader_num_workers": 0,  # examples are tokenised and in memory: a worker only takes a core
    "logging_strategy": "no",
    "disable_tqdm": True,
}
# transformers 4's group_by_length=True; in 5.23 its ranks draw different orders from the second epoch on
TUNED: dict[str, Any] = QUICK | {"train_sampling_strategy": "group_by_length"}


class StepEnd(TrainerCallback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.meter.step()


def train(args: argparse.Namespace, extra: dict[str, Any], loss: Callable | None) -> tuple[Meter, float | None]:
    model, tokenizer, training, validation = load(args)
    meter = Meter(model, args, training, validation)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            use_cpu=args.device == "cpu",  # without it, two processes on CPU do not join
            ddp_backend="gloo" if world_size() > 1 and args.device == "cpu" else None,
            per_device_eval_batch_size=args.per_process,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            warmup_steps=args.warmup_steps,
            lr_scheduler_type=args.schedule,
            weight_decay=args.weight_decay,
            max_grad_norm=args.clip,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            bf16=args.precision == "bf16",
            seed=args.seed,
            save_strategy="no",
            report_to="none",
            **{"per_device_train_batch_size": args.per_process} | extra,
        )
        check_world(settings.world_size)
        trainer = Trainer(
            model=model,
            args=settings,
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=training,
            processing_class=tokenizer,
            callbacks=[StepEnd(meter)],
            compute_loss_func=loss,
        )
        trainer.train()
        score = None
        if args.evaluate:
            output = trainer.predict(validation)
            right = np.asarray(output.predictions).argmax(-1) == output.label_ids
            score = accuracy(int(right.sum()), len(right), validation)
    return meter, score


def main(
    peer: str, extra: dict[str, Any], pads: str = "random", args: Any = None, loss: Callable | None = None
) -> None:
    args = args or parse_arguments(__doc__)
    report(args, peer, "accelerate", *train(args, extra, loss), pads)


if __name__ == "__main__":
    main("trainer", {})
