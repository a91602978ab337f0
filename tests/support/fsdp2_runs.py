"""Steps under FSDP2 with its options."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.distributed.world import World
from support.harness import build_with_feed, digest, rank_0_of, tiny

LLAMA = {
    "type": "llama",
    "config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 32,
    },
}


def steps_of(world: World, run: Run, steps: int = 3) -> dict[str, Any]:
    """Steps whose first rate is 0, so that the third is the first with changed weights."""
    _, strategy, feed = build_with_feed(run, world)
    results = [strategy.train_step(feed.make(t), learning_rate(run.optim, t, steps)) for t in range(steps)]
    found = {
        "digest": digest(strategy.state.state_dict()),
        "loss": [float(r.loss) for r in results],
        "norm": [float(r.grad_norm) for r in results],
        "weights": {k: v.clone() for k, v in strategy.state.state_dict().items() if k.startswith("model.")},
        "held": {
            n: (p.placements if isinstance(p, DTensor) else None, p.numel())
            for n, p in strategy.model.named_parameters()
        },
        "local": sum(p.to_local().numel() for p in strategy.model.parameters() if isinstance(p, DTensor)),
        "dtypes": {p.dtype for p in strategy.model.parameters()},
        "exported": digest(exported) if (exported := strategy.state.export()) is not None else None,
    }
    strategy.close()
    return found


def of(ranks: int, *overrides: str, **values: Any) -> dict[str, Any]:
    run = tiny(*overrides, **values)
    return rank_0_of(ranks, steps_of, run, alike=("loss", "norm"))
