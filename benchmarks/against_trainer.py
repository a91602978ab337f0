"""The same run trained by lockstep and by plain transformers Trainer: is the arithmetic the same, and are the scores?

In: a run file of translation or classification with a test split, `key=value`, how many seeds. Out: JSON with three
comparisons, in the order in which the cause of a difference should be looked for:
  arithmetic  the same initial weights, examples and rates, without dropout: every step's loss, norm and rate, and how
              far the change of the weights differs at the end
  start       between a model as lockstep makes it and one as a user of Trainer does: the three parameters whose
              spreads differ most
  seeds       whole trainings, each side with initial weights, order and dropout of its own; both weights are scored by
              both sides on the test split. Trainer's loss is a mean over batches of means over targets: so its scores
              are also given with each batch weighted by its targets
Example: python benchmarks/against_trainer.py runs/multi30k.yaml data.source=MULTI30K steps=500 --seeds 4 --out FILE
One process and one thread on the CPU, in fp32 or bf16 as the run file says. Rates of the schedule, clipping and decay
are the run file's on both sides.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerCallback, TrainingArguments

from lockstep.config.run import Run, load
from lockstep.config.schedules import learning_rate
from lockstep.data import source
from lockstep.data.job import Job, strategy_class
from lockstep.distributed.world import World
from lockstep.strategies.strategy import Strategy
from lockstep.tasks.models.model_configs import load_config
from lockstep.tasks.task import Task, make_task
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate

Weights = dict[str, torch.Tensor]


class Ours:
    """lockstep's side: its task, `single` strategy, loader and evaluation."""

    def __init__(self, run: Run, world: World) -> None:
        self.run, self.world = run, world
        self.task: Task = make_task(Job.of(run).with_data())
        self.strategy: Strategy = strategy_class(run)(Job.of(run, world.size), world)
        self.strategy.build(self.task)
        self.feed = StepLoader(self.task, self.strategy.own_micro_batches(), world.device)

    @property
    def model(self) -> Any:
        return self.strategy.model  # type: ignore[attr-defined]

    def weights(self) -> Weights:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def train(self) -> list[dict[str, float]]:
        told = []
        for step in range(self.feed.total):
            rate = learning_rate(self.run.optim, step, self.feed.total)
            result = self.strategy.train_step(self.feed.make(step), rate)
            told.append({"loss": float(result.loss), "norm": float(result.grad_norm), "rate": rate})
        return told

    def score(self, weights: Weights, split: str = "test") -> dict[str, float]:
        kept = self.weights()
        self.model.load_state_dict(weights)
        found = evaluate(self.world, self.task, self.strategy, self.task.splits[split])
        self.model.load_state_dict(kept)
        return {name: found[name] for name in ("loss", "accuracy")}


class Theirs:
    """Trainer's side from the raw texts on: tokenized, collated, ordered, trained and scored without lockstep."""

    def __init__(self, ours: Ours) -> None:
        self.ours, self.run = ours, ours.run
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(ours.task.prepared.tokenizer)
        self.seq2seq = self.run.task.name == "translation"
        options = ours.task.options  # type: ignore[attr-defined]

        def encoded(rows: dict[str, list]) -> dict[str, list]:
            limit = {"truncation": True, "max_length": self.run.data.max_length}
            if not self.seq2seq:
                return {**self.tokenizer(rows[options.text], **limit), "labels": rows[options.label]}
            pairs = rows["translation"]
            asked, wanted = ([pair[side] for pair in pairs] for side in (options.source, options.target))
            return dict(self.tokenizer(asked, text_target=wanted, **limit))

        splits = source.load(self.run.data, self.run.seed).splits
        self.splits = {
            name: rows.map(encoded, batched=True, remove_columns=rows.column_names, load_from_cache_file=False)
            for name, rows in splits.items()
        }

    def model(self, seed: int) -> Any:
        """Build the model as a user of Trainer would."""
        transformers.set_seed(seed)
        if self.run.model.source is not None:
            labels = len(set(self.splits["train"]["labels"]))
            auto = transformers.AutoModelForSequenceClassification
            return auto.from_pretrained(self.run.model.source, num_labels=labels, **self.run.model.config)
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        config = transformers.AutoConfig.for_model(
            self.run.model.type,
            vocab_size=len(self.tokenizer),
            pad_token_id=pad,
            eos_token_id=end,
            decoder_start_token_id=pad,
            forced_eos_token_id=None,
            **self.run.model.config,
        )
        return transformers.AutoModelForSeq2SeqLM.from_config(config)

    def trainer(self, model: Any, seed: int, order: list[int] | None, folder: str, told: list) -> Any:
        """Make a Trainer with the run's settings. `order`: positions of the examples that replace its own order;
        `told`: receives the rate of every update."""
        run = self.run
        settings: dict[str, Any] = {
            "output_dir": folder,
            "use_cpu": True,
            "per_device_train_batch_size": run.batch_size,
            "max_steps": self.ours.feed.total,
            "learning_rate": run.optim.learning_rate,
            "warmup_steps": run.optim.warmup_steps,
            "lr_scheduler_type": "constant_with_warmup" if run.optim.schedule == "constant" else run.optim.schedule,
            "weight_decay": run.optim.weight_decay,
            "adam_beta1": run.optim.betas[0],
            "adam_beta2": run.optim.betas[1],
            "max_grad_norm": run.optim.max_grad_norm or 0.0,
            "bf16": run.precision == "bf16",
            "seed": seed,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        kind = transformers.Seq2SeqTrainer if self.seq2seq else transformers.Trainer
        arguments = transformers.Seq2SeqTrainingArguments if self.seq2seq else TrainingArguments
        collator = (
            transformers.DataCollatorForSeq2Seq(self.tokenizer, model=model)
            if self.seq2seq
            else transformers.DataCollatorWithPadding(self.tokenizer)
        )

        class Ordered(kind):  # type: ignore[misc, valid-type]
            def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
                return order if order is not None else super()._get_train_sampler(*args, **kwargs)

        made = Ordered(
            model=model,
            args=arguments(**settings),
            data_collator=collator,
            train_dataset=self.splits["train"],
            callbacks=[Rates(told)],
        )
        made.remove_callback(transformers.PrinterCallback)
        return made

    def train(self, model: Any, seed: int, order: list[int] | None = None) -> tuple[list[dict[str, float]], Weights]:
        told: list[dict[str, float]] = []
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(model, seed, order, folder, told)
            trainer.train()
            lines = [line for line in trainer.state.log_history if "grad_norm" in line]
        for row, line in zip(told, lines, strict=True):
            row |= {"loss": line["loss"], "norm": float(line["grad_norm"])}
        return told, model.state_dict()

    def score(self, weights: Weights, split: str = "test") -> dict[str, float]:
        """Trainer's own loss (batches of 8), and the same with each batch weighted by its targets."""
        model = self.model(0)
        model.load_state_dict(weights)
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(model, 0, None, folder, [])
            found = trainer.evaluate(self.splits[split])["eval_loss"]
            total = targets = 0.0
            with torch.no_grad():
                for batch in trainer.get_eval_dataloader(self.splits[split]):
                    count = int((batch["labels"] != -100).sum())
                    total += float(model(**batch).loss) * count
                    targets += count
        return {"mean of batches' means": found, "sum over targets": total / targets}


class Rates(TrainerCallback):
    """Records the learning rate of each update."""

    def __init__(self, told: list[dict[str, float]]) -> None:
        self.told = told

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append({"rate": kwargs["optimizer"].param_groups[0]["lr"]})


def without_dropout(run: Run) -> Run:
    values = run.model_dump(mode="json")
    known = load_config(run.model).to_dict()
    drops = {k: 0.0 for k, v in known.items() if "drop" in k and isinstance(v, float | int) and not isinstance(v, bool)}
    values["model"]["config"] = values["model"]["config"] | drops
    return Run.model_validate(values)


def far(ours: Weights, theirs: Weights) -> float:
    """Largest relative distance over parameters. Key biases are left out: they shift all scores of a query equally, so
    their gradient is pure rounding, which Adam amplifies."""
    keys = ("k_proj.bias", "key.bias")
    lengths = (
        (a, theirs[n]) for n, a in ours.items() if a.is_floating_point() and a.norm() > 0 and not n.endswith(keys)
    )
    return max(float((a - b).norm() / a.norm()) for a, b in lengths)


def arithmetic(run: Run, world: World, steps: int) -> dict[str, Any]:
    run = without_dropout(run)
    ours = Ours(run, world)
    ours.feed.total = steps
    theirs = Theirs(ours)
    columns = ours.task.splits["train"]
    tokens = theirs.splits["train"]["input_ids"]
    assert len(tokens) == len(columns), "the sides have other examples"
    order = [int(row) for step in range(steps) for row in ours.feed.order.step(step)]
    same = all(list(columns.ragged("input_ids").row(row)) == tokens[row] for row in order[:500])
    start = ours.weights()
    model = theirs.model(run.seed)
    model.load_state_dict(start)
    told, ended = theirs.train(model, run.seed, order)
    mine = ours.train()
    moved = {name: ours.weights()[name] - start[name] for name in start}
    apart = {name: ended[name] - start[name] for name in start}
    return {
        "steps": steps,
        "same tokens": same,
        "largest relative difference": {
            what: max(abs(a[what] - b[what]) / max(abs(b[what]), 1e-12) for a, b in zip(mine, told, strict=True))
            for what in ("loss", "norm", "rate")
        },
        "first step": {"lockstep": mine[0], "Trainer": told[0]},
        "last step": {"lockstep": mine[-1], "Trainer": told[-1]},
        "change of weights": far(moved, apart),
    }


def starts(ours: Ours, theirs: Theirs) -> dict[str, float]:
    a, b = ours.weights(), theirs.model(ours.run.seed + 1).state_dict()
    shapes = [{name: value.shape for name, value in side.items()} for side in (a, b)]
    assert shapes[0] == shapes[1], "the sides have other parameters"
    spread = {n: abs(float(a[n].std() / b[n].std()) - 1) for n in a if a[n].numel() > 1 and float(b[n].std()) > 0}
    return dict(sorted(spread.items(), key=lambda item: -item[1])[:3])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    apart = [row["lockstep"]["loss"] - row["Trainer"]["loss"] for row in rows]
    spread = {
        side: {
            "mean": statistics.mean(row[side]["loss"] for row in rows),
            "deviation": statistics.stdev(row[side]["loss"] for row in rows),
        }
        for side in ("lockstep", "Trainer")
    }
    deviation = statistics.stdev(apart)
    return spread | {
        "difference": statistics.mean(apart),
        "its deviation": deviation,
        "its standard error": deviation / len(apart) ** 0.5,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=20, help="of the comparison of arithmetic")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--between", action="store_true", help="also Trainer with lockstep's initial weights and order")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    fixed = ["strategy.name=single", "launch.device=cpu", "launch.threads=1", "launch.processes=1"]
    if load(args.run, []).task.name == "translation":
        fixed += ["task.bleu=false", "task.samples=0"]
    run = load(args.run, [*args.overrides, *fixed])
    world = World(run)
    found: dict[str, Any] = {"run": args.overrides, "arithmetic": arithmetic(run, world, args.steps), "seeds": []}
    world.join()

    def tell(name: str) -> None:
        print(name, json.dumps(found[name], indent=1), flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")

    tell("arithmetic")
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        ours = Ours(run.model_copy(update={"seed": seed}), world)
        theirs = Theirs(ours)
        if seed == args.first_seed:
            found["start"] = starts(ours, theirs)
            tell("start")
        between = between_them(ours, theirs) if args.between else {}
        told, trained = theirs.train(theirs.model(seed), seed)
        mine = ours.train()
        found["seeds"].append(
            {
                "seed": seed,
                "lockstep": ours.score(ours.weights()) | {"last losses": tail(mine)},
                "Trainer": ours.score(trained) | {"last losses": tail(told)},
                "Trainer, by its own evaluation": theirs.score(trained),
                "lockstep, by Trainer's evaluation": theirs.score(ours.weights()),
            }
            | between
        )
        ours.strategy.close()
        tell("seeds")
    if args.seeds > 1:
        found["summary"] = summary(found["seeds"])
        tell("summary")
    world.close()


def between_them(ours: Ours, theirs: Theirs) -> dict[str, Any]:
    """Train with Trainer's loop and dropout from lockstep's initial weights in lockstep's order, to isolate the cause
    of a difference."""
    seed, feed = ours.run.seed, ours.feed
    model = theirs.model(seed)
    model.load_state_dict(ours.weights())
    told, trained = theirs.train(model, seed, [int(row) for t in range(feed.total) for row in feed.order.step(t)])
    return {"Trainer, lockstep's start and order": ours.score(trained) | {"last losses": tail(told)}}


def tail(told: list[dict[str, float]]) -> float:
    return statistics.mean(row["loss"] for row in told[-50:])


if __name__ == "__main__":
    main()
