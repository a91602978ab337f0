"""Plug-ins of other distributions are found by entry points, listed without import, and refused if a name is ambiguous.
The distribution of docs/how-to/plug-ins is built, installed and used in training."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep import commands
from lockstep.cli import main
from lockstep.commands.before_a_run import listed
from lockstep.config import plugins, user_code
from lockstep.config.run import load
from support.command import LOCKSTEP, Process, ended, start, start_anew
from support.contributed import distribution, example
from support.messages import raises


def installed(site: Path, name: str, entries: dict[str, dict[str, str]], version: str = "1.0") -> None:
    """Write the metadata of a distribution to a folder of sys.path, as pip does."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in told.items()) for group, told in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in which Python looks for modules and distributions."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def gossip(site: Path) -> Iterator[Path]:
    """Return the strategy and the command of docs/how-to/plug-ins, without the build."""
    source = distribution(site.parent) / "src/lockstep_gossip"
    source.rename(site / "lockstep_gossip")
    entries = {
        "lockstep.strategies": {"gossip": "lockstep_gossip.gossip:Gossip"},
        "lockstep.commands": {"weights": "lockstep_gossip.weights"},
    }
    installed(site, "lockstep-gossip", entries)
    yield site / "lockstep_gossip"
    for name in [name for name in sys.modules if name.startswith("lockstep_gossip")]:
        del sys.modules[name]


def test_listing_imports_nothing_of_what_it_lists(gossip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gossip" in plugins.names("strategies")
    assert "gossip" not in plugins.built_in("strategies")
    (row,) = [row for row in listed("strategies") if row["name"] == "gossip"]
    assert row["summary"].startswith("All-gather by hand")
    assert (row["results"], row["ready"]) == ("same bits", True)  # as its base says, `ReplicatedStrategy`
    assert row["distribution"] == "lockstep-gossip 1.0"
    assert main(["list"]) == 0
    assert re.search(r"^  gossip +same bits +ready +All-gather by hand", capsys.readouterr().out, re.MULTILINE)
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert "\nCommands of other distributions:\n  weights     show the names and shapes" in overview
    assert "(lockstep-gossip 1.0)" in overview
    assert "lockstep_gossip" not in sys.modules
    found = plugins.find("strategies", "gossip")
    assert (found.__name__, found.__module__) == ("Gossip", "lockstep_gossip.gossip")
    assert "lockstep_gossip.gossip" in sys.modules  # the control: what is used is imported


def test_a_command_of_another_distribution(gossip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", str(tmp_path)]) == 2
    assert "holds no export: train the run to its end" in capsys.readouterr().err
    assert main(["weight", str(tmp_path)]) == 2
    assert "unknown command 'weight'; did you mean 'weights'?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["weights", "--help"])
    assert "usage: lockstep weights" in (said := capsys.readouterr().out)
    assert "show the names and shapes of an exported model's weights" in said


MORE = '''"""Adds --greet to `lockstep list`."""


def list_arguments(parser):
    parser.add_argument("--greet", action="store_true")


def run_list(known):
    if not known.greet:
        return None
    print("hello")
    return 75
'''


def test_options_of_another_distribution(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "greeting_more.py").write_text(MORE)
    installed(site, "greeting", {"lockstep.commands": {"list": "greeting_more"}})
    assert main(["list", "--greet"]) == 75
    assert capsys.readouterr().out == "hello\n"
    assert main(["--help"]) == 0
    assert "greeting" not in capsys.readouterr().out  # no command of its own
    assert next(module.__name__ for module in commands.modules_of("list")) == "greeting_more"
    assert main(["doctor", "--greet"]) == 2
    assert "unknown argument '--greet'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entries", "name", "said"),
    [
        (
            [("a", "single")],
            "single",
            "strategy 'single' is built into lockstep, and a 1.0 registers the same name; uninstall that",
        ),
        (
            [("a", "mine"), ("b", "mine")],
            "mine",
            "strategy 'mine' is registered by a 1.0 and b 1.0; uninstall all but one",
        ),
        ([("a", "mine")], "mine", "strategy 'mine' of a 1.0 cannot be loaded: No module named 'a_plugin'"),
        (
            [("json", "mine")],
            "mine",
            "of json 1.0 is json_plugin:Mine, which does not inherit from lockstep's class",
        ),
        ([("broken", "mine")], "mine", "strategy 'mine' of broken 1.0 cannot be loaded: division by zero"),
        ([("a", "mine")], "mien", "unknown strategy 'mien'; did you mean 'mine'? known are"),
    ],
)
def test_ambiguous_entry_points_are_refused(
    entries: list[tuple[str, str]], name: str, said: str, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "json_plugin.py").write_text("class Mine:\n    pass\n")
    (site / "broken_plugin.py").write_text("1 / 0\n")
    for owner, entry in entries:
        installed(site, owner, {"lockstep.strategies": {entry: f"{owner}_plugin:Mine"}})
    with pytest.raises(plugins.PluginError) as caught:
        plugins.find("strategies", name)
    assert said in str(caught.value)
    assert main(["plan", f"strategy.name={name}"]) == 2
    assert capsys.readouterr().err.startswith("lockstep: strategy.name: ")
    assert len(dict(plugins.loadable("optimizers"))) == len(plugins.built_in("optimizers"))  # no other is touched


def test_a_broken_plug_in_hides_no_message(site: Path) -> None:
    """The message about an unknown key searches the keys of all plug-ins, and skips those that cannot be loaded."""
    installed(site, "broken", {f"lockstep.{kind}": {"mine": "not_there:Mine"} for kind in ("tasks", "launchers")})
    with raises("LS1000", "launch.machnes"):
        load(None, ["launch.machnes=2"], {"data": {"source": "builtin/emotion"}, "model": {"type": "gpt2"}})


def test_a_checkpoint_compares_the_source_of_a_plug_in(gossip: Path) -> None:
    run = load(None, ["strategy.name=gossip"], {"data": {"source": "builtin/emotion"}, "model": {"type": "gpt2"}})
    named = user_code.named(run.task, run.optim, run.strategy)
    assert named["strategy.name"] == "lockstep_gossip.gossip.Gossip"
    before = user_code.hashes_of(named.values())
    assert before.keys() == {"lockstep_gossip/__init__.py", "lockstep_gossip/gossip.py"}
    (gossip / "gossip.py").write_text(example("strategies/gossip.py") + "\nOTHER = 1\n")
    assert user_code.hashes_of(named.values()) != before
    assert "strategy.name" not in user_code.named(run.task, run.optim)


@pytest.mark.processes
def test_the_distribution_of_contributing_is_installed_and_trains(tmp_path: Path, cache: Path) -> None:
    """pip builds and installs it like a user's distribution, without contacting a registry."""
    source, site = distribution(tmp_path), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--root-user-action=ignore"]
    alone = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *alone, "--target", str(site), str(source)], check=True)
    (found,) = importlib.metadata.distributions(name="lockstep-gossip", path=[str(site)])
    assert {entry.group for entry in found.entry_points} <= set(plugins.GROUPS.values())
    path = os.pathsep.join([str(site), str(Path(lockstep.__file__).parents[1])])
    model = "model={type: gpt2, config: {n_layer: 1, n_head: 2, n_embd: 16, n_positions: 16}}"
    words = ["name=x", "data={source: builtin/emotion, max_length: 16, limit: 40}", "steps=2", "batch_size=8", model]
    words += ["micro_batches=4", "launch={device: cpu, threads: 1}", "tokenizer={train: bpe, vocab_size: 300}"]

    def command(*arguments: str, begin: Callable[..., Process] = start) -> str:
        status, out, err = ended(begin([*LOCKSTEP, *arguments], tmp_path, cache, PYTHONPATH=path))
        assert status == 0, out + err
        return out

    hashes = []
    for name, processes, begin in (("single", 1, start), ("gossip", 2, start_anew)):
        keys = (f"strategy.name={name}", f"launch.processes={processes}", f"output={name}")
        command("train", *words, *keys, begin=begin)
        hashes.append((tmp_path / name / "export/model.safetensors").read_bytes())
    assert hashes[0] == hashes[1]
    assert "lm_head" in (shown := command("weights", "gossip")) or "wte.weight" in shown
