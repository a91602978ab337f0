"""benchmarks/gpu.py works without a GPU: a long test runs all of it, at a small size, on a CPU."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def test_different_weights_are_reported() -> None:
    """Weights are compared with those of one process with the same keys."""
    result = {"card": "a card", "tiny": False, "versions": {}, "took_s": 1.0, "rows": [], "left_out": {}, "errors": {}}
    one, ddp, fsdp2 = (f"{name}; model.compile=whole" for name in ("single", "ddp", "fsdp2"))
    bits = {"single": "a" * 16, "ddp": "b" * 16, "fsdp2": {"error": "why"}, one: "c" * 16, ddp: "c" * 16}
    lines = gpu.table(result | {"bits": bits | {fsdp2: "a" * 16}}).splitlines()
    assert f"| single | {'a' * 16} | same |" in lines
    assert f"| ddp | {'b' * 16} | **OTHER** |" in lines
    assert "| fsdp2 |  | failed |" in lines
    assert f"| {one} | {'c' * 16} | same |" in lines
    assert f"| {ddp} | {'c' * 16} | same |" in lines
    assert f"| {fsdp2} | {'a' * 16} | **OTHER** |" in lines
    assert gpu.NOT_A_FIGURE not in lines
    assert gpu.verdict_of({ddp: "c" * 16}, ddp) == "nothing to compare with"


def test_processes_that_share_a_gpu_are_allowed_to() -> None:
    """lockstep refuses more processes than there are GPUs without that key."""
    assert gpu._sharing(4, gpu.BITS) == ("launch.processes=4", "launch.processes_per_gpu=4")
    assert gpu._sharing(4, gpu.tiny(gpu.BITS)) == ("launch.processes=4",)


def test_targets_are_of_contenders_and_the_better_other_counts() -> None:
    jobs = {job.name: job.contenders for job in gpu.JOBS}
    for job, name, others, *_ in gpu.TARGETS:
        assert {name, *others} <= set(jobs[job]), job
    rows = [("lora", gpu.WHOLE, 90.0), ("lora", "trainer", 50.0), ("lora", "trainer_liger", 100.0)]
    measured = [{"job": job, "contender": name, "rate": rate, "first_s": 1.0} for job, name, rate in rows]
    assert list(gpu.ratios(measured)) == [("lora", gpu.WHOLE, "trainer_liger", 0.9, 0.95, "rate")]


def test_a_bare_machine_gets_all_that_lockstep_needs() -> None:
    lines = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0].splitlines()
    needed = {re.split(r"[<>=\[ ]", line.strip().strip('"'))[0] for line in lines if line.strip()}
    assert needed - {"lockstep-trace", "lockstep-trace-report"} == set(gpu.NEEDED)  # from the clone


def turns_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: dict[str, Any]) -> tuple[gpu.Bench, list[str]]:
    """Return a benchmark of two jobs whose contenders all answer `told`, and the order in which they ran."""
    ran: list[str] = []

    def answers(job: gpu.Job, *_: Any, **__: Any) -> dict[str, Any]:
        ran.append(job.name)
        return told

    monkeypatch.setattr(gpu, "lockstep", answers)
    jobs = [replace(gpu.BITS, name=name, contenders=("lockstep", "lockstep:seed=1")) for name in "ab"]
    for job in jobs:
        (tmp_path / job.name).mkdir(exist_ok=True)
    bench = gpu.Bench(jobs, None, 60.0, tmp_path, lambda bench: None)
    bench.measure(2)
    return bench, ran


def test_first_contenders_of_all_jobs_run_before_second_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench, ran = turns_of(monkeypatch, tmp_path, {"seconds": [1.0], "first_s": 2.0, "whole_s": 3.0, "held_gb": None})
    assert ran == ["a", "b"] * 4
    assert {row["rounds"] for row in bench.rows("a card")} == {2}


def test_a_run_that_did_without_an_option_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A graph that could not be recorded is not measured as one."""
    told = {"seconds": [1.0], "first_s": 2.0, "whole_s": 3.0, "held_gb": None, "notes": ["runs without CUDA graphs"]}
    bench, _ = turns_of(monkeypatch, tmp_path, told)
    result = {"card": "a card", "tiny": False, "versions": {}, "took_s": 1.0} | bench.told("a card")
    lines = gpu.table(result).splitlines()
    assert lines[lines.index("Without an option:") + 1] == "- a: lockstep: runs without CUDA graphs"


def test_benchmarks_stopped_by_time_are_left_out_and_not_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench, _ = turns_of(monkeypatch, tmp_path, {"unfinished": "no end"})
    assert bench.left_out == {f"{job}: {name}": "no end" for job in "ab" for name in ("lockstep", "lockstep:seed=1")}
    assert not bench.errors()


@pytest.mark.processes
def test_a_process_that_takes_too_long_leaves_none_behind(tmp_path: Path) -> None:
    code = (
        f"import os, subprocess, sys; p = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'id')!r}, 'w')"
        ".write(str(p.pid)); p.wait()"
    )
    with pytest.raises(TimeoutError):
        gpu._started([sys.executable, "-c", code], dict(os.environ), tmp_path / "out", time.time() + 5)
    state = Path(f"/proc/{(tmp_path / 'id').read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_memory_has_the_units_of_the_other_libraries(tmp_path: Path) -> None:
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
def test_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
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
