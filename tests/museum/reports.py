"""Addresses of public reports of silent faults, and the exhibits made from them.

The expected causes of `FROM_REPORTS` were written down before the first run.
"""

from __future__ import annotations

from dataclasses import dataclass

from museum.exhibit import Exhibit

SITE = "https://github.com/"


@dataclass(frozen=True)
class Report:
    """`how`: `version` (the report's library in a version that has the fault), `patch` (`patches.py` puts the fault
    back into the installed library), `library` (the installed library, unpatched, used as in the report), `mechanism`
    (what the report says is wrong, planted in a script of ours), `planted` (a fault of our own that the report's author
    met, too)."""

    where: str
    how: str = "planted"
    package: str = ""  # of `library`

    @property
    def link(self) -> str:
        owner, number = self.where.split("#")
        return f"{SITE}{owner}/issues/{number}"


REPORTS = {
    "no-set-epoch": Report("pytorch/pytorch#31771", "library", "torch"),
    "no-sampler": Report("huggingface/transformers#11254"),
    "sampler-seed": Report("NVlabs/LongLive#74"),
    "padded-evaluation": Report("pytorch/pytorch#25162", "library", "torch"),
    "evaluate-in-training-mode": Report("karpathy/nanoGPT#240"),
    "left-in-evaluation-mode": Report("fartashf/vsepp#4"),
    "schedule-by-rank": Report("huggingface/transformers#24088", "mechanism"),
    "untied": Report("facebookresearch/lingua#75", "mechanism"),
    "untied-later": Report("NVIDIA/Megatron-LM#656"),
    "clip-own-shard": Report("pytorch/pytorch#170862", "mechanism"),
    "mean-of-means": Report("huggingface/transformers#34191", "mechanism"),
    "mean-of-ranks": Report("huggingface/transformers#34242", "mechanism"),
    "world-forgotten": Report("huggingface/transformers#37474", "mechanism"),
    "not-divided": Report("huggingface/trl#4935"),
    "trainer-accumulation": Report("huggingface/trl#5710", "library", "transformers"),
    "deepspeed-default-clipping": Report("deepspeedai/DeepSpeed#8068", "library", "deepspeed"),
    "doubled": Report("NVIDIA/Megatron-LM#6660", "mechanism"),
    "one-zero": Report("pytorch/pytorch#144045", "mechanism"),
    "second-use": Report("deepspeedai/DeepSpeed#8224", "mechanism"),
    "one-shard": Report("verl-project/verl#7493", "library", "torch"),
    "same-workers": Report("pytorch/pytorch#5059", "mechanism"),
    "whole-stream": Report("huggingface/datasets#5360", "mechanism"),
    "inflated": Report("huggingface/transformers#46775", "mechanism"),
    "divided-again": Report("modelscope/ms-swift#10117", "mechanism"),
    "wider-count": Report("huggingface/trl#6024", "mechanism"),
    "deepspeed-manual-accumulation": Report("allenai/open-instruct#1498", "library", "deepspeed"),
    "accelerate-schedule": Report("huggingface/diffusers#8312", "library", "accelerate"),
    "stream-of-datasets": Report("huggingface/datasets#5360", "library", "datasets"),
    "deepspeed-0.18.2": Report("deepspeedai/DeepSpeed#7718", "version"),
    "deepspeed-0.19.5": Report("deepspeedai/DeepSpeed#8224", "version"),
    "transformers-4.45": Report("huggingface/transformers#34191", "version"),
    "transformers-4.47-ranks": Report("huggingface/transformers#34242", "version"),
    "transformers-4.47-accumulation": Report("huggingface/transformers#37766", "version"),
    "offload-drops": Report("deepspeedai/DeepSpeed#7967", "patch"),
    "offload-boundary": Report("deepspeedai/DeepSpeed#7981", "patch"),
    "warmup-groups": Report("deepspeedai/DeepSpeed#8171", "patch"),
    "cosine-groups": Report("deepspeedai/DeepSpeed#7969", "patch"),
    "resumed-order": Report("huggingface/accelerate#4071", "patch"),
    "resumed-state": Report("KempnerInstitute/KempnerForge#115", "library", "torch"),
    "numpy-workers": Report("pytorch/pytorch#5059", "patch"),
    "first-label-counts": Report("huggingface/transformers#46204", "patch"),
    "local-norm": Report("pytorch/pytorch#170862", "patch"),
    "ranks-not-counted": Report("huggingface/transformers#37474", "patch"),
    "smoothed-mean": Report("huggingface/transformers#46731", "patch"),
    "distilled-mean": Report("huggingface/trl#6006", "patch"),
    "router-loss": Report("huggingface/transformers#48690", "library", "transformers"),
    "swift-epoch": Report("modelscope/ms-swift#10050", "version"),
    "accelerate-zero": Report("huggingface/accelerate#3877", "version"),  # says no DeepSpeed: the newest of its day
    "epoch-twice": Report("huggingface/accelerate#4233", "library", "accelerate"),
    "other-ranks": Report("Lightning-AI/litData#878", "version"),
    "megatron-fsdp-0.3.1": Report("NVIDIA/Megatron-LM#6660", "version"),
    "megatron-fsdp-0.6.1": Report("NVIDIA/Megatron-LM#5974", "version"),
    "state-before-training": Report("pytorch/torchtitan#4382", "library", "torch"),
}

# of FROM_REPORTS, what the first run came to
FIRST_RUN = "10 were named rightly at once, and `wider-count` after its cause was added"

FROM_REPORTS = (
    Exhibit(
        "doubled",
        "the gradient buffer is reduced with itself at each micro-batch",
        "loop.py",
        "--fault doubled --accumulate 2 --batch 8",
        2,
        "counted twice",
        "--batch 32",
    ),
    Exhibit(
        "one-zero",
        "the gradient of one small parameter is zero",
        "loop.py",
        "--fault one-zero",
        1,
        "only a part",
        "--batch 16",
    ),
    Exhibit(
        "second-use",
        "the gradient of a layer that is used twice lacks the second use",
        "loop.py",
        "--fault second-use --reuse --batch 16",
        2,
        "only a part",
        "--batch 32 --reuse",
    ),
    Exhibit(
        "one-shard",
        "FSDP1 with sharding groups of one rank does not reduce over replicas",
        "loop.py",
        "--fault one-shard --wrap fsdp1 --original",
        2,
        "not-reduced",
    ),
    Exhibit(
        "same-workers",
        "workers of a loader draw the same noise",
        "loop.py",
        "--fault same-workers --workers 2 --batch 32",
        1,
        "same-workers",
    ),
    Exhibit("whole-stream", "each rank reads the whole stream", "loop.py", "--fault whole-stream", 2, "same-examples"),
    Exhibit(
        "inflated",
        "ranks of a sequence-parallel group divide by their share of the targets",
        "text.py",
        "--fault inflated --batch 8",
        2,
        "(the number of ranks) times",
        "--batch 16",
    ),
    Exhibit(
        "divided-again",
        "a loss that is divided by the step's targets is divided by accumulation, too",
        "text.py",
        "--fault divided-again --batch 8 --accumulate 2",
        1,
        "divided by the number of micro-batches twice",
        "--batch 16",
    ),
    Exhibit(
        "wider-count",
        "the loss is divided by the targets of two steps",
        "text.py",
        "--fault wider-count --batch 16",
        1,
        "divided by the wrong number",
        "--batch 16",
    ),
    Exhibit(
        "deepspeed-manual-accumulation",
        "ZeRO 2 keeps the last backward's gradient where the script accumulates by itself",
        "sharded.py",
        "--stage 2 --fault manual-accumulation --batch 8 --accumulate 2",
        2,
        "left out",
        "--batch 32",
    ),
    Exhibit(
        "accelerate-schedule",
        "a prepared scheduler is stepped once a process, and its length does not count that",
        "engines.py",
        "--engine accelerate --batch 4",
        2,
        "Accelerate steps a prepared scheduler once a process",
        "--engine accelerate --batch 8",
    ),
)

TRAINER = "--engine trainer --model gpt2"
OLD = ("transformers==4.47.1", "tokenizers==0.21.4", "huggingface-hub==0.36.0", "accelerate==1.2.1")
OLDER = ("transformers==4.45.2", "tokenizers==0.20.3", "huggingface-hub==0.26.5", "accelerate==1.0.1")
LITDATA = (  # what litdata imports
    "boto3==1.44.8",
    "botocore==1.44.8",
    "jmespath==1.1.0",
    "lightning-utilities==0.15.3",
    "s3transfer==0.19.3",
    "tifffile==2026.3.3",
)
AS_RELEASED = (
    Exhibit(
        "stream-of-datasets",
        "each rank reads the whole of an iterable data set of datasets",
        "engines.py",
        "--engine stream",
        2,
        "same-examples",
    ),
    Exhibit(
        "deepspeed-0.18.2",
        "ZeRO 2 leaves out gradients of micro-batches",
        "sharded.py",
        "--stage 2 --batch 8 --accumulate 2",
        2,
        "left out",
        "--batch 32",
        ("deepspeed==0.18.2",),
    ),
    Exhibit(
        "megatron-fsdp-0.3.1",
        "the gradient buffer of a group of one rank is added to itself at each micro-batch",
        "megatron_shards.py",
        "--strategy 3 --batch 8 --accumulate 4",
        1,
        "counted twice",
        "--batch 32",
        ("megatron-fsdp==0.3.1", "einops==0.8.2"),
    ),
    Exhibit(
        "megatron-fsdp-0.6.1",
        "the optimizer makes its state by a step of zeros, which AdamW counts: every update is too small at first",
        "megatron_shards.py",
        "--strategy 3 --batch 32 --optimizer AdamW",
        1,
        "optimizer's state (moments",
        "--batch 32 --optimizer AdamW",
        ("megatron-fsdp==0.6.1", "einops==0.8.2"),
    ),
    Exhibit(
        "state-before-training",
        "torch's distributed checkpoint reads the state of a new optimizer by a step of zeros, which AdamW counts",
        "loop.py",
        "--fault state-before-training --batch 32",
        1,
        "optimizer's state (moments",
        "--batch 32",
    ),
    Exhibit(
        "deepspeed-0.19.5",
        "a loss through the engine and beside it is divided by accumulation on one way alone",
        "sharded.py",
        "--stage 2 --batch 8 --accumulate 2 --twice",
        2,
        "left out",
        "--batch 32 --twice",
        ("deepspeed==0.19.5",),
    ),
    Exhibit(
        "transformers-4.45",
        "Trainer takes the mean of micro-batches' mean losses",
        "engines.py",
        f"{TRAINER} --batch 4 --accumulate 2 --no-datasets",
        1,
        "unequal numbers of targets",
        TRAINER,
        OLDER,
    ),
    Exhibit(
        "transformers-4.47-ranks",
        "Trainer takes the mean of ranks' mean losses",
        "engines.py",
        f"{TRAINER} --batch 4 --no-datasets",
        2,
        "unequal numbers of targets",
        TRAINER,
        OLD,
    ),
    Exhibit(
        "transformers-4.47-accumulation",
        "Trainer does not divide by accumulation where a model takes no number of targets",
        "engines.py",
        "--engine trainer --batch 4 --accumulate 2 --no-datasets",
        1,
        "2 (the micro-batches of a step)",
        "--engine trainer",
        OLD,
    ),
    Exhibit(
        "offload-drops",
        "ZeRO 2 with offload_optimizer drops gradients of micro-batches after the first",
        "sharded.py",
        "--stage 2 --batch 4 --accumulate 4 --offload --patch offload-drops",
        2,
        "left out",
        "--batch 32",
    ),
    Exhibit(
        "offload-boundary",
        "ZeRO 2 with offload_optimizer keeps the last backward's gradient where the script says which is the last",
        "sharded.py",
        "--stage 2 --batch 8 --accumulate 2 --offload --boundary --patch offload-boundary",
        2,
        "left out",
        "--batch 32",
    ),
    Exhibit(
        "warmup-groups",
        "WarmupLR gives every group of parameters the first one's learning rate",
        "sharded.py",
        "--batch 32 --warmup WarmupLR --patch warmup-groups",
        1,
        "a different learning rate or schedule",
        "--batch 32 --warmup WarmupLR",
    ),
    Exhibit(
        "cosine-groups",
        "WarmupCosineLR starts from 0 in the first group of parameters alone",
        "sharded.py",
        "--batch 32 --warmup WarmupCosineLR --patch cosine-groups",
        1,
        "a different learning rate or schedule",
        "--batch 32 --warmup WarmupCosineLR",
    ),
    Exhibit(
        "resumed-order",
        "a resumed run goes on in the order of the first epoch",
        "engines.py",
        "--engine resumed --patch resumed-order",
        1,
        "epoch (set_epoch)",
        "--engine resumed",
    ),
    Exhibit(
        "resumed-state",
        "a resumed run loads weights and no moments: the optimizer's own `state_dict` is empty before a step",
        "engines.py",
        "--engine checkpoint --fault raw-state",
        1,
        "optimizer's state (moments",
        "--engine checkpoint",
    ),
    Exhibit(
        "numpy-workers",
        "workers of a data loader draw the same numbers from numpy",
        "loop.py",
        "--workers 2 --batch 32 --fault numpy-noise --patch numpy-workers",
        1,
        "same-workers",
    ),
    Exhibit(
        "first-label-counts",
        "Trainer counts the first label of each row, which is no target",
        "engines.py",
        "--engine trainer --model llama --patch first-label-counts",
        1,
        "divided by the wrong number",
        "--engine trainer --model llama",
    ),
)

AS_RELEASED += (
    Exhibit(
        "local-norm",
        "clip_grad_norm_ takes the norm of each rank's own shards under FSDP2",
        "loop.py",
        "--wrap fsdp --patch local-norm",
        2,
        "norm of its own shards",
        "--batch 32",
    ),
    Exhibit(
        "ranks-not-counted",
        "Trainer divides by the targets of all ranks, and the ranks' mean divides once more",
        "engines.py",
        f"{TRAINER} --batch 4 --patch ranks-not-counted",
        2,
        "divided by the number of ranks twice",
        TRAINER,
    ),
    Exhibit(
        "smoothed-mean",
        "Trainer's label smoothing takes the mean of each micro-batch, and nobody divides by their number",
        "engines.py",
        f"{TRAINER} --smoothing 0.1 --batch 4 --accumulate 2 --patch smoothed-mean",
        1,
        "losses of micro-batches are added",
        f"{TRAINER} --smoothing 0.1",
    ),
    Exhibit(
        "distilled-mean",
        "the loss of TRL's GKDTrainer is divided by each micro-batch's own targets",
        "engines.py",
        "--engine distilled --model gpt2 --batch 4 --accumulate 2 --patch distilled-mean",
        1,
        "losses of micro-batches are added",
        "--engine distilled --model gpt2",
    ),
    Exhibit(
        "router-loss",
        "Trainer multiplies the router's auxiliary loss by the number of ranks",
        "engines.py",
        "--engine trainer --model qwen3-moe --batch 4",
        2,
        "an auxiliary term",
        "--engine trainer --model qwen3-moe",
    ),
    Exhibit(
        "swift-epoch",
        "a resumed run goes on in the order of the first epoch",
        "engines.py",
        "--engine resumed --sampler swift",
        1,
        "epoch (set_epoch)",
        "--engine resumed --sampler swift --fault whole-epoch",
        ("ms-swift==4.5.0",),
    ),
    Exhibit(
        "accelerate-zero",
        "Accelerate's ZeRO 2 leaves out gradients of micro-batches",
        "engines.py",
        "--engine zero --batch 4 --accumulate 2",
        2,
        "left out",
        "--engine plain --batch 16",
        ("deepspeed==0.18.2", "accelerate==1.11.0"),
    ),
    Exhibit(
        "epoch-twice",
        "the epoch after a resumed one has its order again: `skip_first_batches` counts epochs on a copy of the loader",
        "engines.py",
        "--engine resumed --epochs 2",
        1,
        "same-order",
    ),
    Exhibit(
        "other-ranks",
        "one rank goes on with the state that two ranks kept, and sees a part of their rows again",
        "engines.py",
        "--engine litdata",
        1,
        "lost its position in the epoch",
        "--engine litdata --fault whole-epoch",
        ("litdata==0.2.68", *LITDATA),
    ),
)

# Reports that the museum was asked for and does not show as they are, each with the reason, and what stands for it.
NOT_SHOWN = (
    (
        "huggingface/transformers#48706",
        "the repair that was proposed of #48690, which `router-loss` shows",
    ),
    (
        "arXiv 2604.23747",
        "a paper on two faults: micro-batches that DeepSpeed's offloaded optimizer drops (`offload-drops`), and losses "
        "of micro-batches that weigh alike in OpenRLHF (`mean-of-means`)",
    ),
    (
        "marin-community/marin#7237",
        "trains in JAX, and `lockstep trace` is for torch; we could not read the report, so nothing stands for it",
    ),
    (
        "huggingface/transformers#46634",
        "we could not read it: of its days (#46628 is of 2026-06-13) we found other reports; no release from 5.10 to "
        "5.14, nor 5.23, names it in its source, and from 5.12.1 to 5.14.0 nothing in `trainer.py` changed that "
        "trains otherwise",
    ),
)

# What was seen in public scripts, in which nothing but the number of steps was changed (fetched on 2026-11-24 and
# 2026-11-30), on a machine without a GPU where `torch.accelerator` was replaced by the CPU. Of 39 scripts of the second
# day (GANs, language models, tutorials) these five had a finding. The tracer was changed after two wrong suspicions.
IN_PUBLIC_SCRIPTS = (
    (
        "pytorch/examples",
        "distributed/tensor_parallelism/tensor_parallel_example.py",
        2,
        "[not-zeroed] no `zero_grad`: each step adds to the gradients of the steps before",
    ),
    (
        "pytorch/examples",
        "distributed/ddp-tutorial-series/single_gpu.py, multigpu.py, multigpu_torchrun.py",
        2,
        "[all-zero] no parameter ever changes: the model has one output, over which cross entropy is 0",
    ),
    (
        "pytorch/examples",
        "distributed/FSDP2/example.py",
        2,
        "[not-finite] the loss is not a number from step 0 on: after `to_empty` no code sets the layers' weights, "
        "because `Transformer.reset_parameters` skips them (reported: "
        "[#1377](https://github.com/pytorch/examples/issues/1377)); [same-examples] both ranks draw the same batch",
    ),
    (
        "eriklindernoren/PyTorch-GAN",
        "implementations/acgan/acgan.py, sgan/sgan.py, infogan/infogan.py",
        1,
        "[softmax-twice] the classifier ends in `Softmax`, and `CrossEntropyLoss` applies another",
    ),
    (
        "graykode/nlp-tutorial",
        "5-2.BERT/BERT.py",
        1,
        "[layers-in-forward] each forward pass creates layers with new random weights",
    ),
    (
        "graykode/nlp-tutorial",
        "3-3.Bi-LSTM/Bi-LSTM.py",
        1,
        "[no-gradient] `lstm.weight_hh_l0_reverse`: only the first step of the reverse direction is used",
    ),
)
