"""Peer: Lightning's Trainer with a LightningModule; DDP where torchrun started several processes.
Lightning finds torchrun's environment by itself; `devices` must say the number of processes per node.
The command line is common.py's."""

import argparse
import os
from typing import Any

import lightning as L
import torch
from common import BETAS, EPS, Meter, accuracy, check_world, load, parameter_groups, parse_arguments, report
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedModel, get_scheduler


class Classifier(L.LightningModule):
    def __init__(self, model: PreTrainedModel, args: argparse.Namespace) -> None:
        super().__init__()
        self.model = model
        self.args = args

    def on_fit_start(self) -> None:
        check_world(self.trainer.world_size)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.model(**batch).loss

    def predict_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        right = self.model(**batch).logits.argmax(-1) == batch["labels"]
        return torch.tensor([int(right.sum()), len(right)])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        groups, args = parameter_groups(self.model, self.args.weight_decay), self.args
        optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=BETAS, eps=EPS, fused=True)
        scheduler = get_scheduler(args.schedule, optimizer, args.warmup_steps, args.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        # Trainer(gradient_clip_val=...) refuses a fused optimizer under bf16-mixed, though nothing is scaled
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.args.clip)


class StepEnd(L.Callback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.meter.step()


def train(args: argparse.Namespace) -> tuple[Meter, float | None]:
    L.seed_everything(args.seed)
    model, tokenizer, training, validation = load(args)
    meter = Meter(model, args, training, validation)
    collate = DataCollatorWithPadding(tokenizer)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = L.Trainer(
        accelerator=args.device,
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        precision="bf16-mixed" if args.precision == "bf16" else "32-true",
        max_steps=args.steps,
        callbacks=[StepEnd(meter)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    classifier = Classifier(model, args)
    trainer.fit(classifier, DataLoader(training, batch_size=args.per_process, shuffle=True, collate_fn=collate))
    score = None
    if args.evaluate:  # predict, not validate: its distributed sampler repeats no example
        loader = DataLoader(validation, batch_size=args.per_process, collate_fn=collate)
        counts = torch.stack(trainer.predict(classifier, loader)).sum(0)  # type: ignore[arg-type]
        correct, seen = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        score = accuracy(correct, seen, validation)
    return meter, score


if __name__ == "__main__":
    arguments = parse_arguments(__doc__)
    report(arguments, "lightning", "lightning", *train(arguments))
