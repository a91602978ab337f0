"""`lockstep doctor`: its findings, its messages about differing ranks, and that no fault stops it."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.distributed.world import World
from lockstep.lab import doctor, machine_info
from support.command import ended, start
from support.harness import run_on
from support.messages import mentions

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the import of torch and the network probe, which take seconds."""
    monkeypatch.setattr(machine_info, "_TORCH", "print('{}')")
    monkeypatch.setattr(machine_info, "_PORTABLE", "print('a hash')")
    monkeypatch.setattr(machine_info, "network", lambda: {"host_resolves": "127.0.0.1"})


def report(capfd: pytest.CaptureFixture[str], folder: Path, status: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json", "--folder", str(folder)]) == status
    return json.loads(capfd.readouterr().out)["facts"]


@pytest.mark.processes
def test_doctor_reports_machine_and_packages(quick: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = report(capfd, tmp_path)
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert found["packages"]["torch"] == machine_info.version("torch")
    assert found["memory"]["total_gb"] > 0
    assert all(found["folder"][key] > 0 for key in ("write_mb_s", "read_mb_s", "sync_ms", "free_gb"))
    assert found["problems"] == []
    assert list(tmp_path.iterdir()) == []  # the file that was timed is gone


@pytest.mark.processes
def test_torch_is_probed_in_a_separate_process() -> None:
    found = machine_info.torch_facts(200)
    assert found["version"] == machine_info.version("torch")
    assert "gloo" in found["backends"]
    assert found["one_core_gflops"]["fp32"] > 0


def test_torch_is_not_queried_for_gpus_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_info, "torch_facts", lambda seconds: {"devices": [{}] * int(seconds)})
    monkeypatch.setattr(machine_info, "_has_gpu_driver", lambda: True)
    assert len(machine_info.gpu_facts(3)["devices"]) == 3
    monkeypatch.setattr(machine_info, "_has_gpu_driver", lambda: False)
    assert machine_info.gpu_facts(3) == {}


def test_a_driver_is_found_by_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/kfd").exists():
        pytest.skip("a machine of ROCm")
    asked = list[str]()
    monkeypatch.setattr(machine_info.ctypes, "CDLL", asked.append)
    assert machine_info._has_gpu_driver()
    assert asked == ["libcuda.so.1"]

    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine_info.ctypes, "CDLL", none)
    assert not machine_info._has_gpu_driver()
    monkeypatch.setattr(machine_info.sys, "platform", "win32")  # nothing is known there, so torch is asked
    assert machine_info._has_gpu_driver()


@pytest.mark.processes
def test_tokens_are_seen_and_not_shown(
    quick: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    tokens = report(capfd, tmp_path)["tokens"]
    assert (tokens["HF_TOKEN"], tokens["WANDB_API_KEY"]) == (True, False)
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    said = capfd.readouterr()
    assert "HF_TOKEN" in said.out
    assert "very_secret" not in json.dumps(tokens) + said.out + said.err


# -- nothing stops it ------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("import time; time.sleep(60)", "no answer in 0.5 s"),
        ("import os; os.abort()", "ended with -6"),
        ("raise ImportError('no such driver')", "no such driver"),
        ("print('not JSON')", "JSONDecodeError"),
    ],
)
def test_hanging_or_crashing_torch_is_one_line(code: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_info, "_TORCH", code)
    seconds = 0.5 if "sleep" in code else 60
    found = machine_info.bounded(lambda: machine_info.torch_facts(seconds), seconds + 5)
    assert wanted in found["failed"]


@pytest.mark.processes
@pytest.mark.parametrize("section", ["machine", "memory", "packages", "network", "file_system", "tokens", "caches"])
def test_failed_probe_is_a_problem_and_other_probes_continue(
    section: str, quick: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(machine_info, section, broken)
    found = report(capfd, tmp_path)
    name = "folder" if section == "file_system" else section
    assert [problem for problem in found["problems"] if "Input/output error" in problem] == [
        f"{name}: {found[name]['failed']}"
    ]
    assert main(["doctor", "--folder", str(tmp_path)]) == 0  # for a person, too
    assert f"problem: {name}" in capfd.readouterr().out


def test_hanging_probe_is_abandoned() -> None:
    go, ended = threading.Event(), threading.Event()

    def hangs() -> dict[str, Any]:
        go.wait(60)
        ended.set()
        return {}

    assert machine_info.bounded(hangs, 0.1) == {"failed": "no answer in 0.1 s"}
    assert not ended.is_set()
    go.set()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space" in machine_info.bounded(lambda: machine_info.file_system(tmp_path), 20)["failed"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "code"), [(["--folder", "none"], "LS8170"), (["--processes", "0"], "LS8083")])
def test_bad_usage(words: list[str], code: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert mentions(capfd.readouterr().err, code, words[0], words[1])


# -- between ranks ---------------------------------------------------------------------------------------------------


def alike(world: World, folder: str) -> dict[str, Any]:
    return doctor.probe(world, Path(folder), seconds=0.1)


@pytest.mark.processes
def test_ranks_of_one_machine_have_equal_settings(tmp_path: Path) -> None:
    found = run_on(3, alike, str(tmp_path))
    assert found[0] == found[1] == found[2]
    assert found[0]["size"] == 3
    assert found[0]["differs"] == []
    assert found[0]["all_reduce"]["latency_us"] > 0
    assert found[0]["all_reduce"]["bus_mb_s"] > 0
    assert found[0]["folder"]["shared_by_all"]
    assert list(tmp_path.iterdir()) == []
    assert not doctor.breaks({"ranks": found[0]})


def one_is_odd(world: World, folder: str) -> dict[str, Any]:
    if world.rank == 1:
        world.host = "other-host"
        os.environ["OMP_NUM_THREADS"] = "7"
        doctor.platform = SimpleNamespace(python_version=lambda: "3.99", system=str, release=str)  # type: ignore[assignment]
        doctor.time = SimpleNamespace(  # type: ignore[assignment]
            time=lambda: time.time() + 5, time_ns=time.time_ns, perf_counter=time.perf_counter
        )
        folder += "/elsewhere"
        Path(folder).mkdir()
    else:
        world.host = "host"
    return doctor.probe(world, Path(folder), seconds=0.1)


@pytest.mark.processes
def test_differing_settings_are_named_with_ranks_and_hosts(tmp_path: Path) -> None:
    ranks = run_on(2, one_is_odd, str(tmp_path))[0]
    differs = {each["what"]: each for each in ranks["differs"]}
    assert set(differs) == {"OMP_NUM_THREADS", "python", "system"}
    assert differs["OMP_NUM_THREADS"]["breaks"]
    assert differs["python"]["breaks"] is None
    assert differs["OMP_NUM_THREADS"]["sides"][1] == {"value": "7", "ranks": [1], "hosts": ["other-host"]}
    assert 4000 < ranks["clock_skew_ms"]["largest"] < 6000
    assert ranks["clock_skew_ms"]["rank"] == 1
    assert not ranks["folder"]["shared_by_all"]
    told = doctor.problems({"ranks": ranks, "folder": {"path": str(tmp_path)}})
    assert "OMP_NUM_THREADS differs between ranks" in told[0]
    assert "7 on other-host (rank 1)" in told[0]
    assert any("clock of rank 1" in line for line in told)
    assert any("not the same folder" in line for line in told)
    assert doctor.breaks({"ranks": ranks})


@pytest.mark.processes
def test_doctor_compares_processes_it_starts(quick: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--processes", "2", "--device", "cpu", "--folder", str(tmp_path)]) == 0
    said = capfd.readouterr().out
    assert "no differences between ranks" in said
    assert "MB/s" in said


@pytest.mark.processes
def test_under_a_launcher_a_different_version_is_status_1(tmp_path: Path, cache: Path) -> None:
    """Rank 1 has another version of transformers on its path."""
    fake = tmp_path / "fake" / "transformers-0.0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    (tmp_path / "rank.py").write_text(
        "import os, sys\nfrom lockstep.lab import machine_info as machine\nfrom lockstep.cli import main\n"
        "machine._TORCH = \"print('{}')\"\n"
        "machine._PORTABLE = \"print('a hash')\"\n"
        "if os.environ['RANK'] == '1': sys.path.insert(0, 'fake')\n"
        "status = main(['doctor', '--json', '--device', 'cpu'])\n"
        "open(f'status-{os.environ[\"RANK\"]}', 'w').write(str(status))\n"
    )
    status, out, err = ended(start([*TORCHRUN, "rank.py"], tmp_path, cache))
    assert status == 0, err
    found = json.loads(out)["facts"]  # one rank speaks
    assert [each["what"] for each in found["ranks"]["differs"]] == ["transformers"]
    sides = found["ranks"]["differs"][0]["sides"]
    assert [side["value"] for side in sides] == [machine_info.version("transformers"), "0.0.1"]
    assert [(tmp_path / f"status-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


@pytest.mark.processes
def test_ranks_that_cannot_connect(
    quick: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    found = report(capfd, tmp_path, status=1)
    assert "MASTER_ADDR" in found["ranks"]["failed"]
    assert found["machine"]["cores"] > 0


@pytest.mark.processes
def test_doctor_reports_support_for_portable_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine_info.portable_facts(200)
    assert len(facts["fingerprint"]) == 16
    monkeypatch.setattr(machine_info, "_PORTABLE", "raise SystemExit('no AVX2')")
    assert "no AVX2" in machine_info.portable_facts(200)["unsupported"]


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, "this machine trains on 4 CPU cores; torch sees no GPU; no problem found"),
        ({"torch": {"version": "2.13", "devices": [{}, {}]}}, "this machine trains on 2 GPUs; no problem found"),
        ({"torch": {"failed": "no GPU"}}, "this machine cannot train: torch does not start; no problem found"),
        (
            {"torch": {"failed": "no answer in 60 s"}},
            "undecided: torch reported no answer in 60 s, perhaps because the machine is busy",
        ),
        ({"network": {"hub_reachable": False}}, "the Hub cannot be reached, so models and data have to be local"),
        ({"network": {"hub_reachable": False, "offline": "1"}}, "no GPU; HF_HUB_OFFLINE is set, so models and"),
        ({"problems": ["a", "b"]}, "; 2 problems above"),
        ({"processes": {"failed": "no /proc"}}, "this machine trains with one process only, on 4 CPU cores"),
        ({"ranks": {"failed": "no route"}}, "these ranks cannot train together"),
    ],
)
def test_doctor_verdict(changed: dict[str, Any], wanted: str) -> None:
    found = {"machine": {"cores": 4}, "torch": {"version": "2.13", "devices": []}, "problems": []} | changed
    assert wanted in doctor.verdict(found)


def test_machine_on_which_ranks_cannot_connect_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_info.several_processes() == {"several can start": "yes"}
    monkeypatch.setattr(machine_info, "LOOPBACK", "192.0.2.1")  # no address of any machine
    problem = doctor.problems({"processes": machine_info.several_processes()})[0]
    assert mentions(problem, "LS7532", "processes: 192.0.2.1", "cannot be reached")
    assert doctor.started(Path(), 2, "cpu")["failed"].startswith("not started")  # torchrun would wait for minutes


def test_facts_are_formatted_with_words_and_units() -> None:
    facts = {"cores_of_machine": 2, "total_gb": 23.5, "write_mb_s": 172, "GLOO_SOCKET_IFNAME": "eth0"}
    assert doctor.rows_of("machine", facts) == [
        ("cores of machine", "2"),
        ("total", "23.5 GB"),
        ("write", "172 MB/s"),
        ("GLOO_SOCKET_IFNAME", "eth0"),
    ]
