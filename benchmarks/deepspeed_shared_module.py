"""DeepSpeed#8224: gradients of a layer that one loss reaches through the engine and beside it, by DeepSpeed's version.

In: the DeepSpeed that Python finds (another one: its folder in PYTHONPATH). Out: a line of JSON for each stage of ZeRO,
way of accumulating and way to the layer: how far the gradient of eight micro-batches is from plain autograd's, as a
share of its norm. `accumulation`: deepspeed counts micro-batches itself (gradient_accumulation_steps of 8); lockstep
leaves 1 there, says which micro-batch is the last, and asks for no division (strategies/engines/zero.py). `second`:
the layer's second use goes through the engine, or beside it (`engine.module`). One process, CPU, fp32.
Example: pip install --no-deps --target old deepspeed==0.19.5
         PYTHONPATH=old python benchmarks/deepspeed_shared_module.py
"""

from __future__ import annotations

import json
import os
import socket

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

MICRO_BATCHES = 8


def inputs() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)) for _ in range(8)]


def reference(weight: Tensor) -> Tensor:
    """Gradient of the mean over micro-batches, by autograd alone."""
    weight = weight.detach().clone().requires_grad_()
    losses = [(x @ weight.T).square().mean() + (y @ weight.T).square().mean() for x, y in inputs()]
    return torch.autograd.grad(torch.stack(losses).mean(), weight)[0]


def error(stage: int, own_count: bool, beside: bool) -> float:
    """Relative distance of DeepSpeed's gradient from `reference`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    expected = reference(model.weight)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES if own_count else 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for index, (x, y) in enumerate(inputs()):
        second = engine.module if beside else engine
        loss = engine(x).square().mean() + second(y).square().mean()
        last = index == MICRO_BATCHES - 1
        if own_count:
            engine.backward(loss)
            if not last:
                engine.step()
        else:
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(loss / MICRO_BATCHES, scale_wrt_gas=False)
    difference = safe_get_full_grad(engine.module.weight) - expected
    engine.destroy()
    return float(difference.norm() / expected.norm())


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled otherwise
    torch.distributed.init_process_group("gloo")
    for stage in (1, 2):
        for own_count in (True, False):
            for beside in (False, True):
                case = {"stage": stage, "accumulation": "deepspeed" if own_count else "lockstep"}
                case |= {"second": "beside the engine" if beside else "through the engine"}
                measured = {"error": round(error(stage, own_count, beside), 4)}
                print(json.dumps({"deepspeed": deepspeed.__version__} | case | measured), flush=True)


if __name__ == "__main__":
    main()
