"""Training by DeepSpeed at a stage of ZeRO, or by torch alone, of one small model on the same batches.

python sharded.py [--stage N] [--fault NAME] [--batch N]      a stage of -1 is torch alone

`--offload` keeps the optimizer's state beside the parameters (offload_optimizer), `--boundary` has the script say which
backward is a step's last one, `--twice` uses the model twice a step, the second time beside DeepSpeed's engine.
"""

import argparse
import os
import sys

import torch
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import patches

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=-1)
parser.add_argument("--fault", default="")
parser.add_argument("--batch", type=int, default=16, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--divisible", action="store_true", help="sizes that two ranks divide")
parser.add_argument("--offload", action="store_true")
parser.add_argument("--boundary", action="store_true")
parser.add_argument("--twice", action="store_true")
parser.add_argument("--warmup", help="WarmupLR or WarmupCosineLR of DeepSpeed, over two groups of parameters")
parser.add_argument("--patch", help="of patches.py")
a = parser.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
torch.manual_seed(0)
wide, classes = (32, 4) if a.divisible else (33, 3)  # numbers that two ranks divide without padding
model = nn.Sequential(nn.Linear(11, wide), nn.GELU(), nn.LayerNorm(wide), nn.Linear(wide, classes))
x = torch.randn(128, 11)
y = x[:, :3].argmax(1)
size = a.batch * a.accumulate * world


def batches():
    for step in range(128 // size):
        for rows in torch.arange(step * size, (step + 1) * size)[rank::world].chunk(a.accumulate):
            yield x[rows], y[rows]


if a.stage < 0:
    if a.patch:
        patches.apply(a.patch)
    first = {"params": model[0].parameters(), "lr": 1e-3}
    second = {"params": model[2:].parameters(), "lr": 1e-2 if a.warmup else 1e-3}
    optimizer = torch.optim.AdamW([first, second], weight_decay=0.0)
    schedule = None
    if a.warmup:
        from deepspeed.runtime import lr_schedules

        length = {"total_num_steps": 20} if a.warmup == "WarmupCosineLR" else {}
        schedule = getattr(lr_schedules, a.warmup)(optimizer, warmup_num_steps=3, **length)
    for i, (inputs, labels) in enumerate(batches()):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        if a.twice:
            loss = loss + model(inputs.flip(1)).square().mean()
        (loss / a.accumulate).backward()
        if (i + 1) % a.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
else:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # is compiled otherwise, for half a minute
    if a.patch:
        patches.apply(a.patch)
    by_hand = a.boundary or a.fault == "manual-accumulation"
    zero = {"stage": a.stage, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": a.batch,
        "gradient_accumulation_steps": 1 if by_hand else a.accumulate,
        "zero_optimization": zero | ({"offload_optimizer": {"device": "cpu"}} if a.offload else {}),
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": 1.0 if a.fault == "default-clipping" else 0.0,  # 1.0 by default, also of float32
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for i, (inputs, labels) in enumerate(batches()):
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        if a.twice:
            loss = loss + engine.module(inputs.flip(1)).square().mean()
        if by_hand:  # the script divides, and steps after the last micro-batch
            loss = loss / a.accumulate
        last = (i + 1) % a.accumulate == 0
        if a.boundary:
            engine.set_gradient_accumulation_boundary(last)
        engine.backward(loss * world if a.fault == "summed" else loss)
        if last or not by_hand:
            engine.step()
