"""`lockstep bench`: its measurements, its messages about jobs that cannot run, and its arithmetic."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config.run import load
from lockstep.lab import bench as benched
from lockstep.lab import bench_options
from lockstep.lab.bench import Bench, details, efficiency, plots, reasons, rows_of, table
from lockstep.lab.bench_row import BenchRow
from lockstep.strategies.engines import blocks
from lockstep.training.timing import RankMemory, Timing
from support.command import LOCKSTEP, STEPS, ended, start, write
from support.harness import TINY
from support.places import TESTS_PATH


@pytest.mark.processes
def test_failed_job_is_one_line_and_other_jobs_run(tmp_path: Path, cache: Path) -> None:
    write(tmp_path)
    words = ["run.yaml", "--strategies", "allreduce", "support.misbehaving.Crashing", "--processes", "1", "9"]
    words += ["--steps", "3", "--skip", "1", "--rounds", "1"]
    status, out, err = ended(start([*LOCKSTEP, "bench", *words], tmp_path, cache, PYTHONPATH=TESTS_PATH))
    assert status == 0, err
    found = json.loads((tmp_path / "out-bench" / "bench.json").read_text())
    rows = {(row["series"], row["processes"]): row for row in found["rows"]}
    good = rows["allreduce", 1]
    assert good["reason"] is None
    assert good["rounds"][0]["steps"] == 3
    # steps 1 to 3 of epochs of 100 examples in batches of 22: none of them is an epoch's last
    assert good["rounds"][0]["examples"] == 66
    assert len(good["rounds"][0]["step_seconds"]) == 3
    assert good["rounds"][0]["whole_steps"] == STEPS
    (rank,) = good["rounds"][0]["ranks"]
    assert rank["peak_resident"] > 50 * 2**20
    # AdamW in float32: weights, two moments; at the update gradients too
    assert (
        12
        <= rank["at_rest"] / good["rounds"][0]["parameters"]
        < 16
        <= rank["at_update"] / good["rounds"][0]["parameters"]
    )
    assert "there is no second step" in rows["support.misbehaving.Crashing", 1]["reason"]
    assert "9 processes cannot share 4 micro-batches" in rows["allreduce", 9]["reason"]
    assert out.count("cannot run: ") == 3
    page = (tmp_path / "out-bench" / "bench.html").read_text()
    assert "there is no second step" in page
    assert not re.search(r'(src|href)="http', page)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--strategies", "dpd"], "did you mean 'ddp'"),
        (["--over", "optim.lerning_rate=1"], "learning_rate"),
        (["--over", "precision"], "--over"),
        (["--micro-batches", "23"], "is greater than batch_size"),
        (["--processes", "0"], "--processes"),
        (["--steps", "0"], "--steps"),
        (["--processes", "9"], "jobs can run"),
        (["--out", "run.yaml"], "--out: cannot write to run.yaml"),
    ],
)
def test_bad_values_are_refused_before_anything_starts(
    words: list[str], said: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "run.yaml", *words]) == 2
    assert said in capsys.readouterr().err
    assert os.listdir(run_file.parent) == ["run.yaml"]


def asked(folder: Path, **values: Any) -> Bench:
    base = load(None, [], TINY)
    return Bench(
        base, values.pop("over", {}), values.pop("processes", [1, 2]), 3, 1, 2, values.pop("weak", False), folder
    )


def test_weak_scaling_grows_the_batch_with_the_processes(tmp_path: Path) -> None:
    rows = rows_of(asked(tmp_path, weak=True, processes=[1, 3]), None, {}, TINY)
    assert [(row.run.batch_size, row.run.micro_batches) for row in rows if row.run] == [(22, 8), (66, 24)]
    rows = rows_of(asked(tmp_path, over={"micro_batches": [4, 8]}, processes=[1]), None, {}, TINY)
    assert [row.run.micro_batches for row in rows if row.run] == [4, 8]
    assert [row.series for row in rows] == ["ddp, 4 micro-batches", "ddp, 8 micro-batches"]


def row(processes: int, series: str, *seconds: float) -> BenchRow:
    """Return a row with 100 examples per round, in these seconds."""
    rank = RankMemory("host", "CPU", 300 * 2**20, 0, 12, 16)
    versions: dict[str, str] = {}
    rounds = {
        i: Timing(processes, 1, 5, 100, 1000, 1100, s, [s / 5] * 5, 50, 1, [rank] * processes, versions)
        for i, s in enumerate(seconds)
    }
    return BenchRow(processes, series, {}, None, None, rounds)


def test_efficiency_is_the_median_of_the_ratios_within_a_round() -> None:
    # the second round met a slow machine: everything took twice as long
    rows = [row(1, "ddp", 4.0, 8.0, 4.0), row(2, "ddp", 2.5, 5.0, 2.0), row(2, "fsdp2", 4.0, 8.0, 4.0)]
    assert efficiency(rows[0], rows) == 1.0
    assert efficiency(rows[1], rows) == pytest.approx(0.8)
    assert efficiency(rows[2], rows) == 1.0  # nothing smaller of its series
    assert rows[1].middle()["examples_per_s"] == 40.0
    assert rows[1].middle()["whole_run_s"] == pytest.approx(2.5 / 5 * 50)


def test_the_table_names_what_was_measured_and_the_reasons_what_was_not() -> None:
    rows = [row(1, "ddp", 4.0), row(2, "ddp", 2.5), BenchRow(4, "ddp", {}, None, "out of memory")]
    columns, cells = table(rows)
    assert [line[columns.index("efficiency")] for line in cells] == ["100%", "80%"]
    assert reasons(rows) == ["ddp, 4 processes: out of memory"]
    assert len(details(rows)[1]) == 2
    drawn = "".join(plots(rows))
    assert "examples per second" in drawn
    assert "linear scaling" in drawn
    assert "GPU" not in drawn


# -- options: `--options` ---------------------------------------------------------------------------------------------

COSTS = {
    "": 1.0,
    "micro_batches=4": 0.8,
    "micro_batches=16": 1.3,
    "data.padding=batch": 0.7,
    "model.compile=true": 1.01,
}


def tried(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slow: dict[tuple[int, int], float], *words: str
) -> tuple[int, Path]:
    """Run `bench --options` with seconds from `COSTS`; `slow`: factor of the n-th job in a round."""
    jobs: list[int] = []

    def one(request: Bench, row: BenchRow, number: int, _: Path) -> None:
        place = jobs.count(number)
        jobs.append(number)
        keys = bench_options.words(bench_options.varied(row)).split() or [""]
        seconds = slow.get((number, place), 1.0)
        for key in keys:
            seconds *= COSTS.get(key, 2.0)
        rank = RankMemory("host", "CPU", 300 * 2**20, 0, 12, 16)
        row.rounds[number] = Timing(1, 1, 5, 100, 1000, 1100, seconds, [seconds / 5] * 5, 50, 1, [rank], {})

    monkeypatch.setattr(benched, "one", one)
    monkeypatch.setattr(blocks, "_check_traced", lambda job: None)  # seconds, of which test_compiled.py has tests
    out = folder / "tried"
    return main(["bench", "run.yaml", "--options", "--processes", "1", "--rounds", "2", "--out", str(out), *words]), out


def test_options_that_help_are_measured_together_and_written(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = tried(run_file.parent, monkeypatch, {}, "micro_batches=8")
    printed = " ".join(capsys.readouterr().out.split())
    assert status == 0
    assert "micro_batches=8 is slower: micro_batches=4 has 1.25 times its speed" in printed
    best = load(str(out / "best.yaml"), [])
    assert (best.micro_batches, best.data.padding, best.model.compile) == (4, "batch", "auto")
    assert not best.wrote("precision")
    assert "1.79 times the speed (1.79 to 1.79), weights: other" in printed
    rows = json.loads((out / "bench.json").read_text())["rows"]
    assert rows[-1]["keys"] == {"launch.processes": 1, "data.padding": "batch", "micro_batches": 4}
    assert len(rows[0]["rounds"]) == 4
    # decided as false on a CPU, so it is the run file
    assert not [row for row in rows if row["keys"].get("model.compile", True) is False]


def test_an_option_within_the_noise_of_the_run_file_is_not_recommended(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # the run file's first measurement, in the first round, met something else on the machine
    status, out = tried(run_file.parent, monkeypatch, {(0, 0): 1.5}, "micro_batches=8")
    assert status == 0
    assert "no option was faster in every round" in " ".join(capsys.readouterr().out.split())
    assert not (out / "best.yaml").exists()


def test_options_are_compared_on_one_number_of_processes(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run.yaml", "--options", "--processes", "1", "2"]) == 2
    assert "LS8031" in capsys.readouterr().err


def test_each_kind_of_run_has_its_options() -> None:
    assert bench_options.options_of(load(None, ["strategy.name=fsdp2"], TINY))["strategy.options.gather"]
    assert "task.loss_chunk" not in bench_options.options_of(load(None, [], TINY))
    words = TINY | {"task": {"name": "language_modeling", "loss_chunk": 64}, "micro_batches": 1}
    tried_values = bench_options.options_of(load(None, [], words))
    assert tried_values["task.loss_chunk"] == [None, bench_options.CHUNK]
    assert tried_values["micro_batches"] == [2]


def test_cuda_graphs_are_tried_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """With compiled micro-batches: beside the key that compiles them, if the run file does not."""
    together = [{"model.compile": "whole", "model.cuda_graphs": True}]
    for gpus in (0, 1):
        monkeypatch.setattr(bench_options, "gpus_of", lambda launch, gpus=gpus: gpus)
        for keys, alone, pairs in (([], None, together), (["model.compile=whole"], [True], [])):
            run = load(None, keys, TINY)
            assert bench_options.options_of(run).get("model.cuda_graphs") == (alone if gpus else None)
            assert bench_options.pairs_of(run) == (pairs if gpus else [])
