"""The task `module`: which data sets it takes and how items reach the model; what it exports."""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.checkpoint.manifest import code_of
from lockstep.config.run import Run, RunError, load
from lockstep.data.job import Job
from lockstep.data.prepare import prepare
from lockstep.tasks.module import Module
from lockstep.tasks.modules.dataset import INPUT, OwnCode, model
from support.messages import raises
from support.own_modules import MEAN, NET, NET_FUNCTIONS, found_of, job

HEAD = MEAN.partition("def data")[0]
TAIL = "\n\ndef loss(outputs, answers):\n    return torch.nn.functional.mse_loss(outputs, answers)\n\n"
PAIRS = "[(torch.randn(3), torch.randn(2)) for _ in range({})]"


def of_data(data: str) -> str:
    return f"{HEAD}def data():\n    return {data}\n{TAIL}"


def task_of(run: Run) -> Module:
    return Module(run).opened(Job.of(run).with_data().data)


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (PAIRS.format(20), {"train": 18, "validation": 2}),
        (f"{PAIRS.format(20)}, {PAIRS.format(5)}", {"train": 20, "validation": 5}),
        (f"{{'train': {PAIRS.format(20)}, 'dev': {PAIRS.format(5)}, 'test': {PAIRS.format(4)}}}",
         {"train": 20, "validation": 5, "test": 4}),
    ],
)  # fmt: skip
def test_data_sets_by_split(data: str, sizes: dict[str, int], module_folder: Path) -> None:
    task = task_of(job(module_folder, of_data(data)))
    assert {split: len(columns) for split, columns in task.splits.items()} == sizes
    limited = task_of(job(module_folder, of_data(data), "data.limit=3", "batch_size=4"))
    assert max(map(len, limited.splits.values())) <= 3


REFUSED = {
    "(x for x in [1])": "is a generator, which can only be iterated from its start",
    "torch.utils.data.DataLoader([1])": "is a DataLoader; return its data set",
    "[]": "is empty",
    "{'trian': [1]}": "returns an unknown split 'trian'; known are train,",
    "{'test': [1]}": "returns no train split, only test",
    "{'train': [1], 'val': [1], 'dev': [1]}": "returns val and dev, which are the same split",
    "[1 / 0]": "failed: ZeroDivisionError: division by zero (mine_",
    "[torch.randn(i + 1) for i in range(30)]": "default_collate cannot make a batch of these items",
    "[(torch.randn(3), 1, 2)] * 30": "a batch is a sequence of 3 values",
    "[{'x': torch.randn(3)}] * 30": "forward takes input, but a batch has the keys x",
}


@pytest.mark.parametrize("data", REFUSED)
def test_data_that_cannot_be_used_are_refused(data: str, module_folder: Path) -> None:
    with pytest.raises(RunError) as caught:
        found_of(job(module_folder, of_data(data)))
    assert REFUSED[data] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hugging_face_data_set_gives_tensors(module_folder: Path) -> None:
    rows = "{'input': [[float(i), 1.0, 2.0] for i in range(30)], 'answers': [[1.0, 2.0]] * 30}"
    code = of_data(f"datasets.Dataset.from_dict({rows})").replace("import random", "import datasets")
    task = task_of(job(module_folder, code.replace("(outputs, answers)\n", "(outputs, answers['answers'])\n")))
    batch = task.collate(task.splits["train"], np.arange(4), 0).inputs[INPUT].batch  # type: ignore[attr-defined]
    assert batch["input"].shape == (4, 3)


@pytest.mark.processes
def test_random_draws_of_an_item_depend_only_on_seed_step_and_position(module_folder: Path) -> None:
    task = task_of(job(module_folder, NET, functions=NET_FUNCTIONS))
    columns = task.splits["train"]

    def pixels(rows: list[int], index: int, step: int) -> torch.Tensor:
        random.seed(index * 7), np.random.seed(1), torch.manual_seed(step * 3)
        micro: Any = task.collate_at(columns, np.array(rows), index, step)
        return micro.inputs[INPUT].batch["pixels"]

    first = pixels([3, 4, 5], 0, 7)
    assert torch.equal(first[2], pixels([5, 9], 3, 7)[0])
    assert not torch.equal(first[2], pixels([5, 9], 3, 8)[0])
    jobs = [(7, 0, np.array([3, 4, 5])), (7, 1, np.array([5, 9])), (8, 0, np.arange(0))]
    task.run = task.run.model_copy(update={"data": task.run.data.model_copy(update={"workers": 2})})
    made: list[Any] = list(task.in_workers(columns, jobs))  # type: ignore[arg-type]
    assert torch.equal(made[0].inputs[INPUT].batch["pixels"], first)
    assert [micro.index for micro in made] == [0, 1, 0]
    assert made[2].inputs[INPUT].blank
    assert not (made[2].targets >= 0).any()


def test_an_error_in_an_item_names_it(module_folder: Path) -> None:
    run = job(module_folder, NET.replace("noise = ", "assert i != 50 or random.getstate() is None\n        noise = "))
    with raises("LS3204", "50"):
        found_of(run)


@pytest.mark.processes
def test_an_error_in_a_worker_is_one_line(module_folder: Path) -> None:
    code = NET.replace("noise = ", "assert torch.utils.data.get_worker_info() is None, 'here'\n        noise = ")
    task = task_of(job(module_folder, code, "data.workers=1"))
    with pytest.raises(RunError) as caught:
        list(task.in_workers(task.splits["train"], [(0, 0, np.array([3]))]))  # type: ignore[arg-type]
    assert re.fullmatch(
        r"task\.data: mine_\w+\.data: item 3 failed: AssertionError: here \(mine.*\) \[LS3204\]", str(caught.value)
    )


def test_a_batch_of_targets_that_differ_from_the_first_count_is_refused(module_folder: Path) -> None:
    code = of_data(PAIRS.format(20)).replace("answers)\n\n", "answers, reduction='sum')\n\n")
    code += "\n\ndef targets(item):\n    return 1 + int(2 * torch.rand(()))\n"
    task = task_of(job(module_folder, code, functions=("targets",)))
    with raises("LS3218"):
        [task.collate_at(task.splits["train"], np.arange(18), 0, step) for step in range(9)]


MEASURED = (
    of_data("[(torch.full((3,), i % 7 + 1.0), torch.randn(2)) for i in range(200)]")
    + """

STEP = 1


def helper(item):
    return int(item[0][0]) * STEP


def length(item):
    return helper(item)


def longer(item):
    return helper(item) + 1


def targets(item):
    return 2 * helper(item)
"""
)


@pytest.mark.parametrize(
    "change",
    ["task.length", "task.length=longer", "task.targets", "STEP = 2", "data.limit=50", "seed=1", "drawn", "factor"],
)
def test_a_cache_that_other_runs_filled_gives_the_same_lengths(
    change: str, module_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever what is measured hangs on: the functions, what they call, the items that are asked about, and what these
    draw."""
    code = MEASURED.replace("answers)\n\n", "answers, reduction='sum')\n\n")
    code = code.replace("def data():", "def data(factor=1):").replace("torch.full((3,), ", "torch.full((3,), factor * ")
    if change == "drawn":
        code = code.replace("int(item[0][0])", "1 + int(9 * torch.rand(()))")
    first = job(module_folder, code)
    module = str(first.task.options["model"]).partition(".")[0]
    measured = [] if change.startswith("task.") else [f"task.length={module}.length"]
    prepare(job(module_folder, code, *measured), Module)
    key, _, value = change.partition("=")
    name = f"{module}.{value or key.removeprefix('task.')}"
    keys = (
        [f"{key}={name}"] if key.startswith("task.") else measured + ([change] if key in ("data.limit", "seed") else [])
    )
    if change == "drawn":
        keys.append("seed=2")
    if change == "factor":
        keys.append("task.data_arguments.factor=3")
    if change == "STEP = 2":
        code = code.replace("STEP = 1", change)
        (module_folder / f"{module}.py").write_text(code)
        del sys.modules[module]
    run = load(None, keys, job(module_folder, code).model_dump() | {"task": first.task.model_dump()})
    kept = task_of(run)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(module_folder / "another"))
    fresh = task_of(run)
    for split in fresh.splits:
        for column in ("lengths", "targets"):
            found, wanted = (getattr(task.splits[split], column).tolist() for task in (kept, fresh))
            assert found == wanted
    assert kept.prepared.key == fresh.prepared.key


def test_an_item_that_has_changed_is_measured_again(module_folder: Path) -> None:
    """One of those that are not looked at when a run starts: the first batch that holds it says so."""
    code = of_data("[(torch.full((3,), n), torch.randn(2)) for n in eval(open(PLACE).read())]")
    code += "\n\ndef length(item):\n    return int(item[0][0]) + int(SPREAD * torch.rand(()))\n"
    (place := module_folder / "numbers").write_text(repr([1.0] * 300))
    for spread in (0, 5):
        place.write_text(repr([1.0] * 300))
        run = job(
            module_folder, code.replace("PLACE", repr(str(place))).replace("SPREAD", str(spread)), functions=("length",)
        )
        before = task_of(run)
        everything = np.arange(len(before.splits["train"]))
        before.collate_at(before.splits["train"], everything, 0, 3)  # drawn anew, which is as it should be
        numbers = [1.0] * 300
        numbers[int(before.sets["train"][1][1])] = 9.0
        place.write_text(repr(numbers))
        assert prepare(run, Module).key == before.prepared.key
        changed = task_of(run)
        with raises("LS3219", "task.length: item ", "" if spread else "had 1 when"):
            changed.collate_at(changed.splits["train"], everything, 0, 3)
        after = task_of(run)
        assert after.prepared.key != before.prepared.key
        after.collate_at(after.splits["train"], everything, 0, 3)


def test_other_data_have_another_key(module_folder: Path) -> None:
    code = of_data("[(torch.full((3,), float(open(PLACE).read())), torch.randn(2)) for _ in range(20)]")
    (place := module_folder / "number").write_text("1")
    run = job(module_folder, code.replace("PLACE", repr(str(place))))
    first = prepare(run, Module)
    assert prepare(run, Module) == first
    place.write_text("2")
    assert prepare(run, Module).key != first.key


def test_the_export_is_loaded_again_by_its_import_path(module_folder: Path) -> None:
    run = job(module_folder, MEAN)
    model = task_of(run).model()
    (module_folder / "out/export").mkdir(parents=True)
    task_of(run).write(module_folder / "out/export", model.state_dict())
    assert json.loads((module_folder / "out/export/config.json").read_text())["model"] == run.task.options["model"]
    loaded = lockstep.load(module_folder / "out")
    assert not loaded.training
    inputs = torch.randn(4, 3)
    assert torch.equal(loaded(inputs), model.eval()(inputs))
    with open(module_folder / "out/export/model.safetensors", "ab") as file:
        file.write(b"x")  # damaged: an error of safetensors' own class
    with raises("LS3258"):
        lockstep.load(module_folder / "out")
    (module_folder / "out/export/config.json").write_text("{}")
    with raises("LS3257"):
        lockstep.load(module_folder / "out")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "model.type=gpt2",
            "model: has no effect with the task module, because task.model builds the model (on the command",
        ),
        ("data.source=x", "data.source: has no effect with the task module, because task.data creates the data sets"),
        ("task.loss=null", "task.loss: "),
        ("task.metrics=metrics", "task.metrics: 'metrics' does not name a file; write my_file.metrics"),
        ("task.metrics=nowhere.metrics", "task.metrics: cannot import 'nowhere.metrics'"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(override: str, said: str, module_folder: Path) -> None:
    with pytest.raises(RunError) as caught:
        found_of(job(module_folder, MEAN, override))
    assert said in str(caught.value)


def test_the_files_of_its_functions_are_what_a_checkpoint_compares(module_folder: Path) -> None:
    run = job(module_folder, MEAN, "task.loss=torch.nn.functional.cross_entropy")
    file = str(run.task.options["model"]).partition(".")[0] + ".py"
    assert set(code_of(run.task, run.optim, run.strategy)) == {file}
    before = code_of(run.task, run.optim, run.strategy)
    (module_folder / file).write_text(MEAN.replace("Linear(3, 8)", "Linear(3, 9)"))
    assert code_of(run.task, run.optim, run.strategy) != before


BUILDS = {
    "orthogonal": "nn.utils.parametrizations.orthogonal(nn.Linear(3, 2))",
    "reads": "nn.Sequential(nn.Linear(3, 2), *read(torch.randn(2)))",
}
READ = """
def read(value):
    try:
        return [nn.Linear(2, 2)] if value.sum().item() < 100 else []
    except Exception:
        return []


def build():
    return"""


@pytest.mark.parametrize("build", BUILDS)
def test_an_empty_model_has_the_weights_and_buffers_of_the_real_one(build: str, module_folder: Path) -> None:
    """Also if an operation fails on the meta device and the failure is suppressed, as torch's `orthogonal` does: ranks
    that built an empty model lacked a buffer, which ended in gloo's SIGABRT under zero3."""
    code = re.sub(r"\ndef build\(\):\n    return .*", f"{READ} {BUILDS[build]}", MEAN)
    run = job(module_folder, code)
    real, empty = (model(OwnCode.of(run), empty=empty).state_dict() for empty in (False, True))
    assert {tensor.device.type for tensor in empty.values()} == {"meta"}
    assert {n: t.shape for n, t in real.items()} == {n: t.shape for n, t in empty.items()}
