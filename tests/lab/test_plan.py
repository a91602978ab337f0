"""Commands that start no process: plan, list, schema, help."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.data.job import Job
from lockstep.distributed import job_record
from lockstep.lab.import_config.import_config import FILL_IN
from lockstep.launchers import start
from lockstep.strategies.exact import stepper
from lockstep.tasks.task import make_task
from lockstep.training import resolve
from support.command import STEPS, write
from support.harness import tiny
from support.messages import mentions


def test_plan_starts_nothing(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml"]) == 0
    said = capsys.readouterr().out
    assert "2, each with 2 of 4 micro-batches" in said
    assert "-m lockstep train" not in said, "its command is this one"
    assert {p.name for p in run_file.parent.iterdir()} == {"run.yaml"}


@pytest.mark.parametrize(("status", "imports"), [(None, 1), (75, 1), (0, 0)])
def test_finished_run_starts_no_fork_server(
    status: int | None, imports: int, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []
    monkeypatch.setattr("lockstep.launchers.local.prestart", lambda *_: began.append(1))
    (run_file.parent / "out").mkdir()
    job_record.write(run_file.parent / "out", replace(job_record.here("local", 2), status=status))
    start.planned(load("run.yaml", []))
    assert len(began) == imports


@pytest.mark.parametrize(
    "words",
    [
        ["run.yaml", "steps=7", "launch.processes=3"],
        ["run.yaml", "--steps=7", "--launch.processes=3"],
        ["run.yaml", "--steps", "7", "--launch.processes", "3"],
        ["--steps", "7", "run.yaml", "launch.processes=3"],
        ["steps=7", "--launch.processes", "3", "run.yaml"],
    ],
)
def test_overrides_in_every_spelling_and_order(
    words: list[str], run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 0
    said = capsys.readouterr().out
    assert "7 steps" in said
    assert "3, each with 1 or 2 of 4" in said


def test_a_step_that_is_smaller_than_the_run_file_says(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for size, told in ((100, 0), (101, 1)):
        write(run_file.parent, batch_size=size, micro_batches=2, steps=1, epochs=None, strategy={"name": "single"})
        for command in ("plan", "train"):
            assert main([command, "run.yaml", f"output=out-{size}", "launch.processes=1"]) == 0
            said = capsys.readouterr()
            assert (said.out + said.err).count("note: batch_size is 101, and train has 100 examples") == told


def test_plan_summarizes_steps_and_work(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_file.parent, epochs=2.5, steps=None, evaluate={"every": "epoch"}, micro_batches=8)
    assert main(["plan", "run.yaml"]) == 0
    rows = {line[:11].strip(): line[11:].strip() for line in capsys.readouterr().out.splitlines()}
    run = load("run.yaml", [])
    task = make_task(Job.of(run).with_data())
    count = sum(p.numel() for p in task.model().parameters())
    assert rows["model"] == f"gpt2 from scratch, {count / 1e6:.2f}M parameters"
    assert rows["data"].startswith("builtin/emotion: 100 train, 100 validation, 100 test examples; mean ")
    assert rows["length"] == "12 steps of 22 examples: 2.4 epochs of 5 steps; 2 evaluations during training"
    assert rows["rate"] == "▁▁▅▅▅▅███████▇▇▇▆▆▆▆▅▅▅▅▅▅▅▄▄▄▄▃▃▃▂▂▂▂▁▁ " + (
        "linear: 0 at first, 0.005 at step 2, 0.0005 at the last"
    )
    assert rows["optimizer"] == "adamw: 11 tensors at rate 0.005, decay 0.01; 18 tensors at rate 0.005, decay 0"
    mean = task.splits["train"].lengths.sum() / 5  # over the five steps of an epoch
    assert float(rows["tokens"].split()[1].replace(",", "")) == pytest.approx(mean, rel=0.05)
    held = (24, 4, 4, 8, 8)  # bytes a parameter; of four micro-batches two sums wait, with DDP's buckets
    total, weights, gradients, moments, sums = (f"{each * count / 1e3:.0f} kB" for each in held)
    assert rows["memory"].startswith(
        f"about {total} a process (weights {weights}, gradients {gradients}, optimizer {moments}, partial sums {sums});"
    )


@pytest.mark.parametrize(
    ("words", "held"),
    [
        (["strategy=ddp"], (4, 4, 8)),
        (["strategy=single", "optim=sgd"], (4, 4, 4)),
        (["strategy=single", "optim=sgd", "optim.momentum=0"], (4, 4, 0)),
        (["strategy=single", "optim=lion"], (4, 4, 4)),
        (["strategy=fsdp2", "optim=adafactor"], (1, 1, 0)),
        (["strategy=zero1", "optim=lion"], (4, 4, 2)),
        (["strategy=zero1"], (4, 4, 3)),
        (["strategy=zero2"], (4, 1, 3)),
        (["strategy=zero3"], (1, 1, 3)),
        (
            ["strategy=zero3", "precision=bf16", "strategy.options={bf16: {enabled: true}}", "strategy.exact=false"],
            (0.5, 0.5, 3),
        ),
        (["strategy=hf_accelerate", "strategy.options={deepspeed: {zero_stage: 2}}"], (4, 1, 3)),
        (["strategy=fsdp2"], (1, 1, 2)),
        (["strategy=fsdp2", "strategy.options={gather: step}"], (4, 4, 2)),
        (["strategy=fsdp2", "strategy.options={replicate: 2}"], (2, 2, 4)),
        (["strategy=pipeline"], (1, 1, 2)),
        (["strategy=pipeline", "strategy.options={stages: 2}"], (2, 2, 4)),
    ],
)
def test_bytes_per_parameter_equal_the_documented_ones(
    words: list[str], held: tuple[float, ...], run_file: Path
) -> None:
    """The docs are docs/reference/strategies.md, for four processes; tests/strategies/test_memory.py measures the
    bytes."""
    run = load("run.yaml", words)
    assert tuple((job := Job.of(run, 4)).strategy.memory.bytes_held(job).values()) == held


def test_plan_shows_how_fsdp2_gathers(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in ([], "; gather: step, by the memory of this machine;"), (["strategy.exact=false"], ""):
        assert main(["plan", "run.yaml", "strategy=fsdp2", *words]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
        assert said in line
        assert ("gather" in line) == bool(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.source=./texts"], "data.source"),
        (["data={train: nothing.csv}"], "nothing.csv"),
        (["model.type=gtp2"], "unknown type 'gtp2'"),
        (["model.config.n_lyer=2"], "has no entry 'n_lyer'"),
        (["task.label=nothing"], "nothing"),
        (["strategy.options={bucket_cap: 3}"], "bucket_cap"),
        (["optim.groups=[{match: 'clasifier.*', learning_rate: 1e-3}]"], "optim.groups: no trainable weight"),
        (["model.freeze=['*.h.7.*']"], "model.freeze: no trainable weight is called '*.h.7.*'"),
        (["data.max_length=4000"], "data.max_length"),
        (["output=run.yaml/out"], "output"),
    ],
)
def test_plan_refuses_what_train_refuses(
    words: list[str], said: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusals = []
    for command in ("plan", "train"):
        assert main([command, "run.yaml", "launch.processes=1", *words]) == 2
        refusals.append(capsys.readouterr().err)
        assert {p.name for p in run_file.parent.iterdir()} == {"run.yaml"} or command == "train"
    assert refusals[0] == refusals[1]
    assert said in refusals[0]


def test_facts_that_need_the_hub_are_unknown_offline(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, status in ([], 1), (["--offline"], 0):  # HF_HUB_OFFLINE is set
        assert main(["plan", "run.yaml", "data.source=somebody/texts", *words]) == status
        said = capsys.readouterr()
        told = "data.source: 'somebody/texts' is not a local file"
        assert f"note: not checked on this machine: {told}" in said.out
        assert f"length     {STEPS} steps" in said.out
        assert (f"this would fail: {told}" in said.err) == (status == 1)
    assert main(["plan", "run.yaml", "--simulate", "--offline"]) == 2


def test_a_job_that_needs_more_memory_than_there_is_would_fail(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load("run.yaml", [])
    count = sum(p.numel() for p in make_task(Job.of(run).with_data()).model().parameters())
    for there, status in (20 * count, 0), (20 * count - 1, 1):  # weights, gradients, moments and one partial sum
        monkeypatch.setattr("lockstep.distributed.system_metrics.capacity", lambda device, sharing, n=there: n)
        assert main(["plan", "run.yaml"]) == status
        said = capsys.readouterr()
        assert "memory     about" in said.out
        assert ("this would fail: memory: a process needs about" in said.err) == (status == 1)
    # on other machines: what they have, where it is known
    small = ["launch={name: slurm, machines: 1, processes: 2}"]
    assert main(["plan", "run.yaml", *small]) == 0
    assert main(["plan", "run.yaml", *small, "launch.memory=4G"]) == 0
    assert main(["plan", "run.yaml", *small, "launch.memory=3K"]) == 1
    assert mentions(capsys.readouterr().err, "LS8082", "2")


@pytest.mark.parametrize("launcher", ["local", "sagemaker"])
def test_plan_refuses_fill_in_values(launcher: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve.FILL_IN == FILL_IN
    launch = (
        f"launch={{name: {launcher}, role: 'arn:aws:iam::123456789012:role/x', s3: s3://bucket/p, region: eu-west-1,"
    )
    launch += " instance: ml.g5.xlarge, processes: 1}"
    words = [f"data.source={FILL_IN}", f"model={{source: {FILL_IN}}}", *([launch] if launcher != "local" else [])]
    for command in ("plan", "train"):
        assert main([command, "run.yaml", *words]) == 2
        said = capsys.readouterr().err
        assert mentions(said, "LS5130", "data.source", "model.source")


def test_plan_without_a_file_is_the_quick_start(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--epochs", "2"]) == 0
    said = capsys.readouterr().out
    assert "outputs/quickstart" in said
    assert "376 steps of 64 examples: 2 epochs of 188 steps" in said


def test_list_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    for name in ("classification", "local", "tcp", "jsonl"):
        assert f"\n  {name} " in said
    for name, bits in (("single", "same bits"), ("ddp", "same bits"), ("zero1", "same bits")):
        assert re.search(rf"^  {name} +{bits} +(ready|lacking) +\S", said, re.MULTILINE)
    assert re.search(r"^  muon +ready +Muon", said, re.MULTILINE)
    assert main(["schema"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"data", "model", "optim"} <= found["properties"].keys()


def test_no_command_is_help_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0


def test_report_of_no_run_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"lockstep: {tmp_path} is not the output folder")


@pytest.mark.parametrize(("name", "least", "most"), [("adamw", 8, 8), ("muon", 4.5, 7.5), ("adafactor", 0.1, 2)])
def test_the_optimizers_bytes_equal_those_of_its_state(name: str, least: float, most: float) -> None:
    """Muon keeps 4 bytes per parameter for a matrix of the layers and 8 for the rest; Adafactor keeps a number per row
    and one per column."""
    run = tiny(f"optim={name}", "model.config.n_embd=64")
    model = make_task(Job.of(run).with_data()).model()
    optimizer = stepper.build(run.optim, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    count = sum(p.numel() for p in model.parameters())
    found = stepper.state_bytes(run.optim, model)
    assert found * count == pytest.approx(sum(each.nbytes for each in kept))
    assert least <= found <= most
