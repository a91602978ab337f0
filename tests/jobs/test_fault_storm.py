"""Random faults at random moments, one after another: processes killed, frozen and asked to stop, disks that are full,
files torn, damaged and deleted, files of others, a second start. In the end all is as if nobody had disturbed the job.

`LOCKSTEP_SEED=2 LOCKSTEP_FAULTS=100 LOCKSTEP_RECORD=record.json pytest -m long tests/jobs/test_fault_storm.py -s`
chooses other faults, and keeps what was done. test_signal_storm.py sends signals only.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.fault_storm import Job, Record

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
    pytest.mark.long,
    pytest.mark.timeout(6 * 3600),
]


@contextmanager
def disk_of_its_own(folder: Path) -> Iterator[bool]:
    """Mount a small disk at `folder`, which can be filled; return False if this user cannot mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_storm_of_faults(tmp_path: Path, cache: Path, untouched: Path) -> None:
    seed = int(os.environ.get("LOCKSTEP_SEED", 1))
    wanted = int(os.environ.get("LOCKSTEP_FAULTS", 40))
    print(f"LOCKSTEP_SEED={seed} LOCKSTEP_FAULTS={wanted}")
    record, chance = Record(seed), random.Random(seed)
    while record.faults.total() < wanted:
        with disk_of_its_own(tmp_path / f"job-{record.jobs}") as disk:
            job = Job(tmp_path / f"job-{record.jobs}", cache, record, chance, disk)
            aim, over = min(wanted, record.faults.total() + 30), 0
            try:
                while record.faults.total() < aim and over < 3:  # starts of a job that is through tell little
                    over += (job.out / "export").is_dir()
                    job.disturbed()
                    for _ in range(chance.randint(0, 4)):
                        job.quietly()
                    keep(record)
                    print(f"{record.faults.total()}: job {record.jobs}: {job.story[-8:]}", flush=True)
                job.as_if_nothing_had_been(untouched)
            except AssertionError as error:
                record.lost += 1
                keep(record)
                story = "\n".join(job.story)
                raise AssertionError(f"job {record.jobs}: {record.plain()}\n{story}") from error
        record.jobs += 1
        keep(record)


def keep(record: Record) -> None:
    """Write the record so far, if one was requested."""
    if path := os.environ.get("LOCKSTEP_RECORD"):
        Path(path).write_text(json.dumps(record.plain(), indent=1) + "\n")
