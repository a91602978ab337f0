"""A plug-in is a class that inherits from the interface: found by its file's text, and nothing is registered."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from lockstep.config import plugins
from lockstep.strategies.replicated import ReplicatedStrategy
from lockstep.strategies.strategy import Strategy
from support.messages import raises

KINDS = ("tasks", "strategies", "optimizers", "launchers", "track")


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_is_a_plug_in_and_no_base_is_one(kind: str) -> None:
    names = plugins.names(kind)
    assert names == sorted(set(names))
    for name in names:
        found = plugins.find(kind, name)
        assert found.plugin == kind  # type: ignore[attr-defined]
        assert "plugin" not in vars(found)
    for base in ("replicated", "fsdp2_step", "observer", "strategy", "text_task", "abilities", "launcher", "console"):
        assert base not in names


_BASE = "from lockstep.strategies.replicated import ReplicatedStrategy"


def test_a_base_says_so_itself() -> None:
    assert {"plugin"} <= vars(ReplicatedStrategy).keys() & vars(Strategy).keys()
    with raises("LS1098", "'ddp'", error=plugins.PluginError):
        plugins.find("strategies", "dpd")


@pytest.mark.parametrize(
    ("text", "is_plugin"),
    [
        (f"{_BASE}\n\n\nclass Mine(ReplicatedStrategy):\n    exact = True\n", True),
        ("from lockstep.strategies.strategy import (\n    Strategy,\n)\n\n\nclass Mine(Strategy):\n    pass\n", True),
        (f"{_BASE}\n\n\nclass _Mine(ReplicatedStrategy):\n    exact = True\n", True),
        (f"{_BASE}\n\n\nclass Mine(ReplicatedStrategy):\n    plugin = 'strategies'\n", False),
        ("from lockstep.tasks.task import Task\n\n\nclass Mine(Task):\n    pass\n", False),
        ("class Mine:\n    pass\n", False),
        ("NUMBER = 1\n", False),
    ],
)
def test_text_alone_says_what_is_one(text: str, is_plugin: bool, tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text(text)
    public = "_Mine" not in text
    named = any(plugins._inherits(file, name, "Strategy") for name in plugins._classes(file))
    assert named == (is_plugin and public)


def test_a_package_older_than_lockstep_was_tried_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=2.11,<2.14", 'peft>=0.18,<0.22; extra == "peft"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(plugins, "_requirements", plugins._requirements.__wrapped__)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": "2.15.0", "peft": "0.17.1"}[name])
    plugins.refuse_old(["torch"])  # newer ones are tried at one's own risk
    with raises("LS1094", "0.17.1", "'peft>=0.18'"):
        plugins.refuse_old(["torch", "peft"])
