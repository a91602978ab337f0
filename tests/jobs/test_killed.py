"""kill -9 on a rank, on the launcher, or on all, at random moments and between random worlds, loses nothing."""

import json
import os
import sys
from pathlib import Path

import pytest

from support.random_kills import kill_and_resume

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
]


def test_killed_at_random_moments_it_still_ends_with_the_same_bits(
    tmp_path: Path, cache: Path, untouched: Path
) -> None:
    record = kill_and_resume(tmp_path, cache, untouched, kills=6, seed=3)
    assert len(record.kills) == 6
    assert len({kill.processes for kill in record.kills}) > 1
    assert record.lost == 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_run_killed_fifty_times_has_the_same_bits(tmp_path: Path, cache: Path, untouched: Path) -> None:
    """LOCKSTEP_RECORD=FILE records the faults; LOCKSTEP_SEED chooses other rounds."""
    record = kill_and_resume(tmp_path, cache, untouched, kills=50, seed=int(os.environ.get("LOCKSTEP_SEED", 1)))
    assert len(record.kills) >= 50
    assert {kill.processes for kill in record.kills} == {1, 2, 3, 4}
    assert record.lost == 0
    if path := os.environ.get("LOCKSTEP_RECORD"):
        Path(path).write_text(json.dumps(record.plain(), indent=1))
