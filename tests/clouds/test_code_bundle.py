"""What travels to machines that do not see this one's files: read there, it is what is read here."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lockstep.config.run import Run, RunError
from lockstep.data import source
from lockstep_clouds import code_bundle, kubernetes_manifests
from lockstep_clouds.code_bundle import packed
from lockstep_clouds.kubernetes import Kubernetes
from support.contributed import distribution
from support.harness import tiny

NO_SOURCE = "data.source=null"


def there(run: Run, folder: Path) -> Run:
    """The run as it is there, its files put where a machine there finds them."""
    parcel = packed(run, "out", str(folder))
    assert parcel.data
    for name, file in parcel.data.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        assert not place.exists()
        place.write_bytes(file.read_bytes())
        file.unlink()  # nothing that lies here is read there
    return Run.model_validate(parcel.run.model_dump(mode="json"))  # it travels as a file


def rows_of(run: Run, columns: dict[str, str]) -> dict[str, list[Any]]:
    return {split: list(rows) for split, rows in source.load(run.data, run.seed, columns=columns).splits.items()}


def same_there(data: dict[str, Any], columns: dict[str, str], folder: Path) -> dict[str, list[Any]]:
    run = tiny(data=data)
    here = rows_of(run, columns)
    assert rows_of(there(run, folder / "far"), columns) == here
    return here


LABELLED = {"task.text": "text", "task.label": "label"}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def classes(root: Path) -> Path:
    """Write folders in IMDB's layout, with a label that looks like a pattern, compressed files and equal file names."""
    for split in ("train", "test"):
        for label in ("pos", "neg", "so[so]"):
            for name in ("1.txt", "0.txt.gz", "2"):
                write(root / split / label / name, f"{split} {label} {name}")
    return root


def test_class_folders_keep_their_labels(tmp_path: Path) -> None:
    root = classes(tmp_path / "here")
    found = same_there({"source": str(root), "layout": "class_folders"}, LABELLED, tmp_path)
    assert [row["label"] for row in found["train"]] == [*["neg"] * 3, *["pos"] * 3, *["so[so]"] * 3]


def test_class_folders_from_several_places_keep_their_files(tmp_path: Path) -> None:
    root = classes(tmp_path / "here")
    data = {"train": [str(root / "train"), str(root / "test/neg")], "layout": "class_folders"}
    found = same_there(data, LABELLED, tmp_path)
    assert [row["label"] for row in found["train"]] == [*["neg"] * 3, *["pos"] * 3, *["so[so]"] * 3, *["neg"] * 3]


@pytest.mark.parametrize("ending", ["", ".gz", ".txt", ".txt.gz"])
def test_parallel_files_keep_their_sides(ending: str, tmp_path: Path) -> None:
    for name in ("train-1", "train-2", "test"):
        for side in ("de", "en"):
            write(tmp_path / f"here/{name}.{side}{ending}", "".join(f"{side} {name} {i}\n" for i in range(3)))
    data = {"source": str(tmp_path / "here"), "layout": "parallel"}
    found = same_there(data, {"task.source": "en", "task.target": "de"}, tmp_path)
    assert [row["en"] for row in found["train"]] == [f"en train-{k} {i}" for k in (1, 2) for i in range(3)]


def test_every_source_of_a_mixture_travels(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"web {i}", "label": "pos"}) + "\n" for i in range(4))
    root = classes(tmp_path / "here")
    sources = [
        {"source": str(write(tmp_path / "here/web.jsonl.gz", rows)), "weight": 2},
        {"name": "model", "source": str(root), "layout": "class_folders", "weight": 1},
        {"name": "table", "train": [str(write(tmp_path / "here/t.csv", "a,pos\n"))], "columns": ["text", "label"],
         "weight": [[0, 1], [9, 4]]},
    ]  # fmt: skip
    found = same_there({"sources": sources}, LABELLED, tmp_path)
    assert [row["text"] for row in found["train"]][:4] == [f"web {i}" for i in range(4)]
    assert found["train"][-1]["text"] == "a"
    assert {row["label"] for row in found["test"]} == {"pos", "neg", "so[so]"}


def test_hub_sources_are_not_bundled(tmp_path: Path) -> None:
    web = str(write(tmp_path / "web.jsonl", '{"text": "a", "label": "b"}\n'))
    run = tiny(data={"sources": [web, {"source": "someone/emotion", "train": "train"}]})
    parcel = packed(run, "out", "/data")
    assert list(parcel.data) == ["sources/web/train.jsonl"]
    first, second = parcel.run.data.sources or []
    assert (first.source, first.train) == (None, ["/data/sources/web/train.jsonl"])
    assert (second.source, second.train) == ("someone/emotion", "train")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"source": "HERE/a.jsonl"}, "data.source"),
        ({"train": ["HERE/a.*"]}, "data.train"),
        ({"train": "/data/a.jsonl", "test": "HERE/a.jsonl"}, "data.test"),
        ({"sources": ["/data/b.jsonl", {"name": "web", "source": "HERE/a.jsonl"}]}, "data.sources: web: source"),
    ],
)
def test_paths_that_no_pod_sees_are_named(data: dict[str, Any], key: str, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "{}\n")
    data = json.loads(json.dumps(data).replace("HERE", str(tmp_path)))
    launch = {"name": "kubernetes", "image": "i", "pvc": "c", "processes": 1, "volumes": ["claim=/data"]}
    run = tiny(data=data, launch=launch)
    with pytest.raises(RunError) as caught:
        kubernetes_manifests.check(run, Kubernetes().options(run.launch))
    assert str(caught.value).startswith(f"{key}: {tmp_path}/a.")
    data = json.loads(json.dumps(data).replace(str(tmp_path), "/data"))
    run = tiny(data=data, launch=launch)
    kubernetes_manifests.check(run, Kubernetes().options(run.launch))


@pytest.mark.processes
@pytest.mark.parametrize("folder", ["src", "site-packages"])
def test_a_plug_in_of_another_distribution_travels_or_is_required(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in in its own folder is sent with the metadata by which it is found; an installed one is required."""
    site = tmp_path / folder
    (distribution(tmp_path / "from") / "src").rename(site)
    info = site / "lockstep_gossip-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-gossip\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lockstep.strategies]\ngossip = lockstep_gossip.gossip:Gossip\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in ("METADATA", "entry_points.txt")))
    monkeypatch.syspath_prepend(site)
    run = tiny("strategy.name=gossip")
    modules, wanted = code_bundle.modules_of(run), code_bundle.distributions_of(run)
    if folder == "site-packages":
        assert (modules, wanted) == ({}, ["lockstep-gossip==1.0"])
        return
    assert wanted == []
    with tarfile.open(fileobj=io.BytesIO(code_bundle.archive({}, modules))) as tar:
        tar.extractall(there := tmp_path / "there", filter="data")
    code = "from lockstep.config import plugins; print(plugins.find('strategies', 'gossip').__module__)"
    variables = {**os.environ, "PYTHONPATH": str(there)}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, cwd=there)
    assert done.stdout == "lockstep_gossip.gossip\n", done.stderr


def test_the_archive_has_all_distributions_of_ours_that_lockstep_needs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = {line.partition("==")[0].replace("-", "_") for line in project["dependencies"] if "lockstep" in line}
    with tarfile.open(fileobj=io.BytesIO(code_bundle.archive({}, {}))) as tar:
        names = tar.getnames()
    assert needed == {"lockstep_trace", "lockstep_trace_report"}
    assert {name.partition("/")[0] for name in names} == needed | {"lockstep", "lockstep_clouds"}
    assert "lockstep_trace_report/pages/base.html.jinja" in names
    assert not any(line.startswith("lockstep") for line in code_bundle.requirements([]).splitlines())
