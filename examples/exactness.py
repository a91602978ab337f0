"""One process, two, and two that are killed: the same bits. `python examples/exactness.py`, a minute.

Also as a notebook: `exactness.ipynb`, which `python docs/notebooks.py` makes of this file.
"""

import hashlib
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path("outputs/examples/exactness")
RUN = """
data: {source: builtin/emotion, max_length: 32, limit: 640}
model: {type: gpt2, config: {n_layer: 1, n_head: 2, n_embd: 32, n_positions: 32}}
tokenizer: {train: bpe, vocab_size: 400}
steps: 60
batch_size: 32
micro_batches: 4
checkpoint: {every: 10}
launch: {device: cpu, threads: 1}
"""


def command(name: str, processes: int) -> list[str]:
    words = ["train", str(FOLDER / "run.yaml"), f"launch.processes={processes}", f"output={FOLDER / name}", "--quiet"]
    return [sys.executable, "-m", "lockstep", *words]


def weights(name: str) -> str:
    return hashlib.sha256((FOLDER / name / "export/model.safetensors").read_bytes()).hexdigest()[:16]


# %% One process, then two
shutil.rmtree(FOLDER, ignore_errors=True)
FOLDER.mkdir(parents=True)
(FOLDER / "run.yaml").write_text(RUN)
subprocess.run(command("one", 1), check=True)
subprocess.run(command("two", 2), check=True)
# %% Two that are killed after their first checkpoint, and started again
killed = subprocess.Popen(command("killed", 2), stderr=subprocess.DEVNULL)  # Python tells of what a kill leaves
while not (FOLDER / "killed/checkpoints/latest").exists() and killed.poll() is None:
    time.sleep(0.05)
killed.send_signal(signal.SIGKILL)
killed.wait()
time.sleep(1)  # wait until its ranks notice that their launcher died
subprocess.run(command("killed", 2), check=True)
# %% The same weights, bit for bit
found = {name: weights(name) for name in ("one", "two", "killed")}
print(*(f"{name:<7} {digest}" for name, digest in found.items()), sep="\n")
assert len(set(found.values())) == 1, "the weights differ"
