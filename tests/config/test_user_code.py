"""A user's code is found without being executed; editing it affects caches, checkpoints, the consistency check and code
bundles."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.manifest import Manifest
from lockstep.config import user_code
from lockstep.config.plugins import find
from lockstep.config.run import Run, load
from lockstep.data.arrow_cache import Columns
from lockstep.data.job import Job, arithmetic_of
from lockstep.data.prepare import prepare
from lockstep.training.consistency_check import disagreement, facts
from lockstep_clouds.code_bundle import modules_of
from support.contributed import example
from support.harness import TINY
from support.messages import raises

FILES = {
    "mine/__init__.py": "",
    "mine/rating.py": example("tasks/rating.py").replace(
        "class RatingOptions", "from mine.words import changed\nimport plain, json, numpy\n\n\nclass RatingOptions"
    ).replace("known(rows[options.text]", "known([changed(t) for t in rows[options.text]]"),
    "mine/words.py": 'def changed(text):\n    """As it is."""\n    from .deep import inner\n\n    return text\n',
    "mine/deep/__init__.py": "import importlib\nnamed = importlib.import_module\n",
    "mine/deep/inner.py": "import space.there\n",
    "mine/data/words.txt": "a\n",
    "space/there.py": "raise SystemExit('imported')\n",
    "plain.py": "import mine.rating  # in a circle\n",
    "unused.py": "x = 1\n",
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit within a second would not be seen
    yield tmp_path
    _forget()


def _forget() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("mine", "space", "plain")]:
        del sys.modules[name]


def run_of(**values: Any) -> Run:
    _forget()  # every process of a job imports anew
    return load(None, [], TINY | {"task": {"name": "mine.rating.Rating", "stars": "label", "levels": 6}} | values)


def prepared(told: list[str]) -> Any:
    run = run_of()
    return prepare(run, find("tasks", run.task.name), tell=told.append)  # type: ignore[arg-type]


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the built-in data with numeric labels, which the example needs."""
    from lockstep.data import source

    before = source.load

    def load_numbers(*arguments: Any) -> Any:
        found = before(*arguments)
        names = sorted(set(found.splits["train"]["label"]))
        splits = {
            split: rows.remove_columns("label").add_column("label", [names.index(x) for x in rows["label"]])
            for split, rows in found.splits.items()
        }
        return replace(found, splits=splits)

    monkeypatch.setattr(source, "load", load_numbers)


def test_imports_of_a_task_are_found_without_executing_them(here: Path) -> None:
    found = user_code.files_of(["mine.rating.Rating"])
    wanted = ["mine/__init__.py", "mine/deep/__init__.py", "mine/deep/inner.py", "mine/rating.py", "mine/words.py"]
    assert sorted(found) == [*wanted, "plain.py", "space/there.py"]
    assert all(path == here / name for name, path in found.items())
    assert not {"space.there", "plain", "mine"} & set(sys.modules)


def test_comments_docstrings_and_layout_do_not_change_the_hash(here: Path) -> None:
    path = here / "mine/words.py"
    before = user_code.fingerprint(path)
    path.write_text(
        '# why\ndef changed( text ):\n\n    """As it was."""\n    from .deep import inner\n    return (text)'
    )
    assert user_code.fingerprint(path) == before
    for other in ("return text.lower()", "return text or 0", "return 1", "return True", "return 1.0", "return None"):
        path.write_text(FILES["mine/words.py"].replace("return text", other))
        assert user_code.fingerprint(path) != before
        before = user_code.fingerprint(path)
    path.write_text("def (")  # Python will complain
    assert user_code.fingerprint(path) != before


def test_an_edited_prepare_misses_the_cache(here: Path, numbered: None) -> None:
    (here / "space/there.py").write_text("")
    told: list[str] = []
    first = prepared(told)
    (here / "mine/words.py").write_text(FILES["mine/words.py"] + "# a comment\n")
    assert prepared(told) == first
    (here / "unused.py").write_text("x = 2\n")
    assert prepared(told) == first
    (here / "mine/deep/inner.py").write_text("y = 1\n")  # changes nothing in the tokens
    same = prepared(told)
    assert same.splits != first.splits
    assert same.key == first.key
    (here / "mine/words.py").write_text(FILES["mine/words.py"].replace("return text", "return text[:5]"))
    shorter = prepared(told)
    assert shorter.key != first.key
    lengths = [int(Columns(p.splits["train"]).lengths.sum()) for p in (first, shorter)]
    assert lengths[1] < lengths[0] / 2
    assert [text.split()[0] for text in told] == ["prepared", "from", "from", "prepared", "prepared"]


def test_machines_with_other_code_do_not_train(here: Path, numbered: None) -> None:
    (here / "space/there.py").write_text("")
    job = replace(Job.of(run_of()), prepared=prepared([]))
    first = facts(job)
    (here / "mine/deep/inner.py").write_text("y = 1\n")
    said = disagreement([("a", first), ("b", facts(job))])
    assert "the code of mine/deep/inner.py" in said
    assert "the code of mine/rating.py" not in said


@pytest.mark.parametrize(
    ("name", "exact", "edited", "refused"),
    [
        ("ddp", True, "mine/words.py", True),
        ("ddp", True, "unused.py", False),
        ("plain.Strategy", True, "plain.py", True),  # which the task imports, too
        ("unused.Strategy", True, "unused.py", False),  # as every strategy, under exact
        ("unused.Strategy", False, "unused.py", True),
    ],
)
def test_a_resume_with_edited_code(name: str, exact: bool, edited: str, refused: bool, here: Path) -> None:
    run = run_of(strategy={"name": name, "exact": exact}, output=str(here / "out"))
    known: Any = type("Known", (), {"key": "k"})
    job = replace(Job.of(run_of()), run=run, prepared=known)
    folder = here / "out/checkpoints/step-000001"
    folder.mkdir(parents=True)
    (folder / "shard").write_text("")
    hashes = {"shard": hashlib.sha256(b"").hexdigest()}
    made = Manifest(1, 6, arithmetic_of(run), "k", name, 1, True, "cpu", 1, {}, {}, {}, hashes)
    made = replace(made, code=manifests.code_of(run.task, run.optim, run.strategy))
    (folder / "manifest.json").write_bytes(made.dump())
    read = manifests.read_manifest(folder)
    assert isinstance(read, Manifest)
    assert manifests.changed(job, read) is None
    (here / edited).write_text(FILES[edited] + "z = 3\n")
    reason = manifests.changed(job, read)
    assert (reason is not None) == refused
    if reason is None:
        return
    assert edited in reason
    assert "checkpoint.changed_code=allow" in reason
    with raises("LS6051"):
        manifests.check_resumable(job)
    allowed = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"changed_code": "allow"})})
    assert manifests.check_resumable(replace(job, run=allowed)) == read


def test_a_parcel_holds_everything_of_the_user_s(here: Path) -> None:
    run = run_of()
    modules = modules_of(run)
    assert sorted(modules) == sorted(set(FILES) - {"unused.py"})  # of a package its data, too
    (here / "mine/rating.py").unlink()
    with raises("LS7232", "task.name", "mine.rating"):
        modules_of(run)


def test_kubernetes_mounts_a_package_as_folders(here: Path) -> None:
    from lockstep_clouds.kubernetes import Kubernetes

    launch = {"name": "kubernetes", "image": "i", "pvc": "c", "processes": 1, "machines": 1}
    run = run_of(launch=launch)
    config, _, job = yaml.safe_load_all(next(iter(Kubernetes().plan(run).files.values())))
    items = next(v for v in job["spec"]["template"]["spec"]["volumes"] if v["name"] == "run")["configMap"]["items"]
    there = {item["path"]: config["data"][item["key"]] for item in items}
    assert there.pop("run.yaml")
    assert there == {name: text for name, text in FILES.items() if name != "unused.py"}
    assert all(set(key) <= set("abcdefghijklmnopqrstuvwxyz_.") for key in config["data"])
