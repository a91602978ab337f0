"""benchmarks/gpu.py works without a GPU: a long test runs all of it, at a small size, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu


def test_mfu_is_six_times_the_numbers_and_attention() -> None:
    job = next(job for job in gpu.JOBS if job.name == "gpt2")
    numbers = 124_439_808  # of GPT-2 as its paper has it, its head tied
    expected = (6 * numbers + 12 * 12 * 768 * 1024) * 1e5 / 989e12
    assert gpu.mfu(job, 1e5, "NVIDIA H100 80GB HBM3") == pytest.approx(expected)
    assert gpu.mfu(job, 1e5, "a card of which no rate is known") is None
    assert gpu.mfu(next(job for job in gpu.JOBS if job.adapter), 1e5, "NVIDIA H200") is None


def test_rates_leave_out_the_first_steps() -> None:
    job = next(job for job in gpu.JOBS if job.name == "gpt2")
    assert gpu.rate(job, {"seconds": [100.0, 100.0, 1.0, 2.0, 4.0]}) == 32 * 1024 / 2.0


def test_other_weights_are_seen() -> None:
    result = {"card": "a card", "tiny": False, "versions": {}, "took_s": 1.0, "rows": [], "left_out": {}, "errors": {}}
    text = gpu.table(result | {"bits": {"single": "a" * 16, "ddp": "b" * 16, "fsdp2": {"error": "why"}}})
    lines = text.splitlines()
    assert f"| single | {'a' * 16} | same |" in lines
    assert f"| ddp | {'b' * 16} | **OTHER** |" in lines
    assert "| fsdp2 |  | failed |" in lines
    assert gpu.NOT_A_FIGURE not in text


def test_memory_is_told_as_peers_tell_it(tmp_path: Path) -> None:
    """lockstep records memory in units of 10^9 bytes, torch's is counted in units of 2^30."""
    assert gpu._held(tmp_path) is None
    rows = [{"step": 1, "memory_gb/rank0": 9.0}, {"gpu_memory_gb/rank0": 2.147483648, "gpu_memory_gb/rank1": 1.0}]
    (tmp_path / "system.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gpu._held(tmp_path) == 2.0


def test_every_contender_has_a_peer_or_is_lockstep() -> None:
    import gpu_peers

    kinds = {name.partition(":")[0] for job in gpu.JOBS for name in job.contenders}
    assert kinds - set(gpu.OURS) <= set(gpu_peers.CONTENDERS)
    assert {"loop_compiled", "trainer", "trainer_liger", "accelerate"} <= kinds


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_of_it_on_a_cpu(tmp_path: Path) -> None:
    """The output has rates of lockstep and a peer, and the bits of all processes and of a stopped run, and is marked as
    no benchmark."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--tiny", "--jobs", "minilm", "--rounds", "2"]
    said = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=850)
    assert said.returncode == 0, said.stdout + said.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["contender"]: row["rounds"] for row in result["rows"]} == {"lockstep": 2, "accelerate": 2}
    assert all(row["least"] <= row["rate"] <= row["most"] for row in result["rows"])
    assert all(row["mfu"] is None for row in result["rows"])
    assert len(result["bits"]) == 7
    assert len(set(result["bits"].values())) == 1
    assert not result["errors"]
    assert gpu.NOT_A_FIGURE in (tmp_path / "gpu.md").read_text()
