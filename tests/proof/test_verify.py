"""`lockstep verify` finds the classic mistakes and names them, and lets every strategy pass that keeps its promise."""

import os
from pathlib import Path

import pytest
import yaml

from lockstep.config.run import Run
from lockstep.distributed.world import World
from lockstep.proof import recording
from lockstep.proof.verify import compare_recordings, findings, tell
from lockstep.track.console import Console
from lockstep.training.resolve import for_rank
from support.command import LOCKSTEP, TORCHRUN, ended, start
from support.harness import TINY, run_on, tiny
from support.places import TESTS_PATH

pytestmark = pytest.mark.processes


def recorded(world: World, run: Run) -> int:
    return recording.record(for_rank(run, world), world, "3")


def of(folder: Path, ranks: int, *overrides: str) -> Path:
    run = tiny(f"output={folder}", *overrides)
    assert run_on(ranks, recorded, run, joined=False) == [0] * ranks
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of(tmp_path_factory.mktemp("alone"), 1, "strategy.name=single")


def found(ours: Path, single: Path) -> str:
    return "\n".join(findings(recording.read(ours), compare_recordings(ours, single)))


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("MeanOfMeans", ["step 0, gradient", "a mean of means"]),
        ("OneNotReduced", [", gradient:", "transformer.h.1.mlp.c_fc.weight by", "only a part of the parameters"]),
        ("CountedTwice", [", gradient:", "every gradient is 2 (the number of ranks) times"]),
        (
            "SeedsByRank",
            [", loss:", "micro-batch 4, on rank 1", "augmentation) depend on the rank"],
        ),
        ("LastDropped", [", loss:", "micro-batch 7, on rank 1", "0 here", "its examples are masked"]),
        ("OwnRate", [", learning rate:", "scaled by the number of ranks, 2"]),
    ],
)
@pytest.mark.parametrize("exact", ["true", "false"])
def test_a_mistake_is_named(
    bug: str, said: list[str], exact: str, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if exact == "false" and bug == "OneNotReduced":
        pytest.skip("this one is made of partial sums")
    # the first step of a warm-up has no rate: without it changes are seen as well
    ours = of(tmp_path / "ours", 2, f"strategy.name=support.buggy.{bug}", f"strategy.exact={exact}")
    text = found(ours, alone)
    for words in said:
        assert words in text, text
    assert tell(Console(True), ours, alone) == 1
    assert "DIFFERENT from what was expected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (3, ["strategy.name=ddp"]),
        (2, ["strategy.name=fsdp2"]),
        (2, ["strategy.name=ddp", "strategy.exact=false"]),
    ],
)
def test_correct_jobs_pass(
    ranks: int, overrides: list[str], alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = of(tmp_path / "ours", ranks, *overrides)
    assert found(ours, alone) == ""
    assert tell(Console(True), ours, alone) == 0
    said = capsys.readouterr().out
    assert ("result: the same bits" in said) == ("strategy.exact=false" not in overrides)
    assert "dtypes: weights float32, gradients float32, optimizer float32" in said


def test_promised_bits_are_required(alone: Path, tmp_path: Path) -> None:
    """Equal to rounding is not enough where bits are promised."""
    ours = of(tmp_path / "ours", 2, "strategy.name=allreduce", "strategy.exact=false")
    text = (ours / recording.FILE).read_text()
    (ours / recording.FILE).write_text(text.replace('"bits": false', '"bits": true'))
    assert "gradients differ" in found(ours, alone)


def test_the_short_last_step_of_the_epoch_is_compared(alone: Path) -> None:
    numbers = [s.step for s in recording.read(alone).steps]
    assert numbers == [0, 1, 4]  # 100 examples in steps of 22
    assert recording.read(alone).steps[-1].targets == (12, 12)


@pytest.mark.parametrize(
    ("warmup", "steps", "numbers"),
    [
        (0, 2, [0, 4]),
        (2, 1, [1]),
        (2, 2, [1, 4]),
        (2, 3, [0, 1, 4]),
        (2, 5, [0, 1, 2, 3, 4]),
        (2, 9, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_compared_steps_include_one_after_an_update(warmup: int, steps: int, numbers: list[int]) -> None:
    """A warm-up of two steps begins with the learning rate 0. There are 6 steps, and 5 in an epoch."""
    optimizer = tiny(f"optim.warmup_steps={warmup}").optim
    assert recording.numbers_of(optimizer, 6, 5, steps) == numbers


def test_verify_of_a_run_file_as_a_command(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(TINY | {"launch": {"device": "cpu", "processes": 2}}))
    command = [*LOCKSTEP, "verify", "job.yaml", "--steps", "3", "strategy.name=ddp"]

    def verified(*words: str) -> tuple[int, str, str]:
        return ended(start([*command, *words], tmp_path, tmp_path / "cache", PYTHONPATH=TESTS_PATH))

    status, out, err = verified("-o", "kept")
    assert status == 0, err
    assert "result: the same bits" in out
    assert "The same bits in all 3 steps" in (tmp_path / "kept" / "job" / "report.html").read_text()
    compared = [*LOCKSTEP, "diff", "kept/reference", "kept/job", "--exact"]
    assert ended(start(compared, tmp_path, tmp_path / "cache"))[0] == 0
    status, out, err = verified("strategy.name=support.buggy.CountedTwice")
    assert status == 1, err
    assert "every gradient is 2 (the number of ranks) times" in out
    assert not (tmp_path / "outputs").exists()
    status, _, err = verified("--steps=0")
    assert status == 2
    assert "--steps: invalid value 0" in err


def test_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(TINY | {"launch": {"device": "cpu"}}))
    assert os.environ.get("RANK") is None
    command = [*TORCHRUN, "verify", "job.yaml", "--steps=2", "strategy.name=allreduce"]
    status, out, err = ended(start(command, tmp_path, tmp_path / "cache"))
    assert status == 0, err
    assert out.count("result: the same bits") == 1
