"""Machines that cannot start several ranks get a message before any rank starts, tested in namespaces that lack
resources."""

import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.distributed import process_limits
from lockstep.distributed.lost_contact import tell_failure
from lockstep.launchers.processes import machine_limits
from support.command import environment_of, write

pytestmark = [pytest.mark.processes, pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")]

LACKING = {
    "LS7530 Read-only": (["-m"], "mount -t tmpfs -o ro tmpfs /dev/shm"),
    "LS7530 No space": (["-m"], "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"),
    "LS7531 not mounted": (["-m"], "mount -t tmpfs tmpfs /proc"),
    "LS7532 127.0.0.1": (["-n"], "true"),
    "LS7510 24 open files": (["-m"], "ulimit -n 24"),
}
# a launcher with its own rendezvous on this machine, and one that needs no shared memory
OTHERS = {
    "LS7532 torchrun": (["-n"], "true"),
    "LS7532 accelerate": (["-n"], "true"),
    "LS7510 torchrun": (["-m"], "ulimit -n 24"),
    "LS7510 accelerate": (["-m"], "ulimit -n 24"),
}


def _run(
    namespaces: list[str], before: str, folder: Path, cache: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    command = shlex.join([sys.executable, "-m", "lockstep", "train", "run.yaml", *words])
    return subprocess.run(
        ["unshare", *namespaces, "sh", "-c", f"{{ {before}; }} || exit 99; exec {command}"],
        cwd=folder,
        env=environment_of(cache),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("lacking", LACKING)
def test_missing_resources_are_reported_before_a_rank_starts(lacking: str, tmp_path: Path, cache: Path) -> None:
    namespaces, before = LACKING[lacking]
    write(tmp_path, steps=2)
    done = _run(namespaces, before, tmp_path, cache)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no namespaces here")
    code, text = lacking.split(" ", 1)
    assert done.returncode == 2, done.stderr
    assert code in done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "lacking",  # torchrun starts ranks as `local` does, with its check of open files
    [pytest.param(case, marks=pytest.mark.long if case == "LS7510 torchrun" else ()) for case in OTHERS],
)
def test_other_launchers_report_missing_resources_too(lacking: str, tmp_path: Path, cache: Path) -> None:
    code, launcher = lacking.split()
    write(tmp_path, steps=2)
    done = _run(*OTHERS[lacking], tmp_path, cache, f"launch.name={launcher}")
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no namespaces here")
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert code in done.stderr
    assert "rendezvous" not in done.stderr  # the user did not write that key


def test_the_soft_limit_of_open_files_is_raised() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, limits[1]))
        machine_limits.check_open_files(2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 56
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_soft_limit_of_processes_is_raised() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NPROC)
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (5_000, limits[1]))
        process_limits.raise_process_limit()
        assert resource.getrlimit(resource.RLIMIT_NPROC)[0] == limits[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, limits)


def test_a_thread_that_cannot_be_started_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    tell_failure(RuntimeError("can't start new thread"), None)
    said = capsys.readouterr().err
    assert "[LS7067]" in said
    assert "Traceback" not in said
    tell_failure(RuntimeError("another error"), None)
    assert "[LS7064]" in capsys.readouterr().err


def test_one_process_needs_neither_proc_nor_loopback(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, steps=2)
    before = "mount -t tmpfs tmpfs /proc"
    done = _run(["-m", "-n"], before, tmp_path, cache, "launch.processes=1")
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no namespaces here")
    assert done.returncode == 0, done.stderr


def test_an_engine_that_needs_an_interface_for_one_process_is_refused(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, steps=2)
    words = ("launch.processes=1", "strategy={name: fsdp2, options: {gather: micro_batch}}")
    done = _run(["-n"], "true", tmp_path, cache, *words)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no namespaces here")
    assert done.returncode == 2, done.stderr
    assert "LS7043" in done.stderr
    assert "Traceback" not in done.stderr
