"""Image classification: class folders and parquet, ViT and a convolutional family with batch norm, the same bits on any
number of processes, and an export that transformers reads."""

import io
import json
import shutil
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from lockstep.config import plugins
from lockstep.config.run import Run, RunError, load
from lockstep.config.sections import ModelSection
from lockstep.data.job import Job
from lockstep.data.prepare import prepare, warnings
from lockstep.distributed.world import World
from lockstep.lab.init import init as starter
from lockstep.lab.init.questions import MachineInfo
from lockstep.proof import against_plain
from lockstep.tasks import image_classification
from lockstep.tasks.image_classification import _opened
from lockstep.tasks.task import make_task
from lockstep.training.predicting import predictions
from lockstep.training.resolve import Machine, resolve
from support.harness import run_on, works
from support.marks import slow
from support.messages import raises

LABELS = ("bar", "cross", "disc")
VIT: dict[str, Any] = {
    "type": "vit",
    "config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 32,
        "patch_size": 8,
    },
}
RESNET = {
    "type": "resnet",
    "config": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
}
CONVNEXT = {"type": "convnext", "config": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}}
SMALL = {"size": {"shortest_edge": 32}, "crop_pct": 1.0}  # of ConvNeXT's processor, which ResNet has, too


def image(label: str, draw: np.random.Generator) -> Image.Image:
    """A bright shape on dark noise."""
    pixels = draw.integers(0, 80, (40, 48, 3)).astype(np.uint8)
    y, x = np.mgrid[:40, :48]
    row, column = draw.integers(12, 28), draw.integers(12, 36)
    where = {
        "bar": abs(y - row) < 3,
        "cross": (abs(y - row) < 2) | (abs(x - column) < 2),
        "disc": (y - row) ** 2 + (x - column) ** 2 < 64,
    }[label]
    pixels[where] = draw.integers(160, 255, 3)
    return Image.fromarray(pixels)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of labels with images of each."""
    root, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 11), ("validation", 3)):
        for label in LABELS:
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                image(label, draw).save(root / split / label / f"{number}.png")
    return root


def job(folders: Path, output: Path, *overrides: str, **values: Any) -> Run:
    run = {
        "name": "images",
        "task": {"name": "image_classification"},
        "data": {"source": str(folders), "layout": "class_folders"},
        "model": VIT,
        "steps": 4,
        "batch_size": 10,
        "micro_batches": 4,
        "optim": {"learning_rate": 5e-3},
        "evaluate": {"every": 2},
        "checkpoint": {"every": 2},
        "launch": {"device": "cpu", "threads": 1},
        "output": str(output),
    }
    return load(None, list(overrides), run | values)


def trained(run: Run, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Weights of the export."""
    assert run_on(ranks, works, run, joined=False) == [0] * ranks
    return load_file(run.folder / "export/model.safetensors")


def same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return first.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in first.items())


# -- data ------------------------------------------------------------------------------------------------------------


def test_pixels_equal_those_of_the_processor_as_one_call(folders: Path, tmp_path: Path) -> None:
    """Cut to size when the data are prepared, and normalised when a batch is made."""
    run = job(folders, tmp_path / "out")
    task = make_task(Job.of(run).with_data())
    columns = task.splits["validation"]
    batch = task.collate(columns, np.arange(len(columns)), 0)
    files = [file for label in LABELS for file in sorted((folders / "validation" / label).iterdir())]
    from transformers import ViTImageProcessorPil

    judge = ViTImageProcessorPil(size={"height": 32, "width": 32})
    whole = judge([Image.open(file) for file in files], return_tensors="pt")["pixel_values"]
    assert torch.equal(batch.inputs["pixel_values"], whole)
    assert [task.labels[code] for code in batch.targets] == [file.parent.name for file in files]
    blank = task.collate(columns, np.empty(0, np.int64), 0)
    assert int(task.targets_in_batch(blank.targets)) == 0


@pytest.mark.parametrize("kind", ["feature", "bytes"])
def test_parquet_holds_the_same_images(kind: str, folders: Path, tmp_path: Path) -> None:
    """A column of datasets' Image feature, as the Hub has it, or of bytes."""
    import datasets

    for split in ("train", "validation"):
        files = [file for label in LABELS for file in sorted((folders / split / label).iterdir())]
        rows = {"image": [file.read_bytes() for file in files], "label": [LABELS.index(f.parent.name) for f in files]}
        names = datasets.ClassLabel(names=list(LABELS))
        held = datasets.Image() if kind == "feature" else datasets.Value("binary")
        if kind == "feature":
            rows["image"] = [Image.open(io.BytesIO(file)) for file in rows["image"]]
        features = datasets.Features({"image": held, "label": names})
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{split}.parquet")
    batches = []
    for data in ({"source": str(folders), "layout": "class_folders"}, {"source": str(tmp_path)}):
        run = job(folders, tmp_path / "out", data=data)
        task = make_task(Job.of(run).with_data())
        batches.append(task.collate(task.splits["train"], np.arange(12), 0))
        assert task.labels == list(LABELS)
    assert torch.equal(batches[0].inputs["pixel_values"], batches[1].inputs["pixel_values"])
    assert torch.equal(batches[0].targets, batches[1].targets)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.max_length=64"], "data.max_length"),
        (["data.group_by_length=4"], "data.group_by_length"),
        (["tokenizer.train=bpe"], "tokenizer"),
        (["data.stream=true"], "data.stream"),
        (["task.text=text"], "task.text"),
        (["task.processor={wide: 3}"], "'wide'"),
        (["task.processor={size: {height: 64, width: 64}}"], "64 x 64, but the model expects 32 x 32"),
        (["model.type=gpt2", "model.config={}"], "gpt2"),
        (["task.class_weights={dog: 2.0}"], "dog"),
        (["task.loss=focal", "task.label_smoothing=0.1"], "LS3278"),
        (["task.focal_gamma=1"], "LS3279"),
    ],
)
def test_options_that_do_not_apply_to_images_are_refused(
    overrides: list[str], says: str, folders: Path, tmp_path: Path
) -> None:
    def checked() -> None:
        prepare(job(folders, tmp_path / "out", *overrides), plugins.find("tasks", "image_classification"))

    with pytest.raises(RunError) as caught:
        checked()
    assert says in str(caught.value)


DEIT = {"type": "deit", "config": VIT["config"]}
SQUARE = {"height": 32, "width": 32}


def test_family_with_several_model_classes_is_built_from_scratch(folders: Path, tmp_path: Path) -> None:
    """transformers has two image classifiers of DeiT, and looks through the names in its config."""
    task = {"name": "image_classification", "processor": {"size": SQUARE, "crop_size": SQUARE}}
    run = job(folders, tmp_path / "out", model=DEIT, task=task)
    model = make_task(Job.of(run).with_data()).model(empty=True)
    assert type(model).__name__ == "DeiTForImageClassification"


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        (("batch_size=27", "micro_batches=4"), "last step of an epoch (6 examples)"),
        (("batch_size=27", "micro_batches=4", "steps=1"), None),  # the short step is the second
        (("batch_size=10", "micro_batches=4"), "4 micro-batches of a step (10 examples)"),
        (("batch_size=11", "micro_batches=4"), None),
        (("batch_size=11", "micro_batches=1"), None),
    ],
)
def test_batch_norm_of_a_lone_image_is_refused(
    keys: tuple[str, ...], refused: str | None, folders: Path, tmp_path: Path
) -> None:
    """The 33rd image is alone in its step, and MobileNet's last feature map is one pixel: one value per channel."""
    processor = {"size": {"shortest_edge": 32}, "crop_size": SQUARE}
    model = {"type": "mobilenet_v1", "config": {"depth_multiplier": 0.05}}
    task = {"name": "image_classification", "processor": processor}
    run = job(folders, tmp_path / "out", *keys, model=model, task=task)
    with raises("LS3007", refused) if refused else nullcontext():
        resolve(run, Machine(), 1)


def test_a_model_without_logits_is_refused(folders: Path, tmp_path: Path) -> None:
    """transformers' PP-LCNet classifier returns its logits as last_hidden_state: each rank failed with an error of
    Python."""
    run = job(folders, tmp_path / "out", model=RESNET, task={"name": "image_classification", "processor": SMALL})
    task = image_classification.ImageClassification(run)
    prepared = prepare(run, type(task))
    task.check_prepared(prepared)
    other = run.model_copy(update={"model": ModelSection(type="pp_lcnet")})
    with raises("LS3046", "PPLCNetForImageClassification"):
        image_classification.ImageClassification(other).check_prepared(prepared)


def test_a_model_of_grey_images_is_refused_with_what_to_do(folders: Path, tmp_path: Path) -> None:
    run = job(folders, tmp_path / "out", model={**VIT, "config": {**VIT["config"], "num_channels": 1}})
    with raises("LS3042", "1 input channel, ", "as RGB, grey ones too; set it to 3"):
        prepare(run, plugins.find("tasks", "image_classification"))


def test_a_file_that_is_no_image_is_named(folders: Path, tmp_path: Path) -> None:
    for label in LABELS[:2]:
        (tmp_path / "train" / label).mkdir(parents=True)
        for number in range(8):
            image(label, np.random.default_rng(number)).save(tmp_path / "train" / label / f"{number}.png")
    (tmp_path / "train" / "bar" / "1.png").write_bytes(b"no image at all")
    with raises("LS3034", str(tmp_path / "train" / "bar" / "1.png")):
        prepare(job(tmp_path, tmp_path / "out"), plugins.find("tasks", "image_classification"))
    (tmp_path / "train" / "bar" / "1.png").unlink()
    (tmp_path / "train" / "bar" / "1.txt").write_text("a text")
    with raises("LS2204"):
        prepare(job(tmp_path, tmp_path / "out"), plugins.find("tasks", "image_classification"))


@pytest.mark.parametrize(
    ("numbers", "fits"), [([[0, 200]], True), ([[0, 256]], False), ([[0.25, 0.5]], False)], ids=["8", "9", "0..1"]
)
def test_numbers_that_pillow_would_clip_are_refused(numbers: list, fits: bool) -> None:
    """Images of 16 bits and of fractions: all of them white, or black."""
    pixels = np.array(numbers)
    image = Image.fromarray(pixels.astype(np.float32 if pixels.dtype.kind == "f" else np.uint16))
    file = io.BytesIO()
    image.save(file, "TIFF")
    with nullcontext() if fits else raises("LS3044", "row 3", image.mode):
        assert np.asarray(_opened(file.getvalue(), "row 3"))[..., 0].tolist() == numbers


def test_init_writes_a_run_file_for_folders_of_images(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineInfo, "look", lambda: MachineInfo(2, 0, False, False))
    assert starter.init(tmp_path / "run.yaml", {"data": str(folders), "model": "scratch"}, [], False, None) == 0
    run = load(tmp_path / "run.yaml", [])
    assert (run.task.name, run.data.layout, run.model.type) == ("image_classification", "class_folders", "vit")
    assert {key: run.task.options[key] for key in ("image", "label")} == {"image": "image", "label": "label"}


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("model", ["vit", pytest.param("resnet", id="resnet, batch norm"), slow("convnext")])
def test_the_same_bits_on_any_number_of_processes(model: str, folders: Path, tmp_path: Path) -> None:
    task = {"name": "image_classification"} | ({} if model == "vit" else {"processor": SMALL})
    values = {"model": {"vit": VIT, "resnet": RESNET, "convnext": CONVNEXT}[model], "task": task}
    whole = trained(job(folders, tmp_path / "1", **values))
    for ranks in (2, 4):
        assert same(whole, trained(job(folders, tmp_path / str(ranks), strategy={"name": "ddp"}, **values), ranks))
    other = trained(job(folders, tmp_path / "other", seed=1, **values))
    assert not same(whole, other)  # else equal weights say nothing
    if model == "resnet":
        assert {n for n in whole if n.endswith("running_var")}


@pytest.mark.processes
@pytest.mark.parametrize("overrides", [slow("strategy.name=fsdp2"), slow("precision=bf16"), slow("optim.name=sgd")])
def test_crossed_with_strategies_precision_and_optimizers(overrides: str, folders: Path, tmp_path: Path) -> None:
    values = {"model": RESNET, "task": {"name": "image_classification", "processor": SMALL}}
    other = [] if overrides.startswith("strategy") else ["strategy.name=ddp"]
    alone = [] if overrides.startswith("strategy") else [overrides]
    first = trained(job(folders, tmp_path / "1", *alone, **values))
    assert same(first, trained(job(folders, tmp_path / "2", overrides, *other, **values), 2))


@pytest.mark.processes
def test_head_is_trained_together_with_an_adapter(folders: Path, tmp_path: Path) -> None:
    base = job(folders, tmp_path / "base", steps=1, evaluate={"every": 0}, checkpoint={"every": 0})
    before = trained(base)
    adapter = {"type": "lora", "r": 2, "target_modules": ["q_proj", "v_proj"]}
    run = job(
        folders, tmp_path / "out", model={"source": str(base.folder / "export"), "adapter": adapter, "dtype": "float32"}
    )
    after = trained(run)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert {"classifier.weight", "classifier.bias"} < changed
    assert all("classifier" in name or ".attention." in name for name in changed), changed


@pytest.mark.processes
def test_a_run_resumes_with_the_same_bits(folders: Path, tmp_path: Path) -> None:
    """From the checkpoint after step 2, the running statistics of batch norm among its tensors."""
    run = job(folders, tmp_path / "out", model=RESNET, task={"name": "image_classification", "processor": SMALL})
    whole = trained(run)
    shutil.rmtree(run.folder / "export")
    shutil.rmtree(run.folder / "checkpoints" / "step-000004")
    (run.folder / "checkpoints" / "latest").unlink(missing_ok=True)
    assert [folder.name for folder in (run.folder / "checkpoints").glob("step-*")] == ["step-000002"]
    assert same(whole, trained(run, 1))
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in steps if line["split"] == "train") == 4


@pytest.mark.processes
def test_the_export_is_one_of_transformers(folders: Path, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    run = job(folders, tmp_path / "out")
    trained(run)
    files = [str(file) for label in LABELS for file in sorted((folders / "validation" / label).iterdir())]
    export = run.folder / "export"
    model = AutoModelForImageClassification.from_pretrained(export).eval()
    processor = AutoImageProcessor.from_pretrained(export, backend="pil")
    with torch.no_grad():
        inputs = processor([Image.open(file).convert("RGB") for file in files], return_tensors="pt")
        logits = model(**inputs).logits
    own = list(predictions(run.folder, files, []))
    for answer, row in zip(own, logits.softmax(-1), strict=True):
        scores = dict(zip(LABELS, row.tolist(), strict=True))
        assert answer["scores"] == pytest.approx(scores, abs=1e-5)
        assert answer["label"] == max(scores, key=lambda label: scores[label])
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    right = sum(row.argmax() == LABELS.index(Path(f).parent.name) for row, f in zip(logits, files, strict=True))
    last = [line for line in lines if line.get("split") == "validation"][-1]
    assert last["accuracy"] == pytest.approx(int(right) / len(files))
    task: Any = plugins.find("tasks", "image_classification")
    assert [Path(row[0]).name for row in task(run).input_rows(str(folders / "validation" / "bar"))] == [
        "0.png", "1.png", "2.png"
    ]  # fmt: skip
    with raises("LS3033", "no-such.png"):
        list(predictions(run.folder, ["no-such.png"], []))


@pytest.mark.processes
def test_a_mistake_with_pixels_is_found_before_the_first_step(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain computation finds it, because it processes each image in one call."""
    run = job(folders, tmp_path / "out")
    assert run_on(1, wrong_pixels, run, joined=False) == ["found"]


def wrong_pixels(world: World, run: Run) -> str:
    from lockstep.training.errors import TrainingFailed
    from lockstep.training.resolve import for_rank
    from lockstep.training.train_job import train_job

    right = image_classification.normalized
    image_classification.normalized = lambda *some: right(*some)[..., ::-1].copy()  # mirrored
    try:
        train_job(for_rank(run, world), world)
    except TrainingFailed as caught:
        return "found" if "in this run" in str(caught) else str(caught)
    return "nothing"


def test_folders_of_classes_are_compared_with_the_plain_reference(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step and by `verify`."""
    run = job(folders, tmp_path)
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    by_scikit_learn = {"accuracy", "macro_f1"} if find_spec("sklearn") else set()
    assert {"loss"} | by_scikit_learn <= {*found.scores}
    summed: Any = image_classification.ImageClassification.loss_sum
    monkeypatch.setattr(image_classification.ImageClassification, "loss_sum", lambda self, *a: summed(self, *a) / 2)
    assert against_plain.train_beside_plain(run).differences


def test_images_that_are_all_one_picture_are_noted(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for split, count in (("train", 6), ("validation", 2)):
        for label in LABELS:
            (tmp_path / "same" / split / label).mkdir(parents=True)
            for number in range(count):
                shown = image("bar", np.random.default_rng(1)) if label != "disc" or number else image(label, draw)
                shown.save(tmp_path / "same" / split / label / f"{number}.png")
    run = job(tmp_path / "same", tmp_path / "out")
    facts = prepare(run, plugins.find("tasks", "image_classification")).facts
    assert "17 of the 18 images of train are the same picture" in facts["notes"]


def test_an_image_in_two_splits_is_named_without_its_bytes(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders, tmp_path / "data")
    shutil.copy(tmp_path / "data/train/bar/4.png", tmp_path / "data/validation/bar/again.png")
    run = job(tmp_path / "data", tmp_path / "out")
    found = prepare(run, plugins.find("tasks", run.task.name))
    (note,) = (note for note in warnings(found.facts) if "also in train" in note)
    assert "row 5 of train. Scores on them" in note


def test_a_model_that_reads_no_grid_of_pixels_is_refused() -> None:
    """ImageGPT reads colours as tokens, SigLIP 2 patches with a mask."""
    colours = transformers.ImageGPTImageProcessor(
        clusters=[[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], size={"height": 8, "width": 8}
    )
    for processor, output in ((colours, "input_ids"), (transformers.Siglip2ImageProcessor(), "spatial_shapes")):
        with raises("LS3045", output):
            image_classification._shape(ModelSection(type="vit"), processor)
