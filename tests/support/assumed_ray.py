"""Facts about Ray Train, seen by two workers of a cluster that it starts here, for `tests/assumptions/`.

In: nothing. Out: `facts()`: what each worker saw, and how the run ended, whose second worker fails; started once in a
process of tests, in a process of its own. No lockstep.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JOB = """
import json, logging, os, sys, threading
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

class NoGroup(TorchConfig):
    @property
    def backend_cls(self):
        return Backend

class Board:
    def __init__(self):
        self.rows = []
    def add(self, row):
        self.rows.append(row)
    def all(self):
        return self.rows

def work(config):
    import torch.distributed as dist
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero
    context = ray.train.get_context()
    rank = context.get_world_rank()
    sent = broadcast_from_rank_zero([ray.util.get_node_ip_address(), 4711 + rank])
    row = {
        "rank": rank,
        "of": [context.get_world_size(), context.get_local_rank(), context.get_local_world_size()],
        "sent": sent,
        "group": dist.is_initialized(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "folder": os.getcwd(),
    }
    ray.get(config["board"].add.remote(row))
    if rank == 1:
        raise RuntimeError("rank 1 went")

facts = {"before": ray.is_initialized()}
ray.init(address="local", logging_level=logging.ERROR, num_cpus=2)
facts["begun"] = ray.is_initialized()
board = ray.remote(num_cpus=0)(Board).remote()
trainer = TorchTrainer(
    work,
    train_loop_config={"board": board},
    torch_config=NoGroup(),
    scaling_config=ScalingConfig(
        num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1}, placement_strategy="PACK"
    ),
    run_config=RunConfig(name="ray", storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=0)),
)
caught = []
def fit():
    try:
        trainer.fit()
    except BaseException as error:
        caught.append(f"{type(error).__name__}: {error}")
thread = threading.Thread(target=fit, daemon=True)
thread.start()
thread.join(240)
facts["fit"], facts["rows"] = caught, ray.get(board.all.remote())
ray.shutdown()
facts["after"] = ray.is_initialized()
open(sys.argv[1] + "/facts.json", "w").write(json.dumps(facts))
"""


@functools.cache
def facts() -> dict[str, Any]:
    """Return what was seen. Errors: `AssertionError` with the end of what the job wrote."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", JOB, folder]
        done = subprocess.run(
            words, env=os.environ | quiet, cwd=folder, capture_output=True, text=True, check=False, timeout=290
        )
        assert done.returncode == 0, done.stderr[-3000:]
        seen: dict[str, Any] = json.loads(Path(folder, "facts.json").read_text(encoding="utf-8"))
        return seen | {"folder": os.path.realpath(folder)}
