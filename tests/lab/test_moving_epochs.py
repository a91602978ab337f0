"""`lockstep init --from` for loops: how epochs end, and whether the schedule ends with them."""

import json
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

from support.moving_scripts import ACCELERATE, DDP, moved, refused

LOADER = 'DataLoader(data["train"], shuffle=True, batch_size=8)'


def rows_of(count: int) -> None:
    """Write this number of rows, and others for validation."""
    for name, rows in (("rows", count), ("dev", 8)):
        text = "".join(json.dumps({"first": f"a{i}", "second": f"b{i}", "label": i % 2}) + "\n" for i in range(rows))
        Path(f"{name}.jsonl").write_text(text)


def of_rows(text: str = ACCELERATE) -> str:
    files = "{'train': 'rows.jsonl', 'validation': 'dev.jsonl'}"
    return text.replace('load_dataset("acme/pairs")', f'load_dataset("json", data_files={files})')


DATA = ("--data", ".", "data.source=null", "data.train=rows.jsonl", "data.validation=dev.jsonl")
PLAIN = (
    ACCELERATE.replace("gradient_accumulation_steps=4, ", "")
    .replace("        with accelerator.accumulate(model):\n", "")
    .replace("len(train) * 3 // 4", "len(train) * 3")
    .replace("            ", "        ")
)
GUARDED = """    for i, batch in enumerate(train):
        loss = model(**batch).loss / 4
        accelerator.backward(loss)
        if CONDITION:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""


def accumulating(condition: str) -> str:
    """Return a script whose loop accumulates gradients by hand."""
    text = re.sub(r"    for batch in train:\n(?:.+\n)+", lambda _: GUARDED.replace("CONDITION", condition), ACCELERATE)
    return text.replace("gradient_accumulation_steps=4, ", "")


EVERY, LAST = "(i + 1) % 4 == 0", "(i + 1) % 4 == 0 or i == len(train) - 1"


def test_open_and_closed_gaps_are_listed_separately(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of a loop that the run file does not carry are on the terminal and in the file, whether keys of the
    command line replace them or not."""
    text = of_rows(PLAIN).replace(LOADER, LOADER.replace(")", ", drop_last=True)"))
    text = text.replace('DataLoader(data["validation"]', 'DataLoader(list(data["validation"])[:4]')
    text += 'model.save_pretrained("saved")\ntokenizer.save_pretrained("words")\n'
    rows_of(24)
    moved("acc.py", text, *DATA)
    said, file = capsys.readouterr().out, " ".join(Path("moved.yaml").read_text().replace("#", "").split())
    for part in ("DataLoader(drop_last=True): no rows are dropped", "[:4], batch_size=16)", "save_pretrained('saved')"):
        assert part in said, part
        assert part in file, part
    assert "words" not in said
    assert "replaced by data.validation: line" in said
    opened, _, closed = file.partition("Replaced by keys of the command line:")
    assert "[:4], batch_size=16): by data.validation" in closed
    assert "[:4]" not in opened
    assert "save_pretrained('saved')" in opened


@pytest.mark.parametrize(
    ("text", "step", "wanted"),
    [
        (PLAIN.replace(LOADER, LOADER.replace(")", ", drop_last=True)").replace('"train"]', '"train"]')), 8, "dropped"),
        (accumulating(EVERY), 32, "left over"),
        (accumulating(LAST), 32, "divided"),
        (ACCELERATE, 32, "divided"),
    ],
    ids=["drop_last", "condition", "or the last", "accelerate"],
)
def test_leftover_batches_at_the_end_of_an_epoch(
    text: str, step: int, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = {
        "dropped": "drops the leftover batches of an epoch",
        "left over": "the first step of the next epoch",
        "divided": "divides the last step of an epoch by 4 even if it has fewer batches",
    }[wanted]
    rows_of(3 * step + 5)
    said = refused("acc.py", of_rows(text), capsys, *DATA)
    assert f"{why}" in said
    assert f"({3 * step + 5} rows are 3 steps of {step} and 5 rows)" in said
    assert moved("acc.py", of_rows(text), *DATA, "epochs=3").batch_size == step  # by hand
    rows_of(3 * step)
    capsys.readouterr()
    assert moved("acc.py", of_rows(text), *DATA).epochs == 3
    assert why not in capsys.readouterr().out
    (here / "moved.yaml").unlink()
    if wanted == "divided":  # where the rows are not known, and the steps are as many
        moved("acc.py", text)
        assert f"{why}; lockstep averages over its examples, unless the rows fill all steps" in capsys.readouterr().out
    else:
        assert why in refused("acc.py", text, capsys)


def test_smaller_last_batch_becomes_a_smaller_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_of(13)
    for text in (PLAIN, PLAIN.replace(LOADER, LOADER.replace(")", ", drop_last=False)"))):
        moved("acc.py", of_rows(text), *DATA)
        assert "epoch there" not in capsys.readouterr().out


def test_a_sampler_that_leaves_out_rows(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DDP.replace("DistributedSampler(data)", "DistributedSampler(data, drop_last=True)")
    assert "DistributedSampler(drop_last=True) (the script drops" in refused("points.py", text, capsys)
    assert "batch_sampler=mine" in refused("points.py", DDP.replace("sampler=", "batch_sampler=mine, sampler="), capsys)


@pytest.mark.parametrize(
    "condition",
    [
        "(i + 1) % 4 == 0 or i == len(train)",
        "(i + 1) % 4 == 0 or len(batch) == 3",
        "(i + 1) % 4 == 0 or i == len(dev) - 1",
    ],
)
def test_a_condition_that_is_not_the_last_batch(condition: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the batches per step are unknown" in refused("acc.py", accumulating(condition), capsys)


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divided", [False, True])
def test_accelerate_advances_a_schedule_with_its_steps(divided: bool) -> None:
    """Verifies the next test's premise: over 3 epochs of 40 batches, 4 per step, a schedule that counts batches
    completes a quarter, and one that counts steps completes."""
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model, loader = torch.nn.Linear(2, 1), DataLoader(TensorDataset(torch.randn(40, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(loader) * 3 // (4 if divided else 1))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(3):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert schedule.get_last_lr() == [pytest.approx(0.0 if divided else 0.75)]


TOTAL = "num_training_steps=len(train) * 3 // 4"


@pytest.mark.parametrize(
    ("total", "wanted"),
    [
        ("len(train) * 3", "length is 3 epochs of batches, and the run's 0.75 (3 epochs of steps of 4 batches)"),
        ("math.ceil(len(train) / 4) * 2", "length is 0.5 epochs of batches"),
        ("len(train)", "length is 1 epoch of batches"),
    ],
)
def test_a_schedule_of_another_length_than_the_run(
    total: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ACCELERATE.replace(TOTAL, f"num_training_steps={total}")
    said = refused("acc.py", text, capsys)
    assert wanted in said
    assert "optim.schedule=..." in said


@pytest.mark.parametrize("total", ["math.ceil(len(train) / 4) * 3", "3 * len(train) // 4", "int(steps)"])
def test_schedules_that_end_with_the_run_are_read(total: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ACCELERATE.replace(TOTAL, f"num_training_steps={total}").replace(
        "import torch\n", "import math\nimport torch\n", 1
    )
    moved("acc.py", text.replace("schedule =", "steps = 3 * (len(train) / 4)\nschedule =", 1))
    assert "is assumed to be its length" not in capsys.readouterr().out


def test_a_schedule_of_a_length_that_only_the_data_say(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ACCELERATE.replace(TOTAL, "num_training_steps=250")
    moved("acc.py", text)
    assert "num_training_steps (250) is assumed to be its length" in capsys.readouterr().out
    moved("acc.py", text, "steps=200")  # by hand
    assert "the schedule is 250 steps long and the run 200" in capsys.readouterr().out
    (here / "moved.yaml").unlink()
    rows_of(64)
    assert "the schedule is 250 steps long and the run 6" in refused("acc.py", of_rows(text), capsys, *DATA)


def test_schedules_not_prepared_by_accelerate(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ACCELERATE.replace(
        "prepare(model, optimizer, train, dev, schedule)", "prepare(model, optimizer, train, dev)"
    )
    text = text.replace("model, optimizer, train, dev, schedule =", "model, optimizer, train, dev =")
    assert "is not prepared, so it advances with every batch" in refused("acc.py", text, capsys)
