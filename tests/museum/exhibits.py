"""The museum's exhibits: a faulty script, its symptom, and the finding that `lockstep trace` or `diff` must report."""

from __future__ import annotations

from museum.exhibit import Exhibit, Healthy
from museum.reports import AS_RELEASED, FROM_REPORTS, LITDATA


def alone(name: str, expected: str, symptom: str, extra: str = "", processes: int = 2) -> Exhibit:
    return Exhibit(name, symptom, "loop.py", f"--fault {name} {extra}".strip(), processes, expected, None)


def beside(
    name: str,
    expected: str,
    symptom: str,
    extra: str = "",
    reference: str = "--batch 32",
    processes: int = 2,
) -> Exhibit:
    return Exhibit(name, symptom, "loop.py", f"--fault {name} {extra}".strip(), processes, expected, reference)


def text(name: str, expected: str, symptom: str, extra: str = "", processes: int = 2, alone: bool = False) -> Exhibit:
    reference = None if alone else "--batch 16"
    return Exhibit(name, symptom, "text.py", f"--fault {name} {extra}".strip(), processes, expected, reference)


OWN = (
    alone(
        "no-set-epoch",
        "same-order",
        "every epoch has the same order",
    ),
    alone("no-sampler", "same-examples", "each rank trains on the whole data set"),
    alone("sampler-seed", "seen-twice", "ranks shuffle by other seeds, so that they share examples"),
    alone("own-order", "seen-often", "each rank shuffles the whole data set by a seed of its own"),
    alone("divided-twice", "seen-part", "half of the data set is never seen"),
    alone("seed-by-rank", "replicas-start", "models that nobody wraps start from different weights"),
    alone("not-wrapped", "not-reduced", "each rank trains a model of its own"),
    alone("around-wrapper", "not-reduced", "the forward calls model.module, and DDP never hears of it"),
    alone("no-sync", "not-reduced", "every backward runs under no_sync"),
    alone("ignored", "not-reduced-some", "DDP ignores a parameter"),
    alone("one-not-reduced", "not-reduced-some", "a hand-written all-reduce leaves out a parameter", "--wrap hand"),
    alone("clip-before-reduce", "clip-before-reduce", "each rank clips before gradients are reduced", "--wrap hand"),
    beside("clip-own-shard", "clipped by hand", "each rank clips its shard by the shard's own norm", "--wrap fsdp"),
    alone("clip-by-rank", "replicas-clipping", "ranks clip at other limits"),
    alone("rate-by-rank", "replicas-options", "the learning rate depends on the rank"),
    alone("write-on-one-rank", "replicas-weights", "rank 1 writes to a weight between steps"),
    alone("state-on-one-rank", "replicas-weights", "rank 1 has other moments (a state loaded on one rank)"),
    alone("moments-on-one-rank", "replicas-moments", "the optimizer's state was loaded on rank 1 alone"),
    alone("not-in-optimizer", "in-no-optimizer", "a layer is in no optimizer", processes=1),
    alone("stale-optimizer", "stale-optimizer", "the optimizer was made before the model was replaced", processes=1),
    alone("detached", "no-gradient", "a detach cuts the graph", processes=1),
    alone("zero-before-step", "all-zero", "zero_grad stands between backward and step", processes=1),
    alone("zero-never", "not-zeroed", "nobody zeroes gradients", processes=1),
    alone("clip-before-unscale", "clip-before-unscale", "clipping sees scaled gradients", "--amp float16", 1),
    alone("clip-each-micro-batch", "clip-early", "clipping after each micro-batch", "--accumulate 2", 1),
    alone(
        "schedule-each-micro-batch",
        "scheduler",
        "the scheduler steps with each micro-batch",
        "--accumulate 4 --batch 4",
        1,
    ),
    alone("schedule-by-rank", "scheduler", "the scheduler steps once a rank"),
    alone("schedule-twice", "scheduler", "the scheduler steps twice", processes=1),
    alone("schedule-never", "scheduler-not-stepped", "a scheduler is made, and nobody steps it", processes=1),
    alone("schedule-seldom", "scheduler", "the scheduler steps with each third step", processes=1),
    alone(
        "overflow-in-one-shard",
        "skipped-some",
        "one rank's shard overflows, and that rank alone skips the step",
        "--wrap fsdp1 --amp float16",
    ),
    Exhibit(
        "buffers-apart",
        "batch norm's statistics stay each rank's own",
        "loop.py",
        "--norm batch --wrap hand",
        2,
        "replicas-buffers",
    ),
    Exhibit(
        "means-alone",
        "ranks with unequal targets weigh alike, seen without a reference",
        "text.py",
        "--fault mean-of-ranks --batch 8",
        2,
        "mean-of-means",
    ),
    Exhibit(
        "local-norm-alone",
        "each rank clips by the norm of its own shards, seen without a reference",
        "loop.py",
        "--wrap fsdp --patch local-norm",
        2,
        "clip-own-shards",
    ),
    alone("overflow", "not-finite", "an infinite loss is applied", processes=1),
    alone("explodes", "not-finite", "weights overflow", "--optimizer SGD --epochs 6", 1),
    alone("half", "dtype", "something casts the model while it trains", "--optimizer SGD", 1),
    alone("bf16-weights", "unchanged", "changes are smaller than the last bit of bf16", processes=1),
    alone(
        "evaluate-in-training-mode",
        "evaluated-in-training-mode",
        "dropout while evaluating",
        "--evaluate --dropout 0.1",
        1,
    ),
    alone(
        "left-in-evaluation-mode",
        "trained-in-evaluation-mode",
        "no train() after evaluating",
        "--evaluate --dropout 0.1",
        1,
    ),
    alone(
        "eval-mode", "trained-in-evaluation-mode", "the model is in evaluation mode from the start", "--dropout 0.1", 1
    ),
    alone(
        "drop-evaluation", "evaluation-part", "drop_last leaves out the last batch of an evaluation", "--evaluate", 1
    ),
    alone(
        "padded-evaluation",
        "evaluation-twice",
        "an evaluation counts examples that DistributedSampler repeats",
        "--evaluate --batch 10",
        3,
    ),
    text("untied", "tied to another", "input and output embeddings came apart", "--batch 16", 1),
    text("untied-later", "untied", "tied embeddings come apart in training", "--batch 8", 1, alone=True),
    beside("summed", "summed over ranks", "gradients are summed over ranks, not averaged", "--wrap hand"),
    beside("not-divided", "without dividing", "losses of micro-batches are added", "--accumulate 2 --batch 8"),
    beside("divided-loss", "twice", "the loss is divided by accumulation twice", "--accumulate 2 --batch 8"),
    beside(
        "zero-each-micro-batch", "left out", "gradients are zeroed before each micro-batch", "--accumulate 2 --batch 8"
    ),
    beside("zeroed-loss", "is 0: its examples", "rank 1 masks its loss", ""),
    beside(
        "twice",
        "goes through the model 2 times",
        "backward runs twice on the same batch",
        processes=1,
        extra="--batch 32",
    ),
    beside("scaled-rate", "scaled by the number of ranks", "the learning rate grows with the ranks, unasked"),
    beside("one-cycle", "a different learning rate", "another schedule"),
    beside("weight-decay", "weight_decay", "another weight decay"),
    beside("other-seed", "initialized with different random numbers", "another seed"),
    beside("clip-limit", "another limit", "another limit of the norm"),
    beside("no-clip", "not at all", "no clipping"),
    beside("clip-value", "clipped differently", "clipped by value"),
    beside("wrong-backward", "only a part", "a custom function whose gradient is wrong"),
    beside("smoothed", "label smoothing", "label smoothing on one side"),
    beside(
        "batch-of-a-process",
        "the batch size is per process",
        "the global batch grows with the ranks",
        "--batch 32",
    ),
    beside(
        "batch-norm", "SyncBatchNorm", "statistics of each rank's own batch", "--norm batch", "--batch 32 --norm batch"
    ),
    beside("mixed", "different precisions", "autocast on one side alone", "--amp bfloat16 --epochs 1"),
    beside("reset-state", "optimizer's state", "the optimizer's state is cleared after each step"),
    beside(
        "other-optimizer",
        "the optimizers are",
        "Adam where AdamW is meant",
        "--optimizer Adam",
        "--batch 32 --optimizer NAdam",
    ),
    text(
        "mean-of-means",
        "unequal numbers of targets",
        "micro-batches with unequal targets weigh alike",
        "--batch 8 --accumulate 2",
        1,
    ),
    text(
        "mean-of-ranks",
        "unequal numbers of targets",
        "ranks with unequal targets weigh alike",
        "--batch 8",
        2,
    ),
    text(
        "world-forgotten",
        "divided by the number of ranks twice",
        "sums are divided by all targets, and averaged over ranks",
        "--batch 8",
    ),
    text(
        "first-counts",
        "unequal numbers of targets",
        "every micro-batch is divided by the first one's targets",
        "--batch 8 --accumulate 2",
        1,
    ),
    text("padding-counts", "padding counts as a target", "padding counts as a target", "--batch 8"),
    text(
        "last-left-out",
        "backward is not called",
        "backward is not called on the last micro-batch",
        "--batch 8 --accumulate 2",
        1,
    ),
    Exhibit(
        "trainer-accumulation",
        "Trainer does not divide the loss of a model that computes it itself (BERT's classifier) by accumulation",
        "engines.py",
        "--engine trainer --batch 4 --accumulate 2",
        1,
        "2 (the micro-batches of a step)",
        "--engine trainer --batch 8",
    ),
    Exhibit(
        "accelerate-divided-twice",
        "the script divides the loss by accumulation, and accelerator.backward does it again",
        "engines.py",
        "--engine accelerate --batch 4 --accumulate 2 --fault divided-twice",
        1,
        "divided by the number of micro-batches twice",
        "--engine accelerate --batch 8",
    ),
    Exhibit(
        "deepspeed-summed",
        "losses are multiplied by the number of ranks under ZeRO 2",
        "sharded.py",
        "--stage 2 --fault summed",
        2,
        "number of ranks",
        "--batch 32",
    ),
    Exhibit(
        "deepspeed-default-clipping",
        "DeepSpeed clips at 1.0 where gradient_clipping is not in the config",
        "sharded.py",
        "--stage 2 --fault default-clipping",
        2,
        "not at all, on one side",
        "--batch 32",
    ),
)


FAULTS = (*AS_RELEASED, *OWN, *FROM_REPORTS)

HEALTHY = (
    Healthy("loop.py", "--batch 32"),
    Healthy("loop.py", "--batch 16", 2, "--batch 32"),
    Healthy("loop.py", "--batch 8", 4, "--batch 32"),
    Healthy("loop.py", "--batch 16 --wrap fsdp", 2, "--batch 32"),
    Healthy("loop.py", "--batch 16 --wrap hand", 2, "--batch 32"),
    Healthy("loop.py", "--batch 16 --accumulate 2", 1, "--batch 32"),
    Healthy("loop.py", "--batch 8 --accumulate 2", 2, "--batch 32"),
    Healthy("loop.py", "--batch 8 --accumulate 2 --wrap fsdp", 2, "--batch 32"),
    Healthy("loop.py", "--batch 32 --amp bfloat16"),
    Healthy("loop.py", "--batch 16 --amp bfloat16", 2, "--batch 32 --amp bfloat16"),
    Healthy("loop.py", "--batch 32 --amp float16"),
    Healthy("loop.py", "--batch 16 --amp float16", 2, "--batch 32 --amp float16"),
    Healthy("loop.py", "--batch 32 --fault zero-to-zero", 1, "--batch 32"),
    Healthy("loop.py", "--batch 32 --evaluate --dropout 0.1"),
    Healthy("loop.py", "--batch 16 --evaluate --dropout 0.1", 2),
    Healthy("loop.py", "--batch 16 --evaluate", 2, "--batch 32 --evaluate"),
    Healthy("loop.py", "--batch 32 --norm batch"),
    Healthy("loop.py", "--batch 16 --norm batch", 2),
    Healthy("loop.py", "--batch 16 --wrap fsdp1 --amp float16", 2),
    Healthy("loop.py", "--batch 8 --fault schedule-by-epoch --epochs 5"),
    Healthy("loop.py", "--batch 8 --fault schedule-by-epoch --stop 6"),
    Healthy("loop.py", "--batch 16 --fault schedule-by-score", 2),
    *(
        Healthy("loop.py", f"--batch 16 --optimizer {name}", 2, f"--batch 32 --optimizer {name}")
        for name in ("SGD", "Adam", "NAdam", "RMSprop")
    ),
    *(
        Healthy("loop.py", f"--batch 32 --optimizer {name}")
        for name in ("Adagrad", "Adamax", "RAdam", "Adadelta", "ASGD", "Rprop")
    ),
    Healthy("loop.py", "--batch 32 --epochs 4"),
    Healthy("loop.py", "--batch 16 --fault no-clip", 2, "--batch 32 --fault no-clip"),
    Healthy("loop.py", "--batch 16 --fault one-cycle", 2, "--batch 32 --fault one-cycle"),
    Healthy("text.py", "--batch 16"),
    Healthy("text.py", "--batch 8", 2, "--batch 16"),
    Healthy("text.py", "--batch 4", 4, "--batch 16"),
    Healthy("text.py", "--batch 8 --accumulate 2", 1, "--batch 16"),
    Healthy("text.py", "--batch 4 --accumulate 2", 2, "--batch 16"),
    Healthy("sharded.py", "--batch 32"),
    *(Healthy("sharded.py", f"--stage {stage}", 2, "--batch 32") for stage in (1, 2, 3)),
    Healthy("sharded.py", "--stage 2 --batch 8 --accumulate 2", 2, "--batch 32"),
    Healthy("engines.py", "--engine accelerate"),
    Healthy("engines.py", "--engine accelerate --batch 4", 2),  # beside one process: the scheduler steps twice
    Healthy("engines.py", "--engine accelerate --batch 4 --accumulate 2", 1, "--engine accelerate --batch 8"),
    Healthy("engines.py", "--engine trainer"),
    Healthy("engines.py", "--engine trainer --batch 4", 2),
    Healthy("engines.py", "--engine trainer --model gpt2 --batch 4 --accumulate 2", 1, "--engine trainer --model gpt2"),
    Healthy("loop.py", "--batch 16 --wrap fsdp1", 2, "--batch 32"),
    Healthy("loop.py", "--batch 16 --wrap fsdp1 --original", 2, "--batch 32"),
    Healthy("loop.py", "--batch 8 --accumulate 2 --wrap fsdp1", 2, "--batch 32"),
    Healthy("loop.py", "--batch 32 --wrap compile", 1, "--batch 32"),
    Healthy("loop.py", "--batch 16 --checkpoint", 2, "--batch 32"),
    Healthy("loop.py", "--batch 16 --checkpoint --wrap fsdp", 2, "--batch 32"),
    Healthy("loop.py", "--batch 16 --checkpoint --wrap fsdp1 --original", 2, "--batch 32"),
    Healthy("loop.py", "--batch 32 --workers 2"),
    Healthy("loop.py", "--workers 2 --batch 32 --fault numpy-noise"),
    Healthy("engines.py", "--engine resumed", 1, "--engine resumed --fault whole-epoch"),
    Healthy("engines.py", "--engine resumed --batch 4", 2, "--engine resumed"),
    Healthy(
        "engines.py", "--engine resumed --epochs 2 --set-epoch", 1, "--engine resumed --epochs 2 --fault whole-epoch"
    ),
    Healthy(
        "megatron_shards.py",
        "--strategy 3 --batch 8 --accumulate 4",
        1,
        "--batch 32",
        ("megatron-fsdp==0.6.1", "einops==0.8.2"),
    ),
    Healthy("engines.py", "--engine litdata", 1, "--engine litdata --fault whole-epoch", ("litdata==0.2.76", *LITDATA)),
    Healthy("engines.py", "--engine zero --batch 4 --accumulate 2", 2, "--engine plain --batch 16"),
    Healthy("engines.py", "--engine checkpoint"),
    Healthy("sharded.py", "--stage 2 --batch 4 --accumulate 4 --offload", 2, "--batch 32"),
    Healthy("sharded.py", "--stage 2 --batch 8 --accumulate 2 --offload --boundary", 2, "--batch 32"),
    Healthy("loop.py", "--batch 16 --workers 2", 2),
    Healthy("loop.py", "--batch 16 --reuse", 2, "--batch 32 --reuse"),
    Healthy("loop.py", "--batch 16 --reuse --wrap fsdp", 2, "--batch 32 --reuse"),
    Healthy("loop.py", "--batch 8 --wrap fsdp", 4, "--batch 32"),
    Healthy("loop.py", "--batch 8 --wrap hand", 4, "--batch 32"),
    Healthy("parallel.py", "--batch 32"),
    Healthy("parallel.py", "--batch 32", 2, "--batch 32"),
    Healthy("parallel.py", "--cut tensor", 2, "--batch 32"),
    Healthy("parallel.py", "--cut tensor-data", 4, "--batch 32"),
    Healthy("parallel.py", "--cut stages", 2, "--batch 32"),
    Healthy("parallel.py", "--cut stages --micro 4", 2, "--batch 32"),
    Healthy("parallel.py", "--cut optimizer", 2, "--batch 32"),
    Healthy("variants.py", "gan"),
    Healthy("variants.py", "frozen"),
    Healthy("variants.py", "lbfgs"),
    Healthy("variants.py", "sparse"),
    Healthy("variants.py", "average"),
    Healthy("variants.py", "groups"),
    Healthy("variants.py", "own-schedule"),
    Healthy("variants.py", "streamed"),
    Healthy("variants.py", "second-model"),
    Healthy("variants.py", "skipped-layers"),
)
