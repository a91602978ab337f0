"""A plug-in is a class that inherits from the interface, declared in one table."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect

import pytest

from lockstep.commands.before_a_run import listed
from lockstep.config import plugins
from lockstep.strategies.single import ReplicatedStrategy
from lockstep.strategies.strategy import Strategy
from support.messages import raises
from support.places import ROOT

KINDS = ("tasks", "strategies", "optimizers", "launchers", "track")


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_is_a_plug_in_and_no_base_class(kind: str) -> None:
    names = plugins.names(kind)
    assert names == sorted(set(names))
    for name in names:
        found = plugins.find(kind, name)
        assert found.plugin == kind  # type: ignore[attr-defined]
        assert "plugin" not in vars(found)
    for base in ("fsdp2_step", "observer", "strategy", "text_task", "abilities", "launcher", "console"):
        assert base not in names


def test_base_classes_are_marked() -> None:
    assert {"plugin"} <= vars(ReplicatedStrategy).keys() & vars(Strategy).keys()
    with raises("LS1098", "'ddp'", error=plugins.PluginError):
        plugins.find("strategies", "dpd")


@pytest.mark.parametrize("kind", KINDS)
def test_every_plug_in_of_a_folder_is_declared(kind: str) -> None:
    """A class that `BUILT_IN` lacks would have no name in the run file."""
    folder = plugins._FOLDERS.get(kind, kind).replace(".", "/")
    there: dict[str, str] = {}
    for file in sorted((ROOT / "src/lockstep" / folder).glob("*.py")):
        if file.stem == "__init__":
            continue
        module = importlib.import_module(plugins._module(kind, file.stem))
        own = [each for each in vars(module).values() if inspect.isclass(each) and each.__module__ == module.__name__]
        if named := [each.__name__ for each in own if plugins._is(kind, each) and not each.__name__.startswith("_")]:
            (there[file.stem],) = named
    assert there == plugins.BUILT_IN[kind]


def test_a_package_older_than_lockstep_was_tried_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=2.11,<2.14", 'peft>=0.18,<0.22; extra == "peft"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(plugins, "_requirements", plugins._requirements.__wrapped__)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": "2.15.0", "peft": "0.17.1"}[name])
    plugins.refuse_old(["torch"])  # newer ones are tried at one's own risk
    with raises("LS1094", "0.17.1", "'peft>=0.18'"):
        plugins.refuse_old(["torch", "peft"])


@pytest.mark.parametrize(("version", "ready"), [("2.11.0", False), ("2.13.0+cpu", True), ("2.14.1", True)])
def test_a_strategy_that_needs_a_newer_torch_is_listed_as_lacking(
    version: str, ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    rows = {row["name"]: row for row in listed("strategies")}
    assert (rows["pipeline"]["ready"], rows["ddp"]["ready"]) == (ready, True)
    assert rows["pipeline"]["install"] == (None if ready else "pip install 'torch>=2.13'")
