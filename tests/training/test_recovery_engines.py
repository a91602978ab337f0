"""`launch.on_rank_failure: continue` under foreign engines: the engine is rebuilt for the surviving ranks."""

import sys
from pathlib import Path

import pytest

from support import rank_kills
from support.marks import long, slow

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("StruckAccelerate", "fp32"),
        slow("StruckTrainer", "bf16"),
        long("StruckAccelerate", "bf16"),
        long("StruckTrainer", "fp32"),
    ],
)
def test_surviving_ranks_finish_the_step(strategy: str, precision: str, tmp_path: Path, cache: Path) -> None:
    """Ranks fail within the all-reduce and after an update that another rank has not made, and rank 0 fails, too; the
    job shrinks to one rank and grows again."""
    pytest.importorskip("accelerate")
    untouched = rank_kills.untouched(tmp_path / "untouched", cache, f"precision={precision}")
    job = rank_kills.job_of(strategy, 2, (3, 1, "sent", 2), (8, 0, "updated", 2), (13, 1, "gradient", 2))
    done = rank_kills.carried_out(job, tmp_path / "job", cache, untouched, f"precision={precision}")
    assert [each["phase"] for each in done.done] == ["sent", "updated", "gradient"]
    assert done.restarted == 0
