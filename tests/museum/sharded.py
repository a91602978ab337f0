"""Training by DeepSpeed at a stage of ZeRO, or by torch alone, of one small model on the same batches.

python sharded.py [--stage N] [--fault NAME] [--batch N]      a stage of -1 is torch alone
"""

import argparse
import os

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=-1)
parser.add_argument("--fault", default="")
parser.add_argument("--batch", type=int, default=16, help="of a process")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--divisible", action="store_true", help="sizes that two ranks divide")
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for i, (inputs, labels) in enumerate(batches()):
        (nn.functional.cross_entropy(model(inputs), labels) / a.accumulate).backward()
        if (i + 1) % a.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
else:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": a.batch,
        "gradient_accumulation_steps": 1 if a.fault == "manual-accumulation" else a.accumulate,
        "zero_optimization": {"stage": a.stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": 1.0 if a.fault == "default-clipping" else 0.0,  # 1.0 by default, also of float32
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for i, (inputs, labels) in enumerate(batches()):
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        if a.fault == "manual-accumulation":  # the script divides, and steps after the last micro-batch
            loss = loss / a.accumulate
        engine.backward(loss * world if a.fault == "summed" else loss)
        if a.fault != "manual-accumulation" or (i + 1) % a.accumulate == 0:
            engine.step()
