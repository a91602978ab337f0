"""Assumptions about SLURM, tested on two nodes: variables of tasks, output of its programs, requeueing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import slurm_cluster
from support.assumed import rests_on_it

reason = slurm_cluster.missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.processes,
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.timeout(600),
]
VARIABLES = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID",
    "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    running = slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm"))
    yield running
    running.stop()


def submitted(cluster: slurm_cluster.Cluster, folder: Path, script: str, *options: str) -> str:
    file = folder / "job.sbatch"
    file.write_text(f"#!/bin/bash\n#SBATCH --output={folder}/%j.out\n{script}\n")
    return cluster.ask("sbatch", "--parsable", *options, str(file)).strip()


def ends(cluster: slurm_cluster.Cluster, job: str, state: str) -> None:
    cluster.until(lambda: cluster.field(job, "JobState") == state, f"job {job} to be {state}")


def asked(cluster: slurm_cluster.Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | cluster.variables
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)


@rests_on_it("src/lockstep/launchers/processes/srun.py", "src/lockstep/distributed/event_log.py")
def test_environment_variables_of_srun_tasks(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    """Each task of srun has variables for its rank, node and local rank, and for the step's number of tasks, nodes and
    tasks per node. The batch script has SLURM_PROCID, but no SLURM_STEP_ID."""
    shown = " ".join(f"{name}=${name}" for name in VARIABLES)
    script = f"echo script SLURM_PROCID=$SLURM_PROCID ${{SLURM_STEP_ID-none}}\nsrun -n 3 bash -c 'echo task {shown}'"
    job = submitted(cluster, tmp_path, script, "--nodes=2", "--ntasks=3")
    assert job.isdecimal()
    ends(cluster, job, "COMPLETED")
    lines = (tmp_path / f"{job}.out").read_text().splitlines()
    assert "script SLURM_PROCID=0 none" in lines
    tasks = sorted(
        (dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines if line.startswith("task ")),
        key=lambda task: int(task["SLURM_PROCID"]),
    )
    assert [task["SLURM_PROCID"] for task in tasks] == ["0", "1", "2"]
    assert [task["SLURM_NODEID"] for task in tasks] == ["0", "0", "1"]
    assert [task["SLURM_LOCALID"] for task in tasks] == ["0", "1", "0"]
    for task in tasks:
        assert (task["SLURM_JOB_ID"], task["SLURM_STEP_ID"], task["SLURM_STEP_NUM_TASKS"]) == (job, "0", "3")
        assert (task["SLURM_STEP_NODELIST"], task["SLURM_STEP_TASKS_PER_NODE"]) == ("n[1-2]", "2,1")


@rests_on_it("src/lockstep/launchers/slurm.py", "src/lockstep/launchers/processes/srun.py")
def test_a_requeued_job_keeps_its_id(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    """`scontrol requeue` in a job's script queues the job again under the same id, ends the script, and increments
    Restarts. SLURM_RESTART_COUNT is 1 in the second run. squeue prints RUNNING and the nodes, and scontrol -o one line
    of NAME=VALUE."""
    script = (
        f"cd {tmp_path}\necho ${{SLURM_RESTART_COUNT-0}} >> counts\n"
        'if [ -z "$SLURM_RESTART_COUNT" ]; then\n'
        '  squeue -h -j $SLURM_JOB_ID -o "%T %N" > queue\n'
        "  scontrol requeue $SLURM_JOB_ID && sleep 60\n  echo beyond >> counts\nfi\nexit 3"
    )
    job = submitted(cluster, tmp_path, script, "--nodes=2", "--requeue")
    ends(cluster, job, "PENDING")
    cluster.until(lambda: cluster.field(job, "Restarts") == "1", "the requeue")
    assert (tmp_path / "queue").read_text() == "RUNNING n[1-2]\n"
    cluster.hurry(job)
    ends(cluster, job, "FAILED")
    assert (tmp_path / "counts").read_text().split() == ["0", "1"]
    assert cluster.field(job, "ExitCode") == "3:0"
    (line,) = cluster.ask("scontrol", "-o", "show", "job", job).splitlines()
    assert {"JobState", "Reason", "Restarts", "ExitCode", "NodeList"} <= dict(re.findall(r"(\w+)=(\S*)", line)).keys()


@rests_on_it("src/lockstep/launchers/slurm.py")
def test_requeueing_can_be_turned_off(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    """After `scontrol update Requeue=0` for a running job, `scontrol requeue` fails, and the script goes on."""
    script = f"cd {tmp_path}\nuntil [ -e go ]; do sleep 0.2; done\nscontrol requeue $SLURM_JOB_ID && sleep 60\nexit 75"
    job = submitted(cluster, tmp_path, script, "--requeue")
    ends(cluster, job, "RUNNING")
    assert asked(cluster, "scontrol", "update", f"JobId={job}", "Requeue=0").returncode == 0
    (tmp_path / "go").touch()
    ends(cluster, job, "FAILED")
    assert (cluster.field(job, "ExitCode"), cluster.field(job, "Restarts")) == ("75:0", "0")


@rests_on_it("src/lockstep/launchers/slurm.py")
def test_error_for_an_unknown_job(cluster: slurm_cluster.Cluster) -> None:
    """For an unknown job, scontrol prints "Invalid job id" and exits with a nonzero status."""
    done = asked(cluster, "scontrol", "-o", "show", "job", "1")
    assert done.returncode != 0
    assert "Invalid job id" in done.stdout + done.stderr


@rests_on_it("src/lockstep/launchers/processes/srun.py")
def test_lists_of_nodes(cluster: slurm_cluster.Cluster) -> None:
    """A node list has names, with numbers in brackets that may have leading zeros, in node order."""
    done = asked(cluster, "scontrol", "show", "hostnames", "gpu[01-03,07],login,a[9-11]")
    assert done.stdout.split() == ["gpu01", "gpu02", "gpu03", "gpu07", "login", "a9", "a10", "a11"]


@rests_on_it("src/lockstep/launchers/slurm.py")
def test_sbatch_test_only_queues_nothing(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    """`sbatch --test-only` reads a script from standard input, fails if no node can run it, and queues nothing."""
    environment, tried = os.environ | cluster.variables, []
    for cpus in (1, 999):
        text = f"#!/bin/bash\n#SBATCH --cpus-per-task={cpus}\ntrue\n"
        words = [str(shutil.which("sbatch")), "--test-only"]
        done = subprocess.run(
            words, input=text, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
        )
        tried.append(done.returncode == 0)
    assert tried == [True, False]
    assert cluster.ask("squeue", "-h", "-t", "PENDING").strip() == ""


@pytest.mark.long  # half a minute
@rests_on_it("src/lockstep/launchers/slurm.py")
def test_array_tasks_and_sbatch_options(cluster: slurm_cluster.Cluster, tmp_path: Path) -> None:
    """Each task of an array has SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID, and scontrol knows it as JOB_TASK. In
    #SBATCH lines double quotes keep spaces, `%%` in --output is a percent sign, %A_%a are the job and the task, and
    --chdir sets the script's working directory. With --signal=TERM@SECONDS only the steps receive SIGTERM, not the
    script."""
    folder = tmp_path / "a 50%b"
    folder.mkdir()
    output = f"{folder}/slurm-%A_%a.out".replace("50%b", "50%%b")
    script = (
        f'#SBATCH --output="{output}"\n#SBATCH --chdir="{folder}"\n#SBATCH --job-name="two words"\n'
        "#SBATCH --array=0-1%2\n#SBATCH --time=00:01:00\n#SBATCH --signal=TERM@60\n#SBATCH --open-mode=append\n"
        'echo "$SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID $SLURM_JOB_NAME $PWD"\ntrap "echo script" TERM\n'
        "srun -n 1 bash -c 'trap \"echo step; exit 75\" TERM; sleep 50 & wait'\necho status $?"
    )
    job = submitted(cluster, tmp_path, script, "--ntasks=1")
    for task in range(2):
        ends(cluster, f"{job}_{task}", "COMPLETED")
        lines = (folder / f"slurm-{job}_{task}.out").read_text().splitlines()
        assert lines[0] == f"{job} {task} two words {folder}"
        assert "step" in lines
        assert "script" not in lines
        assert "status 75" in lines
