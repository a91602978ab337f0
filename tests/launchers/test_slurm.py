"""SLURM: the batch script and the plan, refusals, tasks of srun."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import __version__
from lockstep.cli import main
from lockstep.distributed import job_record
from lockstep.launchers import slurm
from lockstep.launchers.processes import srun
from lockstep.launchers.slurm import Slurm, array_plan, state_of
from support import golden
from support.command import LOCKSTEP, bits, ended, start, write
from support.harness import tiny
from support.messages import mentions, raises

PLAIN = {"name": "slurm", "machines": 2, "processes": 1, "device": "cpu", "threads": 1}


# -- the batch script ------------------------------------------------------------------------------------------------

FULL = {
    "name": "slurm",
    "machines": 2,
    "processes": 4,
    "gpus": 4,
    "cpus": 8,
    "memory": "64G",
    "partition": "gpu",
    "account": "physics",
    "qos": "long",
    "constraint": "a100|h100",
    "time": "1d12h",
    "signal_before": "5m",
    "setup": ["module load cuda/12.4", "export NCCL_DEBUG=WARN"],
    "extra": ["--mail-type=END", "--exclude=n[3-4]"],
    "python": "/opt/venv/bin/python",
}


def compare(name: str, text: str, folder: Path) -> None:
    """Compare with a golden file, which contains no path and no version of this machine."""
    for here, there in ((str(folder), "/home/me/project"), (sys.executable, "/opt/venv/bin/python")):
        text = text.replace(here, there)
    golden.compare(name, text.replace(f"lockstep {__version__};", "lockstep VERSION;"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("slurm-full.sbatch", FULL),
        ("slurm-plain.sbatch", PLAIN),
        ("slurm-elastic.sbatch", FULL | {"ranks": "elastic", "max_restarts": 3}),
        ("slurm-no-kill.sbatch", FULL | {"ranks": "elastic", "max_restarts": 3, "on_rank_failure": "continue"}),
        ("slurm-restarts.sbatch", PLAIN | {"max_restarts": 2, "requeue": False}),
    ],
)
def test_the_batch_file_matches_the_golden_one(name: str, launch: dict, here: Path) -> None:
    plan = Slurm().plan(tiny(launch=launch, output="out"))
    assert plan == Slurm().plan(tiny(launch=launch, output="out"))
    (path, text), *others = plan.files.items()
    assert not others
    assert plan.command == ["sbatch", "--parsable", path]
    compare(name, text, here)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.processes
def test_an_array_over_run_files(here: Path) -> None:
    plan = array_plan(tiny(launch=PLAIN), [Path("trials/a/run.yaml"), Path("trials/b c/run.yaml")], Path("trials"), 1)
    (text,) = plan.files.values()
    compare("slurm-array.sbatch", text, here)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    with raises("LS7385"):
        array_plan(tiny(launch=PLAIN), [], Path("trials"))


def test_the_plan_is_printed_and_holds_no_secret(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwx")
    write(here, launch=FULL, micro_batches=8)
    assert main(["plan", "run.yaml"]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --nodes=2" in said
    assert "8, each with 1 of 8 micro-batches" in said
    assert "hf_" not in said
    assert {p.name for p in here.iterdir()} == {"run.yaml"}


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        *[("4h", 240), ("1d12h", 2160), ("90s", 2), ("90", 90), ("1:30", 2), ("4:00:00", 240), ("1-12", 2160)],
        *[("1-00:30", 1470), ("2-01:02:03", 2943)],
    ],
)
def test_valid_time_limits(text: str, minutes: int) -> None:
    assert slurm.minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["soon", "4 hours", "1:2:3:4", "0", "", "-1"])
def test_invalid_time_limits(text: str) -> None:
    with raises("LS7397" if text == "0" else "LS7396", repr(text), error=ValueError):
        slurm.minutes_of(text)


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED = """#!/bin/sh
cat > /dev/null
echo "sbatch: error: invalid partition specified: nowhere" >&2
echo "allocation failure: Invalid partition name specified" >&2
exit 1
"""


def program(folder: Path, name: str, text: str) -> None:
    """Write a stub of a SLURM program."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"machines": 9}, ["launch.machines", "9", "4 micro-batches"]),
        ({"machines": 3, "processes": 3}, ["launch.machines", "4 micro-batches"]),
        ({"processes": "auto"}, ["launch.processes", "launch.gpus"]),
        ({"time": 14400}, ["launch.time", "14400", '"4:00:00"', "run.yaml, line"]),
        ({"time": "soon"}, ["launch.time", "soon", "1d12h"]),
        ({"time": "2m", "signal_before": "2m"}, ["launch.signal_before", "2m"]),
        ({"partitions": "gpu"}, ["launch.partitions", "partition"]),
        ({"partition": "a b"}, ["launch.partition", "'a b'", "LS7381"]),
        ({"extra": ["mail-type=END"]}, ["launch.extra", "mail-type=END", "an option such as", "LS7382"]),
        ({"setup": ["module load a\nmodule load b"]}, ["launch.setup", "expected a single line", "LS7382"]),
        ({"memory": "lots"}, ["launch.memory", "lots"]),
        ({"ranks": "mpi"}, ["launch.ranks", "mpi", "elastic"]),
    ],
)
def test_bad_keys_are_one_message(
    launch: dict, words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, launch=PLAIN | launch)
    assert main(["train", "run.yaml"]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert said.count("lockstep:") == 1
    assert {p.name for p in here.iterdir()} == {"run.yaml"}


def test_without_sbatch(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(here / "none"))
    write(here, launch=PLAIN)
    assert main(["train", "run.yaml"]) == 2
    assert mentions(capsys.readouterr().err, "LS7386")
    assert {p.name for p in here.iterdir()} == {"run.yaml"}


@pytest.mark.processes
def test_refusals_of_slurm_are_reported_before_queueing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(here / "bin", "sbatch", REFUSED)
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    write(here, launch=PLAIN | {"partition": "nowhere"})
    assert main(["train", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert "nothing was queued: invalid partition specified: nowhere; " in said
    assert not (here / "out").exists()


@pytest.mark.processes
def test_a_job_is_submitted_followed_and_stopped(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs are stubs that print what SLURM's would."""
    asked = 'echo "$(basename $0) $*" >> asked\n'
    program(here / "bin", "sbatch", "#!/bin/sh\ncat > /dev/null\n" + asked + "echo '7;cluster'\n")
    program(here / "bin", "scancel", "#!/bin/sh\n" + asked)
    show = "echo JobId=7 JobState=$(cat state) Reason=Priority Restarts=1 NodeList=n[1-2] ExitCode=75:0\n"
    program(here / "bin", "scontrol", f"#!/bin/sh\n{asked}{show}")
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    write(here, launch=PLAIN)
    (here / "state").write_text("PENDING")
    assert main(["train", "run.yaml", "--detach"]) == 0
    assert "job 7 is submitted" in capsys.readouterr().out
    record = job_record.read(here / "out")
    assert record is not None
    assert (record.launcher, record.job, record.processes) == ("slurm", "7", 2)
    assert main(["train", "run.yaml", "--detach"]) == 2
    assert (
        "is already in use by a training run (waiting: pending (Priority), restarted 1 time)" in capsys.readouterr().err
    )

    (here / "asked").unlink()
    assert main(["stop", "out", "--wait", "0"]) == 0  # a pending job is cancelled
    (here / "state").write_text("RUNNING")
    assert main(["stop", "out", "--wait", "0"]) == 0  # a running job is asked to stop, and not queued again
    asked_for = [line for line in (here / "asked").read_text().splitlines() if "show" not in line]
    assert asked_for == ["scancel 7", "scontrol update JobId=7 Requeue=0", "scancel --signal=TERM 7"]
    capsys.readouterr()

    (here / "state").write_text("FAILED")
    (here / "out" / "slurm-7.out").write_text("step 1\nstep 2\n")
    assert main(["logs", "out", "--follow"]) == 0
    assert capsys.readouterr().out == "step 1\nstep 2\n"
    assert main(["status", "out", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["facts"]
    assert (found["state"], found["status"], found["job"]) == ("stopped", 75, "7")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("shown", "word", "status"),
    [
        ("JobState=COMPLETED ExitCode=0:0", "done", 0),
        ("JobState=FAILED ExitCode=75:0", "stopped", 75),
        ("JobState=FAILED ExitCode=2:0", "failed", 2),
        ("JobState=FAILED ExitCode=0:9", "failed", 1),
        ("JobState=TIMEOUT ExitCode=0:1", "failed", None),
        ("JobState=NODE_FAIL ExitCode=1:0", "failed", None),
        ("JobState=CANCELLED ExitCode=0:15", "stopped", None),
        ("JobState=COMPLETING ExitCode=0:0", "running", None),
        ("JobState=PENDING ExitCode=0:0", "waiting", None),
    ],
)
def test_states(shown: str, word: str, status: int | None, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(here / "bin", "scontrol", f"#!/bin/sh\necho JobId=7 {shown}\n")
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    found = state_of(job_record.here("slurm", 2, "7"))
    assert (found.word, found.status) == (word, status)


@pytest.mark.processes
def test_a_job_that_slurm_has_forgotten(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(here / "bin", "scontrol", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    program(here / "bin", "sacct", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
    assert state_of(job_record.here("slurm", 2, "7")).word == "gone"
    program(here / "bin", "sacct", "#!/bin/sh\necho 'CANCELLED by 0|0:15'\n")
    assert state_of(job_record.here("slurm", 2, "7")).word == "stopped"


# -- tasks of srun ---------------------------------------------------------------------------------------------------

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "localhost,n[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def test_variables_of_a_task() -> None:
    task = srun.task_of(STEP)
    assert task is not None
    variables = task.variables()
    assert {k: variables[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }
    assert (task.step, task.nodes, task.node) == ("12.0", 3, 1)
    following = srun.task_of(STEP | {"SLURM_STEP_ID": "1"})
    assert following is not None
    assert following.port != task.port  # the port of the previous step does not matter


@pytest.mark.parametrize("lacking", ["SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"])
def test_a_batch_script_is_no_task(lacking: str) -> None:
    """The script has SLURM_PROCID=0 and SLURM_NTASKS, and would wait as rank 0 for ranks that never come."""
    variables = {k: v for k, v in STEP.items() if k != lacking} | {"SLURM_NTASKS": "5", "SLURM_PROCID": "0"}
    assert srun.task_of(variables) is None
    assert srun.task_of(STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA)}) is None  # an interactive shell


def test_incomplete_slurm_variables_are_refused() -> None:
    with raises("LS7350", "SLURM_STEP_NODELIST"):
        srun.task_of({k: v for k, v in STEP.items() if k != "SLURM_STEP_NODELIST"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-2]", ["n1", "n2"]),
        ("gpu[01-03,07],login", ["gpu01", "gpu02", "gpu03", "gpu07", "login"]),
        ("r[1-2]n[8-10]", ["r1n8", "r1n9", "r1n10", "r2n8", "r2n9", "r2n10"]),
        ("a[098-101]b", ["a098b", "a099b", "a100b", "a101b"]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert srun.hosts(text) == names


def test_node_is_identified_by_hostname_without_slurm_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*anything: Any, **named: Any) -> None:
        raise FileNotFoundError("no such host, no such program")

    monkeypatch.setattr(socket, "getaddrinfo", missing)
    monkeypatch.setattr(subprocess, "run", missing)  # as in a container
    assert srun.address("gpu01") == "gpu01"


def test_tasks_per_node() -> None:
    assert srun.counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="two"):
        srun.counts("two")


@pytest.mark.processes
def test_tasks_of_srun_meet_without_a_wrapper(tmp_path: Path, cache: Path, untouched: Path) -> None:
    """The variables of srun are enough; the run file's launcher then starts nothing."""
    write(tmp_path)
    common = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    common |= {"SLURM_NODEID": "0", "SLURM_JOB_ID": str(os.getpid())}
    ranks = [
        start([*LOCKSTEP, "train", "run.yaml"], tmp_path, cache, **common | {"SLURM_PROCID": i, "SLURM_LOCALID": i})
        for i in "01"
    ]
    for status, _, err in [ended(rank) for rank in ranks]:
        assert status == 0, err
    assert bits(tmp_path) == bits(untouched)
    record = job_record.read(tmp_path / "out")
    assert record is not None
    assert (record.launcher, record.job, record.status) == ("slurm", str(os.getpid()), 0)
    assert record.facts == {"step": f"{os.getpid()}.0"}
