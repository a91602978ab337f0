"""`lockstep.fit`: from a script without a main guard, from a module; and what cannot be handed to other processes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import api
from lockstep.config import plugins
from lockstep.lab import import_path
from support.command import ended, start
from support.messages import raises
from support.own_modules import MEAN

SCRIPT = f"""
import lockstep
{MEAN}
HERE = {{"launch.device": "cpu", "launch.threads": 1, "track.console": "quiet"}}
how = {{"steps": 3, "batch_size": 15, "micro_batches": 4, "overrides": HERE}}
first = lockstep.fit(build, data, loss, strategy="single", processes=1, name="first", **how)
second = lockstep.fit(build, data, loss, processes=2, name="second", **how)
ones = torch.ones(1, 3)
print("bits", lockstep.load(first)(ones).tolist() == lockstep.load(second)(ones).tolist(), second.status)


def late():
    return build()


try:
    lockstep.fit(late, data, loss)
except lockstep.RunError as error:
    print(error)
"""


@pytest.mark.processes
def test_a_script_without_a_main_guard(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "toy-script.py").write_text(SCRIPT)
    (tmp_path / "toy_script.py").write_text(SCRIPT)
    found: dict[str, list[str]] = {}
    for name in ("toy_script.py", "toy-script.py"):
        command = [sys.executable, f"../{tmp_path.name}/{name}"]  # wherever it is started from
        _, *found[name] = ended(start(command, tmp_path, cache), 400)
        assert "Traceback" not in found[name][1] or "-" in name, found[name][1]
    said = found["toy_script.py"][0]
    assert "bits True done" in said
    assert "model: late is defined after the script's first call that starts a job" in said
    assert "`import toy-script` does not import it; rename the script" in found["toy-script.py"][1]
    assert sorted(p.name for p in (tmp_path / "outputs").iterdir()) == ["first", "second"]


def test_names_of_what_a_module_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_named.py").write_text(MEAN)
    module: Any = plugins.attribute("mine_named.build").__globals__
    assert import_path.name_of(module["build"], "model") == "mine_named.build"
    with raises("LS8260"):
        import_path.name_of([1, 2], "data")
    with raises("LS8260", "<lambda>"):
        import_path.name_of(lambda: None, "model")


def test_functions_defined_in_an_interactive_session_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = type(sys)("__main__")
    exec("def build(): ...", vars(session))
    monkeypatch.setitem(sys.modules, "__main__", session)
    with raises("LS8262"):
        import_path.name_of(session.build, "model")


def test_scripts_that_exit_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_ends.py").write_text("import sys\nif len(sys.argv) != 77:\n    sys.exit('usage: ...')\n")
    with raises("LS1095", "mine_ends.py", error=plugins.PluginError):
        plugins.attribute("mine_ends.build")
    assert "mine_ends" not in sys.modules


def test_the_import_of_a_script_stops_where_it_starts_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "import lockstep\nbefore = 1\nlockstep.evaluate('nowhere')\nafter = 1\n"
    (tmp_path / "mine_stops.py").write_text(text)
    assert plugins.attribute("mine_stops.before") == 1
    with raises("LS1095", "'after'", error=plugins.PluginError):
        plugins.attribute("mine_stops.after")


def test_fit_writes_to_the_requested_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_output.py").write_text(MEAN)
    module: Any = plugins.attribute("mine_output.build").__globals__
    monkeypatch.setattr(api, "train", lambda run, show, on_event: runs.append(run))
    monkeypatch.setattr(api, "_begins", lambda: None)
    for output in (tmp_path / "here", None):
        api.fit(module["build"], module["data"], module["loss"], steps=1, output=output)
    assert [run.folder for run in runs] == [tmp_path / "here", Path("outputs/mine_output")]
