"""Keys of launchers and trackers that no other test covers change what is started or what a tracker is called with."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from lockstep.config import plugins
from lockstep.config.run import load
from lockstep.launchers import slurm
from lockstep.launchers.slurm import Slurm
from lockstep_clouds import code_bundle
from lockstep_clouds.kubernetes import Kubernetes
from support.harness import TINY, tiny
from support.kubernetes import LAUNCH
from support.kubernetes import RUN as POD


def test_grace_s_is_in_the_manifest() -> None:
    texts = []
    for more in ({}, {"grace_s": 77}):
        run = load(None, [], POD | {"launch": LAUNCH | more})
        texts.append("".join(Kubernetes().plan(run).files.values()))
    assert ["terminationGracePeriodSeconds: 77" in text for text in texts] == [False, True]


def test_requirements_are_installed_there() -> None:
    assert code_bundle.requirements(["sentencepiece==0.2.0"]).splitlines()[-1] == "sentencepiece==0.2.0"
    assert "sentencepiece" not in code_bundle.requirements([])


@pytest.mark.parametrize("detach", [False, True])
def test_detach_follows_no_job(detach: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    monkeypatch.setattr(slurm, "submit", lambda plan: "17")
    monkeypatch.setattr(Slurm, "watch", lambda self, run, record: followed.append(record.job) or 0)
    launch = TINY["launch"] | {"name": "slurm", "detach": detach, "processes": 1}
    run = load(None, [f"output={tmp_path}"], TINY | {"launch": launch})
    assert Slurm().start(Slurm().plan(run)) == 0
    assert followed == ([] if detach else ["17"])


TRACKERS: dict[str, dict[str, Any]] = {
    "wandb": {"project": "p", "entity": "e", "group": "g", "name": "n", "tags": ["t"], "notes": "m", "mode": "offline"},
    "mlflow": {"uri": "http://u.example", "experiment": "x", "name": "n", "tags": {"t": "v"}},
    "trackio": {"project": "p", "group": "g", "name": "n", "space": "u/s", "private": False},
}


def asked(tracker: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the arguments that a tracker's package, replaced by a stub, is called with, without the run's config."""
    package = MagicMock()
    package.MlflowClient.return_value.get_experiment_by_name.return_value = None
    package.init.return_value._next_step = 0
    monkeypatch.setitem(sys.modules, tracker, package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", package)
    monkeypatch.setattr("lockstep.track.mlflow._database", lambda folder: f"sqlite:///{folder}/mlflow.db")
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * size)
    monkeypatch.setattr("time.strftime", lambda *_: "now")
    run = tiny(track={"to": [tracker], tracker: options})
    kind: Any = plugins.find("track", tracker)
    kind(run, kind.Options.model_validate(run.track.options[tracker]), 0, None).open()
    client = package.MlflowClient
    calls = [package.init, client, client.return_value.create_experiment, client.return_value.create_run]
    return [
        {name: value for name, value in each.call_args.kwargs.items() if name not in ("config", "settings")}
        | {"args": [value for value in each.call_args.args if isinstance(value, str)]}
        for each in calls
        if each.call_args is not None
    ]


@pytest.mark.parametrize(("tracker", "key"), [(name, key) for name, keys in TRACKERS.items() for key in keys])
def test_each_tracker_key_changes_its_argument(tracker: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trackio.private` takes effect only with a Space."""
    beside = {"space": "u/s"} if key == "private" else {}
    without = asked(tracker, beside, monkeypatch)
    assert without == asked(tracker, beside, monkeypatch)
    found = asked(tracker, beside | {key: TRACKERS[tracker][key]}, monkeypatch)
    changed = [name for one, other in zip(without, found, strict=True) for name in other if one[name] != other[name]]
    assert len({*changed}) == (2 if key in ("uri", "space") else 1)  # where artifacts are; whether a Space is private


def test_the_table_has_all_keys_of_trackers() -> None:
    for name, keys in TRACKERS.items():
        kind: Any = plugins.find("track", name)
        assert {*kind.Options.model_fields} == {*keys}
