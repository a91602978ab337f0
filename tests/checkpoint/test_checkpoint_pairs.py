"""Checkpoints saved under any strategy and number of processes are resumed under any other; output folders need not be
shared."""

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.checkpoint import Checkpoints
from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.config.schedules import learning_rate
from lockstep.distributed.world import World
from support.checkpoints import digest as digest_of
from support.fsdp2_runs import LLAMA
from support.harness import build_with_feed, digest, run_on, tiny
from support.marks import long
from support.saving import job_of

NAMES = plugins.names("strategies")
EXACT = {name for name in NAMES if plugins.find("strategies", name).exact}
SAVING = {"single": 1, "allreduce": 3, "ddp": 2, "fsdp2": 4, "pipeline": 2, "hf_accelerate": 4, "hf_trainer": 3}
SAVING |= {"zero1": 2, "zero2": 3, "zero3": 4}
LOADING = {"single": 1, "allreduce": 2, "ddp": 4, "fsdp2": 3, "pipeline": 4, "hf_accelerate": 2, "hf_trainer": 2}
LOADING |= {"zero1": 3, "zero2": 1, "zero3": 2}


Saved = Callable[[str], tuple[Path, str]]


def run_of(name: str, folder: Path, *overrides: str) -> Run:
    stages = ("strategy.options.stages=2",) if name == "pipeline" else ()
    return tiny(f"output={folder}", f"strategy.name={name}", "micro_batches=4", *stages, *overrides)


def saved(world: World, run: Run) -> str:
    """Train two steps and save a checkpoint. Returns the digest of the saved state."""
    _, strategy, feed = build_with_feed(run, world)
    for t in range(2):
        strategy.train_step(feed.make(t), learning_rate(run.optim, t + 1, 6))
    checkpoints = Checkpoints(job_of(run), world, 6)
    checkpoints.save(2, strategy.state)
    checkpoints.settle()
    found = digest(strategy.state.state_dict())
    strategy.close()
    return found


def gone_on_with(world: World, run: Run, folders: list[Path]) -> list[dict[str, Any]]:
    """Train one more step from the checkpoint in each folder with one strategy object, so that nothing of a previous
    state may remain."""
    _, strategy, feed = build_with_feed(run, world)
    found = []
    for folder in folders:
        here = run.model_copy(update={"output": str(folder)})
        step, notes = Checkpoints(job_of(here), world, 6).resume(strategy.state)
        loaded = digest(strategy.state.state_dict())
        loss = float(strategy.train_step(feed.make(2), learning_rate(run.optim, 3, 6)).loss)
        found.append(
            {"step": step, "notes": notes, "loaded": loaded, "loss": loss, "after": digest(strategy.state.state_dict())}
        )
    strategy.close()
    return found


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return the function that saves with a strategy, once each, and returns the folder and the state's digest."""

    @cache
    def of(name: str) -> tuple[Path, str]:
        run = run_of(name, tmp_path_factory.mktemp(name) / "out")
        return run.folder, run_on(SAVING[name], saved, run)[0]

    return of


@pytest.fixture(scope="module")
def straight(saved_by: Saved) -> dict[str, Any]:
    """The result of `single` from its own checkpoint."""
    run = run_of("single", saved_by("single")[0])
    return run_on(1, gone_on_with, run, [run.folder])[0][0]


def test_every_strategy_is_in_a_pair() -> None:
    assert set(SAVING) == set(LOADING) == set(NAMES)


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_all_strategies_save_the_same_tensors(name: str, saved_by: Saved) -> None:
    """All strategies save the same full tensors, each once, however they are spread over files."""
    folder, state = saved_by(name)
    assert digest_of(folder / "checkpoints" / "step-000002") == state
    if name in EXACT:
        assert state == saved_by("single")[1]


@pytest.mark.processes
# pipeline stages hold different numbers of tensors
@pytest.mark.parametrize("name", [n for n in NAMES if n != "pipeline"])
def test_each_rank_writes_about_its_share(name: str, saved_by: Saved) -> None:
    sizes = [p.stat().st_size for p in saved_by(name)[0].rglob("*.safetensors")]
    assert len(sizes) == SAVING[name]
    assert max(sizes) < 1.5 * sum(sizes) / len(sizes)


def goes_on(name: str, savers: Sequence[str], saved_by: Saved, straight: dict[str, Any]) -> None:
    """Check that `name` resumes from the checkpoints of these strategies."""
    run = run_of(name, saved_by(name)[0])
    first, *others = run_on(LOADING[name], gone_on_with, run, [saved_by(saver)[0] for saver in savers])
    for other in others:
        assert [(o["step"], o["notes"], o["loss"]) for o in other] == [
            (f["step"], f["notes"], f["loss"]) for f in first
        ]
    for saver, found in zip(savers, first, strict=True):
        assert found["step"] == 2
        assert found["loaded"] == saved_by(saver)[1], f"{saver} -> {name}: other bits were loaded than were saved"
        if saver in EXACT and name in EXACT:
            assert found["notes"] == []
            assert (found["loss"], found["after"]) == (straight["loss"], straight["after"]), f"{saver} -> {name}"
        else:
            assert found["loss"] == pytest.approx(straight["loss"], rel=1e-4)  # AdamW amplifies rounding differences
            assert len(found["notes"]) == 1
            assert "only to rounding" in found["notes"][0]
            assert (saver if saver not in EXACT else name) in found["notes"][0]


# All strategies save the same tensors, spread over one file per rank (`test_all_strategies_save_the_same_tensors`).
# These cover a single rank, replicated ranks, stages, fully sharded ranks, and an engine.
SAVERS = ["single", "ddp", "pipeline", "fsdp2", "zero3"]


@pytest.mark.processes
@pytest.mark.parametrize("name", [long(name) if name == "zero1" else name for name in NAMES])  # zero2 has its code
def test_every_strategy_resumes_from_others(name: str, saved_by: Saved, straight: dict[str, Any]) -> None:
    goes_on(name, [*dict.fromkeys([name, *SAVERS])], saved_by, straight)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_all_pairs(name: str, saved_by: Saved, straight: dict[str, Any]) -> None:
    goes_on(name, NAMES, saved_by, straight)


@pytest.mark.processes
def test_a_checkpoint_of_ddp_under_fsdp2(saved_by: Saved, straight: dict[str, Any]) -> None:
    """One pair of the tests above, for `make test`."""
    goes_on("fsdp2", ["ddp"], saved_by, straight)


@pytest.mark.processes
def test_the_control_one_step_less_has_other_bits(straight: dict[str, Any]) -> None:
    assert straight["loaded"] != straight["after"]


@pytest.mark.processes
@pytest.mark.parametrize("option", ["replicate=2", "reshard_after_forward=false"])
def test_fsdp2_resumes_with_other_meshes(
    option: str, tmp_path: Path, saved_by: Saved, straight: dict[str, Any]
) -> None:
    run = run_of("fsdp2", tmp_path / "out", f"strategy.options.{option}")
    state = run_on(4, saved, run)[0]
    assert state == saved_by("single")[1]
    single = run_of("single", tmp_path / "out")
    assert run_on(1, gone_on_with, single, [run.folder])[0][0] == straight
    (there,) = run_on(4, gone_on_with, run, [saved_by("single")[0]])[0]
    assert there == straight


@pytest.mark.processes
def test_shards_of_tensors_and_fsdp_are_reassembled(tmp_path: Path) -> None:
    """Tensor parallelism cuts tensors that FSDP cuts again. A run resumed from such shards has the bits of one
    process."""

    def of(name: str, **options: Any) -> Run:
        strategy = {"name": name, "tensor_leaves": 2, "options": options}
        return tiny(model=LLAMA, output=str(tmp_path), strategy=strategy)

    run = of("fsdp2", tensor_parallel=2)
    state = run_on(4, saved, run)[0]
    assert digest_of(tmp_path / "checkpoints" / "step-000002") == state
    straight, *others = [
        run_on(ranks, gone_on_with, there, [tmp_path])[0][0]
        for ranks, there in ((1, of("single")), (4, run), (2, run), (2, of("ddp")), (3, of("fsdp2", gather="step")))
    ]
    assert straight["loaded"] == state
    assert all(other == straight for other in others)


# -- machines that do not share the output folder --------------------------------------------------------------------


def apart(world: World, run: Run) -> tuple[list[str], tuple[int, list[str]], str, str]:
    """Save and resume with a separate output folder per rank."""
    run = run.model_copy(update={"output": f"{run.output}-{world.rank}"})
    _, strategy, feed = build_with_feed(run, world)
    strategy.train_step(feed.make(0), 1e-3)
    said: list[str] = []
    checkpoints = Checkpoints(job_of(run), world, 6, said.append)
    checkpoints.save(1, strategy.state)
    checkpoints.settle()
    before = digest(strategy.state.state_dict())
    strategy.train_step(feed.make(1), 1e-3)
    resumed = Checkpoints(job_of(run), world, 6).resume(strategy.state)
    after = digest(strategy.state.state_dict())
    strategy.close()
    return said, resumed, before, after


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_rank_0_alone_writes_and_reads_where_the_folder_is_not_shared(name: str, tmp_path: Path) -> None:
    run = run_of(name, tmp_path / "out")
    found = run_on(2, apart, run)
    if name == "ddp":
        for said, resumed, before, after in found:
            assert (said, resumed) == ([], (1, []))
            assert before == after
        assert not (tmp_path / "out-1").exists()
    else:
        assert "rank 1 holds parts of the model and cannot see the folder of rank 0" in found[0][0][0]
        assert found[0][1] == (0, [])


@pytest.mark.processes
def test_a_copied_checkpoint_is_the_same(tmp_path: Path, saved_by: Saved) -> None:
    folder, state = saved_by("fsdp2")
    shutil.copytree(folder / "checkpoints" / "step-000002", tmp_path / "step-000002")
    assert digest_of(tmp_path / "step-000002") == state
    next(tmp_path.rglob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="is missing"):
        digest_of(tmp_path / "step-000002")
