"""The tracer on a CUDA device: the bits of an untraced run, and no wait for the device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep_trace
from lockstep_trace.findings import findings
from lockstep_trace.read import read
from support.harness import lockstep_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = """
import hashlib, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel

precision, device, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
rest = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1} if len(sys.argv) > 4 else {
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=32, vocab_size=96, **rest)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
rows = torch.randint(0, 96, (128, 32), generator=torch.Generator().manual_seed(1))
kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
for step in range(8):
    optimizer.zero_grad()
    mine = rows[16 * step : 16 * (step + 1)]
    for part in mine.split(batch):
        part = part.to(device)
        with torch.autocast(device, kind, kind is not None):
            loss = model(input_ids=part, labels=part).loss * len(part) / len(mine)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
state = [p.detach().cpu() for p in model.parameters()]
state += [value.cpu() for p in model.parameters() for value in optimizer.state[p].values()]
print(hashlib.sha256(b"".join(t.numpy().tobytes() for t in state)).hexdigest())
"""


def command(folder: Path, *words: str, status: int = 0) -> str:
    environment = lockstep_environment(folder / "cache") | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    line = [sys.executable, "-m", "lockstep", *words] if words[0] != "script.py" else [sys.executable, *words]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_cpu_and_a_gpu_are_compared(tmp_path: Path) -> None:
    """Micro-batches on a GPU beside whole batches on the CPU: the same training, to rounding; a missing division is
    found."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for folder, device, batch in (("cpu", "cpu", "16"), ("gpu", "cuda", "4")):
        command(tmp_path, "trace", "-o", folder, "--", sys.executable, "script.py", "fp32", device, batch)
    command(tmp_path, "diff", "cpu", "gpu")
    script.write_text(SCRIPT.replace(" * len(part) / len(mine)", ""))
    command(tmp_path, "trace", "-o", "wrong", "--", sys.executable, "script.py", "fp32", "cuda", "4")
    assert "likely" in command(tmp_path, "diff", "cpu", "wrong", status=1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_traced_run_has_the_bits_of_an_untraced_one(tmp_path: Path, precision: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ("script.py", precision, "cuda", "8", "dropout")
    plain = command(tmp_path, *words)
    traced = command(tmp_path, "trace", "-o", "trace", "--", sys.executable, *words)
    assert plain.split() == [word for word in traced.split() if len(word) == 64]
    trace = read(tmp_path / "trace")
    assert len(trace.ranks[0].steps[0]) == 8
    assert not findings(trace)


@pytest.mark.parametrize("level", ["losses", "gradients", "modules"])
def test_no_step_waits_for_the_device(tmp_path: Path, level: str) -> None:
    """torch.cuda.set_sync_debug_mode makes each operation that waits an error, as a control shows. Only the first
    five steps are searched for gradients that are never zeroed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.ones(8, 6, device="cuda"), torch.ones(8, dtype=torch.int64, device="cuda")
    with lockstep_trace.traced(model, optimizer, folder=tmp_path, level=level):
        try:
            for step in range(12):
                torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            with pytest.raises(RuntimeError, match="synchronizing"):
                float(loss.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = next(tmp_path.glob("rank-*.jsonl")).read_text().splitlines()
    kinds = [record["kind"] for record in map(json.loads, lines)]
    assert "error" not in kinds
    assert kinds.count("step") == 12
