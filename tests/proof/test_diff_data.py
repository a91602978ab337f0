"""`lockstep diff` of streams and of several sources: a mistake is found where it is, and so is other data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.run import Run, load
from support import stream_runs
from support.diffs import ONE, diff_output
from support.planted_mistakes import MICRO_BATCH, STEP, WEIGHT
from support.stream_runs import mixture

pytestmark = pytest.mark.processes


def of(kind: str, folder: Path, *words: str) -> Run:
    """A run on data that lie in `folder`."""
    if kind == "stream":
        return stream_runs.streamed(stream_runs.shards(folder / "shards"), *ONE, *words)
    return load(None, [*ONE, *words], stream_runs.TINY | {"data": mixture(folder)})


def trained(run: Run, output: Path) -> Path:
    run = run.model_copy(update={"output": str(output)})
    output.with_suffix(".yaml").write_text(run.dump())
    assert main(["train", str(output.with_suffix(".yaml"))]) == 0
    return output


@pytest.mark.parametrize("kind", ["stream", "sources"])
def test_a_planted_mistake_is_located(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    right = trained(of(kind, tmp_path), tmp_path / "right")
    wrong = trained(of(kind, tmp_path, "strategy.name=support.planted_mistakes.WrongLeaf"), tmp_path / "wrong")
    said = diff_output(right, wrong, capfd)
    assert f"first difference: step {STEP}," in said
    assert "both runs are bitwise equal in this step" in said
    assert f"first differing value: {wrong}, step {STEP}, " in said
    assert f"micro-batch {MICRO_BATCH}: gradient of {WEIGHT}" in said.partition("first differing value:")[2]


def test_different_source_weights_are_reported_as_different_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two mixtures are equal up to step 3, when both change a source's weight, to different values."""
    data = mixture(tmp_path)
    first = of("sources", tmp_path)
    data["sources"][1]["weight"] = [[0, 2], [3, 9]]
    second = load(None, list(ONE), stream_runs.TINY | {"data": data})
    said = diff_output(trained(first, tmp_path / "a"), trained(second, tmp_path / "b"), capfd)
    assert "data.sources" in said
    assert "first difference: step 4," in said
    assert "examples of the step" in said.partition("first differing value:")[2]


def test_a_row_of_a_stream_that_was_changed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for name in ("a", "b"):
        run = of("stream", tmp_path / name, "tokenizer.train=character")
        if name == "b":  # the words of a row, the other way round
            path = tmp_path / "b/shards/train-00.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            rows[3]["text"] = " ".join(reversed(rows[3]["text"].split()))
            stream_runs.write(path, rows)
        outputs.append(trained(run, tmp_path / name / "out"))
    said = diff_output(*outputs, capfd)
    assert "inputs of the model" in said.partition("first differing value:")[2]
