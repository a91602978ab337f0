"""`launch.on_rank_failure: continue` under ZeRO: the survivors rebuild DeepSpeed's engine from copies in memory, and
training has the bits of an uninterrupted job."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support import rank_kills
from support.command import bits, lines
from support.marks import long, needs, slow

needs("deepspeed")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at sockets through /proc"),
    pytest.mark.usefixtures("nobody_is_left"),
    pytest.mark.timeout(900),
]
COPIED = ("launch.replicate_every=2",)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    return rank_kills.untouched(tmp_path_factory.mktemp("untouched"), cache)


def equal_to_rounding(folder: Path, untouched: Path) -> None:
    """Check that every step is logged once with the same loss, and that the final weights match within rounding."""
    mine, theirs = lines(folder), lines(untouched)
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    losses = [[line["loss"] for line in each if "loss" in line] for each in (mine, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert apart(folder, untouched) < 1e-3


def apart(folder: Path, untouched: Path) -> float:
    """Return the relative difference between the final weights."""
    one, other = (load_file(each / "out/export/model.safetensors") for each in (folder, untouched))
    assert one.keys() == other.keys()
    flat = [torch.cat([each[name].double().flatten() for name in sorted(one)]) for each in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


STRIKES = [(5, 1, "agreed", 3), (13, 0, "agree", 3)]  # between two copies
TWICE = [(9, 1, "agreed", 2), (25, 0, "agree", 2)]


def by_copies(done: rank_kills.Job, folder: Path, strikes: list[tuple[int, int, str, int]]) -> None:
    """Check that every planned failure happened, and that copies replaced the lost state."""
    without_a_checkpoint(done, folder, strikes)
    events = [json.loads(line) for line in (folder / "out/events.jsonl").read_text().splitlines()]
    told = [event["what"] for event in events if event["event"] == "regroup"]
    assert sum("by copies in memory" in what for what in told) >= 2, told
    assert any("joined with the state of the others" in what for what in told), told


def without_a_checkpoint(done: rank_kills.Job, folder: Path, strikes: list[tuple[int, int, str, int]]) -> None:
    """Check that every planned failure happened, and that no checkpoint was read."""
    assert [each["phase"] for each in done.done] == [phase for _, _, phase, _ in strikes]
    assert done.restarted == 0
    assert "resuming after step" not in (folder / "out/log.txt").read_text()


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        long("StruckZero1", ()),
        long("StruckZero2", ()),
        slow("StruckZero3", ()),
        long("StruckAcceleratedZero", ("strategy.options.deepspeed.zero_stage=2",)),
        long("StruckAcceleratedZero", ("strategy.options.deepspeed.zero_stage=3",)),
    ],
)
def test_all_ranks_return_to_the_last_copy(
    strategy: str, words: tuple[str, ...], tmp_path: Path, cache: Path, untouched: Path
) -> None:
    """One of three ranks fails within a step, and rank 0 after a replacement joined."""
    done = rank_kills.carried_out(rank_kills.job_of(strategy, 3, *STRIKES), tmp_path, cache, untouched, *COPIED, *words)
    by_copies(done, tmp_path, STRIKES)


@pytest.mark.slow
@pytest.mark.long
def test_with_deepspeeds_own_reduction(tmp_path: Path, cache: Path, untouched: Path) -> None:
    """With `exact: false`, results match within rounding, and the bits differ."""
    struck = rank_kills.job_of("StruckZero2", 3, *STRIKES)
    rank_kills.ended_after(struck, tmp_path, cache, untouched, *COPIED, "strategy.exact=false")
    by_copies(struck, tmp_path, STRIKES)
    equal_to_rounding(tmp_path, untouched)
    assert bits(tmp_path, 20) != bits(untouched, 20)


@pytest.mark.slow
@pytest.mark.long
def test_one_of_two_ranks_fails_repeatedly(tmp_path: Path, cache: Path) -> None:
    """The survivor is alone: no other rank has its state when a replacement joins. There is one new start per
    failure."""
    alone = rank_kills.untouched(
        tmp_path / "alone", cache, values=rank_kills.VALUES
    )  # the run must last until a replacement has joined
    job, words = rank_kills.job_of("StruckZero2", 2, *TWICE), "launch.replicate_every=1"
    done = rank_kills.carried_out(job, tmp_path / "job", cache, alone, words, replaced=2)
    without_a_checkpoint(done, tmp_path / "job", TWICE)
    log = (tmp_path / "job/out/log.txt").read_text()
    assert log.count("joined with the state of the others; 2 ranks continue") == 2
