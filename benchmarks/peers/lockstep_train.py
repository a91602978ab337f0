"""lockstep on the peers' command line and meter: the product's own loop, strategy and feed, exact as it comes.
In: common.py's arguments, `--micro-batches`, `--strategy`, `--inexact`, `--options`, `--group`, and other keys of the
run file as `--set KEY=VALUE`.
Out: the same report."""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import datasets  # noqa: F401 - it is read with: imported here, so that it counts as an import in the peak of memory
from common import Examples, Meter, parse_arguments, report
from transformers import AutoTokenizer, GPT2Tokenizer

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config.run import Run, load
from lockstep.distributed.system_metrics import keep_freed_memory
from lockstep.distributed.world import World
from lockstep.training.evaluation import evaluate
from lockstep.training.loop import train
from lockstep.training.resolve import for_rank
from lockstep.training.session import Sinks, build_session, join_ranks


def run_of(args: argparse.Namespace, extra: argparse.Namespace, folder: str) -> Run:
    """The run file that says what the peers' arguments say; no checkpoint is written, as the peers write none."""
    values = {
        "name": "benchmark",
        "output": folder,
        "seed": args.seed,
        "data": {
            "train": str(args.train),
            "validation": str(args.validation),
            "max_length": args.max_length,
            "group_by_length": extra.group,
        },
        "model": {"source": str(args.model)}
        if args.model
        else {"type": "gpt2", "config": without_type(args.gpt2_config)},
        "tokenizer": {"source": str(args.tokenizer) if args.tokenizer else None},
        "steps": args.steps,
        "batch_size": args.batch_size,
        "micro_batches": extra.micro_batches,
        "precision": args.precision,
        "optim": {
            "learning_rate": args.learning_rate,
            "warmup_steps": args.warmup_steps,
            "weight_decay": args.weight_decay,
            "max_grad_norm": args.clip,
            "schedule": args.schedule,
        },
        "strategy": {"name": extra.strategy, "exact": not extra.inexact, "options": extra.options},
        "launch": {"device": args.device, "threads": 1},
    }
    return load(None, extra.set, values)


def examples(args: argparse.Namespace) -> tuple[Examples, Examples]:
    """What the peers train on, for the checks only."""
    of_gpt2 = args.gpt2_config is not None
    tokenizer = (GPT2Tokenizer if of_gpt2 else AutoTokenizer).from_pretrained(args.tokenizer or args.model)
    return Examples(args.train, tokenizer, args.max_length), Examples(args.validation, tokenizer, args.max_length)


def without_type(config: dict) -> dict:
    return {k: v for k, v in config.items() if k not in ("type", "model_type")}


class NoCheckpoints(Checkpoints):
    """The peers write none either."""

    def save(self, step: int, strategy: object, scores: object = None, state: object = None) -> None: ...


class Steps(Sinks):
    """Tells the meter of each step."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def advance(self, step: int) -> None:
        self.meter.step()


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--micro-batches", type=int, default=8)
    own.add_argument("--strategy", default="ddp")
    own.add_argument("--inexact", action="store_true")
    own.add_argument("--options", type=json.loads, default={})
    own.add_argument("--group", type=int, default=1, help="data.group_by_length")
    own.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the run file")
    extra, rest = own.parse_known_args()
    sys.argv[1:] = rest
    args = parse_arguments(__doc__)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(args, extra, folder)
        world = World(run)
        job = for_rank(run, world)
        join_ranks(job, world)
        session = build_session(job, world)
        keep_freed_memory()  # as `startup.try_a_step` does
        meter = Meter(session.strategy.model, args, *examples(args))
        checkpoints = NoCheckpoints(job, world, session.feed.total)
        Path(folder).mkdir(exist_ok=True)
        train(replace(session, checkpoints=checkpoints, sinks=Steps(meter)), session.new_state())
        score = None
        if args.evaluate:
            score = evaluate(world, session.task, session.strategy, session.task.splits["validation"])["accuracy"]
        session.strategy.close()
    name = f"lockstep {extra.strategy}" + (" inexact" if extra.inexact else "")
    pads = "random" if run.micro_batches == run.data.group_by_length == 1 else "grouped"
    report(args, name, "lockstep-train", meter, score, pads)


if __name__ == "__main__":
    main()
