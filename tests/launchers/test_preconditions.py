"""Machines on which several ranks cannot start: a message before any does, in namespaces that lack what they need."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import environment_of, write

pytestmark = [pytest.mark.processes, pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")]

LACKING = {
    "LS7530 Read-only": (["-m"], "mount -t tmpfs -o ro tmpfs /dev/shm"),
    "LS7530 No space": (["-m"], "mount -t tmpfs -o size=4k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/full"),
    "LS7531 not mounted": (["-m"], "mount -t tmpfs tmpfs /proc"),
    "LS7532 127.0.0.1": (["-n"], "true"),
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
def test_what_a_machine_lacks_is_told_before_a_rank_starts(lacking: str, tmp_path: Path, cache: Path) -> None:
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


def test_one_process_needs_neither_proc_nor_loopback(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, steps=2)
    before = "mount -t tmpfs tmpfs /proc"
    done = _run(["-m", "-n"], before, tmp_path, cache, "launch.processes=1")
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("no namespaces here")
    assert done.returncode == 0, done.stderr
