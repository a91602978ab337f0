"""Fingerprints of steps and of the state, and `lockstep replay`, which recomputes steps."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.checkpoint.shard_files import StateHash
from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.distributed.tensor_hashes import hash_sum
from lockstep.distributed.world import World
from lockstep.training import fingerprints
from lockstep.training.data_loader import StepLoader
from lockstep.training.step_record import StepRecord
from support.harness import TINY, build, run_on, tiny
from support.marks import needs
from support.messages import mentions

ONE = ("strategy.name=single", "launch.processes=1", "steps=12", "checkpoint.every=5", "fingerprint.every=4")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / fingerprints.FILE).read_text().splitlines()]


def trained(folder: Path, name: str, *overrides: str) -> tuple[int, Path]:
    run = load(None, [*ONE, *overrides], TINY | {"output": str(folder / name)})
    (folder / f"{name}.yaml").write_text(run.dump())
    return main(["train", str(folder / f"{name}.yaml")]), folder / name


# -- the hash of a state ---------------------------------------------------------------------------------------------


@cache
def here() -> World:
    return World(tiny("strategy.name=single"))


def hashed(**tensors: torch.Tensor) -> dict[str, str]:
    return StateHash(here()).of({n.replace("_", "."): t for n, t in tensors.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (70_000,), (3, 70_000), (2, 3, 4)])
def test_one_bit_anywhere_changes_the_hash(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 100, shape, generator=draw).to(dtype)
    before = hashed(model_w=tensor)
    assert hashed(model_w=tensor.clone()) == before
    flat = tensor.view(-1)
    for place in {0, flat.numel() // 2, flat.numel() - 1}:
        for bit in range(8):  # bits of the lowest byte
            changed = tensor.clone().view(-1)
            changed.view(torch.uint8)[place * flat.element_size()] ^= 1 << bit
            assert hashed(model_w=changed.view(shape))["weights"] != before["weights"]


def test_the_hash_depends_on_positions_names_shapes_and_dtypes() -> None:
    tensor = torch.arange(6.0)
    swapped = tensor[[1, 0, 2, 3, 4, 5]]
    found = [
        hashed(model_w=tensor),
        hashed(model_w=swapped),
        hashed(model_v=tensor),
        hashed(model_w=tensor.view(2, 3)),
        hashed(model_w=tensor.view(torch.int32)),
        hashed(model_w=tensor.t() if tensor.dim() > 1 else tensor.flip(0)),
        hashed(model_w=tensor, model_v=torch.zeros(1)),
    ]
    assert len({each["weights"] for each in found}) == len(found)
    state = hashed(model_w=tensor, optimizer_w=tensor)
    assert state["weights"] == found[0]["weights"]
    assert state["optimizer"] != hashed(model_w=tensor)["optimizer"]


def test_hashes_of_shards_add_up_to_the_hash_of_the_tensor() -> None:
    """The hashes of a tensor's rows, columns or blocks on different ranks add up to the hash of the full tensor."""
    whole = torch.randn(50, 40, 45, generator=torch.Generator().manual_seed(0))
    wanted = int(hash_sum(whole))
    for cuts in ([(0, 13), (13, 50)], [(0, 40)], [(0, 7), (7, 30), (30, 45)]):
        dim = {50: 0, 40: 1, 45: 2}[cuts[-1][1]]
        total = 0
        for begin, end in cuts:
            offsets = [0, 0, 0]
            offsets[dim] = begin
            total += int(hash_sum(whole.narrow(dim, begin, end - begin), tuple(whole.shape), tuple(offsets)))
        assert (total - wanted) % 2**64 == 0


def state_after(world: World, run: Run) -> list[dict[str, str]]:
    task, strategy = build(run, world)
    feed, hash_of, found = StepLoader(task, strategy.own_micro_batches(), world.device), StateHash(world), []
    for step in range(2):
        strategy.train_step(feed.make(step), 1e-3)
        found.append(hash_of.of(strategy.state.sharded_state_dict()))
    strategy.close()
    return found


@pytest.mark.processes
def test_the_hash_of_a_sharded_state_equals_that_of_one_process() -> None:
    run = tiny("strategy.name=single")
    (alone,) = run_on(1, state_after, run)
    assert alone[0] != alone[1]
    zero = (("zero2", 3), ("zero3", 2)) if importlib.util.find_spec("deepspeed") else ()
    for name, ranks in (("ddp", 3), ("fsdp2", 3), ("hf_accelerate", 2), ("pipeline", 2), *zero):
        run = tiny(f"strategy.name={name}")
        for rank in run_on(ranks, state_after, run):
            assert rank == alone, (name, ranks)


# -- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not change it."""
    status, folder = trained(tmp_path_factory.mktemp("fingerprints"), "out", "checkpoint.keep=5")
    assert status == 0
    return folder


def test_every_step_has_a_line_and_some_have_the_states_hash(output: Path) -> None:
    found = lines(output)
    assert [line["step"] for line in found] == list(range(1, 13))
    assert [line["step"] for line in found if "weights" in line] == [4, 5, 8, 10, 12]
    assert len({line["hash"] for line in found}) == 12
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in metrics if line["split"] == "train")
    assert (found[0]["loss"], found[0]["grad_norm"]) == (first["loss"], first["grad_norm"])


def test_a_resumed_run_has_the_lines_of_an_uninterrupted_one(output: Path, tmp_path: Path) -> None:
    assert trained(tmp_path, "out", "max_time=0.001s")[0] == 75
    begun = lines(tmp_path / "out")
    assert 0 < len(begun) < 12
    with open(tmp_path / "out" / fingerprints.FILE, "a") as file:
        file.write('{"step": 7, "hash": "of a run that was killed after its checkpoint"}\n{"step": 8, "ha')
    assert trained(tmp_path, "out")[0] == 0
    now, then = lines(tmp_path / "out"), lines(output)
    stopped = begun[-1]["step"]  # has a checkpoint, and so a hash, that the other one does not have
    strip = [{k: v for k, v in line.items() if line["step"] != stopped or k == "hash"} for line in now]
    assert strip == [{k: v for k, v in line.items() if line["step"] != stopped or k == "hash"} for line in then]


# -- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("step", "more"),
    [
        (7, []),
        (12, ["--processes", "2"]),
        (3, ["--strategy", "allreduce"]),
        (12, ["--strategy", "zero3", "--processes", "2"]),
    ],
)
def test_a_step_is_replayed_from_the_checkpoint_before_it(
    step: int, more: list[str], output: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if "zero3" in more:
        needs("deepspeed")
    before = {p: p.stat().st_mtime_ns for p in output.rglob("*")}
    assert main(["replay", str(output), "--step", str(step), *more]) == 0
    said = " ".join(capfd.readouterr().out.split())
    began = {7: "the checkpoint of step 5", 12: "the checkpoint of step 10", 3: "the start"}[step]
    assert f"step {step} of 12, recomputed from {began} (" in said
    assert "all have the same bits" in said
    norm = lines(output)[step - 1]["grad_norm"]
    assert f"gradient norm {norm:.6g}" in said
    assert {p: p.stat().st_mtime_ns for p in output.rglob("*")} == before


@pytest.mark.processes
def test_replay_finds_a_wrong_line(output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "out"
    shutil.copytree(output, copy, symlinks=True)
    rewritten = StepRecord.of_numbers(8, 1.0, 1.0).to_json()
    for changes, wanted in (
        ({"hash": "0" * 16}, "step 8, recorded: the hash does not match loss and gradient norm"),
        (rewritten, "in step 8 loss or gradient norm differ"),
        ({"weights": "0" * 16}, "in step 8 the weights differ"),
    ):
        wrong = lines(output)
        wrong[7] |= changes
        (copy / fingerprints.FILE).write_text("".join(json.dumps(line) + "\n" for line in wrong))
        assert main(["replay", str(copy), "--step", "9"]) == 1
        assert f"DIFFERENT from what was trained: {wanted}" in " ".join(capfd.readouterr().out.split())


@pytest.mark.processes
def test_a_step_can_be_replayed_from_python(output: Path) -> None:
    found = lockstep.replay(output, 7)
    assert found.same
    total = found.batch.targets
    run = Run.load(output / "run.yaml")
    found.model.eval()
    alone = {}
    with torch.no_grad():
        for micro in found.batch.micro_batches:
            logits = found.model(**micro.inputs).logits
            losses = torch.nn.functional.cross_entropy(logits, micro.targets, reduction="none")
            alone[micro.index] = losses[micro.targets >= 0]
    assert sum(len(each) for each in alone.values()) == total == len(found.losses)
    assert sorted(found.losses.values()) == pytest.approx(sorted(torch.cat(list(alone.values())).tolist()), rel=1e-4)
    norm = sum(float(g.double().norm()) ** 2 for g in found.gradients.values()) ** 0.5
    assert norm == pytest.approx(lines(output)[6]["grad_norm"], rel=1e-6)
    assert set(found.gradients) == {n for n, p in found.model.named_parameters() if p.requires_grad}
    assert run.optim.max_grad_norm == 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "13"], "--step: 13 is not a step of this run; expected 1 to 12"),
        (["--step", "0"], "--step: 0 is not a step of this run"),
        (["--step", "3", "--processes", "0"], "--processes: invalid value 0"),
        (["--step", "3", "--strategy", "fsdp3"], "unknown strategy 'fsdp3'"),
        (["--step", "3", "nonsense=1"], "nonsense"),
        (["--step", "3", "data.source=gone/data.jsonl"], "; recorded for step 3: loss 1."),
        pytest.param(
            ["--step", "3", "launch.device=cuda"],
            "; recorded for step 3: loss 1.",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is the device that is to be missing"),
        ),
    ],
)
@pytest.mark.processes
def test_steps_that_cannot_be_replayed_are_refused(
    words: list[str], said: str, output: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(output), *words]) == 2
    assert said in " ".join(capfd.readouterr().err.split())


@pytest.mark.processes
def test_a_checkpoint_of_another_version_is_named_and_not_used(
    output: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The replay starts from what is before that checkpoint, here from the beginning."""
    copy = Path(shutil.copytree(output, tmp_path / "copy", symlinks=True))
    for path in copy.glob("checkpoints/step-*/manifest.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    assert main(["replay", str(copy), "--step", "6"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "step-000005 is not used: " in said
    assert "step-000010 is not used" not in said  # it is of a later step
    assert "step 6 of 12, recomputed from the start (" in said
    assert "6 of 6 steps were recorded; all have the same bits" in said


@pytest.mark.processes
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="needs two instruction sets")
def test_a_replay_from_the_start_names_another_instruction_set(output: Path) -> None:
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-m", "lockstep", "replay", str(output), "--step", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert "recomputed from the start (" in done.stdout, done.stderr
    assert "instruction set was " in done.stdout, done.stdout


def test_a_folder_that_is_no_output_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path), "--step", "3"]) == 2
    assert mentions(capfd.readouterr().err, "LS1123")
