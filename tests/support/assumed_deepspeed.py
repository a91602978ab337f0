"""Facts about DeepSpeed in a process of its own, for `tests/assumptions/`: one rank, a model of three layers whose last
one no loss uses.

In: nothing. Out: `facts()`, started once in a process of tests. No lockstep.
"""

import functools
import json
import subprocess
import sys
from typing import Any

JOB = r"""
import json, os, warnings, logging
os.environ |= {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu", "DS_IGNORE_CUDA_DETECTION": "1"}
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.utils import groups, safe_get_local_fp32_param, safe_get_local_grad
facts = {"operators": "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__}
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
before = dist.distributed_c10d._get_default_group()
deepspeed.init_distributed("gloo")
joined = [dist.distributed_c10d._get_default_group() is before, deepspeed.comm.is_initialized()]
facts["state of the process"] = (
    hasattr(groups, "_WORLD_GROUP")
    and hasattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP")
    and parameter_offload.FWD_MODULE_STACK == []
    and partition_parameters.Init.param_id == 0
    and parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0] == [0]
)

def engine(stage, steps=1, **more):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": steps,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config | more)[0]

def used(made, scale=1.0):
    return made.module[1](made.module[0](torch.ones(1, 2))).sum() * scale

# stage 1: where weights lie, what unused ones get, what accumulation divides by
made = engine(1)
start = [p.detach().clone().float() for p in made.module.parameters()]
facts["stage"] = made.zero_optimization_stage()
inner = made.optimizer
places = []
for p, offset in zip(inner.round_robin_bit16_groups[0], inner.round_robin_bit16_offsets[0]):
    part = p._hp_mapping
    low, high = part.lp_fragment_address, part.hp_fragment_address
    places.append([offset, low.start, low.numel, high.start, part.param_group_index, part.hp_fragment.numel()])
facts["places"], facts["part"] = places, int(inner.partition_size[0])
made.backward(used(made))
facts["boundary"] = made.is_gradient_accumulation_boundary()
def own_gradient(engine):
    p = next(engine.module.parameters())
    return p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group)

facts["gradient kept"] = own_gradient(made) is not None and own_gradient(made).numel() == 6
from deepspeed.utils import safe_get_full_grad
whole = [safe_get_full_grad(p) for p in made.module.parameters()]
made.step()
facts["norm"] = [float(made.get_global_grad_norm()), float(torch.stack([g.norm() for g in whole[:2]]).norm())]
facts["whole gradients"] = [list(g.shape) for g in whole]
made.set_gradient_accumulation_boundary(False)
facts["boundary that is set"] = [made.is_gradient_accumulation_boundary()]
made.set_gradient_accumulation_boundary(True)
facts["boundary that is set"] += [made.is_gradient_accumulation_boundary(), made.gradient_clipping()]
facts["moved"] = [float((p.detach().float() - s).abs().max()) > 0 for p, s in zip(made.module.parameters(), start)]
facts["skipped"] = made.skipped_steps

# stage 1: where the optimizer's weights and states are, and how they are written and read again
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from deepspeed.utils import safe_set_full_optimizer_state
inner, first, (flat,) = made.optimizer, next(made.module.parameters()), made.optimizer.single_partition_of_fp32_groups
facts["1"] = {"flat": [flat is made.optimizer.param_groups[0]["params"][0], flat.numel(), str(flat.dtype)]}
linked = [inner._hp_optimizer_states_linked]
inner.optimizer.state[flat] = {"step": torch.tensor(1.0), "exp_avg": torch.full_like(flat, 3.0)}
linked.append(safe_get_full_optimizer_state(first, "exp_avg").flatten().tolist() == [3.0] * 6)
inner._hp_optimizer_states_linked = False
inner._lazy_init_hp_params_optimizer_state()
linked.append(safe_get_full_optimizer_state(first, "exp_avg").flatten().tolist() == [3.0] * 6)
safe_set_full_optimizer_state(first, torch.full((3, 2), 4.0), "exp_avg")
facts["1"]["linked"] = [*linked, inner.optimizer.state[flat]["exp_avg"].tolist() == [4.0] * 6 + [3.0] * 10]
safe_set_full_fp32_param(first, torch.full((3, 2), 5.0))
before = first.flatten().tolist() == [5.0] * 6
inner.update_lp_params()
facts["1"]["written"] = [before, flat[:6].tolist() == [5.0] * 6, first.flatten().tolist() == [5.0] * 6]
facts["1"]["written"].append(safe_get_full_fp32_param(first).tolist() == [[5.0] * 2] * 3)
made.destroy()

sums = []
for steps in (1, 4):
    made = engine(1, steps)
    for _ in range(steps):
        loss = made.backward(used(made))
        if made.is_gradient_accumulation_boundary():
            sums.append(own_gradient(made).clone().flatten().tolist())
        made.step()
    made.destroy()
facts["sums"] = sums

# what keeps an engine from touching gradients
made = engine(1)
made.inside_no_sync_ctxt = made.optimizer._coalesce_grad_reduction = True
made.backward(used(made))
facts["left in .grad"] = [p.grad is not None for p in made.module.parameters()]
made.destroy()

# stage 3
made = engine(3)
weights = list(made.module.parameters())
coordinator = made.optimizer.parameter_offload.get_param_coordinator()
facts["3"] = {
    "empty": [p.numel() for p in weights],
    "whole": [[p.ds_numel, list(p.ds_shape), p.partition_numel()] for p in weights],
    "status": [p.ds_status.name for p in weights],
    "functions": [[name in vars(m) for name in ("pre_bwd_fn", "post_bwd_fn")] for m in made.module],
    "registry": hasattr(coordinator, "_PartitionedParameterCoordinator__inflight_param_registry"),
    "mapping": type(made.module[0]._parameters).__name__,
    "groups": [[tuple(p.ds_shape) for p in g] for g in made.optimizer.fp16_groups],
    "local": [safe_get_local_fp32_param(p).numel() for p in weights],
}
weights[0].all_gather()
facts["3"]["gathered"] = [weights[0].ds_status.name, list(weights[0].shape)]
weights[0].partition()
made.backward(made.module(torch.ones(1, 2)).sum())
facts["3"]["gradient"] = [safe_get_local_grad(p).numel() for p in weights]
from deepspeed.utils import safe_set_local_fp32_param
inner = made.optimizer
flats = inner.fp32_partitioned_groups_flat
facts["3"]["flat"] = [[flat.numel(), str(flat.dtype)] for flat in flats]
safe_set_local_fp32_param(weights[0], torch.full((6,), 5.0))
facts["3"]["first"] = flats[0][:6].tolist() == [5.0] * 6
weights[1].all_gather()
inner._partition_all_parameters()
facts["3"]["all in parts"] = [p.ds_status.name for p in weights]
for i in range(len(inner.fp16_groups)):
    inner._reassign_or_swap_out_partitioned_parameters(i)
inner.empty_partition_cache()
weights[0].all_gather()
with deepspeed.zero.GatheredParameters([weights[1]], modifier_rank=0), torch.no_grad():
    within = list(weights[1].shape)
    weights[1].fill_(9.0)
with deepspeed.zero.GatheredParameters([weights[1]]):
    facts["3"]["gathered within"] = [within, weights[1].flatten().tolist() == [9.0] * 6]
with deepspeed.zero.GatheredParameters([torch.ones(2)], enabled=False):
    facts["3"]["gathered within"].append(weights[1].numel())
from deepspeed.utils import safe_set_local_optimizer_state
inner.optimizer.state[flats[0]] = {"exp_avg": torch.zeros_like(flats[0])}
safe_set_local_optimizer_state(weights[0], torch.full((6,), 7.0), "exp_avg")
facts["3"]["state"] = inner.optimizer.state[flats[0]]["exp_avg"][:6].tolist() == [7.0] * 6
facts["3"]["parts"] = [weights[0].ds_tensor.numel(), weights[0].ds_process_group is not None]
facts["3"]["parts"].append(callable(weights[0].ds_summary))
functions = vars(made.module[0])
around = [functions[name] for name in ("pre_bwd_fn", "post_bwd_fn")]
facts["3"]["calls"] = [hasattr(each, name) for each in around for name in ("setup_context", "backward")]
import inspect
from deepspeed.runtime.zero import partitioned_param_coordinator
facts["words"] = "tracing error at step" in inspect.getsource(partitioned_param_coordinator)
facts["words"] = [facts["words"], hasattr(partition_parameters.ZeroParamStatus, "INFLIGHT")]
from deepspeed.accelerator import get_accelerator
facts["device"] = get_accelerator().device_name()
facts["3"]["then"] = [weights[0].flatten().tolist() == [5.0] * 6, list(inner.persistent_parameters)]
made.destroy()
made = engine(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 5})
facts["3"]["kept whole"] = [tuple(p.ds_shape) for p in made.optimizer.persistent_parameters]
made.destroy()

# what it makes of a config
def read(**more):
    try:
        DeepSpeedConfig({"train_batch_size": 1, **more})
        return "read"
    except Exception as error:
        kinds = getattr(error, "errors", lambda: [{"type": type(error).__name__}])()
        return kinds[0]["type"]
sections = [{"stage": 2, "overlap_com": True}, {"stage": "two"}]
facts["config"] = [read(gradient_cliping=1.0), *(read(zero_optimization=section) for section in sections)]
from deepspeed.runtime import lr_schedules
optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
warm = lr_schedules.WarmupLR(optimizer, warmup_min_lr=0.0, warmup_max_lr=1.0, warmup_num_steps=100)
for _ in range(10):
    warm.step()
facts["warmup"] = warm.get_last_lr()[0]
from accelerate import DeepSpeedPlugin
config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}
plugin = DeepSpeedPlugin(hf_ds_config=config)
values = [plugin.hf_ds_config.get_value(name) for name in ("train_micro_batch_size_per_gpu", "zero_optimization.stage")]
facts["joined"] = [*joined, values, plugin.zero_stage]
facts["joined"].append(plugin.deepspeed_config == config | {"steps_per_print": float("inf")})
print("FACTS" + json.dumps(facts))
"""


@functools.cache
def facts() -> dict[str, Any]:
    """Return what was seen. Errors: `AssertionError` with the end of what the job wrote."""
    words = [sys.executable, "-c", JOB]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FACTS"))
    seen: dict[str, Any] = json.loads(line.removeprefix("FACTS"))
    return seen
