"""The options of fsdp2 (`strategy.options`), and how often it gathers.

In: a run and the number of processes. Out: nothing, or an error that names the key; and which of the two ways a run
takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lockstep.config.run import Run, RunError
from lockstep.distributed.gpus import share_gpus
from lockstep.strategies.engines import layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEP, MICRO_BATCH = "step", "micro_batch"
INSTEAD = f"strategy.options.gather={STEP}, under which every rank has the whole weights, or strategy.name=ddp"
_GATHER = {STEP: STEP, MICRO_BATCH: MICRO_BATCH, "piece": MICRO_BATCH}
_FSDP = {  # options that FSDP itself is asked for
    "replicate",
    "tensor_parallel",
    "reshard_after_forward",
    "cpu_offload",
    "param_dtype",
    "reduce_dtype",
    "blocks",
}


def gather(run: Run) -> str | None:
    """`step` or `micro_batch`; None where it is left to the memory of the machines. Who names an option of FSDP's asks
    for FSDP; and without `exact` the two add up in other orders, so memory may not decide."""
    options = run.strategy.options
    if "gather" in options:
        return _GATHER.get(str(options["gather"]), MICRO_BATCH)  # `check` refuses what is neither
    if _FSDP & set(options) or not run.strategy.exact:
        return MICRO_BATCH
    return STEP if share_gpus(run) else None


def check(run: Run, processes: int) -> None:
    """Errors: `RunError` for what cannot work."""
    options = run.strategy.options
    if unknown := set(options) - _FSDP - {"gather"}:
        raise RunError(
            f"strategy.options: fsdp2 has no option {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(_FSDP | {'gather'}))}"
        )
    if options.get("gather", STEP) not in list(_GATHER):
        raise RunError(f"strategy.options.gather: {options['gather']!r} is not {STEP} or {MICRO_BATCH}")
    if gather(run) == STEP and (others := sorted(_FSDP & set(options))):
        raise RunError(
            f"strategy.options.{others[0]}: is FSDP's, which gathers for every micro-batch; under gather: {STEP} every "
            f"rank has the whole weights during a step. Leave it out, or set strategy.options.gather={MICRO_BATCH}"
        )
    if gather(run) == MICRO_BATCH and share_gpus(run):
        raise RunError(
            "launch.processes_per_gpu: FSDP gathers and reduces on streams of its own, which gloo does not keep apart; "
            f"leave it out, or set strategy.options.gather={STEP} and no option of FSDP's"
        )
    own = {"tensor_parallel", "param_dtype", "reduce_dtype"} & set(options)
    if own and run.model.trained_in_bfloat16:
        raise RunError(f"strategy.options.{min(own)}: not with model.dtype=bfloat16, which says it; leave one out")
    _check_ranks(options, processes)
    _check_kinds(options)
    if (tensor := options.get("tensor_parallel", 1)) > 1:
        if layers.own_model(run):
            raise RunError("strategy.options.tensor_parallel: transformers has no plan for a model of your own")
        layers.tensor_plan(run, tensor)


def policies(run: Run) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """FSDP's own mixed precision: of a block, and of the whole, which returns logits."""
    if run.model.trained_in_bfloat16:  # shards are the masters; leaves are bfloat16, and are added up in float32
        return (MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),) * 2
    param, reduce = (DTYPES.get(str(run.strategy.options.get(key))) for key in ("param_dtype", "reduce_dtype"))
    logits = torch.float32 if param or reduce else None
    return MixedPrecisionPolicy(param, reduce), MixedPrecisionPolicy(param, reduce, logits)


def _check_ranks(options: dict[str, Any], processes: int) -> None:
    for key in ("replicate", "tensor_parallel"):
        if not isinstance(value := options.get(key, 1), int) or isinstance(value, bool) or value < 1:
            raise RunError(f"strategy.options.{key}: {value!r} is not a positive number of ranks")
    replicate, tensor = options.get("replicate", 1), options.get("tensor_parallel", 1)
    if processes % (replicate * tensor):
        raise RunError(
            f"strategy.options: {processes} processes cannot be {replicate} replica(s) of a multiple of {tensor} "
            f"rank(s); choose replicate and tensor_parallel so that their product divides the processes"
        )
    if replicate > 1 and replicate * tensor == processes:
        raise RunError(
            f"strategy.options.replicate: {replicate} copies on {processes} processes leave nothing to shard; "
            "use strategy.name=ddp, or fewer copies"
        )
    reshard, shards = options.get("reshard_after_forward", True), processes // (replicate * tensor)
    if not isinstance(reshard, bool) and (not isinstance(reshard, int) or reshard < 1 or shards % reshard):
        raise RunError(
            f"strategy.options.reshard_after_forward: {reshard!r} is not true, false, or a number of ranks that "
            f"divides the {shards} that share the model"
        )


def _check_kinds(options: dict[str, Any]) -> None:
    for key in ("param_dtype", "reduce_dtype"):
        if key in options and options[key] not in DTYPES:
            raise RunError(f"strategy.options.{key}: {options[key]!r} is not one of {', '.join(DTYPES)}")
    blocks, offload = options.get("blocks", []), options.get("cpu_offload", False)
    if not isinstance(blocks, list) or not all(isinstance(name, str) for name in blocks):
        raise RunError(f"strategy.options.blocks: {blocks!r} is not a list of names of modules")
    if not isinstance(offload, bool):
        raise RunError(f"strategy.options.cpu_offload: {offload!r} is not true or false")
