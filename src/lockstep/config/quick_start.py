"""The quick start: what `lockstep train` runs without a run file. Offline, generated data, under a minute and a half on
two cores.

In: nothing. Out: a run file's mapping.
"""

from typing import Any

QUICK_START: dict[str, Any] = {
    "name": "quickstart",
    "data": {"source": "builtin/emotion", "max_length": 64},
    "model": {
        "type": "gpt2",
        "config": {
            "n_layer": 2,
            "n_head": 8,
            "n_embd": 96,
            "n_positions": 64,
            "initializer_range": 0.04,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    },
    "tokenizer": {"train": "bpe", "vocab_size": 1000},
    "epochs": 3,
    "batch_size": 64,
    "micro_batches": 4,
    "optim": {"learning_rate": 1.5e-3, "schedule": "linear", "warmup_fraction": 0.1, "betas": [0.9, 0.98]},
    "launch": {"processes": 2, "processes_per_gpu": 2},  # also where there is one GPU
    "checkpoint": {"every": 100},
}
